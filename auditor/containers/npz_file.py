"""numpy's ``.npz`` files: a zip file of ``.npy`` members, arrays as byte ranges. No weights are read.

Nothing is unpickled. Each member begins with the byte 0x93 and ``NUMPY``, two bytes of version, the length of a header
(2 bytes little-endian, from version 2 on 4) and the header: a Python dictionary of ``descr``, ``fortran_order`` and
``shape``, as numpy itself prints it. The zip file keeps a CRC-32 of every member. In a file by ``savez_compressed``
offsets are those of its content, the members laid end to end and decoded; :attr:`NpzFile.encoding` says where they are.
Sources: numpy ``lib/format.py``, ``lib/_npyio_impl.py``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from auditor.containers.damage import CutShortError, DamagedError, LimitError, UnsupportedError
from auditor.containers.encoded import DecodedHandle
from auditor.containers.state_array import Plain, StateArray, Stretch
from auditor.containers.zip_directory import CompressedError, Member, read_directory
from auditor.model.dtype import DTYPES
from auditor.model.encoding import DEFLATE, PLAIN, Encoding, EncodingBuilder, most_bytes
from auditor.storage.store import Entry, Handle, ShortReadError, UndecodableError, read_bytes

MAX_HEADER = 1 << 16
MAX_DIMS, MAX_EXTENT = 64, 1 << 48
_MAGIC = b"\x93NUMPY"
_FIRST = 128
"""Bytes read of a member at first: numpy pads headers to a multiple of 64, most have this length."""
_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[<>|=]?[a-zA-Z]\d{0,3})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>[\d, ]*)\),? ?\}\s*"
)
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_OTHERS = {"b1": "bool", "V2": "bfloat16"}
"""numpy knows no bfloat16; of all dtypes that it writes as void, it is the one of two bytes."""


@dataclass(frozen=True, slots=True)
class NpzFile:
    """One file, read without its weights."""

    entry: Entry
    arrays: Mapping[str, StateArray]
    """By member's name without ``.npy``, in stored order."""
    opaque: Mapping[str, int] = field(default_factory=dict)
    encoding: Encoding | None = None

    def leaves(self) -> Iterator[tuple[tuple[str, ...], StateArray | Plain | None]]:
        """Names taken apart: at slashes if any name has one, else at dots."""
        separator = "/" if any("/" in name for name in self.arrays) else "."
        for name, array in self.arrays.items():
            yield tuple(part for part in name.split(separator) if part) or (name,), array


def read_npz(handle: Handle) -> NpzFile:
    """Read a file's directory and the header of every array.

    Raises:
        DamagedError: the file is no whole npz file, or contradicts itself.
        UnsupportedError: an array is one of numpy's own structures.
        StorageError: storage failed.
    """
    try:
        members = read_directory(handle, deflated=True)
    except CompressedError as error:
        raise UnsupportedError("its arrays are compressed by something else than deflate") from error
    encoding = None
    if any(member.num_deflated >= 0 for member in members.values()):
        members, encoding = _laid_out(members)
        handle = DecodedHandle(handle, encoding)
    arrays: dict[str, StateArray] = {}
    opaque: Counter[str] = Counter()
    for member in members.values():
        if not member.name.endswith(".npy"):
            opaque["zip member that is no .npy"] += 1
            continue
        array = _array(handle, member)
        if array is None:
            opaque["numpy array of objects"] += 1
        else:
            arrays[member.name.removesuffix(".npy")] = array
    return NpzFile(handle.entry, arrays, opaque, encoding)


def _laid_out(members: Mapping[str, Member]) -> tuple[dict[str, Member], Encoding]:
    """The members as they lie in the file's content, and where that is stored."""
    builder, moved = EncodingBuilder(), dict[str, Member]()
    for name, member in members.items():
        codec = DEFLATE if member.num_deflated >= 0 else PLAIN
        if member.num_bytes > most_bytes(codec, member.num_stored):
            held = f"{member.num_stored} bytes of it, which can't hold them"
            raise DamagedError(f"{name[:200]!r} is said to have {member.num_bytes} bytes in {held}")
        at = builder.add(member.num_bytes, codec, member.offset, member.num_stored)
        moved[name] = replace(member, offset=at, num_deflated=-1)
    return moved, builder.build()


def _array(handle: Handle, member: Member) -> StateArray | None:
    """The array that a member is; None for one of pickled objects."""
    shown = repr(member.name[:200])
    try:
        head = read_bytes(handle, member.offset, min(_FIRST, member.num_bytes))
        start, length = _length(head, shown)
        if start + length > member.num_bytes or length > MAX_HEADER:
            raise DamagedError(
                f"the header of {shown} is said to have {length} bytes, the member has {member.num_bytes}"
            )
        if start + length > len(head):
            head = read_bytes(handle, member.offset, start + length)
    except ShortReadError as error:
        raise CutShortError(f"the file ends before its own records do ({error})") from error
    except UndecodableError as error:
        raise DamagedError(f"{shown} does not decode: {error}") from error
    found = _HEADER.fullmatch(head[start : start + length])
    if found is None:
        if re.search(rb"'descr': '\|?O'", head):
            return None
        raise UnsupportedError(f"the header of {shown} is not one of a plain array")
    return _described(found, member, start + length, shown)


def _length(head: bytes, shown: str) -> tuple[int, int]:
    """Where the header of a member begins, and how long it is."""
    if head[:6] != _MAGIC or len(head) < 12 or not 1 <= head[6] <= 3:
        raise DamagedError(f"{shown} does not begin as a numpy array")
    width = 2 if head[6] == 1 else 4
    return 8 + width, int.from_bytes(head[8 : 8 + width], "little")


def _described(found: re.Match[bytes], member: Member, start: int, shown: str) -> StateArray | None:
    descr = found["descr"].decode("ascii")
    order, kind = (descr[0], descr[1:]) if descr[0] in "<>|=" else ("=", descr)
    if kind.startswith("O"):
        return None
    extents = [extent for extent in found["shape"].replace(b" ", b"").split(b",") if extent]
    if len(extents) > MAX_DIMS or any(len(extent) > 18 for extent in extents):
        raise LimitError(f"{shown} has a shape beyond any tensor's")
    shape = tuple(map(int, extents))
    if math.prod(filter(None, shape)) > MAX_EXTENT:
        raise LimitError(f"{shown} has a shape beyond any tensor's")
    name = _OTHERS.get(kind) or f"{_KINDS.get(kind[0], '')}{8 * int(kind[1:] or 0)}"
    dtype = DTYPES.get(name) if order != ">" or kind[1:] == "1" else None
    num_bytes = member.num_bytes - start
    width = int(kind[1:] or 0)
    if kind[0] != "U" and math.prod(shape) * width != num_bytes:
        raise DamagedError(f"{shown} has {num_bytes} bytes, {descr}{list(shape)} needs {math.prod(shape) * width}")
    column_major = found["fortran"] == b"True" and sum(extent > 1 for extent in shape) > 1
    return StateArray(dtype, descr, shape, (Stretch(member.offset + start, num_bytes),), column_major)
