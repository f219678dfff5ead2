"""The compiled kernels against the numpy ones, and both against plain arithmetic on single elements."""

import math
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.model.dtype import DTYPES, Kind
from auditor.model.observation import OBSERVED
from auditor.model.pairing import Pairing, PairKind
from auditor.observe.decode import float8_values, rounded, to_float64
from auditor.observe.digest import digest_array
from auditor.observe.kernel_choice import WORTH_COMPILED_BYTES, choose
from auditor.observe.kernels import (
    TALLY,
    Runs,
    Side,
    comparable,
    empty_rows,
    empty_tallies,
)  # fmt: skip
from auditor.observe.numpy_kernels import NumpyKernels
from auditor.observe.statistics import statistics
from tests.paths import ROOT

pytest.importorskip("numba")
NUMPY, NUMBA = NumpyKernels(), choose(0, "numba")
UNPACKED = sorted(name for name, dtype in DTYPES.items() if dtype.bits >= 8)
CONTENTS = [
    "any", "finite", "numbers that are not finite", "zeros", "minus zeros", "subnormal", "all NaN", "negative",
    "one value",
]  # fmt: skip


def carrier(name):
    return np.dtype(DTYPES[name].carrier)


def content(kind, name, count, seed=0):
    """Elements of a dtype as its carrier."""
    dtype, one, width = DTYPES[name], carrier(name).type, carrier(name).itemsize
    rng = np.random.default_rng(seed)
    bits = np.frombuffer(rng.bytes(count * width), carrier(name)).copy()
    sign = 1 << (8 * width - 1)
    infinity = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    some = rng.random(count) < 0.3
    if kind == "finite":
        bits &= one(~(1 << dtype.mantissa_bits) & (2 * sign - 1))
    elif kind == "numbers that are not finite":
        bits[some] = rng.choice(np.array([infinity, sign | infinity & (sign - 1), sign - 1], carrier(name)), some.sum())
    elif kind == "zeros":
        bits[some] = rng.choice(np.array([0, sign], carrier(name)), some.sum())
    elif kind == "minus zeros":
        bits[some] = sign
    elif kind == "subnormal":
        bits &= one(sign | ((1 << max(dtype.mantissa_bits, 1)) - 1))
    elif kind == "all NaN":
        bits |= one(sign - 1)
    elif kind == "negative":
        bits |= one(sign)
    elif kind == "one value":
        bits[:] = bits[0] if count else 0
    return bits


def runs(name, lengths, starts, rows, gaps):
    """Runs one after the other with gaps between them, and the size of the buffer that they need."""
    lengths = np.array(lengths, np.int64)
    at = np.cumsum(np.array(gaps, np.int64) + np.concatenate([[0], lengths[:-1] * carrier(name).itemsize]))
    size = int(at[-1] + lengths[-1] * carrier(name).itemsize)
    return Runs(at, lengths, np.array(starts, np.int64), np.array(rows, np.int64)), size


def measured(kernels, buffer, name, parts, num_rows):
    totals = empty_rows(num_rows)
    kernels.measure(buffer, DTYPES[name], parts, totals)
    return totals


def assert_alike(one, other):
    for column in OBSERVED.names:
        if column == "sum_squares":
            assert one[column] == pytest.approx(other[column], rel=1e-12, abs=1e-300)
        else:
            assert one[column].tolist() == other[column].tolist(), column


@st.composite
def layouts(draw):
    count = draw(st.integers(1, 12))
    many = st.one_of(st.integers(0, 5), st.integers(0, 300), st.integers(0, 5000))
    places = st.one_of(st.integers(0, 9), st.integers(0, 10000), st.integers(0, 1 << 40))
    sizes = {"min_size": count, "max_size": count}
    return (
        draw(st.lists(many, **sizes)), draw(st.lists(places, **sizes)),
        draw(st.lists(st.integers(0, 3), **sizes)), draw(st.lists(st.integers(0, 70), **sizes)),
    )  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(UNPACKED), layouts(), st.sampled_from(CONTENTS), st.integers(0, 99))
