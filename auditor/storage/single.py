"""One object as a tree of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from auditor.storage.store import Entry, Handle, ObjectMissingError, Store


class SingleFileStore:
    """``name``, an object directly in the root of ``inner``, and nothing of what lies beside it.

    Unlike that of other stores, the root is no folder: so one can tell that its neighbours are unknown.
    """

    def __init__(self, inner: Store, name: str, location: str) -> None:
        self._inner, self._name, self._location = inner, name, location

    @property
    def location(self) -> str:
        """The file as the user gave it."""
        return self._location

    @property
    def above(self) -> tuple[Store, str]:
        """The store in whose root the object lies, and its name there."""
        return self._inner, self._name

    def list(self, folder: str) -> Iterator[Entry]:
        """The one object."""
        if folder:
            raise ObjectMissingError(f"{folder}: no such folder")
        yield self._inner.stat(self._name)

    def stat(self, name: str) -> Entry:
        """The entry of the one object, which is also the root's."""
        if name not in ("", self._name):
            raise ObjectMissingError(f"{name}: no such object")
        return replace(self._inner.stat(self._name), name=name)

    def open(self, name: str) -> AbstractContextManager[Handle]:
        """Open the one object."""
        if name != self._name:
            raise ObjectMissingError(f"{name}: no such object")
        return self._inner.open(name)
