"""The adapter of plain DeepSpeed engines, on what DeepSpeed wrote."""

import math
import re

import pytest

from auditor.adapters.adapter import Folder, Match, Options
from auditor.adapters.deepspeed import DeepSpeed
from auditor.audit import audit
from auditor.model.catalog import FileState, Role
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from tests.paths import HEALTHY, ROOT, TP4
from tests.rewriting import deepspeed  # noqa: F401

FIXTURES = ROOT / "tests" / "fixtures" / "deepspeed"
ADAPTER = DeepSpeed()
RANK = re.compile(r"zero_pp_rank_(\d+)")


def merged(path):
    """Role to name to tensor, put together from zero files with torch alone, as zero_to_fp32 does it."""
    torch = pytest.importorskip("torch")

    def load(pattern):
        files = sorted(path.glob(pattern), key=lambda file: int((RANK.search(file.name) or ["", "0"])[1]))
        return [torch.load(file, weights_only=False) for file in files]

    models, zeros = load("*model_states.pt"), [file["optimizer_state_dict"] for file in load("*optim_states.pt")]
    found = {"master": {}, "first_moment": {}, "second_moment": {}}
    stage_3 = "fp32_flat_groups" in zeros[0] if zeros else False
    for group, shapes in enumerate(models[0]["param_shapes"] or ()):
        for role, tensors in found.items():
            flats = [flat(zero, role, group, stage_3) for zero in zeros]
            at = 0
            for name, shape in shapes.items():
                count = math.prod(shape)
                if stage_3:
                    length = -(-count // len(flats))
                    whole = torch.cat([part[at : at + length] for part in flats])[:count]
                    at += length
                else:
                    whole = torch.cat(flats)[at : at + count]
                    at += count
                tensors[name] = whole.view(shape)
    if not stage_3:
        buffers = models[0]["buffer_names"]
        found["parameter"] = {name: value for name, value in models[0]["module"].items() if name not in buffers}
    return found


def flat(zero, role, group, stage_3):
    if role == "master":
        return zero["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"][group]
    state = zero["optimizer_state_dict" if stage_3 else "base_optimizer_state"]["state"][group]
    return state["exp_avg" if role == "first_moment" else "exp_avg_sq"]


@pytest.mark.usefixtures("deepspeed")
class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (
        FIXTURES / "zero2_bf16" / "global_step6", FIXTURES / "zero1_bf16_fp32_grads" / "global_step2",
        FIXTURES / "zero3_bf16" / "global_step6",
    )  # fmt: skip
    foreign = (HEALTHY / "global_step10", TP4 / "global_step6", FIXTURES / "zero2_bf16")

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        return {
            (role, name): tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            for role, tensors in merged(path).items()
            for name, tensor in tensors.items()
        }


def read(store, path="", **options):
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


def objects(name, step):
    return {path.name: path.read_bytes() for path in (FIXTURES / name / f"global_step{step}").iterdir()}


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_healthy_runs_are_silent(name):
    (run,) = audit(LocalStore(FIXTURES / name)).runs
    assert run.findings == []
    assert run.last_good is not None


def test_stage_3_keeps_masters_alone():
    catalog = read(LocalStore(FIXTURES / "zero3_bf16" / "global_step6"))
    assert catalog.masters_alone
    assert {tensor.role for tensor in catalog.tensors} >= {Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT}
    assert Role.PARAMETER not in {tensor.role for tensor in catalog.tensors}


@pytest.mark.parametrize(("name", "num_files"), [("zero2_bf16", 3), ("zero3_bf16", 4)])
def test_missing_files_are_known_from_recorded_sizes(name, num_files):
    whole = objects(name, 6)
    assert len(whole) == num_files
    for lost in whole:
        left = {other: content for other, content in whole.items() if other != lost}
        if not any("model_states" in other for other in left):
            continue
        catalog = read(MemoryStore(left))
        assert [file.name for file in catalog.files if file.state is FileState.MISSING] == [lost]
