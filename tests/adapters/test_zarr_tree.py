"""The adapter of Zarr trees: what an export writes, and what a few lines of zarr-python write from the layout page."""

import json
import re
import shutil

import numpy as np
import pytest
import zarr

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.registry import recognise
from auditor.adapters.zarr_tree.adapter import ZarrTree
from auditor.adapters.zarr_tree.files import coordinate_of
from auditor.audit import audit
from auditor.containers import zarr_array
from auditor.exporting import export
from auditor.model.catalog import FileState, ProblemKind, Role
from auditor.model.dtype import BFLOAT16, FLOAT32
from auditor.model.mesh import Coordinate, Mesh
from auditor.model.region import whole
from auditor.settings import Level, Settings, StepChoice
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.testing.recording import RecordingStore
from auditor.verdict import ExitCode, exit_code
from auditor.view.assemble import read_box
from tests.paths import ROOT, TP2_PP2
from tests.paths import RUN as DEEPSPEED

ADAPTER = ZarrTree()
PAGE = (ROOT / "docs/zarr-layout.md").read_text()
CODE = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
NORM = ("parameter", "norm.weight")
MOMENT = ("first_moment", "layers.0/w")


def write_step(*arguments, **choices):
    """The writer of the layout page, as it stands there."""
    space = {}
    exec(CODE, space)
    space["write_step"](*arguments, **choices)


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory):
    """Two steps, replicas over tp, one tensor in six chunks with ragged edges, bfloat16, no optional attribute."""
    root = tmp_path_factory.mktemp("plain")
    for step in (7, 9):
        tensors = {
            ("parameter", "layers.0/w"): values(step, 5, 3), MOMENT: values(step + 1, 5, 3),
            ("parameter", "bits"): np.arange(12, dtype="uint16"), ("counter", "steps"): np.full((1,), step),
            ("buffer", "zeros"): np.zeros((4,), "float32"), ("parameter", "10.w"): values(2, 2),
            ("parameter", "9.w"): values(3, 2),
        }  # fmt: skip
        norm = {NORM: values(step + 2, 6)}
        replicas = {"tp=0": norm, "tp=1": norm}
        write_step(root, step, tensors, replicas, mesh={"tp": 2, "dp": 4}, carried={"bits": "bfloat16"})
        chunked = zarr.create_array(
            root, name=f"steps/{step}/tensors/buffer/chunked", shape=(5, 5), chunks=(2, 3), dtype="float32",
            compressors=None, config={"write_empty_chunks": True},
        )  # fmt: skip
        chunked[...] = values(step + 3, 5, 5)
        scalar = zarr.create_array(root, name=f"steps/{step}/tensors/buffer/scalar", shape=(), dtype="float64",
                                   compressors=None, config={"write_empty_chunks": True})  # fmt: skip
        scalar[...] = step
    return root


@pytest.fixture
def run(plain_run, tmp_path):
    shutil.copytree(plain_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    target = tmp_path_factory.mktemp("exported") / "pp.zarr"
    export(LocalStore(TP2_PP2), str(target), Settings(tensors="3.input_layernorm.weight"))
    return target


class TestContract(AdapterContract):
    adapter = ADAPTER
    foreign = (DEEPSPEED / "global_step10", DEEPSPEED, TP2_PP2)

    @pytest.fixture(autouse=True)
    def _checkpoints(self, plain_run, exported):
        self.checkpoints = (plain_run / "steps/9", exported / "steps/6")

    def framework_arrays(self, path):
        group = zarr.open_group(path, mode="r")
        found = {}
        for role, held in group["tensors"].groups():
            for _, array in held.arrays():
                name = array.path.rpartition("/")[2].replace("%2F", "/")
                found[role, name] = array[...].tobytes()
        for _, place in group["replicas"].groups():
            for role, held in place.groups():
                found |= {(role, array.path.rpartition("/")[2]): array[...].tobytes() for _, array in held.arrays()}
        return found


# What the tests below share


def read(root, path="steps/9"):
    store = root if not hasattr(root, "joinpath") else LocalStore(root)
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options())


def audited(root, **choices):
    report = audit(LocalStore(root), Settings(**choices))
    return report, report.runs[0]


