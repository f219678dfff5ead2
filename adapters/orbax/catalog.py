"""Turns one Orbax checkpoint into a Catalog: its files, what its records say, and what contradicts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from auditor.adapters.adapter import Folder, folder_name
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.optax.stacks import unstacked
from auditor.adapters.optax.tree import Leaf
from auditor.adapters.orbax.arrays import Arrays, DatabaseArrays, FileArrays, StoredArray
from auditor.adapters.orbax.files import (
    KNOWN,
    LEGACY,
    MARKER,
    SHARDING,
    STEP_METADATA,
    TEMPORARY,
    TREE,
    WRITTEN,
    Item,
    is_lock,
    is_temporary,
    left_behind,
    without_mark,
)
from auditor.adapters.orbax.legacy import LegacyLeaf, held_array, read_legacy
from auditor.adapters.orbax.metadata import (
    Sharding,
    Shardings,
    Tree,
    TreeLeaf,
    Written,
    read_shardings,
    read_step_metadata,
    read_tree,
    read_written,
)
from auditor.adapters.orbax.mosaic import mosaic
from auditor.adapters.orbax.tensors import Found, OrbaxFiles, OrbaxTensors
from auditor.adapters.step_file import Opened
from auditor.containers.ocdbt import MANIFEST
from auditor.containers.zarr_array import ZarrArray
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind
from auditor.model.dtype import DTYPES
from auditor.model.mesh import EVERYWHERE
from auditor.storage.store import StorageError, Store, join

_WHOLE_STATE = frozenset({"", "default", "state", "items", "train_state", "checkpointables", "pytree"})
"""Items that hold the whole tree; others are a part of it by their name (`params`, `opt_state`)."""
_NO_SHARDING = "how it lay on the mesh is recorded nowhere"


@dataclass(frozen=True, slots=True)
class _Read:
    """One item, as it was read."""

    item: Item
    tree: Opened[Tree]
    shardings: Mapping[str, Sharding | None]
    written: Mapping[str, Written]
    arrays: Arrays
    legacy: Opened[list[LegacyLeaf]] | None = None
    """The aggregate file of older writers."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What is put before the paths in its tree."""
        return () if self.item.name in _WHOLE_STATE else (self.item.name,)

    @property
    def listed(self) -> set[str] | None:
        """Names of the arrays that the tree knows of; None where there is no tree."""
        if self.tree.content:
            return {leaf.name for leaf in self.tree.content.leaves}
        old = self.legacy.content if self.legacy else None
        return {leaf.name for leaf in old} if old else None

    def leaves(self) -> Iterator[TreeLeaf]:
        """Those of its tree that are arrays, then arrays that the tree doesn't list."""
        listed = [leaf for leaf in self.tree.content.leaves if leaf.stored] if self.tree.content else []
        old = self.legacy.content if self.legacy else None
        listed += [TreeLeaf(leaf.path, "", folder=leaf.name) for leaf in old or () if leaf.name]
        yield from listed
        known = {leaf.name for leaf in listed}
        yield from (TreeLeaf(tuple(name.split(".")), "") for name in self.arrays.by_name if name not in known)


class OrbaxReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, items: Sequence[Item]) -> None:
        self.store, self.folder, self.items = store, folder, items
        self.builder = CatalogBuilder()
        self.files = OrbaxFiles(self.builder)

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        unfinished = self._unfinished()
        found = [entry for item in self.items for entry in self._arrays(self._read(item))]
        mesh = OrbaxTensors(self.store, self.builder, self.files, found).add()
        folders = [self.folder, *(item.folder for item in self.items if item.folder is not self.folder)]
        self._add_leftovers(folders)
        unclaimed = [
            join(folder.path, name)
            for folder in folders
            for name in folder.files
            if name not in KNOWN and not is_lock(name) and join(folder.path, name) not in self.files.numbers
        ]
        catalog = self.builder.build(step, self.folder.path, format_name, mesh, {}, unclaimed)
        return replace(unstacked(catalog), unfinished=unfinished, finished=not unfinished and self._finished())

    def _problem(
        self, kind: ProblemKind, path: str, message: str, tensor: str = "", *, ignored: bool = False
    ) -> None:  # fmt: skip
        self.builder.problems.append(Problem(kind, path, message, EVERYWHERE, tensor, ignored=ignored))

    def _unfinished(self) -> str:
        """Why Orbax itself takes the step for one that was not finished; empty where it doesn't."""
        if STEP_METADATA in self.folder.files:
            opened = Opened[bool].open(self.store, self.folder, STEP_METADATA, read_step_metadata)
            self.files.add(join(self.folder.path, STEP_METADATA), opened, "json")
        if is_temporary(name := folder_name(self.store, self.folder)):
            return f"its folder has the name of one that is being written ({name.removeprefix(without_mark(name))})"
        inner = next((item.folder.path for item in self.items if is_temporary(item.folder.path)), None)
        return f"{inner} has the name of a folder that is being written ({TEMPORARY})" if inner else ""

    def _finished(self) -> bool:
        """Whether the mark is there that Orbax writes last; older versions wrote it on object stores alone."""
        return all(MARKER in folder.files for folder in (self.folder, *(item.folder for item in self.items)))

    def _add_leftovers(self, folders: Sequence[Folder]) -> None:
        """What writers left that died; loaders pass over it."""
        for folder in folders:
            for name in filter(is_lock, folder.files):
                message = "is left from a write that was not finished; loaders pass over it"
                self._problem(ProblemKind.LEFTOVER, join(folder.path, name), message, ignored=True)
        try:
            path = left_behind(self.store, self.folder)
        except StorageError:
            return
        if path:
            message = "is left from an earlier attempt at this save; loaders pass over it"
            self._problem(ProblemKind.LEFTOVER, path, message, ignored=True)

    # Items

    def _read(self, item: Item) -> _Read:
        folder = item.folder
        tree = Opened[Tree].open(self.store, folder, TREE, read_tree)
        if TREE in folder.files or LEGACY not in folder.files:
            self.files.add(join(folder.path, TREE), tree, "json")
        shardings: Mapping[str, Sharding | None] = {}
        if SHARDING in folder.files:
            opened = Opened[Shardings].open(self.store, folder, SHARDING, read_shardings)
            self.files.add(join(folder.path, SHARDING), opened, "json")
            shardings = opened.content.by_name if opened.content else {}
        database = MANIFEST in folder.files or (tree.content is not None and tree.content.use_ocdbt is True)
        arrays = (DatabaseArrays if database else FileArrays)(self.store, folder).read()
        for path, file in arrays.files.items():
            self.files.add(path, file, "ocdbt" if database else "zarr")
        legacy = None
        if TREE not in folder.files and LEGACY in folder.files:
            legacy = Opened[list[LegacyLeaf]].open(self.store, folder, LEGACY, read_legacy)
            self.files.add(join(folder.path, LEGACY), legacy, "msgpack")
        return _Read(item, tree, shardings, self._written(folder), arrays, legacy)

    def _written(self, folder: Folder) -> dict[str, Written]:
        found: dict[str, Written] = {}
        if WRITTEN not in folder.folders:
            return found
        try:
            inner = Folder.read(self.store, folder.folders[WRITTEN].name)
        except StorageError as error:
            path = folder.folders[WRITTEN].name
            self.files.add(path, Opened(path, FileState.UNREADABLE, None, str(error)), "json")
            return found
        for name in inner.files:
            opened = Opened[dict[str, Written]].open(self.store, inner, name, read_written)
            self.files.add(join(inner.path, name), opened, "json")
            found |= opened.content or {}
        return found

    # Arrays

    def _arrays(self, read: _Read) -> Iterator[Found]:
        """The arrays of an item that can be told by shape and dtype; what is wrong with others is noted."""
        last = LEGACY if read.legacy else TREE
        tree = join(read.item.folder.path, last)
        shared = Counter(leaf.name for leaf in read.leaves())
        for name in (name for name, count in shared.items() if count > 1):
            paths = " and ".join(str(leaf.path) for leaf in read.leaves() if leaf.name == name)
            message = f"has {paths}, which are both stored as {name}: one of them is lost"
            self._problem(ProblemKind.METADATA, tree, message, name)
        listed = read.listed
        for leaf in read.leaves():
            stored = read.arrays.by_name.get(leaf.name)
            if stored is None:
                if not read.arrays.lost_in:
                    self._problem(ProblemKind.ABSENT, tree, f"lists {leaf.name}, which is not stored", leaf.name)
                continue
            if listed is not None and leaf.name not in listed:
                self._problem(ProblemKind.UNPLACED, stored.document, f"holds {leaf.name}, which {last} does not list")
            found = self._found(read, leaf, stored)
            if found is not None:
                yield found
        yield from self._held(read)

    def _held(self, read: _Read) -> Iterator[Found]:
        """Arrays and numbers that the aggregate file of older writers holds itself."""
        file = join(read.item.folder.path, LEGACY)
        for leaf in (read.legacy.content if read.legacy else None) or ():
            path, stored = (*read.prefix, *leaf.path), held_array(leaf, file)
            if leaf.value is not None:
                array, dtype = ZarrArray(), DTYPES["float64"]
                yield Found(
                    Leaf(path, dtype, ()), StoredArray("", file, array), array, dtype, file, value=leaf.value
                )  # fmt: skip
            elif stored is not None and stored.array is not None and leaf.held is not None and leaf.held.dtype:
                why = _NO_SHARDING if leaf.held.shape else ""
                yield Found(
                    Leaf(path, leaf.held.dtype, leaf.held.shape), stored, stored.array, leaf.held.dtype, file, None, why
                )  # fmt: skip
            elif leaf.held is not None:
                what = join(read.item.folder.path, f"{LEGACY}: {'.'.join(leaf.path)}")
                self.files.add(what, Opened(what, FileState.UNREADABLE, None, "its form is not read"), "msgpack")

    def _found(self, read: _Read, leaf: TreeLeaf, stored: StoredArray) -> Found | None:
        array, item = stored.array, read.item.folder.path
        if array is None:
            path = join(item, leaf.name)
            self.files.add(path, Opened(path, stored.state, None, stored.detail), "zarr")
            return None
        if stored.contradiction:
            self._problem(ProblemKind.METADATA, stored.document, stored.contradiction, leaf.name)
        dtype = array.dtype("")
        if dtype is None:
            path = join(item, leaf.name)
            detail = f"data type {array.data_type} is not read"
            self.files.add(path, Opened(path, FileState.UNREADABLE, None, detail), "zarr")
            return None
        written = read.written.get(leaf.name, Written(None))
        how = mosaic(read.shardings.get(leaf.name), array.shape, array.chunk_shape, written.write_shape)
        unknown = leaf.value_type == "jax.Array" or (read.legacy is not None and bool(leaf.folder))
        unknown = unknown and leaf.name not in read.shardings and bool(array.shape)
        why = _NO_SHARDING if unknown else ""
        return Found(
            Leaf((*read.prefix, *leaf.path), dtype, array.shape, bool(written.random_key)), stored, array, dtype, item,
            how, why, read.arrays.lost_in,
        )  # fmt: skip
