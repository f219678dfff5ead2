"""The files of one step of a Zarr tree: which arrays are there, and which chunks each of them has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.step_file import Opened
from auditor.adapters.zarr_tree.description import AXIS
from auditor.containers.damage import LimitError
from auditor.containers.zarr_array import Position, ZarrArray, ZarrNode, read_node
from auditor.model.catalog import FileState, Role
from auditor.model.mesh import EVERYWHERE, Coordinate
from auditor.storage.store import Entry, ObjectMissingError, StorageError, Store, base_name, join

DOCUMENT = "zarr.json"
MAX_ENTRIES = 1 << 22
"""Names that are listed below one array, or below one step to weigh it; there are no more chunks in honest ones."""
_FEW_CHUNKS = 16
"""So many are asked for by name, which is quicker than listing folders."""
_PLACE = re.compile(rf"({AXIS.pattern})=(0|[1-9]\d{{0,5}})", re.A)


@dataclass(frozen=True, slots=True)
class Stored:
    """One array of the step, or what is there in its place."""

    path: str
    """Below the step."""
    opened: Opened[ZarrNode]
    """Its ``zarr.json``."""
    chunks: Mapping[Position, Entry] = field(default_factory=dict)

    @property
    def array(self) -> ZarrArray | None:
        """The array, where its document could be read."""
        return self.opened.content if isinstance(self.opened.content, ZarrArray) else None

    @property
    def said(self) -> Mapping[str, Any]:
        """What its attributes say under ``auditor``."""
        return said(self.opened.content)

    def lost(self, key: str) -> str:
        """What an export says of a chunk that it did not write; empty where it says nothing."""
        told = self.said.get("lost")
        reason = told.get(key) if isinstance(told, dict) else None
        return reason if isinstance(reason, str) else ""


Arrays = dict[tuple[Role, str], dict[Coordinate | None, Stored]]
"""Role and node name to the arrays of that tensor, by the replica's coordinate; None: the one under ``tensors/``."""


def said(node: ZarrNode | None) -> Mapping[str, Any]:
    """What a node's attributes say under ``auditor``."""
    found = node.attributes.get("auditor") if node else None
    return found if isinstance(found, dict) else {}


def coordinate_of(name: str) -> Coordinate | None:
    """The coordinate that a folder below ``replicas/`` is named after."""
    if name == "all":
        return EVERYWHERE
    found = [_PLACE.fullmatch(part) for part in name.split(",")]
    place = Coordinate.of(**{match[1]: int(match[2]) for match in found if match})
    return place if str(place) == name else None


class StepFiles:
    """All arrays of one step."""

    def __init__(self, store: Store, folder: Folder) -> None:
        self.store, self.folder = store, folder
        self.arrays: Arrays = {}
        self.foreign: dict[str, str] = {}
        """What lies where arrays belong but is none, below the step, with the reason why it is not read."""
        self.unclaimed: list[str] = []
        for name, entry in self._folders("tensors"):
            self._add_role(f"tensors/{name}", name, None, entry)
        for name, entry in self._folders("replicas"):
            place = coordinate_of(name)
            if place is None:
                self.foreign[f"replicas/{name}"] = "is no coordinate, written as axis=index,axis=index"
                continue
            for role, inner in self._listed(f"replicas/{name}", entry.name):
                self._add_role(f"replicas/{name}/{role}", role, place, inner)

    def node(self, path: str) -> Opened[ZarrNode]:
        """The document of a group of the step."""
        try:
            folder = Folder.read(self.store, join(self.folder.path, path)) if path else self.folder
        except StorageError as error:
            return Opened(DOCUMENT, FileState.UNREADABLE, None, str(error))
        return Opened.open(self.store, folder, DOCUMENT, read_node)

    def _folders(self, name: str) -> Iterator[tuple[str, Entry]]:
        if name in self.folder.folders:
            yield from self._listed(name, self.folder.folders[name].name)

    def _listed(self, path: str, full: str) -> Iterator[tuple[str, Entry]]:
        """The folders in a folder; files besides its document belong to nothing."""
        try:
            found = Folder.read(self.store, full)
        except StorageError as error:
            self.foreign[path] = str(error)
            return
        self.unclaimed += [entry.name for name, entry in found.files.items() if name != DOCUMENT]
        yield from found.folders.items()

    def _add_role(self, path: str, name: str, place: Coordinate | None, entry: Entry) -> None:
        role = next((role for role in Role if role.value == name), None)
        if role is None:
            self.foreign[path] = "is named after no role"
            return
        for node, inner in self._listed(path, entry.name):
            stored = self._open(f"{path}/{node}", inner)
            self.arrays.setdefault((role, node), {})[place] = stored

    def _open(self, path: str, entry: Entry) -> Stored:
        try:
            folder = Folder.read(self.store, entry.name)
        except StorageError as error:
            return Stored(path, Opened(DOCUMENT, FileState.UNREADABLE, None, str(error)))
        opened = Opened.open(self.store, folder, DOCUMENT, read_node)
        if opened.content is not None and not isinstance(opened.content, ZarrArray):
            reason = "is a group where an array belongs (in names of nodes, / is written %2F)"
            return Stored(path, replace(opened, state=FileState.UNREADABLE, content=None, detail=reason))
        stored = Stored(path, opened)
        if stored.array is None or stored.array.unsupported:
            return stored
        try:
            return replace(stored, chunks=chunks_of(self.store, folder, stored.array))
        except LimitError as error:
            return Stored(path, replace(opened, state=FileState.DAMAGED, content=None, detail=str(error)))
        except StorageError as error:
            return Stored(path, replace(opened, state=FileState.UNREADABLE, content=None, detail=str(error)))


def chunks_of(store: Store, folder: Folder, array: ZarrArray) -> dict[Position, Entry]:
    """The chunks of an array that are there, by position; of one in shards of several chunks, the shards.

    Raises:
        LimitError: more names are below it than in any honest array.
        StorageError: storage failed.
    """
    found: dict[Position, Entry] = {}
    array = array.shards
    if array.num_chunks <= _FEW_CHUNKS:
        for position in array.positions():
            try:
                entry = store.stat(join(folder.path, array.key(position)))
            except ObjectMissingError:
                continue
            if not entry.is_folder:
                found[position] = entry
        return found
    start = len(folder.path) + 1 if folder.path else 0
    for entry in _walk(store, folder, lambda name: array.leads_to_chunks(name[start:])):
        at = array.position(entry.name[start:])
        if at is not None:
            found[at] = entry
    return found


def files_below(store: Store, folder: Folder) -> Iterator[Entry]:
    """Every file of a step."""
    try:
        yield from _walk(store, folder, lambda name: True)
    except (StorageError, LimitError):
        # Whoever asks wants to weigh the step; what is wrong with it is said when it is read.
        return


def _walk(store: Store, folder: Folder, enter: Callable[[str], bool]) -> Iterator[Entry]:
    """The files below a folder. A folder that is met again (a link that leads back) is not entered twice."""
    waiting, seen, count = [folder], {""}, 0
    while waiting:
        here = waiting.pop()
        yield from here.files.values()
        count += len(here.files) + len(here.folders)
        if count > MAX_ENTRIES:
            raise LimitError(f"more than {MAX_ENTRIES} names lie below {base_name(folder.path)}")
        for entry in here.folders.values():
            if enter(entry.name) and (not entry.identity or entry.identity not in seen):
                seen.add(entry.identity)
                waiting.append(Folder.read(store, entry.name))
