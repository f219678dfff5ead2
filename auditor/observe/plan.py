"""What is read, in which order, by whom: pieces and pairs of tensors become units of work.

A unit is self-contained: it carries the few columns that it needs and not the Catalog, so any executor can ship it.
Every wanted byte is in one unit only. Tensors that are compared element by element are cut into cells, in each of which
every side lies within one piece, and are read in lock-step; so are those of the save before, beside those of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog, File, FileState
from auditor.model.dtype import DType, Kind
from auditor.model.joint import Beside, Joint
from auditor.model.pairing import Pairing
from auditor.model.region import as_boxes
from auditor.observe.lineup import Lineup, Lineups, Seam, lineups
from auditor.observe.placing import Cell, Part, Side, cell_of, flat_starts, small

UNIT_BYTES = 64 << 20
"""About how much one unit of work reads: enough to hide its overhead, few enough to keep workers busy."""
SLOW_UNIT_BYTES = 8 << 20
"""The same where storage takes long to answer: many are wanted at once, also of a small step."""


@dataclass(frozen=True, slots=True)
class Table:
    """Pieces, or parts of them, that lie without gaps in their file and in their tensor. Columns, in file order."""

    row: NDArray[np.int64]
    dtype: NDArray[np.int64]
    """Position in the unit's ``dtypes``."""
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    """Carriers: complex elements are two."""
    start: NDArray[np.int64]
    """C-order index of the first, in carriers."""

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: NDArray[np.int64] | slice) -> Table:
        """Some of the rows."""
        columns = (self.row, self.dtype, self.offset, self.length, self.start)
        return Table(*(column[chosen] for column in columns))


@dataclass(frozen=True, slots=True)
class Unit:
    """Work that is done at once: whole stretches of one file, or cells of several."""

    files: tuple[File, ...]
    """A cell's file numbers are positions in it; a table's stretches lie in the first."""
    rows: NDArray[np.int64]
    """Rows of the Catalog that it measures; what its table and cells call a row is a position in it."""
    dtypes: tuple[DType, ...] = ()
    table: Table | None = None
    cells: tuple[Cell, ...] = ()
    tallies: tuple[int, ...] = ()
    """Tallies to which it adds; what its cells call a tally is a position in it."""
    pairings: tuple[Pairing, ...] = ()
    """What is compared, parallel to ``tallies``."""
    seams: tuple[int, ...] = ()
    """Seams to which it adds; what its cells call a seam is a position in it."""
    joints: tuple[Joint, ...] = ()
    """What is measured over both saves, parallel to ``seams``."""
    of_before: tuple[int, ...] = ()
    """Positions in ``files`` of those of the save before: what is wrong with them says nothing of this one."""
    num_bytes: int = 0
    sketches: tuple[int, ...] = ()
    """Sketches to which it adds; empty where none are wanted."""
    sketch_of: NDArray[np.int64] | None = None
    """Parallel to ``rows``: position in ``sketches``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All units of one Catalog's pass."""

    units: tuple[Unit, ...]
    tallies: tuple[Lineup, ...] = ()
    """What every tally is of."""
    seams: tuple[Seam, ...] = ()
    """What every seam is of."""
    copies: tuple[tuple[int, int], ...] = ()
    """Rows that are the same bytes as another, seen alike: (row, row that is measured)."""

    def sketched(self, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> Plan:
        """The plan, whose units also sketch. ``numbers``: parallel to ``rows`` (all that is measured), of sketches."""
        of_row = np.zeros(int(rows.max(initial=-1)) + 1, np.int64)
        of_row[rows] = numbers
        units = []
        for unit in self.units:
            wanted, positions = np.unique(of_row[unit.rows], return_inverse=True)
            units.append(replace(unit, sketches=tuple(wanted.tolist()), sketch_of=positions))
        return replace(self, units=tuple(units))


def plan(
    catalog: Catalog, rows: NDArray[np.int64], pairings: Sequence[Pairing] = (), beside: Beside | None = None, *,
    slow: bool = False,
) -> Plan:  # fmt: skip
    """Units that measure ``rows`` and compare the ``pairings``, and what is wanted ``beside`` the save before.

    ``slow``: for storage that takes long to answer.
    """
    unit_bytes = min(UNIT_BYTES, SLOW_UNIT_BYTES) if slow else UNIT_BYTES
    present = np.array([file.state is FileState.PRESENT for file in catalog.files] or [False])
    rows = rows[present[catalog.pieces.file[rows]]]
    found = lineups(catalog, pairings, rows, beside)
    if found.measured:
        rows = rows[~np.isin(rows, np.fromiter(found.measured, np.int64))]
    # A piece without elements is read as nothing, wherever it is said to be.
    starts = np.where(catalog.pieces.num_elements()[rows] > 0, flat_starts(catalog, rows), 0)
    whole = starts >= 0
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in catalog.tensors))
    table, copies = _table(catalog, dtypes, rows[whole], starts[whole])
    cells = [*found.cells, *_cells(catalog, rows[~whole])]
    of_cells = _CellUnits(catalog, beside, found, unit_bytes)
    units = [*_table_units(catalog, dtypes, table, unit_bytes), *of_cells.of(cells)]
    return Plan(tuple(units), tuple(found.lineups), tuple(found.seams), copies)


