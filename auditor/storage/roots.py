"""From what a user writes, paths and URLs, to the store that is read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from auditor.errors import UsageError
from auditor.storage.local import LocalStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.single import SingleFileStore
from auditor.storage.store import ObjectMissingError, Store
from auditor.storage.union import UnionStore

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_store(roots: Sequence[str | os.PathLike[str]]) -> Store:
    """One store over all ``roots``: local paths, ``file://``, ``s3://``, ``gs://`` and ``az://`` URLs.

    Raises:
        UsageError: there is nothing at a root, several are named of which one is a file, or a URL can't be read.
        StorageError: a bucket isn't there, may not be read or does not answer.
    """
    names = [os.fspath(root) for root in roots]
    stores: list[Store] = []
    for name in names:
        store = store_at(name)
        try:
            entry = store.stat("")
        except ObjectMissingError as error:
            raise UsageError(str(error)) from None
        if not entry.is_folder:
            if len(names) > 1:
                raise UsageError(f"{name}: a single file; several paths must be roots of one run")
            folder, slash, last = name.rstrip("/").rpartition("/")
            return SingleFileStore(store_at(folder or slash or "."), last, name)
        stores.append(store)
    return UnionStore(stores) if len(stores) > 1 else stores[0]


def store_at(root: str) -> Store:
    """The store at one path or URL, whatever is there; nothing is asked yet.

    Raises:
        UsageError: a URL that can't be read.
    """
    if not root:
        raise UsageError("an empty path: is the variable set?")
    if not is_url(root):
        return LocalStore(root)
    scheme, rest = root.split("://", 1)
    if scheme.lower() == "file":
        if not rest.startswith("/"):
            raise UsageError(f"{root}: write file:///path; no other machine's files are read")
        return LocalStore(rest)
    try:
        from auditor.storage.object_clients import Place
        from auditor.storage.object_store import ObjectStore
    except ModuleNotFoundError as error:
        raise UsageError(f"{scheme}:// needs obstore: pip install 'ckpt-auditor[cloud]'") from error
    return ObjectStore(Place.of(scheme.lower() + "://" + rest))


def above(store: Store) -> tuple[Store, str] | None:
    """The store in which the root of ``store`` lies, and the root's name there; None where that isn't known.

    Of several roots only if all have the same name. What slows reading down is left out: little is read there.
    """
    while (inner := getattr(store, "inner", None)) is not None:
        store = inner
    if not isinstance(store, UnionStore):
        found: tuple[Store, str] | None = getattr(store, "above", None)
        return (RetryingStore(found[0]), found[1]) if found else None
    each = [above(root) for root in store.roots]
    names = {item[1] for item in each if item}
    if len(names) != 1 or None in each:
        return None
    return UnionStore([item[0] for item in each if item]), names.pop()


def is_url(root: str) -> bool:
    """Whether it is a URL, and no local path that happens to look like one."""
    return bool(_URL.fullmatch(root)) and not os.path.exists(root)


def below(root: str, path: str) -> str:
    """What a person calls ``path`` below ``root``."""
    return f"{root.rstrip('/') or root}/{path}" if path else root
