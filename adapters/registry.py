"""All adapters: our own, and those that other packages register under the entry-point group ``auditor.adapters``."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from auditor.adapters.adapter import Adapter, Declined, Folder, Match
from auditor.errors import UsageError
from auditor.storage.store import Store

GROUP = "auditor.adapters"


@lru_cache(maxsize=1)
def adapters() -> tuple[Adapter, ...]:
    """Every adapter, sorted by name. An entry point names a class that needs no arguments, or an adapter.

    Raises:
        UsageError: an entry point can't be loaded; a format that is silently not read would be worse.
    """
    found: dict[str, Adapter] = {}
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
            adapter = loaded() if isinstance(loaded, type) else loaded
        except (ImportError, AttributeError, TypeError) as error:
            package = point.dist.name if point.dist else "a package"
            raise UsageError(f"the adapter {point.name} of {package} can't be loaded: {error}; reinstall it") from error
        found[adapter.name] = adapter
    return tuple(found[name] for name in sorted(found))


def recognise(store: Store, folder: Folder) -> tuple[Adapter, Match] | dict[str, Declined]:
    """The first adapter that recognises ``folder``; else, by adapter name, why each declined.

    Raises:
        StorageError: storage failed.
    """
    declined: dict[str, Declined] = {}
    for adapter in adapters():
        verdict = adapter.recognise(store, folder)
        if isinstance(verdict, Match):
            return adapter, verdict
        declined[adapter.name] = verdict
    return declined