def ids(found):
    """Of all findings, with what follows from them."""
    return {name for finding in found.findings for name in (finding.id, *finding.consequences)}


def document(root, path, **changes):
    """Change a node's document; the path to it."""
    file = root / path / "zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


def tensor_of(catalog, name, role="parameter"):
    (number,) = [n for n, t in enumerate(catalog.tensors) if (t.name, t.role.value) == (name, role)]
    return number


# The page


def test_the_writer_of_the_page_is_short():
    assert len(CODE.strip().splitlines()) <= 35


def test_a_tree_written_from_the_page_alone_is_audited(plain_run):
    report, found = audited(plain_run)
    assert [(step.state.step, step.state.format) for step in found.steps] == [(7, "zarr-tree"), (9, "zarr-tree")]
    assert found.findings == []
    assert exit_code(report) is ExitCode.HOLDS
    assert found.steps[0].judgements["REP001"].num_holds == 1
    assert found.mesh == Mesh((("tp", 2), ("dp", 4)))
    assert found.coverage.num_bytes_read > 0


def test_what_the_page_makes_of_it(plain_run):
    catalog = read(plain_run)
    by_name = {(t.role, t.name): t for t in catalog.tensors}
    assert by_name[Role.PARAMETER, "bits"].dtype == BFLOAT16
    assert by_name[Role.BUFFER, "chunked"].dtype == FLOAT32
    assert (Role.FIRST_MOMENT, "layers.0/w") in by_name
    norm = tensor_of(catalog, "norm.weight")
    assert catalog.replicas[norm] == (Coordinate.of(tp=0), Coordinate.of(tp=1))
    assert catalog.tensors[norm].replica_axes == ("tp",)
    assert by_name[Role.PARAMETER, "9.w"].order < by_name[Role.PARAMETER, "10.w"].order
    assert len(catalog.rows_by_tensor[tensor_of(catalog, "chunked", "buffer")]) == 6
    assert recognise(LocalStore(plain_run / "steps"), Folder.read(LocalStore(plain_run / "steps"), "9"))[1].step == 9


def test_drift_is_found_at_its_place(run):
    chunk = run / "steps/9/replicas/tp=1/parameter/norm.weight/c/0"
    content = np.frombuffer(chunk.read_bytes(), "float32").copy()
    content[4] += 1
    chunk.write_bytes(content.tobytes())
    _, found = audited(run)
    (finding,) = found.findings
    (location,) = finding.locations
    assert finding.id == "REP001"
    assert (location.step, location.tensor, location.first_index) == (9, "norm.weight", (4,))
    assert {str(location.coordinate), str(location.reference)} == {"tp=0", "tp=1"}
    assert found.last_good.step == 7


def test_one_step_may_be_opened_by_itself(plain_run):
    _, found = audited(plain_run / "steps/9")
    assert [step.state.step for step in found.steps] == [9]
    _, found = audited(plain_run / "steps")
    assert [step.state.step for step in found.steps] == [7, 9]


def test_large_runs_are_weighed_by_all_their_files(plain_run, monkeypatch):
    size = sum(file.stat().st_size for file in plain_run.glob("steps/*/**/*") if file.is_file())
    monkeypatch.setattr("auditor.listing.LARGE_RUN_BYTES", size)
    assert [step.level for step in audited(plain_run)[1].steps] == [Level.VALUES, Level.VALUES]
    monkeypatch.setattr("auditor.listing.LARGE_RUN_BYTES", size - 1)
    assert [step.level for step in audited(plain_run)[1].steps] == [Level.REPLICAS, Level.VALUES]


# What is missing


def test_a_missing_chunk_is_a_missing_file_and_never_zeros(run):
    (run / "steps/7/tensors/buffer/chunked/c/1/1").unlink()
    catalog = read(run, "steps/7")
    assert [f.name for f in catalog.files if f.state is FileState.MISSING] == ["steps/7/tensors/buffer/chunked/c/1/1"]
    report, found = audited(run)
    assert ids(found) == {"INT001", "COV001"}
    assert found.findings[0].locations[0].file == "steps/7/tensors/buffer/chunked/c/1/1"
    assert exit_code(report) is ExitCode.VIOLATED
    assert [step.state.step for step in found.steps if step.judgements["COV001"].violations] == [7]


