"""What jitted JAX ops measure is what the offline kernels measure: on every dtype, cut anyhow. Needs jax."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")

from auditor.hooks import jax_digest  # noqa: E402
from auditor.hooks.recording import measured_on_cpu  # noqa: E402
from auditor.model.dtype import DTYPES  # noqa: E402
from auditor.model.region import Box  # noqa: E402
from auditor.observe.numpy_kernels import NumpyKernels  # noqa: E402

EXACT = ("lane0", "lane1", "num_nan", "num_infinite", "num_zero", "minimum", "maximum")
SHAPES = [
    ((), ()), ((5000,), (3,)), ((7, 31), (2, 5)), ((3, 2100), (0, 11)), ((9, 4, 6), (1, 0, 2)), ((2, 9000), (1, 7)),
]  # fmt: skip
"""Each with where a box in it begins: few, because every shape is compiled anew."""


def native(name):
    """The numpy dtype of that name, which ml_dtypes may have added."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else None


NAMES = [name for name, dtype in DTYPES.items() if dtype.bits >= 8 and native(name) is not None]


def some(name, shape, seed, odd):
    random = np.random.default_rng(seed)
    dtype = native(name)
    if odd or DTYPES[name].kind.value not in ("float", "complex"):
        raw = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        return (raw & 1 if name == "bool" else raw).view(dtype).reshape(shape)
    return random.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=5)
@given(which=st.integers(0, len(SHAPES) - 1), seed=st.integers(0, 1 << 30), odd=st.booleans())
def test_numpy_and_jax_agree(name, which, seed, odd):
    shape, start = SHAPES[which]
    whole = some(name, shape, seed, odd)
    box = Box(start, shape)
    local = np.ascontiguousarray(whole[tuple(map(slice, box.start, box.stop))])
    dtype = DTYPES[name]
    expected = measured_on_cpu(NumpyKernels(), local.reshape(-1).view("u1"), dtype, shape, box)
    with jax.enable_x64(dtype.bits > 32):
        measured = jax_digest.measured_on_device(jax.numpy.asarray(local), dtype, shape, box)
        view = jax_digest.measure(NumpyKernels(), jax.numpy.asarray(local), dtype, shape, box)
    for field in EXACT:
        assert measured[0][field] == view[0][field] == expected[0][field], field
    wide = dtype.bits == 64 and dtype.kind.value.endswith("integer")
    sums = (found[0]["sum_squares"] for found in (measured, expected))
    assert next(sums) == pytest.approx(next(sums), rel=1e-5 if wide else 1e-6, abs=1e-70)


def test_all_dtypes_of_jax_are_tried():
    assert {"float32", "bfloat16", "float8_e4m3fn", "float16", "uint32", "complex64", "bool", "int8"} <= {*NAMES}
