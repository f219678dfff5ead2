"""The chunks of Zarr shards that hold several: a shard's index says where each of them lies in it.

The index is a pair (offset, length) of uint64 a chunk, in C order of the chunks; both all ones: the shard has no such
chunk, which here is a chunk that is missing, never one of zeros. Source: Zarr v3, ``sharding_indexed``.

An entry takes 16 bytes, of which a sparse file has millions for nothing. So an index is read as columns, and entries
are counted over all that is read of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.containers.crc32c import crc32c
from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.zarr_array import Position, ZarrArray
from auditor.storage.store import Handle, read_bytes

MAX_ENTRIES = 1 << 20
"""Entries of indexes that are read of one array, or in all of one step: a million chunks of a step are beyond honest
ones, whose chunks have a MiB or so."""
_ENTRY_BYTES, _CHECKSUM_BYTES = 16, 4
_NOTHING = (1 << 64) - 1


@dataclass(slots=True)
class Entries:
    """How many entries of indexes may still be read of a step."""

    num_left: int = MAX_ENTRIES

    def take(self, count: int) -> None:
        """Count so many more.

        Raises:
            LimitError: they are too many.
        """
        if count > self.num_left:
            raise LimitError(
                f"the shard's index has {count} entries; of a step at most {MAX_ENTRIES} are read, "
                f"of which {self.num_left} are left"
            )
        self.num_left -= count


@dataclass(frozen=True, slots=True, eq=False)
class InShard:
    """The chunks that one shard has. Columns, in C order of the shard's chunks."""

    number: NDArray[np.int64]
    """Of the chunk in the array's grid, in C order."""
    offset: NDArray[np.int64]
    """First byte, counted from the shard's."""
    length: NDArray[np.int64]


def chunks_in_shard(
    handle: Handle, start: int, num_stored: int, array: ZarrArray, shard: Position, entries: Entries
) -> InShard:
    """The chunks of the shard at position ``shard`` that are there.

    ``start``: of the shard's ``num_stored`` bytes in ``handle``.

    Raises:
        DamagedError: the index is not what it should be.
        LimitError: it asks for more than an honest one needs.
        StorageError: storage failed.
    """
    parts = array.chunks_in_shard
    count = math.prod(parts)
    size = _ENTRY_BYTES * count
    stored = size + _CHECKSUM_BYTES * array.how.index_checksum
    if stored > num_stored:
        raise DamagedError("the shard is too short for its index")
    entries.take(count)
    raw = read_bytes(handle, start if array.how.index_first else start + num_stored - stored, stored)
    if array.how.index_checksum and crc32c(raw[:size]) != int.from_bytes(raw[size:], "little"):
        raise DamagedError("the shard's index does not fit its checksum (CRC-32C)")
    table = np.frombuffer(raw, "<u8", size // 8).reshape(-1, 2)
    inside = np.flatnonzero((table != _NOTHING).any(axis=1))
    number, kept = _numbers(inside, parts, shard, array.grid)
    offset, length = table[inside[kept]].T
    # Not their sum, which may wrap.
    if (offset > num_stored).any() or (length > num_stored - np.minimum(offset, num_stored)).any():
        raise DamagedError("the shard's index leads out of the shard")
    if not length.all():
        raise DamagedError(f"the shard's index has {int((length == 0).sum())} chunks of no bytes")
    found = InShard(number, offset.astype(np.int64), length.astype(np.int64))
    _check_apart(found)
    return found


def _numbers(
    inside: NDArray[np.int64], parts: tuple[int, ...], shard: Position, grid: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers in the array's grid of entries of a shard's index, and which of them lie in the grid at all."""
    kept, number, step = np.ones(len(inside), bool), np.zeros(len(inside), np.int64), 1
    rest = inside
    for part, corner, extent in zip(reversed(parts), reversed(shard), reversed(grid), strict=True):
        rest, at = np.divmod(rest, part)
        at += corner * part
        kept &= at < extent
        number += at * step
        step *= extent
    return number[kept], kept


def _check_apart(found: InShard) -> None:
    order = np.argsort(found.offset, kind="stable")
    starts, stops = found.offset[order], (found.offset + found.length)[order]
    shared = np.flatnonzero(starts[1:] < stops[:-1])
    if len(shared):
        raise DamagedError(f"two chunks are said to lie at byte {starts[shared[0] + 1]} of the shard")