def test_compiled_measures_are_numpys(name, layout, kind, seed):
    parts, size = runs(name, *layout)
    buffer = np.zeros(size, np.uint8)
    width = carrier(name).itemsize
    elements = content(kind, name, size // width, seed).view(np.uint8)
    buffer[size - len(elements) :] = elements
    assert_alike(measured(NUMBA, buffer, name, parts, 4), measured(NUMPY, buffer, name, parts, 4))


@pytest.mark.parametrize("kernels", [NUMPY, NUMBA], ids=["numpy", "numba"])
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", UNPACKED)
def test_measures_are_digest_and_statistics_of_the_elements(kernels, name, kind):
    lengths, starts = [700, 1, 9000, 64, 3, 40000], [0, 5, 2047, 4096, 70001, 1 << 35]
    if DTYPES[name].kind is Kind.COMPLEX:
        lengths, starts = [2 * n for n in lengths], [2 * n for n in starts]
    parts, size = runs(name, lengths, starts, range(6), [3, 0, 5, 1, 64, 0])
    buffer = np.zeros(size, np.uint8)
    for number, (at, length) in enumerate(zip(parts.at, parts.length, strict=True)):
        elements = content(kind, name, length, number)
        buffer[at : at + elements.nbytes] = elements.view(np.uint8)
    totals = measured(kernels, buffer, name, parts, 6)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        elements = content(kind, name, length, number)
        two = DTYPES[name].kind is Kind.COMPLEX
        shaped, base = (elements.reshape(-1, 2), start // 2) if two else (elements, start)
        found, wanted = totals[number], statistics(elements, DTYPES[name])
        assert (found["lane0"], found["lane1"]) == digest_array(shaped, DTYPES[name], base, (1,))
        for column in ("num_nan", "num_infinite", "num_zero", "minimum", "maximum"):
            assert found[column] == getattr(wanted, column), column
        assert found["sum_squares"] == pytest.approx(wanted.sum_squares, rel=1e-12, abs=1e-300)
        assert found["bits_used"] == np.bitwise_or.reduce(elements)


@pytest.mark.parametrize("name", ["uint8", "bfloat16", "float32", "float64", "int16"])
def test_many_tiny_runs_and_rows(name):
    width = carrier(name).itemsize
    elements = content("any", name, 1 << 15)
    for length, stride in ((64 // width, 64 // width), (128, 1000), (1, 3)):
        count = (1 << 15) // length
        at = np.arange(count, dtype=np.int64) * length * width
        for first in (0, 1):
            parts = Runs(at, np.full(count, length), np.arange(count) * stride + first, np.arange(count) // 3)
            one, other = (measured(kernels, elements.view("u1"), name, parts, count) for kernels in (NUMPY, NUMBA))
            assert_alike(one, other)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float32"])
def test_bytes_around_a_buffer_and_between_runs_mean_nothing(name):
    whole = content("any", name, 4000).view(np.uint8)
    lengths, starts, gaps = [1, 17, 33, 200, 5], [3, 1, 2040, 2, 7], [0, 3, 100, 1, 9]
    parts, size = runs(name, lengths, starts, [0, 1, 2, 3, 4], gaps)
    alone = np.zeros(size, np.uint8)
    for at, length in zip(parts.at, parts.length, strict=True):
        stop = at + length * carrier(name).itemsize
        alone[at:stop] = whole[100 + at : 100 + stop]
    inside = measured(NUMBA, whole[100 : 100 + size], name, parts, 5)
    assert_alike(inside, measured(NUMBA, alone, name, parts, 5))


def test_sums_add_to_what_is_there():
    elements = content("any", "float32", 1000).view(np.uint8)
    for kernels in (NUMPY, NUMBA):
        whole = measured(kernels, elements, "float32", runs("float32", [1000], [0], [0], [0])[0], 1)
        totals = empty_rows(1)
        for low in range(0, 1000, 300):
            part = Runs(*(np.array([n]) for n in (4 * low, min(300, 1000 - low), low, 0)))
            kernels.measure(elements, DTYPES["float32"], part, totals)
        assert_alike(totals, whole)


def test_nothing_leaves_the_rows_as_they_were():
    none = np.zeros(0, np.int64)
    for kernels in (NUMPY, NUMBA):
        assert_alike(
            measured(kernels, np.zeros(0, np.uint8), "float32", Runs(none, none, none, none), 2), empty_rows(2)
        )
        empty = Runs(*(np.array([n]) for n in (0, 0, 5, 1)))
        assert_alike(measured(kernels, np.zeros(0, np.uint8), "bfloat16", empty, 2), empty_rows(2))


@pytest.mark.parametrize("kernels", [NUMPY, NUMBA], ids=["numpy", "numba"])
@pytest.mark.parametrize(("at", "length"), [(-1, 3), (90, 3), (0, 26), (1 << 40, 1), (4, 1 << 61)])
def test_runs_outside_the_buffer_are_refused(kernels, at, length):
    buffer, row = np.zeros(100, np.uint8), np.array([0])
    totals = empty_rows(1)
    with pytest.raises(ValueError, match="outside the buffer"):
        kernels.measure(buffer, DTYPES["float32"], Runs(np.array([at]), np.array([length]), row, row), totals)
    assert_alike(totals, empty_rows(1))
    side = Side(buffer, DTYPES["float32"], np.array([at]))
    with pytest.raises(ValueError, match="outside"):
        kernels.compare(Pairing(PairKind.EQUAL, 0, 1), side, side, np.array([length]), row, empty_tallies(1))


def test_rows_outside_the_totals_are_refused():
    one, run = np.array([1]), np.array([0])
    for row in (1, -1):
        with pytest.raises(ValueError, match="totals"):
            NUMBA.measure(np.zeros(8, np.uint8), DTYPES["float32"], Runs(run, one, run, np.array([row])), empty_rows(1))
    with pytest.raises(ValueError, match="OBSERVED"):
        NUMBA.measure(np.zeros(8, np.uint8), DTYPES["float32"], Runs(run, one, run, run), np.zeros(1, TALLY))


def test_threads_do_not_disturb_each_other():
    elements = [content("any", "bfloat16", 100_000, seed).view(np.uint8) for seed in range(8)]
    parts = runs("bfloat16", [100_000], [1], [0], [0])[0]
    alone = [measured(NUMBA, buffer, "bfloat16", parts, 1) for buffer in elements]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda buffer: measured(NUMBA, buffer, "bfloat16", parts, 1), elements * 5))
    for one, other in zip(together, alone * 5, strict=True):
        assert_alike(one, other)


def side(name, elements, lengths, gap, first):
    """Runs of ``elements`` with gaps between them."""
    lengths = np.array(lengths, np.int64)
    width = carrier(name).itemsize
    at = first + np.concatenate([[0], np.cumsum(lengths[:-1] * width + gap)]).astype(np.int64)
    buffer = np.full(int(at[-1] + lengths[-1] * width), 0xA5, np.uint8)
    low = 0
    for where, length in zip(at, lengths, strict=True):
        buffer[where : where + length * width] = elements[low : low + length].view(np.uint8)
        low += length
    return Side(buffer, DTYPES[name], at)


def compared(kernels, pairing, left, right, lengths, starts):
    tally = empty_tallies(1)
    kernels.compare(pairing, left, right, np.array(lengths, np.int64), np.array(starts, np.int64), tally)
    return tally[0]


def one_run(kernels, pairing, left_name, left, right_name, right):
    sides = [side(name, np.array(bits, carrier(name)), [len(bits)], 0, 0)
             for name, bits in ((left_name, left), (right_name, right))]  # fmt: skip
    return compared(kernels, pairing, *sides, [len(left)], [0])


PAIRS = [
    (PairKind.CAST, "bfloat16", "float32"), (PairKind.CAST, "float16", "float32"),
    (PairKind.CAST, "float32", "float64"),
    (PairKind.CAST, "float8_e4m3fn", "float32"), (PairKind.CAST, "float8_e5m2fnuz", "float32"),
    (PairKind.CAST, "bfloat16", "float64"), (PairKind.CAST, "bfloat16", "bfloat16"),
    (PairKind.BOUND, "float32", "float32"), (PairKind.BOUND, "bfloat16", "bfloat16"),
    (PairKind.BOUND, "float16", "float32"), (PairKind.BOUND, "bfloat16", "float32"),
    (PairKind.BOUND, "float64", "float64"), (PairKind.BOUND, "float32", "float64"), (PairKind.BOUND, "int8", "uint8"),
    *((PairKind.EQUAL, name, name) for name in ("float32", "bfloat16", "float8_e5m2", "int64", "complex64")),
]  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(PAIRS), st.sampled_from(CONTENTS), st.sampled_from(CONTENTS), st.data())
def test_compiled_comparisons_are_numpys(pair, kind, other_kind, data):
    what, left_name, right_name = pair
    lengths = data.draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=6))
    starts = data.draw(st.lists(st.integers(0, 1 << 40), min_size=len(lengths), max_size=len(lengths)))
    seed, flips = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 3))
    count = sum(lengths)
    right = content(kind, right_name, count, seed)
    left = content(other_kind, left_name, count, seed + 1)
    if flips < 3 and what is not PairKind.BOUND:
        left = (rounded(right, DTYPES[right_name], DTYPES[left_name]) if what is PairKind.CAST else right).copy()
        if count:
            left[np.random.default_rng(seed).integers(0, count, flips)] ^= carrier(left_name).type(1 + seed % 3)
    limit, floor = (
        data.draw(st.sampled_from([0.0, 1e-3, 3.2, 1e30, math.inf])),
        data.draw(st.sampled_from([0.0, 1e-16])),
    )
    pairing = Pairing(what, 0, 1, limit, floor)
    sides = side(left_name, left, lengths, 3, seed % 7), side(right_name, right, lengths, 6, seed % 5)
    one, two = (compared(kernels, pairing, *sides, lengths, starts) for kernels in (NUMPY, NUMBA))
    assert one.tolist() == two.tolist()


