"""Columns as Zarr v3 arrays, compressed with gzip; written and read without zarr, whole, and bounded.

Every number is kept in the smallest type that holds the whole column exactly. A column of one value is its fill value
and has no chunk: chunks that are written are named in the commit, so none is missing unnoticed.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.json_document import parse_json

DOCUMENT = "zarr.json"
LEVEL = 6
CHUNK_ROWS = 1 << 20
MAX_BYTES = 1 << 30
"""Of one column, decompressed: that of a hundred million pieces has as many."""
MAX_DOCUMENT_BYTES = 1 << 16
_TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
_NARROW = {"i": ("<i1", "<i2", "<i4"), "u": ("<u1", "<u2", "<u4"), "f": ("<f4",)}


def group(attributes: Mapping[str, Any]) -> bytes:
    """The ``zarr.json`` of a group."""
    return _text({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def written(name: str, values: NDArray[Any], rows: int = CHUNK_ROWS) -> Iterator[tuple[str, bytes]]:
    """The objects of one array under ``name``, of ``rows`` a chunk."""
    values = narrowed(values)
    constant = len(values) > 0 and bool((values.view(_bits(values)) == values.view(_bits(values))[:1]).all())
    rows = min(rows, max(1, len(values)))
    fill = values.reshape(-1)[0].item() if constant and values.ndim == 1 else 0
    yield f"{name}/{DOCUMENT}", _text({
        "zarr_format": 3, "node_type": "array", "shape": list(values.shape), "data_type": values.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows, *values.shape[1:]]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill(fill), "attributes": {},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}},
                   {"name": "gzip", "configuration": {"level": LEVEL}}],
    })  # fmt: skip
    if constant and values.ndim == 1:
        return
    for number, first in enumerate(range(0, len(values), rows)):
        part = values[first : first + rows].tobytes()
        whole = rows * math.prod(values.shape[1:]) * values.itemsize
        key = "/".join(["c", str(number), *("0" for _ in values.shape[1:])])
        yield f"{name}/{key}", gzip.compress(part.ljust(whole, b"\0"), LEVEL, mtime=0)


def read(name: str, objects: Mapping[str, bytes], num_rows: int) -> NDArray[Any]:
    """The array under ``name``, of ``num_rows`` along its first dim, in the type in which it was written.

    Raises:
        DamagedError: it is no array as :func:`written` writes them, or a chunk is missing or broken.
        LimitError: it is larger than any honest one.
    """
    if f"{name}/{DOCUMENT}" not in objects:
        raise DamagedError(f"it has no array {name}")
    shape, dtype, rows, fill = _described(objects[f"{name}/{DOCUMENT}"])
    width = math.prod(shape[1:]) * dtype.itemsize
    if shape[0] != num_rows:
        raise DamagedError(f"its array {name} has {shape[0]} rows where {num_rows} are wanted")
    if shape[0] * width > MAX_BYTES or rows * width > MAX_BYTES:
        raise LimitError(f"its array {name} is larger than any honest one")
    keys = ["/".join([name, "c", str(n), *("0" for _ in shape[1:])]) for n in range(-(-shape[0] // rows))]
    if not any(key in objects for key in keys):
        return np.full(shape, fill, dtype)
    parts = []
    for key in keys:
        if key not in objects:
            raise DamagedError(f"{key} is missing")
        parts.append(_inflated(key, objects[key], rows * width))
    flat = np.frombuffer(b"".join(parts), dtype)
    return flat.reshape(-1, *shape[1:])[: shape[0]]


def text(key: str, raw: bytes, limit: int) -> bytes:
    """The bytes of an array's only chunk, at most ``limit`` of them.

    Raises:
        DamagedError: it is no gzip stream, or longer.
    """
    return _inflated(key, raw, limit, exact=False)


def narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """``values`` in the smallest type that holds them exactly, little-endian."""
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    for kind in _NARROW.get(values.dtype.kind, ()):
        if np.dtype(kind).itemsize >= values.itemsize:
            break
        with np.errstate(over="ignore", invalid="ignore"):
            small = values.astype(kind)
        # Bits, so that a NaN is one and -0 is not 0.
        if (small.astype(values.dtype).view(_bits(values)) == values.view(_bits(values))).all():
            return small
    return values


def _bits(values: NDArray[Any]) -> str:
    return f"<u{values.itemsize}"


def _fill(value: Any) -> Any:
    """A fill value as Zarr v3 writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _described(raw: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int, Any]:
    """Shape, type, rows a chunk and fill value of an array."""
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise LimitError("an array's document is longer than any honest one")
    document = parse_json(raw)
    try:
        shape, chunk = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
        name, fill = document["data_type"], document["fill_value"]
    except (KeyError, TypeError) as error:
        raise DamagedError("an array's document lacks what every one has") from error
    good = isinstance(shape, list) and isinstance(chunk, list) and 1 <= len(shape) == len(chunk) <= 2
    if not good or not all(type(n) is int and 0 <= n < 1 << 40 for n in [*shape, *chunk]):
        raise DamagedError("an array's document has no shape")
    if name not in _TYPES or chunk[0] < 1 or chunk[1:] != shape[1:]:
        raise DamagedError("an array's document is none of a ledger's")
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    fill = words.get(fill, fill) if isinstance(fill, str) else fill
    if isinstance(fill, bool) or not isinstance(fill, (int, float)) or (isinstance(fill, float) and name[0] != "f"):
        raise DamagedError("an array's fill value is no number")
    if name[0] != "f" and not np.iinfo(name).min <= fill <= np.iinfo(name).max:
        raise DamagedError("an array's fill value does not fit its type")
    return tuple(shape), np.dtype(name).newbyteorder("<"), chunk[0], fill


def _inflated(key: str, raw: bytes, num_bytes: int, *, exact: bool = True) -> bytes:
    """A gzip stream that holds so many bytes, or no more than that."""
    machine = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        found = machine.decompress(raw, num_bytes + 1)
    except zlib.error as error:
        raise DamagedError(f"{key} is no gzip stream ({error})") from error
    if len(found) > num_bytes or not machine.eof or (exact and len(found) < num_bytes):
        raise DamagedError(f"{key} does not hold {num_bytes} bytes")
    return found
