"""The chunks of one array of a Zarr tree as pieces, whether each is a file of its own or several lie in a shard."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.zarr_tree.files import Stored
from auditor.containers.damage import DamagedError
from auditor.containers.zarr_array import Position, ZarrArray
from auditor.containers.zarr_shards import Entries, chunks_in_shard
from auditor.model.catalog import File, FileState
from auditor.model.dtype import DType
from auditor.model.encoding import EncodingBuilder
from auditor.model.mesh import Coordinate
from auditor.storage.store import Entry, StorageError, Store

MAX_NAMED = 256
"""Missing chunks of one array that are named; the rest is a gap in the tensor."""
_NOT_THERE = "it is not there (zarr leaves chunks of zeros out unless write_empty_chunks is set)"


class ChunkPlacing:
    """Adds the pieces of one array. ``path``: what is below the step, below the root."""

    def __init__(
        self, builder: CatalogBuilder, store: Store, stored: Stored, array: ZarrArray, dtype: DType,
        path: Callable[[str], str], entries: Entries,
    ) -> None:  # fmt: skip
        self.builder, self.store, self.stored, self.array, self.path = builder, store, stored, array, path
        self.length, self.entries = array.chunk_bytes(dtype), entries
        self.lost: dict[Position, int] = {}
        """Shards whose index can't be read, to their files."""

    def add(self, number: int, place: Coordinate) -> None:
        """Add a piece a chunk, and for chunks that are not there a piece each all the same, as long as they are few."""
        array, chunks = self.array, sorted(self.stored.chunks.items())
        if array.shard_shape is None:
            for position, entry in chunks:
                self._add_chunk(number, place, position, entry)
            there = [np.array([array.number(position) for position, _ in chunks], np.int64)]
        else:
            there = [self._add_shard(number, place, position, entry) for position, entry in chunks]
        if sum(map(len, there)) < array.num_chunks:
            known = np.concatenate(there) if there else np.zeros(0, np.int64)
            for lost in array.missing(known, MAX_NAMED).tolist():
                position = array.position_of(lost)
                self._piece(number, self._missing(place, position), 0, position, place)

    def _piece(self, number: int, file: int, offset: int, position: Position, place: Coordinate) -> None:
        array = self.array
        self.builder.piece(
            number, file, offset, array.box(position), place, key=self.stored.path, strides=array.strides
        )

    def _add_chunk(self, number: int, place: Coordinate, position: Position, entry: Entry) -> None:
        codec, length = self.array.codec, self.length
        fits = entry.num_bytes == length or bool(codec)
        detail = "" if fits else f"it has {entry.num_bytes} bytes, a chunk of its array has {length}"
        state = FileState.DAMAGED if detail else FileState.PRESENT
        file = self.builder.file(File(entry.name, entry.num_bytes, entry.identity, state, place, detail, "zarr"))
        if codec:
            encoding = EncodingBuilder()
            encoding.add(length, codec, 0, entry.num_bytes)
            self.builder.encode(file, encoding.build())
        self._piece(number, file, 0, position, place)

    def _add_shard(self, number: int, place: Coordinate, shard: Position, entry: Entry) -> NDArray[np.int64]:
        """Add the chunks of a shard; their numbers."""
        array, state, detail = self.array, FileState.PRESENT, ""
        try:
            with self.store.open(entry.name) as handle:
                found = chunks_in_shard(handle, 0, entry.num_bytes, array, shard, self.entries)
        except DamagedError as error:
            state, detail = FileState.DAMAGED, str(error)
        except StorageError as error:
            state, detail = FileState.UNREADABLE, str(error)
        file = self.builder.file(File(entry.name, entry.num_bytes, entry.identity, state, place, detail, "zarr"))
        if detail:
            self.lost[shard] = file
            return np.zeros(0, np.int64)
        encoding, (starts, stops) = EncodingBuilder(), array.boxes(found.number)
        offsets = encoding.add_many(self.length, array.codec, found.offset, found.length)
        self.builder.boxes(
            number, file, offsets, starts, stops, [place], np.zeros(len(offsets), np.int64),
            key=self.stored.path, strides=array.strides,
        )  # fmt: skip
        self.builder.encode(file, encoding.build())
        return found.number

    def _missing(self, place: Coordinate, position: Position) -> int:
        """The file of a chunk that is not there."""
        array, key = self.array, self.array.key(position)
        if array.shard_shape is not None:
            shard = array.shards.position(key)
            if shard in self.lost:
                return self.lost[shard]
            if shard in self.stored.chunks:
                inside = f"{key}[{','.join(map(str, position))}]"
                file = File(self.path(f"{self.stored.path}/{inside}"), 0, "", FileState.MISSING, place,
                            f"its shard has no such chunk; {_NOT_THERE}", "zarr")  # fmt: skip
                return self.builder.file(file)
        reason = self.stored.lost(key)
        detail = f"it was not exported: {reason}" if reason else _NOT_THERE
        lost = File(self.path(f"{self.stored.path}/{key}"), 0, "", FileState.MISSING, place, detail, "zarr")
        return self.builder.file(lost)
