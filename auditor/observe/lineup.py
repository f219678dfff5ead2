"""Which tensors are read in lock-step, and the cells in which that is done.

Replicas of pairs of tensors, and tensors of the save before beside those of this one: whatever shares a tensor is cut
into one set of cells, so that it is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog, FileState, Piece, Tensor
from auditor.model.dtype import DType, Kind
from auditor.model.joint import Beside, Joint
from auditor.model.mesh import Coordinate
from auditor.model.pairing import Pairing
from auditor.model.region import Box, as_boxes, refinement
from auditor.observe.placing import Cell, cell_of, flat_cell, flat_starts

MAX_MEETINGS = 4_000_000
"""Pairs of pieces that may have to be tried to cut tensors into cells; only cuts made to be slow need more."""
MAX_PARTS = 200_000
"""Pieces of tensors that are read beside the save before: each costs a cell."""

Stream = tuple[bool, int, int]
"""Whether it is of the step itself and not of the save before; tensor; replica."""


@dataclass(frozen=True, slots=True)
class Lineup:
    """One replica of ``pairing.left`` against one of ``pairing.right``."""

    pairing: Pairing
    left: int
    right: int

    @property
    def streams(self) -> tuple[Stream, Stream]:
        """Its two sides."""
        return (True, self.pairing.left, self.left), (True, self.pairing.right, self.right)


@dataclass(frozen=True, slots=True)
class Seam:
    """One joint, in one piece of its first tensor."""

    joint: Joint
    row: int


@dataclass(slots=True)
class Lineups:
    """All comparisons of one Catalog."""

    lineups: list[Lineup] = field(default_factory=list)
    """A cell's pairs name their positions in it."""
    seams: list[Seam] = field(default_factory=list)
    """A cell's joints name their positions in it."""
    cells: list[Cell] = field(default_factory=list)
    """Files of the save before are numbered behind those of the Catalog."""
    measured: set[int] = field(default_factory=set)
    """Pieces that the cells cover exactly: reading the cells is reading them."""


def lineups(
    catalog: Catalog, pairings: Sequence[Pairing], rows: NDArray[np.int64], beside: Beside | None = None
) -> Lineups:
    """Line up the replicas of every pairing, and the joints, and cut them into cells.

    ``rows``: the pieces that are measured; pairs are compared over them alone.
    """
    found, known = Lineups(), [pairing for pairing in pairings if _comparable(catalog, pairing)]
    for pairing in known:
        found.lineups += (Lineup(pairing, left, right) for left, right in _matched(catalog, pairing))
    cutter = _Cutter(catalog, beside, rows, found)
    left_over: list[Lineup] = []
    for members in _together([*found.lineups, *cutter.joints]):
        if not cutter.add(members):
            # What the save before lacks keeps nothing of this one from being compared.
            left_over += (member for member in members if isinstance(member, Lineup))
    for members in _together(left_over):
        cutter.add(members)
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


Member = Lineup | Joint


def _streams(member: Member) -> tuple[Stream, ...]:
    if isinstance(member, Lineup):
        return member.streams
    return tuple((is_own, number, 0) for is_own, number in member.streams)


def _together(found: Sequence[Member]) -> list[list[Member]]:
    """What shares a stream, whose bytes would otherwise be read twice."""
    group: dict[Stream, list[Member]] = {}
    for member in found:
        joined = [member]
        for known in {id(known): known for stream in _streams(member) if (known := group.get(stream))}.values():
            joined = [*known, *joined] if len(known) >= len(joined) else [*joined, *known]
        for one in joined:
            for stream in _streams(one):
                group[stream] = joined
    return list({id(members): members for members in group.values()}.values())


