"""Named damage to checkpoints by torch.distributed.checkpoint."""

import os

import pytest

from auditor.containers import dcp_items
from auditor.model.catalog import FileState, Role
from auditor.model.mesh import Coordinate
from auditor.model.region import whole
from auditor.settings import Level
from auditor.storage.memory import MemoryStore
from auditor.view.assemble import read_box
from tests.dcp_saves import DATA, FIXTURES, PLAIN, audited, changed, files, objects_of, only, read, saved

# Files


@pytest.mark.parametrize("name", [*DATA, ".metadata"])
@pytest.mark.parametrize("level", [Level.NAMES, Level.HEADERS, Level.FULL])
def test_a_missing_file(name, level):
    """Without the index, which is written last, the newest step was not finished; data beside it were there."""
    for step, identifier in ((2, "INT001"), (4, "INT004" if name == ".metadata" else "INT001")):
        objects = objects_of(PLAIN)
        del objects[f"step-{step}/{name}"]
        finding = only(objects, level)
        assert finding.id == identifier
        assert files(finding) == {f"step-{step}/{name}"}
        assert name == ".metadata" or " items in it" in finding.message


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999, 1.001])
def test_a_data_file_that_is_too_short_or_too_long(name, share):
    objects = objects_of(PLAIN)
    content = objects[f"step-4/{name}"]
    length = int(share * len(content))
    objects[f"step-4/{name}"] = (content + bytes(length))[:length]
    for level in (Level.HEADERS, Level.FULL):
        finding = only(objects, level)
        assert finding.id == "INT002"
        assert files(finding) == {f"step-4/{name}"}
    assert [f.state for f in read(objects, "step-4", names_only=True).files].count(FileState.DAMAGED) == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_short_index(share):
    objects = objects_of(PLAIN)
    objects["step-4/.metadata"] = objects["step-4/.metadata"][: int(share * len(objects["step-4/.metadata"]))]
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT002", {"step-4/.metadata"})


def test_files_of_a_run_with_more_ranks():
    objects = objects_of(PLAIN)
    objects["step-4/__7_0.distcp"] = objects["step-4/__1_0.distcp"]
    finding = only(objects, Level.NAMES)
    assert (finding.id, files(finding)) == ("INT009", {"step-4/__7_0.distcp"})
    # A rank that had nothing to write leaves an empty one.
    objects["step-4/__7_0.distcp"] = b""
    assert not audited(objects).findings


def test_a_save_that_was_not_finished():
    objects = objects_of(PLAIN)
    objects["step-4/.metadata.tmp"] = objects.pop("step-4/.metadata")
    finding = only(objects, Level.NAMES)
    assert (finding.id, files(finding)) == ("INT004", {"step-4/.metadata"})
    del objects["step-4/.metadata.tmp"]
    assert only(objects, Level.NAMES).id == "INT004"


def test_a_save_into_a_used_folder_that_was_not_finished():
    objects = objects_of(PLAIN)
    objects["step-4/.metadata.tmp"] = objects["step-4/.metadata"]
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT009", {"step-4/.metadata.tmp"})


def test_an_old_index_over_new_data():
    objects = objects_of(PLAIN)
    objects["step-4/.metadata"] = (FIXTURES / "tp_2" / "step-4" / ".metadata").read_bytes()
    finding = only(objects)
    assert finding.id == "INT002"
    assert files(finding) == {f"step-4/{name}" for name in DATA}
    # Sizes may fit by chance: then it is what the items hold.
    objects = objects_of(PLAIN)

    def swap(metadata):
        by_name = {(index.fqn, tuple(index.offset or ())): index for index in metadata.storage_data}
        one, other = by_name["model.blocks.0.norm.weight", (0,)], by_name["model.scale", (0, 0)]
        stored = metadata.storage_data
        assert stored[one].length == stored[other].length
        stored[one], stored[other] = stored[other], stored[one]

    finding = only(changed(objects, "step-4/.metadata", swap), Level.HEADERS)
    assert (finding.id, files(finding)) == ("INT002", {"step-4/__0_0.distcp"})
    assert "float32[1, 3], the index says float32[3]" in finding.message


