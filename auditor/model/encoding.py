"""How the content of a file is stored where its bytes aren't its elements: chunks, compressed or held elsewhere.

A piece in such a file is addressed in its *content*: the chunks laid end to end, decoded. So what reads pieces knows
nothing of codecs; who opens the file undoes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PLAIN, ZSTD, GZIP, DEFLATE, BLOSC, LZ4 = "", "zstd", "gzip", "deflate", "blosc", "lz4"
"""A codec is a name of these, or several by slashes: as they are undone, the outermost first."""
SHARD = "shard"
"""Before another codec: the chunk is the only one of a Zarr shard, which says at its end where it lies in it."""
BEGINNING = "beginning"
"""Before all others: what is stored decodes to more than the chunk, which is the first part of it."""
ZEROS = "zeros"
"""Alone: nothing is stored, and by the format's own rule that stands for zeros."""
CRC32C = "crc32c"
"""Before another codec: the CRC-32C of what is stored follows it."""
SWAPPED = {2: "swap2", 4: "swap4", 8: "swap8"}
"""Behind another codec: elements of so many bytes are big-endian."""

_MAX_RATIO = {ZSTD: 1 << 15, GZIP: 1032, DEFLATE: 1032, BLOSC: 1 << 26, LZ4: 255, ZEROS: 1 << 62}
"""Bytes that one stored byte can stand for: zstd's repeated blocks are 128 KiB in four bytes (RFC 8878, 3.1.1.2),
deflate copies at most 258 bytes by two bits (RFC 1951), LZ4 255 by one more byte. More is a lie, whatever the frame
says. Blosc 1 has blocks of up to 2 GiB, whose parts are under one of these."""
_SLACK_BYTES = 64
_SURE_BYTES = 1 << 30
"""Chunks beyond it that their stored bytes can't hold are a lie of the records: to look for each of their parts in vain
would take minutes."""

_MOST_BYTES = 1 << 60
"""Of a file's content: beyond it positions don't fit their columns."""
_ALIGNED = 8
"""Chunks begin at a multiple of it, so that elements are aligned in a buffer whatever lies before them."""


