"""A store that wraps another one and misbehaves on request: for tests of everything that reads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from auditor.storage.store import (
    AccessDeniedError,
    Entry,
    Handle,
    ShortReadError,
    Store,
    TransientReadError,
    WrappedHandle,
    read_bytes,
)


@dataclass(slots=True)
class Faults:
    """What goes wrong, by file name pattern."""

    denied: str = ""
    """Files that may not be opened."""
    transient: str = ""
    """Files whose reads fail for a while …"""
    num_transient: int = 0
    """… this many times each."""
    shrinking: str = ""
    """Files that turn out shorter than they were when they were listed …"""
    num_bytes_left: int = 0
    """… this long."""
    flipped: str = ""
    """Files in which the lowest bit of every byte read is wrong."""
    seconds_per_read: float = 0.0
    reads: Counter[str] = field(default_factory=Counter)
    """Reads seen so far, by file."""
    num_bytes_read: Counter[str] = field(default_factory=Counter)
    """Bytes handed out so far, by file."""


class FaultyStore:
    """``inner`` with faults."""

    def __init__(self, inner: Store, faults: Faults) -> None:
        self.inner, self.faults, self._lock = inner, faults, threading.Lock()

    @property
    def location(self) -> str:
        """Where the wrapped store is."""
        return self.inner.location

    def list(self, folder: str) -> Iterator[Entry]:
        """As the wrapped store."""
        return self.inner.list(folder)

    def stat(self, name: str) -> Entry:
        """As the wrapped store; a file that shrinks shows its new identity once it was read."""
        entry = self.inner.stat(name)
        if fnmatch(name, self.faults.shrinking) and self.faults.reads[name]:
            return replace(entry, num_bytes=self.faults.num_bytes_left, identity="shrunk")
        return entry

    @contextmanager
    def open(self, name: str) -> Iterator[Handle]:
        """Open through the faults."""
        if fnmatch(name, self.faults.denied):
            raise AccessDeniedError(f"{name}: permission denied")
        with self.inner.open(name) as handle:
            yield WrappedHandle(handle, self.spoil)

    def spoil(self, handle: Handle, offset: int, buffer: memoryview) -> None:
        """Read one range and do to it what the faults say."""
        name, faults = handle.entry.name, self.faults
        with self._lock:
            faults.reads[name] += 1
            seen = faults.reads[name]
        time.sleep(faults.seconds_per_read)
        if fnmatch(name, faults.transient) and seen <= faults.num_transient:
            raise TransientReadError(f"{name}: injected")
        if fnmatch(name, faults.shrinking) and offset + len(buffer) > faults.num_bytes_left:
            raise ShortReadError(f"{name}: ends at byte {faults.num_bytes_left}, {offset + len(buffer)} wanted")
        content = read_bytes(handle, offset, len(buffer))
        buffer[:] = bytes(b ^ 1 for b in content) if fnmatch(name, faults.flipped) else content
        with self._lock:
            faults.num_bytes_read[name] += len(buffer)
