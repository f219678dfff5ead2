"""A store in memory that notes every range that is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from auditor.storage.memory import MemoryHandle, MemoryStore

Range = tuple[str, int, int]
"""Name, first byte, byte after the last."""


class RecordingStore(MemoryStore):
    """Notes every range that is read in ``ranges``."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        super().__init__(objects)
        self.ranges: list[Range] = []

    @contextmanager
    def open(self, name: str) -> Iterator[MemoryHandle]:
        """Open an object."""
        with super().open(name) as handle:
            yield RecordingHandle(handle.content, handle.entry, self.ranges)


@dataclass(frozen=True, slots=True)
class RecordingHandle(MemoryHandle):
    """An open object whose reads are noted."""

    ranges: list[Range]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Note the range, then read it."""
        self.ranges.append((self.entry.name, offset, offset + len(buffer)))
        MemoryHandle.read_into(self, offset, buffer)
