"""The targeted second pass: how much replicas differ that the digests say are not equal.

Both replicas are read again, cell by cell of the common refinement of their pieces, and compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from auditor.containers.encoded import open_file
from auditor.model.catalog import Catalog, FileState, Piece, Tensor, c_strides, placed_in_file
from auditor.model.dtype import DType, Kind
from auditor.model.mesh import Coordinate
from auditor.model.observation import Difference, Observations, ReplicaGroup, replica_groups
from auditor.model.region import Box, as_boxes, refinement
from auditor.observe.decode import nan_mask, ordered, to_float64
from auditor.storage.store import Handle, StorageError, Store
from auditor.storage.strided import read_slab, slabs

BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be read again to measure differences, a step."""

    num_bytes: int = 1 << 30


def measure_differences(
    store: Store, catalog: Catalog, observations: Observations, budget: Budget = Budget()
) -> Observations:
    """``observations`` with the differences of replicas that are not equal, tensors in model order.

    Tensors beyond the budget are left out: that they differ is known from their digests all the same.
    """
    unequal = [group for group in replica_groups(catalog, observations) if len(group.classes) > 1]
    unequal.sort(key=lambda group: (catalog.tensors[group.tensor].order, catalog.tensors[group.tensor].role.value))
    found: dict[int, list[Difference]] = {}
    num_bytes = 0
    for group in unequal:
        tensor = catalog.tensors[group.tensor]
        cost = tensor.dtype.num_bytes(tensor.num_elements) * 2 * (len(group.classes) - 1)
        if num_bytes + cost > budget.num_bytes:
            break
        try:
            found[group.tensor] = list(_against_reference(store, catalog, group))
        except StorageError:
            continue
        num_bytes += cost
    return replace(observations, differences=found, num_bytes_reread=observations.num_bytes_reread + num_bytes)


def _against_reference(store: Store, catalog: Catalog, group: ReplicaGroup) -> Iterator[Difference]:
    """Each other class of replicas against the majority's, or against the lowest coordinate's where there is none."""
    reference = group.classes[0] if group.majority else min(group.classes, key=lambda members: members[0])
    places = catalog.replicas[group.tensor]
    for members in group.classes:
        if members != reference:
            yield _measure(
                store, catalog, group.tensor, members[0], reference[0], tuple(places[member] for member in members)
            )


def _measure(
    store: Store, catalog: Catalog, tensor: int, one: int, other: int, equal: Sequence[Coordinate]
) -> Difference:
    what = catalog.tensors[tensor]
    sides = [_pieces_of(catalog, tensor, replica) for replica in (one, other)]
    boxes = [[(box, piece) for piece in side for box in as_boxes(piece.region, what.shape)] for side in sides]
    tally = _Tally(what)
    with ExitStack() as stack:
        readers: dict[int, Handle] = {}
        for cell, (left, right) in refinement([[box for box, _ in side] for side in boxes]):
            pair = (boxes[0][left][1], boxes[1][right][1])
            for piece in pair:
                if piece.file not in readers:
                    readers[piece.file] = stack.enter_context(open_file(store, catalog.files[piece.file]))
            tally.compare(cell, [(readers[piece.file], piece) for piece in pair])
    places = catalog.replicas[tensor]
    return tally.difference(places[one], places[other], equal)


def _pieces_of(catalog: Catalog, tensor: int, replica: int) -> list[Piece]:
    return [
        catalog.pieces[int(row)]
        for row in catalog.rows_of(tensor, replica)
        if catalog.file_of(int(row)).state is FileState.PRESENT
    ]


