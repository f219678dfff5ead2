"""Rank files that hold parts of tensors: DTensors, ShardedTensors and FSDP1's flat parameters, as torch wrote them."""

import io
import tempfile

import pytest

from auditor.adapters.adapter import Folder, Match, Options
from auditor.adapters.torch_per_rank.adapter import TorchPerRank
from auditor.adapters.torch_per_rank.distributed import Cut, MeshLayout
from auditor.adapters.torch_per_rank.rank_mesh import device_mesh, grid
from auditor.audit import audit
from auditor.containers.pickle_machine import Opaque, PickleMachine
from auditor.model.catalog import FileState, ProblemKind, Role
from auditor.model.mesh import Coordinate
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from tests.adapters.test_dcp import digests
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "torch_per_rank"
FSDP2, TP_FSDP, HSDP = (FIXTURES / name for name in ("fsdp2_3", "tp_fsdp_2x2", "hsdp_2x2_faulty"))
FULL, SHARDED, HYBRID, LOCAL, DCP = (
    FIXTURES / f"fsdp1_{name}" for name in ("full", "sharded", "hybrid_2x2", "local", "dcp")
)
ROLES = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "counter"}


def gathered(model, state):
    arrays = {("parameter", name): tensor for name, tensor in model.items()}
    for name, kept in state.items():
        arrays |= {(ROLES[key], name): tensor for key, tensor in kept.items()}
    return {key: tensor.numpy().tobytes() for key, tensor in arrays.items()}


class TestDTensors(AdapterContract):
    adapter = TorchPerRank()
    checkpoints = (FSDP2 / "step_2", TP_FSDP / "step_2")

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        saved = torch.load(FIXTURES / "expected" / f"{path.parent.name}.pt")
        return gathered(saved["model"], saved["state"])


class TestShardedTensors(AdapterContract):
    adapter = TorchPerRank()
    checkpoints = (SHARDED / "step_2",)

    def framework_arrays(self, path):
        """The same training, saved and put together by torch's distributed checkpoints."""
        whole = put_together(path)
        return gathered(whole["model"], whole["optim"]["state"])


def put_together(path=None):
    torch = pytest.importorskip("torch")
    convert = pytest.importorskip("torch.distributed.checkpoint.format_utils").dcp_to_torch_save
    with tempfile.TemporaryDirectory() as folder:
        convert(DCP / "step_2", f"{folder}/whole.pt")
        return torch.load(f"{folder}/whole.pt", weights_only=False)


def catalog_of(source, path="step_2"):
    store = MemoryStore(source) if isinstance(source, dict) else LocalStore(source)
    folder = Folder.read(store, path)
    match = TorchPerRank().recognise(store, folder)
    assert isinstance(match, Match)
    return TorchPerRank().read(store, folder, match, Options())


