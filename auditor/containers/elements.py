"""One stored element as a number: counters and settings that are kept as arrays are metadata, not weights."""

from __future__ import annotations

import struct

from auditor.model.dtype import DType

_NUMBERS = {
    "float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i", "int16": "<h", "int8": "<b",
    "uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q",
}  # fmt: skip


def number_of(raw: bytes, dtype: DType) -> float | None:
    """The value of one element, given its bytes, little-endian. None: not a number."""
    if dtype.name == "bfloat16":
        raw, layout = b"\0\0" + raw, "<f"
    else:
        layout = _NUMBERS.get(dtype.name, "")
    return float(struct.unpack(layout, raw)[0]) if layout else None
