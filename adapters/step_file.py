"""One file of a step, opened without its weights; whatever is wrong with it is in the result, not raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from auditor.adapters.adapter import Folder
from auditor.adapters.pickled_module import with_state_dicts
from auditor.containers.damage import CutShortError, DamagedError, UnsupportedError
from auditor.containers.torch_zip import RecordBudget, TorchFile, read_torch_file
from auditor.model.catalog import LOST, File, FileState
from auditor.model.mesh import EVERYWHERE, Coordinate
from auditor.storage.store import (
    Entry,
    Handle,
    ObjectChangedError,
    ObjectMissingError,
    StorageError,
    Store,
    changed_since,
    grown_since,
    join,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened(Generic[T]):
    """One file that was opened, or should have been; ``content`` is None where it could not be read."""

    name: str
    """Within the step's folder."""
    state: FileState
    content: T | None = None
    detail: str = ""
    entry: Entry | None = None
    """As it was opened, else as the folder's listing has it."""

    @classmethod
    def open(
        cls, store: Store, folder: Folder, name: str, read: Callable[[Handle], T],
        salvage: Callable[[DamagedError], T | None] = lambda error: None,
    ) -> Self:  # fmt: skip
        """Open one file and ``read`` it.

        ``salvage``: what can still be told of a damaged file, from the error.
        """
        listed, path = folder.files.get(name), join(folder.place, name)
        try:
            with store.open(path) as handle:
                return cls(name, FileState.PRESENT, read(handle), "", handle.entry)
        except DamagedError as error:
            early = isinstance(error, CutShortError)
            if changed_since(store, path, listed) and not (early and grown_since(store, path, listed)):
                return cls(name, FileState.CHANGED, None, "it changed while it was read", listed)
            state = FileState.CUT_SHORT if early else FileState.DAMAGED
            return cls(name, state, salvage(error), str(error), listed)
        except ObjectMissingError:
            return cls.absent(name)
        except ObjectChangedError as error:
            return cls(name, FileState.CHANGED, None, str(error), listed)
        except (UnsupportedError, StorageError) as error:
            return cls(name, FileState.UNREADABLE, None, str(error), listed)

    @classmethod
    def absent(cls, name: str) -> Self:
        """A file that must be there but isn't."""
        return cls(name, FileState.MISSING, None, "it is not there")

    @classmethod
    def unopened(cls, folder: Folder, name: str) -> Self:
        """A file of which the listing is enough."""
        return cls(name, FileState.PRESENT, entry=folder.files[name])

    @property
    def lost(self) -> bool:
        """Whether its tensors are not to be had from this checkpoint: it is missing, cut short or damaged."""
        return self.state in LOST

    def as_file(
        self, folder: str, container: str, coordinate: Coordinate = EVERYWHERE, opaque: Mapping[str, int] | None = None
    ) -> File:
        """The Catalog's record of it. ``opaque``: unknown objects in it, by class."""
        num_bytes, identity = (self.entry.num_bytes, self.entry.identity) if self.entry else (0, "")
        return File(
            join(folder, self.name), num_bytes, identity, self.state, coordinate, self.detail, container,
            tuple(sorted((opaque or {}).items())),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepFile(Opened[TorchFile]):
    """One torch file of a step."""

    @classmethod
    def read(cls, store: Store, folder: Folder, name: str, budget: RecordBudget | None = None) -> Self:
        """Read the file's directory and pickle. ``budget``: shared by the files whose records are kept together."""

        def read(handle: Handle) -> TorchFile:
            found = read_torch_file(handle, budget)
            return replace(found, tree=with_state_dicts(found.tree))

        return cls.open(store, folder, name, read)

    @property
    def tree(self) -> Mapping[Any, Any]:
        """The saved dictionary; empty where the file could not be read or holds something else."""
        tree = self.content.tree if self.content else None
        return tree if isinstance(tree, dict) else {}

    def as_rank_file(self, folder: str, coordinate: Coordinate) -> File:
        """The Catalog's record of it, as the file of one rank."""
        if self.content is None:
            return self.as_file(folder, "torch-zip", coordinate)
        return self.as_file(folder, self.content.container, coordinate, self.content.opaque)
