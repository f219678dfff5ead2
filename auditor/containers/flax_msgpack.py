"""Flax's msgpack files: the state as a tree, arrays as byte ranges. No weights are read.

One msgpack map of maps, as ``flax.serialization.to_bytes`` writes it: lists, tuples and named tuples are maps as well
(keys ``"0"``, ``"1"``, … or field names). An array is an extension of type 1 whose payload is itself msgpack, ``[shape,
dtype name, bytes]``, in C order and without padding; a numpy scalar is type 3 with such a payload, a complex number
type 2. Above 2**30 bytes an array is a map ``{"__msgpack_chunked_array__": true, "shape": {"0": …}, "chunks": {"0":
array, …}}`` of flat chunks. The format stores no checksums. Source: google/flax ``flax/serialization.py``; msgpack
specification 2.0.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.containers.damage import CutShortError, DamagedError, LimitError
from auditor.containers.state_array import Plain, StateArray, Stretch
from auditor.model.dtype import APART
from auditor.storage.store import Entry, Handle, ShortReadError, read_bytes

MAX_DEPTH = 64
"""Maps within maps; states of honest trainers have about twenty."""
MAX_NODES = 1 << 19
"""Keys of all maps and entries of all lists of one file. A state of a hundred thousand arrays has twice as many."""
MAX_KEY = 4096
MAX_TEXT = 64 << 20
"""Bytes of keys and texts of one file."""
MAX_DIMS = 64
MAX_EXTENT = 1 << 48
CHUNKED = "__msgpack_chunked_array__"
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_BLOCK, _FIRST = 64 << 10, 512
"""Bytes read at once: where arrays are skipped, what lies between two of them is short."""
_OF_NUMPY = {"V2": "bfloat16", "bool_": "bool"}
"""Names of dtypes that old versions wrote."""
_UINT = {0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
         0xCA: ">f", 0xCB: ">d"}  # fmt: skip
_LENGTHS = {
    0xC4: "B", 0xC5: ">H", 0xC6: ">I", 0xC7: "B", 0xC8: ">H", 0xC9: ">I", 0xD9: "B", 0xDA: ">H", 0xDB: ">I",
    0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlaxFile:
    """One file, read without its weights."""

    entry: Entry
    tree: Mapping[str, Any]
    """Keys to trees, :class:`StateArray` and :class:`Plain`; positions of lists as words."""
    opaque: Mapping[str, int] = field(default_factory=dict)
    """Extensions of unknown types: what they are to how many there are."""
    encoding: None = None
    """Its bytes are its content."""

    def leaves(self) -> Iterator[tuple[tuple[str, ...], StateArray | Plain | None]]:
        """Paths and what lies there, in stored order; None for an empty map."""
        stack: list[tuple[tuple[str, ...], Any]] = [((), self.tree)]
        while stack:
            path, node = stack.pop()
            if isinstance(node, dict) and node:
                stack.extend(((*path, key), child) for key, child in reversed(node.items()))
            else:
                yield path, None if isinstance(node, dict) else node


def read_flax(handle: Handle) -> FlaxFile:
    """Read the tree of a file.

    Raises:
        CutShortError: the file ends early; ``content`` is the :class:`FlaxFile` up to there.
        DamagedError: the file is no msgpack map, or contradicts itself; where something follows the tree, with
            ``content``.
        LimitError: it asks for more than an honest one needs.
        StorageError: storage failed.
    """
    walk = _Walk(_Cursor(handle))
    tree: dict[str, Any] = {}
    content = FlaxFile(handle.entry, tree, walk.opaque)
    if not handle.entry.num_bytes:
        raise CutShortError("the file is empty")
    try:
        walk.root(tree)
    except _Cut as error:
        raise CutShortError(str(error), content) from error
    except ShortReadError as error:
        raise CutShortError(f"the file ends before its listed size ({error})", content) from error
    left = handle.entry.num_bytes - walk.cursor.at
    if left:
        raise DamagedError(f"{left} bytes follow its tree", content)
    return content


class _Cut(Exception):
    """Something is said to reach beyond the end of the file; ``array``: the one whose bytes do, if it is known."""

    array: StateArray | None = None


class _Cursor:
    """A place in the file that goes on; what lies behind it is read in blocks."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self.size, self.at = handle, handle.entry.num_bytes, 0
        self._block, self._start, self._next = b"", 0, _FIRST

    def take(self, count: int, what: object) -> bytes:
        """The next ``count`` bytes."""
        self.need(count, what)
        low = self.at - self._start
        if low + count > len(self._block):
            length = min(max(count, self._next), self.size - self.at)
            self._block, self._start, low = read_bytes(self._handle, self.at, length), self.at, 0
            self._next = min(2 * self._next, _BLOCK)
        self.at += count
        return self._block[low : low + count]

    def skip(self, count: int, what: object) -> None:
        """Go over the next ``count`` bytes."""
        self.need(count, what)
        self.at += count
        if self.at > self._start + len(self._block):
            self._next = _FIRST

    def need(self, count: int, what: object) -> None:
        """Refuse what reaches beyond the end."""
        if count > self.size - self.at:
            raise _Cut(f"{what} needs {self.at + count} bytes, the file has {self.size}")


