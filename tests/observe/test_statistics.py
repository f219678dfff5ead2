import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.model.dtype import DTYPES, Kind
from auditor.observe.decode import float8_values
from auditor.observe.statistics import Statistics, statistics

UNPACKED = sorted(name for name, dtype in DTYPES.items() if dtype.bits >= 8)
FLOATS = [name for name in UNPACKED if DTYPES[name].kind is Kind.FLOAT]
IEEE = ["float64", "float32", "float16", "bfloat16", "float8_e5m2"]
PARTS = {"complex64": "float32", "complex128": "float64"}


def width_of(dtype):
    return dtype.bits // 2 if dtype.kind is Kind.COMPLEX else dtype.bits


def quieted(bits, dtype):
    """The same bits with every NaN made a quiet one."""
    if dtype.kind not in (Kind.FLOAT, Kind.COMPLEX) or width_of(dtype) == 8:
        return bits
    mantissa = (1 << dtype.mantissa_bits) - 1
    exponent = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    one = bits.dtype.type
    nan = (bits & one(exponent) == one(exponent)) & (bits & one(mantissa) != 0)
    return np.where(nan, bits | one(1 << (dtype.mantissa_bits - 1)), bits)


def numbers_of(bits, dtype):
    """Value bits as float64, by numpy's own types where it has them."""
    if width_of(dtype) == 8 and dtype.kind is Kind.FLOAT:
        return float8_values(dtype)[bits]
    if dtype.name == "bfloat16":
        return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(float)
    name = PARTS.get(dtype.name, dtype.name)
    return bits.view("u1" if name == "bool" else name).astype(float)


def expected(bits, dtype):
    values = numbers_of(bits.reshape(-1), dtype)
    numbers, finite = values[~np.isnan(values)], values[np.isfinite(values)]
    return Statistics(
        int(np.isnan(values).sum()), int(np.isinf(values).sum()), int((values == 0).sum()),
        min(numbers.tolist(), default=math.inf), max(numbers.tolist(), default=-math.inf), squares(finite.tolist()),
    )  # fmt: skip


def squares(values):
    try:
        return math.fsum(value * value for value in values)
    except OverflowError:
        return math.inf


def assert_same(found, wanted):
    for name in ("num_nan", "num_infinite", "num_zero", "minimum", "maximum"):
        assert getattr(found, name) == getattr(wanted, name)
    assert found.sum_squares == pytest.approx(wanted.sum_squares, rel=1e-12, abs=1e-300)


