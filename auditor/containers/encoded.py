"""A file of a Catalog opened as its pieces address it: chunks are decoded while they are read, each once and in order.

Small chunks are decoded whole and a few of them kept; of large ones a stream is kept, which goes on where the last read
ended. So memory does not grow with chunks, and what a chunk may expand to is bounded by what its array says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from auditor.containers.compression import GzipStream, Stream, ZstdStream
from auditor.containers.crc32c import crc32c
from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.layers import Stored, SwappedStream, WholeStream, ZeroStream, without_checksum
from auditor.model.catalog import File
from auditor.model.encoding import (
    BEGINNING,
    BLOSC,
    CRC32C,
    DEFLATE,
    GZIP,
    LZ4,
    SHARD,
    SWAPPED,
    ZEROS,
    ZSTD,
    Encoding,
    most_bytes,
)
from auditor.storage.store import Entry, Handle, ShortReadError, Store, UndecodableError, read_bytes

KEPT_BYTES = 1 << 20
"""Chunks up to this size are decoded whole."""
MAX_KEPT = 8
"""Decoded chunks, and streams, that are kept: what is compared lies in a few places at once."""
READ_BYTES = 1 << 20
"""Stored bytes are read in blocks of this size."""
_INDEX_BYTES, _NOTHING = 20, (1 << 64) - 1
"""A shard of one chunk ends with its offset and length (uint64) and the CRC-32C of both; all ones: it has no chunk."""


T = TypeVar("T")


@contextmanager
def open_file(store: Store, file: File) -> Iterator[Handle]:
    """``file`` with the content that its pieces address; as it is stored where it has no encoding.

    Raises:
        StorageError: it can't be opened. Reading raises UndecodableError where a chunk is not what it should be.
    """
    with store.open(file.name) as handle:
        yield handle if file.encoding is None else DecodedHandle(handle, file.encoding)


@dataclass(slots=True)
class _Plain:
    """A chunk that is stored as it is."""

    source: Stored

    def read_into(self, buffer: memoryview) -> None:
        if len(buffer) > self.source.num_left:
            raise DamagedError(f"it ends {len(buffer) - self.source.num_left} bytes too early")
        self.source.handle.read_into(self.source.offset, buffer)
        self.source.offset += len(buffer)
        self.source.num_left -= len(buffer)

    def at_end(self) -> bool:
        return not self.source.num_left


@dataclass(slots=True)
class _Beginning:
    """The first part of a chunk: what follows is not asked for."""

    stream: Stream

    def read_into(self, buffer: memoryview) -> None:
        self.stream.read_into(buffer)

    def at_end(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class InMemory:
    """Bytes that are held, as a handle."""

    entry: Entry
    content: memoryview

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``."""
        if offset < 0 or offset + len(buffer) > len(self.content):
            raise ShortReadError(f"{self.entry.name}: its content ends at byte {len(self.content)}")
        buffer[:] = self.content[offset : offset + len(buffer)]


@dataclass(slots=True)
class _Open:
    """A stream, and how much of its chunk is done."""

    stream: Stream
    done: int = 0


