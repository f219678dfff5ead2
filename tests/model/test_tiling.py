"""What the columns say of tiling is what the sweep over single regions says, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.model.catalog import Catalog, File, Role
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate, Mesh
from auditor.model.region import Box, FlatRange, Region, coverage
from auditor.model.tiling import tiled_replicas

Cut = tuple[tuple[int, ...], list[Region]]


def catalog_of(*tensors: Cut) -> Catalog:
    builder = CatalogBuilder()
    file = builder.file(File("f"))
    for at, (shape, regions) in enumerate(tensors):
        number = builder.tensor(f"t{at}", Role.PARAMETER, FLOAT32, shape, at)
        for region in regions:
            builder.piece(number, file, 0, region, Coordinate())
    return builder.build(0, "", "synthetic", Mesh(), {}, ())


ROWS = [Box((0, 0), (1, 6)), Box((1, 0), (4, 6))]
COLUMNS = [Box((0, 2), (4, 6)), Box((0, 0), (4, 2))]
STRETCHES = [FlatRange(0, 5), FlatRange(5, 24)]
TILED: dict[str, Cut] = {
    "rows": ((4, 6), ROWS), "columns": ((4, 6), COLUMNS), "flat ranges": ((4, 6), STRETCHES),
    "a scalar": ((), [Box((), ())]), "whole": ((2, 3, 4), [Box((0, 0, 0), (2, 3, 4))]),
    "a flat range and the rows behind it": ((4, 6), [FlatRange(0, 6), ROWS[1]]),
    "parts of one row": ((1, 6), [Box((0, 0), (1, 4)), Box((0, 4), (1, 6))]),
    "an empty piece beside, out of bounds": ((4, 6), [*ROWS, Box((9, 0), (9, 6)), FlatRange(99, 99)]),
    "blocks of the middle dim": ((2, 4, 3), [Box((0, 0, 0), (2, 1, 3)), Box((0, 1, 0), (2, 4, 3))]),
}  # fmt: skip
NOT_TILED: dict[str, Cut] = {
    "a gap": ((4, 6), [ROWS[0]]), "a gap before": ((4, 6), [ROWS[1]]), "none": ((4, 6), []),
    "overlap": ((4, 6), [*ROWS, ROWS[0]]), "twice": ((4, 6), [*ROWS, *ROWS]), "crossing": ((4, 6), [*ROWS, COLUMNS[0]]),
    "beyond the end": ((4, 6), [ROWS[0], Box((1, 0), (5, 6))]), "flat beyond": ((4, 6), [FlatRange(0, 25)]),
    "before the beginning": ((4, 6), [FlatRange(-1, 24)]), "another rank": ((4, 6), [*ROWS, Box((0,), (24,))]),
    "a row more, a column less": ((4, 6), [Box((0, 0), (4, 5)), Box((0, 5), (3, 6))]),
    "sizes beyond 64 bits": ((1 << 40, 1 << 40), [Box((0, 0), (1 << 40, 1))]),
    "numbers that wrap around": ((4,), [Box((-(1 << 63),), ((1 << 63) - 1,)), Box((0,), (4,))]),
}  # fmt: skip


@pytest.mark.parametrize("name", TILED)
def test_cuts_along_one_line_are_known(name):
    assert tiled_replicas(catalog_of(TILED[name])) == {(0, 0)}


@pytest.mark.parametrize("name", NOT_TILED)
def test_what_does_not_tile_is_never_called_tiled(name):
    assert tiled_replicas(catalog_of(NOT_TILED[name])) == frozenset()


def test_tensors_are_told_apart():
    catalog = catalog_of(*TILED.values(), *NOT_TILED.values())
    assert tiled_replicas(catalog) == {(number, 0) for number in range(len(TILED))}


@st.composite
def cuts(draw) -> Cut:
    """Small tensors and regions, most of which are made of borders that fit each other."""
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    borders = [st.integers(-1 if draw(st.booleans()) else 0, extent + draw(st.integers(0, 1))) for extent in shape]
    total = 1
    for extent in shape:
        total *= extent
    box = st.builds(lambda a, b: Box(a, b), st.tuples(*borders), st.tuples(*borders))
    flat = st.builds(FlatRange, st.integers(0, total), st.integers(0, total))
    slabs = [
        Box((*(0 for _ in shape[:dim]), low, *(0 for _ in shape[dim + 1 :])), (*shape[:dim], high, *shape[dim + 1 :]))
        for dim, extent in enumerate(shape) for low in range(extent) for high in range(low + 1, extent + 1)
    ]  # fmt: skip
    region = st.one_of(box, flat, st.sampled_from(slabs)) if slabs else st.one_of(box, flat)
    return shape, draw(st.lists(region, max_size=4))


@given(st.lists(cuts(), min_size=1, max_size=3))
def test_whatever_is_called_tiled_is(tensors):
    for tensor, _ in tiled_replicas(catalog_of(*tensors)):
        shape, regions = tensors[tensor]
        assert coverage(regions, shape).exact
