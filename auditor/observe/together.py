"""What is read together: small neighbours in one file, or in the same files where cells are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from auditor.observe.placing import Cell, Part, parts

BUFFER_BYTES = 4 << 20
"""One worker's buffer over all sides of a read: so large that what a read costs besides its bytes hardly counts, so
small that a worker needs little memory."""
MAX_GAP_BYTES = 4 << 10
"""Pieces closer than a page are read together: the page is read anyway, and reading costs less than another call."""

Placed = tuple[Part, tuple[tuple[int, int], ...]]
"""A part, and its first byte and the byte after the last in the file of every side."""


def batches(cells: Iterable[Cell]) -> Iterator[list[Placed]]:
    """Parts of cells that are read together: on every side close to each other, and small together."""
    held: list[Placed] = []
    reach: tuple[tuple[int, int], ...] = ()
    for part in _parts(cells):
        found = placed(part)
        joined = _joined(held, found, reach)
        if joined is None:
            if held:
                yield held
            held, joined = [], found[1]
        held.append(found)
        reach = joined
    if held:
        yield held


def placed(part: Part) -> Placed:
    """A part with its extents."""
    return part, tuple(part.extent(side) for side in part.cell.sides)


def _parts(cells: Iterable[Cell]) -> Iterator[Part]:
    for cell in cells:
        if cell.straight and cell.num_bytes <= BUFFER_BYTES // len(cell.sides):
            yield Part(cell, (0,), cell.shape)
        else:
            yield from parts(cell, max(1, BUFFER_BYTES // len(cell.sides)))


def _joined(
    held: Sequence[Placed], new: Placed, reach: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...] | None:
    """The windows that hold one part more than they held, or None where it doesn't fit."""
    part, extents = new
    if not held or _apart(held[-1][0].cell, part.cell):
        return None
    joined = []
    for (low, high), (start, stop) in zip(reach, extents, strict=True):
        if start > high + MAX_GAP_BYTES or stop < low - MAX_GAP_BYTES:
            return None
        joined.append((min(low, start), max(high, stop)))
    limit = BUFFER_BYTES // len(joined)
    return tuple(joined) if all(high - low <= limit for low, high in joined) else None


def _apart(one: Cell, other: Cell) -> bool:
    """Whether two cells lie in other files, or one is measured and the other is only compared."""
    return [(side.file, side.row < 0) for side in one.sides] != [(side.file, side.row < 0) for side in other.sides]


def hull(extents: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """First byte, and the byte after the last, of what is read at once."""
    return min(low for low, _ in extents), max(high for _, high in extents)


def windows(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of stretches, in file order, that are read together: small neighbours, or one large stretch."""
    if not len(offsets):
        return
    large = sizes > BUFFER_BYTES // 4
    # No stretch of a window begins more than three quarters of the buffer after its first.
    bucket = (offsets - offsets[0]) // max(1, BUFFER_BYTES - BUFFER_BYTES // 4)
    ends = np.maximum.accumulate(offsets + sizes)
    cut = np.ones(len(offsets), bool)
    cut[1:] = large[1:] | large[:-1] | (np.diff(bucket) != 0) | (offsets[1:] - ends[:-1] > MAX_GAP_BYTES)
    borders = np.flatnonzero(cut).tolist()
    yield from zip(borders, [*borders[1:], len(offsets)], strict=True)
