import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.model.catalog import File, Role, c_strides
from auditor.model.dtype import DTYPES, Kind
from auditor.model.mesh import NO_MESH, Coordinate
from auditor.model.observation import replica_groups
from auditor.model.region import Box, FlatRange, whole
from auditor.observe import difference as difference_module
from auditor.observe.decode import to_float64
from auditor.observe.difference import Budget, measure_differences
from auditor.observe.one_pass import observe
from auditor.observe.shares import Everything
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.memory import MemoryStore

FLOAT32 = DTYPES["float32"]
TP = [Coordinate.of(tp=rank) for rank in range(5)]


def store_piece(content, bits, shape, region, order=None):
    """Append ``region`` of ``bits`` to ``content``; where it begins, and its strides."""
    at = len(content)
    if isinstance(region, FlatRange):
        content.extend(bits.reshape(math.prod(shape), -1)[region.start : region.stop].tobytes())
        return at, None
    part = bits[tuple(map(slice, region.start, region.stop))]
    order = tuple(range(len(shape))) if order is None else order
    content.extend(part.transpose((*order, *range(len(shape), part.ndim))).tobytes())
    strides = dict(zip(order, c_strides([region.shape[dim] for dim in order]), strict=True))
    return at, [strides[dim] for dim in range(len(shape))]


def replicas(*tensors):
    """Store and Catalog of tensors ``(dtype, shape, [(bits, regions, order), ...])``, one file a replica."""
    builder, files = CatalogBuilder(), {}
    for number, (dtype, shape, copies) in enumerate(tensors):
        places = TP[: len(copies)]
        tensor = builder.tensor(
            f"t{number}", Role.PARAMETER, dtype, shape, number, replicas=places, replica_axes=("tp",)
        )
        for rank, (bits, regions, order) in enumerate(copies):
            content = files.setdefault(f"rank{rank}", bytearray())
            for region in regions:
                at, strides = store_piece(content, bits, shape, region, order)
                builder.piece(tensor, rank, at, region, places[rank], strides=strides)
    store = MemoryStore({name: bytes(content) for name, content in files.items()})
    for name, content in files.items():
        builder.file(File(name, len(content), store.stat(name).identity))
    return store, builder.build(0, "", "made-up", NO_MESH, {}, ())


def measured(store, catalog, **budget):
    with ThreadPoolExecutor(1) as pool:
        seen = observe(store, catalog, np.arange(len(catalog.pieces)), Everything(pool))
    return measure_differences(store, catalog, seen, Budget(**budget))


def whole_copies(dtype, *arrays):
    """One tensor whose replicas are these arrays, each stored as one piece."""
    return dtype, arrays[0].shape, [(bits, [whole(bits.shape)], None) for bits in arrays]


def the_only(store, catalog):
    seen = measured(store, catalog)
    ((found,),) = seen.differences.values()
    return found


def of_values(dtype, one, other):
    """The difference of two replicas with these numbers."""
    bits = [np.array(values, dtype.name).view(dtype.carrier) for values in (one, other)]
    return the_only(*replicas(whole_copies(dtype, *bits)))


# Against numpy, whatever the cut


@st.composite
def tilings(draw, shape):
    """Regions that tile ``shape``: flat ranges, or boxes cut along one dim, in any order; and a memory order."""
    if not shape or draw(st.booleans()):
        cuts = draw(st.lists(st.integers(0, math.prod(shape)), max_size=3))
        regions = [FlatRange(low, high) for low, high in pairwise(sorted([0, math.prod(shape), *cuts]))]
    else:
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = draw(st.lists(st.integers(0, shape[dim]), max_size=2))
        full = whole(shape)
        regions = [Box((*full.start[:dim], low, *full.start[dim + 1 :]), (*shape[:dim], high, *shape[dim + 1 :]))
                   for low, high in pairwise(sorted([0, shape[dim], *cuts]))]  # fmt: skip
    return draw(st.permutations(regions)), tuple(draw(st.permutations(range(len(shape)))))


