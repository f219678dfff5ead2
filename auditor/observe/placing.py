"""Where elements lie: boxes of tensors as they are stored in one or several files, in steps that the kernels take.

All numbers of elements here count *carriers*: a complex element is two of them, along a last dim of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog, Piece, Tensor, c_strides, placed_in_file
from auditor.model.dtype import DType, Kind
from auditor.model.region import Box
from auditor.observe.kernels import Rows
from auditor.storage.strided import slabs


@dataclass(frozen=True, slots=True)
class Side:
    """One stored copy of a cell's elements."""

    row: int
    """The piece to which they belong."""
    file: int
    offset: int
    """Byte of the first element."""
    strides: tuple[int, ...]
    """Carriers between neighbours along the cell's dims."""
    dtype: DType
    width: int
    """Bytes of one carrier."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of one tensor, or of several of one shape, that lies within one piece on every side."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    """Carriers between neighbours in the tensor's C order; 1 along the last dim."""
    base: int
    """C-order index of the first element."""
    sides: tuple[Side, ...]
    pairs: tuple[tuple[int, int, int], ...] = ()
    """Comparisons to make: number of the tally, left side, right side."""
    joints: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Joints to measure: number of the seam, and the sides as the joint names its tensors."""

    @property
    def num_bytes(self) -> int:
        """Of all sides together."""
        return math.prod(self.shape) * sum(side.width for side in self.sides)

    @property
    def straight(self) -> bool:
        """Whether the elements lie without gaps in the tensor and on every side."""
        return len(self.shape) == 1 and all(side.strides == (1,) for side in self.sides)

    @property
    def rows(self) -> Rows | None:
        """The elements as rows of one length, where they lie without gaps on every side; None where they don't."""
        if len(self.shape) > 2 or any(side.strides != (self.shape[-1], 1)[-len(self.shape) :] for side in self.sides):
            return None
        return Rows(math.prod(self.shape), self.base, self.shape[-1], self.steps[0])

    def without(self, count: int) -> Iterator[Cell]:
        """Cells of all elements but the first ``count``; only of a cell that has :attr:`rows`."""
        length = self.shape[-1]
        whole, rest = divmod(count, length)
        if rest:
            yield self._from(whole, rest, (length - rest,))
        following = whole + (rest > 0)
        num_rows = math.prod(self.shape[:-1])
        if following < num_rows:
            yield self._from(following, 0, (num_rows - following, length)[-len(self.shape) :])

    def _from(self, row: int, skip: int, shape: tuple[int, ...]) -> Cell:
        """``shape`` elements from number ``skip`` of a row on."""
        done, steps = row * self.shape[-1] + skip, self.steps[-len(shape) :]
        sides = tuple(
            replace(side, offset=side.offset + done * side.width, strides=side.strides[-len(shape) :])
            for side in self.sides
        )
        return replace(self, shape=shape, steps=steps, base=self.base + row * self.steps[0] + skip, sides=sides)


@dataclass(frozen=True, slots=True)
class Part:
    """A small enough part of a cell."""

    cell: Cell
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def extent(self, side: Side) -> tuple[int, int]:
        """First byte, and the byte after the last, of what lies in a side's file."""
        first = side.offset + _dot(self.start, side.strides) * side.width
        reach = _dot([n - 1 for n in self.shape], side.strides)
        return first, first + (reach + 1) * side.width

    def starts(self) -> NDArray[np.int64]:
        """C-order index of every run's first element."""
        base = self.cell.base + _dot(self.start, self.cell.steps)
        return lattice(self.shape[:-1], self.cell.steps, base)


def lattice(extents: Sequence[int], strides: Sequence[int], base: int) -> NDArray[np.int64]:
    """The sums of base and i·stride over all indices i below ``extents``, in C order; further strides are ignored."""
    found = np.array([base], np.int64)
    for extent, stride in zip(extents, strides, strict=False):
        found = (found[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return found


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))


def cell_of(tensor: Tensor, box: Box, pieces: Sequence[Piece], dtypes: Sequence[DType]) -> Cell:
    """The cell of ``box``, which lies inside every one of ``pieces`` (of tensors of one shape)."""
    halves = tensor.dtype.kind is Kind.COMPLEX
    steps, shape = c_strides(tensor.shape), box.shape
    base = _dot(box.start, steps)
    sides = []
    for piece, dtype in zip(pieces, dtypes, strict=True):
        first, strides = placed_in_file(piece, tensor.shape, box)
        if halves:
            first, strides = 2 * first, (*(2 * s for s in strides), 1)
        width = np.dtype(dtype.carrier).itemsize
        sides.append(Side(piece.index, piece.file, piece.offset + first * width, tuple(strides), dtype, width))
    if halves:
        shape, steps, base = (*shape, 2), (*(2 * s for s in steps), 1), 2 * base
    return _simplified(Cell(shape, steps, base, tuple(sides)))


