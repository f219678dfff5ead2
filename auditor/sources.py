"""What discovery finds: runs, and their steps with the adapter that reads each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from auditor.adapters.adapter import Adapter, Declined, Folder, Match, Pointer
from auditor.adapters.step_names import step_name
from auditor.storage.store import base_name


@dataclass(frozen=True, slots=True)
class StepSource:
    """A recognised step."""

    folder: Folder
    adapter: Adapter
    match: Match

    @property
    def order(self) -> tuple[int, str]:
        """By which the steps of a run are sorted."""
        return self.match.step, self.folder.path


@dataclass(slots=True)
class RunSource:
    """A folder whose direct children (or itself) are steps, or a series of files that are."""

    path: str
    steps: list[StepSource]
    pointers: list[Pointer] = field(default_factory=list)
    unrecognised: dict[str, str] = field(default_factory=dict)
    """What may be a checkpoint but was not recognised or readable, with the reason."""
    vanished: list[str] = field(default_factory=list)
    """Folders that were listed and gone when they were looked into."""
    beside: bool = False
    """Whether it lies in another run's folder (``last.ckpt`` beside the steps, a folder ``best``): it is audited, and
    is not what is meant where one run is asked for."""

    @property
    def order(self) -> str:
        """By what its steps are ordered, where the framework neither recorded it nor named them so."""
        if all(map(is_unordered, self.steps)):
            return "nothing tells its step: it is compared with no other"
        return "by the numbers in their names" if any(one.match.apart for one in self.steps) else ""


@dataclass(slots=True)
class Nearest:
    """What came nearest to being a checkpoint."""

    nearness: float = -1.0
    text: str = ""

    def consider(self, path: str, declined: dict[str, Declined]) -> None:
        """Keep a verdict if it is nearer."""
        for name, verdict in declined.items():
            if verdict.nearness > self.nearness:
                self.nearness, self.text = verdict.nearness, f"{path or '.'} as {name}: {verdict.reason}"


def pattern_of(path: str, *, whole: bool = False) -> str:
    """A folder's or file's name, or its ``whole`` path, with its numbers taken out."""
    return re.sub(r"\d+", "#", path if whole else base_name(path))


def asked_for(runs: Sequence[RunSource]) -> list[RunSource]:
    """Of the runs below a path those that are meant where one run is asked for."""
    return [run for run in runs if not run.beside] or list(runs)


def numbered(steps: Sequence[StepSource]) -> list[StepSource]:
    """The steps of one run in order, by the numbers in their names where those are steps (:attr:`Match.numbered`).

    They are if most files record the step that their names tell: one that records another is then a stale or a copied
    file (INT005). Else names count something else (epochs, saves, from 1 instead of 0), and what is recorded counts;
    a file that can't be read is put where its name has it among the others.
    """
    told = Counter(one.match.numbered == one.match.step for one in steps if one.match.numbered is not None)
    if told[True] > told[False]:
        steps = [
            one if one.match.numbered is None else replace(one, match=replace(one.match, step=one.match.numbered))
            for one in steps
        ]
    told_by = sorted((_number_in(one), one.match.step) for one in steps if not one.match.unread)
    if any(number != step for number, step in told_by):
        steps = [_placed(one, told_by) if one.match.unread else one for one in steps]
    return sorted(steps, key=lambda one: one.order)


def _number_in(source: StepSource) -> int:
    found = step_name(base_name(source.folder.path))
    return -1 if found is None or found.number is None else found.number


def _placed(source: StepSource, others: Sequence[tuple[int, int]]) -> StepSource:
    """A file that can't be read, at the step that the two saves nearest to it lead to.

    ``others``: numbers in names and steps that they stand for, in order.
    """
    number = _number_in(source)
    behind = sum(name < number for name, _ in others)
    at = max(0, min(behind - 1, len(others) - 2))
    (first, low), (second, high) = others[at], others[min(at + 1, len(others) - 1)]
    rate = (high - low) / (second - first) if second > first else 1
    step = max(others[behind - 1][1] + 1 if behind else 0, round(low + rate * (number - first)))
    reason = f"{source.match.reason}, by the saves beside it about step {step}"
    return replace(source, match=replace(source.match, step=step, reason=reason))


def is_unordered(source: StepSource) -> bool:
    """Whether nothing tells of a save when it was made (a folder ``best``)."""
    told = step_name(base_name(source.folder.path), strict=True)
    return source.match.apart and (told is None or told.number is None)


def set_apart(run: RunSource) -> list[RunSource]:
    """Take the saves out of a run of which nobody knows for certain where among the others they belong.

    Where there are no others, numbers in names (``epoch_1``) order them.
    """
    kept = [one for one in run.steps if not one.match.apart]
    if not kept:
        kept = [one for one in run.steps if not is_unordered(one)]
        kept = kept if len({one.match.step for one in kept}) == len(kept) else []
    if not kept and len(run.steps) == 1:
        return []
    others = [one for one in run.steps if one not in kept]
    run.steps = kept
    return [RunSource(one.folder.path, [one], beside=bool(kept)) for one in others]


def of_one_moment(steps: Sequence[StepSource]) -> bool:
    """Whether files are numbered otherwise than by steps, as members of an ensemble are.

    They record one and the same step then, which none of them is named after.
    """
    recorded = {one.match.step for one in steps}
    return len(steps) > 1 and len(recorded) == 1 and all(
        one.match.numbered not in (None, one.match.step) for one in steps
    )  # fmt: skip
