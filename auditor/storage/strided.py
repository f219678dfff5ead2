"""Arrays that lie in a file with arbitrary strides, read in slabs that fit a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.storage.store import Handle


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of an array whose elements lie within a short byte range."""

    start: tuple[int, ...]
    """Position in the array."""
    shape: tuple[int, ...]
    first: int
    """Element offset of the slab's first element from the array's first element."""
    span: int
    """Elements from the slab's first to its last, with what lies between."""


def slabs(shape: Sequence[int], strides: Sequence[int], limit: int) -> Iterator[Slab]:
    """Cut an array into slabs that span and hold at most ``limit`` elements each, if need be element by element.

    The dim with the longest stride is cut first, so an array in C order comes in C order.
    """
    if math.prod(shape) > 0:
        yield from _slabs((0,) * len(shape), tuple(shape), tuple(strides), limit)


def _slabs(start: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], limit: int) -> Iterator[Slab]:
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    span = sum(reach) + 1
    size = max(span, math.prod(shape))
    if size <= limit or max(shape, default=1) == 1:
        yield Slab(start, shape, sum(a * s for a, s in zip(start, strides, strict=True)), span)
        return
    dim = max(range(len(shape)), key=lambda d: (reach[d], shape[d]))
    step = max(1, shape[dim] * limit // size)
    for low in range(0, shape[dim], step):
        part = (*shape[:dim], min(step, shape[dim] - low), *shape[dim + 1 :])
        yield from _slabs((*start[:dim], start[dim] + low, *start[dim + 1 :]), part, strides, limit)


def read_slab(
    handle: Handle,
    slab: Slab,
    strides: Sequence[int],
    offset: int,
    carrier: np.dtype[np.unsignedinteger],
    buffer: bytearray | NDArray[np.uint8],
) -> NDArray[np.unsignedinteger]:
    """One slab of the array whose first element is at byte ``offset``, as a view of ``buffer``.

    The view is only good until the buffer is used again.

    Raises:
        StorageError: as the handle's reads.
    """
    num_bytes = slab.span * carrier.itemsize
    handle.read_into(offset + slab.first * carrier.itemsize, memoryview(buffer)[:num_bytes])  # type: ignore[arg-type]
    flat = np.frombuffer(buffer, carrier, slab.span)
    return view(flat, slab.shape, strides)


def view(
    flat: NDArray[np.unsignedinteger], shape: Sequence[int], strides: Sequence[int]
) -> NDArray[np.unsignedinteger]:
    """``flat`` seen with a shape and strides (elements); the caller vouches that they stay inside."""
    steps = tuple(s * flat.itemsize for s in strides)
    return np.lib.stride_tricks.as_strided(flat, tuple(shape), steps, writeable=False)
