"""Many files' directories asked for at once, where every request takes long: readers then find them at hand."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.zip_directory import read_directory
from auditor.storage.store import Entry, StorageError, Store, num_readers, read_bytes

MAX_PICKLE_BYTES = 16 << 10
"""Larger ones are no small ranges and would not be kept."""


def read_ahead(store: Store, entries: Iterable[Entry]) -> None:
    """Read what a reader of these files begins with, if the store wants many reads at once. Nothing is judged."""
    readers = num_readers(store)
    if readers > 1:
        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(lambda entry: _touch(store, entry.name), entries))


def _touch(store: Store, name: str) -> None:
    # Whatever is wrong with the file comes up again when it is read in earnest.
    with suppress(StorageError, DamagedError, UnsupportedError), store.open(name) as handle:
        start = read_bytes(handle, 0, min(8, handle.entry.num_bytes))
        if start[:4] == b"PK\x03\x04":
            for member in read_directory(handle).values():
                if member.name.endswith((".pkl", "byteorder")) and member.num_bytes <= MAX_PICKLE_BYTES:
                    read_bytes(handle, member.offset, member.num_bytes)
