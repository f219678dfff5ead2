"""What is proposed where no run is found is what would be read."""

import io

import pytest
import torch

from auditor.discovery import discover
from auditor.errors import NothingToAuditError
from auditor.storage.memory import MemoryStore


@pytest.mark.parametrize(("key", "proposed"), [("models", False), ("model", True)])
def test_a_file_is_proposed_only_where_it_is_read_by_itself(key, proposed):
    state = torch.nn.Linear(2, 2).state_dict()
    file = io.BytesIO()
    torch.save({key: {"a": state} if key == "models" else state}, file)
    store = MemoryStore({"part_1_of_2.pth": file.getvalue()})
    with pytest.raises(NothingToAuditError) as raised:
        discover(store)
    assert ("part_1_of_2.pth is read" in str(raised.value)) == proposed
