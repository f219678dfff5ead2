"""``torch.save`` files in zip form: the pickled object as an inert tree, tensors as byte ranges. No torch, no weights.

Members: ``<root>/data.pkl``, ``<root>/data/<key>`` one a storage, ``<root>/byteorder``. A tensor is a view of a
storage: element (i, j, …) lies at ``data + itemsize · (offset + i·stride₀ + j·stride₁ + …)``. Several tensors may be
views of one storage. The root is the stem of the path that was saved to, so a renamed file shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.containers.damage import CutShortError, DamagedError, LimitError, UnsupportedError
from auditor.containers.elements import number_of
from auditor.containers.pickle_machine import (
    LIMITS,
    Builder,
    Global,
    KeyGuard,
    Limits,
    MemoryLimitError,
    Opaque,
    PickleMachine,
)
from auditor.containers.torch_legacy import MAGIC, ROOT, Pickles, collect
from auditor.containers.torch_plain import plain_tensor
from auditor.containers.zip_beginning import members_from
from auditor.containers.zip_directory import CompressedError, Member, read_directory
from auditor.model.dtype import DTYPES, DType
from auditor.storage.store import Entry, Handle, ShortReadError, read_bytes

MAX_DIMS = 64
MAX_EXPANSION = 64
"""A view may show each stored element this many times on average (stride 0). Beyond it a few stored bytes would cost
unbounded reading time."""

SMALL = 1 << 20
"""Bytes of memory that the records of one file of a large run take at most."""

SCRIPT = "torchscript"
"""The ``container`` of a TorchScript archive: for use, not for training on; nothing in it is read."""

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QInt8Storage": "int8", "QUInt8Storage": "uint8", "QInt32Storage": "int32",
}  # fmt: skip
_TORCH_NAMES = {
    "half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """What a persistent id names: one member, seen as elements of one dtype (None: bytes)."""

    key: str
    dtype: DType | None
    num_elements: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of the tree: where its elements lie in the file."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements."""
    offset: int
    """First byte of the first element in the file."""
    storage: str
    """Tensors with the same storage and offset are one array under several names."""

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_spanned(self) -> int:
        """Bytes from the first element to the end of the last."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.bits // 8 if self.num_elements else 0

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie without gaps in C order."""
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent > 1 and stride != step:
                return False
            step *= max(extent, 1)
        return True


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One file, read without its weights."""

    entry: Entry
    root: str
    """First part of the member names: the stem of the path to which the file was saved."""
    tree: Any
    """The saved object: dicts, lists, tuples, numbers, strings, :class:`StoredTensor`, inert records."""
    opaque: Mapping[str, int]
    """Objects of unknown classes, by name."""
    container: str = "torch-zip"


def dtype_named(value: object) -> DType | None:
    """The dtype meant by a pickled ``torch.float32`` or the like."""
    if not isinstance(value, Global) or value.module != "torch":
        return None
    return DTYPES.get(_TORCH_NAMES.get(value.name, value.name))


class RecordBudget:
    """Memory for the records of all files that are read together, those of one step say.

    What a file takes up to :data:`SMALL` is not counted: a large run has thousands of files, but each is small.
    """

    def __init__(self, num_bytes: int = 1 << 30) -> None:
        self._left = num_bytes

    @property
    def room(self) -> int:
        """Bytes that the next file may take."""
        return self._left + SMALL

    def take(self, num_bytes: int) -> None:
        """Count one file's records."""
        self._left -= max(0, num_bytes - SMALL)


