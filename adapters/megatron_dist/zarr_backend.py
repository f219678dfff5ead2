"""Steps by megatron-core's older backend ``zarr``: each tensor is a Zarr v2 array, each chunk of it a file.

    iter_<n>/<key>/.zarray, 0.1.0, …               chunks as large as what one rank has; never compressed
    iter_<n>/<object>/shard_<place>_<counts>.pt    objects, a file for each rank or layer
    iter_<n>/common.pt, metadata.json              as with ``torch_dist``

The documents of the arrays tell what the index of ``torch_dist`` tells, under the same keys: they are put into the form
of such an index. Which rank wrote a chunk is recorded nowhere. Source: megatron-core 0.12
``dist_checkpointing/strategies/zarr.py``, ``strategies/common.py``; later versions neither write nor read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.dcp.data import Contents
from auditor.adapters.dcp.files import Part
from auditor.adapters.dcp.sources import Source
from auditor.adapters.orbax.arrays import FileArrays, StoredArray
from auditor.adapters.step_file import Opened, StepFile
from auditor.containers.dcp_columns import DcpMetadata, Described
from auditor.containers.zarr_array import ZarrArray
from auditor.containers.zarr_v2 import DOCUMENT
from auditor.model.catalog import FileState, Problem, ProblemKind, c_strides
from auditor.model.mesh import EVERYWHERE
from auditor.model.region import Box
from auditor.storage.store import Entry, StorageError, Store

ZARR = "zarr"
MAX_NAMED = 256
"""Missing chunks of one array that are named; the rest is a gap in the tensor."""
_OBJECT_FILE = ".pt"


class ZarrReading:
    """Reads the arrays and objects of one step, adds their files, and puts together what an index would say."""

    def __init__(self, store: Store, folder: Folder, builder: CatalogBuilder, *, names_only: bool) -> None:
        self.store, self.folder, self.builder, self.names_only = store, folder, builder, names_only
        self.index = DcpMetadata()
        self.contents = Contents(self.index.item_offset)
        self.opaque: Counter[str] = Counter()

    def source(self, config: Opened[Mapping[str, object]]) -> Source:
        """All that was found, as what an index says."""
        found = FileArrays(self.store, self.folder).read()
        arrays = found.by_name
        for key, stored in sorted(arrays.items()):
            document = found.files.get(stored.document)
            self._add_array(key, stored, document.entry if document else None)
        for name, entry in sorted(self.folder.folders.items()):
            if name not in arrays:
                self._add_objects(name, entry.name)
        opened = Opened(config.name, config.state, self.index, config.detail, config.entry)
        return Source(Part(self.folder, (config.name,)), opened, self.index, {}, self.contents)

    # Arrays

    def _add_array(self, key: str, stored: StoredArray, entry: Entry | None) -> None:
        """One tensor: its document, and every chunk that it must have."""
        array = stored.array
        document: Opened[Any] = Opened(f"{key}/{DOCUMENT}", stored.state, None, stored.detail, entry)
        dtype = array.dtype("") if array else None
        codec = array.codec or ("sharding_indexed" if array.shard_shape is not None else "") if array else ""
        if array is not None and (array.unsupported or codec or dtype is None):
            what = array.unsupported or (f"codec {codec}" if codec else f"data type {array.data_type}")
            document = Opened(document.name, FileState.UNREADABLE, None, f"{what} of its array is not read", entry)
        self._add_file(document, "json")
        if array is None or dtype is None or document.state is not FileState.PRESENT:
            return
        if stored.contradiction:
            self.builder.problems.append(Problem(ProblemKind.METADATA, stored.document, stored.contradiction))
        first, length = len(self.index.chunk_at), array.chunk_bytes(dtype)
        for position, chunk in sorted(stored.chunks.items()):
            wrong = f"it has {chunk.num_stored} bytes, a chunk of its array has {length}"
            state = FileState.PRESENT if chunk.num_stored == length else FileState.DAMAGED
            detail = "" if state is FileState.PRESENT else wrong
            name = f"{key}/{array.key(position)}"
            self._add_chunk(key, array, array.box(position), Opened(name, state, None, detail, chunk.entry))
        if len(stored.chunks) < array.num_chunks:
            for position in islice((one for one in array.positions() if one not in stored.chunks), MAX_NAMED):
                self._add_chunk(key, array, array.box(position), Opened.absent(f"{key}/{array.key(position)}"))
        span = first, len(self.index.chunk_at)
        self.index.tensors[key] = Described(key, dtype, dtype.name, array.shape, span)

    def _add_chunk(self, key: str, array: ZarrArray, box: Box, opened: Opened[Any]) -> None:
        index = self.index
        index.chunk_at.append(len(index.pool))
        if array.strides != c_strides(box.shape):
            # The last chunks along a dim are as long as the others; what lies beyond the array is not its.
            self.contents.strides[index.num_items] = array.strides
        self._add_row(key, opened, len(index.pool), len(array.shape), len(index.chunk_at) - 1)
        index.pool.extend((*box.start, *box.shape))
        self._add_file(opened, "zarr")

    def _add_row(self, name: str, opened: Opened[Any], at: int, dims: int, chunk: int) -> None:
        index = self.index
        if not index.names or index.names[-1] != name:
            index.names.append(name)
        index.files.append(opened.name)
        row = (len(index.names) - 1, at, dims, len(index.files) - 1, chunk, 0, 0, 0)
        columns = (index.item_name, index.item_at, index.item_dims, index.item_file, index.item_chunk,
                   index.item_offset, index.item_length, index.item_transform)  # fmt: skip
        for column, value in zip(columns, row, strict=True):
            column.append(value)

    def _add_file(self, opened: Opened[Any], container: str) -> None:
        self.builder.file(opened.as_file(self.folder.path, container, EVERYWHERE))

    # Objects

    def _add_objects(self, name: str, path: str) -> None:
        """The objects in one folder; what is no file of theirs is left alone."""
        for inner, entry in self._object_files(name, path):
            folder = Folder(self.folder.path, {inner: entry}, {})
            read = StepFile.unopened(folder, inner) if self.names_only else StepFile.read(self.store, folder, inner)
            self.opaque.update(read.content.opaque if read.content else {})
            self.builder.file(read.as_rank_file(self.folder.path, EVERYWHERE))
            key = inner.removesuffix(_OBJECT_FILE)
            self.index.objects[key] = None
            if read.content is not None:
                self.contents.values[self.index.num_items] = [read.content.tree]
                self._add_row(key, read, -1, 0, -1)

    def _object_files(self, name: str, path: str) -> Iterator[tuple[str, Entry]]:
        try:
            listed = Folder.read(self.store, path).files
        except StorageError:
            return
        for file, entry in sorted(listed.items()):
            if file.startswith("shard_") and file.endswith(_OBJECT_FILE):
                yield f"{name}/{file}", entry
