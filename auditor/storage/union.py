"""Several roots seen as one: node-local saves, of which every node holds its own ranks' files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from auditor.storage.store import Entry, Handle, ObjectMissingError, Store


class UnionStore:
    """The union of the trees of ``roots``. A name in several roots is the first root's."""

    def __init__(self, roots: Sequence[Store]) -> None:
        self.roots = tuple(roots)

    @property
    def location(self) -> str:
        """All roots."""
        return " + ".join(root.location for root in self.roots)

    def list(self, folder: str) -> Iterator[Entry]:
        """The entries directly in ``folder`` in any of the roots."""
        seen: dict[str, Entry] = {}
        missing = 0
        for root in self.roots:
            try:
                for entry in root.list(folder):
                    seen.setdefault(entry.name, entry)
            except ObjectMissingError:
                missing += 1
        if missing == len(self.roots):
            raise ObjectMissingError(f"{folder or self.location}: no such folder")
        return iter(seen.values())

    def stat(self, name: str) -> Entry:
        """The entry in the first root that has it."""
        return self._holder(name)[1]

    def open(self, name: str) -> AbstractContextManager[Handle]:
        """Open the object in the first root that has it."""
        return self._holder(name)[0].open(name)

    def _holder(self, name: str) -> tuple[Store, Entry]:
        for root in self.roots:
            try:
                return root, root.stat(name)
            except ObjectMissingError:
                continue
        raise ObjectMissingError(f"{name}: in none of {self.location}")

    def shadowed(self, folder: str) -> dict[str, str]:
        """Files directly in ``folder`` that several roots hold, with the root whose copy is not seen."""
        owner: dict[str, str] = {}
        hidden: dict[str, str] = {}
        for root in self.roots:
            try:
                for entry in root.list(folder):
                    if not entry.is_folder and owner.setdefault(entry.name, root.location) != root.location:
                        hidden[entry.name] = root.location
            except ObjectMissingError:
                continue
        return hidden