def bits_of(values, name):
    """Nearest elements of a dtype, by plain search over all that it has."""
    table = to_float64(np.arange(1 << DTYPES[name].bits, dtype=carrier(name)), DTYPES[name])
    return [int(np.flatnonzero((table == value) & (np.signbit(table) == np.signbit(value)))[0]) for value in values]


BOTH = pytest.mark.parametrize("kernels", [NUMPY, NUMBA], ids=["numpy", "numba"])
CAST = Pairing(PairKind.CAST, 0, 1)


@BOTH
@pytest.mark.parametrize(
    ("name", "master", "stored"),
    [
        ("bfloat16", 0x3F808000, 0x3F80),  # 1 + half an ulp: to even
        ("bfloat16", 0x3F818000, 0x3F82),
        ("bfloat16", 0x3F808001, 0x3F81),
        ("bfloat16", 0x7F7FFFFF, 0x7F80),  # the largest float32 becomes infinity
        ("bfloat16", 0xFF7F8000, 0xFF80),
        ("bfloat16", 0x80000000, 0x8000),  # -0 stays -0
        ("bfloat16", 0x80000001, 0x8000),
        ("bfloat16", 0x00008000, 0x0000),
        ("bfloat16", 0x00018000, 0x0002),
        ("bfloat16", 0x7F800000, 0x7F80),
        ("bfloat16", 0x7F800001, 0x7FC0),  # a NaN is a NaN, whatever its payload
        ("bfloat16", 0xFFFFFFFF, 0x7F81),
        ("float16", 0x477FEFFF, 0x7BFF),  # just below 65520
        ("float16", 0x477FF000, 0x7C00),
        ("float16", 0x33000000, 0x0000),  # half the smallest: to even
        ("float16", 0x33000001, 0x0001),
        ("float16", 0x7FC00000, 0xFE00),
        ("float8_e4m3fn", 0x43E80000, 0x7E),  # 464 is a tie between 448 and what would be 480
        ("float8_e4m3fn", 0x43E80001, 0x7E),  # beyond: some casts saturate, some give NaN
        ("float8_e4m3fn", 0x43E80001, 0x7F),
        ("float8_e4m3fn", 0xFF800000, 0xFF),
        ("float8_e4m3fn", 0x80000000, 0x80),
        ("float8_e4m3fnuz", 0x80000001, 0x00),
        ("float8_e5m2", 0x47700000, 0x7C),
    ],
)  # fmt: skip
def test_healthy_casts(kernels, name, master, stored):
    tally = one_run(kernels, CAST, name, [stored] * 20, "float32", [master] * 20)
    assert tally.tolist() == (20, 0, 0, 0.0, -1)


