"""Which step to go back to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from auditor.model.finding import Finding, Severity
from auditor.model.run import Commit, StepState
from auditor.timeline.findings import StepJudgements

NEEDED = ("INT", "COV")
"""Families that must have been determined and hold: a step of unknown wholeness is not good."""
NEEDED_IDS = ("INT001", "INT002", "COV001")
"""Of them, those without which nothing is known of a step's wholeness."""


def bad_steps(found: Sequence[Finding], fail_on: Severity) -> set[int]:
    """Steps in which a finding at or above ``fail_on`` shows that is not waived."""
    return {
        location.step
        for finding in found
        if finding.severity >= fail_on and not finding.accepted
        for location in finding.locations
    }


def last_good(
    states: Sequence[StepState], steps: Mapping[int, StepJudgements], found: Sequence[Finding], fail_on: Severity,
    *, serious: AbstractSet[str], strict: bool,
) -> StepState | None:  # fmt: skip
    """The newest committed step without a violation at or above ``fail_on`` and with INT and COV holding.

    ``serious``: ids of invariants whose violation makes a step bad even where they were not asked for.
    """
    bad = bad_steps(found, fail_on)
    for state in reversed(states):
        judged = steps.get(state.step)
        if state.commit is not Commit.COMMITTED or not state.whole or state.step in bad or judged is None:
            continue
        undetermined = [identifier for identifier, judgement in judged.items() if judgement.undetermined]
        unwhole = [key for key, judgement in judged.items() if key.startswith(NEEDED) and judgement.violations]
        if (strict and undetermined) or any(identifier.startswith(NEEDED) for identifier in undetermined):
            continue
        if all(identifier in judged for identifier in NEEDED_IDS) and not set(unwhole) & serious:
            return state
    return None
