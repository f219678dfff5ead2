"""Files of torch.save, read without torch, against torch.load; and files that lie about their tensors."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import StoredTensor, TorchFile, read_number, read_torch_file
from auditor.containers.zip_directory import read_directory
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.memory import MemoryStore
from tests.sparse_file import Sparse

torch = pytest.importorskip("torch")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed_pipeline"

FLOATS = ["float64", "float32", "float16", "bfloat16"]
FLOAT8S = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES = [*FLOATS, *FLOAT8S, *INTEGERS, "complex64", "complex128"]


def saved(tree, **options) -> bytes:
    target = io.BytesIO()
    torch.save(tree, target, **options)
    return target.getvalue()


def read(content: bytes) -> TorchFile:
    with MemoryStore({"file.pt": content}).open("file.pt") as handle:
        return read_torch_file(handle)


def bits_of(tensor) -> bytes:
    """The elements in C order, as torch has them."""
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def bits_at(content: bytes, stored: StoredTensor) -> bytes:
    """The elements in C order, from nothing but offset, shape and strides."""
    width = stored.dtype.bits // 8
    if not stored.num_elements:
        return b""
    last = sum((n - 1) * s for n, s in zip(stored.shape, stored.strides, strict=True))
    flat = np.frombuffer(content, np.dtype((np.void, width)), last + 1, stored.offset)
    strides = [s * width for s in stored.strides]
    return np.lib.stride_tricks.as_strided(flat, stored.shape, strides).tobytes()


def assert_same(content: bytes, stored: StoredTensor, tensor) -> None:
    assert isinstance(stored, StoredTensor)
    assert stored.dtype.name == str(tensor.dtype).removeprefix("torch.")
    assert stored.shape == tuple(tensor.shape)
    assert stored.strides == tuple(tensor.stride())
    assert stored.contiguous == tensor.is_contiguous() or not stored.num_elements
    assert bits_at(content, stored) == bits_of(tensor)


def assert_saves_the_same(tensor, **options) -> StoredTensor:
    content = saved({"tensor": tensor}, **options)
    stored = read(content).tree["tensor"]
    assert_same(content, stored, torch.load(io.BytesIO(content), weights_only=False)["tensor"])
    assert_same(content, stored, tensor)
    return stored


def random(dtype: str, *shape: int):
    """Any bits of the dtype, NaNs of all kinds among them."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * kind.itemsize
    raw = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return torch.from_numpy(raw).view(kind).reshape(shape)


# Tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    stored = assert_saves_the_same(random(dtype, 5, 7))
    assert stored.contiguous
    assert_saves_the_same(random(dtype, 1).reshape(()))
    assert_saves_the_same(random(dtype, 5, 7).t()[1:4])


def test_every_dtype_of_torch_is_read_or_opaque():
    names = {str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    assert set(DTYPES) <= names
    quantised = {"qint8", "quint8", "qint32"}
    for name in sorted(names - set(DTYPES) - quantised):
        try:
            content = saved([torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))])
        except (RuntimeError, TypeError, NotImplementedError, KeyError, AttributeError):
            continue
        assert isinstance(read(content).tree[0], Opaque), name


VIEWS = {
    "offset": lambda t: t[3:],
    "columns": lambda t: t[:, 2:5],
    "strides": lambda t: t[::2, ::3],
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:, :1].expand(10, 40),
    "expanded from one": lambda t: t[0, 0].expand(8, 6),
    "diagonal": lambda t: t.diagonal(),
    "element": lambda t: t[4, 2],
    "narrowed to nothing": lambda t: t[5:5],
    "new dims": lambda t: t[None, :, None, 1:],
    "permuted": lambda t: t.reshape(2, 5, 12).permute(2, 0, 1),
    "odd stride of a dim of one": lambda t: t.as_strided((3, 1, 2), (2, 50, 1)),
    "overlapping windows": lambda t: t.reshape(-1).unfold(0, 4, 1),
    "channels last": lambda t: t.reshape(1, 2, 5, 12).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(view, dtype):
    assert_saves_the_same(view(random(dtype, 10, 12)))


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (1, 1), (2, 1, 3), (1,) * 20], ids=str)
def test_small_shapes(shape, dtype):
    assert_saves_the_same(torch.ones(shape, dtype=getattr(torch, dtype)))


