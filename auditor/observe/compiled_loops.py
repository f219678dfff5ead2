"""The compiled kernels' loop over runs and the blocks of the digest.

Addresses are integers. Nothing mixes signed and unsigned integers: numba makes a float of the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from auditor.observe.compiled_steps import (
    COUNTS,
    STATE_VECTORS,
    SUMS,
    as_double,
    count_elements,
    digest_part,
    extremum,
    measure_vectors,
)  # fmt: skip
from auditor.observe.compiled_vectors import DOUBLE, FORMS, VECTOR, inlined, load_64, load_unsigned, store
from auditor.observe.digest import BLOCK_SEEDS, WORDS_PER_BLOCK

_GOLDEN, _FIRST, _SECOND = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SEED0, _SEED1 = (np.uint64(seed) for seed in BLOCK_SEEDS)
_ONE, _SHIFT1, _SHIFT2, _SHIFT3 = (np.uint64(value) for value in (1, 30, 27, 31))
_BYTE = np.uint64(0xFF)


class Places(NamedTuple):
    """Addresses of what the loops use, and where in a row of totals its columns begin."""

    buffer: int
    size: int
    """Of the buffer, in bytes."""
    totals: int
    step: int
    """Bytes from one row of totals to the next."""
    rows: int
    """How many there are."""
    state: int
    blank: int
    """A state to which nothing was added."""
    scratch: int
    """Room for one vector."""
    keys0: int
    keys1: int
    prefix0: int
    """Sums of a lane's keys below every word of a block."""
    prefix1: int
    counts: int
    values: int
    """The value of every byte."""
    lanes: int
    """Bytes from the beginning of a row: of both lanes, …"""
    num_nan: int
    """… of the three counts, which lie one after the other, …"""
    minimum: int
    maximum: int
    sum_squares: int
    bits_used: int
    ones: int
    """The counting pattern of a word."""


NUM_PLACES = len(Places._fields)


@inlined
def _block_key(seed: Any, block: int) -> Any:
    z = seed + (np.uint64(block) + _ONE) * _GOLDEN
    z = (z ^ (z >> _SHIFT1)) * _FIRST
    z = (z ^ (z >> _SHIFT2)) * _SECOND
    return (z ^ (z >> _SHIFT3)) | _ONE


@inlined
def _ones(width: int, ones: Any, low: int, high: int, keys: int, prefix: int) -> Any:
    """One lane's counting terms of bytes ``low`` to ``high`` - 1, before the block's key."""
    first, last = (low + 3) >> 2, high >> 2
    total = np.uint64(0)
    if last > first:
        total = ones * np.uint64(load_64(prefix + 8 * last) - load_64(prefix + 8 * first))
    if width < 4:
        for byte in range(low, min(high, first << 2), width):
            total += load_unsigned(keys, 4) << np.uint64(8 * byte)
        if last >= first:
            for byte in range(0, high & 3, width):
                total += load_unsigned(keys + 4 * last, 4) << np.uint64(8 * byte)
    return total


