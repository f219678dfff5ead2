"""Which files of a Hugging Face folder are its weights: those that the index names, else those that numbers imply.

Whatever else is named like weights of the same kind is left over from another save: ``save_pretrained`` into a used
folder leaves an older single file beside new shards, and an older index beside a new single file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.hugging_face.files import Kind, kind_alone, open_json
from auditor.adapters.step_file import Opened
from auditor.model.catalog import FileState
from auditor.storage.store import Store, base_name, join

MAX_FILES = 1 << 14
"""Files of the largest set that is believed."""

_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a set of several files."""

    opened: Opened[Mapping[str, Any]]
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """Tensor name to file."""
    total_size: float | None = None
    """Bytes of all tensors as recorded, if they are."""
    strange: Mapping[str, str] = field(default_factory=dict)
    """Tensor name to what is said of it instead of the name of a file in this folder."""

    @property
    def usable(self) -> bool:
        """Whether it tells where tensors lie."""
        return self.opened.state is FileState.PRESENT


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The files that together hold one model."""

    kind: Kind
    names: tuple[str, ...]
    """All that must be there, whether they are or not."""
    index: Index | None = None
    leftovers: Mapping[str, str] = field(default_factory=dict)
    """Files named like weights of this kind that are no part of the set, with the reason."""
    num_families: int = 0
    """Different counts in names like ``model-00001-of-00003``."""


def read_index(store: Store, folder: Folder, name: str, part: str = "") -> Index:
    """Read an index. Names in it that lead out of the folder are set aside. ``part``: the component that it is of."""
    opened = open_json(store, folder, name)
    if opened.content is None:
        return Index(opened)
    stated, metadata = opened.content.get("weight_map"), opened.content.get("metadata")
    if not isinstance(stated, dict):
        return Index(Opened(name, FileState.DAMAGED, None, "it has no weight_map", opened.entry))
    good = {key: value for key, value in stated.items() if _is_file_name(value)}
    if len(set(good.values())) > MAX_FILES:
        return Index(Opened(name, FileState.DAMAGED, None, f"it names more than {MAX_FILES} files", opened.entry))
    good = {key: join(part, value) for key, value in good.items()}
    strange = {key: str(value)[:200] for key, value in stated.items() if key not in good}
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    counted = isinstance(total, (int, float)) and not isinstance(total, bool)
    return Index(opened, good, total if counted else None, strange)


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None and value not in (".", "..")


def find_set(store: Store, folder: Folder, kind: Kind) -> WeightSet | None:
    """The set of one kind, None where the folder has no file of it."""
    if folder.alone:
        (name,) = folder.files
        return WeightSet(kind, (name,)) if kind_alone(name or base_name(folder.path)) == kind else None
    places = {name: place for name in folder.files if (place := kind.place(name))}
    single = kind.single in folder.files
    index = read_index(store, folder, kind.index, kind.part) if kind.index in folder.files else None
    if index is not None and index.usable and index.weight_map:
        return _indexed(kind, folder, index, places)
    num_families = len({count for _, count in places.values()})
    if single:
        reason = f"is no part of the set: a loader takes {kind.single}, and no index names it"
        leftovers = {} if index else dict.fromkeys(places, reason)
        return WeightSet(kind, (kind.single,), index, leftovers, num_families)
    if places:
        return _numbered(kind, index or Index(Opened.absent(kind.index)), places)
    return WeightSet(kind, (), index) if index else None


def _indexed(kind: Kind, folder: Folder, index: Index, places: Mapping[str, tuple[int, int]]) -> WeightSet:
    named = sorted(set(index.weight_map.values()))
    num_families = len({count for _, count in places.values()})
    unnamed = {name: f"is not named by {kind.index}" for name in places if name not in named}
    if kind.single not in folder.files or kind.single in named:
        return WeightSet(kind, tuple(named), index, unnamed, num_families)
    missing = [name for name in named if name not in folder.files]
    if not missing:
        reason = f"is taken by loaders in place of the {len(named)} files that {kind.index} names"
        return WeightSet(kind, tuple(named), index, {kind.single: reason, **unnamed}, num_families)
    # The single file is whole by itself, the index is what an older save left.
    stale = {kind.index: f"names {len(missing)} files that are not there, beside {kind.single}, which loaders take"}
    stale |= dict.fromkeys(places, f"is no part of {kind.single}, which loaders take")
    return WeightSet(kind, (kind.single,), None, stale, num_families)


def _numbered(kind: Kind, index: Index, places: Mapping[str, tuple[int, int]]) -> WeightSet:
    """Without a usable index: the family of names that is whole, else the one with most files."""
    families: dict[int, list[str]] = {}
    for name, (_, count) in places.items():
        families.setdefault(count, []).append(name)
    best = max(families, key=lambda count: (len(families[count]) == count, len(families[count]), count))
    names: Sequence[str] = families[best]
    if best <= MAX_FILES:
        there = {places[name][0]: name for name in families[best]}
        names = [there.get(number) or _sibling(kind, families[best][0], number) for number in range(1, best + 1)]
    leftovers = {
        name: f"is of a set of {count} files, beside one of {best}"
        for count, members in families.items()
        for name in members
        if name not in names
    }
    return WeightSet(kind, tuple(names), index, leftovers, len(families))


def _sibling(kind: Kind, name: str, number: int) -> str:
    """The name of file ``number`` of the set that ``name`` is of, with as many digits."""
    count = name.removesuffix(f".{kind.suffix}").rsplit("-", 1)[1]
    return f"{kind.stem}-{number:0{len(count)}d}-of-{count}.{kind.suffix}"
