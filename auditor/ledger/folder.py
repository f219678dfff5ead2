"""A ledger in a folder of the local disk."""

from __future__ import annotations

from auditor.ledger.tree import Ledger
from auditor.storage.local import LocalStore
from auditor.storage.roots import is_url
from auditor.storage.store import Store
from auditor.storage.union import UnionStore
from auditor.storage.writer import FolderWriter


def open_ledger(path: str, source: Store | None = None) -> Ledger:
    """The ledger in a folder, which is made when it is first written.

    ``source``: from where checkpoints are read; the ledger must not lie in it.

    Raises:
        UsageError: it does, or the checkpoints lie in the ledger.
    """
    writer = FolderWriter(path)
    if source is not None:
        roots = source.roots if isinstance(source, UnionStore) else (source,)
        # What lies in a bucket is no folder of this disk.
        writer.refuse_sources([root.location for root in roots if not is_url(root.location)])
    return Ledger(LocalStore(path), writer)