@st.composite
def pairs(draw):
    """Two replicas that differ in some elements, each cut in its own way."""
    dtype = DTYPES[draw(st.sampled_from(["float32", "bfloat16", "float64", "float16", "int32", "uint8", "complex64"]))]
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    seed = draw(st.integers(0, 2**32))
    halves = (2,) if dtype.kind is Kind.COMPLEX else ()
    raw = np.random.default_rng(seed).integers(0, 0x40, math.prod((*shape, *halves)) * np.dtype(dtype.carrier).itemsize)
    one = raw.astype("u1").view(dtype.carrier).reshape((*shape, *halves))
    other = one.copy()
    flat = other.reshape(-1)
    for at in draw(st.lists(st.integers(0, flat.size - 1), min_size=1, max_size=5)):
        flat[at] ^= flat.dtype.type(1 << draw(st.integers(0, min(flat.itemsize * 8 - 3, 40))))
    return dtype, shape, one, other, draw(tilings(shape)), draw(tilings(shape))


def expected(dtype, shape, one, other):
    """Counts and sizes by numpy alone; ulps by ordered integers, as all numbers here are positive."""
    words = (one != other).reshape(math.prod(shape), -1)
    elements = words.any(axis=1)
    a, b = to_float64(one, dtype).reshape(-1), to_float64(other, dtype).reshape(-1)
    largest, gap = max(a.max(), b.max()), np.abs(a - b).max()
    ulps = -1
    if dtype.kind is Kind.FLOAT:
        ulps = max(abs(int(x) - int(y)) for x, y in zip(one.reshape(-1), other.reshape(-1), strict=True))
    return {
        "num_elements_differ": int(elements.sum()), "num_elements_compared": math.prod(shape),
        "num_bits_differ": sum(int(x ^ y).bit_count() for x, y in zip(one.flat, other.flat, strict=True)),
        "max_abs_difference": gap, "relative_difference": gap / largest if largest else 0.0, "max_ulps": ulps,
        "num_equal_as_numbers": 0,
        "first_index": tuple(map(int, np.unravel_index(np.argmax(elements), shape))) if shape else (),
    }  # fmt: skip


@given(pairs(), st.sampled_from([32, 64, 1 << 20]))
def test_numbers_are_numpys_however_the_replicas_are_cut(case, buffer_bytes):
    dtype, shape, one, other, cut_one, cut_other = case
    if (one == other).all():
        return
    made = replicas((dtype, shape, [(one, *cut_one), (other, *cut_other)]))
    with mock.patch.object(difference_module, "BUFFER_BYTES", buffer_bytes):
        found = the_only(*made)
    assert {name: getattr(found, name) for name in expected(dtype, shape, one, other)} == expected(
        dtype, shape, one, other
    )
    assert (found.coordinate, found.reference, found.coordinates) == (TP[1], TP[0], (TP[1],))


@given(pairs())
def test_replicas_that_are_equal_have_no_difference_however_they_are_cut(case):
    dtype, shape, one, _, cut_one, cut_other = case
    seen = measured(*replicas((dtype, shape, [(one, *cut_one), (one, *cut_other)])))
    assert seen.differences == {}
    assert seen.num_bytes_reread == 0


def test_large_replicas_stored_row_by_row_and_column_by_column():
    one = np.random.default_rng(0).random((700, 900), np.float32).view("<u4")
    other = one.copy()
    other[[3, 500, 699], [899, 0, 7]] ^= np.uint32(1)
    found = the_only(*replicas((FLOAT32, one.shape, [
        (one, [Box((0, 0), (350, 900)), Box((350, 0), (700, 900))], None),
        (other, [FlatRange(0, 100_001), FlatRange(100_001, 630_000)], None),
        (one, [Box((0, 0), (700, 450)), Box((0, 450), (700, 900))], (1, 0)),
    ])))  # fmt: skip
    assert (found.num_elements_differ, found.num_elements_compared, found.max_ulps) == (3, 630_000, 1)
    assert found.first_index == (3, 899)
    assert (found.coordinate, found.reference) == (TP[1], TP[0])


