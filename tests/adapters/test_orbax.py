"""The adapter of Orbax, on what Orbax wrote; what TensorStore reads of it is kept as digests."""

import hashlib
import json

from auditor.adapters.orbax import Orbax
from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.testing.adapter_contract import AdapterContract
from tests.paths import HEALTHY as DEEPSPEED
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "orbax"
MANAGER = FIXTURES / "manager"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


def digests_of(path):
    """Name of an array on disk to the SHA-256 of its elements as TensorStore read them."""
    found = {}
    for item, arrays in EXPECTED.items():
        if (FIXTURES / item).is_relative_to(path):
            found |= {name: told.rpartition(" ")[2] for name, told in arrays.items()}
    return found


class TestContract(AdapterContract):
    adapter = Orbax()
    checkpoints = (MANAGER / "3",)
    foreign = (DEEPSPEED / "global_step10", ROOT / "tests" / "fixtures" / "dcp" / "fsdp2_2" / "step-4")

    def comparable(self, elements):
        return hashlib.sha256(elements).digest()

    def framework_arrays(self, path):
        catalog = self.catalog(LocalStore(path))
        found = digests_of(path)
        keys = {(piece.tensor, piece.key) for piece in catalog.pieces}
        assert {key for _, key in keys} == found.keys()
        named = {key: catalog.tensors[number] for number, key in keys}
        return {(tensor.role.value, tensor.name): bytes.fromhex(found[key]) for key, tensor in named.items()}


def audited(root, **settings):
    """The report of the one run below a folder of the fixtures."""
    (run,) = audit(LocalStore(root), Settings(level=Level.VALUES, **settings)).runs
    return run


def test_a_healthy_run_of_the_checkpoint_manager_holds():
    run = audited(MANAGER)
    assert [step.state.step for step in run.steps] == [1, 2, 3]
    assert not run.findings
    assert run.last_good.step == 3
