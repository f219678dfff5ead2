"""Formats in which a step is one file that holds a state as a tree, or a folder with a few such files.

The steps of a run are files beside one another, or folders. Which array is a moment of which parameter is told by the
structure of the state (:mod:`auditor.adapters.optax.tree`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.file_steps import MAX_BESIDE, matched
from auditor.adapters.jax_state import StatePlacing, Stored, stored
from auditor.adapters.optax.paths import Path
from auditor.adapters.optax.stacks import unstacked
from auditor.adapters.optax.tree import OptaxTree
from auditor.adapters.step_file import Opened
from auditor.adapters.step_names import StepName, is_likely, is_part, stem, step_name
from auditor.containers.damage import DamagedError
from auditor.containers.state_array import Plain, StateArray
from auditor.model.catalog import Catalog
from auditor.model.encoding import Encoding
from auditor.model.mesh import NO_MESH
from auditor.storage.store import Entry, Handle, StorageError, Store, base_name, join, read_bytes

_MAX_SNIFFED = 4
"""Files of one series that are looked into until one is found to be of the format."""
_HEAD = 8
_UNFINISHED = ("tmp",)
"""Flax's save_checkpoint writes to ``<prefix>tmp`` first."""


class StateFile(Protocol):
    """One file, read without its weights."""

    @property
    def opaque(self) -> Mapping[str, int]:
        """What is in it and can't be read: what it is, to how many there are."""

    @property
    def encoding(self) -> Encoding | None:
        """How its content is stored, where that isn't as it is."""

    def leaves(self) -> Iterator[tuple[Path, StateArray | Plain | None]]:
        """Paths and what lies there, in stored order."""


