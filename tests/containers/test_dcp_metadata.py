"""The index of torch.distributed.checkpoint, against torch's own objects."""

import pickle
import struct

import pytest

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.dcp_metadata import read_dcp_metadata
from auditor.storage.memory import MemoryStore
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "dcp"
INDEXES = sorted(path for path in FIXTURES.rglob("*.metadata") if path.is_file())


def read(content):
    with MemoryStore({"index": content}).open("index") as handle:
        return read_dcp_metadata(handle)


@pytest.mark.parametrize("path", INDEXES, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_columns_say_what_torchs_objects_say(path):
    pytest.importorskip("torch.distributed.checkpoint")
    content = path.read_bytes()
    found, wanted = read(content), pickle.loads(content)
    tensors = {key: value for key, value in wanted.state_dict_metadata.items() if hasattr(value, "size")}
    assert list(found.tensors) == list(tensors)
    assert list(found.objects) == [key for key in wanted.state_dict_metadata if key not in tensors]
    for key, tensor in tensors.items():
        mine = found.tensors[key]
        assert (mine.shape, f"torch.{mine.dtype.name}") == (tuple(tensor.size), str(tensor.properties.dtype))
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
        assert [found.chunk(row, len(mine.shape)) for row in range(*mine.chunks)] == chunks
    rows = [
        (found.names[found.item_name[row]], found.corner(row), found.files[found.item_file[row]],
         found.item_offset[row], found.item_length[row], found.transforms[found.item_transform[row]])
        for row in range(found.num_items)
    ]  # fmt: skip
    assert rows == [
        (index.fqn, None if index.offset is None else tuple(index.offset), place.relative_path, place.offset,
         place.length, tuple(place.transform_descriptors or ()))
        for index, place in wanted.storage_data.items()
    ]  # fmt: skip
    for row in range(found.num_items):
        tensor = found.tensors.get(rows[row][0])
        if tensor is not None:
            assert found.chunk(found.item_chunk[row], len(tensor.shape))[0] == rows[row][1]
    assert dict(found.paths) == wanted.planner_data
    # torch 2.1 has no such entry.
    home = (str(wanted.storage_meta.checkpoint_id), wanted.storage_meta.save_id) if wanted.storage_meta else ("", "")
    assert (found.home, found.save_id) == home
    assert not found.opaque


@pytest.mark.parametrize("protocol", [2, 3, 5])
def test_other_protocols(protocol):
    pytest.importorskip("torch.distributed.checkpoint")
    content = INDEXES[0].read_bytes()
    assert read(pickle.dumps(pickle.loads(content), protocol)) == read(content)


def test_objects_that_are_referred_to_again():
    torch = pytest.importorskip("torch")
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([3]), [chunk])
    other = metadata.TensorStorageMetadata(tensor.properties, torch.Size([3]), [chunk])
    index, place = metadata.MetadataIndex("a", torch.Size([0])), filesystem._StorageInfo("__0_0.distcp", 0, 9)
    whole = metadata.Metadata({"a": tensor, "b": other, "c": tensor}, [index, place], {index: place})
    found = read(pickle.dumps(whole))
    assert list(found.tensors) == ["a", "b", "c"]
    assert found.tensors["b"].dtype == found.tensors["a"].dtype
    assert found.chunk(found.tensors["b"].chunks[0], 1) == ((0,), (3,))
    assert found.num_items == 1
    assert found.corner(0) == (0,)


def test_every_cut_is_damage():
    content = (FIXTURES / "same_state" / "ddp_2" / "step-3" / ".metadata").read_bytes()
    for length in range(0, len(content), 61):
        with pytest.raises(DamagedError):
            read(content[:length])


def test_changed_bytes_are_damage_or_another_index():
    content = (FIXTURES / "same_state" / "ddp_2" / "step-3" / ".metadata").read_bytes()
    for at in range(2, len(content), 13):
        changed = bytearray(content)
        changed[at] ^= 0x15
        try:
            read(bytes(changed))
        except DamagedError:
            continue


@pytest.mark.parametrize("value", [None, {}, [1], "text", 3.5])
def test_other_pickles_are_no_index(value):
    with pytest.raises(DamagedError, match="not of a checkpoint's Metadata"):
        read(pickle.dumps(value))


def test_what_asks_for_more_than_its_size_allows():
    with pytest.raises(LimitError, match="memory"):
        read(b"\x80\x04]" + b"}a" * 3_000_000 + b".")
    with pytest.raises(LimitError, match="stack"):
        read(b"\x80\x04" + b"N" * 200_000 + b".")
    with pytest.raises(DamagedError):
        read(b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".")
