"""A ledger in a folder of the local disk, or under a prefix of a bucket."""

from __future__ import annotations

from auditor.errors import UsageError
from auditor.ledger.tree import Ledger
from auditor.storage.local import LocalStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.roots import is_url, store_at
from auditor.storage.store import Store
from auditor.storage.union import UnionStore
from auditor.storage.writer import FolderWriter


def open_ledger(path: str, source: Store | None = None) -> Ledger:
    """The ledger at a path or URL; a folder is made when it is first written.

    ``source``: from where checkpoints are read; the ledger must not lie in it.

    Raises:
        UsageError: it does, or the checkpoints lie in the ledger.
    """
    roots = [root.location for root in (source.roots if isinstance(source, UnionStore) else (source,)) if root]
    store = store_at(path)
    if isinstance(store, LocalStore):
        writer = FolderWriter(store.location)
        # What lies in a bucket is no folder of this disk.
        writer.refuse_sources([root for root in roots if not is_url(root)])
        return Ledger(store, writer)
    from auditor.storage.object_store import ObjectStore
    from auditor.storage.object_writer import ObjectWriter

    assert isinstance(store, ObjectStore)
    for root in roots:
        if _inside(root, store.location) or _inside(store.location, root):
            raise UsageError(f"the ledger {store.location} and {root}, from which is read, lie in each other")
    return Ledger(RetryingStore(store), ObjectWriter(store.place))


def _inside(url: str, other: str) -> bool:
    return f"{url}/".startswith(f"{other}/")
