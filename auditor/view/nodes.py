"""The tree as nodes: groups and arrays that know their metadata document, made when they are asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.model.region import Box

CHUNK_BYTES = 8 << 20
"""Arrays up to twice this size are one chunk; larger ones are cut along dim 0 into chunks of about this size."""


@dataclass(frozen=True, slots=True)
class Group:
    """A Zarr group."""

    children: Callable[[], Iterable[str]]
    child: Callable[[str], Node | None]
    attributes: Callable[[], Mapping[str, Any]] = field(default=dict)

    def document(self) -> bytes:
        """The group's ``zarr.json``."""
        return _encode({"zarr_format": 3, "node_type": "group", "attributes": dict(self.attributes())})


@dataclass(frozen=True, slots=True)
class Array:
    """A Zarr array without compression."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    read: Callable[[Box], NDArray[np.generic]]
    dimension_names: tuple[str, ...]
    attributes: Callable[[], Mapping[str, Any]] = field(default=dict)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Every dim whole but the first."""
        if not self.shape:
            return ()
        row = max(1, int(np.prod(self.shape[1:], dtype=np.int64))) * self.dtype.itemsize
        whole = self.shape[0] * row <= 2 * CHUNK_BYTES
        rows = self.shape[0] if whole else max(1, CHUNK_BYTES // row)
        return tuple(max(1, n) for n in (rows, *self.shape[1:]))

    def num_chunks(self) -> int:
        """Chunks along dim 0, which are all; 0 for an array without elements."""
        if 0 in self.shape:
            return 0
        return -(-self.shape[0] // self.chunk_shape[0]) if self.shape else 1

    def chunk_keys(self) -> Iterator[str]:
        """The keys of all chunks below the array."""
        rest = "".join("/0" for _ in self.shape[1:])
        for number in range(self.num_chunks()):
            yield f"c/{number}{rest}" if self.shape else "c"

    @property
    def chunk_bytes(self) -> int:
        """Length of every chunk, the last one's padding included."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    def boxes(self) -> Iterator[tuple[str, Box]]:
        """The key of every chunk with the box of the array that it holds."""
        yield from ((key, self._box(number)) for number, key in enumerate(self.chunk_keys()))

    def _box(self, number: int) -> Box:
        if not self.shape:
            return Box((), ())
        rows, rest = self.chunk_shape[0], self.shape[1:]
        return Box((number * rows, *(0 for _ in rest)), (min((number + 1) * rows, self.shape[0]), *rest))

    def chunk(self, key: str) -> bytes | None:
        """The bytes of the chunk under ``key`` (below the array), None where there is no such chunk."""
        if not self.shape:
            return self.read(self._box(0)).tobytes() if key == "c" else None
        parts = key.split("/")[1:]
        numbers = [int(part) for part in parts if part.isdigit() and len(part) < 19]
        if len(numbers) != len(parts) or len(parts) != len(self.shape) or any(numbers[1:]):
            return None
        if numbers[0] >= self.num_chunks():
            return None
        # Zarr's last chunk is as long as the others; what lies beyond the array is never looked at.
        return self.read(self._box(numbers[0])).tobytes().ljust(self.chunk_bytes, b"\0")

    def document(self) -> bytes:
        """The array's ``zarr.json``."""
        name = self.dtype.name
        return _encode({
            "zarr_format": 3, "node_type": "array", "shape": list(self.shape), "data_type": name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk_shape)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": [0.0, 0.0] if name.startswith("complex") else False if name == "bool" else 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "dimension_names": list(self.dimension_names), "attributes": dict(self.attributes()),
        })  # fmt: skip


Node = Group | Array


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


def group(children: Mapping[str, Node], attributes: Mapping[str, Any] | None = None) -> Group:
    """A group whose children are all made already."""
    return Group(lambda: children, children.get, lambda: attributes or {})
