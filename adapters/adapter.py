"""What an adapter is: it recognises a folder by what is in it and reads it into a Catalog, without weights.

All of a framework's knowledge (file names, rank axes, which names are replicated, how flat partitions map to
parameters) is in its adapter and nowhere else. An adapter is handed a store and never opens anything by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from auditor.model.catalog import Catalog
from auditor.model.mesh import Replicate, Shard
from auditor.model.optimizer import ParameterGroup
from auditor.storage.store import Entry, Store, base_name

MAX_RANKS = 1 << 17
"""Ranks of the largest mesh that is believed; beyond it a recorded size is nonsense."""
MAX_LOST = 256
"""Files that a recorded mesh may imply for each one that is there. Beyond it the mesh is not that of these files, and
what all the others should hold would take minutes to list."""


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder's listing."""

    path: str
    files: Mapping[str, Entry]
    """By name within the folder."""
    folders: Mapping[str, Entry]
    alone: bool = False
    """Whether it is one file: nothing is known of what lies beside that."""
    lies_in: str | None = None
    """Where its files lie, if it is no folder of the storage but some files of one, which are a step together."""
    lacks: tuple[str, ...] = ()
    """Names of such files that the other steps have and this one doesn't."""

    @property
    def place(self) -> str:
        """The folder in which its files lie."""
        return self.path if self.lies_in is None else self.lies_in

    @property
    def is_of_files(self) -> bool:
        """Whether it is made up of files, so that it can't be listed."""
        return self.alone or self.lies_in is not None

    @classmethod
    def of_file(cls, entry: Entry) -> Folder:
        """A file that is a step by itself: it has the step's path, and no name in it."""
        return cls(entry.name, {"": entry}, {}, alone=True)

    @classmethod
    def of_files(cls, entries: Sequence[Entry], lacks: Sequence[str] = ()) -> Folder:
        """Files of one folder that are a step together, which is called as the first of them is."""
        path = entries[0].name
        files = {base_name(entry.name): entry for entry in entries}
        return cls(path, files, {}, lies_in=path.rpartition("/")[0], lacks=tuple(lacks))

    @classmethod
    def read(cls, store: Store, path: str) -> Folder:
        """List ``path``, sorted by name.

        Raises:
            StorageError: there is no such folder, or it can't be listed.
        """
        entries = sorted(store.list(path), key=lambda entry: entry.name)
        return cls(
            path,
            {base_name(entry.name): entry for entry in entries if not entry.is_folder},
            {base_name(entry.name): entry for entry in entries if entry.is_folder},
        )


def folder_name(store: Store, folder: Folder) -> str:
    """What a folder is called; of the root, which has no name below itself, what a person calls it."""
    return base_name(folder.path or store.location.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Match:
    """The folder is a checkpoint of this format."""

    step: int
    """The step that the framework recorded, else the folder's number."""
    reason: str
    """What in the folder's content says so."""
    named_step: int | None = None
    """The step that the folder's name tells, where the framework itself gives such names and ``step`` is recorded."""
    holds: tuple[str, ...] = ()
    """Folders in it that are part of this step, though they would be recognised by themselves."""
    numbered: int | None = None
    """The number that a script put into the name. Whether it is a step is told by the other saves of the run: if most
    of those record the step that their names tell, this one's name tells its step, too."""
    unread: bool = False
    """Whether it could not be read, and might record another step than the number in its name."""
    apart: bool = False
    """Whether nothing tells for certain to which step of a run it belongs (a folder ``best``, ``20.bak``): beside steps
    that are known it is a run of its own, and compared with none of them."""


@dataclass(frozen=True, slots=True)
class Declined:
    """The folder is no checkpoint of this format."""

    reason: str
    nearness: float = 0.0
    """From 0 (nothing fits) to below 1 (nearly everything does), to name what came nearest."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file beside the steps that names the step to resume from."""

    file: str
    target: str
    """The folder that it names, below the root."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may state about layouts, from the configuration."""

    placement: Mapping[str, Sequence[tuple[str, Shard | Replicate]]] = field(default_factory=dict)
    """Mesh axis to pairs of (tensor name glob, placement); the first glob that fits wins over the adapter's rules."""

    optimizer: ParameterGroup | None = None
    """What the user says of the optimizer, for checkpoints that record no parameter group (optax states)."""

    names_only: bool = False
    """Open only the files that say which others must be there."""

    def stated(self, axis: str, name: str) -> Shard | Replicate | None:
        """The user's word on how tensor ``name`` lies along ``axis``, if there is one."""
        return next((how for glob, how in self.placement.get(axis, ()) if fnmatchcase(name, glob)), None)


@runtime_checkable
class TreeAdapter(Protocol):
    """An adapter whose steps are deeper than a folder with folders: it says itself which files a step has."""

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step."""


@runtime_checkable
class FileStepsAdapter(Protocol):
    """An adapter of a format whose steps are files, many of them in one folder."""

    def step_files(self, store: Store, folder: Folder) -> Iterator[Sequence[Folder]]:
        """Files of a folder that may be steps by themselves, or a few together, by series; each is to be recognised.

        Raises:
            StorageError: storage failed.
        """


class Adapter(Protocol):
    """Reads one format."""

    @property
    def name(self) -> str:
        """The format's name in reports, e.g. ``deepspeed-pipeline``."""

    @property
    def looks_for(self) -> str:
        """What a folder must hold to be recognised, for the message about an unknown folder."""

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """Whether ``folder`` is one step in this format, judged by names and by the content of small files.

        Raises:
            StorageError: storage failed, so nothing can be said.
        """

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """The pointer in a folder of steps, if this format writes one and it is there."""

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step. Reads names, headers and small metadata; never weights.

        What is wrong with the files is in the Catalog (file states, problems), not raised.
        """
