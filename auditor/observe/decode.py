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
    if dtype.apart:
        bits = bits & np.uint8((1 << dtype.bits) - 1)
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


def can_round(source: DType, target: DType) -> bool:
    """Whether :func:`rounded` takes these: floats, and a target that has a sign."""
    return source.kind is Kind.FLOAT and target.kind is Kind.FLOAT and target.signed and target.bits >= 8


def rounded(bits: NDArray[np.unsignedinteger], source: DType, target: DType) -> NDArray[np.unsignedinteger]:
    """Value bits of ``target`` nearest to those of ``source``, ties to even (IEEE 754-2019, 4.3.1).

    What is too large becomes infinity, or the largest number in dtypes that have none. Of a NaN nothing but that it is
    one is kept.
    """
    if source.name == "float32" and target.name == "bfloat16":
        return _rounded_to_bfloat16(bits)
    if target.name in ("float16", "float32", "float64"):
        values = bits.view("<f4") if source.name == "float32" else to_float64(bits, source)
        with np.errstate(all="ignore"):
            native: NDArray[np.unsignedinteger] = values.astype(f"<f{target.bits // 8}").view(target.carrier)
            return native
    return _rounded(to_float64(bits, source), target)


def _rounded_to_bfloat16(bits: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    upper = bits >> np.uint32(16)
    found = (bits + ((upper & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)).astype("<u2")
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if int(magnitude.max(initial=0)) > 0x7F800000:
        nan = magnitude > 0x7F800000
        found[nan] = (upper[nan] | np.uint32(0x40)).astype("<u2")
    return found


def _rounded(values: NDArray[np.float64], target: DType) -> NDArray[np.unsignedinteger]:
    """Any binary format: its patterns count the representable values from zero up."""
    nan, infinite, negative = np.isnan(values), np.isinf(values), np.signbit(values)
    magnitude = np.abs(np.where(nan | infinite, 0, values))
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, 1 - target.bias), 1 - target.bias)
    # Dividing by the distance of neighbours is exact, so that rint sees every tie.
    steps = np.rint(np.ldexp(magnitude, target.mantissa_bits - exponent)).astype(np.int64)
    pattern = (exponent.astype(np.int64) - (1 - target.bias) << target.mantissa_bits) + steps
    sign = 1 << (target.bits - 1)
    limit = largest_pattern(target)
    pattern = np.where(infinite, limit, np.minimum(pattern, limit))
    if target.non_finite is NonFinite.NEGATIVE_ZERO_IS_NAN:
        pattern = np.where(negative & (pattern != 0), pattern | sign, pattern)
        return np.where(nan, sign, pattern).astype(target.carrier)
    return (np.where(nan, sign - 1, pattern) | np.where(negative, sign, 0)).astype(target.carrier)


def largest_pattern(dtype: DType) -> int:
    """Bits of the largest value of a signed float: of infinity, where it has one."""
    if dtype.non_finite is NonFinite.IEEE:
        return ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    return (1 << (dtype.bits - 1)) - (2 if dtype.non_finite is NonFinite.NAN_ONLY else 1)
