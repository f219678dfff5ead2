"""What may lie around and behind a compressed chunk: checksums, codecs that are undone as a whole, big-endian elements.

Blosc and LZ4 are numcodecs', which comes with zarr. Their libraries take a chunk at once; so what a chunk states is
checked against what its array says before they see it, and arrays with larger chunks are not read
(:data:`MAX_WHOLE_BYTES`). Source: c-blosc ``README_CHUNK_FORMAT.rst`` (version 1 of its chunks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np

from auditor.containers.compression import Stream
from auditor.containers.crc32c import crc32c_of
from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.model.encoding import BLOSC
from auditor.storage.store import Handle, read_bytes

MAX_WHOLE_BYTES = 256 << 20
"""Of a chunk that is decoded at once."""
_READ_BYTES = 1 << 20
_CHECKSUM_BYTES = 4
_HEADER_BYTES = 16
_COPIED = 2
"""Flag of a Blosc chunk that holds its content as it is."""


@dataclass(slots=True)
class Stored:
    """The stored bytes of a chunk, in order."""

    handle: Handle
    offset: int
    num_left: int

    def read(self, num_bytes: int = -1, /) -> bytes:
        """At most so many of them."""
        count = self.num_left if num_bytes < 0 else min(num_bytes, self.num_left)
        found = read_bytes(self.handle, self.offset, count)
        self.offset += count
        self.num_left -= count
        return found


def without_checksum(source: Stored) -> Stored:
    """What lies before a CRC-32C, which is held against it.

    Raises:
        DamagedError: they don't fit.
        StorageError: storage failed.
    """
    inner = Stored(source.handle, source.offset, source.num_left - _CHECKSUM_BYTES)
    if inner.num_left < 0:
        raise DamagedError("it is too short for its checksum (CRC-32C)")
    stored = read_bytes(source.handle, source.offset + inner.num_left, _CHECKSUM_BYTES)
    scan = Stored(inner.handle, inner.offset, inner.num_left)
    if crc32c_of(iter(lambda: scan.read(_READ_BYTES), b"")) != int.from_bytes(stored, "little"):
        raise DamagedError("its bytes don't fit its checksum (CRC-32C)")
    return inner


@dataclass(slots=True)
class WholeStream:
    """A chunk of ``size`` bytes under a codec that is undone at once."""

    source: Stored
    codec: str
    size: int
    _content: memoryview | None = None
    _at: int = 0

    def read_into(self, buffer: memoryview) -> None:
        """As :class:`~auditor.containers.compression.Stream`."""
        if self._content is None:
            self._content = memoryview(unpacked(self.source.read(), self.codec, self.size))
        if len(buffer) > len(self._content) - self._at:
            raise DamagedError(f"it ends {len(buffer) - len(self._content) + self._at} bytes too early")
        buffer[:] = self._content[self._at : self._at + len(buffer)]
        self._at += len(buffer)

    def at_end(self) -> bool:
        """As :class:`~auditor.containers.compression.Stream`."""
        return self._content is not None and self._at == len(self._content)


@dataclass(slots=True)
class ZeroStream:
    """Zeros of which nothing is stored."""

    num_left: int

    def read_into(self, buffer: memoryview) -> None:
        """As :class:`~auditor.containers.compression.Stream`."""
        buffer[:] = bytes(len(buffer))
        self.num_left -= len(buffer)

    def at_end(self) -> bool:
        """As :class:`~auditor.containers.compression.Stream`."""
        return self.num_left <= 0


@dataclass(slots=True)
class SwappedStream:
    """Big-endian elements of ``width`` bytes as little-endian ones."""

    inner: Stream
    width: int
    _rest: bytes = field(default=b"")
    """Of an element of which a part was handed out."""

    def read_into(self, buffer: memoryview) -> None:
        """As :class:`~auditor.containers.compression.Stream`."""
        begun = min(len(self._rest), len(buffer))
        buffer[:begun], self._rest = self._rest[:begun], self._rest[begun:]
        whole = buffer[begun : begun + (len(buffer) - begun) // self.width * self.width]
        self.inner.read_into(whole)
        elements = np.frombuffer(whole, np.uint8).reshape(-1, self.width)
        elements[:] = elements[:, ::-1].copy()
        left = buffer[begun + len(whole) :]
        if len(left):
            element = bytearray(self.width)
            self.inner.read_into(memoryview(element))
            element.reverse()
            left[:], self._rest = element[: len(left)], bytes(element[len(left) :])

    def at_end(self) -> bool:
        """As :class:`~auditor.containers.compression.Stream`."""
        return not self._rest and self.inner.at_end()


def unpacked(stored: bytes, codec: str, size: int) -> bytes:
    """The content of a chunk, ``size`` bytes.

    Raises:
        DamagedError: it is no such chunk, or not of that size.
        UnsupportedError: the library is not installed.
    """
    if size > MAX_WHOLE_BYTES:
        raise UnsupportedError(f"codec {codec} with chunks of {size} bytes")
    try:
        from numcodecs import blosc, lz4
    except ImportError as error:
        raise UnsupportedError(f"codec {codec} without its library (pip install numcodecs)") from error
    told = _of_blosc(stored, size) if codec == BLOSC else _of_lz4(stored, size)
    if told:
        raise DamagedError(told)
    try:
        found = (blosc if codec == BLOSC else lz4).decompress(stored)
    except (RuntimeError, ValueError) as error:
        raise DamagedError(f"its {codec} chunk is broken ({error})") from error
    if len(found) != size:
        raise DamagedError(f"its {codec} chunk holds {len(found)} bytes, its array says {size}")
    return bytes(found)


def _of_blosc(stored: bytes, size: int) -> str:
    """What is wrong with a Blosc chunk's own table, which its library believes; empty where nothing is."""
    if len(stored) < _HEADER_BYTES:
        return "it is too short for a Blosc chunk"
    version, _, flags, width = stored[:4]
    length, block, packed = (int.from_bytes(stored[at : at + 4], "little") for at in (4, 8, 12))
    if version not in (1, 2) or not width:
        return f"it is no Blosc chunk that is known (version {version})"
    if length != size or packed != len(stored):
        return (
            f"its Blosc chunk says that it has {length} bytes in {packed}; it has {len(stored)}, its array says {size}"
        )
    if flags & _COPIED:
        return "" if packed == size + _HEADER_BYTES else "its Blosc chunk holds a copy of another length"
    if not size:
        return ""
    first = _HEADER_BYTES + 4 * -(-size // block) if 0 < block <= size else len(stored) + 1
    if first > len(stored):
        return "the blocks of its Blosc chunk don't fit into it"
    starts = np.frombuffer(stored, "<i4", (first - _HEADER_BYTES) // 4, _HEADER_BYTES)
    return (
        "" if ((starts >= first) & (starts <= len(stored) - 4)).all() else "a block of its Blosc chunk lies outside it"
    )


def _of_lz4(stored: bytes, size: int) -> str:
    stated = int.from_bytes(stored[:4], "little")
    return (
        "" if len(stored) > 4 and stated == size else f"its LZ4 chunk says that it has {stated} bytes, its array {size}"
    )


def has_numcodecs() -> bool:
    """Whether the library of Blosc and LZ4 is installed."""
    return find_spec("numcodecs") is not None