@dataclass(frozen=True, slots=True)
class _Where:
    """A path, for messages: put into words only when one is made."""

    path: tuple[str, ...]

    def __str__(self) -> str:
        return repr(".".join(self.path)[:200]) if self.path else "its tree"


class _Walk:
    """One pass over a file."""

    def __init__(self, cursor: _Cursor) -> None:
        self.cursor = cursor
        self.opaque: Counter[str] = Counter()
        self._num_nodes = self._num_text = 0

    def root(self, tree: dict[str, Any]) -> None:
        """The tree of the whole file, put into ``tree``."""
        first = self.cursor.take(1, "its first byte")[0]
        kind, count = self._head(first, "its tree")
        if kind not in ("map", "array"):
            raise DamagedError("it does not begin with a msgpack map: another kind of file")
        self._fill(tree, kind, count, ())

    def _head(self, byte: int, what: object) -> tuple[str, int]:
        """What a first byte announces, and its length or value."""
        if byte < 0x80 or byte >= 0xE0:
            return "number", byte if byte < 0x80 else byte - 0x100
        for low, high, kind in ((0x80, 0x90, "map"), (0x90, 0xA0, "array"), (0xA0, 0xC0, "text")):
            if low <= byte < high:
                return kind, byte - low
        if 0xD4 <= byte <= 0xD8:
            return "extension", 1 << (byte - 0xD4)
        if byte in _LENGTHS:
            form = struct.Struct(_LENGTHS[byte])
            (length,) = form.unpack(self.cursor.take(form.size, what))
            order = ("bytes", "extension", "text", "array", "map")
            return order[(byte > 0xC6) + (byte > 0xC9) + (byte > 0xDB) + (byte > 0xDD)], length
        if byte in (0xC0, 0xC2, 0xC3) or byte in _UINT:
            return "plain", byte
        raise DamagedError(f"byte {byte:#x} at {self.cursor.at - 1}, in {what}, begins nothing that msgpack has")

    def _fill(self, tree: dict[str, Any], kind: str, count: int, path: tuple[str, ...]) -> None:
        what = _Where(path)
        if len(path) > MAX_DEPTH:
            raise LimitError(f"{what} is nested too deeply")
        if count * (2 if kind == "map" else 1) > self.cursor.size - self.cursor.at:
            raise _Cut(f"{what} is said to have {count} entries, {self.cursor.size - self.cursor.at} bytes are left")
        self._num_nodes += count
        if self._num_nodes > MAX_NODES:
            raise LimitError(f"it has more than {MAX_NODES} entries")
        for number in range(count):
            key = self._key(what) if kind == "map" else str(number)
            if key in tree:
                raise DamagedError(f"{what} gives the key {key[:200]!r} twice")
            self._child(tree, key, (*path, key))

    def _child(self, tree: dict[str, Any], key: str, path: tuple[str, ...]) -> None:
        what = _Where(path)
        kind, count = self._head(self.cursor.take(1, what)[0], what)
        if kind in ("map", "array"):
            # Hung up before it is filled: of a file that ends in it, what was there is known.
            inner: dict[str, Any] = {}
            tree[key] = inner
            self._fill(inner, kind, count, path)
            if CHUNKED in inner:
                tree[key] = _chunked(inner, what)
            return
        try:
            tree[key] = self._leaf(kind, count, what)
        except _Cut as error:
            if error.array is not None:
                tree[key] = error.array
            raise

    def _key(self, what: object) -> str:
        kind, count = self._head(self.cursor.take(1, what)[0], what)
        if kind == "number":
            return str(count)
        if kind != "text":
            raise DamagedError(f"a key of {what} is no text")
        if count > MAX_KEY:
            raise LimitError(f"a key of {what} is {count} bytes long")
        return self._text(count, what)

    def _text(self, count: int, what: object) -> str:
        self._num_text += count
        if self._num_text > MAX_TEXT:
            raise LimitError(f"its keys and texts have more than {MAX_TEXT} bytes")
        return self.cursor.take(count, what).decode("utf-8", "backslashreplace")

    def _leaf(self, kind: str, count: int, what: object) -> StateArray | Plain:
        if kind == "number":
            return Plain(count)
        if kind == "plain":
            if count in _UINT:
                form = struct.Struct(_UINT[count])
                return Plain(form.unpack(self.cursor.take(form.size, what))[0])
            return Plain({0xC0: None, 0xC2: False, 0xC3: True}[count])
        if kind == "text" and count <= MAX_KEY:
            return Plain(self._text(count, what))
        if kind == "extension":
            return self._extension(count, what)
        self.cursor.skip(count, what)
        return Plain(f"{count} bytes")

    def _extension(self, count: int, what: object) -> StateArray | Plain:
        (code,) = struct.unpack("b", self.cursor.take(1, what))
        if code in (_NDARRAY, _SCALAR):
            return self._array(count, what)
        self.cursor.skip(count, what)
        if code != _COMPLEX:
            self.opaque[f"msgpack extension {code}"] += 1
        return Plain("a complex number" if code == _COMPLEX else f"an extension of type {code}")

    def _array(self, count: int, what: object) -> StateArray:
        """Shape, dtype and place of the payload that the next ``count`` bytes are."""
        stop = self.cursor.at + count
        self._expect("array", 3, what)
        dims, num_dims = self._head(self.cursor.take(1, what)[0], what)
        if dims != "array" or num_dims > MAX_DIMS:
            raise DamagedError(f"{what} has no shape")
        shape = tuple(self._extent(what) for _ in range(num_dims))
        if math.prod(filter(None, shape)) > MAX_EXTENT:
            raise LimitError(f"{what} has a shape beyond any tensor's")
        kind, length = self._head(self.cursor.take(1, what)[0], what)
        if kind not in ("text", "bytes") or length > 32:
            raise DamagedError(f"{what} has no dtype")
        name = self._text(length, what)
        kind, length = self._head(self.cursor.take(1, what)[0], what)
        if kind not in ("bytes", "text") or self.cursor.at + length != stop:
            raise DamagedError(f"{what} says that it has {length} bytes at {self.cursor.at}, its record ends at {stop}")
        dtype = APART.get(_OF_NUMPY.get(name, name))
        needed = dtype.num_bytes(math.prod(shape)) if dtype else length
        if needed != length:
            raise DamagedError(f"{what} has {length} bytes, {name[:32]}{list(shape)} needs {needed}")
        found = StateArray(dtype, name, shape, (Stretch(self.cursor.at, length),))
        try:
            self.cursor.skip(length, what)
        except _Cut as error:
            error.array = found
            raise
        return found

    def _extent(self, what: object) -> int:
        kind, value = self._head(self.cursor.take(1, what)[0], what)
        if kind == "plain" and value in _UINT:
            form = struct.Struct(_UINT[value])
            value = form.unpack(self.cursor.take(form.size, what))[0]
        elif kind != "number":
            value = -1
        if not isinstance(value, int) or not 0 <= value < 1 << 62:
            raise DamagedError(f"{what} has no shape")
        return value

    def _expect(self, kind: str, count: int, what: object) -> None:
        if self._head(self.cursor.take(1, what)[0], what) != (kind, count):
            raise DamagedError(f"{what} is no record of an array")


