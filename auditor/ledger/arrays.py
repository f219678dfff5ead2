"""Columns, and tables of columns, as Zarr v3 arrays compressed with gzip; written and read without zarr, and bounded.

Every number is kept in the smallest type that holds the whole array exactly. An array of one value is its fill value
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
"""Of one column, decompressed: that of a hundred million pieces has as many. A table has as many columns as rows."""
MAX_DOCUMENT_BYTES = 1 << 16
_TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
_NARROW = {"i": ("<i1", "<i2", "<i4"), "u": ("<u1", "<u2", "<u4"), "f": ("<f4",)}


def group(attributes: Mapping[str, Any]) -> bytes:
    """The ``zarr.json`` of a group."""
    return _text({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def written(name: str, values: NDArray[Any], rows: int = CHUNK_ROWS, along: int = 0) -> Iterator[tuple[str, bytes]]:
    """The objects of one array under ``name``, of ``rows`` a chunk in the direction ``along``."""
    values = narrowed(values)
    bits = values.view(_bits(values))
    constant = values.size > 0 and bool((bits == bits.flat[0]).all())
    chunk = [max(1, extent) for extent in values.shape]
    chunk[along] = min(rows, chunk[along])
    yield f"{name}/{DOCUMENT}", _text({
        "zarr_format": 3, "node_type": "array", "shape": list(values.shape), "data_type": values.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default"}, "fill_value": _fill(values.flat[0].item()) if constant else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}},
                   {"name": "gzip", "configuration": {"level": LEVEL}}],
    })  # fmt: skip
    if constant:
        return
    for first in range(0, values.shape[along], chunk[along]):
        at = [slice(None)] * values.ndim
        at[along] = slice(first, first + chunk[along])
        part = values[tuple(at)]
        whole = np.pad(part, [(0, full - extent) for full, extent in zip(chunk, part.shape, strict=True)])
        yield _key(name, values.ndim, along, first // chunk[along]), gzip.compress(whole.tobytes(), LEVEL, mtime=0)


def read(name: str, objects: Mapping[str, bytes], *shape: int) -> NDArray[Any]:
    """The array of ``shape`` under ``name``, in the type in which it was written.

    Raises:
        DamagedError: it is no array as :func:`written` writes them, or a chunk is missing or broken.
        LimitError: it is larger than any honest one.
    """
    if f"{name}/{DOCUMENT}" not in objects:
        raise DamagedError(f"it has no array {name}")
    found, dtype, chunk, fill = _described(objects[f"{name}/{DOCUMENT}"])
    if found != shape:
        raise DamagedError(f"its array {name} has the shape {found} where {shape} is wanted")
    along = next((dim for dim, extent in enumerate(shape) if chunk[dim] != max(1, extent)), 0)
    of_chunk = math.prod(chunk) * dtype.itemsize
    if max(math.prod(shape) * dtype.itemsize, of_chunk) > MAX_BYTES * (shape[0] if along else 1):
        raise LimitError(f"its array {name} is larger than any honest one")
    keys = [_key(name, len(shape), along, number) for number in range(-(-shape[along] // chunk[along]))]
    if not any(key in objects for key in keys):
        return np.full(shape, fill, dtype)
    values = np.empty(shape, dtype)
    for number, key in enumerate(keys):
        if key not in objects:
            raise DamagedError(f"{key} is missing")
        part = np.frombuffer(_inflated(key, objects[key], of_chunk), dtype).reshape(chunk)
        first = number * chunk[along]
        kept = min(chunk[along], shape[along] - first)
        at = [slice(extent) for extent in shape]
        at[along] = slice(kept)
        into = [slice(None)] * len(shape)
        into[along] = slice(first, first + kept)
        values[tuple(into)] = part[tuple(at)]
    return values


def _key(name: str, num_dims: int, along: int, number: int) -> str:
    return "/".join([name, "c", *(str(number if dim == along else 0) for dim in range(num_dims))])


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
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _described(raw: bytes) -> tuple[tuple[int, ...], np.dtype[Any], list[int], Any]:
    """Shape, type, shape of a chunk and fill value of an array."""
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
    cut = sum(part != max(1, extent) for part, extent in zip(chunk, shape, strict=True))
    if name not in _TYPES or min(chunk) < 1 or cut > 1:
        raise DamagedError("an array's document is none of a ledger's")
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    fill = words.get(fill, fill) if isinstance(fill, str) else fill
    if isinstance(fill, bool) or not isinstance(fill, (int, float)) or (isinstance(fill, float) and name[0] != "f"):
        raise DamagedError("an array's fill value is no number")
    if name[0] != "f" and not np.iinfo(name).min <= fill <= np.iinfo(name).max:
        raise DamagedError("an array's fill value does not fit its type")
    return tuple(shape), np.dtype(name).newbyteorder("<"), chunk, fill


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
