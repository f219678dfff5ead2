"""Zarr v3 nodes: ``zarr.json`` read by our own bounded reader, chunks as files that are never opened here.

    zarr.json     node_type group or array; shape, data_type, chunk_grid, chunk_key_encoding, codecs, attributes
    c/<i>/<j>     the chunk at position (i, j) of a regular grid, in C order; edge chunks are as long as others

Chunks may be compressed, and may be shards; ``how`` says what is to be undone. An array with codecs that aren't read
here is known by shape and dtype; ``unsupported`` says why its values aren't. Of shards of several chunks the array has
the chunks; :attr:`ZarrArray.shards` is the same array with what is stored under keys. Elements of zarr's own data
types; an unsigned integer may carry another dtype of its width. Source: the Zarr v3 core specification, version 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.json_document import read_json
from auditor.containers.zarr_codecs import Codecs, counts, named, read_codecs
from auditor.model.catalog import c_strides
from auditor.model.dtype import APART, DType, Kind
from auditor.model.region import Box
from auditor.storage.store import Handle

MAX_DIMS = 64
MAX_EXTENT = 1 << 48
"""Product of a shape's extents, zeros left out; beyond it a shape is nonsense."""

Position = tuple[int, ...]
"""Of a chunk in the grid."""


@dataclass(frozen=True, slots=True)
class ZarrNode:
    """A group, or what is common to all nodes."""

    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ZarrArray(ZarrNode):
    """An array, read without its chunks."""

    shape: tuple[int, ...] = ()
    chunk_shape: tuple[int, ...] = ()
    data_type: str = ""
    """The format's own word."""
    prefix: str = "c"
    """First part of a chunk's key; empty for the keys of Zarr v2."""
    separator: str = "/"
    unsupported: str = ""
    """Why the values can't be read; empty where they can."""
    how: Codecs = field(default_factory=Codecs)
    fills_zeros: bool = False
    """Whether the document says that chunks that are not stored are zeros."""
    shard_shape: tuple[int, ...] | None = None
    """Of what is stored under one key, where the chunks lie in shards whose index must be read."""

    @property
    def codec(self) -> str:
        """What a chunk's bytes are under, as :mod:`auditor.model.encoding` calls it."""
        return self.how.codec

    @property
    def shards(self) -> ZarrArray:
        """The array in the parts that are stored under keys."""
        return self if self.shard_shape is None else replace(self, chunk_shape=self.shard_shape, shard_shape=None)

    @property
    def chunks_in_shard(self) -> tuple[int, ...]:
        """Chunks along every dim of a shard."""
        shard = self.chunk_shape if self.shard_shape is None else self.shard_shape
        return tuple(outer // inner for outer, inner in zip(shard, self.chunk_shape, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one to the next along every dim of a chunk."""
        order = self.how.order or tuple(range(len(self.chunk_shape)))
        found = dict(zip(order, c_strides([self.chunk_shape[dim] for dim in order]), strict=True))
        return tuple(found[dim] for dim in range(len(order)))

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along every dim."""
        return _grid(self.shape, self.chunk_shape)

    @property
    def num_chunks(self) -> int:
        """Chunks in all: 1 for an array without dims, 0 for one without elements."""
        return math.prod(self.grid)

    def positions(self) -> Iterator[Position]:
        """Every position of the grid, in C order; made one by one, for there may be too many."""
        yield from _positions(self.grid)

    def number(self, position: Position) -> int:
        """Which chunk of the grid, in C order, the one at ``position`` is."""
        return sum(at * step for at, step in zip(position, c_strides(self.grid), strict=True))

    def key(self, position: Position) -> str:
        """The key below the array under which a chunk is stored."""
        if self.shard_shape is not None:
            return self.shards.key(tuple(at // n for at, n in zip(position, self.chunks_in_shard, strict=True)))
        numbers = list(map(str, position))
        return self.separator.join([self.prefix, *numbers] if self.prefix else numbers or ["0"])

    def position(self, key: str) -> Position | None:
        """The position of the chunk under ``key``; None where no chunk of the grid has this key."""
        parts = key.split(self.separator)
        if self.prefix:
            if parts[0] != self.prefix:
                return None
            parts = parts[1:]
        elif not self.grid:
            return () if key == "0" else None
        numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 16]
        fits = len(numbers) == len(parts) == len(self.grid) and all(
            n < limit and part == str(n) for n, limit, part in zip(numbers, self.grid, parts, strict=True)
        )
        return tuple(numbers) if fits else None

    def leads_to_chunks(self, folder: str) -> bool:
        """Whether keys of chunks may begin with ``folder`` (below the array)."""
        if self.separator != "/":
            return False
        parts = folder.split("/")
        if self.prefix:
            if parts[0] != self.prefix:
                return False
            parts = parts[1:]
        return len(parts) < len(self.grid) and all(
            part.isascii() and part.isdigit() and len(part) < 16 and part == str(int(part)) and int(part) < limit
            for part, limit in zip(parts, self.grid, strict=False)
        )

    def box(self, position: Position) -> Box:
        """What the chunk at a position holds of the array."""
        start = tuple(p * c for p, c in zip(position, self.chunk_shape, strict=True))
        return Box(start, tuple(min(a + c, n) for a, c, n in zip(start, self.chunk_shape, self.shape, strict=True)))

    def boxes(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same of many chunks by their numbers in C order of the grid: starts and stops, a row a chunk."""
        start, rest = np.zeros((len(numbers), len(self.shape)), np.int64), numbers
        for dim, count in reversed(list(enumerate(self.grid))):
            rest, start[:, dim] = np.divmod(rest, count)
        start *= np.array(self.chunk_shape, np.int64)
        stop = np.minimum(start + np.array(self.chunk_shape, np.int64), np.array(self.shape, np.int64))
        return start, stop

    def missing(self, numbers: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """The first ``most`` numbers of chunks of the grid that are not among ``numbers``."""
        asked = np.arange(min(self.num_chunks, len(numbers) + most))
        return np.setdiff1d(asked, numbers)[:most]

    def position_of(self, number: int) -> Position:
        """The position of the chunk of this number in C order of the grid."""
        found = []
        for count in reversed(self.grid):
            number, at = divmod(number, count)
            found.append(at)
        return tuple(reversed(found))

    def chunk_bytes(self, dtype: DType) -> int:
        """Length of every chunk."""
        return dtype.num_bytes(math.prod(self.chunk_shape))

    def dtype(self, source_dtype: str) -> DType | None:
        """What the elements are: ``source_dtype`` where the array's own type only carries its bits; None if unknown."""
        own = APART.get(self.data_type)
        if not source_dtype or source_dtype == self.data_type:
            return own
        true = APART.get(source_dtype)
        fits = own is not None and true is not None and true.stored_bits == own.bits
        carries = fits and own is not None and own.kind is Kind.UNSIGNED
        return true if carries else None


@lru_cache(maxsize=1024)
def _grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    # Asked for at every key; a step's arrays have few shapes.
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))


