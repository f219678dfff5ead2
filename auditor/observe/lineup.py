"""Which replicas of two tensors are compared with each other, and the cells in which both are read in lock-step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog
from auditor.model.dtype import Kind
from auditor.model.mesh import Coordinate
from auditor.model.pairing import Pairing
from auditor.model.region import Box, as_boxes, refinement
from auditor.observe.placing import Cell, cell_of, flat_cell, flat_starts

MAX_MEETINGS = 4_000_000
"""Pairs of pieces that may have to be tried to cut two tensors into cells; only cuts made to be slow need more."""

Stream = tuple[int, int]
"""Tensor and replica."""


@dataclass(frozen=True, slots=True)
class Lineup:
    """One replica of ``pairing.left`` against one of ``pairing.right``."""

    pairing: Pairing
    left: int
    right: int


@dataclass(slots=True)
class Lineups:
    """All comparisons of one Catalog."""

    lineups: list[Lineup] = field(default_factory=list)
    """A cell's pairs name their positions in it."""
    cells: list[Cell] = field(default_factory=list)
    measured: set[int] = field(default_factory=set)
    """Pieces that the cells cover exactly: reading the cells is reading them."""


def lineups(catalog: Catalog, pairings: Sequence[Pairing], rows: NDArray[np.int64]) -> Lineups:
    """Line up the replicas of every pairing and cut them into cells, over the pieces ``rows`` alone."""
    found = Lineups()
    wanted = np.zeros(len(catalog.pieces), bool)
    wanted[rows] = True
    known = [pairing for pairing in pairings if _comparable(catalog, pairing)]
    for pairing in known:
        found.lineups += (Lineup(pairing, left, right) for left, right in _matched(catalog, pairing))
    firsts = _firsts(catalog, known)
    for members in _together(found.lineups):
        _add_cells(catalog, found, members, wanted, firsts)
    found.cells.sort(key=lambda cell: ([side.file for side in cell.sides], cell.sides[0].offset))
    return found


def _comparable(catalog: Catalog, pairing: Pairing) -> bool:
    left, right = catalog.tensors[pairing.left], catalog.tensors[pairing.right]
    wide = not left.dtype.packed and not right.dtype.packed
    return wide and left.shape == right.shape and Kind.COMPLEX not in (left.dtype.kind, right.dtype.kind)


def _matched(catalog: Catalog, pairing: Pairing) -> Iterator[tuple[int, int]]:
    """Every replica of ``left`` with the first of ``right`` that contradicts it along no axis."""
    others = catalog.replicas[pairing.right]
    for number, place in enumerate(catalog.replicas[pairing.left]):
        match = next((at for at, other in enumerate(others) if _agree(place, other)), None)
        if match is not None:
            yield number, match


def _agree(one: Coordinate, other: Coordinate) -> bool:
    mine = one.as_dict()
    return all(mine.get(axis, index) == index for axis, index in other.indices)


def _firsts(catalog: Catalog, pairings: Sequence[Pairing]) -> Mapping[int, int]:
    """Row to C-order index of the first element, for plain stretches of the paired tensors."""
    tensors = {number for pairing in pairings for number in (pairing.left, pairing.right)}
    of_tensors = [catalog.rows_by_tensor[number] for number in sorted(tensors) if number in catalog.rows_by_tensor]
    rows = np.concatenate(of_tensors) if of_tensors else np.zeros(0, np.int64)
    return dict(zip(rows.tolist(), flat_starts(catalog, rows).tolist(), strict=True))


def _together(found: Sequence[Lineup]) -> list[list[int]]:
    """Lineups that share a stream, whose bytes would otherwise be read twice."""
    group: dict[Stream, list[int]] = {}
    for number, lineup in enumerate(found):
        sides = (lineup.pairing.left, lineup.left), (lineup.pairing.right, lineup.right)
        mine = group.get(sides[0], [])
        other = group.get(sides[1], [])
        joined = [*mine, *(member for member in other if other is not mine), number]
        for member in joined:
            known = found[member]
            group[known.pairing.left, known.left] = group[known.pairing.right, known.right] = joined
    return [list(members) for members in {id(members): members for members in group.values()}.values()]


def _add_cells(
    catalog: Catalog, found: Lineups, members: Sequence[int], wanted: NDArray[np.bool_], firsts: Mapping[int, int]
) -> None:
    """The cells of lineups that belong together."""
    streams: dict[Stream, int] = {}
    pairs = []
    for number in members:
        lineup = found.lineups[number]
        left = streams.setdefault((lineup.pairing.left, lineup.left), len(streams))
        right = streams.setdefault((lineup.pairing.right, lineup.right), len(streams))
        pairs.append((number, left, right))
    rows = []
    for tensor, replica in streams:
        mine = catalog.rows_of(tensor, replica)
        rows.append(mine[wanted[mine]].tolist())
    cells = _cut(catalog, [tensor for tensor, _ in streams], rows, firsts)
    clean = _covers(catalog, cells, rows)
    for cell in cells:
        sides = cell.sides if clean else tuple(replace(side, row=-1) for side in cell.sides)
        found.cells.append(replace(cell, sides=sides, pairs=tuple(pairs)))
    if clean:
        found.measured.update(row for of_stream in rows for row in of_stream)


def _cut(
    catalog: Catalog, tensors: Sequence[int], rows: Sequence[Sequence[int]], firsts: Mapping[int, int]
) -> list[Cell]:
    """The common refinement of all streams' pieces."""
    tensor = catalog.tensors[tensors[0]]
    dtypes = [catalog.tensors[number].dtype for number in tensors]
    pieces = [[catalog.pieces[row] for row in of_stream] for of_stream in rows]
    if all(firsts[row] >= 0 for of_stream in rows for row in of_stream):
        tilings = [[_stretch(firsts[piece.index], piece.shape) for piece in of_stream] for of_stream in pieces]
        return [
            flat_cell(
                cell.start[0], cell.stop[0], chosen := [side[at] for side, at in zip(pieces, where, strict=True)],
                [firsts[piece.index] for piece in chosen], dtypes,
            )
            for cell, where in refinement(tilings)
        ]  # fmt: skip
    boxes = [[(box, p) for p in of_stream for box in as_boxes(p.region, tensor.shape)] for of_stream in pieces]
    meetings = 1
    for of_stream in boxes:
        meetings *= max(1, len(of_stream))
    if meetings > MAX_MEETINGS:
        return []
    return [
        cell_of(tensor, cell, [side[at][1] for side, at in zip(boxes, where, strict=True)], dtypes)
        for cell, where in refinement([[box for box, _ in of_stream] for of_stream in boxes])
    ]


def _stretch(first: int, shape: Sequence[int]) -> Box:
    length = 1
    for extent in shape:
        length *= extent
    return Box((first,), (first + length,))


def _covers(catalog: Catalog, cells: Sequence[Cell], rows: Sequence[Sequence[int]]) -> bool:
    """Whether the cells hold every element of every piece once."""
    held: dict[int, int] = {}
    for cell in cells:
        size = 1
        for extent in cell.shape:
            size *= extent
        for side in cell.sides:
            held[side.row] = held.get(side.row, 0) + size
    sizes = catalog.pieces.num_elements()
    return all(held.get(row, 0) == sizes[row] for of_stream in rows for row in of_stream)
