"""The adapter of megatron-core's torch_dist format, on what megatron-core trained and saved."""

import json
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.dcp.adapter import TorchDcp
from auditor.adapters.megatron_dist.adapter import MegatronDist
from auditor.adapters.megatron_dist.catalog import lost_objects
from auditor.adapters.megatron_dist.names import cut, read_key
from auditor.adapters.megatron_dist.tensors import _Held, unflattened
from auditor.adapters.registry import recognise
from auditor.audit import audit
from auditor.discovery import discover
from auditor.errors import NothingToAuditError
from auditor.model.catalog import FileState, Role
from auditor.model.mesh import Coordinate, Replicate, Shard
from auditor.model.region import Box, whole
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.single import SingleFileStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.verdict import ExitCode, exit_code
from tests.adapters.test_dcp import bits, digests, loaded
from tests.paths import HEALTHY, ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "megatron_dist"
LEGACY = ROOT / "tests" / "fixtures" / "megatron_legacy"
RUNS = ("tp1", "tp2", "tp2_pp2", "tp2_llama", "tp1_llama_unstacked", "ep2", "dp2_dp_reshardable",
        "dp2_fully_reshardable", "dp2_fully_sharded_model_space")  # fmt: skip
FIRST, STEP = "iter_0000002", "iter_0000004"
STEPS = {"tp1": FIRST}
"""The newest step of those runs that have no step 4."""
ADAPTER = MegatronDist()
ROLES = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "fp32_param": "master", "param": "master"}
UNFUSED = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.",
           "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}  # fmt: skip


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = tuple(FIXTURES / run / STEPS.get(run, STEP) for run in RUNS)
    foreign = (
        HEALTHY / "global_step10", LEGACY / "tp2" / STEP, ROOT / "tests/fixtures/dcp/fsdp2_2/step-4", FIXTURES / "tp2",
    )  # fmt: skip

    def framework_arrays(self, path):
        """By torch's own loader; stacks are taken apart by slicing, which is written down once more here."""
        arrays, halves = {}, {}
        with_plans_of_old_versions()
        for key, tensor in loaded(path).items():
            if key.startswith("optimizer.distributed.") or ("model_space" in str(path) and "optimizer" in key):
                continue
            role, name = "parameter", key
            if key.startswith("optimizer.state."):
                entry, name = key.removeprefix("optimizer.state.").split(".", 1)
                role = ROLES[entry]
            for stored, own in UNFUSED.items():
                name = name.replace(stored, own)
            if name.endswith(("_w", "_v")):
                halves.setdefault((role, name[:-2]), {})[name[-1]] = tensor
            elif ".experts.experts." in name:
                for layer, expert in ((a, b) for a in range(len(tensor)) for b in range(4)):
                    own = name.replace("layers.", f"layers.{layer}.").replace(
                        "experts.experts", f"experts.local_experts.{expert}"
                    )
                    arrays[role, own] = bits(tensor[layer, expert])
            elif name.startswith("decoder.layers.") and not name.split(".")[2].isdecimal():
                for layer in range(len(tensor)):
                    arrays[role, name.replace("layers.", f"layers.{layer}.")] = bits(tensor[layer])
            else:
                arrays[role, name] = bits(tensor)
        torch = pytest.importorskip("torch")
        return arrays | {key: bits(torch.cat([kept["w"], kept["v"]])) for key, kept in halves.items()}


# What the tests below share


def with_plans_of_old_versions():
    """What torch's loader needs of megatron-core to read an index: a class by name, which newer versions keep empty."""
    planner = pytest.importorskip("torch.distributed.checkpoint.planner")
    name = "megatron.core.dist_checkpointing.strategies.torch"
    for depth in range(1, 6):
        part = ".".join(name.split(".")[:depth])
        sys.modules.setdefault(part, ModuleType(part))
    sys.modules[name].MCoreSavePlan = planner.SavePlan


def read(store, path="", **options):
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


