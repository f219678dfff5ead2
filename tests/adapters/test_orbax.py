"""The adapter of Orbax, on what Orbax wrote; what TensorStore reads of it is kept as digests."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.orbax.adapter import Orbax
from auditor.adapters.orbax.metadata import Sharding
from auditor.adapters.orbax.mosaic import mosaic
from auditor.audit import audit
from auditor.containers.ocdbt import read_database
from auditor.model.catalog import Role
from auditor.model.region import whole
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.view.assemble import read_box
from tests.paths import HEALTHY as DEEPSPEED
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "orbax"
MANAGER = FIXTURES / "manager"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
HEALTHY = {
    # run: its steps
    "manager": [1, 2, 3], "zarr3": [2], "uncompressed": [2], "one_replica": [2], "several_files": [2],
    "files_zarr2": [3], "files_zarr3": [3], "files_uncompressed": [3], "standard": [0], "v1": [3], "composite": [2, 4],
    "flax_train_state": [3], "chunked/zarr2": [0], "chunked/zarr3": [0], "processes": [2, 4], "deep": [3],
}  # fmt: skip
ADAPTER = Orbax()


def digests_of(path):
    """Name of an array on disk to the SHA-256 of its elements as TensorStore read them; several items by item."""
    found = {}
    for item, arrays in EXPECTED.items():
        if (FIXTURES / item).is_relative_to(path):
            found |= {(item, name): told.rpartition(" ")[2] for name, told in arrays.items()}
    return found


def catalog_of(path, at=""):
    store = LocalStore(path)
    folder = Folder.read(store, at)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options())


def audited(name, level=Level.VALUES):
    (run,) = audit(LocalStore(FIXTURES / name), Settings(level=level, settle_seconds=0.0)).runs
    return run


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (FIXTURES / "zarr3" / "step_2", FIXTURES / "composite" / "ckpt_00000004")
    foreign = (DEEPSPEED / "global_step10", ROOT / "tests" / "fixtures" / "dcp" / "fsdp2_2" / "step-4")

    def comparable(self, elements):
        return hashlib.sha256(elements).digest()

    def framework_arrays(self, path):
        catalog = self.catalog(LocalStore(path))
        found = digests_of(path)
        keys = {(piece.tensor, piece.key) for piece in catalog.pieces}
        assert sorted(key for _, key in keys) == sorted(name for _, name in found)
        if path.parent.name == "composite":
            # Items have arrays of the same names.
            item = f"composite/{path.name}/params"
            return {
                (tensor.role.value, tensor.name): bytes.fromhex(found[item, tensor.name])
                for tensor in catalog.tensors
                if tensor.role is Role.PARAMETER
            }
        by_name = {name: digest for (_, name), digest in found.items()}
        named = {key: catalog.tensors[number] for number, key in keys}
        return {(tensor.role.value, tensor.name): bytes.fromhex(by_name[key]) for key, tensor in named.items()}


# Healthy checkpoints are silent, in every layout, and hold what TensorStore reads


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_silent(name):
    run = audited(name)
    assert [step.state.step for step in run.steps] == HEALTHY[name]
    assert not run.findings
    assert not run.unrecognised
    assert not any(step.failures for step in run.steps)
    assert run.last_good.step == HEALTHY[name][-1]


@pytest.mark.parametrize("level", [Level.NAMES, Level.HEADERS, Level.REPLICAS, Level.FULL])
def test_at_every_level(level):
    assert not audited("manager", level).findings
    assert not audited("files_zarr3", level).findings


@pytest.mark.parametrize("name", [*dict.fromkeys(name.partition("/")[0] for name in HEALTHY), "deep_odd"])
def test_every_tensor_is_what_tensorstore_reads(name):
    steps = [path for path in (FIXTURES / name).iterdir() if path.is_dir()]
    for path in steps:
        catalog, found = catalog_of(path), digests_of(path)
        keys = {piece.tensor: piece.key for piece in catalog.pieces}
        assert len(keys) == len(found) == len(catalog.tensors)
        digests = {}
        for number, key in keys.items():
            tensor = catalog.tensors[number]
            elements = read_box(LocalStore(path), catalog, number, 0, whole(tensor.shape)).tobytes()
            digests.setdefault(key, set()).add(hashlib.sha256(elements).hexdigest())
        wanted = {}
        for (_, key), digest in found.items():
            wanted.setdefault(key, set()).add(digest)
        assert digests == wanted


def test_one_state_is_one_catalog_in_every_layout():
    """The same training, saved in other layouts: names, roles, shapes, counters."""
    one, other = (catalog_of(FIXTURES / name) for name in ("zarr3/step_2", "one_replica/2"))
    assert other.tensors == one.tensors
    counted = [[(s.name, s.value, s.tensor) for s in catalog.scalars] for catalog in (one, other)]
    assert counted[0] == counted[1] != []


# Roles, counters, settings


def test_roles_and_names_follow_from_the_tree():
    catalog = catalog_of(MANAGER / "3")
    by_role = {role: {t.name for t in catalog.tensors if t.role is role} for role in Role}
    assert "block_0.attention.qkv" in by_role[Role.PARAMETER]
    assert by_role[Role.FIRST_MOMENT] == by_role[Role.SECOND_MOMENT] == by_role[Role.PARAMETER]
    assert len(by_role[Role.PARAMETER]) == 14
    assert {scalar.value for scalar in catalog.scalars if scalar.name == "optimizer_step"} == {3.0}


def test_betas_in_the_state_let_the_moments_be_judged():
    catalog = catalog_of(FIXTURES / "several_files" / "2")
    assert any(np.allclose(group.hyperparameters.get("betas", 0), (0.9, 0.99)) for group in catalog.groups)
    run = audited("several_files")
    assert "OPT011" not in {key for key, judged in run.steps[0].judgements.items() if judged.undetermined}


def test_items_are_parts_of_one_state():
    catalog = catalog_of(FIXTURES / "composite" / "ckpt_00000004")
    roles = {(tensor.role, tensor.name) for tensor in catalog.tensors}
    assert {(role, "kernel") for role in (Role.PARAMETER, Role.FIRST_MOMENT, Role.SECOND_MOMENT)} <= roles


def test_dtypes():
    catalog = catalog_of(FIXTURES / "dtypes" / "1")
    found = {tensor.name: tensor.dtype.name for tensor in catalog.tensors if tensor.role is Role.PARAMETER}
    assert all(name == dtype for name, dtype in found.items() if name in found.values())
    assert {"bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "complex64"} <= {*found}
    assert "bool" in {tensor.dtype.name for tensor in catalog.tensors}
    assert {"float4_e2m1fn", "int4", "int2"} <= {*found}
    assert not [file.detail for file in catalog.files if file.detail]


def test_elements_of_fewer_than_eight_bits_are_values():
    """One a byte, upper bits masked off: -4 is 0x0c. Their digests are those of the bits that they have."""
    (step,) = audited("dtypes").steps
    assert not step.judgements["NUM001"].undetermined
    catalog, store = catalog_of(FIXTURES / "dtypes" / "1"), LocalStore(FIXTURES / "dtypes" / "1")
    with ThreadPoolExecutor(1) as pool:
        seen = observe(store, catalog, wanted_rows(catalog), Everything(pool))
    numbers = {tensor.name: number for number, tensor in enumerate(catalog.tensors)}
    extrema = {}
    for name in ("int4", "float4_e2m1fn", "int2"):
        rows = catalog.rows_of(numbers[name], 0)
        extrema[name] = float(seen.pieces["minimum"][rows].min()), float(seen.pieces["maximum"][rows].max())
    assert extrema == {"int4": (-4.0, 3.0), "float4_e2m1fn": (-4.0, 3.0), "int2": (0.0, 1.0)}


def test_random_keys_are_objects_and_no_weights():
    """A typed key is told by array_metadatas alone, a legacy one by its name and form."""
    catalog = catalog_of(FIXTURES / "dtypes" / "1")
    found = {tensor.name: tensor for tensor in catalog.tensors if tensor.dtype.name == "uint32"}
    assert {name.rpartition(".")[2]: tensor.role for name, tensor in found.items()} == {
        "rng": Role.OBJECT, "legacy": Role.OBJECT
    }  # fmt: skip


# Meshes and mosaics


def test_a_chunk_has_the_place_of_the_replica_that_wrote_it():
    catalog = catalog_of(MANAGER / "3")
    assert catalog.mesh.axes == (("data", 2), ("model", 4))
    number = next(n for n, t in enumerate(catalog.tensors) if (t.name, t.role) == ("embed", Role.PARAMETER))
    places = {piece.region.start[0]: piece.coordinate.as_dict() for piece in catalog.pieces if piece.tensor == number}
    assert places == {32 * at: {"data": at % 2, "model": at // 2} for at in range(8)}
    assert catalog.tensors[number].stored_once == ("data",)


def test_each_process_wrote_the_chunks_that_are_said_to_be_its():
    """Two processes of four devices: the first has data=0. Their own databases say who wrote what."""
    catalog = catalog_of(FIXTURES / "processes" / "4")
    store = LocalStore(FIXTURES / "processes" / "4" / "default")
    wrote = [{*read_database(store, f"ocdbt.process_{rank}").values} for rank in range(2)]
    assert not any(key in wrote[1] for key in wrote[0])
    checked = 0
    for piece in catalog.pieces:
        tensor = catalog.tensors[piece.tensor]
        if tensor.shape:
            extents = piece.region.shape
            at = ".".join(str(a // n) for a, n in zip(piece.region.start, extents, strict=True))
            assert f"{piece.key}/{at}" in wrote[piece.coordinate.as_dict()["data"]]
            checked += 1
    assert checked == 48


def test_without_stripes_replica_0_wrote_all():
    catalog = catalog_of(FIXTURES / "one_replica" / "2")
    assert {place.as_dict().get("data", 0) for place in catalog.pieces.coordinates} == {0}


@pytest.mark.parametrize(
    ("shape", "chunk", "written", "spec", "starts"),
    [
        ((16, 8), (2, 8), (2, 8), (("m",),), {0: "d=0,m=0", 2: "d=1,m=0", 4: "d=0,m=1", 14: "d=1,m=3"}),
        ((16,), (2,), None, (), {0: "d=0,m=0", 2: "d=0,m=1", 8: "d=1,m=0", 14: "d=1,m=3"}),
        ((16,), (8,), (8,), (), {0: "d=0,m=0", 8: "d=0,m=1"}),  # max_replicas_for_replica_parallel = 2
        ((16,), (16,), (16,), (), {0: "d=0,m=0"}),
        ((16,), (4,), (16,), (), {0: "d=0,m=0", 12: "d=0,m=0"}),
        ((16,), (1,), (2,), (("d", "m"),), {0: "d=0,m=0", 4: "d=0,m=2", 15: "d=1,m=3"}),
    ],
)  # fmt: skip
def test_stripes_by_the_writers_rule(shape, chunk, written, spec, starts):
    found = mosaic(Sharding((("d", 2), ("m", 4)), spec), shape, chunk, written)
    assert {start: str(found.coordinate((start, *[0] * (len(shape) - 1)))) for start in starts} == starts


@pytest.mark.parametrize(
    ("shape", "chunk", "written", "spec"),
    [
        ((15,), (2,), (2,), ()), ((16,), (3,), (3,), ()), ((16,), (5,), (16,), ()), ((6,), (1,), None, (("m",),)),
        ((16, 8), (16, 4), (16, 4), ()), ((16,), (2,), None, ((), (), ())), ((0,), (1,), None, ()),
    ],
)  # fmt: skip
def test_stripes_that_fit_no_rule_have_no_place(shape, chunk, written, spec):
    assert mosaic(Sharding((("d", 2), ("m", 4)), spec), shape, chunk, written) is None


def test_stored_once_is_undetermined():
    (step,) = audited("deep").steps
    (reason,) = step.judgements["REP001"].undetermined
    assert reason == "stored once along data: other replicas are not on disk (auditor.hooks witnesses them)"


def test_a_replica_with_other_gradients_shows_in_its_stripes():
    run = audited("deep_odd")
    (finding,) = run.findings
    assert finding.id == "REP002"
    assert finding.severity.name == "WARNING"
    assert [str(place) for place in finding.minority] == ["data=5"]
    assert "p = 5e-05" in finding.message


def test_the_layout_that_maxtext_documents():
    """By hand, after its documentation: no MaxText ran. CheckpointManager, the item `items`, OCDBT over Zarr v3."""
    moved = {
        f"7/items/{path.relative_to(FIXTURES / 'zarr3' / 'step_2').as_posix()}": path.read_bytes()
        for path in (FIXTURES / "zarr3" / "step_2").rglob("*")
        if path.is_file() and path.name != "_CHECKPOINT_METADATA"
    }
    marks = {"7/_CHECKPOINT_METADATA": b'{"item_handlers": {"items": "x"}, "commit_timestamp_nsecs": 1}',
             "7/commit_success.txt": b"", "7/iter/process_0-of-1.json": b"{}"}  # fmt: skip
    (run,) = audit(MemoryStore({**moved, **marks}), Settings(level=Level.VALUES, settle_seconds=0.0)).runs
    assert [(step.state.step, step.state.commit.value) for step in run.steps] == [(7, "committed")]
    assert not run.findings


# What is a step, and what is not


def test_items_and_processes_are_no_steps_of_their_own():
    for path in ("3/default", "3/default/ocdbt.process_0"):
        store = LocalStore(MANAGER)
        assert isinstance(ADAPTER.recognise(store, Folder.read(store, path)), Declined)
    assert len(audit(LocalStore(MANAGER / "3"), Settings()).runs) == 1
    assert len(audit(LocalStore(MANAGER / "3" / "default"), Settings()).runs) == 1
