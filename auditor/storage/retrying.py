"""Tries again where storage failed in a way that may pass, so that nobody above has to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from auditor.storage.store import Entry, Handle, Store, TransientReadError, WrappedHandle, descriptor_of

T = TypeVar("T")


class RetryingStore:
    """``inner``, with transient failures tried again after growing waits."""

    def __init__(self, inner: Store, num_attempts: int = 4, first_wait_seconds: float = 0.05) -> None:
        self.inner, self.num_attempts, self.first_wait_seconds = inner, num_attempts, first_wait_seconds

    @property
    def location(self) -> str:
        """Where the wrapped store is."""
        return self.inner.location

    def again(self, action: Callable[[], T]) -> T:
        """What ``action`` returns; the last failure is raised when all attempts are used up."""
        for attempt in range(self.num_attempts - 1):
            try:
                return action()
            except TransientReadError:
                time.sleep(self.first_wait_seconds * 2**attempt)
        return action()

    def read_again(self, handle: Handle, offset: int, buffer: memoryview) -> None:
        """Read one range, again if need be."""
        self.again(lambda: handle.read_into(offset, buffer))

    def list(self, folder: str) -> Iterator[Entry]:
        """As the wrapped store, whole: a listing that fails half way begins anew."""
        return iter(self.again(lambda: [*self.inner.list(folder)]))

    def stat(self, name: str) -> Entry:
        """As the wrapped store."""
        return self.again(lambda: self.inner.stat(name))

    @contextmanager
    def open(self, name: str) -> Iterator[Handle]:
        """Open an object whose reads are tried again."""
        with ExitStack() as stack:
            handle = self.again(lambda: stack.enter_context(self.inner.open(name)))
            yield WrappedHandle(handle, self.read_again, descriptor_of(handle))
