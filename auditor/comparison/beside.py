"""What files of both sides hold beside tensors that are compared, value by value: schedules, epochs, random states.

What a run is resumed from is more than its tensors. Files of ``torch.save`` and JSON documents are walked through in
lock-step, so that what one side lacks, or has otherwise, is known by its place. Strings that are paths, and what is of
the time and machine of a save, are no state.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.comparison.holding import Source
from auditor.comparison.matching import COMPARED
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.json_document import read_json
from auditor.containers.pickle_machine import Global, Opaque
from auditor.containers.torch_zip import StoredTensor, read_torch_file
from auditor.model.catalog import File, FileState, Role
from auditor.storage.store import Handle, ShortReadError, StorageError, read_bytes

MOST_VALUES = 1 << 20
"""Of one file that are looked at."""
MOST_BYTES = 1 << 20
"""Of a tensor that is no part of the model: a random state has some thousands."""
MOST_TENSORS = 1 << 12
"""Of one file that are read so."""
MAX_DEPTH = 48
FEW = 24
"""Differences of one step that are told one by one."""
_INCIDENTAL = frozenset(
    ("time", "times", "timestamp", "date", "runtime", "second", "seconds", "duration", "version", "path", "paths",
     "dir", "host", "hostname", "uuid", "pid", "user", "memory")
)  # fmt: skip
"""Words of keys under which is what no run goes on from."""
_ARGUMENTS = frozenset(("args", "hyper_parameters"))
"""With what a run was started: the run that goes on has its own."""
_WORDS = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LISTINGS = ".index.json"
"""Of files of weights: which tensor is where, and no state."""


@dataclass(slots=True)
class Beside:
    """What of it differs, and what could not be compared."""

    differing: list[tuple[str, str]] = field(default_factory=list)
    """What differs at which place, and the file."""
    unread: list[str] = field(default_factory=list)


def beside(reference: Source | None, candidate: Source | None) -> Beside:
    """What files hold beside tensors, held against each other file by file; nothing is raised."""
    found = Beside()
    if reference is None or candidate is None:
        found.unread.append("a ledger keeps no settings of an optimizer, no schedules and no random states")
        return found
    own, theirs = _files(reference), _files(candidate)
    if len(own) == len(theirs) == 1:
        theirs = dict(zip(own, theirs.values(), strict=True))
    alike = reference.catalog.format == candidate.catalog.format
    if not alike and (own or theirs):
        forms = f"{reference.catalog.format} and {candidate.catalog.format}"
        found.unread.append(f"schedules, random states and epochs, which {forms} keep each in another way")
        return found
    for name in dict.fromkeys((*own, *theirs)):
        if name in own and name in theirs:
            _compare(found, (reference, own[name]), (candidate, theirs[name]))
        else:
            _lone(found, name, "reference" if name in own else "candidate", reference, candidate)
    if any(file.name.endswith(".distcp") for file in candidate.catalog.files):
        found.unread.append("objects of a distributed checkpoint other than groups and counts")
    return found


def _files(source: Source) -> dict[str, File]:
    """Files that hold more than tensors, by their names within the step."""
    catalog = source.catalog
    return {
        file.name.removeprefix(f"{catalog.path}/"): file for file in catalog.files
        if file.state is FileState.PRESENT and not file.name.endswith(_LISTINGS)
        and (file.container.startswith("torch-") or file.name.endswith((".json", ".pth", ".pkl")))
        and not file.name.endswith("zarr.json")
    }  # fmt: skip


def _lone(found: Beside, name: str, side: str, reference: Source, candidate: Source) -> None:
    if reference.catalog.mesh == candidate.catalog.mesh:
        found.differing.append((f"{name} is there in the {side} alone", name))
    else:
        found.unread.append(f"{name}, which the {side} alone has: ranks are others")


def _compare(found: Beside, left: tuple[Source, File], right: tuple[Source, File]) -> None:
    (own_source, own), (other_source, theirs) = left, right
    short = theirs.name.rpartition("/")[2]
    try:
        with own_source.store.open(own.name) as handle, other_source.store.open(theirs.name) as other:
            walk = _Walk(_Side(handle, own_source, own), _Side(other, other_source, theirs))
            found.differing += [(text, short) for text in told(walk.differing(_content(handle), _content(other)))]
    except (DamagedError, UnsupportedError, LimitError, StorageError) as error:
        found.unread.append(f"{short}: {error}")
        return
    found.unread += [f"{short}: {text}" for text in walk.unread]


def _content(handle: Handle) -> Any:
    if handle.entry.name.endswith(".json"):
        return read_json(handle, unique_keys=False)
    return read_torch_file(handle).tree


def told(differing: Iterator[tuple[str, str]]) -> list[str]:
    """Differences in words: those whose places differ in numbers alone once, with how many there are.

    >>> told(iter([("a.0.lr", "1 against 2"), ("a.1.lr", "3 against 4"), ("epoch", "1 against 0")]))
    ['a.0.lr 1 against 2 (and 1 more of the kind)', 'epoch 1 against 0']
    """
    kinds: dict[str, list[str]] = {}
    for place, text in differing:
        kinds.setdefault(_NUMBER.sub("{n}", place), []).append(f"{place} {text}")
    texts = [
        each[0] + (f" (and {len(each) - 1:,} more of the kind)" if len(each) > 1 else "") for each in kinds.values()
    ]
    return texts[:FEW] + ([f"{len(texts) - FEW:,} more places"] if len(texts) > FEW else [])


class _Side:
    """One file, and which of its bytes are tensors that are compared anyway."""

    def __init__(self, handle: Handle, source: Source, file: File) -> None:
        self.handle = handle
        pieces, catalog = source.catalog.pieces, source.catalog
        number = catalog.files.index(file)
        rows = [row for row in (pieces.file == number).nonzero()[0].tolist()
                if catalog.tensors[int(pieces.tensor[row])].role in (*COMPARED, Role.PADDING)]  # fmt: skip
        self.compared = sorted(int(pieces.offset[row]) for row in rows)

    def holds(self, tensor: StoredTensor) -> bool:
        """Whether a tensor is compared as a tensor."""
        at = bisect_left(self.compared, tensor.offset)
        return at < len(self.compared) and self.compared[at] < tensor.offset + max(1, tensor.num_spanned)

    def bytes_of(self, tensor: StoredTensor) -> bytes | None:
        """The content of a small tensor; None of one that is large or can't be read."""
        if not tensor.contiguous or tensor.num_spanned > MOST_BYTES:
            return None
        try:
            return bytes(read_bytes(self.handle, tensor.offset, tensor.num_spanned))
        except (ShortReadError, StorageError):
            return None


