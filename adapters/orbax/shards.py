"""Arrays whose chunks lie several in a shard: the indexes of the shards, which lie in files or in a database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.orbax.arrays import Chunk, StoredArray
from auditor.adapters.step_file import Opened
from auditor.containers.damage import DamagedError
from auditor.containers.encoded import InMemory
from auditor.containers.zarr_array import Position, ZarrArray
from auditor.containers.zarr_shards import Entries, InShard, chunks_in_shard
from auditor.model.catalog import FileState
from auditor.storage.store import Entry, Handle, ObjectMissingError, StorageError, Store


@dataclass(slots=True)
class Shards:
    """What the shards of one array hold."""

    found: list[tuple[Chunk, InShard]] = field(default_factory=list)
    """Every shard whose index could be read, in order of position."""
    broken: dict[str, Opened[Any]] = field(default_factory=dict)
    """Key of a shard whose index can't be read."""


def read_shards(store: Store, stored: StoredArray, array: ZarrArray, entries: Entries) -> Shards:
    """Read the indexes of all shards of an array, as long as ``entries`` are left."""
    shards = Shards()
    for position, shard in sorted(stored.chunks.items()):
        key = array.shards.key(position)
        try:
            shards.found.append((shard, _index(store, array, position, shard, entries)))
        except ObjectMissingError:
            shards.broken[key] = Opened[Any].absent(key)
        except DamagedError as error:
            shards.broken[key] = Opened(key, FileState.DAMAGED, None, str(error), shard.entry)
        except StorageError as error:
            shards.broken[key] = Opened(key, FileState.UNREADABLE, None, str(error), shard.entry)
    return shards


def _index(store: Store, array: ZarrArray, position: Position, shard: Chunk, entries: Entries) -> InShard:
    with _opened(store, shard) as handle:
        return chunks_in_shard(handle, shard.offset, shard.num_stored, array, position, entries)


@contextmanager
def _opened(store: Store, shard: Chunk) -> Iterator[Handle]:
    if shard.inline is not None:
        yield InMemory(Entry(shard.file, False, len(shard.inline)), memoryview(shard.inline))
        return
    with store.open(shard.file) as handle:
        yield handle
