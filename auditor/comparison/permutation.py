"""Same numbers, other order: which rows or blocks of one tensor are which of the other, and its name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from auditor.comparison.lockstep import Stored, boxes
from auditor.model.catalog import c_strides
from auditor.model.dtype import Kind
from auditor.observe.digest import block_keys

PERIODIC = "in each of"
"""What a description says before the stretches of one tensor that all are in one other order."""
TELLING = 8
"""Lines that are all different, or elements of a line: from here on no chance turns one order into the other. A bias
after one step in bfloat16 holds a rate and its negative, and two signs that were flipped are another order of them."""
MAX_LINES = 1 << 22
"""Rows of a dim that are told apart: 32 MB of hashes a side."""


def explain_order(reference: Stored, candidate: Stored, same_values: bool, *, by_chance: bool = False) -> str:
    """What turns the reference into the candidate: a transposition, or an order of rows; empty where nothing does.

    ``same_values``: whether counts, extrema and squares leave it open; nothing is read where they don't. ``by_chance``:
    whether rounding may have moved elements as far, so that those that moved must speak by themselves.

    Raises:
        SourceLostError: a side can't be read.
    """
    shape = reference.tensor.shape
    if not same_values or reference.tensor.dtype.kind is Kind.COMPLEX:
        return ""
    for dim, extent in enumerate(shape):
        if 1 < extent <= MAX_LINES:
            own, theirs = line_hashes(reference, dim), line_hashes(candidate, dim)
            order = order_of(own, theirs)
            told = order is not None and _tells(own, order, reference.tensor.num_elements // extent, by_chance)
            if order is not None and told:
                return f"{described(order)} along dim {dim}"
    if len(shape) == 2 and shape[0] == shape[1] <= MAX_LINES:
        own, theirs = line_hashes(reference, 0), line_hashes(candidate, 1)
        if (own == theirs).all():
            return "transposed"
    return ""


def _tells(lines: NDArray[np.uint64], order: NDArray[np.int64], length: int, by_chance: bool) -> bool:
    """Whether lines moved, and are too many, or too long, to be the same by chance; of ``length`` elements each."""
    moved = order != np.arange(len(order))
    if not moved.any() or length >= TELLING:
        return bool(moved.any())
    return len(np.unique(lines[moved] if by_chance else lines)) >= (TELLING if by_chance else min(TELLING, len(lines)))


def line_hashes(stored: Stored, dim: int) -> NDArray[np.uint64]:
    """A hash of every slice of a tensor along one dim, by the places of elements in the other dims.

    Raises:
        SourceLostError: something of it can't be read.
    """
    shape = stored.tensor.shape
    others = [other for other in range(len(shape)) if other != dim]
    strides = dict(zip(others, c_strides([shape[other] for other in others]), strict=True))
    found = np.zeros(shape[dim], np.uint64)
    for box in boxes(shape):
        bits, _ = stored.values(box)
        place = np.zeros((1,) * len(shape), np.uint64)
        for other in others:
            along = np.arange(box.start[other], box.stop[other], dtype=np.uint64) * np.uint64(strides[other])
            place = place + along.reshape([-1 if d == other else 1 for d in range(len(shape))])
        values = (bits.astype(np.uint64) + np.uint64(1)) * block_keys(place, 0)
        found[box.start[dim] : box.stop[dim]] += values.sum(axis=tuple(others), dtype=np.uint64)
    return found


def order_of(reference: NDArray[np.uint64], candidate: NDArray[np.uint64]) -> NDArray[np.int64] | None:
    """``order`` with ``candidate[i] == reference[order[i]]``; None where they aren't the same lines.

    Equal lines keep their order.
    """
    own, theirs = np.argsort(reference, kind="stable"), np.argsort(candidate, kind="stable")
    if (reference[own] != candidate[theirs]).any():
        return None
    order = np.empty(len(own), np.int64)
    order[theirs] = own
    return order


def described(order: NDArray[np.int64]) -> str:
    """What an order of lines is called.

    >>> described(np.array([2, 3, 0, 1])), described(np.array([1, 2, 0])), described(np.array([0, 2, 1, 3]))
    ('halves exchanged', 'rolled by 1', 'interleaved: 2 × 2 blocks of 1 read the other way round')
    >>> described(np.array([0, 2, 1, 3, 4, 6, 5, 7]))
    'interleaved: 2 × 2 blocks of 1 read the other way round, in each of 2 stretches of 4'
    """
    count = len(order)
    block = _block(order)
    if block * 2 == count:
        return "halves exchanged"
    stretch = _stretch(order)
    if stretch < count:
        return f"{described(order[:stretch])}, {PERIODIC} {count // stretch} stretches of {stretch}"
    shift = (np.arange(count) - order) % count
    if (shift == shift[0]).all():
        return f"rolled by {int(min(shift[0], count - shift[0]))}"
    blocks = order[::block] // block
    ranks = _rejoined(order)
    if ranks:
        return f"gate and up of {ranks[0]} ranks, joined as they lie and cut for {ranks[1]}"
    grid = _grid(blocks)
    if grid:
        return f"interleaved: {grid} × {len(blocks) // grid} blocks of {block} read the other way round"
    if (blocks == np.arange(len(blocks))[::-1]).all():
        return f"reversed, in blocks of {block}"
    named = ", ".join(map(str, blocks[:8].tolist())) + (", …" if len(blocks) > 8 else "")
    return f"{len(blocks)} blocks of {block} in the order {named}"


def _stretch(order: NDArray[np.int64]) -> int:
    """Lines of the smallest equal stretches that all are in one other order, each in itself; all where none are."""
    count = len(order)
    for size in range(2, count // 2 + 1):
        if count % size == 0:
            inside = order.reshape(-1, size) - np.arange(0, count, size)[:, None]
            if (inside == inside[0]).all() and inside[0].min() == 0 and inside[0].max() == size - 1:
                return size
    return count


def _block(order: NDArray[np.int64]) -> int:
    """Lines that stay together: the largest size of equal blocks that are moved whole."""
    count = len(order)
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    size = math.gcd(count, *breaks.tolist())
    while size > 1 and (order[::size] % size).any():
        size = max(part for part in range(1, size) if size % part == 0)
    return size


def _rejoined(order: NDArray[np.int64]) -> tuple[int, int] | None:
    """From how many ranks for how many two halves were joined rank by rank, where each keeps its part of both."""
    count = len(order)
    degrees = [2**power for power in range(1, 9) if count % 2 ** (power + 1) == 0]
    for before in degrees:
        joined = np.arange(count).reshape(2, before, -1).swapaxes(0, 1).reshape(-1)
        for after in degrees:
            if (joined.reshape(after, 2, -1).swapaxes(0, 1).reshape(-1) == order).all() and before != after:
                return before, after
    return None


def _grid(blocks: Sequence[int] | NDArray[np.int64]) -> int:
    """r, where blocks laid out as r × c are read column by column; 0 where they aren't."""
    count = len(blocks)
    numbers = np.arange(count)
    for rows in range(2, count // 2 + 1):
        if count % rows == 0 and (numbers.reshape(rows, -1).T.reshape(-1) == blocks).all():
            return rows
    return 0
