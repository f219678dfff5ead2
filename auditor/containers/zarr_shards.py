"""The chunks of Zarr shards that hold several: a shard's index says where each of them lies in it.

The index is a pair (offset, length) of uint64 a chunk, in C order of the chunks; both all ones: the shard has no such
chunk, which here is a chunk that is missing, never one of zeros. Source: Zarr v3, ``sharding_indexed``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np

from auditor.containers.crc32c import crc32c
from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.zarr_array import Position, ZarrArray
from auditor.storage.store import Handle, read_bytes

MAX_INDEX_BYTES = 64 << 20
_ENTRY_BYTES, _CHECKSUM_BYTES = 16, 4
_NOTHING = (1 << 64) - 1


def chunks_in_shard(
    handle: Handle, start: int, num_stored: int, array: ZarrArray, shard: Position
) -> Iterator[tuple[Position, int, int]]:
    """The chunks of the shard at position ``shard`` that are there: position in the array, first byte, length.

    ``start``: of the shard's ``num_stored`` bytes in ``handle``.

    Raises:
        DamagedError: the index is not what it should be.
        LimitError: it asks for more than an honest one needs.
        StorageError: storage failed.
    """
    parts = [outer // inner for outer, inner in zip(array.shard_shape, array.chunk_shape, strict=True)]
    size = _ENTRY_BYTES * math.prod(parts)
    stored = size + _CHECKSUM_BYTES * array.how.index_checksum
    if stored > MAX_INDEX_BYTES:
        raise LimitError(f"the shard's index has {stored} bytes, at most {MAX_INDEX_BYTES} are read")
    if stored > num_stored:
        raise DamagedError("the shard is too short for its index")
    raw = read_bytes(handle, start if array.how.index_first else start + num_stored - stored, stored)
    if array.how.index_checksum and crc32c(raw[:size]) != int.from_bytes(raw[size:], "little"):
        raise DamagedError("the shard's index does not fit its checksum (CRC-32C)")
    table = np.frombuffer(raw, "<u8", size // 8).reshape(-1, 2).tolist()
    corner = [at * n for at, n in zip(shard, parts, strict=True)]
    for inside, (offset, length) in zip(product(*map(range, parts)), table, strict=True):
        position = tuple(a + b for a, b in zip(corner, inside, strict=True))
        if offset == length == _NOTHING or any(at >= n for at, n in zip(position, array.grid, strict=True)):
            continue
        if offset + length > num_stored:
            raise DamagedError("the shard's index leads out of the shard")
        yield position, start + offset, length
