"""From reports to one word and one exit code."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from auditor.invariants.invariant import FAMILIES
from auditor.model.finding import Finding, Outcome, Severity
from auditor.model.run import Commit
from auditor.reports import Report, RunReport, StepReport
from auditor.settings import Settings
from auditor.timeline.last_good import bad_steps


class ExitCode(enum.IntEnum):
    """What a script can rely on."""

    HOLDS = 0
    VIOLATED = 1
    USAGE = 2
    INCOMPLETE = 3
    NOTHING = 4
    INTERNAL = 5
    CHANGED = 6
    LOCKED = 11
    INTERRUPTED = 130


PRECEDENCE = (
    ExitCode.INTERRUPTED, ExitCode.INTERNAL, ExitCode.LOCKED, ExitCode.USAGE, ExitCode.CHANGED, ExitCode.VIOLATED,
    ExitCode.INCOMPLETE, ExitCode.NOTHING, ExitCode.HOLDS,
)  # fmt: skip
"""Where several apply, the first of these."""


def exit_codes(run: RunReport, settings: Settings) -> list[ExitCode]:
    """All codes that apply to one run, first the one that wins."""
    found = {ExitCode.HOLDS}
    if failing(run.findings, settings):
        found.add(ExitCode.VIOLATED)
    if settings.strict and run.undetermined():
        found.add(ExitCode.VIOLATED)
    if (
        run.unrecognised
        or run.unwritten
        or any(step.failures for step in run.steps)
        or _selected_in_vain(run, settings)
    ):
        found.add(ExitCode.INCOMPLETE)
    if run.vanished or any(step.changed for step in run.steps):
        found.add(ExitCode.CHANGED)
    if run.steps and all(step.state.commit is Commit.IN_PROGRESS for step in run.steps):
        # Nothing was audited: a cron job must not take that for sound.
        found.add(ExitCode.NOTHING)
    return ordered(found)


def ordered(codes: Iterable[ExitCode]) -> list[ExitCode]:
    """By precedence, each once."""
    return sorted(set(codes), key=PRECEDENCE.index)


def exit_code(report: Report) -> ExitCode:
    """The code of the whole audit."""
    return ordered(code for run in report.runs for code in exit_codes(run, report.settings))[0]


def failing(found: Iterable[Finding], settings: Settings) -> list[Finding]:
    """Findings that make the audit fail."""
    return [finding for finding in found if finding.severity >= settings.fail_on and not finding.accepted]


def counted(found: Sequence[Finding]) -> dict[str, int]:
    """Findings that are not accepted by severity, and the accepted ones by who accepted them."""
    counts = {severity.name.lower(): 0 for severity in sorted(Severity, reverse=True)} | {"waived": 0, "in_baseline": 0}
    for finding in found:
        accepted = "waived" if finding.waived else "in_baseline" if finding.in_baseline else ""
        counts[accepted or finding.severity.name.lower()] += 1
    return counts


def _selected_in_vain(run: RunReport, settings: Settings) -> bool:
    """Whether something was asked for by name of which nothing could be determined."""
    for name in settings.select:
        wanted = name.upper()
        members = [item.id for item in run.chosen if wanted in (item.id, item.family)]
        counts = [run.counts(identifier) for identifier in members]
        determined = any(count[Outcome.HOLDS] or count[Outcome.VIOLATED] for count in counts)
        if (wanted in FAMILIES or members) and not determined:
            return True
    return False


def verdict(run: RunReport, settings: Settings) -> str:
    """One word for a run: holds, violated, undetermined, incomplete."""
    codes = exit_codes(run, settings)
    if failing(run.findings, settings):
        return "violated"
    if ExitCode.INCOMPLETE in codes or ExitCode.CHANGED in codes:
        return "incomplete"
    determined = any(judged.num_holds for step in run.steps for judged in step.judgements.values())
    doubtful = settings.strict and bool(run.undetermined())
    return "holds" if determined and not doubtful else "undetermined"


def step_verdict(step: StepReport, run: RunReport, settings: Settings) -> str:
    """One word for a step; also ``in progress``."""
    if step.state.commit is Commit.IN_PROGRESS:
        return "in progress"
    if step.state.step in bad_steps(run.findings, settings.fail_on):
        return "violated"
    if step.changed or step.failures:
        return "incomplete"
    return "holds" if any(judged.num_holds for judged in step.judgements.values()) else "undetermined"