def test_chunks_of_zeros_that_zarr_leaves_out_are_missing(tmp_path):
    zarr.create_array(tmp_path, name="steps/1/tensors/parameter/w", data=np.zeros(4, "float32"), compressors=None)
    catalog = read(tmp_path, "steps/1")
    (lost,) = [file for file in catalog.files if file.state is FileState.MISSING]
    assert "write_empty_chunks" in lost.detail


def test_a_lost_replica_is_known_by_the_mesh(run):
    shutil.rmtree(run / "steps/9/replicas/tp=1/parameter/norm.weight")
    catalog = read(run)
    (lost,) = [file for file in catalog.files if file.state is FileState.MISSING]
    assert lost.name == "steps/9/replicas/tp=1/parameter/norm.weight/zarr.json"
    norm = tensor_of(catalog, "norm.weight")
    assert len(catalog.rows_of(norm, 1)) == 1
    _, found = audited(run, settle_seconds=0.0)
    assert "INT001" in ids(found)


def test_the_replica_under_tensors_is_the_lowest(run):
    there = run / "steps/9/tensors/parameter/norm.weight"
    shutil.move(run / "steps/9/replicas/tp=0/parameter/norm.weight", there)
    catalog = read(run)
    norm = tensor_of(catalog, "norm.weight")
    assert catalog.replicas[norm] == (Coordinate.of(tp=0), Coordinate.of(tp=1))
    names = [catalog.file_of(int(catalog.rows_of(norm, replica)[0])).name for replica in (0, 1)]
    assert names == [f"steps/9/{at}/parameter/norm.weight/c/0" for at in ("tensors", "replicas/tp=1")]
    shutil.copytree(there, run / "steps/9/replicas/tp=0/parameter/norm.weight")
    catalog = read(run)
    assert catalog.unclaimed == ("steps/9/tensors/parameter/norm.weight",)
    assert not audited(run)[1].findings


def test_stated_replicas_count_for_more_than_the_mesh(run):
    path = "steps/9/replicas/tp=1/parameter/norm.weight"
    shutil.rmtree(run / "steps/9/replicas/tp=0")
    document(run, path, attributes={"auditor": {"replicas": [{"tp": 1}]}})
    catalog = read(run)
    assert catalog.replicas[tensor_of(catalog, "norm.weight")] == (Coordinate.of(tp=1),)
    assert all(file.state is FileState.PRESENT for file in catalog.files)
    assert not catalog.problems


def test_replicas_without_a_mesh(run):
    (run / "steps/9/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    catalog = read(run)
    assert [(p.kind, p.message) for p in catalog.problems] == [
        (ProblemKind.METADATA, "states no mesh, so it is not known how many replicas there must be")
    ]
    assert catalog.mesh == Mesh((("tp", 2),))


def test_a_mesh_that_is_too_small(run):
    document(run, "steps/9", attributes={"auditor": {"mesh": {"tp": 1}}})
    (problem,) = read(run).problems
    assert "there is a replica at tp=1" in problem.message
    assert "MET002" in ids(audited(run)[1])


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "group", "denied role"])
def test_a_lost_document_of_a_replica_is_laid_to_it(run, damage):
    file = run / "steps/9/replicas/tp=1/parameter/norm.weight/zarr.json"
    if damage == "denied role":
        file.parent.rename(run / "steps/9/replicas/tp=1/weights")
        catalog = read(run)
        assert any("is named after no role" in f.detail for f in catalog.files if f.state is FileState.UNREADABLE)
        return
    changed = {"empty": "", "cut": file.read_text()[:40], "group": '{"zarr_format": 3, "node_type": "group"}'}
    if damage == "missing":
        file.unlink()
    else:
        file.write_text(changed[damage])
    catalog = read(run)
    (lost,) = [f for f in catalog.files if f.state is not FileState.PRESENT]
    states = {"missing": FileState.MISSING, "group": FileState.UNREADABLE, "empty": FileState.CUT_SHORT}
    wanted = states.get(damage, FileState.DAMAGED)
    assert (lost.name, lost.state) == (file.relative_to(run).as_posix(), wanted)
    assert len(catalog.rows_of(tensor_of(catalog, "norm.weight"), 1)) == 1
    assert exit_code(audited(run, settle_seconds=0.0)[0]) is (
        ExitCode.INCOMPLETE if damage == "group" else ExitCode.VIOLATED
    )


