"""What `last-good` says beside the one path: why newer steps are not good, and what the answer rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from auditor.errors import UsageError
from auditor.invariants.integrity_runs import number_in
from auditor.model.finding import Judgement
from auditor.report.open_questions import named, unjudged
from auditor.reports import Report, RunReport
from auditor.settings import Settings

MAX_REJECTED = 5
"""Lines of one sort; how many more there are is said."""


def run_of(report: Report) -> RunReport:
    """The one run of which the last good step is asked for.

    Raises:
        UsageError: there are several.
    """
    runs = report.asked_for
    if len(runs) > 1:
        names = ", ".join(run.path or "." for run in runs)
        raise UsageError(f"{report.location} holds {len(runs)} runs; name one of them: {names}")
    return runs[0]


def last_good_lines(run: RunReport, settings: Settings) -> Iterator[str]:
    """Lines for standard error."""
    good = run.last_good
    if good is None:
        yield f"no step is good among the {len(run.steps)} looked at"
    yield from _few(f"not step {step}: {reason}" for step, reason in run.rejected)
    yield from _few(_newer_unaudited(run))
    yield from _few(_milder(run, settings))
    if good is not None and (silent := unjudged(run)):
        yield f"not judged: {named(silent)}"
    if good is not None and settings.tensors:
        yield f"only tensors {settings.tensors} were looked at"
    mine = next((step for step in run.steps if good is not None and step.state == good), None)
    yield from _undetermined(mine.judgements if mine else {})
    for finding in run.findings:
        for interval in finding.intervals:
            if good is not None and interval.first_bad < good.step:
                healed = f"healed at {interval.healed}" if interval.healed is not None else "not healed"
                span = f"steps {interval.first_bad} to {interval.last_bad}"
                yield f"before it: {finding.id} {finding.message}, {span}, {healed}"


def _undetermined(judgements: Mapping[str, Judgement]) -> Iterator[str]:
    """A line a reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for identifier, judged in sorted(judgements.items()):
        for reason in judged.undetermined:
            by_reason[reason].append(identifier)
    for reason, identifiers in by_reason.items():
        yield f"undetermined: {named(identifiers)}: {reason}"


def _few(lines: Iterable[str]) -> Iterator[str]:
    """The first of the lines, and how many more there are."""
    known = list(lines)
    yield from known[:MAX_REJECTED]
    if len(known) > MAX_REJECTED:
        yield f"and {len(known) - MAX_REJECTED} more"


def _newer_unaudited(run: RunReport) -> Iterator[str]:
    """What was not audited and is newer by its name than the answer, newest first; also what has no number."""
    good = run.last_good
    # Names count as names do: a folder may be called after an epoch, its files record steps.
    floor = -1 if good is None else number_in(good.path, good.step)
    reasons = {**run.unrecognised, **dict.fromkeys(run.vanished, "it was listed, and gone before it was looked into")}
    numbers = {path: number_in(path, 1 << 62) for path in reasons}
    for path in sorted(numbers, key=lambda path: (-numbers[path], path)):
        if numbers[path] > floor:
            yield f"not audited: {path}: {reasons[path]}"


def _milder(run: RunReport, settings: Settings) -> Iterator[str]:
    """Findings that show in the answer and don't keep it from being good."""
    for finding in run.findings:
        places = [place for place in finding.locations if run.last_good and place.step == run.last_good.step]
        if places and not finding.accepted and finding.severity < settings.fail_on:
            yield f"in it: {finding.id} {finding.message} ({finding.severity.name.lower()})"