def test_empty_tensor_with_strides_of_a_view():
    assert_saves_the_same(torch.zeros(4, 5)[:, 3:3])


def test_tensor_that_reads_one_dtype_out_of_the_storage_of_another():
    whole = torch.arange(16, dtype=torch.float32)
    content = saved([whole[4:].view(torch.int32)])
    assert_same(content, read(content).tree[0], whole[4:].view(torch.int32))


def test_tied_tensors_have_one_storage_and_offset():
    weight = torch.arange(12.0).reshape(3, 4)
    tree = read(saved({"one": weight, "two": weight, "part": weight[1:], "copy": weight.clone()})).tree
    place = {name: (tensor.storage, tensor.offset) for name, tensor in tree.items()}
    assert place["one"] == place["two"]
    assert place["part"] == (place["one"][0], place["one"][1] + 16)
    assert place["copy"][0] != place["one"][0]


def test_many_tensors_in_one_storage():
    flat = random("bfloat16", 100)
    parts = {str(i): flat[i * 7 : i * 7 + 7] for i in range(14)}
    content = saved(parts)
    tree = read(content).tree
    assert len({tensor.storage for tensor in tree.values()}) == 1
    for name, part in parts.items():
        assert_same(content, tree[name], part)


def test_parameter():
    assert_saves_the_same(torch.nn.Parameter(torch.randn(3, 4)))
    assert_saves_the_same(torch.nn.Parameter(torch.randn(3, 4), requires_grad=False))


def test_tensor_with_attributes():
    tensor = torch.randn(3)
    tensor.note = "kept"
    assert_saves_the_same(tensor)


def test_parameter_with_attributes():
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    parameter.tensor_model_parallel = True
    assert_saves_the_same(parameter)


def test_tensor_that_requires_gradients():
    assert_saves_the_same(torch.randn(3, requires_grad=True))


def test_conjugated_and_negated_views_become_opaque():
    tensor = torch.randn(3, dtype=torch.complex64)
    apart = torch.randn(3, dtype=torch.complex64).conj().imag
    tree = {"conj": tensor.conj(), "neg": apart, "plain": tensor, "solved": tensor.conj().resolve_conj()}
    file = read(saved(tree))
    assert isinstance(file.tree["conj"], Opaque)
    assert isinstance(file.tree["neg"], Opaque)
    assert isinstance(file.tree["plain"], StoredTensor)
    assert isinstance(file.tree["solved"], StoredTensor)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_are_no_strided_memory_become_opaque():
    tree = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.zeros(3, device="meta"),
    }
    loaded = read(saved(tree)).tree
    assert {name: type(value) for name, value in loaded.items()} == dict.fromkeys(tree, Opaque)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_of_quantised_tensors_the_integers_are_read():
    content = saved(torch.quantize_per_tensor(torch.tensor([0.5, -0.2]), 0.1, 2, torch.qint8))
    found = read(content).tree
    assert (found.dtype.name, found.shape) == ("int8", (2,))
    assert content[found.offset : found.offset + 2] == bytes([7, 0])


# The tree around them


def test_state_dict_of_a_module():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    state = module.state_dict()
    assert isinstance(state, OrderedDict)
    assert hasattr(state, "_metadata")
    content = saved(state)
    file = read(content)
    assert list(file.tree) == list(state)
    assert file.opaque == {}
    for name, tensor in state.items():
        assert_same(content, file.tree[name], tensor)


def test_plain_values_around_the_tensors():
    tree = {
        "numbers": [1, -(1 << 70), 2.5, True, None, 1j], "text": "é\ud800", "bytes": b"\x00\xff",
        "tuple": (1, (2, [3])), "set": {1, 2}, 3: "int key", ("a", 1): "tuple key", "size": torch.Size([2, 3]),
        "ordered": OrderedDict(b=1, a=2), "bytearray": bytearray(b"ab"),
    }  # fmt: skip
    loaded = read(saved(tree)).tree
    assert loaded.pop("size") == (2, 3)
    assert loaded.pop("bytearray") == b"ab"
    assert list(loaded["ordered"]) == ["b", "a"]
    tree.pop("size"), tree.pop("bytearray")
    assert loaded == tree


