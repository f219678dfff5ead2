import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.adapters.flat_partitions import CutParameters, FlatGroup, Slice, cut_anew, length_of, place_slice
from auditor.model.mesh import Coordinate, Mesh, Replicate, Shard, local_box
from auditor.model.region import Box, FlatRange


@st.composite
def models(draw):
    """Parameters by name, how each lies on the tensor-parallel axis, and the two degrees."""
    tp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    parameters = {}
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
        how = draw(st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))]))
        if isinstance(how, Shard):
            shape[how.dim] *= tp
        parameters[f"p{number}"] = (tuple(shape), how)
    return parameters, tp, dp


def local_part(whole, how, tp, rank):
    return np.split(whole, tp, axis=how.dim)[rank] if isinstance(how, Shard) else whole


def partitions_of(locals_, dp):
    """Flattened, padded and cut as the optimizer does it; padding is -1."""
    flat = np.concatenate([part.reshape(-1) for part in locals_])
    unit = 2 * dp
    padded = np.full(-(-len(flat) // unit) * unit, -1)
    padded[: len(flat)] = flat
    return np.split(padded, dp)


def put(target, seen, region, values):
    """Write ``values`` where ``region`` lies in ``target``, and count."""
    if isinstance(region, FlatRange):
        target.reshape(-1)[region.start : region.stop] = values
        seen.reshape(-1)[region.start : region.stop] += 1
    else:
        where = tuple(map(slice, region.start, region.stop))
        target[where] = values.reshape(region.shape)
        seen[where] += 1


@given(models())
def test_reassembled_partitions_are_the_original_parameters(case):
    parameters, tp, dp = case
    total = sum(math.prod(shape) for shape, _ in parameters.values())
    numbers = iter(np.split(np.arange(total), np.cumsum([math.prod(shape) for shape, _ in parameters.values()])))
    wholes = {name: next(numbers).reshape(shape) for name, (shape, _) in parameters.items()}
    found = {name: np.full_like(whole, -7) for name, whole in wholes.items()}
    counts = {name: np.zeros_like(whole) for name, whole in wholes.items()}
    for rank in range(tp):
        local = {name: local_part(wholes[name], how, tp, rank) for name, (_, how) in parameters.items()}
        group = FlatGroup({name: part.shape for name, part in local.items()})
        partitions = partitions_of(local.values(), dp)
        assert group.partition_length(dp) == len(partitions[0])
        for number, stored in enumerate(partitions):
            covered = 0
            for piece in group.slices(number, len(stored)):
                covered += piece.stop - piece.start
                if not piece.name:
                    assert (stored[piece.at : piece.at + piece.stop - piece.start] == -1).all()
                    continue
                shape, how = parameters[piece.name]
                box = local_box(local[piece.name].shape, {"tp": how}, Mesh((("tp", tp),)), Coordinate.of(tp=rank))
                for region, at in place_slice(piece, box, shape):
                    put(found[piece.name], counts[piece.name], region, stored[at : at + region.num_elements])
            assert covered == len(stored)
    for name, (_, how) in parameters.items():
        assert (found[name] == wholes[name]).all()
        assert (counts[name] == (tp if isinstance(how, Replicate) else 1)).all()


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 20))
def test_slices_of_any_length_follow_each_other_without_gaps(counts, length):
    """Also of members without elements, and of lengths that the group's own rule would not give."""
    group = FlatGroup({f"p{number}": (count,) for number, count in enumerate(counts)})
    layout = [(name, at) for name, (count,) in group.shapes.items() for at in range(count)]
    num_partitions = -(-max(len(layout), 1) // length) + 1
    layout += [("", at) for at in range(num_partitions * length - len(layout))]
    found = []
    for partition in range(num_partitions):
        expected_at = 0
        for piece in group.slices(partition, length):
            assert piece.at == expected_at
            assert piece.stop > piece.start
            expected_at += piece.stop - piece.start
            found.extend((piece.name, at) for at in range(piece.start, piece.stop))
        assert expected_at == length
    assert found == layout


@given(st.lists(st.integers(0, 1000), max_size=5), st.integers(1, 64))
def test_partitions_are_even_in_length_and_hold_all_with_less_than_a_unit_of_padding(counts, dp):
    group = FlatGroup({f"p{number}": (count,) for number, count in enumerate(counts)})
    length = group.partition_length(dp)
    assert group.num_elements == sum(counts)
    assert length % 2 == 0
    assert 0 <= length * dp - sum(counts) < 2 * dp


def test_the_picture():
    group = FlatGroup({"a": (5,), "b": (2, 1), "c": (8,)})
    assert group.partition_length(3) == 6
    assert [list(group.slices(partition, 6)) for partition in range(3)] == [
        [Slice("a", 0, 5, 0), Slice("b", 0, 1, 5)],
        [Slice("b", 1, 2, 0), Slice("c", 0, 5, 1)],
        [Slice("c", 5, 8, 0), Slice("", 0, 3, 3)],
    ]


def test_padding_that_fills_several_partitions_is_counted_through():
    group = FlatGroup({"a": (1,)})
    assert [list(group.slices(partition, 2)) for partition in range(3)] == [
        [Slice("a", 0, 1, 0), Slice("", 0, 1, 1)], [Slice("", 1, 3, 0)], [Slice("", 3, 5, 0)],
    ]  # fmt: skip


def test_no_members():
    group = FlatGroup({})
    assert (group.num_elements, group.partition_length(4), list(group.slices(0, 0))) == (0, 0, [])


@pytest.mark.parametrize("box", [Box((0, 0), (4, 6)), Box((8, 0), (12, 6))])
def test_whole_rows_stay_one_flat_range(box):
    placed = list(place_slice(Slice("w", 3, 20, 100), box, (16, 6)))
    assert placed == [(FlatRange(6 * box.start[0] + 3, 6 * box.start[0] + 20), 100)]


def test_columns_become_boxes_that_follow_each_other():
    placed = list(place_slice(Slice("w", 1, 8, 50), Box((0, 3), (4, 6)), (4, 6)))
    assert placed == [(Box((0, 4), (1, 6)), 50), (Box((1, 3), (2, 6)), 52), (Box((2, 3), (3, 5)), 55)]


def test_a_scalar_is_a_flat_range_of_one():
    assert list(place_slice(Slice("s", 0, 1, 9), Box((), ()), ())) == [(FlatRange(0, 1), 9)]


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6)


