"""Arrays in Zarr shards: indexes that are whole, that lie, and that have millions of entries for nothing."""

import google_crc32c
import numpy as np
import pytest

from auditor.containers import zarr_shards
from auditor.model.catalog import FileState
from auditor.model.region import Box, whole
from auditor.storage.memory import MemoryStore
from auditor.view.assemble import read_box
from tests.adapters.test_zarr_tree import array_document, chunked, read, tree, values

NONE, MANY = (1 << 64) - 1, 1 << 16


def sharded(shape, inner, index, chunks=b"", *, first=False, checksum=True):
    """An array in one shard, by hand: zarr-python writes none without dims."""
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codec = {"chunk_shape": inner, "codecs": plain, "index_codecs": plain + [{"name": "crc32c"}] * checksum,
             "index_location": "start" if first else "end"}  # fmt: skip
    raw = np.array(index, "<u8").tobytes()
    raw += google_crc32c.value(raw).to_bytes(4, "little") * checksum
    document = array_document(
        shape=shape, **chunked(*shape), codecs=[{"name": "sharding_indexed", "configuration": codec}]
    )
    return tree(document, {"c/0" if shape else "c": raw + chunks if first else chunks + raw})


@pytest.mark.parametrize(("first", "checksum"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [[], [3]])
def test_one_chunk_in_a_shard_with_and_without_dims(shape, first, checksum):
    """As TensorStore 0.1.84 writes them: 4 bytes, an index of 16, and 4 of its checksum."""
    content = values(1, 3)[: 3 if shape else 1]
    offset = 16 + 4 * checksum if first else 0
    objects = sharded(shape, shape, [(offset, content.nbytes)], content.tobytes(), first=first, checksum=checksum)
    store = MemoryStore(objects)
    catalog = read(store, "steps/1")
    assert {file.state for file in catalog.files} == {FileState.PRESENT}
    assert read_box(store, catalog, 0, 0, whole(tuple(shape))).tobytes() == content.tobytes()


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (np.zeros((MANY, 2)), f"has {MANY} chunks of no bytes"), ([(0, 4), (NONE, 4)], "leads out of the shard"),
        ([(0, 4), (4, NONE)], "leads out of the shard"), ([(0, 4), (3, 4)], "two chunks are said to lie at byte 3"),
        ([(0, 1 << 60), (1 << 60, 4)], "leads out of the shard"),
        (np.zeros(((1 << 20) + 1, 2)), "at most 1048576 are read"),
    ],
)  # fmt: skip
def test_an_index_that_lies(index, told):
    catalog = read(MemoryStore(sharded([len(index)], [1], index, bytes(16))), "steps/1")
    (file,) = [file for file in catalog.files if file.name.endswith("c/0")]
    assert (file.state, told in file.detail) == (FileState.DAMAGED, True)
    assert len(catalog.pieces) <= 256


def test_the_entries_of_a_step_are_counted_over_its_arrays(monkeypatch):
    monkeypatch.setattr(zarr_shards.Entries, "__init__", lambda entries: setattr(entries, "num_left", 6))
    objects = sharded([4], [1], [(4 * at, 4) for at in range(4)], bytes(16))
    objects |= {name.replace("/w/", "/x/"): content for name, content in objects.items()}
    (lost,) = [file for file in read(MemoryStore(objects), "steps/1").files if file.state is FileState.DAMAGED]
    assert (lost.name, "of which 2 are left" in lost.detail) == ("steps/1/tensors/parameter/x/c/0", True)


def test_chunks_that_an_index_leaves_out_are_missing_and_few_are_named():
    """Healthy twin: the only chunk that is there is read."""
    index = np.full((MANY, 2), NONE, np.uint64)
    index[5] = 0, 4
    store = MemoryStore(sharded([MANY], [1], index, b"\0\0\x80\x3f"))
    catalog = read(store, "steps/1")
    missing = [file for file in catalog.files if file.state is FileState.MISSING]
    assert (len(catalog.pieces), len(missing)) == (257, 256)
    assert missing[5].name.endswith("c/0[6]")
    assert read_box(store, catalog, 0, 0, Box((5,), (6,))).tolist() == [1.0]