class _Tally:
    """Running totals over the cells of one comparison."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.carrier = tensor, np.dtype(tensor.dtype.carrier)
        self.num_differ = self.num_compared = self.num_bits = self.num_equal = 0
        self.max_difference = self.scale = 0.0
        self.max_ulps = 0 if tensor.dtype.kind is Kind.FLOAT else -1
        self.first: int | None = None
        # Not filled with zeros: for a small tensor that would take longer than all the rest.
        self.buffers = np.empty(BUFFER_BYTES, np.uint8), np.empty(BUFFER_BYTES, np.uint8)

    def compare(self, cell: Box, sides: Sequence[tuple[Handle, Piece]]) -> None:
        """Add one cell that lies within one piece of either side."""
        shape, widen = cell.shape, self.tensor.dtype.kind is Kind.COMPLEX
        # Cut by the tensor's own strides, so that both sides are cut alike; each slab must fit either side's span.
        for start, part in _cuts(shape, [placed_in_file(p, self.tensor.shape, cell)[1] for _, p in sides],
                                 BUFFER_BYTES // self.carrier.itemsize // (2 if widen else 1)):  # fmt: skip
            low = tuple(a + b for a, b in zip(cell.start, start, strict=True))
            box = Box(low, tuple(a + n for a, n in zip(low, part, strict=True)))
            left, right = (
                self.read(h, p, box, buffer, widen) for (h, p), buffer in zip(sides, self.buffers, strict=True)
            )
            self.add(box, left, right)

    def read(
        self, handle: Handle, piece: Piece, box: Box, buffer: NDArray[np.uint8], widen: bool
    ) -> NDArray[np.unsignedinteger]:
        offset, strides = placed_in_file(piece, self.tensor.shape, box)
        shape = box.shape
        if widen:
            shape, strides, offset = (*shape, 2), (*(2 * s for s in strides), 1), 2 * offset
        (slab,) = slabs(shape, strides, 1 << 62)
        at = piece.offset + offset * self.carrier.itemsize
        return read_slab(handle, slab, strides, at, self.carrier, buffer)

    def add(self, box: Box, left: NDArray[np.unsignedinteger], right: NDArray[np.unsignedinteger]) -> None:
        differ = left != right
        elements = differ.any(axis=-1) if differ.ndim > len(box.start) else differ
        self.num_compared += elements.size
        dtype = self.tensor.dtype
        self.scale = max(self.scale, _largest(left, dtype), _largest(right, dtype))
        count = int(np.count_nonzero(elements))
        if not count:
            return
        self.num_differ += count
        where = np.unravel_index(int(np.argmax(elements)), elements.shape)
        index = sum((a + int(i)) * s for a, i, s in zip(box.start, where, c_strides(self.tensor.shape), strict=True))
        self.first = index if self.first is None else min(self.first, index)
        one, other = left[differ], right[differ]
        self.num_bits = min(1 << 62, self.num_bits + int(np.bitwise_count(one ^ other).sum()))
        self.add_values(one, other, dtype)

    def add_values(self, one: NDArray[np.unsignedinteger], other: NDArray[np.unsignedinteger], dtype: DType) -> None:
        """Take in the differing elements."""
        a, b = to_float64(one, dtype), to_float64(other, dtype)
        both_nan = nan_mask(one, dtype) & nan_mask(other, dtype)
        if dtype.kind in (Kind.FLOAT, Kind.COMPLEX):
            # Integers with other bits are other numbers, whatever float64 makes of them.
            self.num_equal += int(np.count_nonzero((a == b) | both_nan))
        self.max_difference = max(self.max_difference, _largest_gap(one, other, dtype))
        if self.max_ulps >= 0:
            steps = (
                ordered(one, dtype).astype(object) - ordered(other, dtype)
                if dtype.bits == 64
                else (ordered(one, dtype) - ordered(other, dtype))
            )
            self.max_ulps = max(self.max_ulps, int(np.abs(steps).max(initial=0)))

    def difference(self, place: Coordinate, reference: Coordinate, equal: Sequence[Coordinate]) -> Difference:
        """The finished record."""
        shape = self.tensor.shape
        first = np.unravel_index(self.first or 0, shape) if shape else ()
        relative = self.max_difference / self.scale if self.scale else 0.0
        return Difference(
            place, reference, self.num_differ, self.num_compared, self.num_bits, self.max_difference, relative,
            self.max_ulps, self.num_equal, tuple(map(int, first)), tuple(equal),
        )  # fmt: skip


def _largest_gap(one: NDArray[np.unsignedinteger], other: NDArray[np.unsignedinteger], dtype: DType) -> float:
    """Max |a - b| over elements that are finite on both sides; anything else differs without a size."""
    if dtype.kind in (Kind.SIGNED, Kind.UNSIGNED) and dtype.bits == 64:
        # Exact: float64 would round both sides first. Subtraction of the smaller one never wraps.
        kind = "<i8" if dtype.kind is Kind.SIGNED else "<u8"
        a, b = np.ascontiguousarray(one).view(kind), np.ascontiguousarray(other).view(kind)
        return float((np.maximum(a, b).view("<u8") - np.minimum(a, b).view("<u8")).max(initial=0))
    a, b = to_float64(one, dtype), to_float64(other, dtype)
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not (finite | same).all():
        return float("inf")
    with np.errstate(over="ignore"):
        return float(np.abs(a[finite] - b[finite]).max(initial=0.0))


def _largest(bits: NDArray[np.unsignedinteger], dtype: DType) -> float:
    values = to_float64(bits, dtype)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _cuts(
    shape: tuple[int, ...], strides: Sequence[Sequence[int]], limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and shape of parts whose span fits ``limit`` under all given strides."""
    largest = tuple(max(column) for column in zip(*strides, strict=True))
    for slab in slabs(shape, largest, limit):
        yield slab.start, slab.shape
