"""Flat optimizer partitions: parameters laid end to end, padded, cut into equal parts over data-parallel ranks.

    parameters   |---- a ----|-- b --|------- c -------|pad|
    partitions   |----- 0 -----|----- 1 -----|----- 2 -----|

Everything is counted in elements. A parameter here is one rank's *local* part, so a slice of it still has to be
placed in the whole tensor: :func:`place_slice`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from auditor.model.region import Box, FlatRange, Region


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one parameter that lies in one partition."""

    name: str
    """Empty for padding."""
    start: int
    """First element within the parameter (its local part, C order)."""
    stop: int
    at: int
    """Position of that element within the partition."""


class FlatGroup:
    """The parameters of one group, laid end to end; perhaps with a gap after each, so that the next one is aligned."""

    def __init__(self, members: Mapping[str, tuple[int, ...]], gaps: Sequence[int] = ()) -> None:
        """``members``: name to local shape, in the order of the flat buffer. ``gaps``: elements after each member."""
        self.shapes = dict(members)
        self._names = tuple(members)
        self._gaps = tuple(gaps) or (0,) * len(self._names)
        sizes = map(math.prod, members.values())
        self._ends = list(accumulate(size + gap for size, gap in zip(sizes, self._gaps, strict=True)))
        self.num_elements = self._ends[-1] if self._ends else 0

    def partition_length(self, num_partitions: int) -> int:
        """Length of each partition as DeepSpeed cuts it: padded to a multiple of twice their number."""
        unit = 2 * num_partitions
        return -(-self.num_elements // unit) * unit // num_partitions

    def partition(self, number: int, of: int) -> list[Slice]:
        """What lies in one of so many partitions."""
        return [*self.slices(number, self.partition_length(of))]

    def slices(self, partition: int, length: int) -> Iterator[Slice]:
        """What lies in one partition of ``length`` elements."""
        low, high = partition * length, (partition + 1) * length
        for at in range(bisect_right(self._ends, low), len(self._names)):
            begin = self._ends[at - 1] if at else 0
            if begin >= high:
                break
            end = self._ends[at] - self._gaps[at]
            start, stop = max(begin, low), min(end, high)
            if start < stop:
                yield Slice(self._names[at], start - begin, stop - begin, start - low)
            start, stop = max(end, low), min(self._ends[at], high)
            if start < stop:
                yield Slice("", start - end, stop - end, start - low)
        if self.num_elements < high:
            start = max(self.num_elements, low)
            yield Slice("", start - self.num_elements, high - self.num_elements, start - low)


class CutParameters:
    """The parameters of one group, each cut into equal parts by itself; a rank's parts lie end to end (ZeRO-3).

        a |-- 0 --|-- 1 --|-- 2 |p|      b |- 0 -|- 1 -|- 2 -|      rank 2 holds |-- 2 |p|- 2 -|

    Parts are rounded up to whole elements, so that the last ones end with padding.
    """

    def __init__(self, members: Mapping[str, tuple[int, ...]]) -> None:
        """``members``: name to shape, in the order of the flat buffers."""
        self.shapes = dict(members)
        self._sizes = {name: math.prod(shape) for name, shape in members.items()}

    def partition(self, number: int, of: int) -> list[Slice]:
        """What lies in one of so many partitions."""
        found, at = [], 0
        for name, size in self._sizes.items():
            length = -(-size // of)
            start, stop = min(number * length, size), min((number + 1) * length, size)
            if start < stop:
                found.append(Slice(name, start, stop, at))
            if stop - start < length:
                found.append(Slice("", 0, length - (stop - start), at + stop - start))
            at += length
        return found


def cut_anew(parts: Iterable[Sequence[Slice]], lengths: Sequence[int]) -> list[list[Slice]]:
    """The slices of buffers that lie end to end, dealt out to buffers of other ``lengths``."""
    found: list[list[Slice]] = [[] for _ in lengths]
    ends = list(accumulate(lengths))
    base = 0
    for slices in parts:
        for piece in slices:
            start, taken = base + piece.at, 0
            while taken < piece.stop - piece.start:
                number = bisect_right(ends, start + taken)
                if number == len(ends):
                    break
                count = min(piece.stop - piece.start - taken, ends[number] - start - taken)
                first = piece.start + taken
                at = start + taken - (ends[number - 1] if number else 0)
                found[number].append(Slice(piece.name, first, first + count, at))
                taken += count
        base += length_of(slices)
    return found


def length_of(slices: Sequence[Slice]) -> int:
    """Elements of a buffer that is filled by these slices."""
    return slices[-1].at + slices[-1].stop - slices[-1].start if slices else 0


def place_slice(part: Slice, box: Box, shape: Sequence[int]) -> Iterator[tuple[Region, int]]:
    """Regions of the whole tensor (of ``shape``) that a slice of the local part at ``box`` covers.

    Yields each with the position of its first element within the partition; its elements follow it without gaps.
    """
    row = math.prod(shape[1:])
    if all(stop - start == n for start, stop, n in zip(box.start[1:], box.stop[1:], shape[1:], strict=True)):
        shift = box.start[0] * row if box.start else 0
        yield FlatRange(part.start + shift, part.stop + shift), part.at
        return
    at = part.at
    for inner in FlatRange(part.start, part.stop).boxes(box.shape):
        yield inner.shifted(box.start), at
        at += inner.num_elements
