"""The streaming pass: every wanted byte is read once into a reused buffer, all measures are taken while it is there.

Work is cut into units of one file and some megabytes each. A unit opens its file once, reads neighbouring small pieces
together and large ones in slabs. Memory is one buffer a worker, whatever the size of the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import WITHHELD, Catalog, File, FileState, Piece, Role, Tensor, c_strides
from auditor.model.dtype import Kind
from auditor.model.observation import OBSERVED, Observations, Read
from auditor.model.region import Box, FlatRange
from auditor.observe.digest import add, digest_array
from auditor.observe.statistics import Statistics, statistics
from auditor.storage.store import Entry, Handle, ObjectMissingError, ShortReadError, StorageError, Store, changed_since
from auditor.storage.strided import read_slab, slabs, view

BUFFER_BYTES = 1 << 20
"""One worker's buffer: with the kernels' temporaries it stays inside a usual L2 cache."""
UNIT_BYTES = 64 << 20
"""About how much one unit of work reads: enough to hide its overhead, few enough to keep workers busy."""
MAX_GAP_BYTES = 4 << 10
"""Pieces closer than a page are read together: the page is read anyway, and reading costs less than another call."""

_local = threading.local()


def _buffer() -> bytearray:
    """This worker's buffer, made once: fresh memory for every read would cost several times the read."""
    if not hasattr(_local, "buffer"):
        _local.buffer = bytearray(BUFFER_BYTES)
    buffer: bytearray = _local.buffer
    return buffer


@dataclass(slots=True)
class UnitResult:
    """What one unit measured."""

    rows: NDArray[np.int64]
    observed: NDArray[np.void]
    num_bytes_read: int = 0
    failure: str = ""
    changed: bool = False


def wanted_rows(catalog: Catalog, *, only_replicated: bool) -> NDArray[np.int64]:
    """Pieces to read: never padding (uninitialised memory in healthy runs) nor packed elements (no kernels yet)."""
    wanted = np.array([
        tensor.role is not Role.PADDING and tensor.dtype.bits >= 8 and (not only_replicated or len(replicas) > 1)
        for tensor, replicas in zip(catalog.tensors, catalog.replicas, strict=True)
    ], bool)  # fmt: skip
    return np.flatnonzero(wanted[catalog.pieces.tensor]) if len(catalog.pieces) else np.zeros(0, np.int64)


