"""What is undetermined, one line a cause: a lost file leaves dozens of invariants without an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from auditor.invariants.registry import find
from auditor.invariants.related import UNREAD
from auditor.reports import RunReport, StepReport

OF_LOST_FILES = ("INT001", "INT002", "INT004")
"""Whose violation says that files of a step lack or can't be read."""
FEWEST_FOLDED = 4
"""Fewer of them are told one by one."""
MAX_NAMED = 4
"""Invariants that one line names."""


@dataclass(frozen=True, slots=True)
class _Open:
    """One invariant that is undetermined for one reason."""

    identifier: str
    reason: str
    steps: Sequence[int]
    count: int
    """Of subjects, the most in any step."""

    @property
    def counted(self) -> str:
        return f"{titled(self.identifier)}: {self.count:,}"


def open_lines(run: RunReport, *, folded: bool = True) -> Iterator[str]:
    """Lines without indent, each of which ends with the reason.

    ``folded``: what is undetermined in no other step than one that lost files, or that is judged by such a one, is
    told in one line; where all steps are such, what is so for bytes that were not read.
    """
    lost = [step for step in run.steps if any(_subjects(step, name) for name in OF_LOST_FILES)]
    told = [
        _Open(identifier, reason, run.steps_undetermined(identifier, reason), count)
        for (identifier, reason), count in sorted(run.undetermined().items())
    ]
    by_lost = _left_open_by(lost, run, told) if folded else []
    by_reason: dict[tuple[str, str], list[_Open]] = defaultdict(list)
    for one in told:
        if one not in by_lost:
            by_reason[one.reason, _in_steps(run, one.steps)].append(one)
    for (reason, where), members in by_reason.items():
        shown = members[:MAX_NAMED] if folded else members
        more = f" and {len(members) - len(shown)} more" if len(members) > len(shown) else ""
        listed = " (--verbose lists them)" if more else ""
        yield f"{', '.join(one.counted for one in shown)}{more}{where}{listed} · {reason}"
    if by_lost:
        names = list(dict.fromkeys(one.identifier for one in by_lost))
        tensors = max(one.count for one in by_lost)
        few = ", ".join(names[:MAX_NAMED])
        few += f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        yield (
            f"{len(names)} invariants ({few}) of up to {tensors:,} tensors · {_lost_files(lost)} (--verbose lists them)"
        )


def _left_open_by(lost: Sequence[StepReport], run: RunReport, told: Sequence[_Open]) -> list[_Open]:
    """What is undetermined since files are lost, where that is much."""
    damaged = [step.state.step for step in lost]
    numbers = sorted(step.state.step for step in run.steps)
    touched = {*damaged, *(after for before, after in pairwise(numbers) if before in damaged)}
    alone = len(run.steps) == len(touched)
    found = [one for one in told if touched.issuperset(one.steps) and not (alone and one.reason != UNREAD)]
    return found if len(found) >= FEWEST_FOLDED else []


def titled(identifier: str) -> str:
    """An invariant by its id and its name."""
    item = find(identifier)
    return f"{identifier} {item.name}" if item else identifier


def named(identifiers: Sequence[str]) -> str:
    """Invariants by their ids; many by their number."""
    return ", ".join(identifiers) if len(identifiers) <= 2 * MAX_NAMED else f"{len(identifiers)} invariants"


def unjudged(run: RunReport) -> list[str]:
    """Invariants about which the audit says nothing, but for checksums, which the level ``full`` alone verifies."""
    return [name for name in run.unjudged() if name != "INT010"]


def _subjects(step: StepReport, identifier: str) -> list[str]:
    judged = step.judgements.get(identifier)
    return [violation.subject for violation in judged.violations] if judged else []


def _lost_files(lost: Iterable[StepReport]) -> str:
    """Which files lack or can't be read, the first by its name."""
    files = [(step.state.step, file) for step in lost for name in OF_LOST_FILES for file in _subjects(step, name)]
    files = list(dict.fromkeys(files))
    step, first = files[0]
    others = f" and {len(files) - 1} more files" if len(files) > 2 else " and 1 more file" if files[1:] else ""
    return f"{first} of step {step}{others}: missing or damaged"


def _in_steps(run: RunReport, steps: Sequence[int]) -> str:
    if len(run.steps) == 1:
        return ""
    if len(steps) == len(run.steps):
        return " a step"
    return f" in step {steps[0]}" if len(steps) == 1 else f" a step in {len(steps)} of {len(run.steps)} steps"