class _Walk:
    """Two trees, walked through together."""

    def __init__(self, own: _Side, theirs: _Side) -> None:
        self.sides = own, theirs
        self.left, self.tensors = MOST_VALUES, MOST_TENSORS
        self.unread: list[str] = []

    def differing(self, own: Any, theirs: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
        """Places, and in words what differs there."""
        self.left -= 1
        if self.left < 0 or depth > MAX_DEPTH:
            if not self.unread:
                self.unread.append("more values than are compared")
            return
        if isinstance(own, StoredTensor) and isinstance(theirs, StoredTensor):
            yield from self._tensors(own, theirs, place)
            return
        inside = _inside(own), _inside(theirs)
        if inside[0] is None or inside[1] is None:
            if inside != (None, None) or isinstance(own, StoredTensor) or isinstance(theirs, StoredTensor):
                yield place, "is of another kind"
            elif not _same(own, theirs):
                yield place, _against(own, theirs)
            return
        for key in dict.fromkeys((*inside[0], *inside[1])):
            if _is_incidental(key, depth):
                continue
            at = f"{place}.{_key(key)}" if place else _key(key)
            if key in inside[0] and key in inside[1]:
                yield from self.differing(inside[0][key], inside[1][key], at, depth + 1)
            else:
                side, value = (0, inside[0][key]) if key in inside[0] else (1, inside[1][key])
                if self._says(value, side):
                    yield at, f"is recorded by the {('reference', 'candidate')[side]} alone"

    def _says(self, value: Any, side: int, depth: int = 0) -> bool:
        """Whether there is something in it beside tensors that are compared."""
        self.left -= 1
        if self.left < 0 or depth > MAX_DEPTH:
            return True
        if isinstance(value, StoredTensor):
            return not self.sides[side].holds(value)
        inside = _inside(value)
        if inside is None:
            return value is not None
        return any(self._says(one, side, depth + 1) for one in inside.values())

    def _tensors(self, own: StoredTensor, theirs: StoredTensor, place: str) -> Iterator[tuple[str, str]]:
        if any(side.holds(tensor) for side, tensor in zip(self.sides, (own, theirs), strict=True)):
            return
        if place.endswith(".step") and own.num_elements == theirs.num_elements == 1:
            # Counts of optimizer steps are recorded, and compared so.
            return
        self.tensors -= 1
        if (own.dtype, own.shape) != (theirs.dtype, theirs.shape):
            yield place, "has another dtype or shape"
            return
        read: list[bytes | None] = [None]
        if self.tensors >= 0:
            read = [side.bytes_of(tensor) for side, tensor in zip(self.sides, (own, theirs), strict=True)]
        if None in read:
            self.unread.append(f"{place}: a tensor that is no part of the model, too large to be read for this")
        elif read[0] != read[1]:
            yield place, "differs"


def _inside(value: Any) -> Mapping[Any, Any] | None:
    """What a container holds by key; None for what is none."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Opaque):
        parts: dict[Any, Any] = {"made by": value.maker, **dict(enumerate(value.arguments)), "state": value.state}
        return {**parts, "items": list(value.items)} if value.items else parts
    return None


def _key(key: Any) -> str:
    return str(key)[:128] if isinstance(key, (str, int, float)) else "(a key that is no name)"


def _is_incidental(key: Any, depth: int) -> bool:
    if not isinstance(key, str):
        return False
    return (not depth and key in _ARGUMENTS) or not _INCIDENTAL.isdisjoint(_WORDS.findall(key[:256].lower()))


def _kind(value: Any) -> int:
    kinds = (type(None),), (bool, int, float), (str,), (bytes, bytearray), (Global,)
    return next((number for number, kind in enumerate(kinds) if isinstance(value, kind)), -1)


def _same(own: Any, theirs: Any) -> bool:
    """Whether two values that hold no others are the same. Of two of no known kind nothing is said."""
    if _kind(own) != _kind(theirs):
        return False
    if _kind(own) < 0:
        return True
    if isinstance(own, float) and isinstance(theirs, float) and math.isnan(own) and math.isnan(theirs):
        return True
    if isinstance(own, str) and ("/" in own or "\\" in own):
        return True
    if isinstance(own, Global):
        return (own.module, own.name) == (theirs.module, theirs.name)
    return bool(own == theirs)


def _against(own: Any, theirs: Any) -> str:
    shown = [_shown(value) for value in (own, theirs)]
    return " against ".join(shown) if all(shown) else "differs"


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        return ""
    return str(value)[:40] if value is None or isinstance(value, (bool, int, float, str)) else ""
