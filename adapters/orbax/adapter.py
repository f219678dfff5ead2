"""Checkpoints by Orbax: CheckpointManager, its checkpointers alone, and what delegates to them (Flax, MaxText).

A step is a folder with one folder an item, or an item itself: `_METADATA` and arrays, in an OCDBT database or as Zarr
folders. Each element is stored once; which replica wrote it follows from the sharding that is recorded beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.orbax.catalog import OrbaxReading
from auditor.adapters.orbax.files import STEP_METADATA, finished_twin, is_inner, is_temporary, items_of, step_in
from auditor.adapters.step_names import step_name
from auditor.adapters.zarr_tree.files import files_below
from auditor.model.catalog import Catalog
from auditor.storage.store import Entry, Store


class Orbax:
    """The adapter."""

    name = "orbax"
    looks_for = f"{STEP_METADATA}, or folders with _METADATA or manifest.ocdbt"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the names of its files and of those in its folders."""
        if is_temporary(folder_name(store, folder)) and finished_twin(store, folder):
            return Declined("it is what a save left behind that was made again and finished", 0.5)
        if is_inner(store, folder):
            return Declined("it is a part of the checkpoint in the folder above it", 0.3)
        items = items_of(store, folder)
        if not items:
            if STEP_METADATA in folder.files:
                return self._match(store, folder, "no item in it holds arrays")
            return Declined("it holds no _METADATA, no manifest.ocdbt and no folder with them")
        named = ", ".join(item.name for item in items if item.name)
        return self._match(store, folder, f"items {named}" if named else "it is one item")

    def _match(self, store: Store, folder: Folder, held: str) -> Match:
        name = folder_name(store, folder)
        state = ", unfinished" if is_temporary(name) else ""
        step = step_in(name)
        if step is not None:
            return Match(step, f"{held}{state}; its step is the folder's number")
        within = step_name(name, strict=True)
        if within is not None and within.number is not None:
            return Match(within.number, f"{held}{state}; there is a step in the folder's name", apart=True)
        return Match(0, f"{held}{state}; nothing tells a step", apart=True)

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """Orbax writes none: it resumes from the largest finished number."""
        return None

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step, however deep."""
        return files_below(store, folder)

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        return OrbaxReading(store, folder, items_of(store, folder)).catalog(match.step, self.name)
