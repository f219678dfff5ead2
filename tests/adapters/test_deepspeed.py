"""The adapter of plain DeepSpeed engines, on what DeepSpeed wrote."""

import math
import re

import pytest

from auditor.adapters.adapter import Folder, Match, Options
from auditor.adapters.deepspeed.adapter import DeepSpeed
from auditor.adapters.deepspeed.pipeline import DeepSpeedPipeline
from auditor.adapters.deepspeed.universal import DeepSpeedUniversal
from auditor.audit import audit
from auditor.model.catalog import FileState, Role
from auditor.model.finding import Severity
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from tests.adapters.test_dcp import digests
from tests.paths import HEALTHY, ROOT, TP4
from tests.rewriting import deepspeed  # noqa: F401

FIXTURES = ROOT / "tests" / "fixtures" / "deepspeed"
ADAPTER = DeepSpeed()
RANK = re.compile(r"zero_pp_rank_(\d+)")


def load(path, pattern):
    """The files of a pattern, in order of their data-parallel rank."""
    torch = pytest.importorskip("torch")
    files = sorted(path.glob(pattern), key=lambda file: int((RANK.search(file.name) or ["", "0"])[1]))
    return [torch.load(file, weights_only=False) for file in files]


def merged(path):
    """Role to name to tensor, put together with torch alone, as DeepSpeed's own zero_to_fp32 does it."""
    torch = pytest.importorskip("torch")
    models = load(path, "zero_pp_rank_*_model_states.pt") or load(path, "mp_rank_*_model_states.pt")
    zeros = [file["optimizer_state_dict"] for file in load(path, "*zero_pp_rank_*_optim_states.pt")]
    found = {"master": {}, "first_moment": {}, "second_moment": {}}
    stage_3 = "fp32_flat_groups" in zeros[0] if zeros else False
    for group, shapes in enumerate(models[0]["param_shapes"] or ()):
        for role, tensors in found.items():
            flats = [flat(zero, role, group, stage_3) for zero in zeros]
            if any("deepspeed_experts" in name for name in shapes):
                tensors |= experts(flats, shapes, zeros[0]["partition_count"][group])
                continue
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
        for expert in load(path, "layer_*_expert_*"):
            found["parameter"] |= expert
    found["parameter"] = found.get("parameter", {}) | {
        name: torch.cat([model["frozen_param_fragments"][name] for model in models])[: math.prod(shape)].view(shape)
        for name, shape in (models[0]["frozen_param_shapes"] or {}).items() if stage_3
    }  # fmt: skip
    return found | unpartitioned(models[0])


