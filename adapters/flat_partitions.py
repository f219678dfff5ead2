"""Flat optimizer partitions: parameters laid end to end, padded, cut into equal parts over data-parallel ranks.

    parameters   |---- a ----|-- b --|------- c -------|pad|
    partitions   |----- 0 -----|----- 1 -----|----- 2 -----|

Everything is counted in elements. A parameter here is one rank's *local* part, so a slice of it still has to be
placed in the whole tensor: :func:`place_slice`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from auditor.model.region import Box, FlatRange, Region


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one parameter that lies in one partition."""

    name: str
    """Empty for the padding at the end."""
    start: int
    """First element within the parameter (its local part, C order)."""
    stop: int
    at: int
    """Position of that element within the partition."""


class FlatGroup:
    """The parameters of one group, laid end to end."""

    def __init__(self, members: Mapping[str, tuple[int, ...]]) -> None:
        """``members``: name to local shape, in the order of the flat buffer."""
        self.shapes = dict(members)
        self._names = tuple(members)
        self._ends = list(accumulate(map(math.prod, members.values())))
        self.num_elements = self._ends[-1] if self._ends else 0

    def partition_length(self, num_partitions: int) -> int:
        """Length of each partition as BF16_Optimizer cuts it: padded to a multiple of twice their number."""
        unit = 2 * num_partitions
        return -(-self.num_elements // unit) * unit // num_partitions

    def slices(self, partition: int, length: int) -> Iterator[Slice]:
        """What lies in one partition of ``length`` elements."""
        low, high = partition * length, (partition + 1) * length
        for at in range(bisect_right(self._ends, low), len(self._names)):
            begin = self._ends[at - 1] if at else 0
            if begin >= high:
                break
            start, stop = max(begin, low), min(self._ends[at], high)
            if start < stop:
                yield Slice(self._names[at], start - begin, stop - begin, start - low)
        if self.num_elements < high:
            start = max(self.num_elements, low)
            yield Slice("", start - self.num_elements, high - self.num_elements, start - low)


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
