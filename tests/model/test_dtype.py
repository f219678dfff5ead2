import math

import numpy as np
import pytest

from auditor.model.dtype import DTYPES, Kind
from auditor.observe.decode import float8_values, nan_mask, ordered, to_float64

SMALL_FLOATS = sorted(name for name, dtype in DTYPES.items() if dtype.kind is Kind.FLOAT and dtype.bits <= 8)
TORCH_FLOATS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


def patterns(dtype):
    return np.arange(1 << dtype.bits, dtype=dtype.carrier)


@pytest.mark.parametrize("name", TORCH_FLOATS)
def test_every_pattern_is_the_number_that_torch_makes_of_it(name):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    theirs = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).to(torch.float32).to(torch.float64).numpy()
    ours = to_float64(patterns(DTYPES[name]), DTYPES[name])
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(theirs)
    assert (np.signbit(ours) == np.signbit(theirs))[numbers].all()


# Largest and smallest positive numbers, NaNs and infinities: OCP MX and ONNX float8 specifications, ml_dtypes' README.
LIMITS = {
    "float8_e4m3": (240.0, 2.0**-9, 14, 2), "float8_e3m4": (15.5, 2.0**-6, 30, 2),
    "float8_e4m3fn": (448.0, 2.0**-9, 2, 0), "float8_e5m2": (57344.0, 2.0**-16, 6, 2),
    "float8_e4m3fnuz": (240.0, 2.0**-10, 1, 0), "float8_e4m3b11fnuz": (30.0, 2.0**-13, 1, 0),
    "float8_e5m2fnuz": (57344.0, 2.0**-17, 1, 0), "float8_e8m0fnu": (2.0**127, 2.0**-127, 1, 0),
    "float4_e2m1fn": (6.0, 0.5, 0, 0),
}  # fmt: skip


def test_all_small_floats_have_stated_limits():
    assert sorted(LIMITS) == SMALL_FLOATS


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_limits(name):
    values = float8_values(DTYPES[name])
    largest, smallest, num_nan, num_infinite = LIMITS[name]
    finite = values[np.isfinite(values)]
    assert (finite.max(), finite[finite > 0].min()) == (largest, smallest)
    assert (np.isnan(values).sum(), np.isinf(values).sum()) == (num_nan, num_infinite)


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_positive_patterns_rise_and_negative_ones_mirror_them(name):
    dtype, values = DTYPES[name], float8_values(DTYPES[name])
    half = len(values) // 2 if dtype.signed else len(values)
    positive = values[:half][~np.isnan(values[:half])]
    assert (np.diff(positive) > 0).all()
    if dtype.signed:
        negative = values[half:]
        known = ~(np.isnan(negative) | np.isnan(values[:half]))
        assert (negative[known] == -values[:half][known]).all()


def test_every_value_of_float4():
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    np.testing.assert_array_equal(float8_values(DTYPES["float4_e2m1fn"]), values + [-v for v in values])


def test_every_value_of_four_bit_integers():
    bits = np.arange(16, dtype=np.uint8)
    assert to_float64(bits, DTYPES["int4"]).tolist() == [*range(8), *range(-8, 0)]
    assert to_float64(bits, DTYPES["uint4"]).tolist() == list(range(16))


@pytest.mark.parametrize(
    "name", ["float16", "float32", "float64", "int8", "int16", "int32", "uint8", "uint16", "uint32"]
)
def test_numpys_own_types_decode_as_numpy_does(name):
    values = np.array([0, 1, 2, 100, 127], name)
    if name.startswith("float"):
        values = np.concatenate(
            [values, np.array([-0.0, -1.5, np.inf, -np.inf, np.nan, np.finfo(name).tiny / 4], name)]
        )
    elif name.startswith("int"):
        values = np.concatenate([values, np.array([-1, np.iinfo(name).min], name)])
    bits = values.view(DTYPES[name].carrier)
    np.testing.assert_array_equal(to_float64(bits, DTYPES[name]), values.astype(np.float64))