def read_torch_file(handle: Handle, budget: RecordBudget | None = None, limits: Limits = LIMITS) -> TorchFile:
    """Read the directory and the pickle of a file written by ``torch.save``, of its older form too.

    Raises:
        DamagedError: the file is cut short, contradicts itself, or asks for more than ``limits``.
        UnsupportedError: big-endian data, or no room in the ``budget``: earlier files took it.
        StorageError: storage failed.
    """
    try:
        members = read_directory(handle)
    except CompressedError:
        if _is_script(handle):
            return TorchFile(handle.entry, "", None, {}, SCRIPT)
        raise
    except DamagedError:
        if _is_legacy(handle):
            return _read_legacy(handle, budget, limits)
        raise
    pickled = next((name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")), None)
    if pickled is None:
        raise DamagedError("it holds no data.pkl: the save failed half way, or another kind of zip file")
    root = pickled.removesuffix("/data.pkl")
    try:
        order = members.get(f"{root}/byteorder")
        if order and read_bytes(handle, order.offset, min(order.num_bytes, 16)).strip() == b"big":
            raise UnsupportedError("its tensors are big-endian")
        if members[pickled].num_bytes > limits.num_bytes:
            raise LimitError(f"its pickle has {members[pickled].num_bytes} bytes, at most {limits.num_bytes} are read")
        data = read_bytes(handle, members[pickled].offset, members[pickled].num_bytes)
    except ShortReadError as error:
        raise CutShortError(f"the file ends before its own records do ({error})") from error
    tensors = _Tensors(root, members)
    plain = tensors.plain(data)
    if plain is not None:
        return TorchFile(handle.entry, root, plain, {})
    tree, opaque = _load(tensors, data, budget, limits)
    return TorchFile(handle.entry, root, tree, opaque)


def tensor_at(head: bytes) -> StoredTensor:
    """The single tensor of a file of which only the first bytes are known; its data may go on behind them.

    Raises:
        DamagedError: it is no such file.
        UnsupportedError: its tensor is big-endian, or in a form that is not known.
    """
    members = {member.name: member for member in members_from(head)}
    pickled = next((name for name in members if name.endswith("/data.pkl")), "")
    root = pickled.removesuffix("/data.pkl")
    if not pickled or members[pickled].num_bytes < 0:
        raise DamagedError("it does not begin with the pickle of a tensor")
    order = members.get(f"{root}/byteorder")
    if order and head[order.offset : order.offset + 3] == b"big":
        raise UnsupportedError("its tensors are big-endian")
    first = members[pickled].offset
    tree, _ = _load(_Begun(root, members), head[first : first + members[pickled].num_bytes], None, LIMITS)
    if not isinstance(tree, StoredTensor):
        raise UnsupportedError("it is no tensor, or one in a form that is not known")
    return tree


def plain_reader(root: str, members: Mapping[str, Member]) -> Callable[[bytes], StoredTensor | None]:
    """What reads the pickle of a single plain tensor in a file with these members; it gives None for any other."""
    return _Tensors(root, members).plain


def _load(tensors: _Tensors, data: bytes, budget: RecordBudget | None, limits: Limits) -> tuple[Any, Mapping[str, int]]:
    """The saved object, and the objects of unknown classes in it."""
    allowed = replace(limits, num_memory=min(limits.num_memory, budget.room)) if budget else limits
    machine = PickleMachine(tensors.builders(), tensors.storage, allowed)
    try:
        tree = machine.load(data)
    except MemoryLimitError as error:
        if allowed.num_memory < limits.num_memory:
            message = f"the records of the files before it left it {allowed.num_memory} bytes of memory, too few"
            raise UnsupportedError(message) from error
        raise
    if budget:
        budget.take(machine.num_memory)
    return tree, dict(machine.opaque)


def _is_script(handle: Handle) -> bool:
    """Whether a file is a program with its constants, of which ``torch.jit.save`` compresses the source."""
    return any("/code/__torch__" in name for name in read_directory(handle, deflated=True))


def _is_legacy(handle: Handle) -> bool:
    """Whether a file begins with the magic number of the form before torch 1.6."""
    if handle.entry.num_bytes < len(MAGIC):
        return False
    try:
        return read_bytes(handle, 0, len(MAGIC)) == MAGIC
    except ShortReadError:
        return False


def _read_legacy(handle: Handle, budget: RecordBudget | None, limits: Limits) -> TorchFile:
    """A file of the older form: its object twice, first to learn the width of its storages."""
    pickles = Pickles(handle, limits)
    storages = collect(pickles.saved, limits, {}, _Tensors(ROOT, {}).storage)
    widths = {key: found.dtype.bits // 8 if found.dtype else 1 for key, found in storages.items()
              if isinstance(found, Storage)}  # fmt: skip
    tree, opaque = _load(_Tensors(ROOT, pickles.members(widths)), pickles.saved, budget, limits)
    return TorchFile(handle.entry, "", tree, opaque, "torch-legacy")


class _Tensors:
    """Builders that turn torch's rebuild calls into :class:`StoredTensor`, checked against the members."""

    def __init__(self, root: str, members: Mapping[str, Member]) -> None:
        self.root, self.members = root, members

    def builders(self) -> dict[str, Builder]:
        known: dict[str, Builder] = {
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_tensor_v3": self.tensor,
            # Of a quantised tensor the integers; scales and zero points are not looked at.
            "torch._utils._rebuild_qtensor": lambda arguments: self.tensor((*arguments[:4], False, {})),
            "torch._utils._rebuild_parameter": lambda arguments: arguments[0],
            "torch._utils._rebuild_parameter_with_state": lambda arguments: arguments[0],
            "torch._tensor._rebuild_from_type_v2": self.subclass,
            "torch.Size": lambda arguments: tuple(arguments[0]),
            "_codecs.encode": lambda arguments: _as_bytes(arguments[0]),
        }
        for module in ("builtins", "__builtin__"):
            known[f"{module}.bytes"] = lambda arguments: _as_bytes(arguments[0]) if arguments else b""
            known[f"{module}.set"] = lambda arguments: set(KeyGuard().keys(arguments[0] if arguments else ()))
            known[f"{module}.complex"] = lambda arguments: complex(*map(float, arguments[:2]))
            known[f"{module}.bytearray"] = lambda arguments: _as_bytes(arguments[0]) if arguments else b""
        known["collections.OrderedDict"] = _ordered_dict
        return known

    def plain(self, data: bytes) -> StoredTensor | None:
        """The tensor, where the pickle is that of a single plain one."""
        found = plain_tensor(data)
        if found is None:
            return None
        kind = Global("torch", found.storage_class)
        try:
            storage = self.storage(("storage", kind, found.key, "", found.num_elements))
            made = self.tensor((storage, found.offset, found.shape, found.strides))
        except ValueError:
            return None
        return made if isinstance(made, StoredTensor) else None

    def storage(self, persistent_id: object) -> object:
        if isinstance(persistent_id, tuple) and persistent_id[:1] == ("module",) and len(persistent_id) == 4:
            return persistent_id[1]  # The older form adds to a module's class its source.
        if not (isinstance(persistent_id, tuple) and len(persistent_id) >= 5 and persistent_id[0] == "storage"):
            raise ValueError("a persistent id that is no storage")
        _, kind, key, _, count = persistent_id[:5]
        if not isinstance(kind, Global) or not isinstance(key, str) or not isinstance(count, int) or count < 0:
            raise ValueError("a storage that names no class, key and size")
        if kind.name == "UntypedStorage":
            return Storage(key, None, count)
        name = _STORAGES.get(kind.name)
        return Storage(key, DTYPES[name], count) if name else Opaque(kind, (key, count))

    def subclass(self, arguments: tuple[Any, ...]) -> object:
        maker, kind, inner, state = arguments
        plain = isinstance(kind, Global) and kind.module in ("torch", "torch._tensor") and kind.name == "Tensor"
        # No other builders: the memory of what they make of these arguments would not be counted.
        if isinstance(maker, Global) and plain and str(maker).startswith("torch._utils._rebuild_"):
            builder = self.builders().get(str(maker))
            if builder is not None and isinstance(inner, tuple):
                return builder(inner)
        return Opaque(kind, (maker, inner), state)

    def tensor(self, arguments: tuple[Any, ...]) -> object:
        storage, offset, shape, strides = arguments[:4]
        if not isinstance(storage, Storage):
            return Opaque(Global("torch", "Tensor"), arguments)
        if any(isinstance(extra, dict) and extra for extra in arguments[6:]):
            return Opaque(Global("torch", "lazily conjugated or negated tensor"), arguments)
        dtype = storage.dtype or next(filter(None, map(dtype_named, arguments[4:])), None)
        if dtype is None or dtype.bits < 8:
            return Opaque(Global("torch", "tensor of an unknown dtype"), arguments)
        shape, strides = _extents(shape), _extents(strides)
        if len(shape) != len(strides) or not isinstance(offset, int) or offset < 0:
            raise ValueError("a tensor whose shape, strides and offset don't fit together")
        member = self.member(storage, dtype)
        width = dtype.bits // 8
        self.check_extent(storage.key, member.num_bytes // width, offset, shape, strides)
        return StoredTensor(dtype, shape, strides, member.offset + offset * width, storage.key)

    def member(self, storage: Storage, dtype: DType) -> Member:
        member = self.members.get(f"{self.root}/data/{storage.key}")
        if member is None:
            raise DamagedError(f"its member data/{storage.key} is not there though a tensor lies in it")
        announced = storage.num_elements if storage.dtype is None else dtype.num_bytes(storage.num_elements)
        if announced != member.num_bytes:
            raise DamagedError(f"its member data/{storage.key} has {member.num_bytes} bytes, announced are {announced}")
        return member

    @staticmethod
    def check_extent(key: str, capacity: int, offset: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        count = math.prod(shape)
        if count == 0:
            return
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if last >= capacity:
            raise DamagedError(f"a tensor reaches element {last} of data/{key}, which holds {capacity}")
        if count > MAX_EXPANSION * capacity:
            raise LimitError(f"a view repeats the {capacity} elements of data/{key} into {count}")


class _Begun(_Tensors):
    """The same where only the beginning of the file is known: a storage is as long as it is announced to be."""

    def member(self, storage: Storage, dtype: DType) -> Member:
        member = self.members.get(f"{self.root}/data/{storage.key}")
        if member is None:
            raise UnsupportedError(f"its member data/{storage.key} does not follow its pickle at once")
        whole = storage.num_elements if storage.dtype is None else dtype.num_bytes(storage.num_elements)
        return replace(member, num_bytes=whole)


def _extents(value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        raise ValueError("a shape or strides that are no short list")
    if any(not isinstance(n, int) or not 0 <= n < 1 << 62 for n in value):
        raise ValueError("a shape or strides with an entry that is no count")
    return tuple(int(n) for n in value)


def _as_bytes(value: object) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else bytes(value) if isinstance(value, bytes) else b""


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if not arguments:
        return {}
    pairs = [(key, value) for key, value in arguments[0]]
    return dict(zip(KeyGuard().keys(key for key, _ in pairs), (value for _, value in pairs), strict=True))


def read_number(handle: Handle, tensor: StoredTensor) -> float | None:
    """The value of a one-element tensor: a counter kept as a tensor is metadata, not weights. None: not a number."""
    try:
        return number_of(read_bytes(handle, tensor.offset, tensor.dtype.bits // 8), tensor.dtype)
    except ShortReadError:
        return None
