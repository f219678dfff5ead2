"""Safetensors files: the header as inert records, tensors as byte ranges. No weights are read.

    [u64 length n, little-endian] [n bytes of JSON, padded with spaces] [data]

The JSON maps a tensor's name to ``dtype``, ``shape`` and ``data_offsets`` (half-open, in bytes from the start of the
data), and ``__metadata__`` to strings. The ranges must tile the data: no gap, no overlap, nothing after the last. The
format stores no checksums. Source: huggingface/safetensors, README "Format" and ``safetensors/src/tensor.rs``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from auditor.containers.damage import CutShortError, DamagedError, LimitError
from auditor.containers.json_document import parse_json
from auditor.model.dtype import DTYPES, DType
from auditor.storage.store import Entry, Handle, ShortReadError, read_bytes

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the format's own readers take."""
MAX_DIMS = 64
MAX_EXTENT = 1 << 48
"""Product of a shape's extents, zeros left out. Beyond it a shape is nonsense, also where the tensor has no data."""
MAX_DTYPE_NAME = 32
MAX_NAME = 4096
"""Characters of the longest tensor name that is believed."""

_LENGTH = struct.Struct("<Q")
_LFS_POINTER = b"version "
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of the header."""

    name: str
    dtype: DType | None
    """None where the format's word for it is not known here; then the range can't be held against the shape."""
    dtype_name: str
    """The format's own word."""
    shape: tuple[int, ...]
    begin: int
    """First byte of the tensor in the file."""
    end: int
    """One past its last byte."""


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file, read without its weights."""

    entry: Entry
    metadata: Mapping[str, str]
    records: Mapping[str, Record]
    """By name, in the order in which they lie in the file."""


def read_safetensors(handle: Handle, max_header: int = MAX_HEADER_BYTES) -> SafetensorsFile:
    """Read the header of a file and hold it against the file's size. ``max_header``: bytes that are believed of it.

    Raises:
        CutShortError: the file ends before its header or its data does.
        DamagedError: it is no safetensors file, its header contradicts itself, or something follows the data. Where
            the header is whole and the file's size alone is wrong, ``content`` is the :class:`SafetensorsFile`.
        LimitError: the header asks for more than an honest one needs.
        StorageError: storage failed.
    """
    size = handle.entry.num_bytes
    if size == 0:
        raise CutShortError("the file is empty")
    try:
        length = _header_length(handle, size, max_header)
        raw = read_bytes(handle, _LENGTH.size, length)
    except ShortReadError as error:
        raise CutShortError(f"the file ends before its header does ({error})") from error
    if not raw.startswith(b"{"):
        raise DamagedError("its header is no JSON dictionary: another kind of file, or its first bytes are lost")
    header: dict[str, Any] = parse_json(raw)
    metadata = _metadata(header.pop("__metadata__", None))
    data = _LENGTH.size + length
    records = [_record(name, stated, data) for name, stated in header.items()]
    records.sort(key=lambda record: (record.begin, record.end))
    _refuse_untiled(records, data)
    content = SafetensorsFile(handle.entry, metadata, {record.name: record for record in records})
    _refuse_wrong_size(content, records[-1].end if records else data)
    return content


def _header_length(handle: Handle, size: int, limit: int) -> int:
    head = read_bytes(handle, 0, min(size, _LENGTH.size))
    if head == _LFS_POINTER and size < 1024:
        raise DamagedError("it is a Git LFS pointer: the file itself was never downloaded")
    if size < _LENGTH.size:
        raise CutShortError(f"it has {size} bytes, its header's length alone takes {_LENGTH.size}")
    (length,) = _LENGTH.unpack(head)
    if length > size - _LENGTH.size:
        kind = CutShortError if length <= limit else DamagedError
        raise kind(f"its header is said to have {length} bytes, the file has {size}: cut short, or no such file")
    if length > limit:
        raise LimitError(f"its header is said to have {length} bytes, at most {limit} are read")
    return int(length)


def _metadata(stated: object) -> dict[str, str]:
    if stated is None:
        return {}
    if not isinstance(stated, dict) or not all(isinstance(value, str) for value in stated.values()):
        raise DamagedError("its __metadata__ is no dictionary of strings")
    return stated


def _record(name: str, stated: object, data: int) -> Record:
    """One entry of the header; ``data`` is the first byte after the header."""
    shown = name[:200]
    if len(name) > MAX_NAME:
        raise LimitError(f"its header gives a tensor a name of {len(name)} characters: {shown!r}…")
    if not isinstance(stated, dict):
        raise DamagedError(f"its header says of {shown!r} something that is no description of a tensor")
    kind, shape, offsets = stated.get("dtype"), _counts(stated.get("shape")), _counts(stated.get("data_offsets"))
    if not isinstance(kind, str) or not 0 < len(kind) <= MAX_DTYPE_NAME:
        raise DamagedError(f"its header gives {shown!r} no dtype")
    if shape is None or len(shape) > MAX_DIMS:
        raise DamagedError(f"its header gives {shown!r} no shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DamagedError(f"its header gives {shown!r} no byte range")
    if math.prod(filter(None, shape)) > MAX_EXTENT:
        raise LimitError(f"its header gives {shown!r} a shape beyond any tensor's")
    dtype = DTYPES.get(_DTYPES.get(kind, ""))
    _refuse_misfit(shown, dtype, shape, offsets[1] - offsets[0])
    return Record(name, dtype, kind, shape, data + offsets[0], data + offsets[1])


def _counts(value: Any) -> tuple[int, ...] | None:
    # Not isinstance: true and false are integers too.
    good = isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    return tuple(value) if good else None


def _refuse_misfit(name: str, dtype: DType | None, shape: tuple[int, ...], num_bytes: int) -> None:
    if dtype is None:
        return
    num_bits = math.prod(shape) * dtype.bits
    if num_bits % 8 or num_bits // 8 != num_bytes:
        raise DamagedError(f"{name!r} has {num_bytes} bytes, {dtype.name}{list(shape)} needs {-(-num_bits // 8)}")


def _refuse_untiled(records: list[Record], data: int) -> None:
    """``records`` in the order of their ranges."""
    end = data
    for record in records:
        if record.begin != end:
            how = (
                f"{record.begin - end} bytes before it belong to no tensor"
                if record.begin > end
                else "others overlap it"
            )
            raise DamagedError(f"{record.name[:200]!r} begins at byte {record.begin}, {how}")
        end = record.end


def _refuse_wrong_size(content: SafetensorsFile, needed: int) -> None:
    size = content.entry.num_bytes
    if size > needed:
        raise DamagedError(f"{size - needed} bytes follow its last tensor", content)
    if size < needed:
        wholly = sum(record.begin >= size and record.end > size for record in content.records.values())
        partly = sum(record.begin < size < record.end for record in content.records.values())
        raise CutShortError(
            f"it needs {needed} bytes, it has {size}: {wholly} tensors lie beyond its end, {partly} partly", content
        )
