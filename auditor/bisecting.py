"""An audit of few steps of a run: those that bracket the onset of what the newest one shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from auditor.model.run import Commit
from auditor.reports import StepReport
from auditor.timeline.bisection import bisect
from auditor.timeline.onset import Mark


def few_steps(count: int, look: Callable[[int], StepReport]) -> tuple[list[StepReport], str]:
    """The steps that were looked at, in order, and what is to be said of that.

    ``count``: how many there are; ``look`` audits the one at a position.
    """
    found: dict[int, StepReport] = {}

    def marks(at: int) -> Mapping[str, Mark]:
        if at not in found:
            found[at] = look(at)
        return _marks(found[at])

    if count:
        marks(count - 1)
        in_progress = found[count - 1].state.commit is Commit.IN_PROGRESS
        bisect(max(1, count - 1) if in_progress else count, marks)
    steps = [found[at] for at in sorted(found)]
    told = (
        f"{len(steps)} of {count} steps were looked at: for every fault of the newest one a border of good and bad. "
        "Not seen are faults that healed before, and what lies between steps that agree"
    )
    return steps, told


def _marks(step: StepReport) -> dict[str, Mark]:
    """What a step says of every invariant."""
    return {
        identifier: Mark.BAD if judged.violations else Mark.GOOD if judged.num_holds else Mark.UNKNOWN
        for identifier, judged in step.judgements.items()
    }
