"""A store that tells what was looked at: names, whether they were there or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from auditor.storage.store import Entry, Handle, Store


@dataclass(frozen=True, slots=True)
class WatchedStore:
    """As ``inner``."""

    inner: Store
    seen: set[str] = field(default_factory=set)
    """Folders that were listed, objects that were opened or asked for."""

    @property
    def location(self) -> str:
        """As the inner one."""
        return self.inner.location

    def list(self, folder: str) -> Iterator[Entry]:
        """As the inner one."""
        self.seen.add(folder)
        return self.inner.list(folder)

    def stat(self, name: str) -> Entry:
        """As the inner one."""
        self.seen.add(name)
        return self.inner.stat(name)

    def open(self, name: str) -> AbstractContextManager[Handle]:
        """As the inner one."""
        self.seen.add(name)
        return self.inner.open(name)
