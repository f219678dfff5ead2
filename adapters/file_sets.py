"""Files of one folder that are a step together, though scripts number each kind by itself.

    ckpt_10.pt, optim_10.pt     a model, and the state of its optimizer: joined wherever the numbers are the same
    G_1000.pth, D_1000.pth      two models: joined if they were saved at the same steps, but for the newest

Series whose names differ in a number that counts no saves (``seed1_step_10.pt``, ``seed2_step_10.pt``) are of runs of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from auditor.adapters.adapter import Folder
from auditor.adapters.file_steps import FileSeries, Holds
from auditor.adapters.step_names import stem, step_name
from auditor.storage.store import Entry, base_name

AVERAGE = "ema"
"""What a file of averaged weights is called: the step is called as another is."""
MAX_SERIES = 256
"""Series of one folder that are held against each other."""
MAX_TOGETHER = 16
"""Series that are one run: a GAN has four, with their optimizers."""
_NUMBER = re.compile(r"[A-Za-z]*[-_.]?\d+", re.A)
_WORD = re.compile(r"[A-Za-z]+", re.A)


@dataclass(frozen=True, slots=True)
class _Saves:
    """One series, by the number of the save."""

    name: str
    by_number: Mapping[int, Entry]
    of_run: tuple[str, ...]
    """Numbers in its name that are the same in all its files."""


def joined(series: Sequence[FileSeries]) -> Iterator[Sequence[Folder]]:
    """The steps that numbered files make up, by run."""
    saves = {one.name: _saves(one) for one in series}
    models = [one for one in series if one.holds is Holds.MODEL]
    many = len(series) > MAX_SERIES
    sets: list[list[_Saves]] = []
    for one in models:
        own = saves[one.name]
        if own is None or many:
            yield [*map(Folder.of_file, one.entries)]
        elif found := next((of for of in sets if len(of) < MAX_TOGETHER and _are_together(of[0], own)), None):
            found.append(own)
        else:
            sets.append([own])
    states = [own for one in series if one.holds is Holds.OPTIMIZER and (own := saves[one.name])]
    for of in sets:
        of.sort(key=lambda one: (AVERAGE in _WORD.findall(one.name.lower()), one.name))
        beside = [own for own in states if [other for other in sets if _is_beside(own, other[0])] == [of]]
        yield [*_steps(of, beside[: MAX_TOGETHER - len(of)])]


def _saves(series: FileSeries) -> _Saves | None:
    """A series by its numbers; None where some files have none, or the same."""
    found: dict[int, Entry] = {}
    for entry in series.entries:
        told = step_name(base_name(entry.name))
        if told is None or told.number is None or found.setdefault(told.number, entry) is not entry:
            return None
    return _Saves(series.name, found, tuple(_NUMBER.findall(stem(series.name))))


def _are_together(one: _Saves, other: _Saves) -> bool:
    """Whether two series of models were saved at the same steps. One may be lost, and the newest on its way."""
    common, apart = one.by_number.keys() & other.by_number.keys(), one.by_number.keys() ^ other.by_number.keys()
    newest = max((*one.by_number, *other.by_number))
    return one.of_run == other.of_run and bool(common) and len(apart - {newest}) <= (len(common) > 1)


def _is_beside(state: _Saves, model: _Saves) -> bool:
    return state.of_run == model.of_run and bool(state.by_number.keys() & model.by_number.keys())


def _steps(models: Sequence[_Saves], states: Sequence[_Saves]) -> Iterator[Folder]:
    numbers = sorted({number for one in models for number in one.by_number})
    # States may be saved more rarely than weights: those that lack once lack.
    regular = [one for one in states if len({*numbers} - one.by_number.keys()) <= 1 < len(numbers) - 1]
    for number in numbers:
        entries = [one.by_number[number] for one in (*models, *states) if number in one.by_number]
        absent = [one for one in (*models, *regular) if number not in one.by_number]
        lacks = [name for one in absent if (name := _named_as(one.name, entries[0]))]
        yield Folder.of_files(entries, lacks) if len(models) + len(states) > 1 else Folder.of_file(entries[0])


def _named_as(series: str, entry: Entry) -> str:
    """What a file of ``series`` is called that was saved with another; empty where more than a number differs."""
    name = base_name(entry.name)
    head, _, tail = (told.series if (told := step_name(name)) else name).partition("#")
    if series.count("#") != 1 or "#" in tail or not name.endswith(tail):
        return ""
    return series.replace("#", name[len(head) : len(name) - len(tail)])


def labels(names: Sequence[str]) -> list[str]:
    """What tells apart models that were saved together: the words that not all of their files' names have.

    >>> labels(["netD_epoch_3.pth", "netG_epoch_3.pth"]), labels(["ema_model_3.pt", "model_3.pt"]), labels(["a_3.pt"])
    (['netD', 'netG'], ['ema', ''], [''])
    """
    words = [_WORD.findall(stem(name)) for name in names]
    common = set.intersection(*map(set, words)) if words else set()
    found = ["_".join(word for word in own if word not in common) for own in words]
    if len({*found}) == len(found):
        return found
    return [stem(told.series if (told := step_name(name)) else name) for name in names]