def objects_of(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def run_of(source, **settings):
    store = MemoryStore(source) if isinstance(source, dict) else LocalStore(source)
    (run,) = audit(store, Settings(**settings), now=1e9).runs
    return run


def saved(content):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def named(catalog, role=Role.PARAMETER):
    return {tensor.name: tensor for tensor in catalog.tensors if tensor.role is role}


# Healthy


@pytest.mark.parametrize("path", [FSDP2, TP_FSDP, SHARDED, HYBRID, LOCAL])
def test_a_healthy_step_is_silent_and_everything_is_placed(path):
    run = run_of(path, level=Level.FULL)
    assert not run.findings
    assert run.last_good.step == 2
    assert not [reason for identifier, reason in run.undetermined() if identifier == "REP001"]
    assert not [tensor for tensor in catalog_of(path).tensors if tensor.undetermined]


def test_meshes_are_recorded_and_replicas_follow_from_placements():
    for path, axes, weight, norm in (
        (FSDP2, {"fsdp": 3}, (), ()),
        (TP_FSDP, {"dp": 2, "tp": 2}, (), ("tp",)),
        (HSDP, {"dp_replicate": 2, "dp_shard": 2}, ("dp_replicate",), ("dp_replicate",)),
        (SHARDED, {"dp": 2}, (), ()),
        (HYBRID, {"dp_replicate": 2, "dp_shard": 2}, ("dp_replicate",), ("dp_replicate",)),
    ):
        catalog = catalog_of(path)
        assert dict(catalog.mesh.axes) == axes
        tensors = named(catalog)
        assert tensors["blocks.0.up.weight"].replica_axes == weight
        assert tensors["blocks.0.up.weight"].shape == (8, 5)
        assert tensors["blocks.0.norm.weight"].replica_axes == norm
        # What is stored plainly every rank has whole.
        assert tensors["scale"].replica_axes == tuple(axes)
        assert {tensor.shape for tensor in named(catalog, Role.COUNTER).values()} == {()}


def test_one_training_has_one_digest_in_every_form_that_fsdp1_saves(tmp_path):
    """As parts, through distributed checkpoints, gathered, and gathered under accelerate's names."""
    whole = put_together()
    for name, content in {"pytorch_model_fsdp.bin": whole["model"], "optimizer.bin": whole["optim"]}.items():
        (tmp_path / name).write_bytes(saved(content))
    sharded, through_dcp, accelerate, full = map(
        digests, (SHARDED / "step_2", DCP / "step_2", tmp_path, FULL / "step_2")
    )
    assert len(sharded) == 4 * 15 + 1
    assert through_dcp == sharded
    assert accelerate == sharded
    # What FSDP1 gathers on CPU has the second moments in the place of the first.
    assert {key for key in sharded if full[key] != sharded[key]} == {key for key in sharded if key[0] == "first_moment"}


def test_moments_that_are_one_tensor_are_found_in_what_fsdp1_gathers_on_cpu():
    (finding,) = run_of(FULL).findings
    assert (finding.id, len(finding.locations)) == ("OPT014", 15)


def test_flat_parameters_lie_over_ranks_as_they_say_and_so_does_their_state():
    catalog = catalog_of(LOCAL)
    assert {name: tensor.shape for name, tensor in named(catalog).items()} == {
        "_flat_param": (77,), "blocks.0._flat_param": (103,), "blocks.1._flat_param": (103,), "scale": (1,),
    }  # fmt: skip
    assert {tensor.shape for tensor in named(catalog, Role.SECOND_MOMENT).values()} == {(77,), (103,)}
    boxes = {
        (str(piece.coordinate), piece.region.start, piece.region.stop)
        for piece in catalog.pieces
        if piece.key == "optimizer.state.0.exp_avg"
    }
    assert boxes == {("dp=0", (0,), (39,)), ("dp=1", (39,), (77,))}


# Faults


def test_replicas_that_drift_are_found_along_their_axis_with_onset():
    run = run_of(HSDP)
    (finding,) = run.findings
    (interval,) = finding.intervals
    assert (finding.id, interval.last_good, interval.first_bad) == ("REP001", 2, 4)
    assert {place.tensor for place in finding.locations} == {"blocks.1.down.weight", "blocks.1.down.bias"}
    assert {place.coordinate for place in finding.locations} == {Coordinate.of(dp_replicate=1)}


@pytest.mark.parametrize("path", [FSDP2, SHARDED])
def test_a_missing_rank_file_leaves_a_hole_that_is_laid_to_it(path):
    objects = objects_of(path)
    del objects["step_2/rank_1.pt"]
    (finding,) = run_of(objects).findings
    assert finding.id in ("INT001", "INT004")
    assert {place.file for place in finding.locations} == {"step_2/rank_1.pt"}
    assert [file.name for file in catalog_of(objects).files if file.state is FileState.MISSING] == ["step_2/rank_1.pt"]


def test_the_mesh_says_how_many_ranks_there_were():
    objects = objects_of(FSDP2)
    del objects["step_2/rank_2.pt"]
    # Without a recorded world_size too, which is the script's; the mesh is torch's.
    for name, content in objects.items():
        assert b"world_size" in content
        objects[name] = content.replace(b"world_size", b"other_size")
    assert [file.name for file in catalog_of(objects).files if file.state is FileState.MISSING] == ["step_2/rank_2.pt"]


@pytest.mark.parametrize("path", [FSDP2, TP_FSDP, SHARDED, HYBRID])
def test_another_ranks_file(path):
    objects = objects_of(path)
    # Neither its name inside nor the script's own record tells: torch's records of meshes and groups do.
    objects["step_2/rank_0.pt"] = objects["step_2/rank_1.pt"].replace(b"rank_1/", b"rank_0/")
    problems = [problem for problem in catalog_of(objects).problems if problem.kind is ProblemKind.OTHER_RANK]
    assert [problem.file for problem in problems] == ["step_2/rank_0.pt"]
    finding = run_of(objects).findings[0]
    assert finding.id in ("INT006", "INT002")
    assert {place.file for place in finding.locations} == {"step_2/rank_0.pt"}


def test_a_damaged_value_is_placed_in_the_whole_tensor():
    catalog = catalog_of(TP_FSDP)
    numbers = {tensor.name: at for at, tensor in enumerate(catalog.tensors) if tensor.role is Role.PARAMETER}
    piece = next(
        piece for piece in catalog.pieces
        if piece.tensor == numbers["blocks.0.up.weight"] and piece.coordinate == Coordinate.of(dp=1, tp=1)
    )  # fmt: skip
    objects = objects_of(TP_FSDP)
    name = catalog.files[piece.file].name
    content = bytearray(objects[name])
    content[piece.offset : piece.offset + 4] = b"\x00\x00\xc0\x7f"
    objects[name] = bytes(content)
    finding = next(finding for finding in run_of(objects).findings if finding.id == "NUM001")
    (place,) = finding.locations
    assert (place.tensor, place.coordinate) == ("blocks.0.up.weight", Coordinate.of(dp=1, tp=1))
    assert place.file == "step_2/rank_3.pt"
    assert piece.region.start == (6, 0)


def test_a_mesh_whose_ranks_lie_nowhere_is_none():
    axes = tuple(Opaque(None, (), {"shape": (2,), "stride": (step,)}) for step in (2, 0))
    layout = Opaque(None, (), {"axes": axes})
    assert device_mesh(Opaque(None, (), {"_layout": layout, "_flatten_rank_map": (0, 1, 2, 3)})) is None


# Cuts


@pytest.mark.parametrize(("extent", "ranks"), [(8, 2), (7, 3), (5, 4), (1, 3), (0, 2)])
def test_a_cut_is_torchs_chunk(extent, ranks):
    torch = pytest.importorskip("torch")
    layout = MeshLayout((extent,), grid(("dp",), (ranks,)), (Cut(0),), (0,))
    chunks = [[*chunk] for chunk in torch.arange(extent).chunk(ranks)]
    for rank in range(ranks):
        covered = [n for held in layout.held(rank) for n in range(held.box.start[0], held.box.stop[0])]
        assert covered == (chunks[rank] if rank < len(chunks) else [])


@pytest.mark.parametrize(("extent", "degrees"), [(8, (2, 2)), (13, (3, 2)), (7, (2, 4)), (5, (4, 3))])
def test_strided_cuts_tile(extent, degrees):
    mesh = grid(("dp", "tp"), degrees)
    layout = MeshLayout((extent, 2), mesh, (Cut(0, degrees[1]), Cut(0)), (0, 1))
    rows = sorted(
        row for rank in range(degrees[0] * degrees[1]) for held in layout.held(rank)
        for row in range(held.box.start[0], held.box.stop[0])
    )  # fmt: skip
    assert rows == [*range(extent)]


# What a pickle takes from a class


def test_taking_a_class_from_a_class_is_harmless_and_calling_a_method_is_not():
    load = b"cpackage\nOuter\nX\x05\0\0\0%s\x86R"
    for name, calls in ((b"Inner", {"package.Outer.Inner": 1}), (b"drain", {"builtins.getattr": 1})):
        machine = PickleMachine({})
        machine.load(b"cbuiltins\ngetattr\n(" + (load % name)[:-2].replace(b"\x86", b"") + b"tR)R.")
        assert calls.items() <= machine.opaque.items()
    for owner in (b"cos\nsystem\n", b"cpackage\nlower\n"):
        machine = PickleMachine({})
        machine.load(b"cbuiltins\ngetattr\n(" + owner + b"X\x05\0\0\0InnertR.")
        assert machine.opaque == {"builtins.getattr": 1}
