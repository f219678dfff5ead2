"""The adapter of Megatron-LM's legacy layout, on what megatron-core trained."""

import io
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.megatron_legacy.adapter import MegatronLegacy
from auditor.adapters.megatron_names import Placed, Sizes, core_sizes_from, place
from auditor.audit import audit
from auditor.discovery import discover
from auditor.model.catalog import ProblemKind, Role
from auditor.model.mesh import Coordinate, Replicate, Shard
from auditor.model.region import Box, whole
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.testing.recording import RecordingStore
from auditor.view.assemble import read_box
from tests.paths import HEALTHY, ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "megatron_legacy"
TP2, DRIFT, LLAMA, TP2_PP2 = (FIXTURES / name for name in ("tp2", "tp2_drift", "tp2_llama", "tp2_pp2"))
STEP = "iter_0000004"
MODEL = "model_optim_rng.pt"
ADAPTER = MegatronLegacy()
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.bias")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def merged(name, parts, *, gated):
    """The whole tensor from its tensor-parallel parts, as Megatron-LM's own tools merge them."""
    import torch

    if name.endswith("linear_fc1.weight") or name.endswith(ROWS):
        if gated and "linear_fc1" in name:
            halves = [part.chunk(2) for part in parts]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        return torch.cat(parts)
    return torch.cat(parts, 1) if name.endswith(COLUMNS) else parts[0]


def named_states(file):
    """(role, key) to tensor of one loaded file; optimizer state by Megatron's order, written down once more here."""
    model = {key: tensor for key, tensor in file["model"].items() if tensor is not None}
    weights = [key for key, tensor in model.items() if tensor.dim() > 1 and not key.endswith("bias")]
    order = weights + [key for key in model if key not in weights]
    state = file["optimizer"]["optimizer"]["state"]
    masters = [tensor for group in file["optimizer"]["fp32_from_fp16_params"] for tensor in group]
    found = {("parameter", key): tensor for key, tensor in model.items()}
    for number, key in enumerate(order):
        found["first_moment", key] = state[number]["exp_avg"]
        found["second_moment", key] = state[number]["exp_avg_sq"]
        found["counter", key] = state[number]["step"]
        found["master", key] = masters[number]
    return found


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (TP2 / STEP, LLAMA / STEP, TP2_PP2 / STEP)
    foreign = (HEALTHY / "global_step10", TP2, ROOT / "tests/fixtures/torch_per_rank/healthy/step_2")

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        arrays = {}
        for stage in (0, 1) if "pp2" in str(path) else (None,):
            suffix = "" if stage is None else f"_{stage:03d}"
            files = [torch.load(path / f"mp_rank_{tp:02d}{suffix}" / MODEL, weights_only=False) for tp in (0, 1)]
            gated = files[0]["args"].swiglu
            states = [named_states(file) for file in files]
            for (role, key), tensor in states[0].items():
                whole_tensor = tensor if role == "counter" else merged(key, [s[role, key] for s in states], gated=gated)
                name = key.replace("layers.0.", f"layers.{stage or 0}.")
                if stage == 1:
                    name = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
                bits = torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32
                arrays[role, name] = whole_tensor.detach().contiguous().view(bits).numpy().tobytes()
        return arrays


# What the tests below share


def read(store, path="", **options):
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


