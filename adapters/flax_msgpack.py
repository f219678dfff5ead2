"""Flax's msgpack checkpoints: one file a step, as ``flax.serialization.to_bytes`` and ``save_checkpoint`` write it.

    checkpoint_<step>      by flax.training.checkpoints.save_checkpoint (before it used Orbax)
    <anything>.msgpack     by people, and by Hugging Face (flax_model.msgpack)

The steps of a run are files beside one another. Which array is a moment of which parameter is told by the structure of
the state (:mod:`auditor.adapters.optax_tree`). Source: google/flax ``flax/training/checkpoints.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.jax_state import StatePlacing, Stored, stored
from auditor.adapters.step_file import Opened
from auditor.containers.flax_msgpack import CutShortError, FlaxArray, FlaxFile, read_flax
from auditor.model.catalog import Catalog, FileState
from auditor.model.mesh import NO_MESH
from auditor.storage.store import Entry, StorageError, Store, join, read_bytes

_NAME = re.compile(r"(?P<stem>.{0,200}?)(?P<number>\d{1,15})?(?P<suffix>\.msgpack|\.flax)?", re.A | re.S)
_BY_FLAX = re.compile(r"checkpoint_\d{1,15}", re.A)
_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf")
_MAX_SNIFFED = 4
"""Files of one series that are looked into until one is found to be msgpack."""


class FlaxMsgpack:
    """The adapter."""

    name = "flax-msgpack"
    looks_for = "files checkpoint_<step> or *.msgpack, each a msgpack map with arrays as flax.serialization writes them"

    def step_files(self, store: Store, folder: Folder) -> Iterator[Sequence[Entry]]:
        """Files that are steps by themselves, by series: names that differ in a number alone."""
        series: dict[tuple[str, str], list[Entry]] = {}
        for name, entry in folder.files.items():
            parts = _parts(name)
            if parts["number"]:
                series.setdefault((parts["stem"] or "", parts["suffix"] or ""), []).append(entry)
        for (_, suffix), entries in series.items():
            if suffix or any(_begins_as_map(store, entry) for entry in entries[:_MAX_SNIFFED]):
                yield entries

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By content: msgpack maps that hold arrays; of a damaged file, by its name."""
        names = _states(folder)
        if not names:
            return Declined("no file is called *.msgpack")
        others = [name for name in folder.files if name.endswith(_OTHERS)]
        if others:
            return Declined(f"it holds weights of another format as well ({others[0]})", 0.2)
        called = [name or folder_name(store, folder) for name in names]
        opened = [open_flax(store, folder, name) for name in names]
        held = any(isinstance(node, FlaxArray) for one in opened if one.content for _, node in one.content.leaves())
        if not held and not all(map(_named, called)):
            return Declined(f"{called[0]} is no msgpack map with arrays ({opened[0].detail or 'it holds none'})", 0.2)
        if not held and not any(one.state is FileState.DAMAGED for one in opened):
            return Declined(f"{called[0]} {opened[0].detail or 'holds no arrays'}", 0.2)
        reason = "a msgpack map with arrays" if held else f"by name a msgpack state, but {opened[0].detail}"
        number = _parts(called[0])["number"] if folder.alone else None
        number = number or _parts(folder_name(store, folder))["number"]
        if number is not None:
            return Match(int(number), f"{reason}; its step is the number in its name")
        step = self._placing(store, folder, opened)[0].recorded_step()
        return Match(step or 0, f"{reason}; " + ("nothing tells a step" if step is None else f"it records step {step}"))

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """None: the newest number counts."""
        return None

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        names = _states(folder)
        unread = options.names_only
        opened = [Opened[FlaxFile].unopened(folder, n) if unread else open_flax(store, folder, n) for n in names]
        placing, unknown = self._placing(store, folder, opened)
        opaque = Counter(unknown)
        for one in opened:
            own = one.content.opaque if one.content else {}
            opaque.update(own)
            placing.builder.file(one.as_file(folder.path, "flax-msgpack", opaque=own))
        placing.add_all()
        unclaimed = [join(folder.path, name) for name in folder.files if name not in names]
        return placing.builder.build(match.step, folder.path, self.name, NO_MESH, opaque, unclaimed)

    def _placing(
        self, store: Store, folder: Folder, opened: Sequence[Opened[FlaxFile]]
    ) -> tuple[StatePlacing, Counter[str]]:
        """The state that the files make up: each a part of it, called as the file is, where there are several."""
        leaves, unknown = list[Stored](), Counter[str]()
        for one in opened:
            prefix = (_parts(one.name)["stem"] or "",) if len(opened) > 1 else ()
            own, odd = stored(join(folder.path, one.name), prefix, one.content.leaves() if one.content else ())
            leaves += own
            unknown.update(odd)
        return StatePlacing(CatalogBuilder(), store, leaves), unknown


def _states(folder: Folder) -> list[str]:
    """The files of a folder that make up one step: those without a number, or the one file that was named."""
    if folder.alone:
        return list(folder.files)
    return [name for name in folder.files if (parts := _parts(name))["suffix"] and not parts["number"]]


def _named(name: str) -> bool:
    """Whether a file is called as only such files are."""
    return bool(_parts(name)["suffix"] or _BY_FLAX.fullmatch(name))


def open_flax(store: Store, folder: Folder, name: str) -> Opened[FlaxFile]:
    """One file without its weights; of one that is cut short, what its beginning tells."""
    return Opened[FlaxFile].open(
        store, folder, name, read_flax, lambda error: error.content if isinstance(error, CutShortError) else None
    )


def _parts(name: str) -> Mapping[str, str | None]:
    found = _NAME.fullmatch(name)
    return found.groupdict() if found else {"stem": name, "number": None, "suffix": None}


def _begins_as_map(store: Store, entry: Entry) -> bool:
    """Whether a file may be a state: it begins with a map that isn't empty, or can't be looked into."""
    if not entry.num_bytes:
        return True
    try:
        with store.open(entry.name) as handle:
            first, second = read_bytes(handle, 0, min(2, entry.num_bytes)).ljust(2, b"\0")
    except StorageError:
        return True
    # The first key follows: a text. Pickles begin with 0x80 and a small number.
    return (0x81 <= first <= 0x8F and 0xA0 <= second < 0xE0) or first in (0xDE, 0xDF)
