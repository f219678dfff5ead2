"""Every file below a store's root, one by one, in the order of their keys and without holding them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from auditor.storage.store import Entry, StorageError, Store, TransientReadError

MAX_DEPTH = 32
"""Folders in folders; links can lead round in circles."""
NUM_ATTEMPTS = 4


def walk(store: Store, after: str = "", refused: Callable[[str, StorageError], None] | None = None) -> Iterator[Entry]:
    """The files below the root. ``after``: only those whose names come after this one, to go on where one stopped.

    ``refused`` is told of folders that can't be listed; without it that is raised.

    Raises:
        StorageError: the root can't be listed.
    """
    native = getattr(store, "walk", None) or getattr(getattr(store, "inner", None), "walk", None)
    if native is not None:
        yield from _streamed(native, after)
    else:
        yield from _below(store, "", after, refused, ())


def _streamed(native: Callable[[str], Iterator[Entry]], after: str) -> Iterator[Entry]:
    """A service's own listing, gone on with where it broke."""
    failures = 0
    while True:
        try:
            for entry in native(after):
                after, failures = entry.name, 0
                yield entry
        except TransientReadError:
            failures += 1
            if failures == NUM_ATTEMPTS:
                raise
            time.sleep(0.2 * 2**failures)
        else:
            return


def _below(
    store: Store, folder: str, after: str, refused: Callable[[str, StorageError], None] | None, above: tuple[str, ...]
) -> Iterator[Entry]:
    try:
        entries = {entry.name + "/" * entry.is_folder: entry for entry in store.list(folder)}
    except StorageError as error:
        if refused is None or not folder:
            raise
        refused(folder, error)
        return
    for key, entry in sorted(entries.items()):
        if not entry.is_folder:
            if key > after:
                yield entry
        elif (key > after or after.startswith(key)) and len(above) < MAX_DEPTH and entry.identity not in above:
            down = (*above, entry.identity or f"folder {len(above)}")
            yield from _below(store, entry.name, after, refused, down)
