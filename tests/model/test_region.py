import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.model import region as region_module
from auditor.model.region import Box, FlatRange, SweepTooLarge, as_boxes, coverage, num_between, refinement, whole

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def flat_ranges_in(draw, shape):
    count = math.prod(shape)
    return FlatRange(*sorted((draw(st.integers(0, count)), draw(st.integers(0, count)))))


@st.composite
def shapes_and_regions(draw):
    shape = draw(SHAPES)
    return shape, draw(st.lists(st.one_of(boxes_in(shape), flat_ranges_in(shape)), max_size=7))


@st.composite
def guillotine(draw, box, depth=3):
    """A tiling of ``box`` by cuts that each go right through."""
    wide = [dim for dim, n in enumerate(box.shape) if n > 1]
    if not depth or not wide or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(wide))
    at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
    low = Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
    high = Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)
    return draw(guillotine(low, depth - 1)) + draw(guillotine(high, depth - 1))


@st.composite
def flat_tiling(draw, shape):
    count = math.prod(shape)
    cuts = draw(st.lists(st.integers(0, count), max_size=5))
    return [FlatRange(a, b) for a, b in pairwise(sorted([0, count, *cuts]))]


@st.composite
def tilings(draw):
    """A shape without empty dims, and regions that tile it, in any order."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    regions = draw(st.one_of(guillotine(whole(shape)), flat_tiling(shape)))
    return shape, draw(st.permutations(regions))


def covered(region, shape):
    """How often ``region`` covers each element; the count is by numpy's own indexing."""
    counts = np.zeros(shape, int)
    if isinstance(region, FlatRange):
        counts.reshape(-1)[region.start : region.stop] += 1
    else:
        counts[tuple(map(slice, region.start, region.stop))] += 1
    return counts


def covered_by_all(regions, shape):
    return sum((covered(region, shape) for region in regions), np.zeros(shape, int))


def assert_like_brute_force(regions, shape):
    counts, found = covered_by_all(regions, shape), coverage(regions, shape)
    assert found.num_elements_missing == (counts == 0).sum()
    assert found.num_elements_overlapping == (counts > 1).sum()
    assert found.out_of_bounds == ()
    assert found.exact == bool((counts == 1).all())
    for cells, wanted in ((found.gaps, counts == 0), ([cell for cell, _, _ in found.overlaps], counts > 1)):
        marked = covered_by_all(cells, shape)
        assert marked.max(initial=0) <= 1
        assert not (marked.astype(bool) & ~wanted).any()
        if len(cells) < region_module.MAX_LISTED:
            assert (marked.astype(bool) == wanted).all()
    for cell, one, other in found.overlaps:
        inside = covered(cell, shape).astype(bool)
        assert one != other
        assert (covered(regions[one], shape)[inside] == 1).all()
        assert (covered(regions[other], shape)[inside] == 1).all()


@given(shapes_and_regions())
def test_coverage_is_that_of_counting_elements(case):
    shape, regions = case
    assert_like_brute_force(regions, shape)


@given(tilings())
def test_tilings_are_exact(case):
    shape, regions = case
    found = coverage(regions, shape)
    assert found.exact
    assert (found.gaps, found.overlaps) == ((), ())


@given(tilings(), st.data())
def test_a_removed_piece_is_a_gap_of_its_size(case, data):
    shape, regions = case
    at = data.draw(st.sampled_from([i for i, region in enumerate(regions) if region.num_elements]))
    rest = [region for i, region in enumerate(regions) if i != at]
    found = coverage(rest, shape)
    assert not found.exact
    assert found.num_elements_missing == regions[at].num_elements
    assert found.num_elements_overlapping == 0
    assert_like_brute_force(rest, shape)


@given(tilings(), st.data())
def test_a_piece_given_twice_overlaps_by_its_size(case, data):
    shape, regions = case
    at = data.draw(st.sampled_from([i for i, region in enumerate(regions) if region.num_elements]))
    found = coverage([*regions, regions[at]], shape)
    assert found.num_elements_overlapping == regions[at].num_elements
    assert {(one, other) for _, one, other in found.overlaps} == {(at, len(regions))}