@inlined
def _part(
    form: int,
    width: int,
    address: int,
    low: int,
    high: int,
    keys0: int,
    keys1: int,
    key0: Any,
    key1: int,
    places: Places,
) -> None:
    """Elements in bytes ``low`` to ``high`` - 1 of one vector."""
    source = address
    if address < places.buffer or address + VECTOR > places.buffer + places.size:
        # The whole vector would be read: not beyond the buffer's ends.
        source = places.scratch
        for byte in range(low, high):
            store(source + byte, np.uint8(load_unsigned(address + byte, 1)))
    digest_part(form, source, low // width, high // width, keys0, keys1, key0, key1, places.state)
    if width > 1:
        count_elements(form, source, 1, low // width, high // width, places.state)


@inlined
def _stretch(form: int, width: int, address: int, low: int, high: int, word: int, places: Places) -> None:
    """Bytes ``low`` to ``high`` - 1 from ``address`` on, where word number ``word`` begins, inside one block."""
    place, block = word & (WORDS_PER_BLOCK - 1), word // WORDS_PER_BLOCK
    key0, key1 = _block_key(_SEED0, block), _block_key(_SEED1, block)
    keys0, keys1 = places.keys0 + 4 * place, places.keys1 + 4 * place
    ones = np.uint64(places.ones)
    one = _ones(width, ones, low, high, keys0, places.prefix0 + 8 * place) * key0
    two = _ones(width, ones, low, high, keys1, places.prefix1 + 8 * place) * key1
    store(places.state, load_64(places.state) + np.int64(one))
    store(places.state + VECTOR, load_64(places.state + VECTOR) + np.int64(two))
    signed0, signed1 = np.int64(key0), np.int64(key1)
    done = 0
    if low > 0:
        done = min(high, VECTOR)
        _part(form, width, address, low, done, keys0, keys1, signed0, signed1, places)
    count = (high - done) // VECTOR
    if count > 0:
        at = address + done
        if measure_vectors(form, at, count, keys0 + done, keys1 + done, signed0, signed1, places.state):
            count_elements(form, at, count, 0, count * VECTOR // width, places.state)
        done += count * VECTOR
    if done < high:
        _part(form, width, address + done, 0, high - done, keys0 + done, keys1 + done, signed0, signed1, places)


@inlined
def _add_to(form: int, kind: str, width: int, total: int, places: Places) -> None:
    """Add the state to the row at address ``total``, and make it blank."""
    state = places.state
    for lane in range(2):
        found = np.int64(0)
        for n in range(8):
            found += load_64(state + VECTOR * lane + 8 * n)
        at = total + places.lanes + 8 * lane
        store(at, load_64(at) + found)
    if width > 1:
        for n in range(3):
            at = total + places.num_nan + 8 * n
            store(at, load_64(at) + load_64(state + VECTOR * COUNTS + 8 * n))
        squares = 0.0
        for n in range(32):
            squares += as_double(DOUBLE, load_64(state + VECTOR * SUMS + 8 * n))
        _add_numbers(form, kind, width, squares, total, places)
    for n in range(8 * STATE_VECTORS):
        store(state + 8 * n, load_64(places.blank + 8 * n))


@inlined
def _add_numbers(form: int, kind: str, width: int, squares: float, total: int, places: Places) -> None:
    state = places.state
    high, low = extremum(form, 0, state), extremum(form, 1, state)
    most, least = extremum(form, 2, state), extremum(form, 3, state)
    if kind == "unsigned":
        high, low = most, least
    elif kind != "signed":
        # Floats are a sign and a magnitude: see the numpy kernels.
        low = most if most >> (8 * width - 1) & 1 else least
        high = least if high >> (8 * width - 1) & 1 else high
    # Nothing but NaN leaves the neutral element, which is one itself.
    smallest, largest = as_double(form, low), as_double(form, high)
    smallest, largest = smallest if smallest == smallest else np.inf, largest if largest == largest else -np.inf
    _widen(smallest, largest, squares, extremum(form, 4, state), total, places)


@inlined
def _widen(smallest: float, largest: float, squares: float, used: int, total: int, places: Places) -> None:
    """Take more numbers into a row of totals. + 0.0 makes -0 to 0, as the numpy kernels do."""
    at = total + places.minimum
    store(at, min(as_double(DOUBLE, load_64(at)), smallest + 0.0))
    at = total + places.maximum
    store(at, max(as_double(DOUBLE, load_64(at)), largest + 0.0))
    at = total + places.sum_squares
    store(at, as_double(DOUBLE, load_64(at)) + squares)
    at = total + places.bits_used
    store(at, load_64(at) | used)


@inlined
def _tally(address: int, whole: int, count: int, counts: int) -> None:
    """How often every byte occurs; eight tables, so that equal bytes in a row don't wait for each other.

    Bytes from number 8·``whole`` on go into the first table alone.
    """
    for n in range(whole):
        bits = load_unsigned(address + 8 * n, 8)
        for part in range(8):
            at = counts + 2048 * part + np.int64(bits >> np.uint64(8 * part) & _BYTE) * 8
            store(at, load_64(at) + 1)
    for n in range(8 * whole, count):
        at = counts + np.int64(load_unsigned(address + n, 1)) * 8
        store(at, load_64(at) + 1)


@inlined
def _add_tally(total: int, tables: int, places: Places) -> None:
    """Add the numbers of bytes to the row at address ``total``, and make them 0."""
    smallest, largest, squares, used = np.inf, -np.inf, 0.0, 0
    for byte in range(256):
        count = 0
        for part in range(tables):
            at = places.counts + 2048 * part + 8 * byte
            count += load_64(at)
            store(at, 0)
        if count == 0:
            continue
        value = as_double(DOUBLE, load_64(places.values + 8 * byte))
        used |= byte
        at = total + places.num_nan
        if value == value:
            smallest, largest = min(smallest, value), max(largest, value)
            at += 8 if abs(value) == np.inf else 16
            squares += count * (value * value) if abs(value) < np.inf else 0.0
        if value == 0 or value - value != 0:
            store(at, load_64(at) + count)
    _widen(smallest, largest, squares, used, total, places)


@inlined
def _places(table: NDArray[np.int64]) -> Places:
    return Places(
        table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7], table[8], table[9], table[10],
        table[11], table[12], table[13], table[14], table[15], table[16], table[17], table[18], table[19], table[20],
    )  # fmt: skip


@inlined
def _flush(form: int, kind: str, width: int, current: int, tables: int, places: Places) -> None:
    """Add what was found of the runs of one row to it."""
    if current >= 0:
        total = places.totals + places.step * current
        _add_to(form, kind, width, total, places)
        if width == 1:
            _add_tally(total, tables, places)


@inlined
def outside(at: NDArray[np.int64], length: NDArray[np.int64], width: int, size: int) -> int:
    """The first run that does not lie within a buffer of ``size`` bytes, or -1."""
    for run in range(len(at)):
        if length[run] > 0 and (at[run] < 0 or at[run] > size or length[run] > (size - at[run]) // width):
            return run
    return -1


@inlined
def _misplaced(start: NDArray[np.int64], row: NDArray[np.int64], rows: int) -> int:
    for run in range(len(start)):
        if start[run] < 0 or row[run] < 0 or row[run] >= rows:
            return run
    return -1


@lru_cache
def measuring(form: int, stamp: int, compiled: Callable[..., Any]) -> Any:
    """The loop over runs of elements of one form. Compiled code of another ``stamp`` is not taken from the disk.

    It takes the columns of ``num_runs`` runs (``at``, ``length``, ``start``, ``row``, one after the other) and
    :class:`Places`, and gives the number of a run that lies outside the buffer or the totals, and then has added
    nothing; else -1.
    """
    width, kind = FORMS[form].width, FORMS[form].kind

    @compiled
    def measure(runs: Any, num_runs: int, table: Any, doubles: Any) -> int:
        columns = carray(runs, (4, num_runs), np.int64)
        at, length, start, row = columns[0], columns[1], columns[2], columns[3]
        places = _places(carray(table, NUM_PLACES, np.int64))
        bad: int = max(outside(at, length, width, places.size), _misplaced(start, row, places.rows))
        if bad >= 0 or stamp < 0:
            return bad
        current, tables = np.int64(-1), 1
        for run in range(len(at)):
            if length[run] <= 0:
                continue
            if row[run] != current:
                _flush(form, kind, width, current, tables, places)
                current, tables = row[run], 1
            # From here on in bytes from where the run's first word begins.
            low = start[run] * width & 3
            high = low + length[run] * width
            base, word = places.buffer + at[run] - low, start[run] * width >> 2
            done = np.int64(0)
            while done < high:
                end = min(high, done + 4 * (WORDS_PER_BLOCK - (word & (WORDS_PER_BLOCK - 1))))
                _stretch(form, width, base + done, low, end - done, word, places)
                if width == 1:
                    # Eight tables take longer to add up than a short run takes.
                    whole = (end - done - low) // 8 if end - done >= 512 else 0
                    tables = 8 if whole else tables
                    _tally(base + done + low, whole, end - done - low, places.counts)
                word += (end - done + 3) >> 2
                done, low = end, np.int64(0)
        _flush(form, kind, width, current, tables, places)
        return -1

    return measure