def objects_of(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def findings_of(objects, **settings):
    (run,) = audit(MemoryStore(objects), replace(Settings(), **settings), now=1e9).runs
    return run


def ids(run):
    return {finding.id for finding in run.findings}


def tensors_of(catalog, role):
    return {tensor.name: tensor for tensor in catalog.tensors if tensor.role is role}


def saved(content):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def loaded(path):
    return pytest.importorskip("torch").load(path, weights_only=False)


def rank_file(model, *, iteration=4, **args):
    """A rank file around a hand-made model."""
    return saved({"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": iteration, **model})


def layers(torch, count, value=1.0):
    return {f"decoder.layers.{at}.input_layernorm.weight": torch.full((8,), value) for at in range(count)}


# Healthy checkpoints


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("path", [TP2, LLAMA, TP2_PP2], ids=lambda path: path.name)
def test_healthy_runs_are_silent_at_every_level(path, level):
    (run,) = audit(LocalStore(path), Settings(level=level)).runs
    assert not run.findings
    assert level is Level.NAMES or run.last_good.step == 4
    assert not run.unrecognised
    assert not [reason for identifier, reason in run.undetermined() if identifier == "REP001" and "level" not in reason]


def test_mesh_follows_args():
    mesh = read(LocalStore(TP2_PP2 / STEP)).mesh
    assert dict(mesh.axes) == {"pp": 2, "dp": 1, "tp": 2}
    assert mesh.global_ranks(Coordinate.of(pp=1, tp=0)) == (2,)


def test_layers_are_counted_through_and_the_files_key_is_kept():
    catalog = read(LocalStore(TP2_PP2 / STEP))
    names = tensors_of(catalog, Role.PARAMETER)
    key = "self_attention.linear_qkv.weight"
    assert {f"decoder.layers.{layer}.{key}" for layer in (0, 1)} <= names.keys()
    keys = {piece.key for piece in catalog.pieces if catalog.tensors[piece.tensor].name == f"decoder.layers.1.{key}"}
    assert f"model.decoder.layers.0.{key}" in keys
    assert "optimizer.fp32_from_fp16_params.0.1" in keys


@pytest.mark.parametrize("path", [TP2, LLAMA, TP2_PP2], ids=lambda path: path.name)
def test_every_master_rounds_to_its_parameter(path):
    """That optimizer state is tied to the right names shows in the values: each master gives its weight's bits."""
    store = LocalStore(path / STEP)
    catalog = read(store)
    numbers = {(tensor.role, tensor.name): number for number, tensor in enumerate(catalog.tensors)}
    parameters = tensors_of(catalog, Role.PARAMETER)
    assert len(parameters) > 10
    for name, tensor in parameters.items():
        box = whole(tensor.shape)
        for replica in range(len(catalog.replicas[numbers[Role.PARAMETER, name]])):
            weight = read_box(store, catalog, numbers[Role.PARAMETER, name], replica, box)
            master = read_box(store, catalog, numbers[Role.MASTER, name], replica, box).view(np.uint32)
            rounded = (master + 0x7FFF + (master >> 16 & 1)) >> 16
            np.testing.assert_array_equal(rounded.astype(np.uint16), weight)


def test_the_tied_embedding_is_a_replica_over_stages_in_every_role():
    catalog = read(LocalStore(TP2_PP2 / STEP))
    for role in (Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT):
        tensors = tensors_of(catalog, role)
        assert tensors["embedding.word_embeddings.weight"].replica_axes == ("pp",)
        assert tensors["embedding.word_embeddings.weight"].shape == (32, 8)
        assert tensors["decoder.final_layernorm.weight"].replica_axes == ("tp",)
        assert "output_layer.weight" not in tensors


def test_an_output_layer_of_its_own_is_not_tied():
    output = tensors_of(read(LocalStore(LLAMA / STEP)), Role.PARAMETER)["output_layer.weight"]
    assert output.shape == (32, 8)
    assert output.replica_axes == ()


def test_gated_halves_lie_apart_in_the_whole_tensor():
    catalog = read(LocalStore(LLAMA / STEP))
    (number,) = (
        at for at, t in enumerate(catalog.tensors)
        if t.name.endswith("linear_fc1.weight") and t.role is Role.PARAMETER
    )  # fmt: skip
    regions = [
        (piece.coordinate.as_dict()["tp"], piece.region)
        for piece in catalog.pieces if piece.tensor == number
    ]  # fmt: skip
    assert catalog.tensors[number].shape == (48, 8)
    assert regions == [
        (0, Box((0, 0), (12, 8))), (0, Box((24, 0), (36, 8))), (1, Box((12, 0), (24, 8))), (1, Box((36, 0), (48, 8))),
    ]  # fmt: skip


# Names and sizes

LLAMA_ARGS = {
    "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 4, "group_query_attention": True, "num_query_groups": 2,
    "ffn_hidden_size": 24, "swiglu": True, "padded_vocab_size": 32,
}  # fmt: skip


def test_sizes_of_grouped_queries():
    assert core_sizes_from(LLAMA_ARGS, {}, 2) == Sizes(8, 24, 32, qkv=32, attention=16, head=4, gated=True)
    assert core_sizes_from(LLAMA_ARGS | {"group_query_attention": False}, {}, 2).qkv == 48
    assert core_sizes_from({"hidden_size": 8, "num_attention_heads": 2}, {}, 2).qkv == 24
    assert core_sizes_from({"hidden_size": 8}, {}, 2) == Sizes(8)


@pytest.mark.parametrize("args", [{"num_query_groups": 1}, {"num_query_groups": None}, {"num_attention_heads": None}])
def test_projections_that_can_not_be_placed_are_undetermined(args):
    sizes = core_sizes_from(LLAMA_ARGS | args, {}, 2)
    assert place("self_attention.linear_qkv.weight", (16, 8), 2, sizes, None).how is None


@pytest.mark.parametrize(("args", "rows"), [
    ({"swiglu": False}, 24), ({"ffn_hidden_size": None}, 24), ({}, 12), ({"glu_interleave_size": 32}, 24),
])  # fmt: skip
def test_a_first_projection_whose_size_does_not_fit_is_undetermined(args, rows):
    sizes = core_sizes_from(LLAMA_ARGS | args, {}, 2)
    assert place("mlp.linear_fc1.weight", (rows, 8), 2, sizes, None).how is None


CORE_PARTS = {
    "self_attention.linear_qkv.weight": ((16, 8), Shard(0)), "self_attention.linear_qkv.bias": ((16,), Shard(0)),
    "self_attention.linear_qkv.layer_norm_weight": ((8,), Replicate()),
    "self_attention.linear_proj.weight": ((8, 8), Shard(1)), "self_attention.linear_proj.bias": ((8,), Replicate()),
    "self_attention.q_layernorm.weight": ((4,), Replicate()), "mlp.linear_fc2.weight": ((8, 12), Shard(1)),
    "mlp.linear_fc1.layer_norm_bias": ((8,), Replicate()), "pre_mlp_layernorm.weight": ((8,), Replicate()),
    "final_layernorm.weight": ((8,), Replicate()), "output_layer.weight": ((16, 8), Shard(0)),
    "embedding.word_embeddings.weight": ((16, 8), Shard(0)), "position_embeddings.weight": ((5, 8), Replicate()),
}  # fmt: skip


@pytest.mark.parametrize("name", CORE_PARTS)
def test_core_names_are_placed_by_name_and_size(name):
    local, how = CORE_PARTS[name]
    sizes = core_sizes_from(LLAMA_ARGS, {}, 2)
    assert place(f"decoder.layers.3.{name}", local, 2, sizes, None) == Placed(how)
    if "position" not in name:
        assert place(f"decoder.layers.3.{name}", tuple(n + 1 for n in local), 2, sizes, None).how is None


def test_query_rows_of_old_versions_are_undetermined():
    torch = pytest.importorskip("torch")
    args = {"tensor_model_parallel_size": 2, "hidden_size": 8, "num_layers": 1, "num_attention_heads": 2}
    key = "self_attention.query_key_value.weight"
    for version, number in ((1.0, 2), (2.0, 0)):
        content = {
            "args": Namespace(**args), "checkpoint_version": version, "iteration": 4,
            "model": {"language_model": {"transformer": {f"layers.0.{key}": torch.ones(12, 8)}}},
        }  # fmt: skip
        catalog = read(MemoryStore({f"mp_rank_0{tp}/{MODEL}": saved(content) for tp in (0, 1)}))
        assert sum(bool(tensor.undetermined) for tensor in catalog.tensors) == number
        assert all(t.name.startswith(f"language_model.transformer.layers.0.{key}") for t in catalog.tensors)


# Stages and chunks


def pipeline(counts, **args):
    """Rank files of stages with so many layers; several numbers a stage are its chunks."""
    torch = pytest.importorskip("torch")
    objects = {}
    for stage, chunks in enumerate(counts):
        model = {
            "model" if len(chunks) == 1 else f"model{number}": layers(torch, count)
            for number, count in enumerate(chunks)
        }
        sizes = {"pipeline_model_parallel_size": len(counts), "num_layers": sum(map(sum, counts)), "hidden_size": 8}
        objects[f"mp_rank_00_{stage:03d}/{MODEL}"] = rank_file(model, **sizes | args)
    return objects


def layers_by_stage(catalog):
    found = {}
    for piece in catalog.pieces:
        found.setdefault(piece.coordinate.as_dict()["pp"], []).append(catalog.tensors[piece.tensor].name.split(".")[2])
    return found


def test_uneven_stages_are_counted_through():
    catalog = read(MemoryStore(pipeline([[1], [3], [2]])))
    assert layers_by_stage(catalog) == {0: ["0"], 1: ["1", "2", "3"], 2: ["4", "5"]}


def test_interleaved_chunks_run_through_all_stages_in_turn():
    catalog = read(MemoryStore(pipeline([[2, 2], [2, 2]])))
    assert layers_by_stage(catalog) == {0: ["0", "1", "4", "5"], 1: ["2", "3", "6", "7"]}


def test_a_lost_stage_does_not_move_even_stages_but_leaves_uneven_ones_unnamed():
    even, uneven = pipeline([[2], [2], [2]]), pipeline([[1], [3], [2]])
    del even[f"mp_rank_00_000/{MODEL}"], uneven[f"mp_rank_00_000/{MODEL}"]
    assert layers_by_stage(read(MemoryStore(even))) == {1: ["2", "3"], 2: ["4", "5"]}
    names = tensors_of(read(MemoryStore(uneven)), Role.PARAMETER)
    assert "decoder.layers.0.input_layernorm.weight@pp=1" in names
    assert "decoder.layers.0.input_layernorm.weight@pp=2" in names


def test_layers_that_do_not_add_up_keep_their_own_numbers():
    names = tensors_of(read(MemoryStore(pipeline([[2], [2]], num_layers=5))), Role.PARAMETER)
    assert len(names) == 4
    assert all("@pp=" in name for name in names)


# Experts


def test_expert_parallel_ranks_replicate_all_but_experts():
    torch = pytest.importorskip("torch")
    args = {"expert_model_parallel_size": 2, "data_parallel_size": 4, "num_layers": 1, "hidden_size": 8}
    model = {"model": layers(torch, 1) | {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight":
                                          torch.ones(4, 8)}}  # fmt: skip
    store = MemoryStore({f"mp_rank_00_00{ep}/{MODEL}": rank_file(model, **args) for ep in (0, 1)})
    catalog = read(store)
    assert dict(catalog.mesh.axes) == {"pp": 1, "edp": 2, "ep": 2, "cp": 1, "tp": 1}
    tensors = tensors_of(catalog, Role.PARAMETER)
    norm = tensors.pop("decoder.layers.0.input_layernorm.weight")
    assert (norm.replica_axes, norm.stored_once) == (("ep",), ("edp",))
    assert len(tensors) == 2
    assert all("experts" in tensor.undetermined for tensor in tensors.values())
    assert not catalog.problems


def test_replicas_that_were_not_written_are_undetermined():
    torch = pytest.importorskip("torch")
    args = {"tensor_model_parallel_size": 2, "world_size": 8, "num_layers": 1, "hidden_size": 8}
    objects = {
        f"{STEP}/mp_rank_0{tp}/{MODEL}": rank_file({"model": layers(torch, 1)}, rank=tp, **args) for tp in (0, 1)
    }
    run = findings_of(objects)
    assert not run.findings
    assert dict(run.mesh.axes) == {"pp": 1, "dp": 4, "tp": 2}
    assert any("stored once along dp" in reason for _, reason in run.undetermined())


# Optimizer state


def changed(edit, path=TP2):
    """A step whose rank files were loaded, edited and saved again."""
    objects = {}
    for file in sorted((path / STEP).rglob(MODEL)):
        content = loaded(file)
        edit(content)
        objects[f"{STEP}/{file.parent.name}/{MODEL}"] = saved(content)
    return objects


def drop_group_member(content):
    content["optimizer"]["optimizer"]["param_groups"][1]["params"].pop()


def swap_groups_decay(content):
    for group in content["optimizer"]["optimizer"]["param_groups"]:
        group["wd_mult"] = 1.0 - group["wd_mult"]


def move_a_master(content):
    content["optimizer"]["fp32_from_fp16_params"][0].reverse()


def chain(content):
    content["optimizer"] = [content["optimizer"], content["optimizer"]]


@pytest.mark.parametrize("edit", [drop_group_member, swap_groups_decay, move_a_master, chain])
def test_optimizer_state_that_does_not_fit_is_undetermined_and_never_guessed(edit):
    objects = changed(edit)
    catalog = read(MemoryStore(objects), STEP)
    assert all(not tensor.undetermined for tensor in tensors_of(catalog, Role.PARAMETER).values())
    for role in (Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT):
        tensors = tensors_of(catalog, role)
        assert len(tensors) >= 32
        assert all(tensor.undetermined for tensor in tensors.values())
    run = findings_of(objects)
    assert not run.findings
    assert sum(count for (identifier, _), count in run.undetermined().items() if identifier == "REP001") >= 96


def test_no_optimizer_at_all_is_fine():
    objects = changed(lambda content: content.pop("optimizer"))
    catalog = read(MemoryStore(objects), STEP)
    assert {tensor.role for tensor in catalog.tensors} == {Role.PARAMETER}
    assert not findings_of(objects).findings


# Faults


def test_drift_of_one_rank_is_found_with_onset_and_coordinate():
    (run,) = audit(LocalStore(DRIFT)).runs
    (finding,) = run.findings
    assert finding.id == "REP001"
    (interval,) = finding.intervals
    assert (interval.last_good, interval.first_bad) == (2, 4)
    assert {location.coordinate for location in finding.locations} == {Coordinate.of(tp=1)}
    assert {location.role for location in finding.locations} >= {Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT}
    assert "embedding.position_embeddings.weight" in {location.tensor for location in finding.locations}
    assert run.last_good.step == 2


def routed(rank, drift, **more):
    """A layer whose router scores four experts, on one of two tensor-parallel ranks."""
    torch = pytest.importorskip("torch")
    router = torch.arange(32.0).reshape(4, 8) + drift * rank
    weights = {"decoder.layers.0.mlp.router.weight": router, "own": torch.full((2,), float(rank))}
    sizes = {"hidden_size": 8, "num_layers": 1, "tensor_model_parallel_size": 2, "world_size": 2, **more}
    return {f"{STEP}/mp_rank_0{rank}/{MODEL}": rank_file({"model": weights}, **sizes)}


def test_a_router_that_tensor_parallel_ranks_have_otherwise():
    """pytorch/torchtitan#2387, NVIDIA/Megatron-LM#619: its gradient was taken for complete on every rank."""
    name = "decoder.layers.0.mlp.router.weight"
    (finding,) = findings_of(routed(0, 0.5, num_experts=4) | routed(1, 0.5, num_experts=4)).findings
    assert (finding.id, {place.tensor for place in finding.locations}) == ("REP001", {name})
    assert not findings_of(routed(0, 0.0, num_experts=4) | routed(1, 0.0, num_experts=4)).findings
    # Where the number of experts is not recorded, a rank's part can't be told from the whole.
    unknown = findings_of(routed(0, 0.5) | routed(1, 0.5))
    assert not unknown.findings
    assert unknown.undetermined()


def test_a_missing_rank_file_is_known_and_its_pieces_are_laid_to_it():
    objects = objects_of(TP2_PP2)
    lost = f"{STEP}/mp_rank_01_001/{MODEL}"
    del objects[lost]
    run = findings_of(objects)
    (finding,) = run.findings
    assert finding.id == "INT001"
    assert [location.file for location in finding.locations] == [lost]
    assert run.last_good.step == 2
    catalog = read(MemoryStore(objects), STEP)
    held = {catalog.tensors[piece.tensor].name for piece in catalog.pieces if catalog.files[piece.file].name == lost}
    assert "decoder.layers.1.mlp.linear_fc2.weight" in held
    assert "embedding.word_embeddings.weight" in held
    assert "INT001" in ids(findings_of(objects, level=Level.NAMES))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_damaged(share):
    objects = objects_of(TP2)
    name = f"{STEP}/mp_rank_01/{MODEL}"
    objects[name] = objects[name][: int(share * len(objects[name]))]
    run = findings_of(objects)
    (finding,) = run.findings
    assert finding.id == "INT002"
    assert [location.file for location in finding.locations] == [name]


@pytest.mark.parametrize("text", ["6", "../iter_0000004", "release", "nonsense", ""])
def test_a_dangling_tracker(text):
    run = findings_of(objects_of(TP2) | {"latest_checkpointed_iteration.txt": text.encode()})
    assert ids(run) == {"INT003"}


def test_a_copy_of_another_ranks_file():
    objects = objects_of(TP2)
    objects[f"{STEP}/mp_rank_01/{MODEL}"] = objects[f"{STEP}/mp_rank_00/{MODEL}"]
    (finding,) = [finding for finding in findings_of(objects).findings if finding.id == "INT006"]
    assert [location.file for location in finding.locations] == [f"{STEP}/mp_rank_01/{MODEL}"]


def test_swapped_rank_files():
    objects = objects_of(TP2_PP2)
    one, other = f"{STEP}/mp_rank_00_000/{MODEL}", f"{STEP}/mp_rank_01_000/{MODEL}"
    objects[one], objects[other] = objects[other], objects[one]
    finding = findings_of(objects).findings[0]
    assert finding.id == "INT006"
    assert {location.file for location in finding.locations} == {one, other}


def test_converted_checkpoints_record_one_rank_everywhere():
    assert not findings_of(changed(lambda content: setattr(content["args"], "rank", 0))).findings


def test_a_stale_file():
    objects = objects_of(TP2)
    for rank in ("mp_rank_00", "mp_rank_01"):
        stale = objects | {f"{STEP}/{rank}/{MODEL}": objects[f"iter_0000002/{rank}/{MODEL}"]}
        run = findings_of(stale)
        (finding,) = [finding for finding in run.findings if finding.id == "INT005"]
        assert [location.file for location in finding.locations] == [f"{STEP}/{rank}/{MODEL}"]
        assert run.last_good.step == 2


def fuse(content, step):
    """Let the groups alone count steps, as Apex and Transformer Engine do."""
    optimizer = content["optimizer"]["optimizer"]
    for group in optimizer["param_groups"]:
        group["step"] = step
    for kept in optimizer["state"].values():
        del kept["step"]


def test_a_fused_optimizer_that_is_at_another_step_than_its_peers():
    step = iter((4, 3))

    def edit(content):
        fuse(content, next(step))

    run = findings_of(changed(edit))
    assert ids(run) == {"INT005"}


def test_a_fused_optimizer_may_lag_behind_the_iteration():
    def edit(content):
        fuse(content, 1)

    assert not findings_of(changed(edit)).findings


def test_files_of_a_larger_mesh_are_leftovers():
    objects = objects_of(TP2)
    objects[f"{STEP}/mp_rank_02/{MODEL}"] = objects[f"{STEP}/mp_rank_01/{MODEL}"]
    objects[f"{STEP}/mp_rank_00_001/{MODEL}"] = objects[f"{STEP}/mp_rank_01/{MODEL}"]
    problems = read(MemoryStore(objects), STEP).problems
    assert {problem.kind for problem in problems} == {ProblemKind.LEFTOVER}
    assert len(problems) == 2


def test_a_file_of_another_mesh_contradicts():
    objects = {f"mp_rank_{tp:02d}/{MODEL}": rank_file({"model": {}}, tensor_model_parallel_size=3) for tp in range(3)}
    objects[f"mp_rank_02/{MODEL}"] = rank_file({"model": {}}, tensor_model_parallel_size=4)
    (problem,) = read(MemoryStore(objects)).problems
    assert problem.kind is ProblemKind.METADATA
    assert problem.file == f"mp_rank_02/{MODEL}"


@pytest.mark.parametrize("size", [1 << 20, 1 << 30])
def test_impossible_sizes_are_not_believed(size):
    catalog = read(MemoryStore({f"mp_rank_00/{MODEL}": rank_file({"model": {}}, tensor_model_parallel_size=size)}))
    assert [problem.kind for problem in catalog.problems] == [ProblemKind.METADATA]
    assert len(catalog.files) == 1


def test_a_shape_that_differs_between_ranks():
    torch = pytest.importorskip("torch")
    numbers = iter((8, 9))

    def edit(content):
        content["model"]["decoder.final_layernorm.bias"] = torch.zeros(next(numbers), dtype=torch.bfloat16)

    problems = read(MemoryStore(changed(edit)), STEP).problems
    assert {problem.kind for problem in problems} == {ProblemKind.RANKS_DISAGREE}
    assert {problem.tensor for problem in problems} == {"decoder.final_layernorm.bias"}


# Recognition, pointers, levels


def test_steps_are_found_from_the_run_from_above_and_from_within():
    for path, steps in ((TP2, [2, 4]), (TP2 / STEP, [4])):
        (run,) = discover(LocalStore(path))
        assert [source.match.step for source in run.steps] == steps
        assert {source.adapter.name for source in run.steps} == {"megatron-legacy"}
    runs = discover(LocalStore(FIXTURES))
    assert {run.path for run in runs} == {path.name for path in FIXTURES.iterdir() if path.is_dir()}
    assert all(len(run.pointers) == 1 for run in runs)


def test_a_release_is_a_step():
    objects = {f"release/{name}": content for name, content in objects_of(TP2 / STEP).items()}
    run = findings_of(objects | {"latest_checkpointed_iteration.txt": b"release"})
    assert not run.findings
    assert [step.state.path for step in run.steps] == ["release"]


def test_a_step_that_was_copied_whole_says_which_it_is():
    objects = {f"iter_0000009/{name}": content for name, content in objects_of(TP2 / STEP).items()}
    store = MemoryStore(objects)
    match = ADAPTER.recognise(store, Folder.read(store, "iter_0000009"))
    assert match.step == 4


@pytest.mark.parametrize(
    "objects",
    [{"mp_rank_00/other.pt": b""}, {f"other/{MODEL}": b""}, {f"mp_rank_0/{MODEL}": b""}, {MODEL: b""}],
    ids=lambda objects: next(iter(objects)),
)
def test_declines_with_a_reason(objects):
    store = MemoryStore(objects)
    verdict = ADAPTER.recognise(store, Folder.read(store, ""))
    assert isinstance(verdict, Declined)
    assert verdict.reason


def test_declines_files_without_a_model():
    store = MemoryStore({f"mp_rank_00/{MODEL}": saved({"weights": 1})})
    assert isinstance(ADAPTER.recognise(store, Folder.read(store, "")), Declined)


def test_the_tracker_may_not_lead_out_of_the_run():
    for text, target in (("4", "iter_0000004"), ("release", "release"), ("12345678", "iter_12345678"), ("-1", ""),
                         ("../4", ""), ("4/..", ""), ("9" * 5000, ""), ("١", ""), ("", "")):  # fmt: skip
        store = MemoryStore({"latest_checkpointed_iteration.txt": text.encode(), "iter_0000004/x": b""})
        assert ADAPTER.pointer(store, Folder.read(store, "")).target == target


def test_by_names_alone_one_file_is_opened():
    store = RecordingStore(objects_of(TP2_PP2 / STEP))
    folder = Folder.read(store, "")
    match = ADAPTER.recognise(store, folder)
    store.ranges.clear()
    catalog = ADAPTER.read(store, folder, match, Options(names_only=True))
    assert len({name for name, _, _ in store.ranges}) == 1
    assert len(catalog.files) == 4


def test_the_users_word_on_unknown_names():
    torch = pytest.importorskip("torch")

    def edit(content):
        content["model"]["decoder.layers.0.mlp.router.weight"] = torch.ones(4, 8)
        content.pop("optimizer")

    store = MemoryStore(changed(edit))
    name = "decoder.layers.0.mlp.router.weight"
    odd = [tensor for tensor in read(store, STEP).tensors if tensor.undetermined]
    assert [tensor.name for tensor in odd] == [f"{name}@tp=0", f"{name}@tp=1"]
    stated = read(store, STEP, placement={"tp": [("*.router.weight", Replicate())]})
    assert tensors_of(stated, Role.PARAMETER)[name].replica_axes == ("tp",)
