"""The ``.metadata`` of ``torch.distributed.checkpoint``: which part of which tensor lies where, as columns.

It is one pickle, of the class ``Metadata``:

    state_dict_metadata   name -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata
    storage_data          MetadataIndex(name, offset) -> _StorageInfo(relative_path, offset, length, transforms)
    planner_data          name -> the path of keys by which the state dict was flattened; None where it was not
    storage_meta          where it was written to and a random number of the save; absent before torch 2.3

A large run has a million chunks. Objects of the classes that are known are therefore taken apart as soon as their state
is met, and nothing of them stays but numbers. Source: torch ``torch/distributed/checkpoint/metadata.py``,
``filesystem.py`` (2.0 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.dcp_columns import DcpMetadata, Described, match_chunks
from auditor.containers.pickle_machine import LIMITS, Global, Limits, PickleMachine
from auditor.containers.torch_zip import MAX_DIMS, dtype_named
from auditor.model.dtype import DType
from auditor.storage.store import Handle, ShortReadError, read_bytes

MAX_BYTES = 512 << 20
MAX_OPCODES = 160_000_000
"""A million chunks take about 75 million."""
MEMORY_PER_BYTE, MAX_MEMORY = 32, 8 << 30
"""Up to 20 bytes are counted for each byte of an honest one, from above: of most of it, nothing stays. In truth 3 are
taken. More than 8 GiB are refused in any case."""
MAX_STACK = 100_000
"""Writers put a thousand items at a time into a dictionary."""
MAX_EXTENT = 1 << 62
MAX_SAVE_ID = 64
"""Characters. A UUID has 36."""
_MEGATRON = "megatron.core.dist_checkpointing."
_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
"""Where the classes are, and where some of them were before torch 2.3."""


def read_dcp_metadata(handle: Handle) -> DcpMetadata:
    """Read a ``.metadata``.

    Raises:
        DamagedError: it is cut short, contradicts itself or asks for too much.
        StorageError: storage failed.
    """
    num_bytes = handle.entry.num_bytes
    if num_bytes > MAX_BYTES:
        raise LimitError(f"it has {num_bytes} bytes, at most {MAX_BYTES} are read")
    try:
        data = read_bytes(handle, 0, num_bytes)
    except ShortReadError as error:
        raise DamagedError(f"it is shorter than its size ({error})") from error
    memory = min(max(LIMITS.num_memory, MEMORY_PER_BYTE * num_bytes), MAX_MEMORY)
    machine = _Machine(Limits(num_bytes=MAX_BYTES, num_opcodes=MAX_OPCODES, num_memory=memory, num_stack=MAX_STACK))
    try:
        content = machine.load(data)
        if not isinstance(content, _Whole):
            raise DamagedError("it is a pickle, but not of a checkpoint's Metadata")
        del data
        return machine.finish(content)
    finally:
        # It refers to itself: what it remembers of a large index would stay until the garbage collector comes.
        machine.memo.clear()
        machine.stack.clear()


# Values that stand for objects of the known classes while the pickle is read


@dataclass(slots=True)
class _Pending:
    """An object whose state has not been met; afterwards, for those who refer to it again, its value."""

    kind: str
    value: Any = None


class _Chunk(tuple[tuple[int, ...], tuple[int, ...]]):
    """Offsets and sizes."""

    __slots__ = ()


class _Index(tuple[str, tuple[int, ...] | None]):
    """Name and offsets of a chunk; no offsets where it is no tensor."""

    __slots__ = ()

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Stored(tuple[str, int, int, tuple[str, ...]]):
    """File, offset, length, transforms."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Dtype, its name, shape, range of chunks."""

    dtype: DType | None
    dtype_name: str
    shape: tuple[int, ...]
    chunks: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Whole:
    """The state of ``Metadata`` itself."""

    state: Mapping[Any, Any]


_BYTES = "an object"
_DROPPED = frozenset({"SavePlan", "WriteItem", "TensorWriteData", "LoadPlan"})
"""Megatron keeps every rank's plan as well."""


def _resolved(value: Any) -> Any:
    return value.value if isinstance(value, _Pending) else value


def _counts(value: Any) -> tuple[int, ...]:
    value = _resolved(value)
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        raise ValueError("a shape or an offset that is no short list")
    for number in value:
        if type(number) is not int or not 0 <= number < MAX_EXTENT:
            raise ValueError("a shape or an offset with an entry that is no count")
    return tuple(value)