def flat_cell(start: int, stop: int, pieces: Sequence[Piece], firsts: Sequence[int], dtypes: Sequence[DType]) -> Cell:
    """The cell of a flat range that lies without gaps in every one of ``pieces``, which begin at ``firsts``."""
    factor = 2 if dtypes[0].kind is Kind.COMPLEX else 1
    sides = tuple(
        Side(
            piece.index,
            piece.file,
            piece.offset + (start - first) * (dtype.stored_bits // 8),
            (1,),
            dtype,
            np.dtype(dtype.carrier).itemsize,
        )
        for piece, first, dtype in zip(pieces, firsts, dtypes, strict=True)
    )
    return Cell(((stop - start) * factor,), (1,), start * factor, sides)


def _simplified(cell: Cell) -> Cell:
    """Fewer dims: those of extent 1 dropped, those merged that lie without gaps in the tensor and on all sides."""
    columns = [cell.steps, *(side.strides for side in cell.sides)]
    shape: list[int] = []
    kept: list[list[int]] = [[] for _ in columns]
    for dim, extent in enumerate(cell.shape):
        if extent == 1:
            continue
        mine = [column[dim] for column in columns]
        if shape and all(of[-1] == extent * stride for of, stride in zip(kept, mine, strict=True)):
            shape[-1] *= extent
            for of, stride in zip(kept, mine, strict=True):
                of[-1] = stride
        else:
            shape.append(extent)
            for of, stride in zip(kept, mine, strict=True):
                of.append(stride)
    if not shape or kept[0][-1] != 1:
        # The last dim is the run; here every run is one element.
        shape.append(1)
        for of in kept:
            of.append(1)
    sides = tuple(
        Side(side.row, side.file, side.offset, tuple(of), side.dtype, side.width)
        for side, of in zip(cell.sides, kept[1:], strict=True)
    )
    return replace(cell, shape=tuple(shape), steps=tuple(kept[0]), sides=sides)


def parts(cell: Cell, limit: int) -> Iterator[Part]:
    """Cut a cell into parts whose bytes span at most ``limit`` on each side, if need be element by element."""
    width = max(side.width for side in cell.sides)
    largest = [max(column) for column in zip(*(side.strides for side in cell.sides), strict=True)]
    for slab in slabs(cell.shape, largest, max(1, limit // width)):
        yield Part(cell, slab.start, slab.shape)


def small(cell: Cell, num_bytes: int) -> Iterator[Cell]:
    """The cell cut into cells of about so many bytes over all sides."""
    if cell.num_bytes <= num_bytes:
        yield cell
        return
    for part in parts(cell, num_bytes // (2 * len(cell.sides))):
        sides = tuple(replace(side, offset=part.extent(side)[0]) for side in cell.sides)
        yield replace(cell, shape=part.shape, base=int(part.starts()[0]), sides=sides)


def flat_starts(catalog: Catalog, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For pieces that lie without gaps both in their file and in their tensor's C order: the first element's index.

    -1 for all others. Elements, not carriers.
    """
    pieces = catalog.pieces
    found = np.full(len(rows), -1, np.int64)
    dims_of, regions = pieces.num_dims[rows], pieces.region_at[rows]
    flat = np.flatnonzero(dims_of < 0)
    found[flat] = pieces.pool[regions[flat]]
    plain = pieces.strides_at[rows] < 0
    found[np.flatnonzero((dims_of == 0) & plain)] = 0
    by_dims: dict[int, list[int]] = {}
    for number, tensor in enumerate(catalog.tensors):
        by_dims.setdefault(len(tensor.shape), []).append(number)
    place = np.zeros(len(catalog.tensors), np.int64)
    for dims, numbers in by_dims.items():
        of_dims = np.flatnonzero((dims_of == dims) & plain) if dims else ()
        if not len(of_dims):
            continue
        place[numbers] = np.arange(len(numbers))
        shapes = np.array([catalog.tensors[number].shape for number in numbers], np.int64)
        own = shapes[place[pieces.tensor[rows[of_dims]]]]
        found[of_dims] = _starts(pieces.pool, regions[of_dims], own)
    return found


def _starts(pool: NDArray[np.int64], at: NDArray[np.int64], shapes: NDArray[np.int64]) -> NDArray[np.int64]:
    dims = shapes.shape[1]
    corner = at[:, None] + np.arange(dims)
    starts, extents = pool[corner], pool[corner + dims] - pool[corner]
    trailing = np.cumprod((extents == shapes)[:, ::-1], axis=1).sum(axis=1)
    leading = np.cumprod(extents == 1, axis=1).sum(axis=1)
    steps = np.ones_like(shapes)
    steps[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    start: NDArray[np.int64] = np.where(leading >= dims - 1 - trailing, (starts * steps).sum(axis=1), -1)
    return start
