"""Rows that changed places between the parts of one fused tensor: query, key and value, gate and up. No name is known.

Where the heads of a fused projection were cut otherwise than they lie, each part holds rows of the others, and none of
them is the reference's in another order; all together are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from auditor.comparison.holding import Holding
from auditor.comparison.lockstep import Stored
from auditor.comparison.matching import module_of
from auditor.comparison.one_set import WEIGHTS
from auditor.comparison.outcome import Compared, Standing
from auditor.comparison.permutation import MAX_LINES, described, line_hashes, order_of
from auditor.view.assemble import SourceLostError

MOST = 4
"""Parts of one fused tensor."""
SAME_SIZE = 1e-9
"""Relative difference up to which two sums of squares of the same numbers, added in another order, are one."""


def rejoined(rows: Sequence[Compared], left: Holding, right: Holding) -> list[Compared]:
    """The rows, with those explained that hold each other's lines of the first dim."""
    found = list(rows)
    for family in _families(rows, left, right):
        family.sort(key=lambda at: _place(rows[at].pair.name))
        text = _explained([rows[at] for at in family], left, right)
        for at in family if text else ():
            found[at] = replace(rows[at], standing=Standing.REORDERED, detail=text)
    return found


def _families(rows: Sequence[Compared], left: Holding, right: Holding) -> Iterator[list[int]]:
    """Weights beyond rounding of modules that lie beside each other, and that may be parts of one tensor."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        own, theirs = row.pair.reference, row.pair.candidate
        is_open = row.standing in (Standing.BEYOND, Standing.UNDETERMINED) and not row.holds
        if not is_open or row.pair.role not in WEIGHTS:
            continue
        if own is None or theirs is None or not row.amount or left.source is None or right.source is None:
            continue
        one, other = left.tensors[own], right.tensors[theirs]
        module, _, last = row.pair.name.rpartition(".")
        if module and one.shape[:1] > (1,) and one.shape == other.shape and one.dtype == other.dtype:
            found[module_of(module), last, row.pair.role, one.shape[1:], one.dtype].append(at)
    yield from (family for family in found.values() if 1 < len(family) <= MOST)


def _place(name: str) -> tuple[int, str]:
    """Query before key before value, as most fuse them; others by name."""
    return "qkv".find(module_of(name).rpartition(".")[2][:1]), name


def _explained(family: Sequence[Compared], left: Holding, right: Holding) -> str:
    """In which order all lines of the family are on the other side; empty where they aren't the same lines."""
    sides = [(left, [row.pair.reference or 0 for row in family]), (right, [row.pair.candidate or 0 for row in family])]
    sizes = [sum(side.size(number) ** 2 for number in numbers) for side, numbers in sides]
    count = sum(left.tensors[number].shape[0] for number in sides[0][1])
    if not math.isclose(*sizes, rel_tol=SAME_SIZE) or count > MAX_LINES:
        return ""
    try:
        lines = [
            np.concatenate([line_hashes(Stored(side.source, number), 0) for number in numbers])
            for side, numbers in sides
            if side.source is not None
        ]
    except SourceLostError:
        return ""
    order = order_of(*lines)
    if order is None or (order == np.arange(count)).all():
        return ""
    names = ", ".join(module_of(row.pair.name).rpartition(".")[2] for row in family)
    return f"rows of {names} lie among each other; one after the other: {described(order)}"