@dataclass(frozen=True, eq=False, slots=True)
class Encoding:
    """The chunks of one file. Columns, in order of content."""

    start: NDArray[np.int64]
    """Position of the chunk in the content."""
    num_bytes: NDArray[np.int64]
    """Length there."""
    offset: NDArray[np.int64]
    """First stored byte: in the file, or where ``held`` in ``memory``."""
    num_stored: NDArray[np.int64]
    codec: NDArray[np.int8]
    """Position in ``codecs``."""
    held: NDArray[np.bool_]
    """Whether what is stored is in ``memory``: chunks that lie inside metadata have no byte range of their own."""
    codecs: tuple[str, ...]
    memory: bytes = b""
    beyond: bool = False
    """Whether its chunks are said to hold more than any file's content, so that positions are none."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return int(self.start[-1] + self.num_bytes[-1]) if len(self) else 0

    def contradiction(self, num_bytes: int) -> str:
        """Why a file of ``num_bytes`` is not stored so: chunks beyond its end, or over each other. Empty: it may be."""
        if self.beyond:
            return f"its chunks are said to hold more than {_MOST_BYTES} bytes together"
        apart = ~self.held & (self.num_stored > 0)
        order = np.argsort(self.offset[apart], kind="stable")
        starts, stops = self.offset[apart][order], (self.offset + self.num_stored)[apart][order]
        lies = [at for at in np.flatnonzero(self.num_bytes > _SURE_BYTES).tolist() if not self._may_hold(at)]
        if lies:
            size, held = int(self.num_bytes[lies[0]]), int(self.num_stored[lies[0]])
            return f"a chunk of {size} bytes is said to be stored in {held} bytes of it, which can't hold it"
        last = int(stops.max(initial=0))
        if last > num_bytes:
            return f"it has {num_bytes} bytes, values are said to lie in it up to byte {last}: cut short"
        shared = np.flatnonzero(starts[1:] < np.maximum.accumulate(stops)[:-1])
        return f"two values are said to lie at byte {starts[shared[0] + 1]} of it" if len(shared) else ""

    def _may_hold(self, number: int) -> bool:
        codec = self.codecs[int(self.codec[number])]
        return int(self.num_bytes[number]) <= most_bytes(codec, int(self.num_stored[number]))

    def between(self, first: int, last: int) -> Encoding:
        """The chunks that hold something of the content from ``first`` to ``last``; positions stay as they are."""
        low = int(np.searchsorted(self.start + self.num_bytes, first, "right"))
        high = int(np.searchsorted(self.start, last, "left"))
        part = slice(low, max(low, high))
        memory, offset, held = b"", self.offset[part].copy(), self.held[part]
        for at in np.flatnonzero(held).tolist():
            begin = int(offset[at])
            offset[at] = len(memory)
            memory += self.memory[begin : begin + int(self.num_stored[part][at])]
        return Encoding(
            self.start[part], self.num_bytes[part], offset, self.num_stored[part], self.codec[part], held, self.codecs,
            memory,
        )  # fmt: skip


@dataclass(slots=True)
class EncodingBuilder:
    """Collects the chunks of one file."""

    _columns: tuple[array[int], ...] = field(default_factory=lambda: tuple(array("q") for _ in range(6)))
    _codecs: dict[str, int] = field(default_factory=dict)
    _memory: list[bytes] = field(default_factory=list)
    _num_held: int = 0
    _stop: int = 0
    _beyond: bool = False

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, num_bytes: int, codec: str, offset: int, num_stored: int) -> int:
        """A chunk of ``num_bytes`` that is stored in the file; its position in the content."""
        return self._add(num_bytes, codec, offset, num_stored, False)

    def hold(self, num_bytes: int, codec: str, stored: bytes) -> int:
        """A chunk of ``num_bytes`` whose stored bytes are kept here; its position in the content."""
        offset = self._num_held
        self._memory.append(stored)
        self._num_held += len(stored)
        return self._add(num_bytes, codec, offset, len(stored), True)

    def _begin(self, num_bytes: int) -> int:
        """Where so many bytes more begin in the content."""
        start = -(-self._stop // _ALIGNED) * _ALIGNED
        self._stop = start + num_bytes
        if self._stop >= _MOST_BYTES:
            self._beyond, start, self._stop = True, 0, 0
        return start

    def _add(self, num_bytes: int, codec: str, offset: int, num_stored: int, held: bool) -> int:
        start = self._begin(num_bytes)
        number = self._codecs.setdefault(codec, len(self._codecs))
        row: Sequence[int] = (start, num_bytes, offset, num_stored, number, held)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        return start

    def add_many(
        self,
        num_bytes: int,
        codec: str,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        held: bytes | None = None,
    ) -> NDArray[np.int64]:
        """Chunks of ``num_bytes`` each, stored in the file, or in ``held`` where that is given; their positions."""
        if held is not None:
            offsets = offsets + self._num_held
            self._memory.append(held)
            self._num_held += len(held)
        count, pace = len(offsets), -(-num_bytes // _ALIGNED) * _ALIGNED
        starts = self._begin(pace * count) + (pace if pace * count < _MOST_BYTES else 0) * np.arange(count)
        number = self._codecs.setdefault(codec, len(self._codecs))
        size, code, kept = (np.full(count, value) for value in (num_bytes, number, int(held is not None)))
        for column, values in zip(self._columns, (starts, size, offsets, lengths, code, kept), strict=True):
            column.frombytes(values.astype("q").tobytes())
        return starts

    def build(self) -> Encoding:
        """The finished table."""
        start, num_bytes, offset, num_stored, codec, held = (np.array(column, np.int64) for column in self._columns)
        return Encoding(
            start, num_bytes, offset, num_stored, codec.astype(np.int8), held.astype(bool), tuple(self._codecs),
            b"".join(self._memory), self._beyond,
        )  # fmt: skip


def most_bytes(codec: str, num_stored: int) -> int:
    """To how many bytes ``num_stored`` stored ones can expand."""
    ratio = max((_MAX_RATIO.get(name, 1) for name in codec.split("/")), default=1)
    return ratio * (num_stored + _SLACK_BYTES)


def one_chunk(num_bytes: int, codec: str, num_stored: int, offset: int = 0) -> Encoding:
    """The encoding of a file of whose content one chunk of ``num_bytes`` is all that counts."""
    builder = EncodingBuilder()
    builder.add(num_bytes, codec, offset, num_stored)
    return builder.build()