@st.composite
def contents(draw, names=tuple(UNPACKED)):
    """A dtype and bits that favour the odd: zeros of both signs, extremes, infinities, NaNs, subnormals."""
    dtype = DTYPES[draw(st.sampled_from(names))]
    width = width_of(dtype)
    sign = 1 << (width - 1)
    infinity = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    special = [0, sign, 1, sign | 1, (1 << width) - 1, sign - 1, infinity, sign | infinity & (sign - 1), infinity - 1]
    some = st.sampled_from([pattern & ((1 << width) - 1) for pattern in special])
    patterns = st.one_of(some, st.integers(0, (1 << width) - 1))
    kinds = [patterns, some, patterns.map(lambda p: p | sign), patterns.map(lambda p: p & (sign - 1)),
             st.integers(0, (1 << max(dtype.mantissa_bits, 1)) - 1)]  # fmt: skip
    drawn = draw(st.lists(draw(st.sampled_from(kinds)), max_size=30))
    if dtype.kind is Kind.COMPLEX:
        drawn = drawn[: len(drawn) // 2 * 2]
    return dtype, quieted(np.array(drawn, dtype.carrier), dtype)


@given(contents())
def test_statistics_are_those_of_float64_numbers(case):
    dtype, bits = case
    assert_same(statistics(bits, dtype), expected(bits, dtype))


@given(contents(), st.lists(st.integers(0, 30), max_size=3))
def test_statistics_of_parts_add_up(case, cuts):
    dtype, bits = case
    borders = sorted({0, len(bits), *(min(cut, len(bits)) for cut in cuts)})
    total = sum((statistics(bits[low:high], dtype) for low, high in pairwise(borders)), Statistics())
    assert_same(total, statistics(bits, dtype))


@pytest.mark.parametrize("name", UNPACKED)
def test_large_random_blocks(name):
    dtype = DTYPES[name]
    bits = np.frombuffer(np.random.default_rng(3).bytes(1 << 16), dtype.carrier)
    bits = quieted(bits, dtype)
    assert_same(statistics(bits, dtype), expected(bits, dtype))


@pytest.mark.parametrize("name", UNPACKED)
def test_nothing_has_no_extrema(name):
    dtype = DTYPES[name]
    assert statistics(np.zeros((3, 0), dtype.carrier), dtype) == Statistics()
    assert (Statistics().minimum, Statistics().maximum) == (math.inf, -math.inf)


@pytest.mark.parametrize("name", FLOATS)
def test_every_pattern_alone(name):
    dtype = DTYPES[name]
    patterns = range(256) if dtype.bits == 8 else [0, 1, 1 << (dtype.bits - 1), (1 << dtype.bits) - 1, 3 << 3]
    for pattern in patterns:
        bits = quieted(np.array([pattern], dtype.carrier), dtype)
        assert_same(statistics(bits, dtype), expected(bits, dtype))


def float_bits(values, dtype):
    if dtype.name == "bfloat16":
        return (np.array(values, "<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    if dtype.name == "float8_e5m2":
        return (np.array(values, "<f2").view("<u2") >> np.uint16(8)).astype("u1")
    return np.array(values, dtype.name).view(dtype.carrier)


@pytest.mark.parametrize("name", IEEE)
def test_stated_values(name):
    dtype = DTYPES[name]

    def of(*values):
        return statistics(float_bits(values, dtype), dtype)

    assert of(1.0, -2.0, 0.5) == Statistics(0, 0, 0, -2.0, 1.0, 5.25)
    assert of(-1.0, -2.0) == Statistics(0, 0, 0, -2.0, -1.0, 5.0)
    assert of(-0.0, 0.0, 1.0) == Statistics(0, 0, 2, 0.0, 1.0, 1.0)
    assert of(-0.0, -2.0) == Statistics(0, 0, 1, -2.0, 0.0, 4.0)
    assert of(math.inf, -math.inf, 2.0) == Statistics(0, 2, 0, -math.inf, math.inf, 4.0)
    assert of(math.nan, 1.0, -1.0) == Statistics(1, 0, 0, -1.0, 1.0, 2.0)
    assert of(math.nan, math.nan) == Statistics(2, 0, 0, math.inf, -math.inf, 0.0)
    assert of(-math.inf) == Statistics(0, 1, 0, -math.inf, -math.inf, 0.0)


@pytest.mark.parametrize("name", IEEE)
def test_subnormals_are_numbers(name):
    dtype = DTYPES[name]
    sign = 1 << (dtype.bits - 1)
    found = statistics(np.array([1, 2, sign | 3], dtype.carrier), dtype)
    unit = 2.0 ** (1 - dtype.bias - dtype.mantissa_bits)
    assert (found.num_zero, found.minimum, found.maximum) == (0, -3 * unit, 2 * unit)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_minimum_of_minus_zero_is_zero(name):
    found = statistics(float_bits([-0.0, -0.0], DTYPES[name]), DTYPES[name])
    assert math.copysign(1.0, found.minimum) == math.copysign(1.0, found.maximum) == 1.0


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_which_zero_is_the_extremum_does_not_depend_on_the_cut(name):
    dtype = DTYPES[name]
    bits = float_bits([-0.0, math.nan], dtype)
    whole, parts = statistics(bits, dtype), statistics(bits[:1], dtype) + statistics(bits[1:], dtype)
    assert math.copysign(1.0, whole.minimum) == math.copysign(1.0, parts.minimum)


def test_sums_of_squares_beyond_float64_are_infinite():
    bits = np.array([1e300, -1e300]).view("<u8")
    assert statistics(bits, DTYPES["float64"]).sum_squares == math.inf


def test_integers_and_bools():
    assert statistics(np.array([-3, 0, 2], "<i4").view("<u4"), DTYPES["int32"]) == Statistics(0, 0, 1, -3.0, 2.0, 13.0)
    assert statistics(np.array([0, 1, 1], "u1"), DTYPES["bool"]) == Statistics(0, 0, 1, 0.0, 1.0, 2.0)
    wide = statistics(np.array([2**64 - 1, 0], "<u8"), DTYPES["uint64"])
    assert (wide.minimum, wide.maximum) == (0.0, 2.0**64)


def test_complex_elements_count_as_two_parts():
    bits = np.array([1 + 2j, complex(0.0, math.nan)], "<c8").view("<u4").reshape(2, 2)
    assert statistics(bits, DTYPES["complex64"]) == Statistics(1, 0, 1, 0.0, 2.0, 5.0)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8"])
def test_strided_views_count_their_own_elements(name):
    dtype = DTYPES[name]
    bits = quieted(np.frombuffer(np.random.default_rng(1).bytes(960), dtype.carrier), dtype).reshape(-1, 8)
    for view in (bits[:, ::2], bits.T, bits[::-1, 3:4]):
        assert_same(statistics(view, dtype), expected(np.ascontiguousarray(view), dtype))


def test_unaligned_bits():
    raw = b"\0" + np.array([1.0, -2.0, 0.0], "<f4").tobytes()
    bits = np.frombuffer(raw, "<u4", 3, 1)
    assert statistics(bits, DTYPES["float32"]) == Statistics(0, 0, 1, -2.0, 1.0, 5.0)
