"""From value bits to numbers, for every dtype."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from auditor.model.dtype import DType, Kind, NonFinite


def to_float64(bits: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.float64]:
    """Values of unpacked elements, given in the dtype's carrier; complex ones as the parts they consist of.

    64-bit integers beyond 2**53 are rounded.
    """
    if dtype.kind is Kind.FLOAT and dtype.bits <= 8:
        values: NDArray[np.float64] = float8_values(dtype)[bits]
        return values
    if dtype.name == "bfloat16":
        return _widened((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
    width = bits.dtype.itemsize
    if dtype.kind in (Kind.FLOAT, Kind.COMPLEX):
        return _widened(np.ascontiguousarray(bits).view(f"<f{width}"))
    if dtype.kind is Kind.SIGNED and dtype.bits >= 8:
        return np.ascontiguousarray(bits).view(f"<i{width}").astype(np.float64)
    if dtype.kind is Kind.SIGNED:
        half = 1 << (dtype.bits - 1)
        return ((bits.astype(np.int64) ^ half) - half).astype(np.float64)
    return bits.astype(np.float64)


def _widened(values: NDArray[np.floating]) -> NDArray[np.float64]:
    # Widening a signalling NaN raises the invalid flag; numpy's warning would end up on the user's terminal.
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


@lru_cache(maxsize=32)
def float8_values(dtype: DType) -> NDArray[np.float64]:
    """The value of every bit pattern of a float of at most 8 bits, written out from its definition."""
    values = np.empty(1 << dtype.bits, np.float64)
    for pattern in range(len(values)):
        values[pattern] = _value(pattern, dtype)
    return values


def _value(pattern: int, dtype: DType) -> float:
    mantissa = pattern & ((1 << dtype.mantissa_bits) - 1)
    exponent = pattern >> dtype.mantissa_bits & ((1 << dtype.exponent_bits) - 1)
    sign = -1.0 if dtype.signed and pattern >> (dtype.bits - 1) else 1.0
    top = exponent == (1 << dtype.exponent_bits) - 1
    if dtype.non_finite is NonFinite.IEEE and top:
        return float("nan") if mantissa else sign * float("inf")
    if dtype.non_finite is NonFinite.NAN_ONLY and top and mantissa == (1 << dtype.mantissa_bits) - 1:
        return float("nan")
    if dtype.non_finite is NonFinite.NEGATIVE_ZERO_IS_NAN and pattern == 1 << (dtype.bits - 1):
        return float("nan")
    if not dtype.signed:
        return float(2.0 ** (exponent - dtype.bias))
    if exponent == 0:
        return float(sign * mantissa * 2.0 ** (1 - dtype.bias - dtype.mantissa_bits))
    return float(sign * (1 + mantissa / (1 << dtype.mantissa_bits)) * 2.0 ** (exponent - dtype.bias))


def ordered(bits: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.int64]:
    """Signed-magnitude floats as integers in the order of their values: neighbours differ by one (an ulp)."""
    width = dtype.bits // 2 if dtype.kind is Kind.COMPLEX else dtype.bits
    if not dtype.signed:
        return bits.astype(np.int64)
    sign = np.int64(-1) << np.int64(63) if width == 64 else np.int64(1 << (width - 1))
    raw = bits.view(np.int64) if width == 64 else bits.astype(np.int64)
    negative = (raw & sign) != 0
    magnitude = raw & ~sign
    return np.where(negative, -magnitude, magnitude)


def nan_mask(bits: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.bool_]:
    """Which elements are NaN."""
    if dtype.kind not in (Kind.FLOAT, Kind.COMPLEX):
        return np.zeros(bits.shape, bool)
    return np.isnan(to_float64(bits, dtype))