def _table(
    catalog: Catalog, dtypes: Sequence[DType], rows: NDArray[np.int64], starts: NDArray[np.int64]
) -> tuple[Table, tuple[tuple[int, int], ...]]:
    """The stretches of ``rows``, and those among them that are copies of another."""
    pieces = catalog.pieces
    halves = np.array([2 if tensor.dtype.kind is Kind.COMPLEX else 1 for tensor in catalog.tensors] or [1], np.int64)
    kinds = {dtype: number for number, dtype in enumerate(dtypes)}
    kind = np.array([kinds[tensor.dtype] for tensor in catalog.tensors] or [0], np.int64)
    tensor = pieces.tensor[rows]
    factor = halves[tensor]
    columns = [rows, kind[tensor], pieces.offset[rows], pieces.num_elements()[rows] * factor, starts * factor]
    order = np.lexsort((columns[4], columns[3], columns[2], pieces.file[rows]))
    table = Table(*(column[order] for column in columns))
    return _without_copies(table, pieces.file[table.row])


def _without_copies(table: Table, files: NDArray[np.int32]) -> tuple[Table, tuple[tuple[int, int], ...]]:
    """The table with stretches only once that are the same bytes seen alike (tied tensors); rows of the others."""
    columns: list[NDArray[np.int64]] = [files.astype(np.int64), table.dtype, table.offset, table.length, table.start]
    same = np.zeros(len(table), bool)
    same[1:] = np.all([column[1:] == column[:-1] for column in columns], axis=0)
    same &= table.length > 0
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(table)))) if len(table) else np.zeros(0, np.int64)
    copies = zip(table.row[same].tolist(), table.row[first[same]].tolist(), strict=True)
    return table.take(np.flatnonzero(~same)), tuple(copies)


def _table_units(catalog: Catalog, dtypes: tuple[DType, ...], table: Table, unit_bytes: int) -> Iterator[Unit]:
    """The table cut by file and at about ``unit_bytes``; longer stretches are cut as well."""
    widths = np.array([np.dtype(dtype.carrier).itemsize for dtype in dtypes] or [1], np.int64)
    encoded = np.array([file.encoding is not None for file in catalog.files] or [False])
    table = _cut(table, widths, unit_bytes, encoded[catalog.pieces.file[table.row]])
    sizes = table.length * widths[table.dtype]
    files = catalog.pieces.file[table.row]
    filled = (np.cumsum(sizes) - sizes) // unit_bytes
    borders = np.flatnonzero((np.diff(files) != 0) | (np.diff(filled) != 0)) + 1
    for low, high in zip([0, *borders.tolist()], [*borders.tolist(), len(table)], strict=True):
        if low < high:
            own = table.take(slice(low, high))
            rows, positions = np.unique(own.row, return_inverse=True)
            file = catalog.files[int(files[low])]
            reach = int(own.offset.min()), int((own.offset + sizes[low:high]).max())
            file = _with_chunks(file, *reach)
            yield Unit((file,), rows, dtypes, replace(own, row=positions), num_bytes=int(sizes[low:high].sum()))


def _with_chunks(file: File, first: int, last: int) -> File:
    """A file with those chunks alone that hold something of its content from ``first`` to ``last``."""
    return file if file.encoding is None else replace(file, encoding=file.encoding.between(first, last))


