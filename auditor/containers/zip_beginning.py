"""The members of a zip file from its beginning, where its end, and with it the directory, is not to be had.

    [local header, name, extra, data, descriptor] …

A streaming writer leaves the sizes in a local header at 0 and puts a descriptor behind the data: its CRC-32 and its
length. Where the data ends is told by them: by the first descriptor whose length is that of what lies before it, and
whose checksum is, if it has one. Source: APPNOTE 6.3.10, sections 4.3.7, 4.3.9, 4.4.4.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

from auditor.containers.damage import DamagedError
from auditor.containers.zip_directory import LOCAL, Member

_DESCRIPTOR = re.compile(rb"PK\x07\x08")
_SHORT, _LONG = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
_STREAMED = 0x0008


def members_from(head: bytes) -> Iterator[Member]:
    """The members that begin in ``head``, the first bytes of a zip file; the last may go on: its size is then -1.

    Raises:
        DamagedError: it does not begin as a zip file that holds its members as they are.
    """
    at = 0
    while at + LOCAL.size <= len(head) and head[at : at + 4] == b"PK\x03\x04":
        _, _, flags, method, _, _, crc32, _, size, name_length, extra_length = LOCAL.unpack_from(head, at)
        if method != 0:
            raise DamagedError("a member of it is compressed, which no checkpoint writer does")
        first = at + LOCAL.size + name_length + extra_length
        name, header = head[at + LOCAL.size : at + LOCAL.size + name_length].decode("utf-8", "backslashreplace"), at
        if first > len(head):
            return
        if flags & _STREAMED:
            size, crc32, at = _described(head, first)
        else:
            at = first + size
        yield Member(name, header, first, size, crc32)
        if size < 0:
            return
    if at == 0:
        raise DamagedError("it does not begin as a zip file")


def _described(head: bytes, first: int) -> tuple[int, int, int]:
    """Size and checksum of the data from ``first`` on, and where the next member begins; -1 where no end is told."""
    for found in _DESCRIPTOR.finditer(head, first):
        stop = found.start()
        for form in (_SHORT, _LONG):
            if stop + form.size > len(head):
                continue
            _, crc32, packed, size = form.unpack_from(head, stop)
            if packed == size == stop - first and crc32 in (0, zlib.crc32(head[first:stop])):
                return size, crc32, stop + form.size
    return -1, 0, len(head)
