"""Many files' directories asked for at once, where every request takes long: readers then find them at hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.zip_directory import read_directory
from auditor.storage.store import Entry, StorageError, Store, num_readers, read_bytes

MAX_PICKLE_BYTES = 16 << 10
"""Larger ones are no small ranges and would not be kept."""


A = TypeVar("A")
B = TypeVar("B")


def several(store: Store, action: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """What ``action`` returns for each of the items, in their order; many at once, if the store wants that."""
    readers = num_readers(store)
    if readers <= 1:
        yield from map(action, items)
        return
    with ThreadPoolExecutor(readers) as pool:
        yield from pool.map(action, items)


@contextmanager
def reading_ahead(store: Store, entries: Iterable[Entry]) -> Iterator[None]:
    """While the block lasts, what will be read next is asked for, if the store takes long to answer."""
    if num_readers(store) <= 1:
        yield
        return
    thread = threading.Thread(target=read_ahead, args=(store, entries), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def read_ahead(store: Store, entries: Iterable[Entry]) -> None:
    """Read what a reader of these files begins with, if the store wants many reads at once. Nothing is judged."""
    if num_readers(store) > 1:
        for _ in several(store, lambda entry: _touch(store, entry.name), entries):
            pass


def _touch(store: Store, name: str) -> None:
    # Whatever is wrong with the file comes up again when it is read in earnest.
    with suppress(StorageError, DamagedError, UnsupportedError), store.open(name) as handle:
        start = read_bytes(handle, 0, min(8, handle.entry.num_bytes))
        if start[:4] == b"PK\x03\x04":
            for member in read_directory(handle).values():
                if member.name.endswith((".pkl", "byteorder")) and member.num_bytes <= MAX_PICKLE_BYTES:
                    read_bytes(handle, member.offset, member.num_bytes)
