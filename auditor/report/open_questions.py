"""What is undetermined, one line a cause: a lost file leaves dozens of invariants without an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from auditor.reports import RunReport

OF_LOST_FILES = ("INT001", "INT002", "INT004")
"""Whose violation says that files of a step lack or can't be read."""
FEWEST_FOLDED = 4
"""Fewer of them are told one by one."""


def open_lines(run: RunReport, *, folded: bool = True) -> Iterator[str]:
    """Lines without indent, each of which ends with the reason.

    ``folded``: what is undetermined in no other step than one that lost files, or that is judged by such a one, is
    told in one line.
    """
    lost = [step.state.step for step in run.steps if any(_violated(step.judgements, name) for name in OF_LOST_FILES)]
    numbers = sorted(step.state.step for step in run.steps)
    touched = {*lost, *(after for before, after in pairwise(numbers) if before in lost)}
    by_lost: list[str] = []
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    told = sorted(run.undetermined().items())
    for (identifier, reason), count in told:
        steps = run.steps_undetermined(identifier, reason)
        if folded and len(told) >= FEWEST_FOLDED and touched.issuperset(steps) and len(run.steps) > len(touched):
            by_lost.append(identifier)
        else:
            by_reason[reason, _in_steps(run, steps)].append(f"{identifier}: {count:,}")
    for (reason, where), counts in by_reason.items():
        yield f"{', '.join(counts)}{where} · {reason}"
    if by_lost:
        names = list(dict.fromkeys(by_lost))
        few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"{few} · {_by_files_of(lost)} (--verbose lists them)"


def _violated(judgements: object, identifier: str) -> bool:
    judged = judgements.get(identifier) if isinstance(judgements, dict) else None
    return bool(judged and judged.violations)


def _by_files_of(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"files of step {steps[0]} are lost or damaged"
    return f"files of {len(steps)} steps are lost or damaged"


def _in_steps(run: RunReport, steps: Sequence[int]) -> str:
    if len(run.steps) == 1:
        return ""
    if len(steps) == len(run.steps):
        return " a step"
    return f" in step {steps[0]}" if len(steps) == 1 else f" a step in {len(steps)} of {len(run.steps)} steps"
