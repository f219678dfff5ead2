"""Flax's msgpack: every array where the format's own library finds it; lies are named."""

import msgpack
import numpy as np
import pytest

from auditor.containers.damage import CutShortError, DamagedError, LimitError
from auditor.containers.flax_msgpack import read_flax
from auditor.containers.state_array import Plain, StateArray
from auditor.storage.memory import MemoryStore
from auditor.testing.recording import RecordingStore
from tests.flax_files import leaves, pack, record, unpack
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "flax"
FILES = sorted(path for path in FIXTURES.rglob("*") if path.suffix == ".msgpack" or path.name.startswith("checkpoint_"))
ONES = np.ones((2, 3), np.float32)


def read(content):
    with MemoryStore({"f": content}).open("f") as handle:
        return read_flax(handle)


def arrays(content):
    return {path: node for path, node in read(content).leaves() if isinstance(node, StateArray)}


def whole(tree):
    """Chunks put together, as flax does."""
    if "__msgpack_chunked_array__" in tree:
        flat = np.concatenate(list(tree["chunks"].values()))
        return flat.reshape(list(tree["shape"].values()))
    return {key: whole(value) if isinstance(value, dict) else value for key, value in tree.items()}


@pytest.mark.parametrize("file", FILES[::3], ids=lambda file: file.relative_to(FIXTURES).as_posix())
def test_arrays_lie_where_the_library_finds_them(file):
    content = file.read_bytes()
    found, expected = arrays(content), dict(leaves(whole(unpack(content))))
    assert found.keys() == expected.keys()
    assert len(found) > 5
    for path, array in expected.items():
        parts = [content[s.offset : s.offset + s.num_bytes] for s in found[path].stretches]
        assert (b"".join(parts), found[path].shape) == (array.tobytes(), array.shape), path


def test_numbers_and_empty_maps_are_leaves():
    tree = {"step": 7, "rate": 0.5, "on": True, "no": None, "text": "a", "none": {}, "list": [1, ONES]}
    found = dict(read(pack(tree)).leaves())
    assert [found["step",], found["rate",], found["on",]] == [Plain(7), Plain(0.5), Plain(True)]
    assert found["none",] is None
    assert found["list", "1"].shape == (2, 3)


def test_numpy_scalars_are_arrays_of_no_dims():
    tree = {"scale": msgpack.ExtType(3, msgpack.packb(([], "float32", b"abcd")))}
    ((_, found),) = read(msgpack.packb(tree)).leaves()
    assert (found.shape, found.stretches[0].num_bytes) == ((), 4)


def test_weights_are_skipped():
    store = RecordingStore({"f": pack({"a": np.ones(100_000, np.float32), "b": np.ones(50_000, np.float32)})})
    with store.open("f") as handle:
        found = dict(read_flax(handle).leaves())
    assert sum(stop - start for _, start, stop in store.ranges) < 4096
    assert len(found) == 2


def test_a_file_cut_short_tells_what_was_there():
    content = pack({"a": {"x": ONES}, "b": {"y": ONES, "z": ONES}})
    for cut in range(1, len(content)):
        with pytest.raises(CutShortError) as caught:
            read(content[:cut])
        assert all(path in (("a", "x"), ("b", "y"), ("b", "z"), ("a",), ("b",), ()) for path, _ in
                   caught.value.content.leaves())  # fmt: skip
    with pytest.raises(CutShortError, match=r"'b\.z' needs 136 bytes, the file has 120") as caught:
        read(content[:120])
    # The last one's bytes are lost in part, but what it was is known.
    assert [path for path, node in caught.value.content.leaves() if node] == [("a", "x"), ("b", "y"), ("b", "z")]


def test_extensions_of_unknown_types_are_counted():
    found = read(msgpack.packb({"a": msgpack.ExtType(42, b"payload"), "c": msgpack.ExtType(2, b"re, im")}))
    assert found.opaque == {"msgpack extension 42": 1}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\x01", "another kind of file"),
        (b"\xc1", "begins nothing that msgpack has"),
        (b"\x81\x01", "its tree|'1' needs"),
        (b"\x81\xc0\x01", "is no text"),
        (b"\xdf\xff\xff\xff\xff\xa1a", "said to have 4294967295 entries"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "said to have 4294967295 entries"),
        (pack({"a": ONES}) + b"\0", "1 bytes follow its tree"),
        (b"\x82\xa1a\x01\xa1a\x02", "gives the key 'a' twice"),
        (b"\x82\xa11\x01\x01\x02", "gives the key '1' twice"),
        (msgpack.packb({"a": record((2, 3), "float32", bytes(20))}), "has 20 bytes, float32.2, 3. needs 24"),
        (msgpack.packb({"a": record((2, -3), "float32", bytes(24))}), "has no shape"),
        (msgpack.packb({"a": record((1 << 40, 1 << 40), "float32", b"")}), "beyond any tensor's"),
        (msgpack.packb({"a": record([1] * 65, "float32", bytes(4))}), "has no shape"),
        (msgpack.packb({"a": record((1,), "f" * 40, bytes(4))}), "has no dtype"),
        (msgpack.packb({"a": msgpack.ExtType(1, b"\x01\x02")}), "no record of an array"),
        (msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(([2], "float32", bytes(8))) + b"x")}), "record ends at"),
        (pack({"__msgpack_chunked_array__": True, "x": 1}), ""),
        (pack({"a": {"__msgpack_chunked_array__": True}}), "has none, or no shape"),
        (pack({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 5}, "chunks": {"0": ONES}}}), "do not make up"),
        (pack({"a": {"__msgpack_chunked_array__": True, "shape": {"1": 6}, "chunks": {"0": ONES}}}), "put in order"),
        (pack({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 6}, "chunks": {"7": ONES}}}), "put in order"),
        (b"\x81\xa1a" * 70 + b"\x01", "nested too deeply"),
        (b"\x81\xda\x20\x00" + b"k" * 8192 + b"\x01", "8192 bytes long"),
    ],
)  # fmt: skip
def test_lies_are_named(content, says):
    if not says:
        read(content)
        return
    with pytest.raises(DamagedError, match=says):
        read(content)


def test_more_entries_than_an_honest_file_has():
    with pytest.raises(LimitError, match="more than 524288 entries"):
        read(b"\xdd" + (2_000_000).to_bytes(4, "big") + b"\x01" * 2_000_000)