def test_empty_bytes():
    assert read(saved([b""])).tree == [b""]


def test_optimizer_state():
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    content = saved(optimizer.state_dict())
    file = read(content)
    assert_same(content, file.tree["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert file.tree["param_groups"][0]["betas"] == (0.9, 0.999)
    with MemoryStore({"file.pt": content}).open("file.pt") as handle:
        assert read_number(handle, file.tree["state"][0]["step"]) == 1.0


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_number_in_a_tensor(dtype):
    content = saved(torch.tensor(1, dtype=getattr(torch, dtype)))
    with MemoryStore({"file.pt": content}).open("file.pt") as handle:
        assert read_number(handle, read(content).tree) == (None if dtype == "bool" else 1.0)


def test_whole_module_is_opaque_and_nothing_of_it_is_made():
    file = read(saved(torch.nn.Linear(2, 2)))
    assert isinstance(file.tree, Opaque)
    assert "torch.nn.modules.linear.Linear" in file.opaque


@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_protocols(protocol):
    tree = {"a": random("float32", 3, 4), "b": [random("bfloat16", 2), {"c": random("uint16", 5)}], "text": "é"}
    content = saved(tree, pickle_protocol=protocol)
    loaded = read(content).tree
    assert_same(content, loaded["a"], tree["a"])
    assert_same(content, loaded["b"][0], tree["b"][0])
    assert_same(content, loaded["b"][1]["c"], tree["b"][1]["c"])
    assert loaded["text"] == "é"


def test_root_is_the_stem_of_the_path(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "layer_01.pt")
    assert read((tmp_path / "layer_01.pt").read_bytes()).root == "layer_01"
    assert read(saved([torch.ones(2)])).root == "archive"


def test_file_written_without_checksums():
    torch.serialization.set_crc32_options(False)
    try:
        assert_saves_the_same(torch.randn(5))
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize(
    "path", sorted((FIXTURES / "tp2_pp2" / "global_step6").glob("*.pt")), ids=lambda path: path.name
)
def test_real_files(path):
    content = path.read_bytes()
    file = read(content)
    assert file.root == path.stem
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        keys = {name.rsplit("/", 1)[1] for name in archive.namelist() if "/data/" in name}
    assert {tensor.storage for tensor in tensors(file.tree)} <= keys
    if path.name.startswith("layer_"):
        loaded = torch.load(path, weights_only=True)
        assert list(file.tree) == list(loaded)
        for name, tensor in loaded.items():
            assert_same(content, file.tree[name], tensor)


def tensors(value) -> list[StoredTensor]:
    if isinstance(value, StoredTensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in inner for tensor in tensors(item)]


# What is read


class Recording(FaultyStore):
    """Notes every range that is read."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner, Faults())
        self.ranges: list[tuple[int, int]] = []

    def spoil(self, handle, offset, buffer) -> None:
        self.ranges.append((offset, offset + len(buffer)))
        super().spoil(handle, offset, buffer)


def test_reading_the_tree_reads_no_weights():
    content = saved({str(i): torch.randn(50_000) for i in range(20)})
    store = Recording(MemoryStore({"file.pt": content}))
    with store.open("file.pt") as handle:
        file = read_torch_file(handle)
        members = read_directory(handle)
    assert len(tensors(file.tree)) == 20
    data = [(m.offset, m.offset + m.num_bytes) for m in members.values() if "/data/" in m.name]
    assert len(data) == 20
    # Only the search for the end record, in the last 64 KiB, can't help touching what lies there.
    searched = (len(content) - 0xFFFF - 22, len(content))
    touched = [part for part in store.ranges if any(part[0] < stop and start < part[1] for start, stop in data)]
    assert set(touched) <= {searched}
    assert sum(stop - start for start, stop in store.ranges) < len(content) // 10


# Files that lie


def rewritten(content: bytes, change, *, drop=(), data=None) -> bytes:
    """``content`` with its pickle changed, members left out, or other data in them."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            short = name.split("/", 1)[1]
            if short not in drop:
                raw = (data or {}).get(short, old.read(name))
                new.writestr(name, change(raw) if short == "data.pkl" else raw)
    return target.getvalue()


def unchanged(raw: bytes) -> bytes:
    return raw


def replaced(old: bytes, new: bytes):
    def change(raw: bytes) -> bytes:
        assert raw.count(old) == 1
        return raw.replace(old, new)

    return change


def long(number: int) -> bytes:
    return b"\x8a\x09" + number.to_bytes(9, "little", signed=True)


SAVED = saved([torch.arange(113.0)])
SHAPE = b"K\x00Kq\x85"
"""Offset 0 and shape (113,), as they are in its pickle: 113 is ``q``."""


def test_the_crafted_file_itself_is_sound():
    content = rewritten(SAVED, unchanged)
    assert_same(content, read(content).tree[0], torch.arange(113.0))


def test_missing_storage_member_is_damage():
    with pytest.raises(DamagedError, match="data/0 is not there"):
        read(rewritten(SAVED, unchanged, drop=["data/0"]))


@pytest.mark.parametrize("num_bytes", [0, 1, 448, 451, 453, 904])
def test_storage_of_another_size_than_announced_is_damage(num_bytes):
    with pytest.raises(DamagedError, match=f"data/0 has {num_bytes} bytes, announced are 452"):
        read(rewritten(SAVED, unchanged, data={"data/0": bytes(num_bytes)}))


def test_announced_size_that_lies_is_damage():
    with pytest.raises(DamagedError, match="has 452 bytes, announced are 456"):
        read(rewritten(SAVED, replaced(b"Kqt", b"Krt")))


def pickle_of(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize(
    "extent",
    [
        b"K\x00Kr\x85", b"K\x01Kq\x85", b"KqK\x01\x85", long(1 << 60) + b"K\x01\x85",
        long((1 << 62) - 1) + b"Kq\x85", b"K\x00" + long((1 << 62) - 1) + b"\x85",
    ],
    ids=["one more", "one later", "after the end", "far after", "overflowing offset", "overflowing shape"],
)  # fmt: skip
def test_tensor_that_reaches_past_its_storage_is_damage(extent):
    with pytest.raises(DamagedError, match="reaches element"):
        read(rewritten(SAVED, replaced(SHAPE, extent)))


def test_strides_that_reach_past_the_storage_are_damage():
    changed = pickle_of(SAVED)
    at = changed.index(b"K\x01\x85", changed.index(SHAPE))
    with pytest.raises(DamagedError, match="reaches element 224 of data/0, which holds 113"):
        read(rewritten(SAVED, lambda raw: raw[:at] + b"K\x02\x85" + raw[at + 3 :]))


@pytest.mark.parametrize(
    "extent",
    [
        b"J\xff\xff\xff\xffKq\x85", b"K\x00J\xff\xff\xff\xff\x85", b"K\x00G" + struct.pack(">d", 3.0) + b"\x85",
        b"K\x00Kq", b"K\x00N", b"K\x00X\x01\0\0\0a", b"NKq\x85", b"K\x00KqK\x01\x86", b"K\x00)",
        b"K\x00" + long(1 << 62) + b"\x85",
    ],
    ids=["negative offset", "negative extent", "float extent", "number for a shape", "None for a shape",
         "text for a shape", "no offset", "more dims than strides", "fewer dims than strides", "huge extent"],
)  # fmt: skip
def test_nonsense_for_a_shape_is_damage(extent):
    with pytest.raises(DamagedError):
        read(rewritten(SAVED, replaced(SHAPE, extent)))


@pytest.mark.parametrize("num_dims", [64, 65])
def test_more_dims_than_torch_has_are_damage(num_dims):
    ones = b"(" + b"K\x01" * num_dims + b"t"
    changed = replaced(SHAPE, b"K\x00" + ones)(pickle_of(SAVED))
    at = changed.index(b"K\x01\x85")
    content = rewritten(SAVED, lambda raw: changed[:at] + ones + changed[at + 3 :])
    if num_dims == 64:
        assert read(content).tree[0].shape == (1,) * 64
    else:
        with pytest.raises(DamagedError, match="no short list"):
            read(content)


def test_giant_expand_is_given_up():
    one = saved([torch.ones(1).expand(64)])
    assert read(one).tree[0].strides == (0,)
    with pytest.raises(LimitError, match="repeats"):
        read(saved([torch.ones(1).expand(65)]))
    with pytest.raises(LimitError, match="repeats"):
        read(saved([torch.ones(1).expand(1 << 20, 1 << 20, 1 << 20)]))


@pytest.mark.parametrize(
    "identifier",
    [b"N", b")", b"(X\x07\0\0\0storageNNNNt", b"(X\x05\0\0\0othercx\nFloatStorage\nX\x01\0\0\0" b"0NK\x01t",
     b"(X\x07\0\0\0storagecx\nFloatStorage\nK\x00NK\x01t",
     b"(X\x07\0\0\0storagecx\nFloatStorage\nX\x01\0\0\0" b"0NJ\xff\xff\xff\xfft"],
)  # fmt: skip
def test_nonsense_for_a_storage_is_damage(identifier):
    with pytest.raises(DamagedError):
        read(rewritten(SAVED, lambda raw: identifier + b"Q."))


def test_storage_of_an_unknown_class_makes_the_tensor_opaque():
    file = read(rewritten(SAVED, replaced(b"FloatStorage", b"NovelStorage")))
    assert isinstance(file.tree[0], Opaque)


def test_storage_key_cannot_leave_the_data_folder():
    changed = pickle_of(SAVED)
    assert changed.count(b"X\x01\x00\x00\x000") == 1
    for key in (b"../data.pkl", b"/etc/passwd", b"", b"\xed\xa0\x80"):
        name = b"X" + len(key).to_bytes(4, "little") + key
        with pytest.raises(DamagedError):
            read(rewritten(SAVED, replaced(b"X\x01\x00\x00\x000", name)))


def test_zip_without_pickle_is_damage():
    with pytest.raises(DamagedError, match=r"no data\.pkl"):
        read(rewritten(SAVED, unchanged, drop=["data.pkl"]))


def test_file_that_is_no_zip_is_damage():
    for content in (b"", b"garbage" * 100, bytes(1000), b"PK\3\4" + bytes(1000)):
        with pytest.raises(DamagedError):
            read(content)


def test_cut_file_is_damage():
    content = (FIXTURES / "tp4" / "global_step6" / "layer_06-model_00-model_states.pt").read_bytes()
    for length in range(len(content)):
        with pytest.raises(DamagedError):
            read(content[:length])


def test_cut_pickle_is_damage():
    for length in range(len(pickle_of(SAVED))):
        with pytest.raises(DamagedError):
            read(rewritten(SAVED, lambda raw, length=length: raw[:length]))


def test_big_endian_file_is_not_called_damaged():
    with pytest.raises(UnsupportedError, match="big-endian"):
        read(rewritten(SAVED, unchanged, data={"byteorder": b"big"}))


def test_file_without_byte_order_is_little_endian():
    assert isinstance(read(rewritten(SAVED, unchanged, drop=["byteorder"])).tree[0], StoredTensor)


def test_file_in_the_format_before_zip_is_read():
    file = read(saved([torch.ones(2)], _use_new_zipfile_serialization=False))
    assert file.container == "torch-legacy"
    assert file.tree[0].shape == (2,)


def test_enormous_pickle_is_given_up_before_it_is_read():
    size, name = 1 << 60, b"file/data.pkl"
    head = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 0) + name
    wide = struct.pack("<2H3Q", 1, 24, size, size, 0)
    entry = struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(wide), 0, 0, 0, 0,
        0xFFFFFFFF,
    ) + name + wide  # fmt: skip
    start = len(head) + size
    tail = entry + struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(entry), start)
    tail += struct.pack("<4sIQI", b"PK\6\7", 0, start + len(entry), 1)
    tail += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    with pytest.raises(LimitError):
        read_torch_file(Sparse(start + len(tail), {0: head, start: tail}))