def objects_of(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def audited(objects, level=Level.FULL, **settings):
    (run,) = audit(MemoryStore(objects), Settings(level=level, **settings), now=1e9).runs
    return run


def by_name(catalog, role=Role.PARAMETER):
    return {tensor.name: tensor for tensor in catalog.tensors if tensor.role is role}


# Healthy checkpoints are silent


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("run", RUNS)
def test_healthy_runs_are_silent_at_every_level(run, level):
    found = audited(objects_of(FIXTURES / run), level)
    assert not found.findings
    assert not found.unrecognised
    assert {step.state.format for step in found.steps} == {"megatron-dist"}
    assert level is Level.NAMES or found.last_good.step == int(STEPS.get(run, STEP)[-1])


@pytest.mark.parametrize("run", [run for run in RUNS if run != "dp2_dp_reshardable"])
def test_masters_round_to_weights_and_moments_are_bounded(run):
    judged = audited(objects_of(FIXTURES / run)).steps[-1].judgements
    num_parameters = len(by_name(read(LocalStore(FIXTURES / run / STEPS.get(run, STEP)))))
    for identifier in ("CST001", "OPT011"):
        assert judged[identifier].num_holds == num_parameters, identifier
        assert not judged[identifier].undetermined


# One state in many layouts


def state(path):
    return {key: found for key, found in digests(path).items() if key[0] != "counter"}


def test_one_state_has_one_digest_in_both_formats_and_every_mesh():
    first = state(FIXTURES / "legacy_tp1" / "iter_0000002")
    assert Counter(role for role, _ in first) == dict.fromkeys(
        ("parameter", "master", "first_moment", "second_moment"), 20
    )
    assert all(len(found) == 1 for found in first.values())
    assert len({next(iter(found))[2] for found in first.values()}) > 60
    for layout in ("legacy_tp2", "tp1", "tp2", "tp2_pp2"):
        assert state(FIXTURES / layout / "iter_0000002") == first, layout


def test_gate_and_up_by_themselves_are_the_fused_tensor():
    assert state(FIXTURES / "tp2_llama") == state(FIXTURES / "tp1_llama_unstacked")


def test_arrays_of_the_older_backend_hold_the_same():
    assert state(FIXTURES / "tp2_zarr" / STEP) == state(FIXTURES / "tp2_zarr_as_torch_dist" / STEP)
    arrays, index = (read(LocalStore(FIXTURES / f"tp2_zarr{how}" / STEP)) for how in ("", "_as_torch_dist"))
    assert {replace(t, order=0) for t in arrays.tensors} == {replace(t, order=0) for t in index.tensors}
    assert [group.hyperparameters for group in arrays.groups] == [group.hyperparameters for group in index.groups]
    assert {s.name for s in arrays.scalars} == {s.name for s in index.scalars}
    for level in (Level.NAMES, Level.HEADERS, Level.FULL):
        found = audited(objects_of(FIXTURES / "tp2_zarr"), level)
        assert not found.findings
        assert not found.unrecognised
        assert {step.state.format for step in found.steps} == {"megatron-dist"}
    assert found.last_good.step == 4
    assert found.steps[0].judgements["CST001"].num_holds == 12


# What is recorded


def test_mesh_and_coordinates_follow_args_and_the_writers():
    catalog = read(LocalStore(FIXTURES / "tp2_pp2" / STEP))
    assert dict(catalog.mesh.axes) == {"pp": 2, "dp": 1, "tp": 2}
    places = {}
    for piece in catalog.pieces:
        places.setdefault(catalog.tensors[piece.tensor].name, set()).add((str(piece.coordinate), piece.region))
    assert places["decoder.layers.1.mlp.linear_fc2.weight"] == {
        ("pp=1,dp=0,tp=0", Box((0, 0), (8, 16))), ("pp=1,dp=0,tp=1", Box((0, 16), (8, 32))),
    }  # fmt: skip
    assert {file.coordinate for file in catalog.files if "__3_" in file.name} == {Coordinate.of(pp=1, dp=0, tp=1)}
    tensors = by_name(catalog)
    assert dict(tensors["decoder.layers.0.mlp.linear_fc1.weight"].placement) == {"tp": Shard(0)}
    assert dict(tensors["decoder.layers.1.input_layernorm.weight"].placement) == {"tp": Replicate()}


def test_what_is_replicated_is_undetermined_because_it_is_stored_once():
    def once(run):
        return Counter(t.stored_once for t in by_name(read(LocalStore(FIXTURES / run / STEPS.get(run, STEP)))).values())

    assert once("tp1") == {(): 20}
    assert once("tp2") == {("tp",): 11, (): 9}
    assert once("tp2_pp2") == {("tp",): 11, (): 8, ("pp",): 1}
    assert once("ep2") == {("ep",): 8, (): 8}
    judged = audited(objects_of(FIXTURES / "tp2")).steps[-1].judgements["REP001"]
    assert (judged.num_holds, [*judged.undetermined]) == (
        0, ["stored once along tp: other replicas are not on disk (auditor.hooks witnesses them)"],
    )  # fmt: skip


def test_without_arguments_the_ranks_are_all_that_is_known():
    objects = objects_of(FIXTURES / "tp2" / STEP)
    del objects["common.pt"]
    catalog = read(MemoryStore(objects))
    assert dict(catalog.mesh.axes) == {"rank": 2}
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in by_name(catalog)
    assert by_name(catalog)["decoder.final_layernorm.weight"].stored_once == ("rank",)


def test_groups_and_counts():
    for run, optimizer_step in (("tp2", 4.0), ("dp2_fully_reshardable", 4.0), ("dp2_dp_reshardable", 4.0)):
        catalog = read(LocalStore(FIXTURES / run / STEP))
        assert {group.number for group in catalog.groups} == {0, 1}
        assert {group.hyperparameters["wd_mult"] for group in catalog.groups} == {0.0, 1.0}
        assert all(group.parameters is None and group.optimizer == "adam" for group in catalog.groups)
        assert {s.value for s in catalog.scalars if s.name == "optimizer_step"} == {optimizer_step}
        assert [s.value for s in catalog.scalars if s.name == "global_steps"] == [4.0]


def test_buffers_of_the_distributed_optimizer_are_undetermined_and_their_holes_are_padding():
    catalog = read(LocalStore(FIXTURES / "dp2_dp_reshardable" / STEP))
    buffers = [tensor for tensor in catalog.tensors if ".bucket_idx_" in tensor.name]
    assert all("not recorded" in tensor.undetermined for tensor in buffers)
    found = Counter(tensor.role for tensor in buffers)
    assert found[Role.MASTER] == found[Role.FIRST_MOMENT] == found[Role.SECOND_MOMENT] >= 9
    assert found[Role.PADDING] > 0
    stored = sum(tensor.num_elements for tensor in buffers if tensor.role is Role.MASTER)
    assert stored == sum(tensor.num_elements for tensor in by_name(catalog).values())
    assert "fully-reshardable" in buffers[0].undetermined
    # What lies at one place of a bucket is of one parameter, whichever that is.
    judged = audited(objects_of(FIXTURES / "dp2_dp_reshardable")).steps[0].judgements
    assert judged["OPT011"].num_holds == found[Role.FIRST_MOMENT]


def test_flat_ranges_of_parameters_are_boxes_of_them():
    """A parameter that two data-parallel ranks share lies in several boxes, which tile it."""
    catalog = read(LocalStore(FIXTURES / "dp2_fully_sharded_model_space" / STEP))
    masters = [n for n, tensor in enumerate(catalog.tensors) if tensor.role is Role.MASTER]
    assert {catalog.tensors[n].name for n in masters} == by_name(catalog).keys()
    shared = [n for n in masters if len({p.coordinate for p in map(catalog.pieces.__getitem__, rows(catalog, n))}) > 1]
    assert shared
    assert all(by_name(catalog)[catalog.tensors[n].name].shape == catalog.tensors[n].shape for n in masters)
    held = [_Held(0, Box((1, 0, 0, 5), (2, 1, 1, 21)), whole((1,)))]
    found = [(one.region, one.skipped) for one in unflattened(held, (2, 1, 2, 24), (2, 3, 16))]
    assert found == [
        (Box((1, 0, 5), (2, 1, 8)), 0), (Box((1, 1, 0), (2, 2, 8)), 3), (Box((1, 2, 0), (2, 3, 5)), 11),
    ]  # fmt: skip
    assert not [*unflattened(held, (2, 1, 2, 23), (2, 3, 16))]


def rows(catalog, number):
    return catalog.rows_of(number, 0).tolist()


def test_experts_are_tensors_of_their_own():
    tensors = by_name(read(LocalStore(FIXTURES / "ep2" / STEP)))
    names = {name for name in tensors if ".experts." in name}
    assert names == {
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{part}.weight"
        for layer in range(1) for expert in range(4) for part in ("linear_fc1", "linear_fc2")
    }  # fmt: skip


LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.local_experts."


@pytest.mark.parametrize(("key", "name", "num_leading"), [
    (f"{LAYERS}mlp.linear_fc2.weight", f"{LAYERS}{{}}.mlp.linear_fc2.weight", 1),
    (f"{LAYERS}3.mlp.linear_fc2.weight", f"{LAYERS}3.mlp.linear_fc2.weight", 0),
    ("mtp.layers.eh_proj.weight", "mtp.layers.{}.eh_proj.weight", 1),
    ("layers.a", "layers.{}.a", 1),
    (f"{LAYERS}mlp.experts.linear_fc1.weight", f"{LAYERS}{{}}.{EXPERTS}{{}}.linear_fc1.weight", 2),
    (f"{LAYERS}mlp.experts.experts.linear_fc1.weight", f"{LAYERS}{{}}.{EXPERTS}{{}}.linear_fc1.weight", 2),
    (f"{LAYERS}3.mlp.experts.5.linear_fc1.weight", f"{LAYERS}3.{EXPERTS}5.linear_fc1.weight", 0),
    (f"{LAYERS}mlp.shared_experts.linear_fc1.weight", f"{LAYERS}{{}}.mlp.shared_experts.linear_fc1.weight", 1),
    (f"{LAYERS}mlp.linear_fc1.layer_norm_bias", f"{LAYERS}{{}}.mlp.linear_fc1.layer_norm_bias", 1),
    ("a{0}.weight", "a{{0}}.weight", 0),
])  # fmt: skip
def test_keys_are_cut_by_name(key, name, num_leading):
    found = cut(key, {key}, fused=True)
    assert (found.name, found.num_leading, found.half) == (name, num_leading, None)


def test_keys_of_optimizers():
    assert read_key("chained_1.optimizer.state.exp_avg.a.b").role is Role.FIRST_MOMENT
    assert read_key("chained_1.optimizer.state.exp_avg.a.b").parameter == "a.b"
    assert read_key("optimizer.state.fp32_param.a").role is read_key("optimizer.state.param.a").role is Role.MASTER
    assert read_key("optimizer.state.momentum.a").suffix == ".momentum"
    assert cut("l.linear_fc1.weight_w", {"l.linear_fc1.weight_w"}, fused=True).name == "l.linear_fc1.weight_w"


def test_objects_lack_no_part():
    assert not [*lost_objects({"rng_state/shard_0.0_1.2": None, "rng_state/shard_0.1_1.2": None, "other": None})]
    assert len([*lost_objects({f"a._extra_state/shard_{at}_4": None for at in (0, 1, 3)})]) == 1


# Recognition


def test_every_adapter_knows_its_own():
    store = LocalStore(FIXTURES / "tp2" / STEP)
    assert recognise(store, Folder.read(store, ""))[0].name == "megatron-dist"
    assert isinstance(TorchDcp().recognise(store, Folder.read(store, "")), Declined)


def test_steps_are_found_from_the_run_and_from_within():
    for path, steps in ((FIXTURES / "tp2", [2, 4]), (FIXTURES / "tp2" / STEP, [4])):
        (run,) = discover(LocalStore(path))
        assert [source.match.step for source in run.steps] == steps
    (run,) = discover(LocalStore(FIXTURES / "tp2"))
    assert [pointer.target for pointer in run.pointers] == [STEP]


@pytest.mark.parametrize(
    ("folder", "step"),
    [("iter_0000009", 9), ("release", 4), ("model--val_loss=1.5-step=9-consumed_samples=18.0-last", 9), ("final", 4)],
)
def test_the_step_is_the_folders_number_or_the_recorded_one(folder, step):
    store = MemoryStore({f"{folder}/{name}": data for name, data in objects_of(FIXTURES / "tp2" / STEP).items()})
    assert ADAPTER.recognise(store, Folder.read(store, folder)).step == step


def test_a_folder_of_nemo():
    inside = objects_of(FIXTURES / "tp2" / STEP)
    objects = {f"run/model-step=4/weights/{name}": data for name, data in inside.items()}
    objects["run/model-step=4/context/model.yaml"] = b"a: 1"
    run = audited(objects)
    assert [(step.state.path, step.state.step) for step in run.steps] == [("run/model-step=4", 4)]
    assert not run.findings
    assert run.steps[0].judgements["CST001"].num_holds == 20
    alone = {name.removeprefix("run/"): data for name, data in objects.items()}
    assert audited(alone).steps[0].state.step == 4
    del alone["model-step=4/weights/metadata.json"]
    assert {finding.id for finding in audited(alone).findings} == {"INT004"}
    inside = {name.removeprefix("model-step=4/"): data for name, data in alone.items()}
    assert {finding.id for finding in audited(inside).findings} == {"INT004"}


def test_another_backend_is_recognised_and_said_to_be_unread():
    objects = objects_of(FIXTURES / "tp2" / STEP)
    objects = {f"{STEP}/common.pt": objects["common.pt"]}
    objects[f"{STEP}/metadata.json"] = json.dumps({"sharded_backend": "other", "sharded_backend_version": 1}).encode()
    catalog = read(MemoryStore(objects), STEP)
    (unread,) = [file for file in catalog.files if file.state is FileState.UNREADABLE]
    assert "backend 'other', which is not read" in unread.detail
    report = audit(MemoryStore(objects), Settings(), now=1e9)
    assert not report.runs[0].findings
    assert exit_code(report) is ExitCode.INCOMPLETE
    assert report.runs[0].last_good is None


def test_an_archive_is_named_with_the_command_that_unpacks_it(tmp_path):
    path = tmp_path / "megatron_gpt.nemo"
    with tarfile.open(path, "w") as archive:
        archive.add(ROOT / "README.md", "README.md")
    for store in (LocalStore(tmp_path), SingleFileStore(LocalStore(tmp_path), path.name, str(path))):
        with pytest.raises(NothingToAuditError) as error:
            discover(store)
        assert "tar archive" in str(error.value)
        assert "tar -xf" in str(error.value)


@pytest.mark.parametrize("objects", [
    {"metadata.json": b"{}"}, {"metadata.json": b"{"}, {"common.pt": b""}, {".metadata": b""}, {"x": b""},
    {"metadata.json": b'{"model": 1}', ".metadata": b""},
])  # fmt: skip
def test_declines_with_a_reason(objects):
    store = MemoryStore(objects)
    verdict = ADAPTER.recognise(store, Folder.read(store, ""))
    assert isinstance(verdict, Declined)
    assert verdict.reason