@BOTH
@pytest.mark.parametrize(
    ("name", "master", "stored", "distance"),
    [
        ("bfloat16", 0x3F808000, 0x3F81, 1),  # a tie the other way
        ("bfloat16", 0x3FFFFFFF, 0x3FFF, 1),  # cut off instead of rounded
        ("bfloat16", 0x7F7FFFFF, 0x7F7F, 1),  # saturated
        ("bfloat16", 0x00000000, 0x8000, 0),  # +0 became -0: as numbers they are equal, as casts not
        ("bfloat16", 0x3F800000, 0xBF80, 2 * 0x3F80),
        ("bfloat16", 0x00010000, 0x8001, 2),
        ("bfloat16", 0x7FC00000, 0x7F80, math.inf),
        ("bfloat16", 0x7F800001, 0x7F80, math.inf),  # whose rounded bits are those of infinity
        ("bfloat16", 0xFFFFFFFF, 0x0000, math.inf),
        ("bfloat16", 0x3F800000, 0x7FC0, math.inf),
        ("float16", 0x477FF000, 0x7BFF, 1),
        ("float16", 0x3F800000, 0x3C05, 5),
        ("float8_e4m3fn", 0x43E00000, 0x7F, math.inf),  # 448 itself is no overflow
    ],
)  # fmt: skip
def test_casts_that_are_not_the_rounded_master(kernels, name, master, stored, distance):
    right = content("finite", "float32", 40)
    left = rounded(right, DTYPES["float32"], DTYPES[name])
    left[[17, 33]], right[[17, 33]] = stored, master
    tally = one_run(kernels, CAST, name, left, "float32", right)
    assert tally.tolist() == (40, 2, 2 if distance == 1 else 0, distance, 17)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_rounding_is_torchs(name):
    torch = pytest.importorskip("torch")
    ties = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    bits = np.concatenate([content("any", "float32", 1 << 16), ties, ties | np.uint32(0x8000), ties >> np.uint32(4)])
    cast = torch.from_numpy(bits.view(np.float32)).to(getattr(torch, name))
    theirs = cast.view(torch.uint8 if DTYPES[name].bits == 8 else torch.int16).numpy().view(carrier(name))
    numbers = ~np.isnan(bits.view(np.float32)) & ~np.isnan(to_float64(theirs, DTYPES[name]))
    assert (rounded(bits, DTYPES["float32"], DTYPES[name])[numbers] == theirs[numbers]).all()


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e5m2fnuz"])
def test_rounding_is_to_the_nearest_of_all_values(name):
    table = float8_values(DTYPES[name])
    finite = np.flatnonzero(np.isfinite(table))
    largest = table[finite].max()
    values = np.random.default_rng(0).uniform(-largest, largest, 2000) * np.logspace(-9, 0, 2000)
    found = rounded(values.view(np.uint64), DTYPES["float64"], DTYPES[name])
    nearest = np.abs(table[finite][:, None] - values).min(axis=0)
    assert (np.abs(table[found] - values) == nearest).all()