class _Cutter:
    """Cuts what belongs together into cells."""

    def __init__(
        self, catalog: Catalog, beside: Beside | None, rows: NDArray[np.int64], found: Lineups
    ) -> None:  # fmt: skip
        self.catalogs = {True: catalog, False: beside.catalog if beside else catalog}
        self.found = found
        self.number = {lineup: number for number, lineup in enumerate(found.lineups)}
        self.seam_of: dict[Seam, int] = {}
        self.wanted = np.zeros(len(catalog.pieces), bool)
        self.wanted[rows] = True
        self.sizes = {own: catalog.pieces.num_elements() for own, catalog in self.catalogs.items()}
        self.joints = [joint for joint in beside.joints if self.joinable(joint)] if beside else []
        parts = {stream: len(self.rows(stream)) for joint in self.joints for stream in _streams(joint)}
        if sum(parts.values()) > MAX_PARTS:
            self.joints = []
        members: list[Member] = [*found.lineups, *self.joints]
        streams = {stream for member in members for stream in _streams(member)}
        self.firsts = {own: self.first_elements(own, [s for s in streams if s[0] is own]) for own in (True, False)}

    def first_elements(self, own: bool, streams: Sequence[Stream]) -> Mapping[int, int]:
        """Row to C-order index of the first element, -1 for what is no plain stretch."""
        rows = np.unique(np.concatenate([np.zeros(0, np.int64), *map(self.rows, streams)]))
        return dict(zip(rows.tolist(), flat_starts(self.catalogs[own], rows).tolist(), strict=True))

    @cached_property
    def present(self) -> Mapping[bool, NDArray[np.bool_]]:
        """Of both Catalogs, which pieces lie in files that are there."""
        return {
            own: np.array([file.state is FileState.PRESENT for file in catalog.files] or [False])[catalog.pieces.file]
            for own, catalog in self.catalogs.items()
        }

    def tensor(self, stream: Stream) -> Tensor:
        return self.catalogs[stream[0]].tensors[stream[1]]

    def rows(self, stream: Stream) -> NDArray[np.int64]:
        return self.catalogs[stream[0]].rows_of(*stream[1:])

    def joinable(self, joint: Joint) -> bool:
        """Whether both saves hold all of its tensors, in files that are there."""
        tensors = [self.tensor(stream) for stream in _streams(joint)]
        readable = all(what.dtype.kind is Kind.FLOAT and what.dtype.bits >= 8 for what in tensors)
        same = len({what.shape for what in tensors}) == 1 and tensors[0].num_elements > 0
        return readable and same and all(self.whole(stream) for stream in _streams(joint))

    def whole(self, stream: Stream) -> bool:
        """Whether as many elements as the tensor has are in files that are there."""
        rows = self.rows(stream)
        enough = int(self.sizes[stream[0]][rows].sum()) == self.tensor(stream).num_elements
        return enough and bool(self.present[stream[0]][rows].all())

    def add(self, members: Sequence[Member]) -> bool:
        """Add the cells of members that belong together; False, and none, if joints are in the way of pairs."""
        joints = [member for member in members if isinstance(member, Joint)]
        # Those of the save before come last, so that they may be left away.
        named = dict.fromkeys(stream for member in members for stream in _streams(member))
        streams = [*(s for s in named if s[0]), *(s for s in named if not s[0])]
        chosen = self.present[True] if joints else self.wanted
        rows = []
        for stream in streams:
            mine = self.rows(stream)
            rows.append((mine[chosen[mine]] if stream[0] else mine).tolist())
        cells = self.cut(streams, rows)
        clean = self.covers(cells, streams, rows)
        if joints and not clean:
            return False
        lined = [member for member in members if isinstance(member, Lineup)]
        pairs = tuple((self.number[one], streams.index(one.streams[0]), streams.index(one.streams[1])) for one in lined)
        places = [(joint, tuple(map(streams.index, _streams(joint)))) for joint in joints]
        for cell in cells:
            seams = tuple((self.seam(joint, cell.sides[sides[0]].row), sides) for joint, sides in places)
            self.found.cells.append(replace(self.measuring(cell, streams, clean), pairs=pairs, joints=seams))
        if clean:
            own = (row for stream, of_stream in zip(streams, rows, strict=True) if stream[0] for row in of_stream)
            self.found.measured.update(row for row in own if self.wanted[row])
        return True

    def seam(self, joint: Joint, row: int) -> int:
        """The number of a joint in one piece."""
        seam = Seam(joint, row)
        if seam not in self.seam_of:
            self.seam_of[seam] = len(self.found.seams)
            self.found.seams.append(seam)
        return self.seam_of[seam]

    def measuring(self, cell: Cell, streams: Sequence[Stream], clean: bool) -> Cell:
        """The cell, whose sides are measured where they are wanted and it is clean, and else only compared."""
        behind = len(self.catalogs[True].files)
        sides = tuple(
            replace(
                side,
                row=side.row if clean and own and self.wanted[side.row] else -1,
                file=side.file if own else behind + side.file,
            )
            for side, (own, _, _) in zip(cell.sides, streams, strict=True)
        )
        return replace(cell, sides=sides)

    def cut(self, streams: Sequence[Stream], rows: Sequence[Sequence[int]]) -> list[Cell]:
        """The common refinement of all streams' pieces."""
        dtypes = [self.tensor(stream).dtype for stream in streams]
        pieces = [
            [self.catalogs[stream[0]].pieces[row] for row in of_stream]
            for stream, of_stream in zip(streams, rows, strict=True)
        ]
        firsts = [
            [self.firsts[stream[0]][row] for row in of_stream] for stream, of_stream in zip(streams, rows, strict=True)
        ]
        if all(first >= 0 for of_stream in firsts for first in of_stream):
            return _cut_flat(pieces, firsts, dtypes)
        return _cut_boxes(self.tensor(streams[0]), pieces, dtypes)

    def covers(self, cells: Sequence[Cell], streams: Sequence[Stream], rows: Sequence[Sequence[int]]) -> bool:
        """Whether the cells hold every element of every piece once."""
        held: dict[tuple[int, int], int] = {}
        for cell in cells:
            size = 1
            for extent in cell.shape:
                size *= extent
            for at, side in enumerate(cell.sides):
                held[at, side.row] = held.get((at, side.row), 0) + size
        return all(
            held.get((at, row), 0) == self.sizes[streams[at][0]][row] for at, of_stream in enumerate(rows)
            for row in of_stream
        )  # fmt: skip


