"""The compiled loop of the sketch; :mod:`~auditor.observe.sketch` says what it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from auditor.model.dtype import DType, Kind
from auditor.model.observation import BUCKETS
from auditor.observe.decode import to_float64
from auditor.observe.kernels import Bytes, Runs
from auditor.observe.sketch import BLOCK_SEED, ROWS, signs

PART = 1 << 18
"""Elements that are widened at once: they stay in the cache."""
_SEED, _GOLDEN = np.uint64(BLOCK_SEED), np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _SHIFT1, _SHIFT2, _SHIFT3 = (np.uint64(value) for value in (1, 30, 27, 31))
_LARGEST = float(np.finfo(np.float64).max)


def add_sketches(buffer: Bytes, dtype: DType, runs: Runs, sketches: NDArray[np.float64]) -> None:
    """As :meth:`~auditor.observe.kernels.Kernels.sketch`."""
    width = np.dtype(dtype.carrier).itemsize
    for shift in np.unique(runs.at % width).tolist():
        which = np.flatnonzero((runs.at % width == shift) & (runs.length > 0))
        columns = [np.ascontiguousarray(column[which], np.int64) for column in (
            runs.at // width, runs.length, runs.start, runs.row)]  # fmt: skip
        if not len(which):
            continue
        first, last = int(columns[0].min()), int((columns[0] + columns[1]).max())
        if first < 0 or shift + last * width > len(buffer):
            raise ValueError("a run lies outside the buffer")
        bits = buffer[shift + first * width : shift + last * width].view(dtype.carrier)
        _span(bits, dtype, columns, first, sketches)


def _span(
    bits: NDArray[np.unsignedinteger], dtype: DType, columns: list[NDArray[np.int64]], first: int,
    sketches: NDArray[np.float64],
) -> None:  # fmt: skip
    """Runs that lie in ``bits``, which begin at element ``first``."""
    at, length, start, row = columns
    if len(at) > 1:
        _loop()(_numbers(bits, dtype), at - first, length, start, row, signs(), sketches)
        return
    for done in range(0, len(bits), PART):
        part = _numbers(bits[done : done + PART], dtype)
        zero, count = np.zeros(1, np.int64), np.array([len(part)])
        _loop()(part, zero, count, start + done, row, signs(), sketches)


class _Room(threading.local):
    def __init__(self) -> None:
        self.words = np.zeros(PART, np.uint32)


_room = _Room()


def _numbers(bits: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[Any]:
    """Elements as numbers of 32 or 64 bits; what needs no widening is not copied."""
    if dtype.name == "bfloat16":
        if len(_room.words) < len(bits):
            _room.words = np.zeros(len(bits), np.uint32)
        words = _room.words[: len(bits)]
        words[:] = bits
        np.left_shift(words, 16, out=words)
        return words.view(np.float32)
    if dtype.kind in (Kind.FLOAT, Kind.COMPLEX) and bits.itemsize >= 4:
        return bits.view(f"<f{bits.itemsize}")
    return to_float64(bits, dtype)


@lru_cache(maxsize=1)
def _loop() -> Callable[..., None]:
    return _Loop()


class _Loop:
    """The loop, compiled without the interpreter's lock, and kept on disk for the next process if that can be."""

    def __init__(self) -> None:
        try:
            self.loop: Callable[..., None] = numba.njit(nogil=True, cache=True)(_sketch)
        except RuntimeError:
            # numba finds no folder that it may write into.
            self.loop = numba.njit(nogil=True)(_sketch)

    def __call__(self, *arguments: Any) -> None:
        try:
            self.loop(*arguments)
        except (OSError, EOFError):
            # What is on disk can't be read, or no more written: before the loop began, so nothing is added twice.
            self.loop = numba.njit(nogil=True)(_sketch)
            self.loop(*arguments)


def _sketch(
    values: NDArray[Any], at: NDArray[np.int64], length: NDArray[np.int64], start: NDArray[np.int64],
    row: NDArray[np.int64], table: NDArray[np.float64], sketches: NDArray[np.float64],
) -> None:  # fmt: skip
    held = np.zeros(BUCKETS)
    for run in range(len(at)):
        done = np.int64(0)
        out = sketches[row[run]]
        while done < length[run]:
            index = start[run] + done
            block = index // (ROWS * BUCKETS)
            hashed = _SEED + (np.uint64(block) + _ONE) * _GOLDEN
            hashed = (hashed ^ (hashed >> _SHIFT1)) * _FIRST
            hashed = (hashed ^ (hashed >> _SHIFT2)) * _SECOND
            # One name a type: numba makes a float of signed and unsigned integers together.
            bits = np.int64(hashed ^ (hashed >> _SHIFT3))
            end = min(length[run], done + (block + 1) * (ROWS * BUCKETS) - index)
            held[:] = 0.0
            while done < end:
                place = (start[run] + done) % (ROWS * BUCKETS)
                line, low = place // BUCKETS, place % BUCKETS
                count = min(end - done, BUCKETS - low)
                sign = 1.0 - 2.0 * ((bits >> line) & 1)
                here = values[at[run] + done : at[run] + done + count]
                own, into = table[line, low : low + count], held[low : low + count]
                for n in range(count):
                    value = np.float64(here[n])
                    into[n] += (value if abs(value) <= _LARGEST else 0.0) * own[n] * sign
                done += count
            rotation = (bits >> 32) & (BUCKETS - 1)
            for bucket in range(BUCKETS):
                out[(bucket + rotation) & (BUCKETS - 1)] += held[bucket]