def test_a_data_file_of_another_step():
    objects = objects_of(PLAIN)
    objects["step-4/__1_0.distcp"] = objects["step-2/__1_0.distcp"]
    assert len(objects["step-4/__1_0.distcp"]) == len((PLAIN / "step-4" / "__1_0.distcp").read_bytes())
    findings = audited(objects).findings
    assert "INT005" in {finding.id for finding in findings}
    assert "step-4/__1_0.distcp" in {file for finding in findings for file in files(finding)}


def test_a_flipped_bit_of_a_weight():
    objects = objects_of(PLAIN)
    catalog = read(objects, "step-4")
    (number,) = [n for n, t in enumerate(catalog.tensors) if (t.name, t.role) == ("norm.weight", Role.PARAMETER)]
    piece = catalog.pieces[int(catalog.rows_of(number, 0)[0])]
    name = catalog.files[piece.file].name
    content = bytearray(objects[name])
    content[piece.offset] ^= 1
    objects[name] = bytes(content)
    assert not audited(objects, Level.VALUES).findings
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT010", {name})
    assert "archive/data/0 of the item at byte" in finding.message


def test_items_without_checksums(tmp_path):
    torch = pytest.importorskip("torch")
    torch.serialization.set_crc32_options(False)
    try:
        objects = saved(tmp_path, {"model": {"a": torch.ones(3)}})
    finally:
        torch.serialization.set_crc32_options(True)
    run = audited(objects)
    assert not run.findings
    assert run.steps[0].judgements["INT010"].num_holds == 0


def test_an_item_that_is_none():
    objects = objects_of(PLAIN)
    name, catalog = "step-4/__1_0.distcp", read(objects, "step-4")
    item = min(p.offset for p in catalog.pieces if catalog.files[p.file].name == name)
    content = bytearray(objects[name])
    content[item + 200 : item + 500] = bytes(300)
    objects[name] = bytes(content)
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("INT002", {name})


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_dangerous_calls_are_named_with_their_file(tmp_path):
    torch = pytest.importorskip("torch")
    finding = only(saved(tmp_path, {"model": {"a": torch.ones(3)}, "extra": Evil()}))
    assert (finding.id, files(finding)) == ("SEC001", {"step-7/__0_0.distcp"})
    objects = changed(objects_of(PLAIN), "step-4/.metadata", lambda m: setattr(m, "planner_data", {"a": Evil()}))
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("SEC001", {"step-4/.metadata"})


# What the index says


def test_a_chunk_that_is_stored_nowhere():
    def drop(metadata):
        (index,) = [i for i in metadata.storage_data if (i.fqn, i.index) == ("model.head.weight", 1)]
        del metadata.storage_data[index]

    finding = only(changed(objects_of(PLAIN), "step-4/.metadata", drop), Level.HEADERS)
    assert finding.id == "COV001"
    assert {(location.tensor, location.role) for location in finding.locations} == {("head.weight", Role.PARAMETER)}


def test_a_stored_part_that_is_not_described():
    def drop(metadata):
        metadata.state_dict_metadata["model.head.weight"].chunks.pop()

    ids = [f.id for f in audited(changed(objects_of(PLAIN), "step-4/.metadata", drop), Level.HEADERS).findings]
    assert "COV001" in ids


def test_chunks_that_overlap_or_leave_the_tensor():
    torch = pytest.importorskip("torch")

    def grow(metadata):
        chunk = metadata.state_dict_metadata["model.head.weight"].chunks[1]
        (index,) = [i for i in metadata.storage_data if (i.fqn, i.index) == ("model.head.weight", 1)]
        place = metadata.storage_data.pop(index)
        chunk.offsets = torch.Size([8, 0])
        metadata.storage_data[type(index)("model.head.weight", chunk.offsets, 1)] = place

    finding = only(changed(objects_of(PLAIN), "step-4/.metadata", grow), Level.HEADERS)
    assert finding.id == "COV001"
    assert "12 elements are in no piece, 12 elements are in two" in finding.message


