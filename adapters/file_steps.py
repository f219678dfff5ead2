"""Which files of a folder are steps by themselves, for formats of which a script chooses the names."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from auditor.adapters.adapter import Folder, Match
from auditor.adapters.step_names import StepName, called_as_optimizers, is_likely, is_part, step_name
from auditor.storage.store import Entry, Store, base_name

_MAX_SNIFFED = 4
"""Files of one series that are looked into until one holds a model."""
MAX_BESIDE = 64
"""Files without a number that are looked into in one folder; folders of more are no checkpoints'."""
_OF_MODULE = re.compile(r"(?:.*\.)?(?:weight|bias|gamma|beta|scale|kernel|running_mean|embedding)|_?flat_param.*")
"""What modules call their parameters."""


class Holds(enum.Enum):
    """What a file holds that may be of a step."""

    MODEL = "a model"
    OPTIMIZER = "the state of an optimizer, and no model"
    OTHER = "something else"


@dataclass(frozen=True, slots=True)
class FileSeries:
    """Files whose names differ in the number of the save, or one without a number."""

    name: str
    """With ``#`` in the place of what differs."""
    entries: Sequence[Entry]
    numbered: bool
    holds: Holds


def file_series(
    folder: Folder, suffixes: tuple[str, ...], holds: Callable[[Folder], Holds | None]
) -> Iterator[FileSeries]:
    """The series in a folder, then each file without a number.

    ``holds``: what a file holds, None where it can't be read. Of a series of which none can, the name decides.
    """
    series: dict[str, list[Entry]] = {}
    for name, entry in folder.files.items():
        if name.endswith(suffixes) and not is_part(name):
            found = step_name(name)
            series.setdefault(found.series if found else name, []).append(entry)
    for name, entries in series.items():
        if name not in folder.files:
            yield FileSeries(name, entries, True, _what_they_hold(entries, holds))
    alone = {name: entries for name, entries in series.items() if name in folder.files}
    for name, entries in alone.items() if len(alone) <= MAX_BESIDE else ():
        yield FileSeries(name, entries, False, _what_they_hold(entries, holds))


def steps_of_files(
    folder: Folder, suffixes: tuple[str, ...], holds: Callable[[Folder], Holds | None]
) -> Iterator[Sequence[Folder]]:
    """Files that hold models, each a step; by series, then each of those without a number."""
    for series in file_series(folder, suffixes, holds):
        if series.holds is Holds.MODEL:
            yield [*map(Folder.of_file, series.entries)]


def _what_they_hold(entries: Sequence[Entry], holds: Callable[[Folder], Holds | None]) -> Holds:
    """What the first ones hold that can be read."""
    found = None
    for entry in entries[:_MAX_SNIFFED]:
        held = holds(Folder.of_file(entry))
        if held in (Holds.MODEL, Holds.OPTIMIZER):
            return held
        found = found or held
    name = base_name(entries[0].name)
    lost = Holds.OPTIMIZER if called_as_optimizers(name) else Holds.MODEL if is_likely(name) else Holds.OTHER
    return found or lost


def are_of_module(names: Iterable[str]) -> bool:
    """Whether tensors are called as a module's parameters are.

    Data sets and caches are dictionaries of tensors, too, but hardly any is called a weight.
    """
    return any(map(_OF_MODULE.fullmatch, names))


def matched(number: StepName | None, recorded: int | None, reason: str, *, unread: bool) -> Match:
    """The step as recorded, else as the name has it; without either it is apart from all others.

    ``unread``: whether nothing could be read of what would record it.
    """
    told = number.number if number else None
    if recorded is None and told is None:
        return Match(0, f"{reason}; nothing tells a step", unread=unread, apart=True)
    if recorded is None:
        assert told is not None
        return Match(told, f"{reason}; its step is the number in its name", numbered=told, unread=unread)
    by_name = None if number is None or number.of_epoch else told
    return Match(recorded, f"{reason}; it records step {recorded}", numbered=by_name)


def step_of_file(store: Store, folder: Folder) -> StepName | None:
    """The step that a file's name tells, else that of the folder in which it lies."""
    (name,) = folder.files
    above, _, own = f"{store.location}/{folder.path}".rstrip("/").rpartition("/")
    number = step_name(name or own)
    # A folder called 2024 says nothing of a file in it.
    return number if number or base_name(above).isdecimal() else step_name(base_name(above), strict=True)
