"""Regions of a tensor, and exact answers about sets of them: do they tile it, where do they meet.

A :class:`Box` is a half-open N-d box in global elements; a :class:`FlatRange` a half-open range of C-order positions.
A flat range is at most ``2·ndim - 1`` boxes, so everything below is decided on boxes::

    shape (4, 5), flat [3, 17)       . . . a a      a: [0, 1) x [3, 5)
                                     b b b b b      b: [1, 3) x [0, 5)
                                     b b b b b
                                     c c . . .      c: [3, 4) x [0, 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEP_BUDGET = 20_000_000
"""Steps a coverage sweep may take. Honest layouts need about one a box; only boxes made to be slow need more."""

MAX_LISTED = 16
"""Gaps and overlaps that are listed one by one; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box ``[start, stop)`` in global elements. Zero dims: the one element of a scalar."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along every dim; never negative."""
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements inside; 1 for a scalar."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The common box, or None where the two share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def shifted(self, by: Sequence[int]) -> Box:
        """The box moved by ``by`` elements along each dim."""
        start = tuple(a + d for a, d in zip(self.start, by, strict=True))
        return Box(start, tuple(b + d for b, d in zip(self.stop, by, strict=True)))


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A half-open range ``[start, stop)`` of positions in the tensor's C order."""

    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        """Elements inside; never negative."""
        return max(0, self.stop - self.start)

    def boxes(self, shape: Sequence[int]) -> Iterator[Box]:
        """The boxes of a tensor of ``shape`` that this range covers, in C order.

        >>> [b.start for b in FlatRange(3, 17).boxes((4, 5))]
        [(0, 3), (1, 0), (3, 0)]
        """
        yield from _flat_boxes(self.start, self.stop, tuple(shape))


Region = Box | FlatRange


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def as_boxes(region: Region, shape: Sequence[int]) -> Iterable[Box]:
    """A region of a tensor of ``shape`` as boxes."""
    return region.boxes(shape) if isinstance(region, FlatRange) else (region,)