class StateFiles:
    """What adapters of such formats share."""

    name: str
    looks_for: str
    what: str
    """What one file is, after "a"."""
    suffixes: tuple[str, ...]
    own_names = re.compile("")
    """Names without such a suffix that only such files have."""
    others = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf")
    """Names that end so are weights of other formats, whose adapters know more of the folder."""

    def read_file(self, handle: Handle) -> StateFile:
        """Read one file without its weights. Raises as containers do."""
        raise NotImplementedError

    def salvage(self, error: DamagedError) -> StateFile | None:
        """What is known of a damaged file."""
        return None

    def is_state(self, tree: OptaxTree) -> bool:
        """Whether arrays of a file that nobody named are a model's or an optimizer's."""
        return True

    def begins(self, head: bytes) -> bool:
        """Whether a file of the format may begin so."""
        raise NotImplementedError

    def step_files(self, store: Store, folder: Folder) -> Iterator[Sequence[Folder]]:
        """Files that are steps by themselves: those whose names differ in a number alone, then each without one.

        What numbers parts of one save is each by itself, too: nothing tells how they belong together.
        """
        series = self._series(store, folder)
        yield from ([*map(Folder.of_file, entries)] for entries in series.values())
        heads = tuple(head for name in series if name.endswith("#") and (head := name.partition("#")[0]))
        alone = [
            entry
            for name, entry in folder.files.items()
            if step_name(name) is None and (name.endswith(self.suffixes) or name.startswith(heads or ("\0",)))
        ]
        several = bool(series) or any(is_part(base_name(entry.name)) for entry in alone)
        for entry in alone if several and len(alone) <= MAX_BESIDE else ():
            if not entry.name.endswith(_UNFINISHED) and self._may_begin(store, entry):
                yield [Folder.of_file(entry)]

    def _series(self, store: Store, folder: Folder) -> dict[str, list[Entry]]:
        """Files whose names tell that they are of a series, by its name."""
        series: dict[str, list[Entry]] = {}
        for name, entry in folder.files.items():
            found = step_name(name)
            if found and (found.series.endswith(self.suffixes) or found.series.endswith("#")):
                series.setdefault(found.series, []).append(entry)
        return {
            name: entries
            for name, entries in series.items()
            if name.endswith(self.suffixes) or any(self._may_begin(store, entry) for entry in entries[:_MAX_SNIFFED])
        }

    def _holds_steps(self, store: Store, folder: Folder) -> bool:
        """Whether a folder holds a series of steps, and is none itself whatever lies beside them.

        Where its name is that of a step, numbers of files in it count something else.
        """
        if folder.alone or step_name(folder_name(store, folder), strict=True):
            return False
        return any(
            isinstance(self.recognise(store, Folder.of_file(entry)), Match)
            for entries in self._series(store, folder).values()
            for entry in entries[:_MAX_SNIFFED]
        )

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By content: msgpack maps that hold arrays; of a damaged file, by its name."""
        names = self._states(folder)
        if not names:
            return Declined(f"no file is called *{self.suffixes[0]}")
        others = [name for name in folder.files if name.endswith(self.others)]
        if others:
            return Declined(f"it holds weights of another format as well ({others[0]})", 0.2)
        if self._holds_steps(store, folder):
            return Declined("it holds a series of files, each a step", 0.3)
        called = [name or folder_name(store, folder) for name in names]
        opened = [self.open(store, folder, name) for name in names]
        held = any(isinstance(node, StateArray) for one in opened if one.content for _, node in one.content.leaves())
        if not held and not all(map(self._named, called)):
            return Declined(f"{called[0]} is no {self.what} ({opened[0].detail or 'it holds none'})", 0.2)
        if not held and not any(one.lost for one in opened):
            return Declined(f"{called[0]} {opened[0].detail or 'holds no arrays'}", 0.2)
        reason = f"a {self.what}" if held else f"by name a {self.what}, but {opened[0].detail}"
        placing = self._placing(store, folder, opened)[0]
        if held and folder.path and not self.is_state(placing.tree):
            return Declined(f"{called[0]} holds arrays, but nothing tells that they are a model's", 0.3)
        if not held and folder.alone and folder.path and not (step_name(called[0]) or is_likely(called[0])):
            return Declined(f"{called[0]} {opened[0].detail}, and nothing tells that it was a checkpoint", 0.3)
        number = step_name(called[0]) if folder.alone else self._number_of(store, folder)
        # A count of 0 is what states hold that nobody counts in.
        step = placing.recorded_step() or None
        return matched(number, step, reason, unread=any(one.lost for one in opened))

    def _number_of(self, store: Store, folder: Folder) -> StepName | None:
        """The step in a folder's name. The number of the root may be in the name of a run (``try_3``)."""
        return step_name(folder_name(store, folder), strict=not folder.path)

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """None: the newest number counts."""
        return None

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        names = self._states(folder)
        unread = options.names_only
        opened = [Opened[StateFile].unopened(folder, n) if unread else self.open(store, folder, n) for n in names]
        placing, unknown = self._placing(store, folder, opened)
        opaque = Counter(unknown)
        for one in opened:
            opaque.update(one.content.opaque if one.content else {})
        placing.add_all()
        unclaimed = [join(folder.path, name) for name in folder.files if name not in names]
        return unstacked(placing.builder.build(match.step, folder.path, self.name, NO_MESH, opaque, unclaimed))

    def _placing(
        self, store: Store, folder: Folder, opened: Sequence[Opened[StateFile]]
    ) -> tuple[StatePlacing, Counter[str]]:
        """The state that the files make up: each a part of it, called as the file is, where there are several."""
        leaves, unknown, builder = list[Stored](), Counter[str](), CatalogBuilder()
        for one in opened:
            number = builder.file(one.as_file(folder.path, self.name, opaque=one.content.opaque if one.content else {}))
            if one.content and one.content.encoding is not None:
                builder.encode(number, one.content.encoding)
            prefix = (stem(one.name),) if len(opened) > 1 else ()
            own, odd = stored(join(folder.path, one.name), prefix, one.content.leaves() if one.content else ())
            leaves += own
            unknown.update(odd)
        return StatePlacing(builder, store, leaves), unknown

    def open(self, store: Store, folder: Folder, name: str) -> Opened[StateFile]:
        """One file without its weights; of one that is cut short, what its beginning tells."""
        return Opened[StateFile].open(store, folder, name, self.read_file, self.salvage)

    def _states(self, folder: Folder) -> list[str]:
        """The files of a folder that make up one step: those without a number, or the one file that was named."""
        if folder.alone:
            return list(folder.files)
        return [name for name in folder.files if name.endswith(self.suffixes) and not _is_numbered(name)]

    def _named(self, name: str) -> bool:
        """Whether a file is called as only such files are."""
        return name.endswith(self.suffixes) or self.own_names.fullmatch(name) is not None

    def _may_begin(self, store: Store, entry: Entry) -> bool:
        """Whether a file begins as such files do, or can't be looked into."""
        try:
            with store.open(entry.name) as handle:
                return self.begins(read_bytes(handle, 0, min(_HEAD, entry.num_bytes)))
        except StorageError:
            return True


def _is_numbered(name: str) -> bool:
    """Whether a file is one of several saves, or of several parts."""
    return step_name(name) is not None or is_part(name)
