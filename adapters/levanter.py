"""Levanter's checkpoints: one TensorStore array a leaf, as folders in place, and ``metadata.json`` written last.

    step-<n>/metadata.json                       {"step": …, "timestamp": …, "is_temporary": …}
    step-<n>/model/…, opt_state/…, training_key  Zarr arrays; the keys of the state's tree are folders

There is no name for a folder that is being written: only ``metadata.json`` tells a save that was finished. Which array
is a moment of which parameter is told by the structure of the state. Later versions of JAX's serialization, which it
uses, write Zarr v3 and leave out chunks of zeros: one that is not stored is undetermined then. Source:
stanford-crfm/levanter ``src/levanter/checkpoint.py``, ``tensorstore_serialization.py``; no version of it was run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.hugging_face.files import open_json
from auditor.adapters.optax.stacks import unstacked
from auditor.adapters.optax.tree import Leaf
from auditor.adapters.orbax.arrays import DOCUMENTS, FileArrays, StoredArray
from auditor.adapters.orbax.tensors import Found, OrbaxFiles, OrbaxTensors
from auditor.adapters.step_file import Opened
from auditor.adapters.zarr_tree.files import files_below
from auditor.containers.zarr_array import ZarrArray
from auditor.model.catalog import Catalog, FileState, Scalar
from auditor.storage.store import Entry, StorageError, Store, join

METADATA = "metadata.json"
_STEP = re.compile(r"step-(\d{1,15})", re.A)
_DEPTH = 12
"""How deep the first array is looked for."""
_NO_SHARDING = "how it lay on the mesh is recorded nowhere"


class Levanter:
    """The adapter."""

    name = "levanter"
    looks_for = "step-<n> with metadata.json (step, is_temporary) beside folders of Zarr arrays"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By what ``metadata.json`` says; without it, by the folder's name and arrays below it."""
        named = _STEP.fullmatch(folder_name(store, folder))
        if METADATA not in folder.files and (named is None or folder.files):
            return Declined(f"it has no {METADATA}")
        said = (open_json(store, folder, METADATA).content or {}) if METADATA in folder.files else {}
        if METADATA in folder.files and not (type(said.get("step")) is int and "is_temporary" in said) and not named:
            return Declined(f"its {METADATA} names no step and is_temporary", 0.2)
        if not _has_array(store, folder):
            return Declined("no folder below it is a Zarr array", 0.3)
        step = said.get("step")
        if type(step) is int and 0 <= step < 1 << 53:
            return Match(step, f"{METADATA} says step {step}", int(named[1]) if named else None)
        return Match(int(named[1]) if named else 0, f"arrays in a folder called {folder_name(store, folder)}")

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """None: the newest step counts."""
        return None

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step, however deep."""
        return files_below(store, folder)

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        builder = CatalogBuilder()
        files, path = OrbaxFiles(builder), join(folder.path, METADATA)
        if METADATA in folder.files:
            opened = open_json(store, folder, METADATA)
            files.add(path, opened, "json")
            if opened.content is not None:
                builder.scalars.append(Scalar("state_step", float(match.step), path))
        arrays = FileArrays(store, folder).read().by_name
        found = [one for name, stored in arrays.items() if (one := _found(files, folder, name, stored))]
        mesh = OrbaxTensors(store, builder, files, found).add()
        unclaimed = [join(folder.path, name) for name in folder.files if name != METADATA]
        catalog = builder.build(match.step, folder.path, self.name, mesh, {}, unclaimed)
        done = METADATA in folder.files
        return replace(
            unstacked(catalog), finished=done, unfinished="" if done else f"it has no {METADATA}, which is written last"
        )


def _has_array(store: Store, folder: Folder) -> bool:
    """Whether the first folder within the first folder, and so on, is an array."""
    for _ in range(_DEPTH):
        if any(name in folder.files for name in DOCUMENTS):
            return True
        inner = next(iter(folder.folders.values()), None)
        if inner is None:
            return False
        try:
            folder = Folder.read(store, inner.name)
        except StorageError:
            return False
    return False


def _found(files: OrbaxFiles, folder: Folder, name: str, stored: StoredArray) -> Found | None:
    array, path = stored.array, join(folder.path, name)
    dtype = array.dtype("") if isinstance(array, ZarrArray) else None
    if array is None or dtype is None:
        detail = stored.detail or f"data type {array.data_type if array else ''} is not read"
        state = stored.state if array is None else FileState.UNREADABLE
        files.add(path, Opened(path, state, None, detail), "zarr")
        return None
    why = _NO_SHARDING if array.shape else ""
    leaf = Leaf(tuple(name.split("/")), dtype, array.shape)
    return Found(leaf, stored, array, dtype, folder.path, None, why, may_be_zeros=True)