def _positions(grid: tuple[int, ...]) -> Iterator[Position]:
    if not grid:
        yield ()
    elif math.prod(grid) <= 1 << 16:
        yield from product(*map(range, grid))
    else:
        # product() holds every dim's range as a tuple, which may be as long as a lie is large.
        for first in range(grid[0]):
            yield from ((first, *rest) for rest in _positions(grid[1:]))


def read_node(handle: Handle) -> ZarrNode:
    """Read one ``zarr.json``: a :class:`ZarrArray`, or a plain node for a group.

    Raises:
        DamagedError: it is no document of a Zarr v3 node, or contradicts itself.
        LimitError: it asks for more than an honest one needs.
        StorageError: storage failed.
    """
    # Zarr's readers take the last of two equal keys; whoever writes a key twice fools one reader or the other.
    return node_of(read_json(handle))


def node_of(document: Any) -> ZarrNode:
    """The node that a document describes. Raises as :func:`read_node`, but for storage."""
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise DamagedError("it is no document of a Zarr v3 node")
    attributes = document.get("attributes", {})
    if not isinstance(attributes, dict):
        raise DamagedError("its attributes are no dictionary")
    if document.get("node_type") == "group":
        return ZarrNode(attributes)
    if document.get("node_type") != "array":
        raise DamagedError("it is neither a group nor an array")
    return _array(document, attributes)


def _array(document: Mapping[str, Any], attributes: Mapping[str, Any]) -> ZarrArray:
    grid, encoding = (named(document.get(key)) for key in ("chunk_grid", "chunk_key_encoding"))
    shape, chunk_shape = counts(document.get("shape")), counts(grid[1].get("chunk_shape"))
    if shape is None or len(shape) > MAX_DIMS:
        raise DamagedError("it has no shape")
    unsupported = ""
    if grid[0] != "regular":
        # Keys of chunks are not known then either; the whole array counts as one.
        unsupported, chunk_shape = f"chunk grid {grid[0][:40] or 'of no name'}", tuple(max(1, n) for n in shape)
    chunk_shape, shard_shape = checked(shape, chunk_shape), None
    data_type = document.get("data_type")
    name = data_type if isinstance(data_type, str) else named(data_type)[0]
    if not name or len(name) > 64:
        raise DamagedError("it has no data type")
    how = read_codecs(document.get("codecs"), chunk_shape, APART.get(name))
    unsupported = unsupported or how.unsupported
    if how.inner_shape is not None and not unsupported:
        chunk_shape, shard_shape = how.inner_shape, chunk_shape
    if encoding[0] not in ("default", "v2"):
        unsupported = unsupported or f"chunk keys {encoding[0][:40] or 'of no name'}"
    prefix, separator = ("", ".") if encoding[0] == "v2" else ("c", "/")
    separator = encoding[1].get("separator", separator)
    if separator not in ("/", "."):
        raise DamagedError("the separator of its chunk keys is neither / nor .")
    if isinstance(document.get("storage_transformers"), list) and document["storage_transformers"]:
        unsupported = unsupported or "storage transformers"
    return ZarrArray(
        attributes,
        shape,
        chunk_shape,
        name,
        prefix,
        separator,
        unsupported,
        how,
        document.get("fill_value") == 0,
        shard_shape,
    )


def checked(shape: tuple[int, ...], chunk_shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of the chunks of an array of ``shape``.

    Raises:
        DamagedError: they have none that fits.
        LimitError: either is beyond any tensor's.
    """
    if chunk_shape is None or len(chunk_shape) != len(shape) or 0 in chunk_shape:
        raise DamagedError(f"its chunks have no shape that fits {list(shape)}")
    if max(math.prod(filter(None, shape)), math.prod(chunk_shape)) > MAX_EXTENT:
        raise LimitError("its shape or that of its chunks is beyond any tensor's")
    return chunk_shape
