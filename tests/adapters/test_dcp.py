"""The adapter of torch.distributed.checkpoint, on what torch wrote."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from auditor.adapters.adapter import Folder, Match, Options
from auditor.adapters.dcp.adapter import TorchDcp
from auditor.adapters.registry import recognise
from auditor.audit import audit
from auditor.discovery import discover
from auditor.errors import NothingToAuditError
from auditor.model.catalog import Role
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.single import SingleFileStore
from auditor.testing.adapter_contract import AdapterContract
from tests.paths import HEALTHY as DEEPSPEED
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "dcp"
SAME = FIXTURES / "same_state"
PLAIN = FIXTURES / "fsdp2_2"
VARIANTS = (
    "fsdp2_4",
    "hsdp_2x2",
    "tp_2",
    "fsdp_tp_2x2",
    "ddp_2",
    "async",
    "threads",
    "file_per_item",
    "no_coordinator",
    "torch_2_1",
)
ADAPTER = TorchDcp()
ROLES = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "counter"}


def role_and_name(key):
    """What a key of `get_state_dict` stands for."""
    top, _, rest = key.partition(".")
    if top == "optimizer":
        name, _, entry = rest.removeprefix("state.").rpartition(".")
        return ROLES[entry], name
    return "parameter", rest


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (
        PLAIN / "step-4", FIXTURES / "tp_2" / "step-4", FIXTURES / "no_coordinator" / "step-4",
        SAME / "fsdp2_4" / "step-3", FIXTURES / "torch_2_1" / "step-4",
    )  # fmt: skip
    foreign = (
        DEEPSPEED / "global_step10", ROOT / "tests" / "fixtures" / "torch_per_rank" / "healthy" / "step_2",
        FIXTURES / "hf_rank0" / "step-4",
    )  # fmt: skip

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        if (path / ".metadata").exists():
            return {role_and_name(key): bits(tensor) for key, tensor in loaded(path).items()}
        # torch loads one that was written without a coordinator by the same ranks alone: each by its own index.
        rank = torch.distributed.checkpoint.FileSystemReader(path)
        whole = [key for key, held in rank.read_metadata(rank=0).state_dict_metadata.items() if is_whole(held)]
        return {role_and_name(key): bits(tensor) for key, tensor in loaded(path, keys=whole, rank=0).items()}


def is_whole(held):
    return hasattr(held, "size") and tuple(held.chunks[0].sizes) == tuple(held.size)


def bits(tensor):
    torch = pytest.importorskip("torch")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class TestCompressed(AdapterContract):
    adapter = ADAPTER
    checkpoints = (FIXTURES / "zstd" / "step-4",)
    read_ahead = 1 << 17  # Where the weights begin in an item is told by what the item decodes to.

    def framework_arrays(self, path):
        return {role_and_name(key): bits(tensor) for key, tensor in loaded(path).items()}


class TestPartsInSafetensors(AdapterContract):
    adapter = ADAPTER
    checkpoints = (FIXTURES / "hf_sharded" / "step-4", SAME / "hf_sharded" / "step-3")
    foreign = (FIXTURES / "hf_consolidated" / "step-4",)

    def framework_arrays(self, path):
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        whole = loaded(path, reader=dcp.HuggingFaceStorageReader(str(path)))
        return {("parameter", key): bits(tensor) for key, tensor in whole.items()}


def loaded(path, keys=None, rank=None, reader=None):
    """Every tensor, by torch's own loader in one process."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    reader = reader or dcp.FileSystemReader(path)
    metadata = reader.read_metadata(rank=rank) if rank is not None else reader.read_metadata()
    held = {key: value for key, value in metadata.state_dict_metadata.items() if hasattr(value, "size")}
    state = {key: torch.empty(held[key].size, dtype=held[key].properties.dtype) for key in (keys or held)}
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return state


def read(store, path="", **options):
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


