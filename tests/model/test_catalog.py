import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.model.catalog import File, Role, c_strides, placed_in_file
from auditor.model.dtype import DTYPES, FLOAT32, UINT8
from auditor.model.mesh import EVERYWHERE, NO_MESH, Coordinate, Mesh
from auditor.model.pieces_builder import PiecesBuilder
from auditor.model.region import Box, FlatRange, whole

SMALL = st.integers(0, 1 << 40)
COORDINATES = st.sampled_from([EVERYWHERE, Coordinate.of(tp=0), Coordinate.of(tp=1), Coordinate.of(pp=3, dp=2, tp=1)])


@st.composite
def rows(draw):
    """Arguments of one piece."""
    if draw(st.booleans()):
        start = draw(SMALL)
        region, num_dims = FlatRange(start, start + draw(SMALL)), 1
    else:
        num_dims = draw(st.integers(0, 4))
        start = tuple(draw(SMALL) for _ in range(num_dims))
        region = Box(start, tuple(a + draw(st.integers(0, 1 << 15)) for a in start))
    # The elements of a flat range lie without gaps.
    boxed = st.none() | st.tuples(*[st.integers(1, 1 << 30)] * num_dims)
    strides = None if isinstance(region, FlatRange) else draw(boxed)
    return {
        "tensor": draw(st.integers(0, 5)), "file": draw(st.integers(0, 1 << 20)), "offset": draw(SMALL),
        "region": region, "coordinate": draw(COORDINATES), "replica": draw(st.integers(0, 1 << 20)),
        "key": draw(st.sampled_from(["", "a.weight", "b.bias"])), "strides": strides,
    }  # fmt: skip


def table(given_rows):
    builder = PiecesBuilder()
    for row in given_rows:
        builder.add(**row)
    return builder.build()


def shape_of(region):
    return (region.num_elements,) if isinstance(region, FlatRange) else region.shape


@given(st.lists(rows(), max_size=8))
def test_what_is_added_comes_back(given_rows):
    pieces = table(given_rows)
    assert len(pieces) == len(given_rows)
    for index, (piece, row) in enumerate(zip(pieces, given_rows, strict=True)):
        for name in ("tensor", "file", "offset", "region", "coordinate", "replica", "key"):
            assert getattr(piece, name) == row[name]
        assert piece.index == index
        assert piece.shape == shape_of(row["region"])
        assert piece.strides == (c_strides(piece.shape) if row["strides"] is None else row["strides"])
        assert pieces.region(index) == row["region"]


@given(st.lists(rows(), max_size=8))
def test_element_counts_are_those_of_the_regions(given_rows):
    counts = table(given_rows).num_elements()
    assert counts.tolist() == [row["region"].num_elements for row in given_rows]


@given(st.lists(rows(), max_size=8), st.lists(st.integers(0, 7), unique=True))
def test_only_keeps_the_pieces_of_chosen_tensors_and_numbers_them_anew(given_rows, chosen):
    kept = table(given_rows).only(chosen)
    expected = [(chosen.index(row["tensor"]), row["region"], row["offset"], row["key"])
                for row in given_rows if row["tensor"] in chosen]  # fmt: skip
    assert [(piece.tensor, piece.region, piece.offset, piece.key) for piece in kept] == expected


def test_strides_in_c_order_take_no_room():
    plain, stated = PiecesBuilder(), PiecesBuilder()
    box = Box((2, 3), (4, 8))
    plain.add(0, 0, 0, box, EVERYWHERE)
    stated.add(0, 0, 0, box, EVERYWHERE, strides=(5, 1))
    assert len(plain.build().pool) == len(stated.build().pool) == 4


def test_c_strides():
    assert c_strides((2, 3, 4)) == (12, 4, 1)
    assert c_strides(()) == ()
    assert c_strides((3, 0)) == (1, 1)


# Where a box lies in the file