# Numbers of every kind


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_zeros_of_both_signs_are_equal_as_numbers(name):
    found = of_values(DTYPES[name], [0.0, -0.0, 1.0], [-0.0, 0.0, 1.0])
    assert (found.num_elements_differ, found.num_equal_as_numbers) == (2, 2)
    assert (found.max_abs_difference, found.relative_difference, found.max_ulps) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("name", "one", "other"), [("bfloat16", 0x7FC0, 0xFFC5), ("float32", 0x7FC00000, 0x7FC00001)])
def test_nans_with_another_payload_are_equal_as_numbers(name, one, other):
    carrier = DTYPES[name].carrier
    found = the_only(*replicas(whole_copies(DTYPES[name], np.array([one, 0], carrier), np.array([other, 0], carrier))))
    assert (found.num_elements_differ, found.num_equal_as_numbers, found.max_abs_difference) == (1, 1, 0.0)


def test_a_nan_on_one_side_differs_without_bound():
    found = of_values(FLOAT32, [1.0, 2.0], [math.nan, 2.5])
    assert (found.num_elements_differ, found.num_equal_as_numbers) == (2, 0)
    assert (found.max_abs_difference, found.relative_difference) == (math.inf, math.inf)


def test_infinities_differ_without_bound():
    found = of_values(FLOAT32, [math.inf, math.inf, 1.0], [-math.inf, 1.0, 1.0])
    assert (found.num_elements_differ, found.max_abs_difference, found.num_equal_as_numbers) == (2, math.inf, 0)


def test_ulps_are_counted_across_zero_and_across_powers_of_two():
    assert of_values(FLOAT32, [1.0], [np.nextafter(np.float32(1), np.float32(2))]).max_ulps == 1
    assert of_values(FLOAT32, [1.0], [np.nextafter(np.float32(1), np.float32(0))]).max_ulps == 1
    tiny = np.finfo(np.float32).smallest_subnormal
    assert of_values(FLOAT32, [-tiny], [tiny]).max_ulps == 2
    assert of_values(DTYPES["float64"], [-1.0], [1.0]).max_ulps == 2 * 0x3FF0000000000000


def test_one_bit_of_a_bfloat16():
    one = np.array([[0x3F80, 0x4000], [0x0000, 0xBF80]], "<u2")
    other = one.copy()
    other[1, 1] ^= np.uint16(1)
    found = the_only(*replicas(whole_copies(DTYPES["bfloat16"], one, other)))
    assert (found.num_bits_differ, found.max_ulps, found.first_index) == (1, 1, (1, 1))
    assert found.max_abs_difference == 2.0**-7
    assert found.relative_difference == 2.0**-8


@pytest.mark.parametrize("name", ["int8", "int32", "int64", "uint64", "bool"])
def test_integers_have_sizes_and_no_ulps(name):
    found = of_values(DTYPES[name], [1, 0, 1], [1, 1, 0])
    assert (found.num_elements_differ, found.max_abs_difference, found.max_ulps) == (2, 1.0, -1)


@pytest.mark.parametrize("name", ["int64", "uint64"])
def test_wide_integers_that_differ_are_not_equal_as_numbers(name):
    assert of_values(DTYPES[name], [2**60], [2**60 + 1]).num_equal_as_numbers == 0


def test_differences_beyond_float64_are_not_small():
    assert of_values(DTYPES["float64"], [1.7e308], [-1.7e308]).max_abs_difference > 1e308


