"""Tensors and pieces of an Orbax checkpoint: a piece a chunk, its coordinate that of the rank that wrote it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.optax.record import numbers, record
from auditor.adapters.optax.tree import Leaf, OptaxTree
from auditor.adapters.orbax.arrays import Chunk, StoredArray
from auditor.adapters.orbax.mosaic import Mosaic, coordinate_of, coordinates_of
from auditor.adapters.orbax.shards import read_shards
from auditor.adapters.step_file import Opened
from auditor.containers.elements import number_of
from auditor.containers.encoded import open_file
from auditor.containers.zarr_array import Position, ZarrArray
from auditor.containers.zarr_shards import Entries, InShard
from auditor.model.catalog import File, FileState
from auditor.model.dtype import DType
from auditor.model.encoding import ZEROS, EncodingBuilder
from auditor.model.mesh import EVERYWHERE, Coordinate, Mesh
from auditor.storage.store import StorageError, Store, read_bytes

_ZERO_OR_LOST = "it is not stored: it was of zeros, which its writer leaves out, or is lost"
_ZEROS_OR_LOST = "they were of zeros, which its writer leaves out, or are lost"
_FEW_ZEROS = 8
"""So many chunks that may have been of zeros are named one by one."""
MAX_NAMED = 256
"""Missing chunks of one array that are named; the rest is a gap in the tensor."""
MAX_ZEROS = 1 << 16
"""Chunks of zeros that one array may leave out: its writer makes one a device."""


@dataclass(frozen=True, slots=True)
class Found:
    """An array of the tree that is there, with shape and dtype."""

    leaf: Leaf
    stored: StoredArray
    array: ZarrArray
    dtype: DType
    item: str
    """Path of its item."""
    how: Mosaic | None = None
    undetermined: str = ""
    lost_in: str = ""
    """The file without which the array is not to be had, though it is known what it was."""
    value: float | None = None
    """The number that it is, where it is recorded as such and not stored as an array."""
    may_be_zeros: bool = False
    """Whether a chunk that is not there may be one of zeros, which its writer leaves out, and nothing tells which."""
    zeros_in: str = ""
    """The file that tells which chunks are stored, where the writer leaves out those of zeros."""


class OrbaxFiles:
    """The Catalog's files, each once; what lies in them under codecs is collected chunk by chunk."""

    def __init__(self, builder: CatalogBuilder) -> None:
        self.builder = builder
        self.numbers: dict[str, int] = {}
        self.states: dict[str, FileState] = {}
        self._encodings: dict[int, EncodingBuilder] = {}

    def add(self, path: str, opened: Opened[Any], container: str, place: Coordinate = EVERYWHERE) -> int:
        """Add a file by its path below the root, or find it; its number."""
        if path not in self.numbers:
            size, identity = (opened.entry.num_bytes, opened.entry.identity) if opened.entry else (0, "")
            file = File(path, size, identity, opened.state, place, opened.detail, container)
            self.numbers[path], self.states[path] = self.builder.file(file), opened.state
        return self.numbers[path]

    def place(self, chunk: Chunk, codec: str, length: int, place: Coordinate) -> tuple[int, int]:
        """File of a chunk, and where its content of ``length`` bytes begins in that file's."""
        if chunk.entry is not None:
            whole = chunk.num_stored == chunk.entry.num_bytes
            fits = codec or not whole or chunk.num_stored == length
            told = "" if fits else f"it has {chunk.num_stored} bytes, a chunk of its array has {length}"
            state = FileState.PRESENT if fits else FileState.DAMAGED
            number = self.add(chunk.file, Opened(chunk.file, state, None, told, chunk.entry), "zarr", place)
            if whole and not codec:
                return number, 0
        number = self.numbers[chunk.file]
        encoding = self._encodings.setdefault(number, EncodingBuilder())
        if chunk.inline is not None:
            return number, encoding.hold(length, codec, chunk.inline)
        return number, encoding.add(length, codec, chunk.offset, chunk.num_stored)

    def place_shard(
        self, shard: Chunk, inside: InShard, codec: str, length: int, place: Coordinate
    ) -> tuple[int, NDArray[np.int64]]:
        """File of a shard, and where in that file's content its chunks of ``length`` bytes begin."""
        if shard.entry is not None:
            self.add(shard.file, Opened(shard.file, FileState.PRESENT, None, "", shard.entry), "zarr", place)
        number = self.numbers[shard.file]
        encoding = self._encodings.setdefault(number, EncodingBuilder())
        first = inside.offset + (shard.offset if shard.inline is None else 0)
        return number, encoding.add_many(length, codec, first, inside.length, shard.inline)

    def zeros(self, number: int, length: int, count: int) -> NDArray[np.int64]:
        """Where in a file's content chunks of zeros begin that it doesn't store."""
        encoding, nothing = self._encodings.setdefault(number, EncodingBuilder()), np.zeros(count, np.int64)
        return encoding.add_many(length, ZEROS, nothing, nothing, b"")

    def encode(self) -> None:
        """Hand what was collected to the files."""
        for number, encoding in self._encodings.items():
            self.builder.encode(number, encoding.build())


