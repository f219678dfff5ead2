"""One rank's part of a witness: a safetensors file whose tensors are columns. ``docs/witness.md`` specifies it.

Read whole, with every number held against the others before it is used: it lies beside a checkpoint of strangers.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.json_document import parse_json
from auditor.containers.safetensors_file import Record, SafetensorsFile, read_safetensors
from auditor.model.catalog import Role
from auditor.model.dtype import DTYPES
from auditor.model.mesh import Coordinate
from auditor.model.region import Box
from auditor.model.witness import MEASURES, WITNESSED, WitnessedTensor, WitnessPart
from auditor.storage.store import Handle, ShortReadError, read_bytes

VERSION = "1"
MAX_BYTES = 256 << 20
"""A part of two million pieces."""
MAX_HEADER_BYTES = 16 << 20
MAX_TEXT = 32 << 20
"""Bytes of all names of a part, unpacked."""
MAX_DIMS = 64
MAX_RANKS = 10_000_000
MAX_PIECES, MAX_TENSORS, MAX_PLACES = 2_000_000, 500_000, 1 << 16
"""Of one rank. A rank that trains 500 billion parameters by itself holds a hundredth of that."""
_MAX_ENTRIES = {
    **dict.fromkeys(("tensor.name", "tensor.role", "tensor.dtype", "tensor.num_dims", "box.num_dims"), MAX_TENSORS),
    **dict.fromkeys(("tensor.shape", "box.bounds"), 8 * MAX_TENSORS), "names": MAX_TEXT,
}  # fmt: skip
"""Of the columns; those of pieces have :data:`MAX_PIECES`. Zeros are honest numbers and take no room in a sparse file,
but entries become objects here."""

_ROLES = tuple(role.value for role in Role)
_CODES = {"U64": "<u8", "I64": "<i8", "F64": "<f8", "U32": "<u4", "I32": "<i4", "F32": "<f4", "I16": "<i2", "I8": "<i1",
          "U8": "u1"}  # fmt: skip
_WORDS = {np.dtype(code).str.lstrip("|"): word for word, code in _CODES.items()}
_LENGTH = struct.Struct("<Q")
_COUNTS = ("num_nan", "num_infinite", "num_zero")
_EXTREMA = ("minimum", "maximum")
_OF_PIECES = tuple(f"piece.{name}" for name in ("tensor", "place", "start", "stop", *MEASURES))

Columns = dict[str, NDArray[Any]]


def encode_part(part: WitnessPart) -> bytes:
    """The file's bytes: at most 96 a piece of two dims, its names included, where there are hundreds."""
    names: dict[str, int] = {}
    pieces = part.pieces
    dtypes = sorted({tensor.dtype.name for tensor in part.tensors})
    columns: Columns = {
        "tensor.name": _least([names.setdefault(tensor.name, len(names)) for tensor in part.tensors]),
        "tensor.role": np.array([_role_code(tensor.role) for tensor in part.tensors], "u1"),
        "tensor.dtype": np.array([dtypes.index(tensor.dtype.name) for tensor in part.tensors], "u1"),
        "tensor.num_dims": np.array([len(tensor.shape) for tensor in part.tensors], "u1"),
        "tensor.shape": _least([extent for tensor in part.tensors for extent in tensor.shape]),
        "box.num_dims": np.array([len(box.start) for box in part.boxes], "u1"),
        "box.bounds": _least([bound for box in part.boxes for bound in (*box.start, *box.stop)]),
        "piece.tensor": _least(pieces["tensor"]), "piece.place": _least(pieces["place"]),
        "piece.start": _least(pieces["start"]), "piece.stop": _least(pieces["stop"]),
        "piece.lane0": pieces["lane0"].copy(), "piece.lane1": pieces["lane1"].copy(),
        **{f"piece.{name}": _least(pieces[name]) for name in _COUNTS},
        **{f"piece.{name}": _narrow(pieces[name]) for name in _EXTREMA},
        "piece.sum_squares": pieces["sum_squares"].copy(),
        "names": _packed([*names]),
    }  # fmt: skip
    return _safetensors(_head(part, dtypes), columns)


def _head(part: WitnessPart, dtypes: Sequence[str]) -> dict[str, str]:
    return {
        "auditor.witness": VERSION, "step": str(part.step), "rank": str(part.rank), "num_ranks": str(part.num_ranks),
        "launch": part.launch, "attempt": str(part.attempt), "taken": f"{part.taken:.3f}",
        "dtypes": json.dumps(dtypes), "places": json.dumps([place.as_dict() for place in part.places]),
        "scalars": json.dumps(dict(part.scalars)),
    }  # fmt: skip


def _role_code(role: Role | None) -> int:
    return 255 if role is None else _ROLES.index(role.value)


