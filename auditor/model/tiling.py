"""Which replicas are tiled by their pieces, told from the columns for all of a Catalog at once.

Most cuts lie along one line: stretches of the tensor's C order (flat partitions, row blocks), or blocks along one dim
(columns). Sorted along that line, pieces tile the tensor where each begins where the one before ended. Other cuts are
left to :func:`~auditor.model.region.coverage`, which takes them piece by piece and names what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog

_LARGEST = 1 << 62
"""Elements of a tensor up to which nothing below overflows."""

_C_ORDER, _NOWHERE = -1, -2

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Pieces as intervals along a line. Columns, parallel to the pieces."""

    line: Integers
    """``_C_ORDER``; the dim along which alone the piece is cut; ``_NOWHERE`` where neither fits or it is not inside."""
    start: Integers
    stop: Integers
    extent: Integers
    """Length of the line."""


def tiled_replicas(catalog: Catalog) -> frozenset[tuple[int, int]]:
    """Tensor and replica of those that are tiled for certain; nothing is said of the others."""
    if not len(catalog.pieces):
        return frozenset()
    rest = np.ones(len(catalog.pieces), bool)
    stretches, blocks = _cuts(catalog)
    return frozenset([*_tiled(catalog, stretches, rest), *_tiled(catalog, blocks, rest)])


def flat_ranges(catalog: Catalog) -> tuple[Integers, Integers]:
    """Start and stop of the flat range that each piece is; -1 for pieces that are boxes and nothing simpler."""
    cut, _ = _cuts(catalog)
    flat = cut.line == _C_ORDER
    return np.where(flat, cut.start, -1), np.where(flat, cut.stop, -1)


def _tiled(catalog: Catalog, cut: _Cut, rest: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Replicas that are tiled along one line; the rows of their pieces are taken out of ``rest``."""
    pieces = catalog.pieces
    # Pieces without elements are legal wherever they are.
    kept = np.flatnonzero(((cut.stop > cut.start) | (cut.line == _NOWHERE)) & rest)
    if not len(kept):
        return
    order = kept[np.lexsort((cut.start[kept], pieces.replica[kept], pieces.tensor[kept]))]
    tensor, replica = pieces.tensor[order], pieces.replica[order]
    line, start, stop = cut.line[order], cut.start[order], cut.stop[order]
    opens = np.ones(len(order), bool)
    opens[1:] = (tensor[1:] != tensor[:-1]) | (replica[1:] != replica[:-1])
    closes = np.append(opens[1:], True)
    fits = line != _NOWHERE
    fits &= (~opens | (start == 0)) & (~closes | (stop == cut.extent[order]))
    fits[1:] &= opens[1:] | ((start[1:] == stop[:-1]) & (line[1:] == line[:-1]))
    first = np.flatnonzero(opens)
    good = np.logical_and.reduceat(fits, first)
    rest[order[np.repeat(good, np.diff([*first, len(order)]))]] = False
    yield from zip(tensor[first[good]].tolist(), replica[first[good]].tolist(), strict=True)


def _cuts(catalog: Catalog) -> tuple[_Cut, _Cut]:
    """All pieces as stretches of C order, and all as blocks along one dim."""
    pieces = catalog.pieces
    count = len(pieces)
    stretches, blocks = (
        _Cut(np.full(count, _NOWHERE), *(np.zeros(count, np.int64) for _ in range(3))) for _ in range(2)
    )
    for dims, numbers in _small_tensors(catalog).items():
        member = np.zeros(len(catalog.tensors), bool)
        member[numbers] = True
        place = np.cumsum(member) - 1
        shapes = np.array([catalog.tensors[number].shape for number in numbers], np.int64).reshape(len(numbers), dims)
        of_dims = member[pieces.tensor]
        flat = np.flatnonzero(of_dims & (pieces.num_dims < 0))
        _add_flat(stretches, pieces.pool, pieces.region_at[flat], shapes[place[pieces.tensor[flat]]], flat)
        boxes = np.flatnonzero(of_dims & (pieces.num_dims == dims))
        _add_boxes(stretches, blocks, pieces.pool, pieces.region_at[boxes], shapes[place[pieces.tensor[boxes]]], boxes)
    return stretches, blocks


def _small_tensors(catalog: Catalog) -> dict[int, list[int]]:
    """Number of dims to the tensors that have so many, without those whose sizes are beyond anything real."""
    found: dict[int, list[int]] = {}
    for number, tensor in enumerate(catalog.tensors):
        if all(0 < extent < _LARGEST for extent in tensor.shape) and tensor.num_elements < _LARGEST:
            found.setdefault(len(tensor.shape), []).append(number)
    return found


def _add_flat(stretches: _Cut, pool: Integers, at: Integers, shapes: Integers, rows: Integers) -> None:
    start, stop, total = pool[at], pool[at + 1] if len(at) else pool[at], shapes.prod(axis=1)
    inside = (start >= 0) & (stop <= total)
    stretches.line[rows] = np.where(inside | (stop <= start), _C_ORDER, _NOWHERE)
    stretches.start[rows], stretches.stop[rows], stretches.extent[rows] = start, stop, total


def _add_boxes(
    stretches: _Cut, blocks: _Cut, pool: Integers, at: Integers, shapes: Integers, rows: Integers
) -> None:  # fmt: skip
    dims = shapes.shape[1]
    corner = at[:, None] + np.arange(dims)
    starts, stops = pool[corner], pool[corner + dims]
    empty = (stops <= starts).any(axis=1)
    inside = ((starts >= 0) & (stops <= shapes)).all(axis=1) & ~empty
    starts, stops = (np.where(inside[:, None], column, 0) for column in (starts, stops))
    extents, total = stops - starts, shapes.prod(axis=1)
    steps = np.ones_like(shapes)
    steps[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    whole = extents == shapes
    # A stretch of C order: single indices, then one dim cut anyhow, then whole dims.
    trailing = np.cumprod(whole[:, ::-1], axis=1).sum(axis=1)
    leading = np.cumprod(extents == 1, axis=1).sum(axis=1)
    stretch = inside & (leading >= dims - 1 - trailing)
    first = (starts * steps).sum(axis=1)
    _put(stretches, rows, stretch, empty, (np.full(len(rows), _C_ORDER), first, first + extents.prod(axis=1), total))
    if dims:
        dim, each = np.argmin(whole, axis=1), np.arange(len(rows))
        block = inside & (whole.sum(axis=1) >= dims - 1)
        _put(blocks, rows, block, empty, (dim, starts[each, dim], stops[each, dim], shapes[each, dim]))


def _put(
    cut: _Cut, rows: Integers, known: NDArray[np.bool_], empty: NDArray[np.bool_],
    columns: tuple[Integers, Integers, Integers, Integers],
) -> None:  # fmt: skip
    line, start, stop, extent = columns
    cut.line[rows] = np.where(known | empty, line, _NOWHERE)
    # Without elements: an interval of none.
    cut.start[rows], cut.stop[rows], cut.extent[rows] = np.where(empty, 0, start), np.where(empty, 0, stop), extent
