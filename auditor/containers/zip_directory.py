"""Where the members of a zip file lie, from its central directory alone.

    [local header, name, extra, data] …  [central directory]  [zip64 end record, locator]  [end record]

Local headers written by streaming writers hold no sizes, so sizes come from the central directory and a local header
is read only to learn how long its own name and padding are. Sources: APPNOTE 6.3.10, sections 4.3.7, 4.3.12-16, 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from auditor.containers.damage import CutShortError, DamagedError, LimitError
from auditor.storage.store import Handle, ShortReadError, read_bytes

MAX_DIRECTORY_BYTES = 256 << 20
"""A central directory may be this long: about two million members of a torch file."""

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
_SHORT_TAIL = _END.size + _LOCATOR.size
_CRC_IN_ENTRY = 16
_LONG_TAIL = _SHORT_TAIL + 0xFFFF
"""With the longest comment."""
_UNSET16, _UNSET32 = 0xFFFF, 0xFFFFFFFF


_STORED, _DEFLATED = 0, 8


class CompressedError(DamagedError):
    """A member is compressed: legal in zip files, but no byte range is its content."""


@dataclass(frozen=True, slots=True)
class Member:
    """One stored member."""

    name: str
    header: int
    """First byte of the local header."""
    offset: int
    """First byte of the data."""
    num_bytes: int
    crc32: int
    """As stored; 0 may mean that the writer did not compute it."""
    num_deflated: int = -1
    """Bytes of the deflate stream that holds the data; -1: it is stored as it is."""

    @property
    def num_stored(self) -> int:
        """Bytes that it takes in the file."""
        return self.num_bytes if self.num_deflated < 0 else self.num_deflated


def read_directory(handle: Handle, *, deflated: bool = False) -> dict[str, Member]:
    """The members of a zip file by name. Reads the end, the directory and the local headers, no data.

    ``deflated``: whether members may be compressed.

    Raises:
        DamagedError: the file is no whole zip file, or its records contradict each other or its size.
        StorageError: storage failed.
    """
    size = handle.entry.num_bytes
    if size == 0:
        raise CutShortError("the file is empty")
    try:
        start, length, count = _locate(handle, size)
        if length > MAX_DIRECTORY_BYTES:
            raise LimitError(f"its directory claims {length} bytes, at most {MAX_DIRECTORY_BYTES} are read")
        entries = list(_entries(read_bytes(handle, start, length), count, deflated))
        members = {}
        for entry in entries:
            if entry.name in members:
                raise DamagedError(f"two members are called {entry.name!r}")
            members[entry.name] = _with_offset(handle, entry, start)
    except ShortReadError as error:
        raise CutShortError(f"the file ends before its own records do ({error})") from error
    _refuse_overlap(members)
    return members


def checksum_fields(handle: Handle, members: Mapping[str, Member]) -> Iterator[int]:
    """Where CRC-32s of the members stand: in the directory, and behind data that was streamed.

    Raises:
        DamagedError, StorageError: as :func:`read_directory`.
    """
    start, length, count = _locate(handle, handle.entry.num_bytes)
    directory, at = read_bytes(handle, start, length), 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(directory, at)
        yield start + at + _CRC_IN_ENTRY
        at += _CENTRAL.size + sum(fields[10:13])
    for member in members.values():
        stop = member.offset + member.num_bytes
        if stop + 8 <= start and read_bytes(handle, stop, 4) == b"PK\x07\x08":
            yield stop + 4


def _locate(handle: Handle, size: int) -> tuple[int, int, int]:
    """Offset, length and number of entries of the central directory."""
    # Without a comment, as usual, the end is at the end: reading more would read weights.
    tail = read_bytes(handle, size - min(size, _SHORT_TAIL), min(size, _SHORT_TAIL))
    if tail[-_END.size :][:4] != b"PK\x05\x06":
        tail = read_bytes(handle, size - min(size, _LONG_TAIL), min(size, _LONG_TAIL))
    tail_length = len(tail)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        head = read_bytes(handle, 0, min(4, size))
        if b"PK\x03\x04".startswith(head):
            raise CutShortError("it begins as a zip file but has no end record: cut short")
        raise DamagedError("it does not begin as a zip file and has no end record: another kind of file")
    _, _, _, _, count, length, start, comment = _END.unpack_from(tail, at)
    end = size - tail_length + at
    if end + _END.size + comment != size:
        raise DamagedError(f"{size - end - _END.size} bytes follow its end record, which announces {comment}")
    limit = end
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size : at][:4] == b"PK\x06\x07":
        _, _, end64, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        if end64 + _END64.size != end - _LOCATOR.size:
            raise DamagedError(f"its zip64 end record is said to begin at byte {end64}, not right before its locator")
        record = _END64.unpack(read_bytes(handle, end64, _END64.size))
        if record[0] != b"PK\x06\x06":
            raise DamagedError(f"no zip64 end record at byte {end64}, where its locator points")
        count, length, start, limit = record[7], record[8], record[9], end64
    elif _UNSET32 in (length, start) or count == _UNSET16:
        raise DamagedError("its end record refers to a zip64 record that is not there")
    if start + length != limit:
        raise DamagedError(
            f"its directory is said to lie at bytes {start} to {start + length}, it ends at byte {limit}"
        )
    return start, length, count


def archive_before(handle: Handle) -> int:
    """First byte of the zip file that ends where ``handle`` does, whatever lies before it.

    Raises:
        DamagedError: no zip file without a comment ends there.
        StorageError: storage failed.
    """
    size = handle.entry.num_bytes
    length = min(size, _END64.size + _SHORT_TAIL)
    try:
        tail = read_bytes(handle, size - length, length)
    except ShortReadError as error:
        raise DamagedError(f"the file ends before its own records do ({error})") from error
    at = len(tail) - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\x05\x06":
        raise DamagedError(f"no zip file ends at byte {size}")
    _, _, _, _, _, directory, start, _ = _END.unpack_from(tail, at)
    at -= _LOCATOR.size
    if at >= _END64.size and tail[at : at + 4] == b"PK\x06\x07":
        end64 = _LOCATOR.unpack_from(tail, at)[2]
        at -= _END64.size
        record = _END64.unpack_from(tail, at)
        begin = size - len(tail) + at - end64
        if record[0] != b"PK\x06\x06" or record[8] + record[9] != end64 or begin < 0:
            raise DamagedError(f"the zip file that ends at byte {size} has end records that contradict each other")
        return int(begin)
    begin = size - _END.size - directory - start
    if begin < 0:
        raise DamagedError(f"the zip file that ends at byte {size} is said to be longer than what is there")
    return int(begin)


def _entries(directory: bytes, count: int, deflated: bool) -> Iterator[Member]:
    """Members with ``offset`` still unknown (-1)."""
    at = found = 0
    while at < len(directory):
        if len(directory) - at < _CENTRAL.size or directory[at : at + 4] != b"PK\x01\x02":
            raise DamagedError(f"its directory entry {found} is no directory entry")
        fields = _CENTRAL.unpack_from(directory, at)
        flags, method, crc32, packed, unpacked = fields[3], fields[4], fields[7], fields[8], fields[9]
        name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
        extra_at = at + _CENTRAL.size + name_length
        name = directory[at + _CENTRAL.size : extra_at].decode("utf-8", "backslashreplace")
        extra = directory[extra_at : extra_at + extra_length]
        unpacked, packed, header = _zip64(extra, unpacked, packed, header, name)
        if not (method == _STORED and packed == unpacked) and not (deflated and method == _DEFLATED):
            raise CompressedError(f"its member {name!r} is compressed, which no checkpoint writer does")
        if flags & 0x1:
            raise DamagedError(f"its member {name!r} is encrypted")
        yield Member(name, header, -1, unpacked, crc32, packed if method == _DEFLATED else -1)
        found += 1
        at = extra_at + extra_length + comment_length
    if at != len(directory) or found != count:
        raise DamagedError(f"its directory holds {found} entries, its end record says {count}")


def _zip64(extra: bytes, unpacked: int, packed: int, header: int, name: str) -> tuple[int, int, int]:
    """The three numbers, taken from the zip64 extra field where the 32-bit ones are set to all ones."""
    numbers = [unpacked, packed, header]
    if _UNSET32 not in numbers:
        return unpacked, packed, header
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = list(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            for position, number in enumerate(numbers):
                if number == _UNSET32 and wide:
                    numbers[position] = wide.pop(0)
            return numbers[0], numbers[1], numbers[2]
        at += 4 + length
    raise DamagedError(f"its member {name!r} refers to a zip64 field that is not there")


def _with_offset(handle: Handle, entry: Member, limit: int) -> Member:
    """``entry`` with the offset of its data, which only the local header tells."""
    if entry.header + LOCAL.size > limit:
        raise DamagedError(f"its member {entry.name!r} is said to begin at byte {entry.header}, inside the directory")
    fields = LOCAL.unpack(read_bytes(handle, entry.header, LOCAL.size))
    if fields[0] != b"PK\x03\x04":
        raise DamagedError(f"no member header at byte {entry.header}, where {entry.name!r} should begin")
    name_length, extra_length = fields[9], fields[10]
    local_name = read_bytes(handle, entry.header + LOCAL.size, name_length).decode("utf-8", "backslashreplace")
    if local_name != entry.name:
        raise DamagedError(f"the member at byte {entry.header} calls itself {local_name!r}, not {entry.name!r}")
    offset = entry.header + LOCAL.size + name_length + extra_length
    if offset + entry.num_stored > limit:
        raise DamagedError(f"its member {entry.name!r} runs to byte {offset + entry.num_stored}, into the directory")
    return replace(entry, offset=offset)


def _refuse_overlap(members: dict[str, Member]) -> None:
    ordered = sorted(members.values(), key=lambda member: member.header)
    for left, right in pairwise(ordered):
        if left.offset + left.num_stored > right.header:
            raise DamagedError(f"its members {left.name!r} and {right.name!r} overlap")
