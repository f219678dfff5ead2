"""The compiled sweep against reading in Python and measuring with numpy."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.model.dtype import DTYPES
from auditor.model.pairing import Pairing, PairKind
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import Rows, Runs, Side, Stream, empty_rows, empty_tallies
from auditor.observe.numpy_kernels import NumpyKernels
from auditor.observe.placing import Cell, Part
from auditor.observe.placing import Side as CellSide
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.local import LocalStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.store import descriptor_of
from auditor.storage.throttled import ThrottledStore

pytest.importorskip("numba")
NUMPY, NUMBA = NumpyKernels(), choose(0, "numba")
WEIGHT, MASTER = DTYPES["bfloat16"], DTYPES["float32"]
PAIRS = ((PairKind.CAST, 0, 1), (PairKind.BOUND, 2, 3), (PairKind.EQUAL, 1, 2))
AT = np.zeros(1, np.int64)


def state(count, seed):
    """Weight, master and moments; some elements are no numbers, some weights not their master rounded."""
    rng = np.random.default_rng(seed)
    master = rng.standard_normal(count).astype(np.float32)
    first = master * np.float32(0.1)
    second = np.abs(master) * np.float32(0.01)
    weight = (master.view(np.uint32) >> 16).astype(np.uint16)
    master[rng.random(count) < 0.01] = np.nan
    return [weight.view(np.uint8), *(array.view(np.uint8) for array in (master, first, second))]


def streams(descriptors, block, offset, dtypes=(WEIGHT, MASTER, MASTER, MASTER)):
    return [
        Stream(descriptor, offset, dtype, row, np.zeros(block * np.dtype(dtype.carrier).itemsize, np.uint8))
        for row, (descriptor, dtype) in enumerate(zip(descriptors, dtypes, strict=True))
    ]


def in_python(buffers, count, where):
    """What numpy measures of the first elements."""
    rows, tallies = empty_rows(len(buffers)), empty_tallies(len(PAIRS))
    begin = np.arange(0, count, where.length)
    length = np.minimum(where.length, count - begin)
    first = where.start + np.arange(len(begin)) * where.step
    dtypes = (WEIGHT, MASTER, MASTER, MASTER)
    for row, (buffer, dtype) in enumerate(zip(buffers, dtypes, strict=True)):
        at = begin * np.dtype(dtype.carrier).itemsize
        NUMPY.measure(buffer, dtype, Runs(at, length, first, np.full(len(begin), row)), rows)
    for number, (kind, left, right) in enumerate(PAIRS):
        one, other = (Side(buffers[n], dtypes[n], begin * (2 if n == 0 else 4)) for n in (left, right))
        pairing = Pairing(kind, left, right, 7.3, 1e-35)
        NUMPY.compare(pairing, one, other, length, first, tallies[number : number + 1])
    return rows, tallies


def pairs_of(tallies):
    return [
        (Pairing(kind, left, right, 7.3, 1e-35), left, right, tallies[n : n + 1])
        for n, (kind, left, right) in enumerate(PAIRS)
    ]


def same(mine, theirs):
    for name in mine.dtype.names:
        if name in ("sum_squares", "largest"):
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-12)
        else:
            assert mine[name].tolist() == theirs[name].tolist(), name


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 9000), block=st.integers(1, 4000), offset=st.integers(0, 70), start=st.integers(0, 5000),
    lacking=st.integers(0, 9000), row=st.integers(1, 9000), gap=st.integers(0, 300), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_sweep_is_what_python_reads_and_numpy_measures(
    tmp_path_factory, count, block, offset, start, lacking, row, gap, seed
):
    """Also where one file is short: whole blocks before its end are done, and nothing else."""
    where = Rows(count, start, row, row + gap)
    folder = tmp_path_factory.mktemp("sweep")
    buffers = state(count, seed)
    for number, buffer in enumerate(buffers):
        end = len(buffer) - (min(lacking, count) * 4 if number == 2 else 0)
        (folder / f"{number}").write_bytes(bytes(offset) + buffer[:end].tobytes())
    descriptors = [os.open(folder / f"{number}", os.O_RDONLY) for number in range(4)]
    rows, tallies = empty_rows(4), empty_tallies(len(PAIRS))
    try:
        done = NUMBA.sweep(streams(descriptors, block, offset), pairs_of(tallies), where, rows)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    there = max(0, count - lacking)
    assert done == (count if there == count else there // block * block)
    wanted = in_python([buffer[: done * (len(buffer) // count)] for buffer in buffers], done, where)
    same(rows, wanted[0])
    same(tallies, wanted[1])


@given(rows=st.integers(1, 5), length=st.integers(1, 6), gap=st.integers(0, 3), flat=st.booleans(), data=st.data())
def test_what_a_sweep_leaves_is_all_the_rest_in_order(rows, length, gap, flat, data):
    rows = 1 if flat else rows
    shape, steps, strides = ((length,), (1,), (1,)) if flat else ((rows, length), (length + gap, 1), (length, 1))
    side = CellSide(0, 0, 100, strides, MASTER, 4)
    cell = Cell(shape, steps, 7, (side,))
    count = data.draw(st.integers(0, rows * length))
    index = (7 + np.arange(rows)[:, None] * (length + gap) + np.arange(length)).reshape(-1)
    found = []
    for rest in cell.without(count):
        assert rest.sides[0].offset == 100 + 4 * (count + len(found))
        starts = Part(rest, (0,) * len(rest.shape), rest.shape).starts()
        found += [start + n for start in starts.tolist() for n in range(rest.shape[-1])]
    assert found == index[count:].tolist()


def test_what_has_no_compiled_comparison_is_left_to_python(tmp_path):
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("rb") as file:
        two = streams([file.fileno()] * 2, 64, 0, (DTYPES["float64"], MASTER))
        rows, tally = empty_rows(2), empty_tallies(1)
        assert NUMBA.sweep(two, [(Pairing(PairKind.CAST, 1, 0), 1, 0, tally)], Rows(100, 0, 100, 1), rows) == 0
    assert tally["num_compared"] == 0
    assert not rows["num_zero"].any()


def test_who_slows_down_or_disturbs_reading_is_not_passed_by(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    local = LocalStore(tmp_path)
    known = {}
    for store in (local, RetryingStore(local), ThrottledStore(local, 1e9), FaultyStore(local, Faults())):
        with store.open("file") as handle:
            known[type(store).__name__] = descriptor_of(handle) is not None
    assert known == {"LocalStore": True, "RetryingStore": True, "ThrottledStore": False, "FaultyStore": False}