def test_two_items_at_one_place():
    def collide(metadata):
        first, second = [*metadata.storage_data.values()][:2]
        assert first.relative_path == second.relative_path
        second.offset, second.length = first.offset, first.length

    findings = audited(changed(objects_of(PLAIN), "step-4/.metadata", collide), Level.HEADERS).findings
    assert {finding.id for finding in findings} <= {"INT002", "MET002"}
    assert findings


def test_another_dtype_than_the_item_has():
    torch = pytest.importorskip("torch")

    def cast(metadata):
        metadata.state_dict_metadata["model.head.weight"].properties.dtype = torch.bfloat16

    finding = only(changed(objects_of(PLAIN), "step-4/.metadata", cast), Level.HEADERS)
    assert finding.id == "INT002"
    assert "holds float32[10, 6], the index says bfloat16[10, 6]" in finding.message


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "", ".", "a/b.distcp", "x" * 300])
def test_names_do_not_leave_the_folder(name):
    def lead_out(metadata):
        for place in metadata.storage_data.values():
            if place.relative_path == "__0_0.distcp":
                place.relative_path = name

    objects = changed(objects_of(PLAIN), "step-4/.metadata", lead_out)
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("INT002", {"step-4/.metadata"})


# Without a coordinator


def test_a_replica_that_differs():
    objects = objects_of(FIXTURES / "no_coordinator")
    catalog = read(objects, "step-4")
    (number,) = [n for n, t in enumerate(catalog.tensors) if (t.name, t.role) == ("norm.weight", Role.PARAMETER)]
    piece = catalog.pieces[int(catalog.rows_of(number, 1)[0])]
    content = bytearray(objects["step-4/__1_0.distcp"])
    content[piece.offset + 3] ^= 1
    objects["step-4/__1_0.distcp"] = bytes(content)
    finding = only(objects, Level.VALUES)
    assert finding.id == "REP001"
    (location,) = finding.locations
    assert (location.tensor, location.coordinate) == ("norm.weight", Coordinate.of(rank=1))
    assert location.file == "step-4/__1_0.distcp"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["__{}.metadata", "__{}_0.distcp"])
def test_a_rank_whose_files_are_lost(rank, kind):
    objects = objects_of(FIXTURES / "no_coordinator")
    del objects["step-4/" + kind.format(rank)]
    for level in (Level.NAMES, Level.HEADERS):
        finding = only(objects, level)
        assert (finding.id, files(finding)) == ("INT004", {"step-4/" + kind.format(rank)})


def four_ranks():
    """Two tensor-parallel groups of two ranks, each with the same: what the second group would write."""
    objects = objects_of(FIXTURES / "no_coordinator")
    for rank in (0, 1):

        def rename(metadata, rank=rank):
            for place in metadata.storage_data.values():
                place.relative_path = f"__{rank + 2}_0.distcp"

        objects[f"step-4/__{rank + 2}_0.distcp"] = objects[f"step-4/__{rank}_0.distcp"]
        own = objects[f"step-4/__{rank}.metadata"]
        objects[f"step-4/__{rank + 2}.metadata"] = changed({"index": own}, "index", rename)["index"]
    return objects


def test_replicas_that_several_ranks_hold_together():
    objects = four_ranks()
    catalog = read(objects, "step-4")
    places = {len(replicas) for replicas in catalog.replicas}
    assert places == {2, 4}
    run = audited(objects, Level.VALUES)
    assert not run.findings
    assert run.steps[0].judgements["REP001"].num_holds == len(catalog.tensors)
    (number,) = [
        n for n, t in enumerate(catalog.tensors) if (t.name, t.role.value) == ("blocks.0.up.bias", "parameter")
    ]
    assert catalog.replicas[number] == (Coordinate.of(rank=0), Coordinate.of(rank=2))
    piece = catalog.pieces[int(catalog.rows_of(number, 1)[1])]
    name = catalog.files[piece.file].name
    assert name == "step-4/__3_0.distcp"
    content = bytearray(objects[name])
    content[piece.offset + 3] ^= 1
    objects[name] = bytes(content)
    finding = only(objects, Level.VALUES)
    assert finding.id == "REP001"
    assert {(location.tensor, location.file) for location in finding.locations} == {("blocks.0.up.bias", name)}


