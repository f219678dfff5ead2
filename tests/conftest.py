"""What all tests share."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("auditor.testing.adapter_contract")

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("auditor", deadline=None)
settings.load_profile("auditor")
