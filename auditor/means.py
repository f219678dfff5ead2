"""How the work of one command is done: the store as it may be read, and who reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from auditor.observe.executors import executor_of
from auditor.settings import Settings
from auditor.storage.retrying import RetryingStore
from auditor.storage.store import Store, num_readers
from auditor.storage.throttled import ThrottledStore
from auditor.storage.union import UnionStore


@contextmanager
def means(store: Store, settings: Settings, executor: Executor | None) -> Iterator[tuple[Store, Executor]]:
    """The store as it may be read, and who does the work."""

    def careful(root: Store) -> Store:
        limit = settings.max_bytes_per_second
        return RetryingStore(ThrottledStore(root, limit) if limit else root)

    # Each root tries again by itself, so that a union stays one: its roots have a pointer each.
    readable = UnionStore([*map(careful, store.roots)]) if isinstance(store, UnionStore) else careful(store)
    if executor:
        yield readable, executor
        return
    threads = settings.threads or num_readers(readable) or min(8, os.cpu_count() or 1)
    with executor_of(threads, settings.scheduler) as workers:
        yield readable, workers
