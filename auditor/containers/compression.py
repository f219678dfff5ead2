"""zstd and deflate, one frame at a time, in pieces of a size that the caller chooses; libraries load at first use.

A frame may claim, or expand to, any size: nothing is allocated by what it says, and whoever reads says how much is
expected.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

from auditor.containers.damage import DamagedError, LimitError

MAX_WINDOW_BYTES = 128 << 20
"""Of history that a frame may ask for; zstd's own readers refuse more unless told otherwise."""


class Source(Protocol):
    """Compressed bytes in order."""

    def read(self, num_bytes: int = -1, /) -> bytes:
        """At most so many bytes; none at the end."""


class Stream(Protocol):
    """A chunk being decoded."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill ``buffer`` with what comes next."""

    def at_end(self) -> bool:
        """Whether nothing comes any more."""


class ZstdStream:
    """The content of one frame, in order."""

    def __init__(self, source: Source, read_bytes: int = 1 << 17) -> None:
        """``read_bytes``: how many are taken from the source at once."""
        import zstandard

        # Of a file it needs no more than reading; its stubs ask for all that a file can do.
        decompressor: Any = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._error = zstandard.ZstdError
        self._reader = decompressor.stream_reader(source, read_bytes)

    def read_into(self, buffer: memoryview) -> None:
        """Fill ``buffer`` with what comes next.

        Raises:
            DamagedError: the frame is broken or ends before.
            StorageError: as the source's reads.
        """
        at = 0
        while at < len(buffer):
            count = self._next(buffer[at:])
            if not count:
                raise DamagedError(f"its zstd frame ends {len(buffer) - at} bytes too early")
            at += count

    def at_end(self) -> bool:
        """Whether nothing comes any more. Raises as :meth:`read_into`."""
        return not self._next(memoryview(bytearray(1)))

    def read(self, num_bytes: int) -> bytes:
        """What comes next: fewer bytes than asked for only at the end. Raises as :meth:`read_into`."""
        buffer, at = bytearray(num_bytes), 0
        while at < num_bytes and (count := self._next(memoryview(buffer)[at:])):
            at += count
        return bytes(memoryview(buffer)[:at])

    def _next(self, buffer: memoryview) -> int:
        try:
            return int(self._reader.readinto(buffer))
        except self._error as error:
            raise DamagedError(f"its zstd frame is broken ({error})") from error


class GzipStream:
    """The content of one gzip or zlib member, or of a bare deflate stream, in order."""

    def __init__(self, source: Source, read_bytes: int = 1 << 17, *, bare: bool = False) -> None:
        self._source, self._read_bytes, self._called = source, read_bytes, "deflate stream" if bare else "gzip member"
        self._inflate, self._rest = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32), b""

    def read_into(self, buffer: memoryview) -> None:
        """As :meth:`ZstdStream.read_into`."""
        at = 0
        while at < len(buffer):
            found = self._next(len(buffer) - at)
            if not found:
                raise DamagedError(f"its {self._called} ends {len(buffer) - at} bytes too early")
            buffer[at : at + len(found)] = found
            at += len(found)

    def at_end(self) -> bool:
        """Whether nothing comes any more. Raises as :meth:`read_into`."""
        return not self._next(1)

    def _next(self, num_bytes: int) -> bytes:
        while not self._inflate.eof:
            self._rest = self._rest or self._source.read(self._read_bytes)
            if not self._rest:
                raise DamagedError(f"its {self._called} is cut short")
            try:
                found = self._inflate.decompress(self._rest, num_bytes)
            except zlib.error as error:
                raise DamagedError(f"its {self._called} is broken ({error})") from error
            self._rest = self._inflate.unconsumed_tail
            if found:
                return found
        return b""


class Bytes:
    """Compressed bytes that are in memory."""

    def __init__(self, content: bytes | memoryview) -> None:
        self._content, self._at = memoryview(content), 0

    def read(self, num_bytes: int = -1, /) -> bytes:
        """As :class:`Source`."""
        stop = len(self._content) if num_bytes < 0 else self._at + num_bytes
        found = bytes(self._content[self._at : stop])
        self._at += len(found)
        return found


def unpack(content: bytes | memoryview, limit: int) -> bytes:
    """All of a frame, which may expand to at most ``limit`` bytes.

    Raises:
        DamagedError: the frame is broken.
        LimitError: it expands to more.
    """
    return read_all(ZstdStream(Bytes(content)), limit)


def read_all(stream: ZstdStream, limit: int) -> bytes:
    """The rest of a frame; raises as :func:`unpack`."""
    blocks: list[bytes] = []
    left = limit + 1
    while block := stream.read(min(1 << 20, left)):
        blocks.append(block)
        left -= len(block)
        if not left:
            raise LimitError(f"its zstd frame expands to more than {limit} bytes")
    return b"".join(blocks)