def experts(flats, shapes, count):
    """Experts are on every second rank the same, of two expert-parallel ranks with two experts each."""
    torch = pytest.importorskip("torch")
    found, degree = {}, len(flats) // count
    for rank in range(degree):
        whole, at = torch.cat(flats[rank::degree]), 0
        for name, shape in shapes.items():
            called = re.sub(
                r"(?<=deepspeed_experts\.)(\d+)", lambda match, rank=rank: str(int(match[1]) + 2 * rank), name
            )
            found[called] = whole[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
    return found


def unpartitioned(model):
    """Masters and moments of an engine without ZeRO, whose optimizer has the module's parameters in one group."""
    if not model["optimizer"]:
        return {}
    state = model["optimizer"].get("optimizer_state_dict", model["optimizer"])["state"]
    names = [name for name in model["module"] if name not in (*model["buffer_names"], "head.weight")]
    if len(names) != len(state):
        return {}  # Experts: the state is in files of its own.
    found = {
        role: {name: state[number][key] for number, name in enumerate(names)}
        for role, key in (("first_moment", "exp_avg"), ("second_moment", "exp_avg_sq"))
    }
    if "fp32_groups" in model["optimizer"]:
        found["master"] = dict(zip(names, model["optimizer"]["fp32_groups"][0], strict=True))
    return found


def flat(zero, role, group, stage_3):
    if role == "master":
        return zero["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"][group]
    state = zero["optimizer_state_dict" if stage_3 else "base_optimizer_state"]["state"][group]
    return state["exp_avg" if role == "first_moment" else "exp_avg_sq"]


def as_bytes(found):
    torch = pytest.importorskip("torch")
    return {
        (role, name): tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for role, tensors in found.items()
        for name, tensor in tensors.items()
    }


@pytest.mark.usefixtures("deepspeed")
class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = tuple(
        FIXTURES / name
        for name in (
            "zero2_bf16/global_step6", "zero1_bf16_fp32_grads/global_step2", "zero3_bf16/global_step6",
            "zero0_bf16/global_step2", "zero1_moe/global_step2", "zero0_moe/global_step2", "zero3_frozen/global_step2",
        )
    )  # fmt: skip
    foreign = (HEALTHY / "global_step10", TP4 / "global_step6", FIXTURES / "zero2_bf16")

    def framework_arrays(self, path):
        return as_bytes(merged(path))


class TestPipelineContract(AdapterContract):
    """Pipelines whose topology has no model axis, with fp16 and without ZeRO; the rest is in its own module."""

    adapter = DeepSpeedPipeline()
    checkpoints = (FIXTURES / "pipeline_zero1_fp16" / "global_step2", FIXTURES / "pipeline_fp32" / "global_step2")

    def framework_arrays(self, path):
        found = {}
        for file in path.glob("layer_*"):
            layer = int(file.name.split("-")[0].removeprefix("layer_"))
            tied = layer == 0 and "fp16" in str(path)
            for key, tensor in load(path, file.name)[0].items():
                if "offsets" not in key:
                    found["tied_modules.embed." + key if tied else f"{layer}.{key}"] = tensor
        return as_bytes({"parameter": found})


@pytest.mark.usefixtures("deepspeed")
class TestUniversalContract(AdapterContract):
    adapter = DeepSpeedUniversal()
    checkpoints = (
        FIXTURES / "same_universal_from_zero2" / "global_step2_universal",
        FIXTURES / "same_universal_from_zero3" / "global_step2_universal",
    )
    foreign = (FIXTURES / "same_zero2_dp3" / "global_step2", FIXTURES / "same_universal_from_zero2")

    def framework_arrays(self, path):
        names = {"fp32": "master", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
        found = {role: {} for role in names.values()}
        for folder in (path / "zero").iterdir():
            for key, role in names.items():
                if (folder / f"{key}.pt").exists() and folder.name != "embed.offsets":
                    (stored,) = load(folder, f"{key}.pt")
                    found[role][folder.name] = stored["param"] if isinstance(stored, dict) else stored
        return as_bytes(found)


@pytest.mark.usefixtures("deepspeed")
class TestTrainerContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (FIXTURES / "trainer_zero2" / "checkpoint-4", FIXTURES / "trainer_zero3" / "checkpoint-4")
    foreign = (FIXTURES / "trainer_zero2",)

    def framework_arrays(self, path):
        pytest.importorskip("torch")
        from safetensors.torch import load_file

        exported = {f"{name}@model.safetensors": value for name, value in load_file(path / "model.safetensors").items()}
        found = merged(path / "global_step4")
        return as_bytes(found | {"parameter": found["parameter"] | exported})


def read(store, path="", **options):
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


def objects(name, step):
    return {path.name: path.read_bytes() for path in (FIXTURES / name / f"global_step{step}").iterdir()}


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and not path.name.endswith("drift"))
)
def test_healthy_runs_are_silent(name):
    (run,) = audit(LocalStore(FIXTURES / name)).runs
    assert [finding.id for finding in run.findings if name != "zero2_round_robin"] == []
    assert run.last_good is not None


def test_a_mapping_by_which_only_converters_go_is_a_warning():
    """DeepSpeed records it for the order before parameters were dealt out; the buffers themselves are right."""
    (run,) = audit(LocalStore(FIXTURES / "zero2_round_robin")).runs
    (finding,) = run.findings
    assert (finding.id, finding.severity) == ("MET002", Severity.WARNING)
    assert "universal checkpoints come out wrong" in finding.locations[0].detail
    assert run.last_good.step == 2


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


# One state in many layouts

CALLED = (("tied_modules.embed.", "embed."), ("1.", "blocks.0."), ("2.", "blocks.1."), ("3.", "last."))


def plain(name):
    """A pipeline numbers its layers."""
    return next((new + name.removeprefix(old) for old, new in CALLED if name.startswith(old)), name)


def test_one_state_has_one_digest_in_every_layout():
    """Stages 1 to 3 on 2, 3 and 4 ranks, a pipeline, universal checkpoints: parameter, master and both moments."""
    roles = ("parameter", "master", "first_moment", "second_moment")
    found = {
        path.name: {
            (role, plain(name)): what
            for (role, name), what in digests(path).items()
            if role in roles and "@" not in name and name != "head.weight"
        }
        for path in sorted(FIXTURES.glob("same_*"))
    }
    assert len(found) == 12
    first = found["same_zero1_dp2"]
    assert len(first) == 4 * 18
    assert len({next(iter(what)) for what in first.values()}) == 4 * 18
    for name, tensors in found.items():
        # Stage 3 keeps no weights; of the second stage's part of a tied module the masters alone.
        assert {key: what for key, what in first.items() if key in tensors} == tensors, name
        assert first.keys() - tensors.keys() == {key for key in first if "zero3" in name and key[0] == "parameter"}
