"""Objects in memory: checkpoints that never touch a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from auditor.storage.store import Entry, ObjectMissingError, ShortReadError


class MemoryStore:
    """A tree of byte strings, keyed by name."""

    def __init__(self, objects: Mapping[str, bytes], location: str = "memory") -> None:
        self.objects = dict(objects)
        self._location = location

    @property
    def location(self) -> str:
        """The name given at construction."""
        return self._location

    def list(self, folder: str) -> Iterator[Entry]:
        """The entries directly in ``folder``."""
        prefix = f"{folder}/" if folder else ""
        children = {name[len(prefix) :].split("/", 1)[0] for name in self.objects if name.startswith(prefix)}
        if not children:
            raise ObjectMissingError(f"{folder or self._location}: no such folder")
        yield from (self.stat(prefix + child) for child in children)

    def stat(self, name: str) -> Entry:
        """The entry of one object or folder."""
        if name in self.objects:
            content = self.objects[name]
            # The same bytes object is the same content; another one may not be.
            return Entry(name, False, len(content), f"{len(content)}-{id(content)}")
        if not name or any(other.startswith(f"{name}/") for other in self.objects):
            return Entry(name, True)
        raise ObjectMissingError(f"{name}: no such object")

    @contextmanager
    def open(self, name: str) -> Iterator[MemoryHandle]:
        """Open an object."""
        entry = self.stat(name)
        if entry.is_folder:
            raise ObjectMissingError(f"{name}: is a folder")
        yield MemoryHandle(self.objects[name], entry)


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """An open object."""

    content: bytes
    entry: Entry

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy the range into ``buffer``."""
        part = self.content[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise ShortReadError(f"{self.entry.name}: ends at byte {len(self.content)}, {offset + len(buffer)} wanted")
        buffer[:] = part
