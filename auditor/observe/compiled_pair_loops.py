"""The compiled kernels' loop over the runs of two tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from auditor.observe.compiled_loops import outside
from auditor.observe.compiled_pairs import (
    APART,
    BEYOND,
    DISTANCE,
    FIRST,
    LARGEST,
    NUM_COUNTS,
    ONE_ULP,
    count_bound,
    count_cast,
    count_unequal,
    look_bound,
    look_cast,
)  # fmt: skip
from auditor.observe.compiled_steps import as_double
from auditor.observe.compiled_vectors import DOUBLE, FORMS, VECTOR, inlined, load_64, load_unsigned, store

TILE = 1024
"""Elements of two tensors that are looked at together: what must be counted of them still lies in the L1 cache."""
SCRATCH_BYTES = 4 * VECTOR
NUM_PAIR_PLACES = 6
"""Address and length of the left buffer and of the right one, addresses of :data:`SCRATCH_BYTES` and of room for
:data:`NUM_COUNTS` numbers. Behind them in the table lie the counts themselves."""
NEARLY_ONE = 0.9999999999
"""What is looked for must not be hidden by rounding."""


@inlined
def _note(table: NDArray[np.int64], out: int, start: int) -> None:
    """Add what was counted of a tile that begins with element ``start`` of its tensor."""
    beyond, first = load_64(out + 8 * BEYOND), load_64(out + 8 * FIRST)
    table[BEYOND] += beyond
    if first >= 0 and (table[FIRST] < 0 or start + first < table[FIRST]):
        table[FIRST] = start + first


@inlined
def _pad(scratch: int, left: int, right: int, widths: tuple[int, int], count: int) -> None:
    """Copy what is less than a vector between zeros."""
    for n in range(0, SCRATCH_BYTES, 8):
        store(scratch + n, np.int64(0))
    for n in range(count * widths[0]):
        store(scratch + n, np.uint8(load_unsigned(left + n, 1)))
    for n in range(count * widths[1]):
        store(scratch + 2 * VECTOR + n, np.uint8(load_unsigned(right + n, 1)))


@inlined
def _cast(
    form: int, left: int, right: int, count: int, start: int, table: NDArray[np.int64], largest: NDArray[np.float64],
    out: int,
) -> None:  # fmt: skip
    if look_cast(form, left, right, count):
        count_cast(form, left, right, count, out)
        _note(table, out, start)
        table[ONE_ULP] += load_64(out + 8 * ONE_ULP)
        largest[0] = max(largest[0], np.float64(load_64(out + 8 * DISTANCE)))
        if load_64(out + 8 * APART) > 0:
            largest[0] = np.inf


@inlined
def _bound(
    first: int, second: int, left: int, right: int, count: int, start: int, limit: float, floor: float,
    table: NDArray[np.int64], largest: NDArray[np.float64], out: int,
) -> None:  # fmt: skip
    """As the numpy kernels look first, unless squares could overflow or vanish."""
    least = min(limit, largest[0])
    wide = first == DOUBLE or second == DOUBLE
    if wide or look_bound(first, second, left, right, count, least * least * NEARLY_ONE, floor):
        count_bound(first, second, left, right, count, limit, floor, out)
        _note(table, out, start)
        largest[0] = max(largest[0], as_double(DOUBLE, load_64(out + 8 * LARGEST)))


@lru_cache
def comparing(kind: str, first: int, second: int, stamp: int, compiled: Callable[..., Any]) -> Any:
    """The loop over runs of two tensors, elements of the forms ``first`` and ``second``; as ``measuring``.

    It takes the columns of ``num_runs`` runs (``at`` on the left and on the right, ``length``, ``start``), a table
    (:data:`NUM_PAIR_PLACES`) to which it adds, and three doubles: limit, floor, and the largest seen so far.
    """
    one, other = FORMS[first].width, FORMS[second].width
    lanes = {"cast": 16, "bound": 8, "equal": VECTOR // one}[kind]
    cast, bound = kind == "cast", kind == "bound"

    @compiled
    def compare(runs: Any, num_runs: int, numbers: Any, doubles: Any) -> int:
        columns, limits = carray(runs, (4, num_runs), np.int64), carray(doubles, 3, np.float64)
        lefts, rights, length, start = columns[0], columns[1], columns[2], columns[3]
        limit, floor, largest = limits[0], limits[1], limits[2:]
        places = carray(numbers, NUM_PAIR_PLACES + NUM_COUNTS, np.int64)
        table = places[NUM_PAIR_PLACES:]
        bad: int = max(outside(lefts, length, one, places[1]), outside(rights, length, other, places[3]))
        if bad >= 0 or stamp < 0:
            return bad
        scratch, out = places[4], places[5]
        for run in range(len(length)):
            done = np.int64(0)
            while done < length[run]:
                size = min(np.int64(TILE), length[run] - done)
                left, right = places[0] + lefts[run] + done * one, places[2] + rights[run] + done * other
                if size < lanes:
                    _pad(scratch, left, right, (one, other), size)
                    left, right, count = scratch, scratch + 2 * VECTOR, np.int64(1)
                else:
                    count = size // lanes
                    size = count * lanes
                begin = start[run] + done
                if cast:
                    _cast(first, left, right, count, begin, table, largest, out)
                elif bound:
                    _bound(first, second, left, right, count, begin, limit, floor, table, largest, out)
                else:
                    count_unequal(first, left, right, count, out)
                    _note(table, out, begin)
                done += size
        return -1

    return compare