def objects_of(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def audited(objects, level=Level.FULL):
    (run,) = audit(MemoryStore(objects), Settings(level=level)).runs
    return run


def by_name(catalog, role):
    return {tensor.name: tensor for tensor in catalog.tensors if tensor.role is role}


# Healthy checkpoints are silent


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("variant", ["fsdp2_2", *VARIANTS])
def test_healthy_checkpoints_are_silent(variant, level):
    run = audited(objects_of(FIXTURES / variant), level)
    assert not run.findings
    assert not run.unrecognised
    assert not any(step.opaque for step in run.steps)
    assert level is Level.NAMES or run.last_good.step == 4
    assert {step.state.format for step in run.steps} == {"torch-dcp"}


@pytest.mark.parametrize("layout", [path.name for path in sorted(SAME.iterdir())])
def test_states_cut_unevenly_are_silent(layout):
    (run,) = audit(LocalStore(SAME / layout), Settings(level=Level.FULL, ignore=("OPT010",))).runs
    assert not run.findings


def test_every_byte_of_every_item_is_verified():
    for variant in ("fsdp2_2", *VARIANTS):
        (run,) = audit(LocalStore(FIXTURES / variant), Settings(level=Level.FULL, select=("INT010",))).runs
        (data,) = {len([f for f in step.iterdir() if f.suffix == ".distcp"]) for step in (FIXTURES / variant).iterdir()}
        assert run.steps[-1].judgements["INT010"].num_holds == data


@pytest.mark.parametrize("level", [Level.HEADERS, Level.REPLICAS, Level.VALUES])
def test_a_step_with_compressed_items_is_good_at_every_level(level):
    """That not every chunk was decoded is no reason against it where no level below reads weights."""
    run = audited(objects_of(FIXTURES / "zstd"), level)
    assert run.last_good.step == 4
    assert level is not Level.REPLICAS or run.steps[0].judgements["INT015"].undetermined


def test_compressed_items_hold_the_same():
    run = audited(objects_of(FIXTURES / "zstd"))
    assert not run.findings
    judged = run.steps[0].judgements
    assert (judged["INT010"].num_holds, judged["INT015"].num_holds) == (2, 69)
    assert digests(FIXTURES / "zstd" / "step-4") == digests(PLAIN / "step-4")


# What DCP does not record


def test_what_is_stored_once_is_undetermined_and_what_every_rank_has_a_part_of_is_not_replicated():
    for variant, once in (("fsdp2_2", 18), ("tp_2", 51), ("ddp_2", 69), ("hsdp_2x2", 69)):
        catalog = read(LocalStore(FIXTURES / variant / "step-4"))
        assert sum(tensor.stored_once == ("rank",) for tensor in catalog.tensors) == once
        (run,) = audit(LocalStore(FIXTURES / variant), Settings(select=("REP001",))).runs
        assert run.steps[-1].judgements["REP001"].num_holds == 0
        ((key, _count),) = [item for item in run.undetermined().items() if item[0][0] == "REP001"]
        assert key[1] == "stored once along rank: other replicas are not on disk (auditor.hooks witnesses them)"


def test_world_size_is_told_by_files_and_empty_ones_count():
    objects = objects_of(PLAIN / "step-4")
    assert dict(read(MemoryStore(objects)).mesh.axes) == {"rank": 2}
    objects["__3_0.distcp"] = b""
    catalog = read(MemoryStore(objects))
    assert dict(catalog.mesh.axes) == {"rank": 4}
    assert not catalog.problems
    assert {tensor.stored_once for tensor in catalog.tensors} == {("rank",)}


def test_without_a_coordinator_replicas_are_compared():
    run = audited(objects_of(FIXTURES / "no_coordinator"), Level.VALUES)
    assert run.steps[0].judgements["REP001"].num_holds == 51
    assert not run.steps[0].judgements["REP001"].undetermined
    catalog = read(LocalStore(FIXTURES / "no_coordinator" / "step-4"))
    parameters = by_name(catalog, Role.PARAMETER)
    assert parameters["norm.weight"].replica_axes == ("rank",)
    assert parameters["blocks.0.up.weight"].replica_axes == ()


def test_files_are_opened_at_once_where_the_store_takes_long():
    class Slow(MemoryStore):
        num_readers = 4
        meeting = Barrier(2, timeout=20)

        def open(self, name):
            if name.endswith(".distcp"):
                self.meeting.wait()
            return super().open(name)

    objects = objects_of(FIXTURES / "threads" / "step-4")
    store = Slow(objects)
    found = ADAPTER.read(store, Folder.read(store, ""), Match(4, ""), Options())
    TestContract.same(found, read(MemoryStore(objects)))


# Names, roles, groups, counters


def test_names_roles_groups_and_counters():
    catalog = read(LocalStore(PLAIN / "step-4"))
    parameters = by_name(catalog, Role.PARAMETER)
    assert {"embed.weight", "blocks.1.down.bias", "scale", "head.weight", "seen"} <= set(parameters)
    trained = set(parameters) - {"seen"}
    for role in (Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.COUNTER):
        assert set(by_name(catalog, role)) == trained
    (group,) = catalog.groups
    assert set(group.parameters) == trained
    assert group.hyperparameters["lr"] == 0.01
    assert group.hyperparameters["betas"] == (0.9, 0.999)
    steps = [scalar for scalar in catalog.scalars if scalar.name == "optimizer_step"]
    assert {scalar.value for scalar in steps} == {4.0}
    assert {scalar.tensor for scalar in steps} == trained
    assert {scalar.dtype.name for scalar in steps} == {"float32"}
    assert [scalar.value for scalar in catalog.scalars if scalar.name == "global_steps"] == [4.0]


@pytest.mark.parametrize(
    ("folder", "step"),
    [("step-9", 9), ("iter_0000009", 9), ("global_step9", 9), ("run_step_9", 9), ("epoch=1-step=9.ckpt", 9),
     ("checkpoint_9", 4), ("9", 4), ("final", 4)],
)  # fmt: skip
def test_the_step_is_the_folders_number_or_the_saved_one(folder, step):
    objects = {f"{folder}/{name}": content for name, content in objects_of(PLAIN / "step-4").items()}
    assert ADAPTER.recognise(MemoryStore(objects), Folder.read(MemoryStore(objects), folder)).step == step


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_one_file_by_itself_says_nothing(name):
    with pytest.raises(NothingToAuditError, match=r"torch-dcp: it is one file of several"):
        discover(SingleFileStore(LocalStore(PLAIN / "step-4"), name, name))


def test_tensors_are_in_the_order_of_the_state_dict():
    for variant in ("fsdp2_2", "ddp_2", "no_coordinator"):
        catalog = read(LocalStore(FIXTURES / variant / "step-4"))
        names = [tensor.name for tensor in catalog.tensors if tensor.role is Role.PARAMETER]
        assert names[:4] == ["scale", "seen", "embed.weight", "blocks.0.norm.weight"]
        assert names[-3:] == ["norm.weight", "norm.bias", "head.weight"]
        assert [tensor.order for tensor in catalog.tensors][:18] == [*range(18)]


def test_every_adapter_knows_its_own():
    for path, name in (
        (PLAIN / "step-4", "torch-dcp"), (FIXTURES / "hf_sharded" / "step-4", "torch-dcp"),
        (FIXTURES / "hf_consolidated" / "step-4", "hugging-face"), (FIXTURES / "hf_rank0" / "step-4", "hugging-face"),
    ):  # fmt: skip
        store = LocalStore(path)
        assert recognise(store, Folder.read(store, ""))[0].name == name


# One state in many layouts


def digests(path):
    """Role and name to dtype, shape and digest of every replica of every tensor; nothing is merged."""
    store = LocalStore(path)
    (run,) = discover(store)
    (source,) = run.steps
    catalog = source.adapter.read(store, source.folder, source.match, Options())
    with ThreadPoolExecutor(2) as workers:
        seen = observe(store, catalog, wanted_rows(catalog), Everything(workers))
    found = {}
    for number, tensor in enumerate(catalog.tensors):
        for replica in range(len(catalog.replicas[number])):
            rows = catalog.rows_of(number, replica)
            lanes = tuple(int(seen.pieces[lane][rows].sum(dtype=np.uint64)) for lane in ("lane0", "lane1"))
            found.setdefault((tensor.role.value, tensor.name), set()).add((tensor.dtype.name, tensor.shape, lanes))
    return found


def test_one_state_has_one_digest_in_every_layout():
    first = digests(SAME / "per_rank")
    assert len(first) == 20
    assert all(len(found) == 1 for found in first.values())
    assert len({next(iter(found))[2] for (role, _), found in first.items() if role != "counter"}) == 15
    for layout in sorted(SAME.iterdir()):
        wanted = {key: found for key, found in first.items() if key[0] == "parameter" or "hf" not in layout.name}
        found = digests(layout)
        # What the ranks wrote is stored beside what was put together of it: once more the same.
        parts = {(role, name[:-8]): held for (role, name), held in found.items() if name.endswith("@sharded")}
        assert parts == (wanted if layout.name == "hf_consolidated" else {})
        assert {key: held for key, held in found.items() if "@" not in key[1]} == wanted, layout.name
