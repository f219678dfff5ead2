"""Arrays whose chunks lie several in a shard: from the shards, as files or in a database, to the chunks in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from auditor.adapters.orbax.arrays import Chunk, StoredArray
from auditor.adapters.step_file import Opened
from auditor.containers.damage import DamagedError
from auditor.containers.encoded import InMemory
from auditor.containers.zarr_array import Position, ZarrArray
from auditor.containers.zarr_shards import chunks_in_shard
from auditor.model.catalog import FileState
from auditor.storage.store import Entry, Handle, ObjectMissingError, StorageError, Store


def unsharded(store: Store, stored: StoredArray) -> StoredArray:
    """The array with the chunks in its shards; what is wrong with a shard's index is in ``broken``."""
    array = stored.array
    if array is None or not array.shard_shape or array.unsupported:
        return stored
    chunks: dict[Position, Chunk] = {}
    broken: dict[str, Opened[Any]] = {}
    for position, shard in sorted(stored.chunks.items()):
        key = array.shards.key(position)
        try:
            chunks |= _inside(store, array, position, shard)
        except ObjectMissingError:
            broken[key] = Opened[Any].absent(key)
        except DamagedError as error:
            broken[key] = Opened(key, FileState.DAMAGED, None, str(error), shard.entry)
        except StorageError as error:
            broken[key] = Opened(key, FileState.UNREADABLE, None, str(error), shard.entry)
    return replace(stored, chunks=chunks, broken=broken)


def _inside(store: Store, array: ZarrArray, position: Position, shard: Chunk) -> dict[Position, Chunk]:
    with _opened(store, shard) as handle:
        return {
            at: replace(
                shard, offset=offset, num_stored=length,
                inline=None if shard.inline is None else shard.inline[offset : offset + length],
            )
            for at, offset, length in chunks_in_shard(handle, shard.offset, shard.num_stored, array, position)
        }  # fmt: skip


@contextmanager
def _opened(store: Store, shard: Chunk) -> Iterator[Handle]:
    if shard.inline is not None:
        yield InMemory(Entry(shard.file, False, len(shard.inline)), memoryview(shard.inline))
        return
    with store.open(shard.file) as handle:
        yield handle