def laid_out(parts):
    """Every rank's buffer as (name, element) in the order of its slices, which follow each other without gaps."""
    found = []
    for slices in parts:
        at, elements = 0, []
        for piece in slices:
            assert piece.at == at
            at += piece.stop - piece.start
            elements += [(piece.name, number) for number in range(piece.start, piece.stop)]
        assert at == length_of(slices)
        found.append(elements)
    return found


@given(shapes, st.integers(1, 5))
def test_parameters_that_are_cut_one_by_one_are_put_together_again(members, ranks):
    """Parts of one parameter are equally long on all ranks, so that they lie at the same place in every buffer."""
    group = CutParameters({f"p{number}": shape for number, shape in enumerate(members)})
    buffers = laid_out([group.partition(rank, ranks) for rank in range(ranks)])
    assert len(set(map(len, buffers))) == 1
    held = sorted((name, at) for buffer in buffers for name, at in buffer if name)
    assert held == sorted((name, at) for name, shape in group.shapes.items() for at in range(math.prod(shape)))
    for buffer in buffers:
        starts = {}
        for place, (name, at) in enumerate(buffer):
            starts.setdefault(name, place - at)
            assert not name or starts[name] == place - at


@given(shapes, st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(1, 4))
def test_gaps_after_parameters_are_padding(members, gaps, ranks):
    names = {f"p{number}": shape for number, shape in enumerate(members)}
    group = FlatGroup(names, gaps[: len(members)])
    whole = [
        element for buffer in laid_out([group.partition(rank, ranks) for rank in range(ranks)]) for element in buffer
    ]
    expected = []
    for (name, shape), gap in zip(names.items(), gaps, strict=False):
        expected += [(name, at) for at in range(math.prod(shape))] + [("", at) for at in range(gap)]
    assert whole[: len(expected)] == expected
    assert all(name == "" for name, _ in whole[len(expected) :])


@given(shapes, st.integers(1, 4), st.data())
def test_buffers_that_are_cut_anew_hold_the_same(members, ranks, data):
    """Sub-groups of other lengths than the recorded groups: what lies end to end stays so."""
    half = len(members) // 2
    groups = [CutParameters({f"{at}.{n}": shape for n, shape in enumerate(part)})
              for at, part in enumerate((members[:half], members[half:]))]  # fmt: skip
    parts = [group.partition(0, ranks) for group in groups]
    total = sum(map(length_of, parts))
    border = data.draw(st.integers(0, total))
    anew = cut_anew(parts, [border, total - border])
    assert [*map(length_of, anew)] == [border, total - border]
    assert [*chain(*laid_out(anew))] == [*chain(*laid_out(parts))]
