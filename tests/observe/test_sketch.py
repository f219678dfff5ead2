"""The sketch: linear, the same by all kernels and cuts, and as far off as it says."""

import numpy as np
import pytest

from auditor.audit import audit
from auditor.model.dtype import DTYPES
from auditor.observe.decode import rounded, to_float64
from auditor.observe.digest import mix64
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import Runs
from auditor.observe.sketch import BLOCK, BLOCK_SEED, SIGN_SEED, sketch_rows
from auditor.settings import Settings
from auditor.storage.local import LocalStore
from tests.paths import TP4

DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64", "int64", "int8", "bool", "complex64", "float8_e4m3fn")
GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def content(name, count, seed=0):
    dtype = DTYPES[name]
    values = np.random.default_rng(seed).normal(0, 3, count)
    if dtype.exponent_bits and dtype.kind.value == "float":
        return rounded(values.view(np.uint64), DTYPES["float64"], dtype).astype(dtype.carrier)
    if dtype.kind.value == "complex":
        return values.astype(np.float32).view(np.uint32)
    if name == "bool":
        return (values > 0).astype(np.uint8)
    return (values * 10).astype(np.int64).astype(f"i{np.dtype(dtype.carrier).itemsize}").view(dtype.carrier)


def sketch(kernels, bits, name, starts, at=None, length=None, rows=None):
    width = bits.itemsize
    starts = np.atleast_1d(starts)
    at = np.zeros(1, np.int64) if at is None else at
    length = np.array([len(bits)]) if length is None else length
    rows = np.zeros(len(starts), np.int64) if rows is None else rows
    out = np.zeros((int(rows.max()) + 1, 64))
    choose(0, kernels).sketch(bits.view(np.uint8), DTYPES[name], Runs(at * width, length, starts, rows), out)
    return out


def plainly(values, start):
    """By the words of the specification, one element after the other."""
    found = np.zeros(64)
    for i, value in enumerate(values.tolist(), start):
        block, row, column = i // 2048, i // 64 % 32, i % 64
        bits = mix64((BLOCK_SEED + (block + 1) * GOLDEN) & MASK)
        minus = (mix64((SIGN_SEED + (row + 1) * GOLDEN) & MASK) >> column & 1) ^ (bits >> row & 1)
        found[(column + (bits >> 32 & 63)) % 64] += -value if minus else value
    return found


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize(("count", "start"), [(5000, 0), (5000, 1999), (700, 2040), (64, 64), (1, 4095), (3, 0)])
def test_it_is_what_the_specification_says(kernels, count, start):
    values = np.random.default_rng(1).normal(size=count)
    found = sketch(kernels, values.view(np.uint64), "float64", start)[0]
    np.testing.assert_allclose(found, plainly(values, start), rtol=0, atol=1e-12 * np.linalg.norm(values))


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_kernels_agree_and_parts_add_up(name):
    bits = content(name, 20_000)
    whole = sketch("numpy", bits, name, 777)
    cuts = np.sort(np.random.default_rng(2).integers(0, len(bits), 90))
    at = np.concatenate([[0], cuts])
    length = np.diff(np.concatenate([at, [len(bits)]]))
    bound = 1e-12 * np.linalg.norm(to_float64(bits, DTYPES[name]))
    assert bound > 0
    for kernels in ("numpy", "numba"):
        np.testing.assert_allclose(sketch(kernels, bits, name, 777), whole, rtol=0, atol=bound)
        parts = sketch(kernels, bits, name, at + 777, at, length)
        np.testing.assert_allclose(parts, whole, rtol=0, atol=bound)
        apart = sketch(kernels, bits, name, at + 777, at, length, np.arange(len(at)) % 3)
        np.testing.assert_allclose(apart.sum(axis=0), whole[0], rtol=0, atol=bound)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_what_is_not_finite_counts_as_zero(kernels):
    values = np.random.default_rng(3).normal(size=3000)
    odd = values.copy()
    odd[[5, 2100, 2999]] = np.nan, np.inf, -np.inf
    values[[5, 2100, 2999]] = 0
    found = sketch(kernels, odd.view(np.uint64), "float64", 0)
    np.testing.assert_allclose(found, sketch(kernels, values.view(np.uint64), "float64", 0), atol=1e-12)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_nothing_outside_of_the_buffer_is_read(kernels):
    bits = content("float32", 64)
    with pytest.raises(ValueError, match="outside the buffer"):
        sketch(kernels, bits, "float32", 0, np.array([1]), np.array([64]))


def relative_errors(difference, tries):
    """Of the length of one kind of difference, over hashes: moved along by whole blocks, it meets others."""
    found = [np.linalg.norm(sketch_rows(difference[None], np.array([BLOCK * 4096 * k]))) for k in range(tries)]
    return np.array(found) / np.linalg.norm(difference) - 1


@pytest.mark.parametrize("width", [64, 100, 512, 2048, 4096])
@pytest.mark.parametrize("kind", ["iid", "rank one", "one column", "constant"])
def test_the_error_is_about_nine_percent_whatever_the_difference(kind, width):
    random = np.random.default_rng(4)
    rows = max(64, (1 << 17) // width)
    difference = np.zeros((rows, width))
    if kind == "iid":
        difference = random.normal(size=(rows, width))
    elif kind == "rank one":
        difference = np.outer(random.normal(size=rows), random.normal(size=width))
    elif kind == "one column":
        difference[:, width // 3] = 1.0
    else:
        difference += 1.0
    errors = relative_errors(difference.reshape(-1), 60)
    assert np.sqrt(np.mean(errors**2)) < 0.14
    assert abs(errors.mean()) < 0.05


def test_sketches_are_made_only_for_a_ledger(monkeypatch):
    def never(*arguments):
        raise AssertionError("nobody asked for sketches")

    monkeypatch.setattr("auditor.observe.numpy_kernels.sketch_rows", never)
    audit(LocalStore(TP4), Settings())
