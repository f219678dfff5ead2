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
from auditor.adapters.file_steps import MAX_BESIDE
from auditor.adapters.jax_state import StatePlacing, Stored, stored
from auditor.adapters.optax.paths import Path
from auditor.adapters.optax.stacks import unstacked
from auditor.adapters.optax.tree import OptaxTree
from auditor.adapters.step_file import Opened
from auditor.adapters.step_names import is_likely, is_part, step_name
from auditor.containers.damage import DamagedError
from auditor.containers.state_array import Plain, StateArray
from auditor.model.catalog import Catalog
from auditor.model.encoding import Encoding
from auditor.model.mesh import NO_MESH
from auditor.storage.store import Entry, Handle, StorageError, Store, base_name, join, read_bytes

_STEM = re.compile(r"(?P<stem>.{0,200}?)(?P<number>\d{1,15})?", re.A | re.S)
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

    def step_files(self, store: Store, folder: Folder) -> Iterator[Sequence[Entry]]:
        """Files that are steps by themselves: those whose names differ in a number alone, then each without one."""
        series = self._series(store, folder)
        yield from series.values()
        stems = tuple(stem for stem, suffix in series if stem and not suffix)
        alone = [
            folder.files[name]
            for name in folder.files
            if not (parts := self._parts(name))["number"] and (parts["suffix"] or name.startswith(stems or ("\0",)))
        ]
        for entry in alone if series and len(alone) <= MAX_BESIDE else ():
            if not entry.name.endswith(_UNFINISHED) and self._may_begin(store, entry):
                yield [entry]

    def _series(self, store: Store, folder: Folder) -> dict[tuple[str, str], list[Entry]]:
        """Files with a number, by stem and suffix."""
        series: dict[tuple[str, str], list[Entry]] = {}
        for name, entry in folder.files.items():
            parts = self._parts(name)
            if parts["number"]:
                series.setdefault((parts["stem"], parts["suffix"]), []).append(entry)
        return {
            (stem, suffix): entries
            for (stem, suffix), entries in series.items()
            if suffix or any(self._may_begin(store, entry) for entry in entries[:_MAX_SNIFFED])
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
            if not is_part(base_name(entry.name).removesuffix(self.suffixes[0]))
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
        if not held and folder.alone and folder.path and not (self._parts(called[0])["number"] or is_likely(called[0])):
            return Declined(f"{called[0]} {opened[0].detail}, and nothing tells that it was a checkpoint", 0.3)
        number = self._parts(called[0])["number"] if folder.alone else ""
        if number or (number := self._number_of(store, folder)):
            told = int(number) if folder.alone else None
            return Match(int(number), f"{reason}; its step is the number in its name", numbered=told)
        step = placing.recorded_step()
        says = "nothing tells a step" if step is None else f"it records step {step}"
        return Match(step or 0, f"{reason}; {says}", apart=step is None and not folder.alone)

    def _number_of(self, store: Store, folder: Folder) -> str:
        """The number in a folder's name. That of the root may be the name of a run (``try3``)."""
        name = folder_name(store, folder)
        return self._parts(name)["number"] if folder.path or step_name(name, strict=True) else ""

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
            prefix = (self._parts(one.name)["stem"],) if len(opened) > 1 else ()
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
        return [name for name in folder.files if (parts := self._parts(name))["suffix"] and not parts["number"]]

    def _named(self, name: str) -> bool:
        """Whether a file is called as only such files are."""
        return bool(self._parts(name)["suffix"] or self.own_names.fullmatch(name))

    def _parts(self, name: str) -> Mapping[str, str]:
        """A name's stem, number and suffix, as far as it has them."""
        suffix = next((suffix for suffix in self.suffixes if name.endswith(suffix)), "")
        found = _STEM.fullmatch(name.removesuffix(suffix))
        stem, number = (found["stem"], found["number"] or "") if found else (name, "")
        return {"stem": stem, "number": number, "suffix": suffix}

    def _may_begin(self, store: Store, entry: Entry) -> bool:
        """Whether a file begins as such files do, or can't be looked into."""
        try:
            with store.open(entry.name) as handle:
                return self.begins(read_bytes(handle, 0, min(_HEAD, entry.num_bytes)))
        except StorageError:
            return True
