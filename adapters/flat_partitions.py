"""Flat optimizer partitions: parameters laid end to end, padded, cut into equal parts over data-parallel ranks.

    parameters   |---- a ----|-- b --|------- c -------|pad|
    partitions   |----- 0 -----|----- 1 -----|----- 2 -----|

Everything is counted in elements. A parameter here is one rank's *local* part, so a slice of it still has to be
placed in the whole tensor: :func:`place_slice`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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


def slices(members: Mapping[str, tuple[int, ...]], partition: int, length: int) -> Iterator[Slice]:
    """What lies in one partition of ``length`` elements. ``members``: name to local shape, in order."""
    low, high, position = partition * length, (partition + 1) * length, 0
    for name, shape in members.items():
        count = math.prod(shape)
        start, stop = max(position, low), min(position + count, high)
        if start < stop:
            yield Slice(name, start - position, stop - position, start - low)
        position += count
    if position < high:
        start = max(position, low)
        yield Slice("", start - position, high - position, start - low)


def partition_length(members: Mapping[str, tuple[int, ...]], num_partitions: int) -> int:
    """Length of each partition as DeepSpeed's BF16_Optimizer cuts it: padded to a multiple of twice the partitions."""
    total = sum(map(math.prod, members.values()))
    unit = 2 * num_partitions
    return -(-total // unit) * unit // num_partitions


def place_slice(part: Slice, local: tuple[int, ...], box: Box, shape: Sequence[int]) -> Iterator[tuple[Region, int]]:
    """Regions of the whole tensor (of ``shape``) that a slice of the local part at ``box`` covers.

    Yields each with the position of its first element within the partition; its elements follow it without gaps.
    """
    row = math.prod(shape[1:])
    if all(stop - start == n for start, stop, n in zip(box.start[1:], box.stop[1:], shape[1:], strict=True)):
        shift = box.start[0] * row if box.start else 0
        yield FlatRange(part.start + shift, part.stop + shift), part.at
        return
    at = part.at
    for inner in FlatRange(part.start, part.stop).boxes(local):
        yield inner.shifted(box.start), at
        at += inner.num_elements
