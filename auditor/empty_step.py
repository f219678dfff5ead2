"""A folder that is named like the steps beside it and holds nothing: a step of which all files are lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.model.catalog import Catalog, File, FileState
from auditor.model.mesh import EVERYWHERE, NO_MESH
from auditor.sources import StepSource
from auditor.storage.store import Entry, Store, base_name


@dataclass(frozen=True, slots=True)
class EmptyStep:
    """Stands in the place of the adapter that reads the other steps."""

    name: str
    """That adapter's."""
    looks_for: str = ""

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """Nothing: who makes one knows that the folder is such a step."""
        return Declined("an empty folder tells nothing by itself")

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """None: that is known of the other steps."""
        return None

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """The folder itself, whose time tells when a writer made it, or someone emptied it."""
        yield replace(store.stat(folder.path), num_bytes=0)

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """A Catalog whose one file, all that was in the folder, is missing."""
        builder = CatalogBuilder()
        builder.file(File(folder.path, 0, "", FileState.MISSING, EVERYWHERE, "the folder is empty", ""))
        return builder.build(match.step, folder.path, self.name, NO_MESH, {}, ())


def empty_step(folder: Folder, beside: StepSource) -> StepSource | None:
    """The step that an empty folder is, by its name and by a step ``beside`` it; None where it is no number."""
    numbers = re.findall(r"\d+", base_name(folder.path))
    if not numbers or len(numbers[-1]) > 15:
        return None
    return StepSource(folder, EmptyStep(beside.adapter.name), Match(int(numbers[-1]), "named like the steps beside it"))