def test_complex_elements_count_once():
    one = np.array([1 + 2j, 3 - 4j, 0j], "<c8").view("<u4").reshape(3, 2)
    other = np.array([1 + 2j, 3.5 - 4.25j, 0j], "<c8").view("<u4").reshape(3, 2)
    found = the_only(*replicas((DTYPES["complex64"], (3,), [(bits, [whole((3,))], None) for bits in (one, other)])))
    assert (found.num_elements_differ, found.num_elements_compared, found.first_index) == (1, 3, (1,))
    assert (found.max_abs_difference, found.max_ulps) == (0.5, -1)


def test_scalars():
    found = of_values(FLOAT32, 1.0, 3.0)
    assert (found.num_elements_differ, found.num_elements_compared, found.first_index) == (1, 1, ())
    assert found.max_abs_difference == 2.0


# Which replica is held against which


def of_ranks(*numbers):
    """One element a rank, with these numbers; what was found, by the ranks that are held against the reference."""
    arrays = [np.array([number], "<f4").view("<u4") for number in numbers]
    (found,) = measured(*replicas(whole_copies(FLOAT32, *arrays))).differences.values()
    return [(item.reference, item.coordinates, item.max_abs_difference) for item in found]


def test_the_majority_is_the_reference():
    assert of_ranks(7.0, 1.0, 1.0, 1.0) == [(TP[1], (TP[0],), 6.0)]
    assert of_ranks(7.0, 1.0, 1.0, 7.0, 1.0) == [(TP[1], (TP[0], TP[3]), 6.0)]


def test_the_lowest_coordinate_is_the_reference_where_there_is_no_majority():
    assert of_ranks(1.0, 3.0) == [(TP[0], (TP[1],), 2.0)]
    assert of_ranks(1.0, 3.0, 3.0, 1.0) == [(TP[0], (TP[1], TP[2]), 2.0)]
    # The largest class of five is no majority.
    assert of_ranks(1.0, 3.0, 3.0, 5.0, 6.0) == [
        (TP[0], (TP[1], TP[2]), 2.0),
        (TP[0], (TP[3],), 4.0),
        (TP[0], (TP[4],), 5.0),
    ]


def test_classes_are_those_of_the_digests():
    one, other = np.zeros(4, "<u4"), np.array([0, 0, 0, 1], "<u4")
    store, catalog = replicas(whole_copies(FLOAT32, one, other, one))
    (group,) = replica_groups(catalog, measured(store, catalog))
    assert (group.classes, group.majority, group.incomplete) == (((0, 2), (1,)), (0, 2), ())


# Budget and failures


def several(count):
    copies = [np.full(8, 1.0, "<f4").view("<u4"), np.full(8, 2.0, "<f4").view("<u4")]
    return replicas(*[whole_copies(FLOAT32, *copies) for _ in range(count)])


def test_everything_is_measured_within_the_budget():
    seen = measured(*several(3))
    assert sorted(seen.differences) == [0, 1, 2]
    assert seen.num_bytes_reread == 3 * 2 * 32


@pytest.mark.parametrize(
    ("num_bytes", "measured_tensors"), [(0, []), (63, []), (64, [0]), (128, [0, 1]), (191, [0, 1])]
)
def test_the_budget_of_bytes(num_bytes, measured_tensors):
    seen = measured(*several(4), num_bytes=num_bytes)
    assert sorted(seen.differences) == measured_tensors
    assert seen.num_bytes_reread <= num_bytes


def test_what_was_measured_before_is_kept():
    store, catalog = several(2)
    seen = measured(store, catalog)
    assert seen.num_bytes_read == 2 * 2 * 32
    assert len(seen.pieces) == 4


def test_storage_that_fails_leaves_the_difference_unmeasured():
    store, catalog = several(1)
    with ThreadPoolExecutor(1) as pool:
        seen = observe(store, catalog, np.arange(len(catalog.pieces)), Everything(pool))
    faulty = FaultyStore(store, Faults(denied="rank1"))
    again = measure_differences(faulty, catalog, seen)
    assert (again.differences, again.num_bytes_reread) == ({}, 0)
    assert len(replica_groups(catalog, again)[0].classes) == 2
