"""Turns one Orbax checkpoint into a Catalog: a piece a chunk, its coordinate that of the rank that wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.orbax_arrays import Arrays, Chunk, DatabaseArrays, FileArrays, StoredArray
from auditor.adapters.orbax_files import SHARDING, TREE, WRITTEN, Item
from auditor.adapters.orbax_metadata import (
    Leaf,
    Sharding,
    Shardings,
    Tree,
    Written,
    read_shardings,
    read_tree,
    read_written,
)
from auditor.adapters.orbax_mosaic import Mosaic, coordinate_of, mosaic
from auditor.adapters.step_file import Opened
from auditor.containers.ocdbt import MANIFEST
from auditor.model.catalog import Catalog, File, FileState, Problem, ProblemKind, Role, Scalar, c_strides
from auditor.model.dtype import DType
from auditor.model.encoding import EncodingBuilder
from auditor.model.mesh import EVERYWHERE, Mesh
from auditor.model.region import whole
from auditor.storage.store import StorageError, Store, join

MAX_NAMED = 256
"""Missing chunks of one array that are named; the rest is a gap in the tensor."""


@dataclass(slots=True)
class _Item:
    """One item, as it was read."""

    item: Item
    tree: Opened[Tree]
    shardings: Mapping[str, Sharding]
    written: Mapping[str, Written]
    arrays: Arrays
    leaves: list[Leaf] = field(default_factory=list)


class OrbaxReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, items: Sequence[Item]) -> None:
        self.store, self.folder, self.items = store, folder, items
        self.builder = CatalogBuilder()
        self.encodings: dict[int, EncodingBuilder] = {}
        self.numbers: dict[str, int] = {}
        self.meshes: Counter[Mesh] = Counter()
        self.claimed: set[str] = set()

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for item in self.items:
            self._add_item(self._open(item))
        for number, encoding in self.encodings.items():
            self.builder.encode(number, encoding.build())
        mesh = max(self.meshes, key=lambda mesh: (self.meshes[mesh], mesh.axes), default=Mesh())
        return self.builder.build(step, self.folder.path, format_name, mesh, {}, [])

    # Files

    def _file(self, path: str, opened: Opened[Any], container: str) -> int:
        if path not in self.numbers:
            self.claimed.add(path)
            size, identity = (opened.entry.num_bytes, opened.entry.identity) if opened.entry else (0, "")
            self.numbers[path] = self.builder.file(
                File(path, size, identity, opened.state, EVERYWHERE, opened.detail, container)
            )
        return self.numbers[path]

    def _open(self, item: Item) -> _Item:
        folder = item.folder
        tree = Opened[Tree].open(self.store, folder, TREE, read_tree)
        self._file(join(folder.path, TREE), tree, "json")
        shardings = Opened[Shardings].absent(SHARDING)
        if SHARDING in folder.files:
            shardings = Opened[Shardings].open(self.store, folder, SHARDING, read_shardings)
            self._file(join(folder.path, SHARDING), shardings, "json")
        database = MANIFEST in folder.files or (tree.content is not None and tree.content.use_ocdbt is True)
        arrays = (DatabaseArrays if database else FileArrays)(self.store, folder).read()
        for path, opened in arrays.files.items():
            self._file(path, opened, "ocdbt" if database else "zarr")
        by_name = shardings.content.by_name if shardings.content else {}
        return _Item(item, tree, by_name, self._written(folder), arrays)

    def _written(self, folder: Folder) -> dict[str, Written]:
        found: dict[str, Written] = {}
        if WRITTEN not in folder.folders:
            return found
        try:
            inner = Folder.read(self.store, folder.folders[WRITTEN].name)
        except StorageError:
            return found
        for name in inner.files:
            opened = Opened[dict[str, Written]].open(self.store, inner, name, read_written)
            self._file(join(inner.path, name), opened, "json")
            found |= opened.content or {}
        return found

    # Tensors and pieces

    def _add_item(self, item: _Item) -> None:
        leaves = [leaf for leaf in item.tree.content.leaves if leaf.stored] if item.tree.content else []
        known = {leaf.name for leaf in leaves}
        others = [Leaf(tuple(name.split(".")), "") for name in item.arrays.by_name if name not in known]
        for order, leaf in enumerate([*leaves, *others]):
            stored = item.arrays.by_name.get(leaf.name)
            if stored is None:
                message = f"lists {leaf.name}, of which no array is there"
                self._problem(ProblemKind.ABSENT, join(item.item.folder.path, TREE), message, leaf.name)
            elif stored.array is None:
                self._add_lost(stored)
            else:
                self._add_array(item, leaf, stored, stored.array, order)

    def _problem(self, kind: ProblemKind, path: str, message: str, tensor: str = "") -> None:
        self.builder.problems.append(Problem(kind, path, message, EVERYWHERE, tensor))

    def _add_lost(self, stored: StoredArray) -> None:
        self._file(stored.document, Opened(stored.document, stored.state, None, stored.detail), "zarr")

    def _add_array(self, item: _Item, leaf: Leaf, stored: StoredArray, array: Any, order: int) -> None:
        dtype = array.dtype("")
        if dtype is None:
            return
        written = item.written.get(leaf.name)
        how = mosaic(
            item.shardings.get(leaf.name), array.shape, array.chunk_shape, written.write_shape if written else None
        )
        if how:
            self.meshes[Mesh(how.sharding.axes, ordered=True)] += 1
        role, name = _role(leaf.path)
        number = self.builder.tensor(
            name, role, dtype, array.shape, order, stored_once=how.replicated if how else (),
            placement=how.placement if how else None,
        )  # fmt: skip
        self._add_chunks(number, item, stored, array, dtype, how)

    def _add_chunks(
        self, number: int, item: _Item, stored: StoredArray, array: Any, dtype: DType, how: Mosaic | None
    ) -> None:
        strides, length = c_strides(array.chunk_shape), array.chunk_bytes(dtype)
        for position, chunk in sorted(stored.chunks.items()):
            box = array.box(position)
            file, offset = self._place(chunk, array.codec, length)
            self.builder.piece(
                number, file, offset, box, coordinate_of(how, box.start), key=stored.name, strides=strides
            )
        if len(stored.chunks) < array.num_chunks:
            for position in islice((at for at in array.positions() if at not in stored.chunks), MAX_NAMED):
                self._add_missing(number, stored, array, position, how)

    def _add_missing(self, number: int, stored: StoredArray, array: Any, position: Any, how: Mosaic | None) -> None:
        path = f"{stored.document.rpartition('/')[0]}/{array.key(position)}"
        file = self._file(path, Opened[Any].absent(path), "zarr")
        box = array.box(position)
        self.builder.piece(number, file, 0, box, coordinate_of(how, box.start), key=stored.name)

    def _place(self, chunk: Chunk, codec: str, length: int) -> tuple[int, int]:
        """File and position of a chunk's content."""
        if chunk.entry is not None:
            number = self._file(chunk.file, Opened(chunk.file, FileState.PRESENT, None, "", chunk.entry), "zarr")
        else:
            number = self.numbers[chunk.file]
        builder = self.encodings.setdefault(number, EncodingBuilder())
        if chunk.inline is not None:
            return number, builder.hold(length, codec, chunk.inline)
        return number, builder.add(length, codec, chunk.offset, chunk.num_stored)


def _role(path: tuple[str, ...]) -> tuple[Role, str]:
    kinds = {"mu": Role.FIRST_MOMENT, "nu": Role.SECOND_MOMENT}
    for at, key in enumerate(path):
        if key in kinds:
            return kinds[key], ".".join(path[at + 1 :])
        if key == "params" and at == 0:
            return Role.PARAMETER, ".".join(path[1:])
    if path[-1] == "count":
        return Role.COUNTER, ".".join(path)
    return Role.BUFFER, ".".join(path)