def observe(
    store: Store, catalog: Catalog, rows: NDArray[np.int64], executor: Executor,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Observations:  # fmt: skip
    """Read the pieces ``rows`` once and measure them.

    ``progress`` is told the bytes of every unit that is done. Failures of storage are in the result, not raised.
    """
    pieces = np.zeros(len(catalog.pieces), OBSERVED)
    failures: dict[int, str] = {}
    changed: set[str] = set()
    num_bytes = 0
    plan = list(_units(catalog, rows))
    for (file, _), result in zip(plan, executor.map(_Unit(store, catalog), plan), strict=True):
        pieces[result.rows] = result.observed
        num_bytes += result.num_bytes_read
        if result.failure:
            failures.setdefault(file, result.failure)
        if result.changed:
            changed.add(catalog.files[file].name)
        progress(result.num_bytes_read)
    return Observations(pieces, failures, tuple(sorted(changed)), num_bytes_read=num_bytes)


def _units(catalog: Catalog, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """File number and pieces in file order, cut at about :data:`UNIT_BYTES`."""
    pieces = catalog.pieces
    order = rows[np.lexsort((pieces.offset[rows], pieces.file[rows]))]
    sizes = np.cumsum(catalog.num_bytes()[order])
    files = pieces.file[order]
    keys = np.stack([files, sizes // UNIT_BYTES]) if len(order) else np.zeros((2, 0), np.int64)
    cuts = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
    for part in np.split(order, cuts):
        if len(part):
            yield int(pieces.file[part[0]]), part


@dataclass(frozen=True)
class _Unit:
    """Does one unit; a class so that any executor can ship it."""

    store: Store
    catalog: Catalog

    def __call__(self, unit: tuple[int, NDArray[np.int64]]) -> UnitResult:
        number, rows = unit
        file = self.catalog.files[number]
        result = UnitResult(rows, np.zeros(len(rows), OBSERVED))
        if file.state is not FileState.PRESENT:
            result.observed["read"] = Read.FAILED if file.state in WITHHELD else Read.LOST
            result.failure = file.detail
            return result
        try:
            with self.store.open(file.name) as handle:
                self.read(handle, file, rows, result)
        except StorageError as error:
            undone = result.observed["read"] == Read.NOT_ASKED
            gone = isinstance(error, (ShortReadError, ObjectMissingError))
            result.observed["read"][undone] = Read.LOST if gone else Read.FAILED
            result.failure = str(error)
        result.changed = result.changed or changed_since(
            self.store, file.name, Entry(file.name, False, 0, file.identity)
        )
        return result

    def read(self, handle: Handle, file: File, rows: NDArray[np.int64], result: UnitResult) -> None:
        result.changed = handle.entry.identity != file.identity
        for window in _windows(self.catalog, rows):
            try:
                self.measure(handle, window, rows, result)
            except ShortReadError:
                # What lies before the end is there all the same.
                for at in window:
                    self.measure(handle, [at], rows, result)

    def measure(self, handle: Handle, window: list[int], rows: NDArray[np.int64], result: UnitResult) -> None:
        members = [self.catalog.pieces[int(rows[at])] for at in window]
        measure = _Window(handle, [self.catalog.tensors[piece.tensor] for piece in members], members)
        for at, observed in zip(window, measure.run(), strict=True):
            result.observed[at] = observed
        result.num_bytes_read += measure.num_bytes_read


def _extent(tensor: Tensor, piece: Piece) -> int:
    """Bytes from a piece's first to its last."""
    if 0 in piece.shape:
        return 0
    reach = sum((n - 1) * s for n, s in zip(piece.shape, piece.strides, strict=True))
    return (reach + 1) * tensor.dtype.bits // 8


def _windows(catalog: Catalog, rows: NDArray[np.int64]) -> Iterator[list[int]]:
    """Positions in ``rows`` of pieces that are read together: neighbours that fit the buffer, or one large piece."""
    window: list[int] = []
    start = end = 0
    for at, row in enumerate(rows.tolist()):
        piece = catalog.pieces[row]
        stop = piece.offset + _extent(catalog.tensors[piece.tensor], piece)
        same = window and (piece.offset, stop) == (start, end)
        if window and not same and (max(end, stop) - start > BUFFER_BYTES or piece.offset - end > MAX_GAP_BYTES):
            yield window
            window = []
        if not window:
            start = end = piece.offset
        window.append(at)
        end = max(end, stop)
    if window:
        yield window


_Place = tuple[int, tuple[int, ...], tuple[int, ...], str]
"""Offset, shape, strides and carrier: what makes two pieces the same bytes seen alike."""


@dataclass(slots=True)
class _Window:
    """Pieces that share one read, or one piece that needs several."""

    handle: Handle
    tensors: Sequence[Tensor]
    pieces: Sequence[Piece]
    num_bytes_read: int = field(default=0)

    def run(self) -> list[tuple[object, ...]]:
        start = min(piece.offset for piece in self.pieces)
        extents = [_extent(tensor, piece) for tensor, piece in zip(self.tensors, self.pieces, strict=True)]
        end = max(piece.offset + extent for piece, extent in zip(self.pieces, extents, strict=True))
        if end - start > BUFFER_BYTES:
            return self.in_slabs()
        buffer = _buffer()
        self.handle.read_into(start, memoryview(buffer)[: end - start])
        self.num_bytes_read += end - start
        rows = []
        for tensor, piece, extent in zip(self.tensors, self.pieces, extents, strict=True):
            carrier = np.dtype(tensor.dtype.carrier)
            # Offsets in a container need not be aligned; numpy copes, at the price of a copy later.
            flat = np.frombuffer(buffer, carrier, extent // carrier.itemsize, piece.offset - start)
            total = _Total(tensor, piece)
            shape, strides = total.stored_shape_and_strides()
            total.take((0,) * len(shape), view(flat, shape, strides) if flat.size else flat.reshape(shape))
            rows.append(total.row())
        return rows

    def in_slabs(self) -> list[tuple[object, ...]]:
        """A large piece, or several that are the same bytes seen alike (tied tensors), slab by slab."""
        totals = [_Total(tensor, piece) for tensor, piece in zip(self.tensors, self.pieces, strict=True)]
        alike: dict[_Place, list[_Total]] = {}
        for total in totals:
            shape, strides = total.stored_shape_and_strides()
            alike.setdefault((total.piece.offset, shape, strides, total.tensor.dtype.carrier), []).append(total)
        for (offset, shape, strides, kind), members in alike.items():
            carrier: np.dtype[np.unsignedinteger] = np.dtype(kind)
            for slab in slabs(shape, strides, BUFFER_BYTES // carrier.itemsize):
                bits = read_slab(self.handle, slab, strides, offset, carrier, _buffer())
                self.num_bytes_read += slab.span * carrier.itemsize
                for total in members:
                    total.take(slab.start, bits)
        return [total.row() for total in totals]


class _Total:
    """Sums over the slabs of one piece."""

    def __init__(self, tensor: Tensor, piece: Piece) -> None:
        self.tensor, self.piece = tensor, piece
        self.lanes = (0, 0)
        self.statistics = Statistics()
        self.halves = tensor.dtype.kind is Kind.COMPLEX
        if isinstance(piece.region, FlatRange):
            self.steps: tuple[int, ...] = (1,)
            self.base = piece.region.start
        else:
            self.steps = c_strides(tensor.shape)
            self.base = _flat_index(piece.region, self.steps)

    def stored_shape_and_strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the array in the file, in carriers: complex elements are two along a last dim of their own."""
        if self.halves:
            return (*self.piece.shape, 2), (*(2 * s for s in self.piece.strides), 1)
        return self.piece.shape, self.piece.strides

    def take(self, start: tuple[int, ...], bits: NDArray[np.unsignedinteger]) -> None:
        inside = start[:-1] if self.halves else start
        base = self.base + sum(a * s for a, s in zip(inside, self.steps, strict=True))
        self.lanes = add(self.lanes, digest_array(bits, self.tensor.dtype, base, self.steps))
        self.statistics += statistics(bits, self.tensor.dtype)

    def row(self) -> tuple[object, ...]:
        """A row of :data:`~auditor.model.observation.OBSERVED`."""
        s = self.statistics
        return (Read.DONE, *self.lanes, s.num_nan, s.num_infinite, s.num_zero, s.minimum, s.maximum, s.sum_squares)


def _flat_index(box: Box, strides: Sequence[int]) -> int:
    return sum(a * s for a, s in zip(box.start, strides, strict=True))
