"""One unit of work: open its files, read their bytes into reused buffers, run the kernels over them.

Small neighbours are read together in one *window*; what is large is read block by block. Where a window can't be read,
its parts are tried one by one, so that what lies before the end of a short file isn't lost with the rest.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from auditor.containers.encoded import open_file
from auditor.model.dtype import DType
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import Bytes, Kernels, Runs, Stream, empty_seams
from auditor.observe.kernels import Side as KernelSide
from auditor.observe.placing import Cell, Part, Side, lattice, small
from auditor.observe.plan import SLOW_UNIT_BYTES, Table, Unit
from auditor.observe.together import BUFFER_BYTES, Placed, batches, hull, placed, windows
from auditor.observe.unit_result import UnitResult
from auditor.storage.store import (
    Entry,
    Handle,
    ShortReadError,
    StorageError,
    Store,
    UndecodableError,
    changed_since,
    descriptor_of,
    num_readers,
    reads_one_version,
)
from auditor.storage.strided import view

SWEEP_BYTES = 1 << 20
"""So much the compiled kernels read at once over all sides: it stays in the L2 cache until it is compared."""
LARGE_BYTES = SWEEP_BYTES // 4
"""Cells of more bytes are swept, or read by themselves."""
JOINT_BYTES = 4 << 20
"""So much over all sides is swept at once where it is looked at joints."""

_DAMAGED = (ShortReadError, UndecodableError)

_local = threading.local()


def _buffer(number: int, num_bytes: int) -> Bytes:
    """This worker's buffers, made once: fresh memory for every read would cost several times the read."""
    buffers: dict[int, Bytes] = _local.__dict__.setdefault("buffers", {})
    if number not in buffers or len(buffers[number]) < num_bytes:
        buffers[number] = np.empty(max(num_bytes, BUFFER_BYTES), np.uint8)
    return buffers[number][:num_bytes]


@dataclass(frozen=True, slots=True)
class Worker:
    """Does units; a plain record, so that any executor can ship it."""

    store: Store
    kernels: str

    def __call__(self, unit: Unit) -> UnitResult:
        """Do one unit; what storage refuses is in the result."""
        result = UnitResult.empty(unit)
        with ExitStack() as stack:
            block = SLOW_UNIT_BYTES if num_readers(self.store) > 1 else BUFFER_BYTES
            doing = _Doing(self.store, choose(0, self.kernels), unit, result, stack, block)
            if unit.table is not None:
                doing.stretches(unit.table)
            doing.cells(unit.cells)
        if doing.before_changed:
            result.seams = empty_seams(len(unit.seams))
        return result


def _is_long(cell: Cell) -> bool:
    """Whether a cell is read block by block, without a thought about neighbours."""
    return cell.straight and cell.num_bytes > BUFFER_BYTES