def _least(values: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """As 32-bit integers where they fit."""
    array = np.asarray(values, np.int64)
    small = not len(array) or (int(array.min()) >= -(1 << 31) and int(array.max()) < 1 << 31)
    return array.astype("<i4" if small else "<i8")


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """As 32-bit floats where they hold every value exactly."""
    with np.errstate(over="ignore"):
        small = values.astype("<f4")
    return small if (small.astype("<f8") == values).all() else values.astype("<f8")


def _packed(names: Sequence[str]) -> NDArray[Any]:
    return np.frombuffer(zlib.compress(json.dumps(list(names)).encode(), 6), "u1")


def _safetensors(metadata: Mapping[str, str], columns: Columns) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    # Widest first: then every column is aligned.
    ordered = sorted(columns.items(), key=lambda item: -item[1].itemsize)
    for name, column in ordered:
        word = _WORDS[column.dtype.str.lstrip("|")]
        header[name] = {"dtype": word, "shape": [len(column)], "data_offsets": [at, at + column.nbytes]}
        at += column.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(c).tobytes() for _, c in ordered)])


def read_part(handle: Handle, file: str) -> WitnessPart:
    """The part that one rank left.

    Raises:
        DamagedError: it is cut short, or contradicts itself.
        LimitError: it is larger than any honest one.
        StorageError: storage failed.
    """
    if handle.entry.num_bytes > MAX_BYTES:
        raise LimitError(f"it has {handle.entry.num_bytes} bytes, at most {MAX_BYTES} are read")
    content = read_safetensors(handle, MAX_HEADER_BYTES)
    if content.metadata.get("auditor.witness") != VERSION:
        raise DamagedError("it is no witness of a version that is known here")
    try:
        columns = {name: _column(handle, content.records[name]) for name in (*_MAX_ENTRIES, *_OF_PIECES)}
        return _Reader(content, columns).part(file)
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedError(f"it contradicts itself: {type(error).__name__}: {str(error)[:200]}") from error


def _column(handle: Handle, record: Record) -> NDArray[Any]:
    code = _CODES.get(record.dtype_name)
    if code is None or len(record.shape) != 1:
        raise DamagedError(f"{record.name[:200]!r} is no column")
    limit = _MAX_ENTRIES.get(record.name, MAX_PIECES)
    if record.shape[0] > limit:
        raise LimitError(f"{record.name} has {record.shape[0]} entries, at most {limit} are read")
    try:
        return np.frombuffer(read_bytes(handle, record.begin, record.end - record.begin), code)
    except ShortReadError as error:
        raise DamagedError(f"the file ends before its listed size ({error})") from error