@st.composite
def stored_boxes(draw):
    """A tensor's shape, a box of it that is stored in some order of dims with gaps, and a box inside that one."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    ends = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(1, n)))) for n in shape]
    outer = Box(tuple(a for a, _ in ends), tuple(max(b, a + 1) for a, b in ends))
    strides, step = [0] * len(shape), draw(st.integers(1, 3))
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step *= outer.shape[dim] + draw(st.integers(0, 2))
    inner_start = tuple(draw(st.integers(a, b - 1)) for a, b in zip(outer.start, outer.stop, strict=True))
    inner_stop = tuple(draw(st.integers(a + 1, b)) for a, b in zip(inner_start, outer.stop, strict=True))
    return shape, outer, tuple(strides), Box(inner_start, inner_stop)


def file_indices(offset, strides, shape):
    grids = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), int)
    return (offset + np.array(strides, int) @ grids).astype(int)


@given(stored_boxes())
def test_a_box_inside_a_stored_box_is_found_in_the_file(case):
    shape, outer, strides, inner = case
    tensor = np.arange(math.prod(shape)).reshape(shape)
    places = file_indices(0, strides, outer.shape)
    file = np.full(places.max() + 1, -1)
    file[places] = tensor[tuple(map(slice, outer.start, outer.stop))].reshape(-1)
    builder = PiecesBuilder()
    builder.add(0, 0, 0, outer, EVERYWHERE, strides=strides)
    offset, inner_strides = placed_in_file(builder.build()[0], shape, inner)
    found = file[file_indices(offset, inner_strides, inner.shape)]
    assert found.tolist() == tensor[tuple(map(slice, inner.start, inner.stop))].reshape(-1).tolist()


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
def test_a_box_inside_a_flat_range_is_found_in_the_file(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count - 1))
    flat = FlatRange(start, data.draw(st.integers(start + 1, count)))
    builder = PiecesBuilder()
    builder.add(0, 0, 0, flat, EVERYWHERE)
    piece, tensor = builder.build()[0], np.arange(count).reshape(shape)
    for box in flat.boxes(shape):
        offset, strides = placed_in_file(piece, shape, box)
        found = np.arange(start, flat.stop)[file_indices(offset, strides, box.shape)]
        assert found.tolist() == tensor[tuple(map(slice, box.start, box.stop))].reshape(-1).tolist()


# The Catalog


def small_catalog():
    builder = CatalogBuilder()
    first, second = builder.file(File("step/a.bin", 64)), builder.file(File("step/b.bin", 64))
    tp = [Coordinate.of(tp=i) for i in range(2)]
    norm = builder.tensor("norm", Role.PARAMETER, FLOAT32, (4,), 2, replicas=tp, replica_axes=("tp",))
    dense = builder.tensor("dense", Role.PARAMETER, UINT8, (2, 3), 1)
    for place, file in zip(tp, (first, second), strict=True):
        builder.piece(norm, file, 0, FlatRange(0, 4), place, key="n")
        builder.piece(dense, file, 16, Box((place.as_dict()["tp"], 0), (place.as_dict()["tp"] + 1, 3)), place)
    return builder.build(7, "step", "made-up", Mesh((("tp", 2),)), {}, ())


def test_the_replica_of_a_piece_follows_from_its_coordinate():
    catalog = small_catalog()
    assert [(piece.tensor, piece.replica) for piece in catalog.pieces] == [(0, 0), (1, 0), (0, 1), (1, 0)]
    assert catalog.replicas == ((Coordinate.of(tp=0), Coordinate.of(tp=1)), (EVERYWHERE,))


def test_rows_by_tensor_and_by_replica():
    catalog = small_catalog()
    assert {number: rows.tolist() for number, rows in catalog.rows_by_tensor.items()} == {0: [0, 2], 1: [1, 3]}
    assert catalog.rows_of(0, 1).tolist() == [2]
    assert catalog.rows_of(1, 1).tolist() == []
    assert catalog.rows_of(5, 0).tolist() == []
    assert catalog.file_of(2).name == "step/b.bin"


def test_bytes_of_pieces():
    assert small_catalog().num_bytes().tolist() == [16, 3, 16, 3]


def test_bytes_of_packed_pieces_round_up():
    builder = CatalogBuilder()
    tensor = builder.tensor("q", Role.PARAMETER, DTYPES["int4"], (5,), 0)
    builder.piece(tensor, builder.file(File("f", 3)), 0, FlatRange(0, 5), EVERYWHERE)
    assert builder.build(0, "", "made-up", NO_MESH, {}, ()).num_bytes().tolist() == [3]


def test_only_narrows_tensors_replicas_and_pieces_together():
    narrowed = small_catalog().only("dense".__eq__)
    assert [tensor.name for tensor in narrowed.tensors] == ["dense"]
    assert narrowed.replicas == ((EVERYWHERE,),)
    assert [(piece.tensor, piece.offset) for piece in narrowed.pieces] == [(0, 16), (0, 16)]
    assert len(narrowed.files) == 2
    assert {number: rows.tolist() for number, rows in narrowed.rows_by_tensor.items()} == {0: [0, 1]}


@pytest.mark.parametrize("wanted", [lambda name: False, lambda name: True])
def test_only_may_keep_nothing_or_all(wanted):
    catalog = small_catalog()
    narrowed = catalog.only(wanted)
    assert len(narrowed.pieces) == len(catalog.pieces) * len(narrowed.tensors) // 2
    assert len(narrowed.num_bytes()) == len(narrowed.pieces)


def test_a_catalog_without_pieces():
    empty = CatalogBuilder().build(0, "", "made-up", NO_MESH, {}, ())
    assert empty.rows_by_tensor == {}
    assert (len(empty.num_bytes()), len(empty.only(bool).pieces)) == (0, 0)


def test_a_tensor_is_added_once_a_role():
    builder = CatalogBuilder()
    one = builder.tensor("w", Role.PARAMETER, FLOAT32, (4,), 0)
    assert builder.tensor("w", Role.PARAMETER, FLOAT32, (4,), 0) == one
    assert builder.tensor("w", Role.MASTER, FLOAT32, (4,), 0) != one


def test_a_piece_takes_less_than_a_hundred_bytes():
    num_pieces, builder = 200_000, PiecesBuilder()
    places = [Coordinate.of(pp=i % 12, dp=i % 8, tp=i % 4) for i in range(12)]
    for i in range(0, num_pieces, 2):
        builder.add(
            i, i % 384, i << 20, FlatRange(i, i + 4096), places[i // 2 % 12], replica=i % 4, key=f"exp_avg[{i % 3}]"
        )
        row = (i % 4) * 4096
        builder.add(i + 1, i % 384, i << 20, Box((row, 0), (row + 4096, 14336)), places[i // 2 % 12], strides=(1, 4096))
    pieces = builder.build()
    num_bytes = sum(getattr(pieces, name).nbytes for name in (*pieces.COLUMNS, "pool"))
    assert len(pieces) == num_pieces
    assert num_bytes < 100 * num_pieces
    assert len(pieces.coordinates) == 12
    assert pieces[num_pieces - 1].region == whole((4096, 14336)).shifted((pieces[num_pieces - 1].region.start[0], 0))