def _cut(table: Table, widths: NDArray[np.int64], unit_bytes: int, encoded: NDArray[np.bool_]) -> Table:
    """Stretches of at most ``unit_bytes``; those stay whole that can only be decoded from their beginning."""
    limit = unit_bytes // widths[table.dtype]
    counts = np.where(encoded, 1, np.maximum(1, -(-table.length // limit)))
    if (counts == 1).all():
        return table
    whole = np.repeat(np.arange(len(table)), counts)
    number = np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
    done = number * limit[whole]
    out = table.take(whole)
    return replace(
        out, offset=out.offset + done * widths[out.dtype], start=out.start + done,
        length=np.minimum(out.length - done, limit[whole]),
    )  # fmt: skip


def _cells(catalog: Catalog, rows: NDArray[np.int64]) -> Iterator[Cell]:
    """One cell a box for pieces that are no plain stretch, in file order."""
    pieces = catalog.pieces
    for row in rows[np.lexsort((pieces.offset[rows], pieces.file[rows]))].tolist():
        piece = pieces[row]
        tensor = catalog.tensors[piece.tensor]
        for box in as_boxes(piece.region, tensor.shape):
            if box.num_elements:
                yield cell_of(tensor, box, (piece,), (tensor.dtype,))


class _CellUnits:
    """Makes units of cells."""

    def __init__(self, catalog: Catalog, beside: Beside | None, found: Lineups, unit_bytes: int) -> None:
        self.files = (*catalog.files, *(beside.catalog.files if beside else ()))
        self.num_own, self.found, self.unit_bytes = len(catalog.files), found, unit_bytes

    def of(self, cells: Iterable[Cell]) -> Iterator[Unit]:
        """Cells in the given order, joined while they lie in the same files and cut where they are large."""
        held: list[Cell] = []
        num_bytes = 0
        for cell in self.small(cells):
            same = held and [side.file for side in held[-1].sides] == [side.file for side in cell.sides]
            if held and (not same or num_bytes + cell.num_bytes > self.unit_bytes):
                yield self.unit(held, num_bytes)
                held, num_bytes = [], 0
            held.append(cell)
            num_bytes += cell.num_bytes
        if held:
            yield self.unit(held, num_bytes)

    def small(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        for cell in cells:
            if any(self.files[side.file].encoding is not None for side in cell.sides):
                yield cell
            else:
                yield from small(cell, self.unit_bytes)

    def unit(self, cells: Sequence[Cell], num_bytes: int) -> Unit:
        files = _places(side.file for cell in cells for side in cell.sides)
        rows = sorted({side.row for cell in cells for side in cell.sides if side.row >= 0})
        place = {row: at for at, row in enumerate(rows)} | {-1: -1}
        tallies = _places(pair[0] for cell in cells for pair in cell.pairs)
        seams = _places(joint[0] for cell in cells for joint in cell.joints)

        def local(side: Side) -> Side:
            return replace(side, file=files[side.file], row=place[side.row])

        own = tuple(
            replace(
                cell,
                sides=tuple(map(local, cell.sides)),
                pairs=tuple((tallies[number], left, right) for number, left, right in cell.pairs),
                joints=tuple((seams[number], sides) for number, sides in cell.joints),
            )
            for cell in cells
        )
        return Unit(
            tuple(_with_chunks(self.files[number], *_reach(cells, number)) for number in files),
            np.array(rows, np.int64), cells=own, tallies=tuple(tallies),
            pairings=tuple(self.found.lineups[number].pairing for number in tallies), num_bytes=num_bytes,
            seams=tuple(seams), joints=tuple(self.found.seams[number].joint for number in seams),
            of_before=tuple(at for number, at in files.items() if number >= self.num_own),
        )  # fmt: skip


def _places(numbers: Iterable[int]) -> dict[int, int]:
    """Every number, once, to its position."""
    return {number: at for at, number in enumerate(dict.fromkeys(numbers))}


def _reach(cells: Iterable[Cell], file: int) -> tuple[int, int]:
    """First byte of one file that cells read, and the byte after the last."""
    extents = [
        Part(cell, (0,) * len(cell.shape), cell.shape).extent(side)
        for cell in cells
        for side in cell.sides
        if side.file == file
    ]
    return min(first for first, _ in extents), max(last for _, last in extents)