@given(tilings(), st.data())
def test_a_shifted_piece_is_reported(case, data):
    shape, regions = case
    movable = [(i, dim) for i, region in enumerate(regions) for dim in range(len(shape))
               if isinstance(region, Box) and region.stop[dim] < shape[dim]]  # fmt: skip
    if not movable:
        return
    at, dim = data.draw(st.sampled_from(movable))
    moved = regions[at].shifted(tuple(int(d == dim) for d in range(len(shape))))
    others = [moved if i == at else region for i, region in enumerate(regions)]
    layer = regions[at].num_elements // regions[at].shape[dim]
    found = coverage(others, shape)
    assert (found.num_elements_missing, found.num_elements_overlapping) == (layer, layer)
    assert_like_brute_force(others, shape)


@given(shapes_and_regions(), st.data())
def test_regions_that_leave_the_tensor_are_named_and_not_counted(case, data):
    shape, regions = case
    outside = data.draw(st.sampled_from([
        FlatRange(-1, 1), FlatRange(0, math.prod(shape) + 1), Box((0,) * (len(shape) + 1), (1,) * (len(shape) + 1)),
        *(Box((0,) * len(shape), tuple(n + 1 for n in shape)) for _ in shape[:1]),
        *(Box((-1,) * len(shape), (1,) * len(shape)) for _ in shape[:1]),
    ]))  # fmt: skip
    found = coverage([*regions, outside], shape)
    assert found.out_of_bounds == (len(regions),)
    assert not found.exact
    assert found.num_elements_missing == coverage(regions, shape).num_elements_missing


def test_empty_regions_are_ignored_wherever_they_lie():
    regions = [whole((4,)), FlatRange(9, 9), FlatRange(5, 2), Box((7,), (7,)), Box((3,), (1,))]
    assert coverage(regions, (4,)).exact


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
def test_a_tensor_without_elements_needs_no_piece(shape):
    assert coverage([], shape).exact
    assert coverage([whole(shape), whole(shape)], shape).exact


def test_a_scalar_is_one_element():
    assert coverage([], ()).num_elements_missing == 1
    assert coverage([Box((), ())], ()).exact
    assert coverage([FlatRange(0, 1)], ()).exact
    assert coverage([Box((), ()), FlatRange(0, 1)], ()).num_elements_overlapping == 1


def test_long_lists_are_cut_and_counted():
    found = coverage([Box((i,), (i + 1,)) for i in range(0, 200, 2)], (200,))
    assert len(found.gaps) == region_module.MAX_LISTED
    assert found.num_elements_missing == 100


# Flat ranges as boxes