class _Reader:
    """One file whose columns are there, but not yet believed."""

    def __init__(self, content: SafetensorsFile, columns: Columns) -> None:
        self.metadata, self.columns = content.metadata, columns

    def part(self, file: str) -> WitnessPart:
        tensors, boxes = self.tensors(), self.boxes()
        places = tuple(Coordinate.of(**_indices(place)) for place in self.json("places", list, MAX_PLACES))
        pieces = self.pieces(tensors, boxes, len(places))
        head = self.metadata
        scalars = {str(key): float(value) for key, value in self.json("scalars", dict, MAX_TENSORS).items()}
        taken = float(head["taken"])
        return WitnessPart(
            _count(head["step"]), _count(head["rank"]), _count(head["num_ranks"], MAX_RANKS), tensors, places, boxes,
            pieces, head["launch"][:64], _count(head["attempt"]), taken if math.isfinite(taken) else 0.0, scalars, file,
        )  # fmt: skip

    def json(self, key: str, kind: type, limit: int) -> Any:
        """A list or dictionary of at most ``limit`` entries."""
        text = self.metadata[key]
        if text.count(",") > limit * (MAX_DIMS if kind is list else 1):
            raise LimitError(f"its {key} are more than {limit}")
        found = parse_json(text.encode())
        if not isinstance(found, kind):
            raise ValueError(f"{key} is no {kind.__name__}")
        return found

    def integers(self, name: str, below: int, count: int | None = None, least: int = 0) -> NDArray[np.int64]:
        """A column of ``count`` numbers from ``least`` to below ``below``."""
        column = self.columns[name]
        if column.dtype.kind not in "iu":
            raise ValueError(f"{name} holds no integers")
        found = column.astype(np.int64)
        if count is not None and len(found) != count:
            raise ValueError(f"{name} has {len(found)} entries, not {count}")
        if len(found) and (int(found.min()) < least or int(found.max()) >= below):
            raise ValueError(f"{name} goes beyond its bounds")
        return found

    def tensors(self) -> tuple[WitnessedTensor, ...]:
        names = self.names()
        dtypes = [DTYPES[str(name)] for name in self.json("dtypes", list, len(DTYPES))]
        index = self.integers("tensor.name", len(names))
        count = len(index)
        roles = self.integers("tensor.role", 256, count)
        kinds = self.integers("tensor.dtype", len(dtypes), count)
        dims = self.integers("tensor.num_dims", MAX_DIMS + 1, count)
        extents = self.integers("tensor.shape", 1 << 48, int(dims.sum())).tolist()
        stops = np.cumsum(dims).tolist()
        rows = zip(index.tolist(), roles.tolist(), kinds.tolist(), dims.tolist(), stops, strict=True)
        return tuple(
            WitnessedTensor(
                names[name],
                None if role == 255 else Role(_ROLES[role]) if role < len(_ROLES) else _no_role(role),
                dtypes[kind],
                _shape(extents[stop - num_dims : stop]),
            )
            for name, role, kind, num_dims, stop in rows
        )

    def names(self) -> list[str]:
        packed = self.columns["names"]
        engine = zlib.decompressobj()
        try:
            text = engine.decompress(packed.tobytes(), MAX_TEXT)
        except zlib.error as error:
            raise ValueError(f"its names can't be unpacked ({error})") from error
        if not engine.eof or text.count(b'"') > 2 * MAX_TENSORS:
            raise LimitError("its names are longer or more than any honest ones, or cut short")
        found = parse_json(text)
        if not isinstance(found, list) or not all(isinstance(name, str) and len(name) <= 4096 for name in found):
            raise ValueError("its names are no list of names")
        return found

    def boxes(self) -> tuple[Box, ...]:
        dims = self.integers("box.num_dims", MAX_DIMS + 1)
        bounds = self.integers("box.bounds", 1 << 48, 2 * int(dims.sum())).tolist()
        found, at = [], 0
        for count in dims.tolist():
            low, high = bounds[at : at + count], bounds[at + count : at + 2 * count]
            found.append(Box(tuple(low), tuple(high)))
            at += 2 * count
        return tuple(found)

    def pieces(self, tensors: Sequence[WitnessedTensor], boxes: Sequence[Box], num_places: int) -> NDArray[np.void]:
        own = self.integers("piece.tensor", len(tensors))
        rows = np.zeros(len(own), WITNESSED)
        rows["tensor"] = own
        rows["place"] = self.integers("piece.place", num_places, len(own))
        rows["start"] = self.integers("piece.start", 1 << 62, len(own))
        rows["stop"] = self.integers("piece.stop", 1 << 62, len(own), least=-1)
        for name in ("lane0", "lane1", *_COUNTS, *_EXTREMA, "sum_squares"):
            column = self.columns[f"piece.{name}"]
            if len(column) != len(rows):
                raise ValueError(f"piece.{name} has {len(column)} entries, not {len(rows)}")
            rows[name] = column
        self.refuse_misplaced(rows, tensors, boxes)
        return rows

    @staticmethod
    def refuse_misplaced(rows: NDArray[np.void], tensors: Sequence[WitnessedTensor], boxes: Sequence[Box]) -> None:
        """Pieces outside of their tensors."""
        of_box = rows["stop"] < 0
        sizes = np.array([math.prod(tensor.shape) for tensor in tensors] or [0], np.int64)
        flat = rows[~of_box]
        if (flat["stop"] > sizes[flat["tensor"]]).any() or (flat["start"] > flat["stop"]).any():
            raise ValueError("a piece lies outside of its tensor")
        for number, box in zip(rows["tensor"][of_box].tolist(), rows["start"][of_box].tolist(), strict=True):
            shape, place = tensors[number].shape, boxes[box] if box < len(boxes) else None
            inside = place and len(place.stop) == len(shape) and all(
                a <= b <= extent for a, b, extent in zip(place.start, place.stop, shape, strict=True)
            )  # fmt: skip
            if not inside:
                raise ValueError("a piece lies outside of its tensor")


def _count(text: str, limit: int = 10**18) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) > limit:
        raise ValueError(f"{text[:40]!r} is no number, or too large")
    return int(text)


def _indices(place: Any) -> dict[str, int]:
    good = isinstance(place, dict) and len(place) <= MAX_DIMS and all(
        0 < len(axis) <= 64 and type(index) is int and 0 <= index < 1 << 31 for axis, index in place.items()
    )  # fmt: skip
    if not good:
        raise ValueError("a place is no set of axes and indices")
    return dict(place)


def _shape(extents: list[int]) -> tuple[int, ...]:
    if math.prod(filter(None, extents)) >= 1 << 62:
        raise ValueError("a shape is beyond any tensor's")
    return tuple(extents)


def _no_role(role: int) -> Role:
    raise ValueError(f"there is no role {role}")