@BOTH
def test_bound(kernels):
    nan, inf = math.nan, math.inf
    moments = np.array([1.0, -3.0, 5.0, nan, inf, 1.0, 1.0, 9.0, 0.0, 1e-30, -2e-22], np.float32)
    others = np.array([1.0, 1.0, 4.0, 1.0, 1.0, nan, inf, -1.0, 0.0, 1e-44, 1e-44], np.float32)
    pairing = Pairing(PairKind.BOUND, 0, 1, limit=2.5, floor=0.0)
    tally = one_run(kernels, pairing, "float32", moments.view("u4"), "float32", others.view("u4"))
    root = math.sqrt(float(others[9]))
    assert tally["num_compared"] == 11
    assert tally["num_beyond"] == 1
    assert tally["first"] == 1
    assert tally["largest"] == max(3.0, abs(float(moments[10])) / root)


@BOTH
def test_bound_with_a_floor_and_without_roots_of_nothing(kernels):
    moments, others = np.array([1e-9, 0.0], np.float32), np.zeros(2, np.float32)
    bare, floored = (Pairing(PairKind.BOUND, 0, 1, limit=2.5, floor=floor) for floor in (0.0, 1e-16))
    sides = ("float32", moments.view("u4"), "float32", others.view("u4"))
    assert one_run(kernels, bare, *sides).tolist() == (2, 1, 0, math.inf, 0)
    assert one_run(kernels, floored, *sides).tolist() == (2, 0, 0, float(moments[0]) / 1e-8, -1)


