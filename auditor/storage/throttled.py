"""Reads no faster than was allowed, so that a training job on the same node or file system isn't disturbed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from auditor.storage.store import Entry, Handle, Store, WrappedHandle

MAX_SAVED_SECONDS = 0.25
"""How much unused time counts: after a pause no burst of more than this much reading."""


class ThrottledStore:
    """``inner`` at ``bytes_per_second`` over all threads of one process."""

    def __init__(
        self, inner: Store, bytes_per_second: float, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.inner, self.bytes_per_second, self.clock, self.sleep = inner, bytes_per_second, clock, sleep
        self._begin()

    def _begin(self) -> None:
        self._lock, self._free_at = threading.Lock(), self.clock()

    def __getstate__(self) -> dict[str, object]:
        # A lock can't be shipped; every process keeps its own time.
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_free_at")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def location(self) -> str:
        """Where the wrapped store is."""
        return self.inner.location

    def list(self, folder: str) -> Iterator[Entry]:
        """As the wrapped store."""
        return self.inner.list(folder)

    def stat(self, name: str) -> Entry:
        """As the wrapped store."""
        return self.inner.stat(name)

    @contextmanager
    def open(self, name: str) -> Iterator[Handle]:
        """Open an object whose reads wait for their turn."""
        with self.inner.open(name) as handle:
            yield WrappedHandle(handle, self.read_slowly)

    def read_slowly(self, handle: Handle, offset: int, buffer: memoryview) -> None:
        """Read one range when it is its turn."""
        self.wait_for(len(buffer))
        handle.read_into(offset, buffer)

    def wait_for(self, num_bytes: int) -> None:
        """Return when ``num_bytes`` more may be read."""
        with self._lock:
            now = self.clock()
            turn = max(self._free_at, now - MAX_SAVED_SECONDS)
            self._free_at = turn + num_bytes / self.bytes_per_second
        if turn > now:
            self.sleep(turn - now)
