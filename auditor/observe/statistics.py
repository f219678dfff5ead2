"""Counts, extrema and sum of squares of one block of elements. The numpy kernels: the reference for any other.

Sign-magnitude floats are read as integers: the largest signed integer is the largest positive value, the largest
unsigned one the most negative value. Two integer reductions thus give the extrema, whether anything is not finite and
whether there is a zero; only blocks that have such elements pay for counting them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.model.dtype import DType, Kind, NonFinite
from auditor.observe.decode import to_float64


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
    flat = np.ascontiguousarray(bits).reshape(-1)
    if dtype.kind in (Kind.FLOAT, Kind.COMPLEX) and dtype.non_finite is NonFinite.IEEE and flat.itemsize >= 2:
        return _of_floats(flat, dtype)
    values = to_float64(flat, dtype)
    return _of_values(values)


def _of_values(values: NDArray[np.float64]) -> Statistics:
    """The plain way, for everything small or odd."""
    nan, infinite = np.isnan(values), np.isinf(values)
    numbers = values[~nan] if nan.any() else values
    finite = values[~(nan | infinite)] if nan.any() or infinite.any() else values
    return Statistics(
        int(nan.sum()), int(infinite.sum()), int((values == 0).sum()),
        float(numbers.min(initial=math.inf)) + 0.0, float(numbers.max(initial=-math.inf)) + 0.0, _squares(finite),
    )  # fmt: skip


def _squares(values: NDArray[np.float64]) -> float:
    # Not np.dot: BLAS would start threads of its own for every block.
    return float(np.einsum("i,i->", values, values))


def _of_floats(flat: NDArray[np.unsignedinteger], dtype: DType) -> Statistics:
    width = flat.itemsize * 8
    sign = 1 << (width - 1)
    infinity = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    signed = flat.view(f"<i{flat.itemsize}")
    largest, most_negative = int(signed.max()), int(flat.max())
    has_negative = most_negative >= sign
    if largest >= infinity or (has_negative and most_negative - sign >= infinity):
        return _of_values(to_float64(flat, dtype))
    has_zero = int(flat.min()) == 0 or int(signed.min()) == -sign
    num_zero = flat.size - int(np.count_nonzero(flat & flat.dtype.type(sign - 1))) if has_zero else 0
    low = most_negative if has_negative else int(flat.min())
    high = largest if largest >= 0 else int(flat.min())
    ends = to_float64(np.array([low, high], flat.dtype), dtype)
    # + 0.0 turns -0 into 0: which of the two zeros comes first must not depend on the block.
    return Statistics(0, 0, num_zero, float(ends[0]) + 0.0, float(ends[1]) + 0.0, _squares(to_float64(flat, dtype)))
