"""The files of a run's steps, listed once: how much there is to read decides how it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from auditor.adapters.adapter import Folder, TreeAdapter
from auditor.settings import Level
from auditor.sources import StepSource
from auditor.storage.store import Entry, ObjectMissingError, StorageError, Store

LARGE_RUN_BYTES = 16 << 30
"""Runs larger than this are by default read at `replicas`, and at `values` only in the newest step."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in the folders of steps."""

    store: Store
    listed: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    """Path of a step to its files, once they were listed."""
    folders: dict[str, frozenset[str]] = field(default_factory=dict)
    """Other folders, to the names of what lies in them."""

    def files(self, source: StepSource) -> tuple[Entry, ...]:
        """A step's files: its level, its kernels and its age are all told by them."""
        path = source.folder.path
        if path not in self.listed:
            try:
                self.listed[path] = tuple(self._list(source))
            except ObjectMissingError:
                # A folder in it is gone since the step was recognised.
                self.listed[path] = tuple(source.folder.files.values())
        return self.listed[path]

    def changed(self, source: StepSource) -> Mapping[str, bool]:
        """Files of a step, and folders directly in it, that are not what was listed, and whether they are gone.

        Lists it once more. Empty where storage does not say.
        """
        folder = source.folder
        known = {entry.name: entry.identity for entry in (*self.files(source), *folder.files.values())}
        try:
            if folder.is_of_files:
                found = {name: found for name in known if (found := self._identity(name)) is not None}
            else:
                now = replace(source, folder=Folder.read(self.store, folder.path))
                found = {entry.name: entry.identity for entry in self._list(now)}
        except ObjectMissingError:
            return dict.fromkeys(known or [folder.path], True)
        except StorageError:
            return {}
        others = {name: name not in found for name, identity in known.items() if found.get(name) != identity}
        if folder.is_of_files:
            return others
        inner = (entry.name for name, entry in folder.folders.items() if name not in now.folder.folders)
        return others | dict.fromkeys(inner, True)

    def _identity(self, name: str) -> str | None:
        """What storage says of a file now, None where it is gone. A link that leads nowhere is listed all the same."""
        try:
            return self.store.stat(name).identity
        except ObjectMissingError:
            beside = self.store.list(name.rpartition("/")[0])
            return next((entry.identity for entry in beside if entry.name == name), None)

    def _list(self, source: StepSource) -> Iterator[Entry]:
        """The files in a step's folder, and those one level below (a folder a rank); or as the adapter says."""
        if isinstance(source.adapter, TreeAdapter):
            yield from source.adapter.files(self.store, source.folder)
            return
        yield from source.folder.files.values()
        for name in source.folder.folders.values():
            try:
                yield from (entry for entry in self.store.list(name.name) if not entry.is_folder)
            except StorageError:
                continue

    def folder(self, path: str) -> frozenset[str]:
        """The names of what lies in a folder; empty where it can't be listed."""
        if path not in self.folders:
            try:
                self.folders[path] = frozenset(entry.name for entry in self.store.list(path))
            except StorageError:
                self.folders[path] = frozenset()
        return self.folders[path]

    def modified(self, source: StepSource) -> float:
        """Time of a step's newest file, seconds since the epoch."""
        return max((entry.modified for entry in self.files(source)), default=0.0)

    def levels(self, sources: Sequence[StepSource], level: Level | None) -> list[Level]:
        """How much is read of every step, where ``level`` does not say it."""
        if level is not None:
            return [level] * len(sources)
        total = sum(entry.num_bytes for source in sources for entry in self.files(source))
        if len(sources) == 1 or total <= LARGE_RUN_BYTES:
            return [Level.VALUES] * len(sources)
        return [Level.REPLICAS] * (len(sources) - 1) + [Level.VALUES]

    def weights_ahead(self, sources: Sequence[StepSource], levels: Sequence[Level]) -> int:
        """About how many bytes of weights that are."""
        read = [step for step, level in zip(sources, levels, strict=True) if level >= Level.VALUES]
        return sum(entry.num_bytes for step in read for entry in self.files(step))