def test_an_unfinished_step_is_recognised_and_lacks_its_document(run):
    (run / "steps/9/zarr.json").unlink()
    catalog = read(run)
    assert [f.name for f in catalog.files if f.state is FileState.MISSING] == ["steps/9/zarr.json"]
    _, found = audited(run)
    assert [step.state.commit.name for step in found.steps] == ["COMMITTED", "IN_PROGRESS"]
    assert "INT004" in ids(audited(run, settle_seconds=0.0)[1])


# What can't be read


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "bz2"}]}, "codec bz2"),
        ({"codecs": [{"name": "sharding_indexed", "configuration": {}}]},
         "codec sharding_indexed without the shape of its chunks"),
        ({"codecs": [{"name": "transpose"}, {"name": "bytes"}]}, "codec transpose"),
        ({"data_type": "string"}, "data type string"), ({"data_type": "int3"}, "data type int3"),
        ({"data_type": {"name": "numpy.datetime64", "configuration": {}}}, "data type numpy.datetime64"),
        ({"chunk_grid": {"name": "rectilinear", "configuration": {}}}, "chunk grid rectilinear"),
        ({"chunk_key_encoding": {"name": "mine"}}, "chunk keys mine"),
        ({"attributes": {"auditor": {"source_dtype": "bfloat16"}}}, "data type float32 for bfloat16"),
        ({"storage_transformers": [{"name": "x"}]}, "storage transformers"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_undetermined_and_makes_the_audit_incomplete(run, changes, reason):
    document(run, "steps/9/tensors/parameter/9.w", **changes)
    catalog = read(run)
    (unread,) = [file for file in catalog.files if file.state is FileState.UNREADABLE]
    assert unread.detail == f"{reason} is not read"
    report, found = audited(run)
    assert not found.findings
    assert exit_code(report) is ExitCode.INCOMPLETE


@pytest.mark.parametrize("compressor", [zarr.codecs.ZstdCodec(), zarr.codecs.GzipCodec(), "auto"])
@pytest.mark.parametrize("shards", [None, (4, 4)])
def test_a_compressed_tree_by_zarr_itself_is_read(tmp_path, compressor, shards):
    chunks = {"chunks": (4, 4) if shards else (2, 4), "shards": shards}
    for step in (1, 2):
        name = f"steps/{step}/tensors/parameter/w"
        zarr.create_array(tmp_path, name=name, data=values(step, 8, 4), compressors=compressor, **chunks)
    catalog = read(tmp_path, "steps/1")
    assert read_box(LocalStore(tmp_path), catalog, 0, 0, whole((8, 4))).tobytes() == values(1, 8, 4).tobytes()
    report, found = audited(tmp_path)
    assert exit_code(report) is ExitCode.HOLDS
    assert found.findings == []
    chunk = tmp_path / "steps/2/tensors/parameter/w/c/0/0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    assert ids(audited(tmp_path)[1]) == {"INT015"}


@pytest.mark.parametrize(
    ("encoding", "separator", "keys"),
    [("default", ".", "c.{}.{}"), ("v2", ".", "{}.{}"), ("v2", "/", "{}/{}"), ("default", "/", "c/{}/{}")],
)
def test_chunk_keys(tmp_path, encoding, separator, keys):
    content = values(1, 9, 10)
    zarr.create_array(
        tmp_path, name="steps/1/tensors/parameter/w", data=content, chunks=(2, 3), compressors=None,
        chunk_key_encoding={"name": encoding, "separator": separator}, config={"write_empty_chunks": True},
    )  # fmt: skip
    assert (tmp_path / "steps/1/tensors/parameter/w" / keys.format(4, 3)).is_file()
    catalog = read(tmp_path, "steps/1")
    assert len(catalog.pieces) == 20
    assert all(file.state is FileState.PRESENT for file in catalog.files)
    (tmp_path / "steps/1/tensors/parameter/w" / keys.format(4, 3)).unlink()
    assert sum(file.state is FileState.MISSING for file in read(tmp_path, "steps/1").files) == 1
    assert exit_code(audited(tmp_path, settle_seconds=0.0)[0]) is ExitCode.VIOLATED
    (piece,) = [piece for piece in catalog.pieces if piece.region.stop == (9, 10)]
    assert (piece.shape, piece.strides) == ((1, 1), (3, 1))


# Contradictions


def test_replicas_of_different_shape(run):
    shutil.rmtree(run / "steps/9/replicas/tp=1")
    write_step(run, 9, {}, {"tp=1": {NORM: values(1, 7)}}, mesh={"tp": 2})
    (problem,) = read(run).problems
    assert problem.kind is ProblemKind.RANKS_DISAGREE
    assert "float32[7], expected is float32[6]" in problem.message


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": "other"}, "was written as name other"), ({"role": "master"}, "was written as role master"),
        ({"step": 7}, "was written as step 7"), ({"coordinate": {"tp": 0}}, "was written as coordinate {'tp': 0}"),
    ],
)  # fmt: skip
def test_an_array_in_another_ones_place(run, attributes, message):
    document(run, "steps/9/replicas/tp=1/parameter/norm.weight", attributes={"auditor": attributes})
    (problem,) = read(run).problems
    assert (problem.kind, problem.message) == (ProblemKind.OTHER_RANK, message)
    assert "INT006" in ids(audited(run)[1])