def test_wide_integers_are_rounded_to_float64():
    assert to_float64(np.array([-1], "<i8").view("<u8"), DTYPES["int64"]).tolist() == [-1.0]
    assert to_float64(np.array([2**53 + 1], "<u8"), DTYPES["uint64"]).tolist() == [2.0**53]
    assert to_float64(np.array([0, 1, 255], "u1"), DTYPES["bool"]).tolist() == [0.0, 1.0, 255.0]


def test_complex_numbers_decode_by_their_parts():
    values = np.array([1.5 - 2j, np.inf], np.complex64)
    bits = values.view("<u4")
    assert to_float64(bits, DTYPES["complex64"]).tolist() == [1.5, -2.0, math.inf, 0.0]


def quiet(dtype):
    """All 16-bit patterns but signalling NaNs."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exponent = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    signalling = (bits & exponent == exponent) & (bits & (1 << (dtype.mantissa_bits - 1)) == 0)
    return bits[~signalling | (bits & ((1 << dtype.mantissa_bits) - 1) == 0)]


def test_every_quiet_bfloat16_is_the_number_that_torch_makes_of_it():
    torch = pytest.importorskip("torch")
    bits = quiet(DTYPES["bfloat16"])
    theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float64).numpy()
    np.testing.assert_array_equal(to_float64(bits, DTYPES["bfloat16"]), theirs)


@pytest.mark.parametrize(("name", "pattern"), [("bfloat16", 0x7F81), ("float32", 0x7F800001)])
def test_signalling_nans_decode_in_silence(name, pattern):
    dtype = DTYPES[name]
    assert np.isnan(to_float64(np.array([pattern] * 3, dtype.carrier), dtype)).all()


# Widths and carriers


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=lambda dtype: dtype.name)
def test_the_carrier_is_as_wide_as_an_element_or_a_byte_or_a_complex_part(dtype):
    carrier = np.dtype(dtype.carrier)
    width = dtype.bits // 2 if dtype.kind is Kind.COMPLEX else max(dtype.bits, 8)
    assert carrier.kind == "u"
    assert carrier.itemsize * 8 == width
    assert carrier == carrier.newbyteorder("<")


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=lambda dtype: dtype.name)
def test_fields_of_floats_fill_their_width(dtype):
    if dtype.kind in (Kind.FLOAT, Kind.COMPLEX):
        width = dtype.bits // 2 if dtype.kind is Kind.COMPLEX else dtype.bits
        assert dtype.signed + dtype.exponent_bits + dtype.mantissa_bits == width


def test_bytes_of_packed_types_round_up():
    assert [DTYPES["int4"].num_bytes(n) for n in range(5)] == [0, 1, 1, 2, 2]
    assert DTYPES["complex128"].num_bytes(3) == 48
    assert DTYPES["bool"].num_bytes(3) == 3


@pytest.mark.parametrize("name", ["float16", "bfloat16", *SMALL_FLOATS])
def test_neighbouring_numbers_are_one_ulp_apart(name):
    dtype = DTYPES[name]
    bits = quiet(dtype) if dtype.bits == 16 else patterns(dtype)
    bits = bits[np.isfinite(to_float64(bits, dtype))]
    values, order = to_float64(bits, dtype), ordered(bits, dtype)
    by_order = np.argsort(order, kind="stable")
    assert (np.diff(values[by_order]) >= 0).all()
    steps = np.diff(order[by_order])
    assert steps.max() == 1
    # Only the two zeros share a place.
    assert (values[by_order][1:][steps == 0] == 0).all()


def test_ordering_of_64_bit_floats():
    values = np.array([-np.inf, -1.0, -5e-324, -0.0, 0.0, 5e-324, 1.0, np.nextafter(1.0, 2), np.inf])
    order = ordered(values.view("<u8"), DTYPES["float64"])
    assert (np.diff(order) >= 0).all()
    assert np.diff(order)[[2, 3, 4, 6]].tolist() == [1, 0, 1, 1]


def test_nan_mask():
    bits = np.array([0x7FC0, 0xFFC1, 0x7F80, 0x0000], "<u2")
    assert nan_mask(bits, DTYPES["bfloat16"]).tolist() == [True, True, False, False]
    assert not nan_mask(bits, DTYPES["uint16"]).any()
