"""Safetensors files, read without the package, against the package; and files that lie about their tensors."""

import json
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.containers.damage import CutShortError, DamagedError, LimitError
from auditor.containers.json_document import MAX_JSON_BYTES, parse_json, read_json
from auditor.containers.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile, read_safetensors
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.memory import MemoryStore
from auditor.storage.store import Entry
from auditor.testing.recording import RecordingStore

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hugging_face"

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip


def read(content: bytes) -> SafetensorsFile:
    with MemoryStore({"m.safetensors": content}).open("m.safetensors") as handle:
        return read_safetensors(handle)


def file_of(header, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(kind="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(offsets)}


PAIR = {"a": entry(), "b": entry(offsets=(8, 16))}


# Against the package


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("*.safetensors")), ids=lambda path: path.parent.name)
def test_real_files_equal_the_package(path):
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors")
    content = path.read_bytes()
    found = read(content)
    with safetensors.safe_open(path, "pt") as oracle:
        assert found.metadata == oracle.metadata() == {"format": "pt"}
        assert set(found.records) == set(oracle.keys())
        for name, record in found.records.items():
            tensor = oracle.get_tensor(name)
            assert record.shape == tuple(tensor.shape)
            assert record.dtype.name == str(tensor.dtype).removeprefix("torch.")
            assert content[record.begin : record.end] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("word", "name"), DTYPES.items())
def test_every_dtype_equals_the_package(word, name, tmp_path):
    torch = pytest.importorskip("torch")
    saver = pytest.importorskip("safetensors.torch")
    kind = getattr(torch, name)
    raw = np.arange(6 * kind.itemsize, dtype=np.uint8) % (2 if name == "bool" else 255)
    tensors = {
        "matrix": torch.from_numpy(raw).view(kind).reshape(2, 3), "scalar": torch.zeros((), dtype=kind),
        "empty": torch.zeros((0, 4), dtype=kind),
    }  # fmt: skip
    saver.save_file(tensors, tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    found = read(content).records
    assert {record.dtype_name for record in found.values()} == {word}
    for key, tensor in tensors.items():
        assert (found[key].dtype.name, found[key].shape) == (name, tuple(tensor.shape))
    assert content[found["matrix"].begin : found["matrix"].end] == raw.tobytes()


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["float32", "float16", "int8"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_whatever_the_package_writes_is_read(tensors):
    saver = pytest.importorskip("safetensors.numpy")
    arrays = {name: np.ones(shape, kind) for name, (kind, shape) in tensors.items()}
    found = read(saver.save(arrays)).records
    assert {name: (record.dtype.name, list(record.shape)) for name, record in found.items()} == {
        name: (kind, list(array.shape))
        for (name, array), (kind, _) in zip(arrays.items(), tensors.values(), strict=True)
    }


def test_only_the_header_is_read():
    content = (FIXTURES / "qwen2" / "model.safetensors").read_bytes()
    store = RecordingStore({"m.safetensors": content})
    with store.open("m.safetensors") as handle:
        begin = min(record.begin for record in read_safetensors(handle).records.values())
    assert max(stop for _, _, stop in store.ranges) == begin


# What is legal


def test_legal_oddities():
    padded = file_of(json.dumps(PAIR).encode() + b"   ", bytes(16))
    assert set(read(padded).records) == {"a", "b"}
    assert read(file_of({})).records == {}
    assert read(file_of({"__metadata__": {}})).metadata == {}
    swapped = read(file_of({"b": entry(offsets=(8, 16)), "a": entry()}, bytes(16)))
    assert list(swapped.records) == ["a", "b"]
    odd = read(file_of({"": entry(), "layers[0]{x}": entry(shape=(0,), offsets=(8, 8))}, bytes(8)))
    assert odd.records["layers[0]{x}"].shape == (0,)


def test_unknown_dtype_is_a_record_and_the_rest_is_read():
    found = read(file_of({"new": entry("F6_E3M2", (4,), (0, 3)), "a": entry(offsets=(3, 11))}, bytes(11)))
    assert found.records["new"].dtype is None
    assert found.records["new"].dtype_name == "F6_E3M2"
    assert found.records["a"].dtype.name == "float32"


def test_packed_elements_fill_whole_bytes():
    assert read(file_of({"a": entry("F4", (4,), (0, 2))}, bytes(2))).records["a"].dtype.bits == 4
    with pytest.raises(DamagedError):
        read(file_of({"a": entry("F4", (3,), (0, 2))}, bytes(2)))


# Damage


LYING = {
    "gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "belong to no tensor"),
    "gap at the start": ({"a": entry(offsets=(4, 12))}, 12, "4 bytes before it belong to no tensor"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "overlap"),
    "same place": ({"a": entry(), "b": entry()}, 8, "overlap"),
    "shape too large": ({"a": entry(shape=(3,))}, 8, "needs 12"),
    "shape too small": ({"a": entry(shape=(1,))}, 8, "needs 4"),
    "empty that has bytes": ({"a": entry(shape=(0,))}, 8, "needs 0"),
    "no dtype": ({"a": entry("", (), (0, 0))}, 0, "no dtype"),
    "dtype of another type": ({"a": entry(7)}, 8, "no dtype"),
    "endless dtype": ({"a": entry("F" * 1000)}, 8, "no dtype"),
    "negative shape": ({"a": entry(shape=(-2,))}, 8, "no shape"),
    "fractional shape": ({"a": entry(shape=(2.0,))}, 8, "no shape"),
    "true for one": ({"a": entry(shape=(True, 2))}, 8, "no shape"),
    "shape of another type": ({"a": {**entry(), "shape": 2}}, 8, "no shape"),
    "too many dims": ({"a": entry(shape=(1,) * 65 + (2,))}, 8, "no shape"),
    "negative offset": ({"a": entry(offsets=(-8, 0))}, 8, "no byte range"),
    "huge offset": ({"a": entry(offsets=(0, 1 << 70))}, 8, "no byte range"),
    "range backwards": ({"a": entry(offsets=(8, 0))}, 8, "no byte range"),
    "one offset": ({"a": entry(offsets=(8,))}, 8, "no byte range"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "no byte range"),
    "no description": ({"a": [1, 2]}, 8, "no description"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, 8, "__metadata__"),
    "metadata of another type": ({"__metadata__": "x", "a": entry()}, 8, "__metadata__"),
    "key twice": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', 8, "twice"),
    "inner key twice": (b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', 8, "twice"),
    "no JSON": (b'{"a": ', 8, "JSON is broken"),
    "a list": (b"[]", 0, "no JSON dictionary"),
    "leading space": (b" {}", 0, "no JSON dictionary"),
    "no UTF-8": (b'{"\xff": 1}', 0, "not UTF-8"),
    "endless number": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', 8, "broken"),
    "large number": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,8]}}', 8, "no shape"),
}