def test_a_folder_named_after_another_step(run):
    document(run, "steps/9", attributes={"auditor": {"mesh": {"tp": 2}, "step": 8}})
    match = ADAPTER.recognise(LocalStore(run), Folder.read(LocalStore(run), "steps/9"))
    assert (match.step, match.named_step) == (8, 9)


def test_names_that_are_one_after_decoding(run):
    shutil.copytree(run / "steps/9/tensors/parameter/9.w", run / "steps/9/tensors/parameter/%39.w")
    catalog = read(run)
    (problem,) = catalog.problems
    assert problem.message == "is called 9.w, as another array is"
    tensor_of(catalog, "9.w")


# Hostile input


def array_document(**changes):
    return json.dumps({
        "zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}], "fill_value": 0, **changes,
    }).encode()  # fmt: skip


def chunked(*shape):
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}}}


def tree(content, chunks=None):
    objects = {"steps/1/zarr.json": b'{"zarr_format": 3, "node_type": "group"}',
               "steps/1/tensors/parameter/w/zarr.json": content}  # fmt: skip
    return objects | {f"steps/1/tensors/parameter/w/{key}": value for key, value in (chunks or {}).items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [1 << 40, 1 << 40], **chunked(1, 1)}, {"shape": [-1]}, {"shape": [True]}, {"shape": "4"},
        {"shape": [4, 4]}, chunked(0), chunked(1 << 50), chunked(), {"shape": [1] * 65, **chunked(*[1] * 65)},
        {"data_type": 7}, {"codecs": []}, {"codecs": "bytes"}, {"zarr_format": 2}, {"node_type": "thing"},
        {"attributes": []}, {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "../"}}},
    ],
)  # fmt: skip
def test_documents_that_lie_are_damaged(changes):
    catalog = read(MemoryStore(tree(array_document(**changes))), "steps/1")
    (file,) = [file for file in catalog.files if file.name.endswith("w/zarr.json")]
    assert file.state is FileState.DAMAGED
    assert file.detail


@pytest.mark.parametrize("shape", [(10**9,), (10**5, 10**4), (2, 10**9), (10**3, 10**3, 10**3)])
def test_a_grid_of_a_milliard_missing_chunks_is_bounded(shape):
    present = "c/" + "/".join(["1"] * len(shape))
    content = array_document(shape=list(shape), **chunked(*[1] * len(shape)))
    store = RecordingStore(tree(content, {present: b"1234", "c/09": b"", f"{present}x": b"", "c/../../x": b""}))
    catalog = read(store, "steps/1")
    assert len(catalog.pieces) == 257
    assert sum(file.state is FileState.MISSING for file in catalog.files) == 256
    report = audit(store, Settings(settle_seconds=0.0))
    assert exit_code(report) is ExitCode.VIOLATED