def num_between(region: Region, shape: Sequence[int], first: int, last: int) -> int:
    """How many elements of a region of a tensor of ``shape`` lie from one of its own to another, both included.

    ``first, last``: positions in the tensor's C order.

    >>> num_between(Box((0, 2), (3, 4)), (3, 4), 2, 11)
    6
    """
    if isinstance(region, FlatRange):
        return last - first + 1
    strides, extents = _c_strides(shape), region.shape
    inner = _c_strides(extents)

    def place(at: int) -> int:
        return sum((at // s % n - a) * i for s, n, a, i in zip(strides, shape, region.start, inner, strict=True))

    return place(last) - place(first) + 1


def _c_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _flat_boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    if row == 0:
        return
    first, last = start // row, (stop - 1) // row
    if first == last:
        for box in _flat_boxes(start - first * row, stop - first * row, shape[1:]):
            yield Box((first, *box.start), (first + 1, *box.stop))
        return
    body = -(-start // row)
    yield from _flat_boxes(start, body * row, shape)
    if body < stop // row:
        yield Box((body, *(0 for _ in shape[1:])), (stop // row, *shape[1:]))
    yield from _flat_boxes(stop // row * row, stop, shape)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How a set of regions covers a tensor. All three empty: the regions tile it exactly."""

    gaps: tuple[Box, ...]
    """Boxes that no region covers, the first :data:`MAX_LISTED`."""
    num_elements_missing: int
    overlaps: tuple[tuple[Box, int, int], ...]
    """Boxes that two regions cover, with the positions of the two in the input; the first :data:`MAX_LISTED`."""
    num_elements_overlapping: int
    out_of_bounds: tuple[int, ...]
    """Positions in the input of regions that leave the tensor."""

    @property
    def exact(self) -> bool:
        """Whether the regions tile the tensor."""
        return not (self.num_elements_missing or self.num_elements_overlapping or self.out_of_bounds)


class SweepTooLarge(Exception):
    """The sweep hit :data:`SWEEP_BUDGET`: coverage is not known."""


def coverage(regions: Sequence[Region], shape: Sequence[int]) -> Coverage:
    """Whether ``regions`` tile a tensor of ``shape``, by sort and sweep, one dim after the other.

    Near-linear for grids, flat partitions and other cuts along few borders. Regions without elements are ignored:
    ranks whose part is empty are legal.

    Raises:
        SweepTooLarge: the regions are cut so that the sweep would exceed :data:`SWEEP_BUDGET`.
    """
    full = whole(shape)
    boxes: list[tuple[Box, int]] = []
    outside: list[int] = []
    for at, region in enumerate(regions):
        if region.num_elements == 0:
            continue
        if not _inside(region, full):
            outside.append(at)
            continue
        boxes.extend((box, at) for box in as_boxes(region, shape))
    sweep = _Sweep(full.shape)
    sweep.descend(boxes, ())
    return Coverage(tuple(sweep.gaps), sweep.num_missing, tuple(sweep.overlaps), sweep.num_overlapping, tuple(outside))


def _inside(region: Region, full: Box) -> bool:
    if isinstance(region, FlatRange):
        return region.start >= 0 and region.stop <= full.num_elements
    if len(region.start) != len(full.start):
        return False
    return all(a >= 0 and b <= c for a, b, c in zip(region.start, region.stop, full.stop, strict=True))


class _Sweep:
    """Cut the tensor at every border along the first dim; in each slab go on with the next dim."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.gaps: list[Box] = []
        self.overlaps: list[tuple[Box, int, int]] = []
        self.num_missing = self.num_overlapping = self.steps = 0

    def descend(self, boxes: list[tuple[Box, int]], prefix: tuple[tuple[int, int], ...]) -> None:
        dim = len(prefix)
        if len(boxes) == 1 and not any(boxes[0][0].start[dim:]) and boxes[0][0].stop[dim:] == self.shape[dim:]:
            return
        if not boxes or dim == len(self.shape):
            self.settle(boxes, prefix)
            return
        for low, high, active in self.slabs(boxes, dim):
            self.descend(active, (*prefix, (low, high)))

    def slabs(self, boxes: list[tuple[Box, int]], dim: int) -> Iterator[tuple[int, int, list[tuple[Box, int]]]]:
        starts = sorted(boxes, key=lambda entry: entry[0].start[dim])
        borders = sorted({0, self.shape[dim]} | {b.start[dim] for b, _ in boxes} | {b.stop[dim] for b, _ in boxes})
        active: list[tuple[Box, int]] = []
        following = 0
        for low, high in pairwise(borders):
            active = [entry for entry in active if entry[0].stop[dim] > low]
            while following < len(starts) and starts[following][0].start[dim] <= low:
                active.append(starts[following])
                following += 1
            self.steps += len(active) + 1
            if self.steps > SWEEP_BUDGET:
                raise SweepTooLarge
            yield low, high, list(active)

    def settle(self, boxes: list[tuple[Box, int]], prefix: tuple[tuple[int, int], ...]) -> None:
        rest = self.shape[len(prefix) :]
        cell = Box((*(a for a, _ in prefix), *(0 for _ in rest)), (*(b for _, b in prefix), *rest))
        if cell.num_elements == 0 or len(boxes) == 1:
            return
        if not boxes:
            self.num_missing += cell.num_elements
            if len(self.gaps) < MAX_LISTED:
                self.gaps.append(cell)
            return
        self.num_overlapping += cell.num_elements
        if len(self.overlaps) < MAX_LISTED:
            self.overlaps.append((cell, boxes[0][1], boxes[1][1]))


def refinement(tilings: Sequence[Sequence[Box]]) -> list[tuple[Box, tuple[int, ...]]]:
    """The common refinement of several tilings of one tensor: the largest cells that no border cuts.

    Returns each cell with the position, in every tiling, of the box that contains it, in C order of the cells.
    Elements that a tiling lacks are in no cell.

    >>> halves, thirds = [Box((0,), (3,)), Box((3,), (6,))], [Box((0,), (2,)), Box((2,), (4,)), Box((4,), (6,))]
    >>> [(c.start, c.stop, ids) for c, ids in refinement([halves, thirds])]
    [((0,), (2,), (0, 0)), ((2,), (3,), (0, 1)), ((3,), (4,), (1, 1)), ((4,), (6,), (1, 2))]
    """
    cells: list[tuple[Box, tuple[int, ...]]] = [(box, (at,)) for at, box in enumerate(tilings[0])] if tilings else []
    for tiling in tilings[1:]:
        cells = list(_meet(cells, tiling))
    return sorted(cells, key=lambda cell: cell[0].start)


def _meet(cells: list[tuple[Box, tuple[int, ...]]], tiling: Sequence[Box]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """All non-empty intersections, by a sweep along the first dim."""
    if not cells or not cells[0][0].start:
        yield from ((box, (*ids, at)) for box, ids in cells for at in range(len(tiling)))
        return
    left = sorted(cells, key=lambda cell: cell[0].start[0])
    right = sorted(enumerate(tiling), key=lambda entry: entry[1].start[0])
    active: list[tuple[int, Box]] = []
    following = 0
    for box, ids in left:
        while following < len(right) and right[following][1].start[0] < box.stop[0]:
            active.append(right[following])
            following += 1
        active = [entry for entry in active if entry[1].stop[0] > box.start[0]]
        for at, other in active:
            common = box.intersection(other)
            if common is not None:
                yield common, (*ids, at)