def _attributes(state: Any) -> Mapping[Any, Any]:
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
        state = state[1]
    if not isinstance(state, dict):
        raise TypeError("an object of a checkpoint's metadata without attributes")
    return state


class _Machine(PickleMachine):
    """Takes objects of known classes apart as their state is met."""

    def __init__(self, limits: Limits) -> None:
        super().__init__({}, None, limits)
        self.found = DcpMetadata()
        self._makers: dict[Global, str] = {}
        self._names: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self._transforms: dict[tuple[str, ...], int] = {(): 0}
        self._shapers: dict[str, Callable[[Any], Any]] = {
            "ChunkStorageMetadata": self._chunk, "MetadataIndex": self._index, "_StorageInfo": self._stored,
            "TensorProperties": self._properties, "TensorStorageMetadata": self._tensor, "Metadata": self._whole,
            "StorageMeta": lambda state: _Home(_text(state.get("checkpoint_id")), _text(state.get("save_id"))),
            **dict.fromkeys(_DROPPED, lambda state: None),
        }  # fmt: skip

    # What the machine asks

    def call(self, maker: object, arguments: object) -> None:
        """Make what stands for an object of a known class."""
        kind = self._kind(maker) if isinstance(maker, Global) else ""
        if not kind and not self._is_member(maker, arguments):
            super().call(maker, arguments)
        elif kind == "Size":
            # Not copied: a tuple of a tuple is the tuple itself.
            self.stack.append(_counts(arguments[0] if isinstance(arguments, tuple) and arguments else ()))
        elif kind == "BytesStorageMetadata":
            self.stack.append(_BYTES)
        elif kind == "path":
            self.stack.append(_joined(arguments))
        elif kind in ("inert", ""):
            self.stack.append(None)
        else:
            self.stack.append(_Pending(kind))

    def build(self) -> None:
        """Turn an object's state into its value at once."""
        target = self.stack[-2] if len(self.stack) > 1 else None
        if not isinstance(target, _Pending):
            super().build()
            return
        state = self.stack.pop()
        target.value = self.stack[-1] = self._shapers[target.kind](
            state if target.kind == "TensorProperties" else _attributes(state)
        )

    def set_items(self, items: list[Any]) -> None:
        """Rows of the storage table go into the columns, whatever dictionary they are put into."""
        if not items or type(_resolved(items[0])) is not _Index:
            super().set_items(items)
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._add_item(_resolved(key), _resolved(value))

    def _is_member(self, maker: object, arguments: object) -> bool:
        """Whether a call takes a member of a known enumeration by its name: Python 3.11.0 to 3.11.3 wrote them so."""
        if not isinstance(maker, Global) or str(maker) not in ("builtins.getattr", "__builtin__.getattr"):
            return False
        if not isinstance(arguments, tuple) or len(arguments) != 2:
            return False
        kind, name = arguments
        return isinstance(kind, Global) and isinstance(name, str) and self._kind(kind) == "inert"

    def _kind(self, maker: Global) -> str:
        known = self._makers.get(maker)
        if known is None:
            known = self._makers[maker] = self._recognised(maker)
        return known

    def _recognised(self, maker: Global) -> str:
        module, name = maker.module, maker.name
        if module == "torch" and name == "Size":
            return "Size"
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return "path"
        if (module, name) == ("torch.serialization", "_get_layout"):
            return "inert"
        if module.startswith(_MEGATRON):
            # Some versions of megatron-core have subclasses, with what they need themselves besides.
            name = name.removeprefix("MCore")
        elif not module.startswith(_MODULES):
            return ""
        if name in ("_MEM_FORMAT_ENCODING", "WriteItemType", "MEM_FORMAT_ENCODING"):
            return "inert"
        return name if name in self._shapers or name == "BytesStorageMetadata" else ""

    # Values of the known classes

    def _chunk(self, state: Mapping[Any, Any]) -> _Chunk:
        offsets, sizes = _counts(state.get("offsets")), _counts(state.get("sizes"))
        if len(offsets) != len(sizes):
            raise ValueError("a chunk whose offsets and sizes have different numbers of dims")
        return _Chunk((offsets, sizes))

    def _index(self, state: Mapping[Any, Any]) -> _Index:
        name, offset = state.get("fqn"), state.get("offset")
        if not isinstance(name, str):
            raise TypeError("an index without a name")
        return _Index((name, None if offset is None else _counts(offset)))

    def _stored(self, state: Mapping[Any, Any]) -> _Stored:
        file, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
        if not isinstance(file, str):
            raise TypeError("an item without a file")
        if not all(type(number) is int and 0 <= number < MAX_EXTENT for number in (offset, length)):
            raise ValueError("an item without offset and length")
        transforms = state.get("transform_descriptors") or ()
        if not isinstance(transforms, (list, tuple)):
            raise TypeError("an item whose transforms are no list")
        return _Stored((file, offset, length, tuple(map(str, transforms[:4]))))  # type: ignore[arg-type]

    def _properties(self, state: Any) -> Any:
        """The dtype is all that matters."""
        return state[0] if isinstance(state, tuple) and state else _attributes(state).get("dtype")

    def _tensor(self, state: Mapping[Any, Any]) -> _Tensor:
        shape, chunks = _counts(state.get("size")), _resolved(state.get("chunks"))
        dtype = _resolved(state.get("properties"))
        if not isinstance(chunks, list):
            raise TypeError("a tensor without a list of chunks")
        found = self.found
        first = len(found.chunk_at)
        for chunk in map(_resolved, chunks):
            if type(chunk) is not _Chunk or len(chunk[0]) != len(shape):
                raise ValueError("a tensor with a chunk of another number of dims")
            found.chunk_at.append(len(found.pool))
            found.pool.extend(chunk[0])
            found.pool.extend(chunk[1])
        name = dtype.name if isinstance(dtype, Global) else "unknown"
        return _Tensor(dtype_named(dtype), name, shape, (first, len(found.chunk_at)))

    def _whole(self, state: Mapping[Any, Any]) -> _Whole:
        return _Whole(state)

    def _add_item(self, key: Any, value: Any) -> None:
        if type(key) is not _Index or type(value) is not _Stored:
            raise TypeError("an index that leads to no place in a file")
        found, (name, corner) = self.found, key
        found.item_name.append(_number(self._names, name))
        found.item_at.append(-1 if corner is None else len(found.pool))
        found.item_dims.append(len(corner or ()))
        found.pool.extend(corner or ())
        file, offset, length, transforms = value
        found.item_file.append(_number(self._files, file))
        found.item_offset.append(offset)
        found.item_length.append(length)
        found.item_transform.append(_number(self._transforms, transforms))
        if len(self._transforms) > MAX_DIMS:
            raise LimitError("its items name too many transforms")

    def finish(self, whole: _Whole) -> DcpMetadata:
        """What was found, with names in order."""
        described, paths = _resolved(whole.state.get("state_dict_metadata")), whole.state.get("planner_data")
        if not isinstance(described, dict):
            raise DamagedError("its state_dict_metadata is no dictionary")
        found = self.found
        for name, value in ((name, _resolved(value)) for name, value in described.items()):
            if isinstance(name, str) and isinstance(value, _Tensor):
                found.tensors[name] = Described(name, value.dtype, value.dtype_name, value.shape, value.chunks)
            elif isinstance(name, str) and value == _BYTES:
                found.objects[name] = None
            else:
                raise DamagedError("its state_dict_metadata holds something that is no tensor and no object")
        found.names, found.files, found.transforms = [*self._names], [*self._files], [*self._transforms]
        if isinstance(paths, dict):
            found.paths = {key: path for key, path in paths.items() if _is_path(key, path)}
        match_chunks(found)
        home = _resolved(whole.state.get("storage_meta"))
        if isinstance(home, _Home):
            found.home, found.save_id = home.path, home.save_id[:MAX_SAVE_ID]
        found.opaque = dict(self.opaque)
        return found


@dataclass(frozen=True, slots=True)
class _Home:
    path: str
    save_id: str


def _is_path(key: object, path: object) -> bool:
    return isinstance(key, str) and isinstance(path, tuple) and all(isinstance(part, (str, int)) for part in path)


def _number(known: dict[str, int] | dict[tuple[str, ...], int], name: Any) -> int:
    return known.setdefault(name, len(known))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _joined(arguments: object) -> str:
    """A path from its parts."""
    parts: Sequence[object] = arguments if isinstance(arguments, tuple) else ()
    return "/".join(part for part in parts if isinstance(part, str))[:4096].replace("//", "/", 1)