def test_ranks_that_describe_a_tensor_differently():
    torch = pytest.importorskip("torch")

    def widen(metadata):
        metadata.state_dict_metadata["model.head.weight"].size = torch.Size([20, 6])

    found = audited(changed(objects_of(FIXTURES / "no_coordinator"), "step-4/__1.metadata", widen), Level.HEADERS)
    assert [finding.id for finding in found.findings] == ["MET001"]


# Compressed


def compressed(tmp_path, **tensors):
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")
    return saved(tmp_path, {"model": tensors}, _extensions=[extension.ZStandard()])


def test_large_compressed_items_are_read_from_their_beginning(tmp_path):
    torch = pytest.importorskip("torch")
    random = torch.Generator().manual_seed(1)
    tensors = {
        "noise": torch.randn(60_000, generator=random), "zeros": torch.zeros(500, 900),
        "turned": torch.randn(200, 300, generator=random).t(),
        "bytes": torch.randn(80_000, generator=random).to(torch.float8_e4m3fn),
    }  # fmt: skip
    objects = compressed(tmp_path, **tensors)
    catalog = read(objects, "step-7")
    assert not audited(objects).findings
    for number, tensor in enumerate(catalog.tensors):
        found = read_box(MemoryStore(objects), catalog, number, 0, whole(tensor.shape))
        wanted = tensors[tensor.name].contiguous()
        assert found.tobytes() == wanted.view(torch.uint8).numpy().tobytes(), tensor.name


def test_a_compressed_item_that_rotted(tmp_path):
    torch = pytest.importorskip("torch")
    noise = torch.randn(60_000, generator=torch.Generator().manual_seed(1))
    objects = compressed(tmp_path, noise=noise)
    (name,) = [name for name in objects if name.endswith("0_0.distcp")]
    content = bytearray(objects[name])
    content[len(content) // 2] ^= 1
    objects[name] = bytes(content)
    assert not audited(objects, Level.HEADERS).findings
    # The frame still decodes, to other numbers: only the checksum inside it tells.
    assert not [f for f in audited(objects, Level.VALUES).findings if f.id.startswith("INT")]
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT010", {name})
    assert "data/0 of the item at byte 0" in finding.message


def test_compressed_objects_that_expand_without_end(tmp_path, monkeypatch):
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")
    torch = pytest.importorskip("torch")
    decoded = []
    rest = dcp_items._rest

    def counted(stream, file, num_bytes):
        decoded.append(file.room)
        return rest(stream, file, num_bytes)

    monkeypatch.setattr(dcp_items, "_rest", counted)
    monkeypatch.setattr(dcp_items, "MAX_OBJECT_BYTES", 1 << 20)
    objects = saved(
        tmp_path, {"model": {"a": torch.ones(3)}, **{f"b{n}": bytes(900_000) for n in range(8)}},
        _extensions=[extension.ZStandard()],
    )  # fmt: skip
    run = audited(objects, Level.HEADERS)
    assert not run.findings
    assert "so much is not decoded" in run.steps[0].failures[0]
    assert decoded[-1] <= dcp_items.HEAD_BYTES + 1 < decoded[0]


@pytest.mark.parametrize("num_bytes", [10, 3000, 30_000])
def test_a_compressed_file_that_is_nonsense_from_a_byte_on(num_bytes):
    objects = objects_of(FIXTURES / "zstd")
    name = "step-4/__1_0.distcp"
    objects[name] = objects[name][:num_bytes] + bytes(len(objects[name]) - num_bytes)
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("INT002", {name})
    objects[name] = objects[name][:-1]
    assert only(objects).id == "INT002"


def test_extensions_that_are_not_known_leave_their_files_unread():
    def encrypt(metadata):
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["stream.secret@corp/3"]

    run = audited(changed(objects_of(FIXTURES / "zstd"), "step-4/.metadata", encrypt))
    assert not run.findings
    assert run.steps[0].judgements["COV001"].num_holds == 69
    assert "stream.secret@corp/3" in run.steps[0].failures[0]