@dataclass
class _Doing:
    """A unit under way."""

    store: Store
    kernels: Kernels
    unit: Unit
    result: UnitResult
    stack: ExitStack
    block_bytes: int
    """Of a long cell, over all sides, so much is read at once: all of a unit where every request takes long."""
    handles: dict[int, Handle | StorageError] = field(default_factory=dict)
    before_changed: bool = False
    """Whether a file of the save before is another one than it was: then nothing is known over both."""

    def handle(self, number: int) -> Handle:
        """The unit's file ``number``, opened once.

        Raises:
            StorageError: it can't be opened; the same error every time.
        """
        if number not in self.handles:
            file = self.unit.files[number]
            try:
                self.handles[number] = handle = self.stack.enter_context(open_file(self.store, file))
                if handle.entry.identity != file.identity:
                    self.note_changed(number)
            except StorageError as error:
                self.handles[number] = error
            self.stack.callback(self.look_again, number)
        found = self.handles[number]
        if isinstance(found, StorageError):
            raise found
        return found

    def look_again(self, number: int) -> None:
        """Whether a file is another one after it was read."""
        file = self.unit.files[number]
        if reads_one_version(self.handles[number]):
            return
        if changed_since(self.store, file.name, Entry(file.name, False, 0, file.identity)):
            self.note_changed(number)

    def note_changed(self, number: int) -> None:
        """Note that file ``number`` is another one than was listed."""
        if number in self.unit.of_before:
            self.before_changed = True
        else:
            self.result.changed.add(self.unit.files[number].name)

    # Whole stretches of one file

    def stretches(self, table: Table) -> None:
        """Measure the table."""
        widths = np.array([np.dtype(dtype.carrier).itemsize for dtype in self.unit.dtypes], np.int64)
        sizes = table.length * widths[table.dtype]
        for low, high in windows(table.offset, sizes):
            self.attempt(table.take(slice(low, high)), sizes[low:high])

    def attempt(self, part: Table, sizes: NDArray[np.int64]) -> None:
        """Measure what one window holds; where the file ends inside it, each stretch by itself."""
        try:
            self.window(part, sizes)
        except StorageError as error:
            if len(part) == 1 or not isinstance(error, _DAMAGED):
                self.result.failed(part.row, self.unit.files[0].name, error)
                return
            # What lies before the end, or beside a broken chunk, is there all the same.
            for at in range(len(part)):
                self.attempt(part.take(slice(at, at + 1)), sizes[at : at + 1])

    def window(self, table: Table, sizes: NDArray[np.int64]) -> None:
        """Read stretches that fit the buffer together, or a large one by itself."""
        first, last = int(table.offset[0]), int((table.offset + sizes).max())
        if len(table) == 1 and last - first > LARGE_BYTES:
            self.cells([_cell_of(table, self.unit.dtypes)])
            return
        buffer = _buffer(0, last - first)
        if last > first:
            self.handle(0).read_into(first, memoryview(buffer))  # type: ignore[arg-type]
            # Gaps between small neighbours are read with them, and are no tensor's bytes.
            self.result.num_bytes_read += min(last - first, int(sizes.sum()))
        for kind in np.unique(table.dtype).tolist():
            own = table.take(np.flatnonzero(table.dtype == kind))
            self.measure(buffer, self.unit.dtypes[kind], Runs(own.offset - first, own.length, own.start, own.row))
        self.result.done(table.row)

    def measure(self, buffer: Bytes, dtype: DType, runs: Runs) -> None:
        self.kernels.measure(buffer, dtype, runs, self.result.observed)
        if self.unit.sketch_of is not None:
            self.kernels.sketch(buffer, dtype, replace(runs, row=self.unit.sketch_of[runs.row]), self.result.sketches)

    # Cells of several files

    def cells(self, cells: Iterable[Cell]) -> None:
        """Read, measure and compare cells: the kernels read by themselves what they can."""
        for swept, some in groupby(cells, key=self.is_swept):
            if swept:
                for cell in some:
                    # What may be beyond in a joint is measured here: little of a cell at once.
                    for part in small(cell, JOINT_BYTES) if cell.joints else (cell,):
                        self.read(part.without(self.sweep(part)))
            else:
                self.read(some)

    def read(self, cells: Iterable[Cell]) -> None:
        """Read, measure and compare cells here: large ones block by block, small neighbours together."""
        for long, alike in groupby(cells, key=_is_long):
            for cell in alike if long else ():
                self.long(cell)
            for batch in () if long else batches(alike):
                self.batch(batch)

    def is_swept(self, cell: Cell) -> bool:
        """Whether it is worth a sweep of its own; small neighbours are sooner read together."""
        return self.sweeps and cell.num_bytes > LARGE_BYTES and cell.rows is not None

    @cached_property
    def sweeps(self) -> bool:
        """Whether the unit's files can be swept; not where bytes are wanted for a sketch as well."""
        try:
            return self.kernels.sweeps and self.unit.sketch_of is None and descriptor_of(self.handle(0)) is not None
        except StorageError:
            return False

    def sweep(self, cell: Cell) -> int:
        """Let the kernels read a cell; how many elements are done."""
        block = max(1, SWEEP_BYTES // sum(side.width for side in cell.sides))
        streams = []
        for number, side in enumerate(cell.sides):
            try:
                descriptor = descriptor_of(self.handle(side.file))
            except StorageError:
                descriptor = None
            if descriptor is None:
                return 0
            buffer = _buffer(2 * number, block * side.width)
            streams.append(Stream(descriptor, side.offset, side.dtype, side.row, buffer))
        pairs = [
            (self.unit.pairings[tally], left, right, self.result.tallies[tally : tally + 1])
            for tally, left, right in cell.pairs
        ]
        joints = [(self.unit.joints[seam], at, self.result.seams[seam : seam + 1]) for seam, at in cell.joints]
        done = self.kernels.sweep(streams, pairs, cell.rows, self.result.observed, joints) if cell.rows else 0
        for side in cell.sides if done else ():
            if side.row >= 0:
                self.result.num_bytes_read += done * side.width
                self.result.done([side.row])
            else:
                self.result.num_bytes_reread += done * side.width
        return done

    def long(self, cell: Cell) -> None:
        """Read, measure and compare a long straight cell block by block."""
        (num_elements,), at = cell.shape, np.zeros(1, np.int64)
        block = max(1, self.block_bytes // sum(side.width for side in cell.sides))
        rows = [np.array([side.row]) for side in cell.sides]
        for first in range(0, num_elements, block):
            count = min(block, num_elements - first)
            length, start = np.array([count]), np.array([cell.base + first])
            try:
                buffers = [self.straight(side, number, first, count) for number, side in enumerate(cell.sides)]
            except StorageError:
                self.batch([placed(Part(cell, (first,), (count,)))])
                continue
            for side, buffer, row in zip(cell.sides, buffers, rows, strict=True):
                if side.row >= 0:
                    self.result.num_bytes_read += len(buffer)
                    self.measure(buffer, side.dtype, Runs(at, length, start, row))
                else:
                    self.result.num_bytes_reread += len(buffer)
            for tally, left, right in cell.pairs:
                one, other = (KernelSide(buffers[side], cell.sides[side].dtype, at) for side in (left, right))
                self.compare(tally, one, other, length, start)
            for seam, places in cell.joints:
                self.join(seam, [KernelSide(buffers[n], cell.sides[n].dtype, at) for n in places], length, start)
        # Parts that could not be read have left their mark, and it counts for more.
        self.result.done([side.row for side in cell.sides if side.row >= 0])

    def straight(self, side: Side, number: int, first: int, count: int) -> Bytes:
        """Elements of a straight side, in the buffer ``number``."""
        buffer = _buffer(2 * number, count * side.width)
        self.handle(side.file).read_into(side.offset + first * side.width, memoryview(buffer))  # type: ignore[arg-type]
        return buffer

    def compare(
        self, tally: int, one: KernelSide, other: KernelSide, length: NDArray[np.int64], start: NDArray[np.int64]
    ) -> None:
        pairing, total = self.unit.pairings[tally], self.result.tallies[tally : tally + 1]
        self.kernels.compare(pairing, one, other, length, start, total)

    def join(self, seam: int, sides: Sequence[KernelSide], length: NDArray[np.int64], start: NDArray[np.int64]) -> None:
        self.kernels.join(self.unit.joints[seam], sides, length, start, self.result.seams[seam : seam + 1])

    def batch(self, batch: Sequence[Placed]) -> None:
        """Read, measure and compare parts together; where that fails, each part, and then each side, by itself."""
        try:
            self.together(batch)
        except StorageError as error:
            ((part, _), *others), sides = batch, batch[0][0].cell.sides
            if others:
                for one in batch:
                    self.batch([one])
            elif part.cell.joints:
                # It may be the save before that can't be read.
                self.batch([placed(replace(part, cell=self.without_before(part.cell)))])
            elif len(sides) > 1:
                for side in sides:
                    if side.row >= 0:
                        alone = replace(part, cell=replace(part.cell, sides=(side,), pairs=()))
                        self.batch([placed(alone)])
            else:
                self.result.failed([sides[0].row], self.unit.files[sides[0].file].name, error)

    def without_before(self, cell: Cell) -> Cell:
        """The cell without the sides of the save before, which are its last, and what is measured over both."""
        own = tuple(side for side in cell.sides if side.file not in self.unit.of_before)
        return replace(cell, sides=own, joints=())

    def together(self, batch: Sequence[Placed]) -> None:
        """Read, measure and compare parts.

        Raises:
            StorageError: a side can't be read; nothing was measured then.
        """
        batch_parts = [part for part, _ in batch]
        hulls = [hull([extents[number] for _, extents in batch]) for number in range(len(batch[0][1]))]
        loaded = [self.load(batch, number, reach) for number, reach in enumerate(hulls)]
        starts = [part.starts() for part in batch_parts]
        for number, (first, last) in enumerate(hulls):
            own = sum(math.prod(part.shape) * part.cell.sides[number].width for part in batch_parts)
            if batch_parts[0].cell.sides[number].row >= 0:
                self.result.num_bytes_read += min(last - first, own)
                self.measure_side(batch_parts, number, loaded[number], starts)
            else:
                self.result.num_bytes_reread += min(last - first, own)
        for at, part in enumerate(batch_parts):
            length = np.full(len(starts[at]), part.shape[-1], np.int64)
            for tally, left, right in part.cell.pairs:
                one, other = (
                    KernelSide(loaded[side][at][0], part.cell.sides[side].dtype, loaded[side][at][1])
                    for side in (left, right)
                )
                self.compare(tally, one, other, length, starts[at])
            for seam, places in part.cell.joints:
                found = [KernelSide(loaded[s][at][0], part.cell.sides[s].dtype, loaded[s][at][1]) for s in places]
                self.join(seam, found, length, starts[at])

    def load(
        self, batch: Sequence[Placed], number: int, reach: tuple[int, int]
    ) -> list[tuple[Bytes, NDArray[np.int64]]]:
        """One side of all parts, read at once: for each part the buffer, and where its runs begin in it."""
        first, last = reach
        buffer = _buffer(2 * number, last - first)
        handle = self.handle(batch[0][0].cell.sides[number].file)
        handle.read_into(first, memoryview(buffer))  # type: ignore[arg-type]
        return [_runs_in(buffer, extents[number][0] - first, part, part.cell.sides[number]) for part, extents in batch]

    def measure_side(
        self, batch: Sequence[Part], number: int, loaded: Sequence[tuple[Bytes, NDArray[np.int64]]],
        starts: Sequence[NDArray[np.int64]],
    ) -> None:  # fmt: skip
        """Run the kernels over one side; parts that lie in one buffer and have one dtype go together."""
        together: dict[tuple[int, DType], list[int]] = {}
        for at, part in enumerate(batch):
            if part.cell.sides[number].row >= 0:
                together.setdefault((id(loaded[at][0]), part.cell.sides[number].dtype), []).append(at)
        for (_, dtype), members in together.items():
            rows = np.array([batch[member].cell.sides[number].row for member in members])
            counts = [len(starts[member]) for member in members]
            self.measure(loaded[members[0]][0], dtype, Runs(
                np.concatenate([loaded[member][1] for member in members]),
                np.repeat(np.array([batch[member].shape[-1] for member in members]), counts),
                np.concatenate([starts[member] for member in members]),
                np.repeat(rows, counts),
            ))  # fmt: skip
            self.result.done(rows)


def _cell_of(table: Table, dtypes: Sequence[DType]) -> Cell:
    """A table of one stretch."""
    dtype = dtypes[int(table.dtype[0])]
    side = Side(int(table.row[0]), 0, int(table.offset[0]), (1,), dtype, np.dtype(dtype.carrier).itemsize)
    return Cell((int(table.length[0]),), (1,), int(table.start[0]), (side,))


def _runs_in(buffer: Bytes, at: int, part: Part, side: Side) -> tuple[Bytes, NDArray[np.int64]]:
    """Where a part's runs begin in ``buffer``, whose byte ``at`` is its first; gathered where they have gaps inside."""
    if side.strides[-1] == 1 or part.shape[-1] == 1:
        return buffer, lattice(part.shape[:-1], [stride * side.width for stride in side.strides], at)
    flat = np.frombuffer(buffer, side.dtype.carrier, (len(buffer) - at) // side.width, at)
    gathered = np.ascontiguousarray(view(flat, part.shape, side.strides)).reshape(-1).view(np.uint8)
    steps = [int(np.prod(part.shape[dim + 1 :])) * side.width for dim in range(len(part.shape))]
    return gathered, lattice(part.shape[:-1], steps, 0)