def test_chunks_of_another_length_are_damaged():
    for length in (0, 15, 17):
        catalog = read(MemoryStore(tree(array_document(), {"c/0": b"x" * length})), "steps/1")
        (file,) = [file for file in catalog.files if file.name.endswith("c/0")]
        assert (file.state, file.detail) == (
            FileState.DAMAGED, f"it has {length} bytes, a chunk of its array has 16",
        )  # fmt: skip


def test_links_that_lead_back_end(run, monkeypatch):
    monkeypatch.setattr("auditor.adapters.zarr_tree.files._FEW_CHUNKS", 0)
    chunks = run / "steps/9/tensors/buffer/chunked/c"
    (chunks / "2/loop").symlink_to("../..")
    shutil.rmtree(chunks / "1")
    (chunks / "1").symlink_to(".")
    (run / "steps/9/tensors/loop").symlink_to("../../..")
    catalog = read(run)
    assert sum(file.state is FileState.MISSING for file in catalog.files) == 2
    assert len(list(ADAPTER.files(LocalStore(run), Folder.read(LocalStore(run), "steps/9")))) < 200


def test_a_mesh_and_coordinates_that_can_not_be(run):
    for mesh in ({"tp": 10**9}, {"tp": -1}, {"../x": 2}, {"tp": True}, [2], {f"a{n}": 2 for n in range(30)}):
        document(run, "steps/9", attributes={"auditor": {"mesh": mesh}})
        assert "states no mesh" in read(run).problems[0].message
    for name in ("tp=", "tp=01", "tp=-1", "tp=1,tp=1", "dp=0,tp=1,", "TP=1", "tp=1,pp=0", ""):
        assert coordinate_of(name) is None
    assert coordinate_of("pp=0,tp=1") == Coordinate.of(pp=0, tp=1)
    assert coordinate_of("all") == Coordinate()
    assert dict(coordinate_of("cls=1").indices) == {"cls": 1}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 300, "dp": 300}])
def test_a_mesh_is_not_taken_for_a_list_of_replicas_without_end(run, mesh):
    write_step(run, 9, {}, {"dp=299,tp=299": {("parameter", "far"): values(1, 6)}}, mesh=mesh)
    catalog = read(run)
    assert len(catalog.pieces) < 1000
    assert any("replicas" in problem.message or "mesh" in problem.message for problem in catalog.problems)


def test_lists_of_the_catalog_that_say_nothing_are_left_out(run):
    nonsense = [None, 3, [], {}, [[]], [1, 2, 3, 4, 5], {"name": 1}, {"kind": "x", "message": "", "file": ""}]
    nonsense += [["w", "parameter", "float32", [1 << 40, 1 << 40], 1], ["w", "master", "float32", [1] * 99, 1]]
    keys = ("tensors", "replicas", "files", "scalars", "problems", "groups", "ties", "not_implied")
    group = zarr.open_group(run, path="steps/9/catalog")
    before = read(run)
    for value in (nonsense, "text", 7, {"a": 1}):
        group.attrs["auditor"] = dict.fromkeys(keys, value)
        after = read(run)
        assert (after.tensors, after.scalars, after.problems) == (before.tensors, before.scalars, before.problems)
        assert not after.groups
        assert not after.ties


def test_other_versions_are_declined(run):
    document(run, "steps/9", attributes={"auditor": {"schema_version": 2}})
    verdict = ADAPTER.recognise(LocalStore(run), Folder.read(LocalStore(run), "steps/9"))
    assert isinstance(verdict, Declined)
    assert "version 2" in verdict.reason
    assert exit_code(audited(run)[0]) is ExitCode.INCOMPLETE


@pytest.mark.parametrize("key", ["c", "c/0", "c/00/0", "c/0/3", "c/3/0", "c/-1/0", "c/0/0/0", "d/0/0", "c/٣/0", "0/0"])
def test_keys_that_are_no_chunk(key):
    array = zarr_array.ZarrArray({}, (5, 5), (2, 2), "float32")
    assert array.position("c/2/1") == (2, 1)
    if key != "c/0/3":
        assert array.position(key) is None
    assert array.key((2, 1)) == "c/2/1"


def test_steps_can_be_chosen(plain_run):
    _, found = audited(plain_run, steps=StepChoice("7"))
    assert [step.state.step for step in found.steps] == [7]
