"""What is wrong with an Orbax checkpoint: lost files, torn saves, damage that Orbax restores without a word."""

import json

import numpy as np
import pytest

from auditor.audit import audit
from auditor.containers.ocdbt import read_database
from auditor.model.finding import Severity
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from tests import ocdbt_writer
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "orbax"
MANAGER, PLAIN, FILES = FIXTURES / "manager", FIXTURES / "uncompressed", FIXTURES / "files_zarr2"
ITEM = "3/default"


def objects_of(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def audited(objects, level=Level.VALUES, **settings):
    (run,) = audit(MemoryStore(objects), Settings(level=level, settle_seconds=0.0, **settings)).runs
    return run


def found(run):
    """Primary id to the finding; each once."""
    assert len({finding.id for finding in run.findings}) == len(run.findings)
    return {finding.id: finding for finding in run.findings}


def only(run, wanted):
    (finding,) = run.findings
    assert finding.id == wanted, finding
    return finding


def files(finding):
    return sorted({location.file for location in finding.locations})


def largest(objects, beginning):
    """The largest file below a folder: there the large values are."""
    return max((name for name in objects if name.startswith(beginning)), key=lambda name: len(objects[name]))


# Files of databases


def test_a_lost_manifest_takes_its_arrays_along():
    objects = objects_of(MANAGER)
    del objects[f"{ITEM}/manifest.ocdbt"]
    run = audited(objects)
    finding = only(run, "INT001")
    assert files(finding) == [f"{ITEM}/manifest.ocdbt"]
    assert "COV001" in finding.consequences
    assert run.last_good.step == 2


def test_a_lost_process_folder_takes_its_values_along():
    lost = f"{ITEM}/ocdbt.process_0/"
    objects = {name: raw for name, raw in objects_of(MANAGER).items() if not name.startswith(lost)}
    finding = only(audited(objects), "INT001")
    assert all(file.startswith(f"{ITEM}/ocdbt.process_0/d/") for file in files(finding))
    assert "COV001" in finding.consequences


@pytest.mark.parametrize("root", [MANAGER, PLAIN])
def test_a_cut_data_file(root):
    objects = objects_of(root)
    name = largest(objects, f"{ITEM}/ocdbt.process_0/d/" if root is MANAGER else "2/ocdbt.process_0/d/")
    objects[name] = objects[name][: len(objects[name]) // 4]
    finding = only(audited(objects), "INT002")
    assert files(finding) == [name]
    assert f"it has {len(objects[name])}" in finding.message


def test_a_flipped_bit_in_a_node_fails_its_checksum():
    objects = objects_of(MANAGER)
    name = largest(objects, f"{ITEM}/d/")
    raw = bytearray(objects[name])
    raw[len(raw) // 2] ^= 4
    objects[name] = bytes(raw)
    finding = only(audited(objects), "INT002")
    assert files(finding) == [name]
    assert "CRC-32C" in finding.message


@pytest.mark.parametrize("name", ["_METADATA", "_sharding", "array_metadatas/process_0"])
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"a": ' * 500 + b"1" + b"}" * 500])
def test_broken_json_is_a_damaged_file(name, content):
    step = {file: raw for file, raw in objects_of(MANAGER).items() if file.startswith("3/")}
    finding = only(audited({**step, f"{ITEM}/{name}": content}, Level.HEADERS), "INT002")
    assert files(finding) == [f"{ITEM}/{name}"]


# Metadata that disagrees


def test_a_leaf_that_is_not_stored():
    objects = objects_of(MANAGER)
    tree = json.loads(objects[f"{ITEM}/_METADATA"])
    rows = tree["tree_metadata"]
    row = json.loads(json.dumps(rows["('params', 'embed')"]).replace("embed", "head"))
    rows["('params', 'head')"] = row
    objects[f"{ITEM}/_METADATA"] = json.dumps(tree).encode()
    finding = only(audited(objects), "COV003")
    assert "params.head" in finding.message


def test_an_array_that_the_tree_does_not_list():
    objects = objects_of(MANAGER)
    tree = json.loads(objects[f"{ITEM}/_METADATA"])
    del tree["tree_metadata"]["('params', 'final_norm', 'scale')"]
    objects[f"{ITEM}/_METADATA"] = json.dumps(tree).encode()
    run = audited(objects)
    assert any("params.final_norm.scale" in finding.message for finding in run.findings)


def test_two_paths_under_one_name():
    run = audited(objects_of(FIXTURES / "collision"))
    finding = only(run, "MET002")
    assert "('params', 'a.b')" in finding.message
    assert "one of them is lost" in finding.message


# Chunks that are files of their own


@pytest.mark.parametrize(
    ("layout", "chunk"), [("files_zarr2", "0.0"), ("files_zarr3", "c/0/0"), ("files_zarr2", "7.0")]
)
def test_a_missing_chunk_is_a_missing_file(layout, chunk):
    objects = objects_of(FIXTURES / layout)
    name = next(name for name in objects if name.endswith(f"params.kernel/{chunk}"))
    del objects[name]
    finding = only(audited(objects), "INT001")
    assert files(finding) == [name]
    assert "COV001" in finding.consequences


@pytest.mark.parametrize("layout", ["files_zarr2", "files_zarr3"])
def test_a_broken_frame_names_the_file_and_the_tensor(layout):
    objects = objects_of(FIXTURES / layout)
    name = next(name for name in objects if name.endswith(("mu.kernel/3.0", "mu.kernel/c/3/0")))
    objects[name] = objects[name][:6] + b"\xff\xff\xff" + objects[name][9:]
    finding = only(audited(objects), "INT015")
    (location,) = finding.locations
    assert (location.file, location.tensor, location.role.value) == (name, "kernel", "first_moment")
    assert str(location.coordinate) == "data=1,model=1"


def test_a_flipped_bit_in_a_compressed_chunk():
    """zstd stores no checksum here: some flips decode, to numbers that may be true. Never a traceback."""
    objects = objects_of(FIXTURES / "files_zarr2")
    name = next(name for name in objects if name.endswith("nu.kernel/3.0"))
    said = []
    for at in range(8, len(objects[name]), 17):
        raw = bytearray(objects[name])
        raw[at] ^= 0x40
        run = audited({**objects, name: bytes(raw)}, select=("INT015", "NUM001", "OPT010"))
        said += [finding.id for finding in run.findings]
    assert "INT015" in said


def test_a_cut_chunk_of_plain_bytes():
    objects = objects_of(FIXTURES / "files_uncompressed")
    name = next(name for name in objects if name.endswith("params.kernel/3.0"))
    objects[name] = objects[name][:-4]
    finding = only(audited(objects), "INT002")
    assert files(finding) == [name]


def test_an_index_of_a_shard_that_lies():
    objects = objects_of(FIXTURES / "files_zarr3")
    name = next(name for name in objects if name.endswith("params.kernel/c/0/0"))
    raw = objects[name]
    for broken, told in (
        (raw[:-4] + b"\0\0\0\0", "checksum"), (raw[:-20] + index(1 << 40, 10), "leads out of the shard"),
        (raw[:-20] + index((1 << 64) - 1, (1 << 64) - 1), "has no chunk"), (raw[-10:], "too short"),
    ):  # fmt: skip
        assert told in only(audited({**objects, name: broken}), "INT015").message


def index(start, length):
    raw = start.to_bytes(8, "little") + length.to_bytes(8, "little")
    return raw + ocdbt_writer.google_crc32c.value(raw).to_bytes(4, "little")


def test_a_frame_that_expands_beyond_its_array():
    import zstandard

    objects = objects_of(FILES)
    name = next(name for name in objects if name.endswith("params.kernel/3.0"))
    objects[name] = zstandard.compress(bytes(1 << 28))
    assert "holds more than the 64 bytes" in only(audited(objects), "INT015").message


def test_an_array_that_is_said_to_be_larger_than_its_bytes_can_be():
    objects = objects_of(FILES)
    name = next(name for name in objects if name.endswith("params.kernel/.zarray"))
    document = json.loads(objects[name])
    document["chunks"] = [1 << 30, 8]
    document["shape"] = [1 << 33, 8]
    objects[name] = json.dumps(document).encode()
    assert "which can't hold it" in found(audited(objects))["INT002"].message


def test_locks_that_writers_left_are_a_warning():
    objects = {**objects_of(MANAGER), f"{ITEM}/manifest.ocdbt.__lock": b""}
    finding = only(audited(objects), "INT009")
    assert finding.severity is Severity.WARNING


# Saves that were not finished


@pytest.mark.parametrize(("name", "lacks"), [("before_merge", True), ("before_commit", False)])
def test_a_writer_that_died(name, lacks):
    run = audited(objects_of(FIXTURES / "killed" / name))
    finding = only(run, "INT004")
    assert finding.severity is Severity.ERROR
    assert ("lacks 1 file" in finding.message) is lacks
    assert run.last_good.step == 2


def test_what_a_writer_left_before_a_finished_step_is_a_warning():
    objects = objects_of(FIXTURES / "killed" / "before_commit")
    later = {name.replace("2/", "6/", 1): raw for name, raw in objects.items() if name.startswith("2/")}
    run = audited({**objects, **later}, ignore=("INT005", "INT011", "MOT015"))
    assert found(run)["INT004"].severity is Severity.WARNING
    assert run.last_good.step == 6


def test_what_is_left_beside_the_finished_step_is_a_warning():
    objects = objects_of(FIXTURES / "killed" / "before_commit")
    again = {name.replace(".orbax-checkpoint-tmp", ""): raw for name, raw in objects.items() if name.startswith("4")}
    run = audited({**objects, **again})
    assert only(run, "INT009").severity is Severity.WARNING
    assert [step.state.step for step in run.steps] == [2, 4]


# Values that Orbax restores without a word


class Plain:
    """The uncompressed save, in which elements can be changed in place."""

    def __init__(self):
        from auditor.adapters.adapter import Folder, Options
        from auditor.adapters.orbax.adapter import Orbax

        self.objects = objects_of(PLAIN)
        store, adapter = MemoryStore(self.objects), Orbax()
        folder = Folder.read(store, "2")
        self.catalog = adapter.read(store, folder, adapter.recognise(store, folder), Options())

    def chunks(self, name, role):
        """Views of the chunks of a tensor that lie in files, by stored offset."""
        for piece in self.catalog.pieces:
            tensor, file = self.catalog.tensors[piece.tensor], self.catalog.files[piece.file]
            if (tensor.name, tensor.role.value) == (name, role):
                at = int(np.searchsorted(file.encoding.start, piece.offset))
                assert not file.encoding.held[at]
                yield file.name, int(file.encoding.offset[at]), int(file.encoding.num_stored[at])

    def change(self, chunk, change):
        name, offset, length = chunk
        raw = bytearray(self.objects[name])
        values = np.frombuffer(raw, np.float32, length // 4, offset)
        values.flags.writeable = True
        change(values)
        self.objects[name] = bytes(raw)


def change_first(role, change):
    plain = Plain()
    plain.change(next(plain.chunks("embed", role)), change)
    return audited(plain.objects)


def put(value):
    def change(values):
        values[5] = value

    return change


def test_one_nan():
    (location,) = only(change_first("parameter", put(np.nan)), "NUM001").locations
    assert (location.tensor, str(location.coordinate)) == ("embed", "data=0,model=0")


def test_a_second_moment_that_is_far_too_large():
    assert only(change_first("second_moment", put(1e31)), "NUM004").locations[0].tensor == "embed"


def test_a_second_moment_below_zero():
    assert only(change_first("second_moment", put(-1e-6)), "OPT010").locations[0].tensor == "embed"


def test_a_second_moment_that_was_zeroed():
    run = change_first("second_moment", lambda values: values.fill(0))
    assert only(run, "OPT011").locations[0].tensor == "embed"


def test_chunks_of_the_moments_that_were_swapped():
    plain = Plain()
    one, other = list(plain.chunks("embed", "second_moment"))[:2]
    (name, at, length), (_, beside, _) = one, other
    raw = plain.objects[name]
    held = [raw[at : at + length], raw[beside : beside + length]]
    raw = bytearray(raw)
    raw[at : at + length], raw[beside : beside + length] = held[1], held[0]
    plain.objects[name] = bytes(raw)
    assert "embed" in {location.tensor for location in only(audited(plain.objects), "OPT011").locations}


def test_nothing_was_changed():
    assert not audited(Plain().objects).findings


# Databases written anew with other values in them


def values_of(objects, item):
    """Key to value of an item's database."""
    database = read_database(MemoryStore(objects), item)
    found = {}
    for key, value in database.values.items():
        raw = objects[f"{item}/{value.place.file}"]
        place = value.place
        found[key] = raw[place.offset : place.offset + place.num_bytes] if value.inline is None else value.inline
    return found


def rewritten(objects, item, values):
    """The same item with a database of these values."""
    kept = {
        name: raw
        for name, raw in objects.items()
        if not name.startswith((f"{item}/d/", f"{item}/ocdbt.process_", f"{item}/manifest.ocdbt"))
    }
    return {**kept, **{f"{item}/{name}": raw for name, raw in ocdbt_writer.database(values).items()}}


def test_a_database_written_anew_is_the_same_checkpoint():
    objects = objects_of(MANAGER)
    assert not audited(rewritten(objects, ITEM, values_of(objects, ITEM))).findings


def test_the_optimizer_state_of_an_earlier_step():
    objects = objects_of(MANAGER)
    old, new = values_of(objects, "2/default"), values_of(objects, ITEM)
    stale = {key: old[key] if key.startswith("opt_state.") else value for key, value in new.items()}
    run = audited(rewritten(objects, ITEM, stale))
    finding = only(run, "INT011")
    assert "as in step 2" in finding.message
    assert run.last_good.step == 2


def test_a_moment_that_is_not_stored():
    objects = objects_of(MANAGER)
    values = values_of(objects, ITEM)
    lost = {key: value for key, value in values.items() if not key.startswith("opt_state.1.0.nu.embed/")}
    assert len(lost) < len(values)
    ids = found(audited(rewritten(objects, ITEM, lost)))
    assert {*ids} & {"COV003", "OPT001"}


def test_a_chunk_that_the_database_lacks():
    objects = objects_of(MANAGER)
    values = values_of(objects, ITEM)
    del values["params.embed/3.0"]
    finding = only(audited(rewritten(objects, ITEM, values)), "INT001")
    assert files(finding) == [f"{ITEM}/params.embed/3.0"]
    assert "COV001" in finding.consequences


def test_an_array_of_another_shape_than_its_moments():
    objects = objects_of(MANAGER)
    values = values_of(objects, ITEM)
    document = json.loads(values["opt_state.1.0.nu.embed/.zarray"])
    document["shape"] = [224, 16]
    values["opt_state.1.0.nu.embed/.zarray"] = json.dumps(document).encode()
    del values["opt_state.1.0.nu.embed/7.0"]
    ids = found(audited(rewritten(objects, ITEM, values)))
    assert {*ids} & {"OPT001", "OPT002"}


def test_folders_that_tell_no_step_are_compared_with_none():
    """An earlier save under another name is no beginning of the run, nor is what has its number in its name."""
    steps = objects_of(MANAGER)
    copies = {f"{name}/{file[2:]}": data for name, step in (("best", 3), ("2.bak", 1))
              for file, data in steps.items() if file.startswith(f"{step}/")}  # fmt: skip
    runs = {run.path: run for run in audit(MemoryStore({**steps, **copies}), Settings(settle_seconds=0.0)).runs}
    assert {path: [step.state.step for step in run.steps] for path, run in runs.items()} == {
        "": [1, 2, 3], "best": [0], "2.bak": [2],
    }  # fmt: skip
    assert not any(run.findings for run in runs.values())
    assert [run.nested for run in runs.values()] == [False, True, True]
