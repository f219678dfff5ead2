"""Which files of a folder are steps by themselves, for formats of which a script chooses the names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from auditor.adapters.adapter import Folder, Match
from auditor.adapters.step_names import StepName, is_likely, is_part, step_name
from auditor.storage.store import Entry, Store, base_name

_MAX_SNIFFED = 4
"""Files of one series that are looked into until one holds a model."""
MAX_BESIDE = 64
"""Files without a number that are looked into in one folder; folders of more are no checkpoints'."""
_OF_MODULE = re.compile(r"(?:.*\.)?(?:weight|bias|gamma|beta|scale|kernel|running_mean|embedding)|_?flat_param.*")
"""What modules call their parameters."""


def series_of_models(
    folder: Folder, suffixes: tuple[str, ...], holds_model: Callable[[Folder], bool | None]
) -> Iterator[Sequence[Entry]]:
    """Files that hold models: those whose names differ in the number of the save, then each of those without one.

    ``holds_model``: whether a file does, None where it can't be read. Of a series of which none can, the name decides.
    """
    series: dict[str, list[Entry]] = {}
    for name, entry in folder.files.items():
        if name.endswith(suffixes) and not is_part(name):
            found = step_name(name)
            series.setdefault(found.series if found else name, []).append(entry)
    alone = [entries for name, entries in series.items() if name in folder.files]
    numbered = [entries for name, entries in series.items() if name not in folder.files]
    for entries in [*numbered, *(alone if len(alone) <= MAX_BESIDE else ())]:
        if _any_holds(entries, holds_model):
            yield entries


def _any_holds(entries: Sequence[Entry], holds_model: Callable[[Folder], bool | None]) -> bool:
    lost = True
    for entry in entries[:_MAX_SNIFFED]:
        held = holds_model(Folder.of_file(entry))
        if held:
            return True
        lost = lost and held is None
    return lost and is_likely(base_name(entries[0].name))


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
