"""Megatron-LM's `distrib_optim.pt`, as megatron-core's distributed optimizer wrote it."""

import math
from argparse import Namespace

import pytest

from auditor.adapters.megatron_legacy.adapter import MegatronLegacy
from auditor.model.catalog import FileState, Role
from auditor.model.finding import Outcome
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from tests.adapters.test_dcp import digests
from tests.adapters.test_megatron_legacy import (
    FIXTURES,
    MODEL,
    STEP,
    findings_of,
    ids,
    loaded,
    merged,
    objects_of,
    read,
    saved,
    tensors_of,
)

HEALTHY, DRIFT, STAGES = (FIXTURES / name for name in ("tp2_dp2_buckets", "tp2_dp2_buckets_drift", "pp2_distributed"))
OF_DIST = FIXTURES.parent / "megatron_dist"
FILE = "distrib_optim.pt"
STATE = {"param": "master", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


def coalesced(sizes, bucket, alone):
    """Names by element, as megatron-core fills a buffer, cuts it into buckets and drops what pads their ends."""
    buffer, ends, begun = [], [], 0
    for name, size in reversed(sizes.items()):
        buffer += [""] * (-len(buffer) % 64)
        if name in alone and len(buffer) > begun:
            ends.append((begun, len(buffer)))
            buffer += [""] * (-len(buffer) % 128)
            begun = len(buffer)
        buffer += [name] * size
        if len(buffer) - begun >= bucket or name in alone:
            ends.append((begun, len(buffer)))
            buffer += [""] * (-len(buffer) % 128)
            begun = len(buffer)
    return [name for start, stop in [*ends, (begun, len(buffer))] for name in buffer[start:stop]]


def taken_apart(folder):
    """(role, key) to tensor of one rank's two files."""
    torch = pytest.importorskip("torch")
    file = loaded(folder / MODEL)
    model = {key: tensor for key, tensor in file["model"].items() if tensor is not None}
    args = file["args"]
    alone = ("embedding.word_embeddings.weight", "output_layer.weight") if args.pipeline_model_parallel_size > 1 else ()
    sizes = {key: tensor.numel() for key, tensor in model.items()}
    owners = coalesced(sizes, getattr(args, "ddp_bucket_size", math.inf), alone)
    ((flats,),) = (saved.values() for saved in [loaded(folder / FILE)[0]])
    assert flats["numel_unpadded"] == len(owners)
    found = {("parameter", key): tensor for key, tensor in model.items()}
    for key in model:
        mine = torch.tensor([name == key for name in owners])
        found |= {(role, key): flats[kept][mine].view(model[key].shape) for kept, role in STATE.items()}
    return found


class TestContract(AdapterContract):
    adapter = MegatronLegacy()
    checkpoints = (HEALTHY / STEP, STAGES / STEP)

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        arrays = {}
        for stage in (0, 1) if path.parent == STAGES else (None,):
            ranks = (0, 1) if stage is None else (0,)
            suffix = "" if stage is None else f"_{stage:03d}"
            states = [taken_apart(path / f"mp_rank_{tp:02d}{suffix}") for tp in ranks]
            for role, key in states[0]:
                whole_tensor = merged(key, [state[role, key] for state in states], gated=False)
                name = key.replace("layers.0.", f"layers.{stage or 0}.")
                name = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
                bits = torch.int16 if whole_tensor.dtype == torch.bfloat16 else torch.int32
                arrays[role, name] = whole_tensor.detach().contiguous().view(bits).numpy().tobytes()
        return arrays


# Healthy


@pytest.mark.parametrize("path", [HEALTHY, STAGES], ids=lambda path: path.name)
def test_every_master_rounds_to_its_parameter_and_nothing_is_reported(path):
    run = findings_of(objects_of(path))
    assert not run.findings
    assert run.counts("CST001")[Outcome.HOLDS] == (28 if path == STAGES else 32)
    assert not run.counts("CST001")[Outcome.UNDETERMINED]


def test_one_state_has_one_digest_here_and_by_megatrons_own_resharding():
    here, there = digests(OF_DIST / "legacy_dp2" / STEP), digests(OF_DIST / "dp2_fully_reshardable" / STEP)
    assert len(there) == 4 * 9
    assert {key: what for key, what in here.items() if key[0] != "padding"} == there


def test_the_tied_embedding_is_a_replica_over_stages_in_masters_and_moments():
    catalog = read(MemoryStore(objects_of(STAGES)), STEP)
    for role in (Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT):
        assert tensors_of(catalog, role)["embedding.word_embeddings.weight"].replica_axes == ("pp",)


# Faults


def test_drift_of_one_rank_is_found_in_masters_and_moments_with_onset():
    (finding,) = findings_of(objects_of(DRIFT)).findings
    (interval,) = finding.intervals
    assert (finding.id, interval.last_good, interval.first_bad) == ("REP001", 2, 4)
    assert {place.role for place in finding.locations} >= {Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT}
    assert "decoder.layers.0.input_layernorm.weight" in {place.tensor for place in finding.locations}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_file_is_known_and_its_tensors_are_laid_to_it(rank):
    objects = objects_of(HEALTHY)
    # One is there, so that all must be, whatever args say.
    name = f"{STEP}/mp_rank_0{rank}/{FILE}"
    del objects[name]
    (finding,) = findings_of(objects).findings
    assert (finding.id, {place.file for place in finding.locations}) == ("INT001", {name})
    catalog = read(MemoryStore(objects), STEP)
    assert [file.name for file in catalog.files if file.state is FileState.MISSING] == [name]
    assert "decoder.layers.0.mlp.linear_fc2.weight" in tensors_of(catalog, Role.MASTER)


def test_a_file_of_another_step():
    objects = objects_of(HEALTHY)
    objects[f"{STEP}/mp_rank_01/{FILE}"] = objects[f"iter_0000002/mp_rank_01/{FILE}"]
    run = findings_of(objects)
    (finding,) = run.findings
    # The save before tells that it is that one's; by itself its masters are not those of the weights.
    assert finding.id == "MOT003"
    assert {place.file for place in finding.locations} == {f"{STEP}/mp_rank_01/{FILE}"}
    alone = {name: content for name, content in objects.items() if name.startswith(STEP)}
    assert "CST001" in ids(findings_of(alone))


# What is not known


def rank_of(model, content, **args):
    more = {"tensor_model_parallel_size": 1, "use_distributed_optimizer": True, "num_layers": 1, **args}
    file = {"args": Namespace(**more), "iteration": 4, "model": model, "optimizer": {"optimizer": {"param_groups": []}}}
    return {f"{STEP}/mp_rank_00/{MODEL}": saved(file), f"{STEP}/mp_rank_00/{FILE}": saved(content)}


def flat(count, **more):
    torch = pytest.importorskip("torch")
    return {(torch.bfloat16, torch.float32): {key: torch.ones(count) for key in STATE} | more}


def halves(**shapes):
    torch = pytest.importorskip("torch")
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def masters(objects):
    assert not findings_of(objects).findings
    return tensors_of(read(MemoryStore(objects), STEP), Role.MASTER)


@pytest.mark.parametrize(("content", "reason"), [
    # The first parameter was frozen.
    (lambda torch: {0: flat(3)}, "its buffer has 3 elements, which no known order"),
    (lambda torch: {0: flat(68), 1: flat(4)}, "its buffers are not those of the model's parameters"),
    (lambda torch: [{0: flat(3)}, {0: flat(65)}, None], "which parameters each of several optimizers has"),
    # Before February 2024: a list of buckets.
    (lambda torch: {0: {torch.float32: {key: [torch.ones(3), torch.ones(65)] for key in STATE}}}, "its buffers"),
], ids=["frozen", "more", "chained", "old"])  # fmt: skip
def test_what_can_not_be_placed_is_there_without_names(content, reason):
    torch = pytest.importorskip("torch")
    found = masters(rank_of(halves(a=(65,), b=(3,)), content(torch)))
    assert found
    assert all(reason in tensor.undetermined for tensor in found.values())


def test_without_alignment_as_before_2024():
    found = masters(rank_of(halves(a=(65,), b=(3,)), {0: flat(68)}))
    assert {name: tensor.undetermined for name, tensor in found.items()} == {"a": "", "b": ""}


def test_the_first_expert_parallel_rank_keeps_what_all_of_them_share():
    model = halves(**{"a.weight": (8, 8), "decoder.layers.0.mlp.experts.local_experts.0.x": (4,)})
    sizes = {"expert_model_parallel_size": 2, "data_parallel_size": 2, "world_size": 2}
    first = rank_of(model, [{0: flat(64)}, {0: flat(4)}], **sizes)
    second = rank_of(model, [None, {0: flat(4)}], **sizes)
    objects = {name.replace("mp_rank_00", "mp_rank_00_000"): content for name, content in first.items()}
    objects |= {name.replace("mp_rank_00", "mp_rank_00_001"): content for name, content in second.items()}
    found = masters(objects)
    assert found["a.weight"].replica_axes == ()
    assert "ep" in found["a.weight"].stored_once
    assert {name for name in found if "experts" in name and "@" in name}
