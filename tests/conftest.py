"""What all tests share."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("auditor.testing.adapter_contract")

# How long an example takes says more of what else the machine does than of the code. Examples are the same in every
# run, so that a failure is of the change that it comes with; `--hypothesis-profile search` draws others.
settings.register_profile("auditor", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("auditor")