@given(SHAPES, st.data())
def test_the_boxes_of_a_flat_range_are_a_partition_in_c_order(shape, data):
    flat = data.draw(flat_ranges_in(shape))
    boxes = list(flat.boxes(shape))
    positions = np.arange(math.prod(shape)).reshape(shape)
    inside = [positions[tuple(map(slice, box.start, box.stop))].reshape(-1) for box in boxes]
    found = np.concatenate(inside) if inside else np.zeros(0, int)
    assert found.tolist() == list(range(flat.start, flat.stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.num_elements for box in boxes)
    assert list(as_boxes(flat, shape)) == boxes


def test_a_flat_range_of_whole_rows_is_one_box():
    assert list(FlatRange(5, 15).boxes((4, 5))) == [Box((1, 0), (3, 5))]
    assert list(FlatRange(0, 24).boxes((2, 3, 4))) == [whole((2, 3, 4))]


# Common refinement


@st.composite
def several_tilings(draw):
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    one = st.one_of(guillotine(whole(shape)), flat_tiling(shape).map(
        lambda ranges: [box for flat in ranges for box in flat.boxes(shape)]))  # fmt: skip
    return shape, draw(st.lists(one, min_size=1, max_size=3))


def inside_of(inner, outer):
    return outer.intersection(inner) == inner


@given(several_tilings())
def test_refinement_cells_are_disjoint_and_lie_in_one_box_of_each_tiling(case):
    shape, several = case
    cells = refinement(several)
    assert (covered_by_all([cell for cell, _ in cells], shape) == 1).all()
    for cell, ids in cells:
        assert len(ids) == len(several)
        assert all(inside_of(cell, tiling[at]) for tiling, at in zip(several, ids, strict=True))
    starts = [cell.start for cell, _ in cells]
    assert starts == sorted(starts)
    # The largest cells: no two come from the same boxes.
    assert len({ids for _, ids in cells}) == len(cells)


@given(several_tilings(), st.data())
def test_refinement_leaves_out_what_a_tiling_lacks(case, data):
    shape, several = case
    which = data.draw(st.integers(0, len(several) - 1))
    lost = data.draw(st.integers(0, len(several[which]) - 1))
    partial = [[box for at, box in enumerate(tiling) if (number, at) != (which, lost)]
               for number, tiling in enumerate(several)]  # fmt: skip
    counts = covered_by_all([cell for cell, _ in refinement(partial)], shape)
    assert (counts == 1 - covered(several[which][lost], shape)).all()


def test_refinement_of_nothing_is_nothing():
    assert refinement([]) == []
    assert refinement([[], [whole((3,))]]) == []


# The sweep's cost


def grid(shape, parts):
    """A tensor of ``shape`` cut into ``parts`` along each dim."""
    borders = [[n * i // p for i in range(p + 1)] for n, p in zip(shape, parts, strict=True)]
    for cell in product(*(pairwise(line) for line in borders)):
        yield Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))


def steps_of(regions, shape):
    sweep = region_module._Sweep(shape)
    sweep.descend([(box, at) for at, region in enumerate(regions) for box in as_boxes(region, shape)], ())
    assert (sweep.num_missing, sweep.num_overlapping) == (0, 0)
    return sweep.steps


@pytest.mark.parametrize(
    ("small", "large"),
    [((1000,), (10_000,)), ((25, 40), (100, 100)), ((40, 25), (10, 1000)), ((10, 10, 10), (20, 20, 25))],
)
def test_sweep_steps_grow_linearly_with_the_boxes_of_a_grid(small, large):
    counts = [steps_of(list(grid((20_000,) * len(parts), parts)), (20_000,) * len(parts)) for parts in (small, large)]
    assert [math.prod(small), math.prod(large)] == [1000, 10_000]
    assert counts[1] <= 12 * counts[0]
    assert counts[1] <= 6 * 10_000


@pytest.mark.parametrize("num_ranges", [1000, 10_000])
def test_sweep_steps_of_flat_partitions_are_a_few_a_partition(num_ranges):
    shape = (997, 1009)
    borders = [math.prod(shape) * i // num_ranges for i in range(num_ranges + 1)]
    assert steps_of([FlatRange(a, b) for a, b in pairwise(borders)], shape) <= 12 * num_ranges


def test_a_sweep_beyond_its_budget_says_so(monkeypatch):
    monkeypatch.setattr(region_module, "SWEEP_BUDGET", 1000)
    nested = [Box((i, 0), (200 - i, 200)) for i in range(100)]
    with pytest.raises(SweepTooLarge):
        coverage(nested, (200, 200))
    assert coverage(list(grid((200, 200), (10, 10))), (200, 200)).exact


@given(shapes_and_regions())
def test_elements_between_two_of_a_region_are_counted_by_brute_force(case):
    shape, regions = case
    for region in filter(lambda region: region.num_elements, regions):
        held = np.zeros(shape, bool)
        for box in as_boxes(region, shape):
            held[tuple(map(slice, box.start, box.stop))] = True
        places = np.flatnonzero(held)
        first, last = int(places[len(places) // 3]), int(places[-1])
        assert num_between(region, shape, first, last) == len(places) - len(places) // 3