def _chunked(tree: Mapping[str, Any], what: object) -> StateArray:
    """The array that a map of chunks stands for."""
    stated, held = tree.get("shape"), tree.get("chunks")
    if not isinstance(stated, dict) or not isinstance(held, dict) or len(stated) > MAX_DIMS:
        raise DamagedError(f"{what} is said to be cut into chunks, but has none, or no shape")
    extents = [node.value if isinstance(node, Plain) else -1 for node in stated.values()]
    shape = tuple(n if type(n) is int and 0 <= n < 1 << 62 else -1 for n in extents)
    chunks = [held.get(str(number)) for number in range(len(held))]
    arrays = [chunk for chunk in chunks if isinstance(chunk, StateArray)]
    if -1 in shape or len(arrays) != len(chunks) or not arrays or list(stated) != [str(at) for at in range(len(shape))]:
        raise DamagedError(f"the chunks or the shape of {what} can't be put in order")
    if math.prod(filter(None, shape)) > MAX_EXTENT:
        raise LimitError(f"{what} has a shape beyond any tensor's")
    if len({chunk.dtype_name for chunk in arrays}) > 1:
        raise DamagedError(f"the chunks of {what} have different dtypes")
    if sum(math.prod(chunk.shape) for chunk in arrays) != math.prod(shape):
        raise DamagedError(f"the chunks of {what} do not make up its shape {list(shape)}")
    stretches = tuple(stretch for chunk in arrays for stretch in chunk.stretches)
    return StateArray(arrays[0].dtype, arrays[0].dtype_name, shape, stretches)