@dataclass(slots=True)
class DecodedHandle:
    """An open file whose content is its chunks, decoded. For one thread."""

    inner: Handle
    encoding: Encoding
    _kept: OrderedDict[int, bytearray] = field(default_factory=OrderedDict)
    _streams: OrderedDict[int, _Open] = field(default_factory=OrderedDict)
    _broken: dict[int, str] = field(default_factory=dict)

    @property
    def entry(self) -> Entry:
        """That of the stored file."""
        return self.inner.entry

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the content from ``offset`` on; what lies between chunks is left as it is.

        Raises:
            UndecodableError: a chunk is not what it should be.
            ShortReadError: the content, or the stored file, ends inside the range.
            StorageError: anything else that storage says.
        """
        table, stop = self.encoding, offset + len(buffer)
        if offset < 0 or stop > table.size:
            raise ShortReadError(f"{self.entry.name}: its content ends at {table.size}")
        number = max(0, int(np.searchsorted(table.start, offset, "right")) - 1)
        while number < len(table) and int(table.start[number]) < stop:
            start, size = int(table.start[number]), int(table.num_bytes[number])
            low, high = max(offset, start), min(stop, start + size)
            if low < high:
                self._part(number, low - start, buffer[low - offset : high - offset])
            number += 1

    def _part(self, number: int, first: int, buffer: memoryview) -> None:
        if number in self._broken:
            # Behind the break nothing can be had; to look for it once more for every part would take for ever.
            raise UndecodableError(self._broken[number])
        try:
            if int(self.encoding.num_bytes[number]) <= KEPT_BYTES:
                buffer[:] = memoryview(self._whole(number))[first : first + len(buffer)]
            else:
                self._stream_into(number, first, buffer)
        except (DamagedError, UnsupportedError) as error:
            self._streams.pop(number, None)
            self._broken[number] = f"{self.entry.name}: {self._called(number)}: {error}"
            raise UndecodableError(self._broken[number]) from error

    def _called(self, number: int) -> str:
        table = self.encoding
        if table.held[number]:
            return "a chunk that lies inside its nodes"
        return f"the chunk at bytes {table.offset[number]} to {table.offset[number] + table.num_stored[number]}"

    def _whole(self, number: int) -> bytearray:
        if number not in self._kept:
            size = int(self.encoding.num_bytes[number])
            content, opened = bytearray(size), _Open(self._open(number))
            _read(opened, memoryview(content), size)
            _keep(self._kept, number, content)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _stream_into(self, number: int, first: int, buffer: memoryview) -> None:
        size = int(self.encoding.num_bytes[number])
        opened = self._streams.get(number)
        if opened is None or opened.done > first:
            opened = _Open(self._open(number))
            _keep(self._streams, number, opened)
        self._streams.move_to_end(number)
        scratch = memoryview(bytearray(min(READ_BYTES, first - opened.done)))
        while opened.done < first:
            _read(opened, scratch[: min(len(scratch), first - opened.done)], size)
        _read(opened, buffer, size)

    def _open(self, number: int) -> Stream:
        table = self.encoding
        offset, length = int(table.offset[number]), int(table.num_stored[number])
        handle: Handle = self.inner
        if table.held[number]:
            handle = InMemory(self.entry, memoryview(table.memory))
        codec, size = table.codecs[int(table.codec[number])], int(table.num_bytes[number])
        source = Stored(handle, offset, length)
        names = [name for name in codec.split("/") if name]
        beginning = bool(names) and names[0] == BEGINNING
        del names[:beginning]
        if names and names[0] == SHARD:
            source = _only_chunk(source)
            del names[0]
        if names and names[0] == CRC32C:
            source = without_checksum(source)
            del names[0]
        if size > most_bytes(codec, source.num_left):
            raise DamagedError(f"{source.num_left} bytes are too few for the {size} of its array")
        stream = _decoded(source, names, size)
        return _Beginning(stream) if beginning else stream


def _keep(kept: OrderedDict[int, T], number: int, what: T) -> None:
    kept[number] = what
    if len(kept) > MAX_KEPT:
        kept.popitem(last=False)


def _read(opened: _Open, buffer: memoryview, size: int) -> None:
    """The next part of a chunk of ``size`` bytes; at its end, that nothing follows."""
    opened.stream.read_into(buffer)
    opened.done += len(buffer)
    if opened.done == size and not opened.stream.at_end():
        raise DamagedError(f"it holds more than the {size} bytes that its array says")


def _decoded(source: Stored, names: list[str], size: int) -> Stream:
    swapped = names.pop() if names and names[-1] in SWAPPED.values() else ""
    name = names.pop() if names else ""
    if name == ZSTD:
        stream: Stream = ZstdStream(source, READ_BYTES)
    elif name in (GZIP, DEFLATE):
        stream = GzipStream(source, READ_BYTES, bare=name == DEFLATE)
    elif name in (BLOSC, LZ4):
        stream = WholeStream(source, name, size)
    elif name == ZEROS:
        stream = ZeroStream(size)
    elif not name:
        stream = _Plain(source)
    else:
        raise UnsupportedError(f"codec {name[:40]}")
    if names:
        raise UnsupportedError("several codecs")
    return SwappedStream(stream, int(swapped.removeprefix("swap"))) if swapped else stream


def _only_chunk(shard: Stored) -> Stored:
    """The chunk of a shard that has one."""
    if shard.num_left < _INDEX_BYTES:
        raise DamagedError("the shard is too short for its index")
    index = read_bytes(shard.handle, shard.offset + shard.num_left - _INDEX_BYTES, _INDEX_BYTES)
    if crc32c(index[:16]) != int.from_bytes(index[16:], "little"):
        raise DamagedError("the shard's index does not fit its checksum (CRC-32C)")
    start, length = int.from_bytes(index[:8], "little"), int.from_bytes(index[8:16], "little")
    if start == length == _NOTHING:
        raise DamagedError("the shard says that it has no chunk")
    if start + length > shard.num_left:
        raise DamagedError("the shard's index leads out of the shard")
    return Stored(shard.handle, shard.offset + start, length)
