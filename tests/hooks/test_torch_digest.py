"""What torch's own ops measure is what the offline kernels measure: on every dtype, cut anyhow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from auditor.hooks import torch_digest  # noqa: E402
from auditor.hooks.recording import measured_on_cpu  # noqa: E402
from auditor.hooks.torch_pieces import dtype_of  # noqa: E402
from auditor.model.dtype import DTYPES  # noqa: E402
from auditor.model.region import Box  # noqa: E402
from auditor.observe.compiled_kernels import CompiledKernels  # noqa: E402
from auditor.observe.numpy_kernels import NumpyKernels  # noqa: E402

NAMES = [
    name for name, dtype in DTYPES.items() if dtype.bits >= 8 and isinstance(getattr(torch, name, None), torch.dtype)
]
COMPILED = ("float32", "bfloat16", "int8")
"""Compiled kernels are held against numpy's on every dtype in tests/observe/test_kernels.py; each costs seconds."""
EXACT = ("lane0", "lane1", "num_nan", "num_infinite", "num_zero", "minimum", "maximum")


def test_all_dtypes_of_torch_are_tried():
    assert {"float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "uint64", "complex128", "bool"} <= {*NAMES}


def some(name, shape, seed, odd):
    """A tensor of any bits; ``odd``: also NaN and infinity."""
    count = int(np.prod(shape)) * DTYPES[name].bits // 8
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if name == "bool":
        raw &= 1
    tensor = torch.from_numpy(raw).view(getattr(torch, name)).reshape(shape)
    if not odd and DTYPES[name].kind.value in ("float", "complex") and DTYPES[name].bits >= 16:
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)
    return tensor


@st.composite
def cut(draw):
    """A shape and a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=3)))
    if draw(st.booleans()) and shape:
        shape = (*shape[:-1], shape[-1] * draw(st.integers(1, 120)))
    start = tuple(draw(st.integers(0, extent)) for extent in shape)
    stop = tuple(draw(st.integers(low, extent)) for low, extent in zip(start, shape, strict=True))
    return shape, Box(start, stop)


def same(measured, expected):
    for name in EXACT:
        assert measured[0][name] == expected[0][name], name
    assert measured[0]["sum_squares"] == pytest.approx(expected[0]["sum_squares"], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(cut=cut(), seed=st.integers(0, 1 << 30), odd=st.booleans(), part=st.sampled_from([2048, 1 << 20]))
def test_numpy_numba_and_torch_agree(name, cut, seed, odd, part):
    shape, box = cut
    whole = some(name, shape, seed, odd)
    local = whole[tuple(map(slice, box.start, box.stop))]
    dtype = dtype_of(whole)
    flat = local.reshape(-1).contiguous()
    buffer = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
    expected = measured_on_cpu(NumpyKernels(), buffer, dtype, shape, box)
    if name in COMPILED:
        same(measured_on_cpu(CompiledKernels(), buffer, dtype, shape, box), expected)
    original, torch_digest.PART = torch_digest.PART, part
    try:
        same(torch_digest.measured_on_device(flat, dtype, shape, box), expected)
    finally:
        torch_digest.PART = original
    original, torch_digest.COPY_BYTES = torch_digest.COPY_BYTES, part
    try:
        same(torch_digest.measure(NumpyKernels(), local, dtype, shape, box), expected)
    finally:
        torch_digest.COPY_BYTES = original


def test_parts_of_a_tensor_add_up():
    whole = some("bfloat16", (7, 501), 5, odd=False)
    total = torch_digest.measure(NumpyKernels(), whole, DTYPES["bfloat16"], (7, 501), Box((0, 0), (7, 501)))
    cuts = [Box((0, 0), (7, 200)), Box((0, 200), (3, 501)), Box((3, 200), (7, 501))]
    parts = [
        torch_digest.measure(
            NumpyKernels(), whole[tuple(map(slice, box.start, box.stop))], DTYPES["bfloat16"], (7, 501), box
        )
        for box in cuts
    ]
    for lane in ("lane0", "lane1"):
        assert sum(int(part[0][lane]) for part in parts) % 2**64 == int(total[0][lane])


def test_a_conjugated_view_is_what_it_means():
    values = torch.randn(5, 3, dtype=torch.complex64)
    region, dtype = Box((0, 0), (3, 5)), DTYPES["complex64"]
    lazy = torch_digest.measure(NumpyKernels(), values.conj().T, dtype, (3, 5), region)
    same(lazy, torch_digest.measure(NumpyKernels(), values.conj().T.resolve_conj().clone(), dtype, (3, 5), region))


def test_temporaries_stay_below_64_mib():
    """What is alive at once on a device, as torch counts it."""
    assert 7 * 8 * torch_digest.PART <= 64 << 20
