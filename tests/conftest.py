"""Failures of the contract suite are told as those of a test."""

import pytest

pytest.register_assert_rewrite("auditor.testing.adapter_contract")