class OrbaxTensors:
    """Adds the arrays of a checkpoint to the Catalog."""

    def __init__(self, store: Store, builder: CatalogBuilder, files: OrbaxFiles, found: Sequence[Found]) -> None:
        self.store, self.builder, self.files, self.found = store, builder, files, found
        self.tree = OptaxTree([entry.leaf for entry in found])
        self.wanted = frozenset(numbers(self.tree))
        self.scalars: dict[int, tuple[int, int]] = {}
        """Leaf to where its one element is."""
        self.entries = Entries()
        self.values: dict[int, float] = {}
        """Leaf to its number, for those that are metadata."""

    def add(self) -> Mesh:
        """Add tensors, pieces, counters and groups; the mesh on which most arrays lay."""
        meshes: Counter[Mesh] = Counter()
        for at, entry in enumerate(self.found):
            meaning = self.tree.meanings[at]
            if entry.value is not None:
                if at in self.wanted:
                    self.values[at] = entry.value
                continue
            reason = entry.array.unsupported and f"{entry.array.unsupported} is not read"
            number = self.builder.tensor(
                meaning.name, meaning.role, entry.dtype, entry.array.shape, meaning.order,
                stored_once=entry.how.replicated if entry.how else (),
                placement=entry.how.placement if entry.how else None,
                undetermined=reason or meaning.undetermined or entry.undetermined,
            )  # fmt: skip
            if entry.how:
                meshes[Mesh(entry.how.sharding.axes, ordered=True)] += 1
            self._add_pieces(at, number, entry)
        self.files.encode()
        self._record()
        return max(meshes, key=lambda mesh: (meshes[mesh], mesh.axes), default=Mesh())

    def _add_pieces(self, at: int, number: int, entry: Found) -> None:
        array, stored = entry.array, entry.stored
        if entry.lost_in or array.unsupported:
            file = self._unread(entry) if not entry.lost_in else self.files.numbers[entry.lost_in]
            for position in islice(array.positions(), MAX_NAMED):
                self._lost(number, entry, file, position)
            return
        if array.shard_shape is not None:
            self._add_shards(at, number, entry)
            return
        length, strides = array.chunk_bytes(entry.dtype), array.strides
        for position, chunk in sorted(stored.chunks.items()):
            box = array.box(position)
            place = coordinate_of(entry.how, box.start)
            file, offset = self.files.place(chunk, array.codec, length, place)
            self.builder.piece(number, file, offset, box, place, key=stored.name, strides=strides)
            if at in self.wanted and not position:
                self.scalars[at] = file, offset
        if len(stored.chunks) < array.num_chunks:
            there = [array.number(position) for position in stored.chunks]
            self._add_missing(number, entry, np.array(there, np.int64))

    def _add_shards(self, at: int, number: int, entry: Found) -> None:
        """The chunks of an array that lie in shards."""
        array, stored = entry.array, entry.stored
        length, shards = array.chunk_bytes(entry.dtype), read_shards(self.store, stored, array, self.entries)
        for key, opened in shards.broken.items():
            self.files.add(f"{entry.item}/{stored.name}/{key}".lstrip("/"), opened, "zarr")
        for shard, inside in shards.found:
            starts, stops = array.boxes(inside.number)
            coordinates, places = coordinates_of(entry.how, starts)
            file, offsets = self.files.place_shard(shard, inside, array.codec, length, coordinates[0])
            self.builder.boxes(
                number, file, offsets, starts, stops, coordinates, places, key=stored.name, strides=array.strides
            )
            if at in self.wanted and not array.shape and len(offsets):
                self.scalars[at] = file, int(offsets[0])
        there = [inside.number for _, inside in shards.found]
        if sum(map(len, there)) < array.num_chunks:
            self._add_missing(number, entry, np.concatenate(there) if there else np.zeros(0, np.int64))

    def _add_missing(self, number: int, entry: Found, there: NDArray[np.int64]) -> None:
        """The pieces of chunks that are not stored; ``there``: the numbers of those that are."""
        array = entry.array
        zeros = array.fills_zeros and (bool(entry.zeros_in) or entry.may_be_zeros)
        lost = array.missing(there, min(MAX_ZEROS, self.entries.num_left) if zeros else MAX_NAMED)
        if zeros and (entry.zeros_in or len(lost) > _FEW_ZEROS):
            self._add_zeros(number, entry, lost)
            return
        for position in map(array.position_of, lost.tolist()):
            self._lost(number, entry, self._missing(entry, position), position)

    def _add_zeros(self, number: int, entry: Found, lost: NDArray[np.int64]) -> None:
        """The pieces of chunks that are not stored because they are of zeros, or may be."""
        array = entry.array
        self.entries.take(len(lost))
        starts, stops = array.boxes(lost)
        coordinates, places = coordinates_of(entry.how, starts)
        if entry.zeros_in:
            file = self.files.numbers[entry.zeros_in]
            offsets = self.files.zeros(file, array.chunk_bytes(entry.dtype), len(lost))
        else:
            path = f"{entry.item}/{entry.stored.name}".lstrip("/")
            told = f"{len(lost)} chunks are not stored: {_ZEROS_OR_LOST}"
            file = self.files.add(path, Opened(path, FileState.UNREADABLE, None, told), "zarr")
            offsets = np.zeros(len(lost), np.int64)
        self.builder.boxes(
            number, file, offsets, starts, stops, coordinates, places, key=entry.stored.name, strides=array.strides
        )

    def _lost(self, number: int, entry: Found, file: int, position: Position) -> None:
        """The piece of a chunk that is not to be had."""
        box = entry.array.box(position)
        self.builder.piece(number, file, 0, box, coordinate_of(entry.how, box.start), key=entry.stored.name)

    def _unread(self, entry: Found) -> int:
        path = f"{entry.item}/{entry.stored.name}".lstrip("/")
        detail = f"{entry.array.unsupported} is not read"
        return self.files.add(path, Opened(path, FileState.UNREADABLE, None, detail), "zarr")

    def _missing(self, entry: Found, position: Position) -> int:
        array, key = entry.array, entry.array.key(position)
        path = f"{entry.item}/{entry.stored.name}/{key}".lstrip("/")
        held = array.shard_shape is not None and array.shards.position(key) in entry.stored.chunks
        if held and self.files.states.get(path, FileState.PRESENT) is FileState.PRESENT:
            path = f"{path}[{','.join(map(str, position))}]"
        if entry.may_be_zeros and array.fills_zeros:
            return self.files.add(
                path, Opened(path, FileState.UNREADABLE, None, f"it is not stored: {_ZERO_OR_LOST}"), "zarr"
            )
        return self.files.add(path, Opened[Any].absent(path), "zarr")

    # Numbers

    def _record(self) -> None:
        """Add counters and hyperparameters, which are read: they are metadata."""
        by_file: dict[int, list[int]] = defaultdict(list)
        for at, (file, _) in self.scalars.items():
            by_file[file].append(at)
        for file, members in by_file.items():
            self._read(self.builder.file_at(file), members)
        paths = dict.fromkeys(
            self.builder.file_at(self.scalars[at][0]).name for at in self.values if at in self.scalars
        )
        if self.found:
            record(self.builder, self.tree, self.values, next(iter(paths), self.found[0].stored.document))

    def _read(self, file: File, members: Sequence[int]) -> None:
        if file.state is not FileState.PRESENT:
            return
        try:
            with open_file(self.store, file) as handle:
                for at in members:
                    dtype = self.found[at].dtype
                    value = number_of(read_bytes(handle, self.scalars[at][1], dtype.num_bytes(1)), dtype)
                    if value is not None:
                        self.values[at] = value
        except StorageError:
            # What can't be read is told by the pass, which reads it again.
            return
