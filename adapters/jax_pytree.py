"""JAX's own ``pytree_serialization``: a tree definition, and an OCDBT database with one Zarr array a leaf.

    pytreedef.json    the tree as a flatbuffer in base64, and per leaf "Array(float32[4, 4])" or null
    array_store/      arrays 0, 1, … in the order of the leaves; replica 0 of each, chunks of zeros left out

Nothing marks a save that was finished; nothing records the mesh. Source: jax
``experimental/array_serialization/pytree_serialization.py``.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.optax.paths import Path
from auditor.adapters.optax.record import recorded_step
from auditor.adapters.optax.stacks import unstacked
from auditor.adapters.optax.tree import Leaf
from auditor.adapters.orbax.arrays import Arrays, DatabaseArrays, StoredArray
from auditor.adapters.orbax.files import step_in
from auditor.adapters.orbax.tensors import Found, OrbaxFiles, OrbaxTensors
from auditor.adapters.step_file import Opened
from auditor.adapters.zarr_tree.files import files_below
from auditor.containers.damage import DamagedError
from auditor.containers.jax_treedef import leaves_of
from auditor.containers.json_document import read_json
from auditor.containers.ocdbt import MANIFEST
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind
from auditor.storage.store import Entry, Handle, StorageError, Store, join

DEFINITION, ARRAYS = "pytreedef.json", "array_store"
_TREE, _LEAVES = "__jax_pytreedef_repr", "__jax_leaf_ids"
_ARRAY = re.compile(r"Array\((?P<dtype>\w{1,64})\[(?P<shape>[\d, ]{0,1024})\]\)", re.A)
_NO_SHARDING = "how it lay on the mesh is recorded nowhere"


@dataclass(frozen=True, slots=True)
class Told:
    """A leaf as the definition has it."""

    path: Path
    stated: str
    """``Array(float32[4, 4])``; empty for a leaf that is no array."""


class JaxPytree:
    """The adapter."""

    name = "jax-pytree"
    looks_for = f"{DEFINITION} beside {ARRAYS}, as jax.experimental.array_serialization writes them"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the definition, which need not be whole: no other format has a file of this name."""
        if DEFINITION not in folder.files:
            return Declined(f"it has no {DEFINITION}", 0.3 if ARRAYS in folder.folders else 0.0)
        step = step_in(folder_name(store, folder))
        if step is not None:
            return Match(step, f"a {DEFINITION}; its step is the folder's number")
        recorded = _Reading(store, folder).recorded_step()
        told = "nothing tells a step" if recorded is None else f"it records step {recorded}"
        return Match(recorded or 0, f"a {DEFINITION}; {told}", apart=recorded is None)

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """None: the largest number counts."""
        return None

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step, however deep."""
        return files_below(store, folder)

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        return _Reading(store, folder).catalog(match.step, self.name)


def read_definition(handle: Handle) -> list[Told]:
    """Read ``pytreedef.json``: its leaves, in the order of the arrays' names.

    Raises:
        DamagedError: it is no such document, or contradicts itself.
        StorageError: storage failed.
    """
    document = read_json(handle)
    tree, stated = (document.get(key) for key in (_TREE, _LEAVES)) if isinstance(document, dict) else (None, None)
    if not isinstance(tree, str) or not isinstance(stated, list):
        raise DamagedError("it describes no tree")
    try:
        raw = b64decode(tree, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DamagedError("its tree is not base64") from error
    found = list(leaves_of(raw))
    # None is a leaf that is kept nowhere.
    stated = ["" if text is None else text for text in stated]
    if len(found) != len(stated) or not all(isinstance(text, str) for text in stated):
        raise DamagedError(f"its tree has {len(found)} leaves, it says of {len(stated)} what they are")
    return [Told(path, text) for path, text in zip(found, stated, strict=True)]


class _Reading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder) -> None:
        self.store, self.folder = store, folder
        self.builder = CatalogBuilder()
        self.files = OrbaxFiles(self.builder)
        self.definition = Opened[list[Told]].open(store, folder, DEFINITION, read_definition)
        self.arrays = self._arrays()

    def _arrays(self) -> Arrays:
        path = join(self.folder.path, ARRAYS)
        try:
            inner = Folder.read(self.store, path)
        except StorageError:
            inner = Folder(path, {}, {})
        return DatabaseArrays(self.store, inner).read()

    def _index(self) -> str:
        """The manifest, if all of the index could be read: what it does not list then was never written."""
        manifest = join(self.folder.path, f"{ARRAYS}/{MANIFEST}")
        whole = all(file.state is FileState.PRESENT for file in self.arrays.files.values())
        return manifest if whole and manifest in self.arrays.files else ""

    def recorded_step(self) -> int | None:
        """The step that the training loop keeps in its state."""
        tensors = self._placed()
        return recorded_step(tensors.tree, tensors.values)

    def _placed(self) -> OrbaxTensors:
        self.files.add(join(self.folder.path, DEFINITION), self.definition, "json")
        for path, file in self.arrays.files.items():
            self.files.add(path, file, "ocdbt")
        tensors = OrbaxTensors(self.store, self.builder, self.files, list(self._found()))
        self.mesh = tensors.add()
        return tensors

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        self._placed()
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if name != DEFINITION]
        return unstacked(self.builder.build(step, self.folder.path, format_name, self.mesh, {}, unclaimed))

    def _problem(self, kind: ProblemKind, message: str, tensor: str) -> None:
        self.builder.problems.append(Problem(kind, join(self.folder.path, DEFINITION), message, tensor=tensor))

    def _found(self) -> Iterator[Found]:
        """The arrays that can be told by shape and dtype; what is wrong with others is noted."""
        told = {str(number): leaf for number, leaf in enumerate(self.definition.content or ())}
        for number, leaf in told.items():
            if leaf.stated.startswith("Array") and number not in self.arrays.by_name and not self.arrays.lost_in:
                name = ".".join(leaf.path)
                self._problem(ProblemKind.ABSENT, f"lists {name} as array {number}, which is not stored", name)
        for number in sorted(self.arrays.by_name, key=lambda name: (len(name), name)):
            one = self._array(self.arrays.by_name[number], told.get(number))
            if one is not None:
                yield one

    def _array(self, stored: StoredArray, leaf: Told | None) -> Found | None:
        array, name = stored.array, ".".join(leaf.path) if leaf else stored.name
        dtype = array.dtype("") if array else None
        if array is None or dtype is None:
            path = join(self.folder.path, f"{ARRAYS}/{stored.name}")
            detail = stored.detail or f"data type {array.data_type if array else ''} is not read"
            state = stored.state if array is None else FileState.UNREADABLE
            self.files.add(path, Opened(path, state, None, detail), "zarr")
            return None
        if leaf is None and self.definition.content is not None:
            message = f"does not list array {stored.name}, which is stored"
            self._problem(ProblemKind.UNPLACED, message, stored.name)
        there = f"Array({dtype.name}[{', '.join(map(str, array.shape))}])"
        if leaf is not None and leaf.stated != there and _ARRAY.fullmatch(leaf.stated):
            self._problem(ProblemKind.METADATA, f"has {name} as {leaf.stated}, stored is {there}", name)
        keys = leaf.path if leaf and leaf.path else (stored.name,)
        return Found(
            Leaf(keys, dtype, array.shape), stored, array, dtype, join(self.folder.path, ARRAYS), None,
            _NO_SHARDING if array.shape else "", self.arrays.lost_in, zeros_in=self._index(),
        )  # fmt: skip
