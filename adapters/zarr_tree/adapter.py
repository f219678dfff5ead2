"""Zarr v3 trees in the layout of ``docs/zarr-layout.md``: what ``auditor export`` writes, and what others write so.

    steps/<n>/zarr.json                              group; written last
    steps/<n>/tensors/<role>/<name>/zarr.json, c/…   each tensor, one array of its global shape
    steps/<n>/replicas/<tp=1>/<role>/<name>/…        its other replicas
    steps/<n>/catalog/zarr.json                      optional: what must be there, scalars, problems, groups, ties

A missing chunk is a missing file, never a fill value; an array whose codecs aren't read says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.step_file import Opened
from auditor.adapters.zarr_tree.catalog import ZarrTreeReading
from auditor.adapters.zarr_tree.description import count
from auditor.adapters.zarr_tree.files import DOCUMENT, files_below, said
from auditor.containers.zarr_array import ZarrArray, read_node
from auditor.model.catalog import Catalog, Role
from auditor.storage.store import Entry, Store

LAYOUT_VERSION = 1
_STEP = re.compile(r"(\d{1,15})(?:@.*)?", re.A)
_ROLES = frozenset(role.value for role in Role)


class ZarrTree:
    """The adapter."""

    name = "zarr-tree"
    looks_for = "steps/<n> with tensors/<role>/<name>, Zarr v3 arrays as docs/zarr-layout.md has them"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By folders named after roles, and the group's own document."""
        if "tensors" not in folder.folders and "replicas" not in folder.folders:
            near = 0.3 if DOCUMENT in folder.files and "steps" not in folder.folders else 0.0
            return Declined("it has no folder tensors or replicas", near)
        roles = sorted(set(_roles(store, folder)))
        if not roles:
            return Declined("no folder in its tensors is named after a role (parameter, master, …)", 0.4)
        opened = Opened.open(store, folder, DOCUMENT, read_node)
        if isinstance(opened.content, ZarrArray):
            return Declined(f"its {DOCUMENT} is that of an array", 0.4)
        stated = said(opened.content)
        version = stated.get("schema_version", LAYOUT_VERSION)
        if version != LAYOUT_VERSION:
            return Declined(f"its layout has version {str(version)[:20]}, version {LAYOUT_VERSION} is read", 0.9)
        held = f"tensors of the roles {', '.join(roles)}"
        found = _STEP.fullmatch(folder_name(store, folder))
        named, step = int(found[1]) if found else None, count(stated.get("step"), 1 << 53)
        if step is not None:
            return Match(step, f"{held}; {DOCUMENT} states step {step}", named)
        told = "nothing tells a step" if named is None else "its step is the folder's number"
        return Match(named or 0, f"{held}; {told}", apart=named is None)

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """None: the layout has no pointer."""
        return None

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step, however deep."""
        return files_below(store, folder)

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        return ZarrTreeReading(store, folder).catalog(match.step, self.name)


def _roles(store: Store, folder: Folder) -> Iterator[str]:
    """The roles of which there are tensors."""
    places = [folder.folders["tensors"]] if "tensors" in folder.folders else []
    if "replicas" in folder.folders:
        places += list(Folder.read(store, folder.folders["replicas"].name).folders.values())[:8]
    for place in places:
        yield from (name for name in Folder.read(store, place.name).folders if name in _ROLES)
