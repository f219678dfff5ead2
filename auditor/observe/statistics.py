"""Counts, extrema and sums of squares of rows of elements. The numpy kernels: the reference for any other.

Sign-magnitude floats are read as integers: the largest signed integer is the largest positive value, the largest
unsigned one the most negative value. Integer reductions thus give the extrema, whether anything is not finite and
whether there is a zero; only rows that have such elements pay for counting them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.model.dtype import DType, Kind, NonFinite
from auditor.model.observation import OBSERVED
from auditor.observe.decode import to_float64

PART = 32 << 10
"""Elements that are widened at once."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one or more blocks."""

    num_nan: int = 0
    num_infinite: int = 0
    num_zero: int = 0
    minimum: float = math.inf
    """Of the numbers that aren't NaN; +inf where there is none."""
    maximum: float = -math.inf
    sum_squares: float = 0.0
    """Of the finite elements, in float64."""

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.num_nan + other.num_nan, self.num_infinite + other.num_infinite, self.num_zero + other.num_zero,
            min(self.minimum, other.minimum), max(self.maximum, other.maximum), self.sum_squares + other.sum_squares,
        )  # fmt: skip


def statistics(bits: NDArray[np.unsignedinteger], dtype: DType) -> Statistics:
    """Statistics of one block of value bits in the dtype's carrier; complex elements count as their two parts."""
    if bits.size == 0:
        return Statistics()
    row = statistics_of_rows(np.ascontiguousarray(bits).reshape(1, -1), dtype)[0]
    return Statistics(
        int(row["num_nan"]), int(row["num_infinite"]), int(row["num_zero"]),
        float(row["minimum"]), float(row["maximum"]), float(row["sum_squares"]),
    )  # fmt: skip


def statistics_of_rows(rows: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.void]:
    """Statistics of every row of ``rows`` (2-D, C order, none empty), as rows of OBSERVED that lack their digests."""
    ieee = dtype.kind in (Kind.FLOAT, Kind.COMPLEX) and dtype.non_finite is NonFinite.IEEE and rows.itemsize >= 2
    found = _of_floats(rows, dtype) if ieee else _of_values(rows, dtype)
    found["bits_used"] = np.bitwise_or.reduce(rows, axis=1)
    # + 0.0 turns -0 into 0: which of the two zeros comes first must not depend on the block.
    found["minimum"] += 0.0
    found["maximum"] += 0.0
    return found


def _of_values(rows: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.void]:
    """The plain way, for everything small or odd."""
    values = to_float64(rows, dtype)
    found = np.zeros(len(rows), OBSERVED)
    nan, infinite = np.isnan(values), np.isinf(values)
    has_nan = nan.any()
    found["num_nan"], found["num_infinite"] = nan.sum(axis=1), infinite.sum(axis=1)
    found["num_zero"] = (values == 0).sum(axis=1)
    found["minimum"] = (np.where(nan, math.inf, values) if has_nan else values).min(axis=1)
    found["maximum"] = (np.where(nan, -math.inf, values) if has_nan else values).max(axis=1)
    found["sum_squares"] = _squares(np.where(nan | infinite, 0, values) if has_nan or infinite.any() else values)
    return found


def _squares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    # Not np.dot: BLAS would start threads of its own for every block.
    squares: NDArray[np.float64] = np.einsum("ij,ij->i", values, values)
    return squares


def _sum_squares(rows: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.float64]:
    """Part by part, so that the doubles stay in the cache."""
    count, length = rows.shape
    total = np.zeros(count)
    if length >= PART:
        for low in range(0, length, PART):
            total += _squares(to_float64(rows[:, low : low + PART], dtype))
        return total
    for low in range(0, count, PART // length):
        total[low : low + PART // length] = _squares(to_float64(rows[low : low + PART // length], dtype))
    return total


def _of_floats(rows: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.void]:
    sign = 1 << (rows.itemsize * 8 - 1)
    infinity = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    largest, most_negative = rows.view(f"<i{rows.itemsize}").max(axis=1), rows.max(axis=1)
    odd = (largest >= infinity) | (most_negative >= rows.dtype.type(sign | infinity))
    if odd.all():
        return _of_values(rows, dtype)
    if not odd.any():
        return _of_finite(rows, largest.view(rows.dtype), most_negative, dtype)
    even = ~odd
    found = np.empty(len(rows), OBSERVED)
    found[odd] = _of_values(rows[odd], dtype)
    found[even] = _of_finite(rows[even], largest[even].view(rows.dtype), most_negative[even], dtype)
    return found


def _of_finite(
    rows: NDArray[np.unsignedinteger], largest: NDArray[np.unsignedinteger],
    most_negative: NDArray[np.unsignedinteger], dtype: DType,
) -> NDArray[np.void]:  # fmt: skip
    one = rows.dtype.type
    sign = 1 << (rows.itemsize * 8 - 1)
    least = rows.min(axis=1)
    found = np.zeros(len(rows), OBSERVED)
    if (least == 0).any() or (rows.view(f"<i{rows.itemsize}").min(axis=1) == -sign).any():
        found["num_zero"] = rows.shape[1] - np.count_nonzero(rows & one(sign - 1), axis=1)
    low = np.where(most_negative >= one(sign), most_negative, least)
    high = np.where(largest < one(sign), largest, least)
    found["minimum"], found["maximum"] = to_float64(low, dtype), to_float64(high, dtype)
    found["sum_squares"] = _sum_squares(rows, dtype)
    return found