def _cut_flat(
    pieces: Sequence[Sequence[Piece]], firsts: Sequence[Sequence[int]], dtypes: Sequence[DType]
) -> list[Cell]:
    """Cells of pieces that all lie without gaps in their file and in the tensor's C order."""
    tilings = [
        [_stretch(first, piece.shape) for first, piece in zip(of_stream, own, strict=True)]
        for of_stream, own in zip(firsts, pieces, strict=True)
    ]
    return [
        flat_cell(
            cell.start[0], cell.stop[0], [own[at] for own, at in zip(pieces, where, strict=True)],
            [of_stream[at] for of_stream, at in zip(firsts, where, strict=True)], dtypes,
        )
        for cell, where in _refined(tilings, bounded=any(map(_overlaps, tilings)))
    ]  # fmt: skip


def _overlaps(tiling: Sequence[Box]) -> bool:
    ordered = sorted(tiling, key=lambda box: box.start)
    return any(one.stop > other.start for one, other in pairwise(ordered))


def _cut_boxes(tensor: Tensor, pieces: Sequence[Sequence[Piece]], dtypes: Sequence[DType]) -> list[Cell]:
    boxes = [[(box, p) for p in own for box in as_boxes(p.region, tensor.shape)] for own in pieces]
    return [
        cell_of(tensor, cell, [own[at][1] for own, at in zip(boxes, where, strict=True)], dtypes)
        for cell, where in _refined([[box for box, _ in own] for own in boxes], bounded=True)
    ]


def _refined(tilings: Sequence[Sequence[Box]], *, bounded: bool) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The common refinement; tilings that are alike count once. Empty where that could take too long."""
    distinct: dict[tuple[Box, ...], int] = {}
    which = [distinct.setdefault(tuple(tiling), len(distinct)) for tiling in tilings]
    meetings = 1
    for tiling in distinct:
        meetings *= max(1, len(tiling))
    if bounded and meetings > MAX_MEETINGS:
        return
    for cell, where in refinement(list(distinct)):
        yield cell, tuple(where[number] for number in which)


def _stretch(first: int, shape: Sequence[int]) -> Box:
    length = 1
    for extent in shape:
        length *= extent
    return Box((first,), (first + length,))
