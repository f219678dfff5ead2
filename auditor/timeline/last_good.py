"""Which step to go back to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from auditor.model.finding import Finding, Judgement, Severity
from auditor.model.run import Commit, StepState
from auditor.timeline.findings import StepJudgements

NEEDED = ("INT", "COV")
"""Families that must have been determined and hold: a step of unknown wholeness is not good."""
NEEDED_IDS = ("INT001", "INT002", "COV001")
"""Of them, those without which nothing is known of a step's wholeness."""


ABOUT_THE_RUN = ("INT003", "INT008", "INT016")
"""Findings about pointers: no step is bad because of them (a pointed-at step that lacks files is so by INT001)."""


def bad_steps(found: Sequence[Finding], fail_on: Severity) -> dict[int, Finding]:
    """Steps in which a finding at or above ``fail_on`` shows that is not accepted, with the first such finding."""
    bad: dict[int, Finding] = {}
    for finding in _counting(found, fail_on):
        for location in finding.locations:
            bad.setdefault(location.step, finding)
    return bad


def _counting(found: Sequence[Finding], fail_on: Severity) -> Iterator[Finding]:
    for finding in found:
        if finding.severity >= fail_on and not finding.accepted and finding.id not in ABOUT_THE_RUN:
            yield finding


def _not_over(step: int, found: Sequence[Finding], fail_on: Severity) -> str:
    """Which fault of an earlier step nothing was determined of since; empty where there is none.

    What a tensor did since a bad save can't be told from that save: the fault may have stayed, or gone.
    """
    for finding in _counting(found, fail_on):
        for interval in finding.intervals:
            if interval.first_bad < step and (interval.healed is None or step < interval.healed):
                return f"{finding.id} {finding.name} of step {interval.first_bad} is not known to be over"
    return ""


def last_good(
    states: Sequence[StepState], steps: Mapping[int, StepJudgements], found: Sequence[Finding], fail_on: Severity,
    *, serious: AbstractSet[str], strict: bool,
) -> tuple[StepState | None, list[tuple[int, str]]]:  # fmt: skip
    """The newest good step, and why each newer one is not: committed, whole, judged, and without a violation.

    Of two folders that hold one step it is that which is called by the step's number, not ``last`` nor ``20.bak``.
    ``serious``: ids of invariants whose violation makes a step bad even where they were not asked for.
    """
    bad = bad_steps(found, fail_on)
    rejected: list[tuple[int, str]] = []
    newest_first = states[::-1]
    for state in sorted(newest_first, key=_preference):
        reason = _why_not(state, steps.get(state.step), bad.get(state.step), serious, fail_on, strict=strict)
        reason = reason or _not_over(state.step, found, fail_on)
        if not reason:
            return state, rejected
        rejected.append((state.step, reason))
    return None, rejected


def _preference(state: StepState) -> tuple[int, bool, int]:
    return -state.step, not _has_its_own_name(state), len(state.path)


def _has_its_own_name(state: StepState) -> bool:
    return re.search(rf"(?<!\d)0*{state.step}(\.[a-z]\w*)?$", state.path) is not None


def _why_not(
    state: StepState, judged: StepJudgements | None, finding: Finding | None, serious: AbstractSet[str],
    fail_on: Severity, *, strict: bool,
) -> str:  # fmt: skip
    """Why a step is not good; empty where it is."""
    if state.deleted:
        return "it is deleted; the ledger alone knows it"
    if state.commit is not Commit.COMMITTED:
        return f"it is {state.commit.value}"
    if finding is not None:
        return f"{finding.id} {finding.name}"
    if not state.whole:
        return f"it lacks {len(state.missing)} files"
    judged = judged or {}
    unknown = [identifier for identifier in NEEDED_IDS if identifier not in judged]
    if unknown:
        return f"{', '.join(unknown)} was not judged: a higher --level does"
    violated = [
        key
        for key, item in judged.items()
        if key.startswith(NEEDED) and key not in ABOUT_THE_RUN and key in serious and _fails(item, fail_on)
    ]
    unclear = [key for key, item in judged.items() if item.undetermined and (strict or key.startswith(NEEDED))]
    if violated or unclear:
        return f"{(violated or unclear)[0]} is {'violated' if violated else 'undetermined'}"
    return ""


def _fails(judged: Judgement, fail_on: Severity) -> bool:
    """Whether a violation is as severe as ``fail_on``; those that state no severity have their invariant's."""
    return any(violation.severity is None or violation.severity >= fail_on for violation in judged.violations)