@pytest.mark.parametrize(("header", "size", "words"), LYING.values(), ids=LYING)
def test_header_that_contradicts_itself_is_damage(header, size, words):
    with pytest.raises(DamagedError, match=words) as raised:
        read(file_of(header, bytes(size)))
    assert raised.value.content is None


def test_header_that_asks_for_too_much_is_given_up():
    with pytest.raises(LimitError, match="nested"):
        read(file_of(b'{"a":' + b"[" * 3000 + b" " * 30_000 + b"]" * 3000 + b"}"))
    with pytest.raises(LimitError, match="lists"):
        read(file_of(b'{"a":[' + b"[]," * 100_000 + b"[]]}"))
    with pytest.raises(LimitError, match="beyond any tensor"):
        read(file_of({"a": entry(shape=(0, 1 << 60, 1 << 60), offsets=(0, 0))}))


class Pretender:
    """A handle that claims any size; its header's length is read, nothing else."""

    def __init__(self, num_bytes, length):
        self.entry, self.length = Entry("m.safetensors", False, num_bytes), length

    def read_into(self, offset, buffer):
        assert offset == 0
        assert len(buffer) == 8
        buffer[:] = struct.pack("<Q", self.length)


def test_absurd_header_lengths_allocate_nothing():
    with pytest.raises(LimitError, match="header"):
        read_safetensors(Pretender(1 << 50, MAX_HEADER_BYTES + 1))
    for length in (100, 1 << 40, (1 << 64) - 1):
        with pytest.raises(DamagedError, match="cut short, or no such file"):
            read_safetensors(Pretender(100, length))


def test_other_kinds_of_files_are_named():
    with pytest.raises(DamagedError, match="empty"):
        read(b"")
    with pytest.raises(DamagedError, match="3 bytes"):
        read(b"abc")
    with pytest.raises(DamagedError, match="Git LFS pointer"):
        read(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(DamagedError, match="no such file"):
        read(b"PK\x03\x04" + bytes(50))


def test_short_and_long_files_still_tell_their_tensors():
    whole = file_of({**PAIR, "c": entry(offsets=(16, 24))}, bytes(24))
    for cut, wholly, partly in ((1, 0, 1), (8, 1, 0), (12, 1, 1), (24, 3, 0)):
        with pytest.raises(CutShortError, match=f"{wholly} tensors lie beyond its end, {partly} partly") as raised:
            read(whole[:-cut])
        assert set(raised.value.content.records) == {"a", "b", "c"}
    with pytest.raises(DamagedError, match="16 bytes follow") as raised:
        read(whole + bytes(16))
    assert set(raised.value.content.records) == {"a", "b", "c"}
    assert not isinstance(raised.value, CutShortError)


def test_every_cut_and_every_flipped_header_bit_is_damage_or_read():
    whole = file_of(PAIR, bytes(16))
    for cut in range(len(whole)):
        with pytest.raises(DamagedError):
            read(whole[:cut])
    for at in range(len(whole) - 16):
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            with suppress(DamagedError):
                read(bytes(changed))


def test_file_that_shrinks_while_it_is_read_is_damage():
    store = FaultyStore(MemoryStore({"m": file_of(PAIR, bytes(16))}), Faults(shrinking="m", num_bytes_left=20))
    with store.open("m") as handle, pytest.raises(DamagedError, match="ends before its header"):
        read_safetensors(handle)


# JSON by itself


def test_json_of_python_is_read_and_repeated_keys_may_be_allowed():
    assert parse_json(b'{"loss": NaN, "a": 1, "b": Infinity}')["a"] == 1
    assert parse_json(b'{"a": 1, "a": 2}', unique_keys=False) == {"a": 2}
    with pytest.raises(DamagedError, match="'a' twice"):
        parse_json(b'{"b": 1, "a": 1, "a": 2}')


def test_json_files_are_bounded():
    handle = Pretender(MAX_JSON_BYTES + 1, 0)
    with pytest.raises(LimitError, match="at most"):
        read_json(handle)
    with MemoryStore({"m": b""}).open("m") as handle, pytest.raises(DamagedError, match="empty"):
        read_json(handle)