@BOTH
@pytest.mark.parametrize("step", [1e-6, -1e-6])
def test_the_largest_ratio_is_found_wherever_it_is(kernels, step):
    moments = (1 + step * np.arange(50_000)).astype(np.float32)
    others = np.ones(50_000, np.float32)
    pairing = Pairing(PairKind.BOUND, 0, 1, limit=1.04 if step > 0 else 0.96)
    tally = one_run(kernels, pairing, "float32", moments.view("u4"), "float32", others.view("u4"))
    beyond = np.flatnonzero(moments > pairing.limit)
    assert tally.tolist() == (50_000, len(beyond), 0, float(moments.max()), beyond[0])


@BOTH
def test_the_first_is_the_smallest_whatever_the_order(kernels):
    left = content("finite", "float32", 300)
    right = left.copy()
    right[[40, 250]] ^= np.uint32(1)
    tally = empty_tallies(1)
    for low, high in ((200, 300), (0, 100), (100, 200)):
        sides = [Side(bits.view(np.uint8), DTYPES["float32"], np.array([4 * low])) for bits in (left, right)]
        kernels.compare(Pairing(PairKind.EQUAL, 0, 1), *sides, np.array([high - low]), np.array([7000 + low]), tally)
    assert tally[0].tolist() == (300, 2, 0, 0.0, 7040)


@BOTH
@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        (PairKind.CAST, "float8_e8m0fnu", "float32"),
        (PairKind.CAST, "int8", "float32"),
        (PairKind.EQUAL, "int8", "int16"),
    ],
)
def test_what_is_not_comparable_is_refused(kernels, kind, left, right):
    assert not comparable(kind, DTYPES[left], DTYPES[right])
    with pytest.raises(ValueError, match=r"rounded|width"):
        one_run(kernels, Pairing(kind, 0, 1), left, [0] * 5, right, [0] * 5)


