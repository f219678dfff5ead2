"""One box of one replica, put together from the byte ranges of the original files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.containers.encoded import open_file
from auditor.errors import AuditorError
from auditor.model.catalog import Catalog, FileState, Piece, Tensor, placed_in_file
from auditor.model.dtype import Kind
from auditor.model.region import Box, as_boxes, whole
from auditor.storage.store import Handle, StorageError, Store
from auditor.storage.strided import read_slab, slabs

BUFFER_BYTES = 1 << 20

Seen = Callable[[tuple[int, ...], NDArray[Any]], None]
"""Is shown every stretch of elements as it was read: the first one's index in the tensor, and their bits."""


class SourceLostError(AuditorError, RuntimeError):
    """Bytes that the view should show are not to be had. Never shown as a fill value."""


def element_type(tensor: Tensor) -> np.dtype[np.generic]:
    """How the assembled elements are held: native numpy where numpy knows the dtype, else unsigned of that width."""
    if tensor.dtype.kind is Kind.COMPLEX:
        return np.dtype(f"<c{tensor.dtype.bits // 8}")
    if tensor.dtype.kind is Kind.BOOL:
        return np.dtype(bool)
    native = {
        "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    }  # fmt: skip
    name = tensor.dtype.name if tensor.dtype.name in native else f"uint{max(8, tensor.dtype.bits)}"
    return np.dtype(name).newbyteorder("<")


def read_box(
    store: Store, catalog: Catalog, tensor: int, replica: int, box: Box, seen: Seen | None = None
) -> NDArray[np.generic]:
    """The elements of ``box`` of one replica.

    ``seen`` is shown what is read before it is put in its place; elements that several pieces hold are shown each time.

    Raises:
        SourceLostError: a file is missing, damaged or unreadable, or no piece holds some element.
    """
    what = catalog.tensors[tensor]
    result = np.empty(box.shape, element_type(what))
    filled = np.zeros(box.shape, bool)
    pieces = (catalog.pieces[row] for row in catalog.rows_of(tensor, replica).tolist())
    _fill(store, catalog, what, box, pieces, result, filled, seen)
    missing = box.num_elements - int(np.count_nonzero(filled))
    if missing:
        raise SourceLostError(f"{what.name} ({what.role.value}): no piece holds {missing} elements of {box}")
    return result


def read_piece(store: Store, catalog: Catalog, row: int) -> NDArray[np.generic]:
    """One piece as stored, in the shape of its region (flat for a flat range)."""
    piece = catalog.pieces[row]
    what = catalog.tensors[piece.tensor]
    result = np.empty(piece.shape, element_type(what))
    file = catalog.files[piece.file]
    _check(catalog, piece)
    try:
        with open_file(store, file) as handle:
            _copy(handle, piece.offset, whole(piece.shape), piece.strides, result)
    except StorageError as error:
        raise SourceLostError(str(error)) from error
    return result


def _fill(
    store: Store, catalog: Catalog, what: Tensor, box: Box, pieces: Iterable[Piece], result: NDArray[np.generic],
    filled: NDArray[np.bool_], seen: Seen | None,
) -> None:  # fmt: skip
    with ExitStack() as stack:
        handles: dict[int, Handle] = {}
        for piece in pieces:
            for part in as_boxes(piece.region, what.shape):
                common = part.intersection(box)
                if common is None:
                    continue
                _check(catalog, piece)
                inside = tuple(
                    slice(a - o, b - o) for a, b, o in zip(common.start, common.stop, box.start, strict=True)
                )
                offset, strides = placed_in_file(piece, what.shape, common)
                try:
                    if piece.file not in handles:
                        handles[piece.file] = stack.enter_context(open_file(store, catalog.files[piece.file]))
                    at = piece.offset + offset * result.itemsize
                    # Of a tensor without dims an empty index would give a copy, not the array itself.
                    _copy(handles[piece.file], at, common, strides, result[inside or ...], seen)
                except StorageError as error:
                    raise SourceLostError(str(error)) from error
                filled[inside] = True


def _check(catalog: Catalog, piece: Piece) -> None:
    file = catalog.files[piece.file]
    if file.state is not FileState.PRESENT:
        raise SourceLostError(f"{file.name} is {file.state.value}: {file.detail}")


def _copy(
    handle: Handle, offset: int, box: Box, strides: tuple[int, ...], target: NDArray[np.generic],
    seen: Seen | None = None,
) -> None:  # fmt: skip
    """Copy ``box``, a strided array of the file, into ``target``, slab by slab."""
    carrier = np.dtype(f"V{target.itemsize}")
    buffer = bytearray(max(BUFFER_BYTES, target.itemsize))
    raw = target.view(carrier)
    for slab in slabs(box.shape, strides, len(buffer) // target.itemsize):
        inside = tuple(slice(a, a + n) for a, n in zip(slab.start, slab.shape, strict=True))
        bits = read_slab(handle, slab, strides, offset, carrier, buffer)
        raw[inside] = bits
        if seen:
            seen(tuple(map(sum, zip(box.start, slab.start, strict=True))), bits)