def test_choice():
    assert choose(0).name == "numpy"
    assert choose(WORTH_COMPILED_BYTES).name == "numba"
    assert choose(WORTH_COMPILED_BYTES, "numpy").name == "numpy"
    with pytest.raises(ValueError, match="no kernels are called 'C'"):
        choose(0, "C")


SCRIPT = """
import sys
import numpy as np
from auditor.model.dtype import DTYPES
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import Runs, empty_rows
rows, buffer = empty_rows(1), np.arange(4000, dtype=np.uint8)
kernels = choose(1 << 40)
kernels.measure(buffer, DTYPES["float32"], Runs(*(np.array([n]) for n in (0, 1000, 0, 0))), rows)
print(kernels.name, rows["lane0"][0])
"""


GUARDED = """
import ctypes, mmap
import numpy as np
from auditor.model.dtype import DTYPES
from auditor.model.pairing import Pairing, PairKind
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import Runs, Side, empty_rows, empty_tallies
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
whole = np.frombuffer(memory, np.uint8)
protect = ctypes.CDLL(None, use_errno=True).mprotect
for number in (0, 2):
    assert protect(ctypes.c_void_p(whole.ctypes.data + number * page), ctypes.c_size_t(page), 0) == 0
buffer, kernels, row = whole[page : 2 * page], choose(0, "numba"), np.zeros(1, np.int64)
for name in ("bfloat16", "float32", "float8_e4m3fn"):
    for count in (1, 5, 33, 200):
        for at, start in ((0, 1), (0, 3), (0, 2046), (page - count * DTYPES[name].bits // 8, 1)):
            at, length = np.array([at]), np.array([count])
            kernels.measure(buffer, DTYPES[name], Runs(at, length, np.array([start]), row), empty_rows(1))
            side = Side(buffer, DTYPES[name], at)
            kernels.compare(Pairing(PairKind.EQUAL, 0, 1), side, side, length, row, empty_tallies(1))
print("alive")
"""


def run_script(script=SCRIPT, **options):
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def expected_lane():
    buffer = np.arange(4000, dtype=np.uint8)
    return str(measured(NUMPY, buffer, "float32", runs("float32", [1000], [0], [0], [0])[0], 1)["lane0"][0])


@pytest.mark.skipif(sys.platform != "linux", reason="protects memory by a call of Linux")
def test_nothing_is_read_beyond_the_ends_of_a_buffer():
    assert run_script(GUARDED, cwd=ROOT) == ["alive"]


def test_without_numba_there_is_numpy():
    without = "import sys\nsys.modules['numba'] = None\n"
    assert run_script(without + SCRIPT, cwd=ROOT) == ["numpy", expected_lane()]


def test_no_folder_for_compiled_code(tmp_path):
    shutil.copytree(ROOT / "auditor", tmp_path / "auditor", ignore=shutil.ignore_patterns("__pycache__", "adapters"))
    # A file where numba would make its folder: that stops the superuser too, whom permissions don't.
    (tmp_path / "auditor/observe/__pycache__").write_text("")
    nowhere = str(tmp_path / "auditor/observe/__pycache__/none")
    environment = {
        "PYTHONPATH": str(tmp_path),
        "HOME": nowhere,
        "XDG_CACHE_HOME": nowhere,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for more in ({}, {"NUMBA_CACHE_DIR": nowhere}):
        assert run_script(cwd=tmp_path, env=environment | more) == ["numba", expected_lane()]


def test_no_room_for_compiled_code(tmp_path):
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # noqa: E731
    assert run_script(cwd=ROOT, env=environment, preexec_fn=full) == ["numba", expected_lane()]


def test_compiled_code_is_kept_for_the_next_process(tmp_path):
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "NUMBA_DEBUG_CACHE": "1"}
    first, second = (" ".join(run_script(cwd=ROOT, env=environment)) for _ in range(2))
    assert "data saved" in first
    assert "data loaded" in second
    assert "data saved" not in second
