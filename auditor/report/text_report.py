"""The report for a person at a terminal, as lines with rich's markup."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.markup import escape

from auditor.audit import Report, RunReport, StepReport
from auditor.invariants.registry import find
from auditor.model.finding import Finding, Interval, Location, Outcome, Severity
from auditor.model.run import Commit
from auditor.report.text_safety import visible
from auditor.settings import Level
from auditor.verdict import exit_code, verdict

MAX_TENSORS = 8
"""Tensors shown of a finding; the JSON report has all."""
_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_VERDICT_COLOURS = {"holds": "green", "violated": "red", "incomplete": "yellow", "undetermined": "yellow"}


def text_lines(report: Report) -> Iterator[str]:
    """The whole report, line by line."""
    for number, run in enumerate(report.runs):
        if number:
            yield ""
        yield from _run(run, report)
    for waiver in report.expired:
        yield f"[yellow]waiver expired[/] {waiver.id} {safe(waiver.tensor)} on {waiver.until}: {safe(waiver.reason)}"
    yield f"exit code {int(exit_code(report))}"


def safe(text: object) -> str:
    """Anything that came from a file, harmless for terminal and markup."""
    return escape(visible(str(text)))


def _run(run: RunReport, report: Report) -> Iterator[str]:
    name = f"{report.location}/{run.path}".rstrip("/")
    formats = sorted({step.state.format for step in run.steps})
    steps = [step.state.step for step in run.steps]
    yield f"[bold]{safe(name)}[/bold]"
    yield f"  {', '.join(formats)} · {safe(run.mesh)} · {_steps_phrase(steps)}"
    yield f"  {_read_phrase(run)}"
    for finding in run.findings:
        yield ""
        yield from _finding(finding, run)
    yield ""
    yield from _trouble(run)
    yield from _coverage(run)
    word = verdict(run, report.settings)
    good = f"last good step {run.last_good.step}" if run.last_good else "no good step"
    if run.last_good and run.findings:
        good += f" ({safe(run.last_good.path or '.')})"
    yield f"  [bold {_VERDICT_COLOURS[word]}]{word}[/] · {good}"


def _steps_phrase(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps {steps[0]} … {steps[-1]}" if steps else "no step"


def _read_phrase(run: RunReport) -> str:
    levels: dict[Level, list[StepReport]] = defaultdict(list)
    for step in run.steps:
        levels[step.level].append(step)
    if len(levels) == 1:
        phrase = f"level {next(iter(levels)).name.lower()}"
    else:
        phrase = ", ".join(f"level {level.name.lower()} on {len(members)}" for level, members in sorted(levels.items()))
    seen = run.coverage
    again = f", {size(seen.num_bytes_reread)} again for differences or checksums" if seen.num_bytes_reread else ""
    return (
        f"{phrase}: read {size(seen.num_bytes_read)} of {size(seen.num_bytes_total)}{again} · "
        f"{seen.num_tensors:,} tensors in {seen.num_pieces:,} pieces · {run.seconds:.1f} s"
    )


def size(num_bytes: int) -> str:
    """A number of bytes for people."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _finding(finding: Finding, run: RunReport) -> Iterator[str]:
    colour = _COLOURS[finding.severity]
    kind = f" · {finding.difference_class.value}" if finding.difference_class else ""
    accepted = " · waived" if finding.waived else " · in the baseline" if finding.in_baseline else ""
    also = f" · also violates {', '.join(finding.consequences)}" if finding.consequences else ""
    yield f"[bold {colour}]{finding.id} {finding.name}[/]  {finding.severity.name.lower()}{kind}{also}{accepted}"
    yield f"  {safe(finding.message)}{_ranks_phrase(finding, run)}"
    for interval in finding.intervals:
        yield ""
        if interval.last_good is not None or interval.healed is not None or len(run.steps) > 1:
            yield f"  {_interval_phrase(interval)}"
        yield from _onsets(interval)
        yield from _where(finding, interval, run)
    yield ""
    if finding.minority:
        places = ", ".join(map(str, finding.minority))
        yield f"  majority  the others agree; likely wrong: {places} (a majority can be wrong: see `auditor explain`)"
    for cause in finding.likely_causes[:2]:
        yield f"  maybe     {safe(cause.text)} ({safe(cause.source)})"
    back = f"Go back to step {run.last_good.step}. " if run.last_good and finding.severity is Severity.ERROR else ""
    yield f"  next      {back}{safe(finding.hint)}"


def _ranks_phrase(finding: Finding, run: RunReport) -> str:
    """Global ranks of the side that differs from the reference, where they are known and few."""
    places = {location.coordinate for location in finding.locations if location.num_elements_differ is not None}
    ranks = sorted({rank for place in places for rank in run.mesh.global_ranks(place) or ()})
    return f" (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})" if 0 < len(ranks) <= 8 else ""


def _interval_phrase(interval: Interval) -> str:
    since = f"since step [bold]{interval.first_bad}[/bold]"
    before = f"last good {interval.last_good}" if interval.last_good is not None else "no good step before it"
    if interval.healed is not None:
        after = f"healed at {interval.healed}"
    else:
        after = f"still so at {interval.last_bad}" if interval.last_bad != interval.first_bad else "in no later step"
    return f"{since} ({before}), {after}"


def _onsets(interval: Interval) -> Iterator[str]:
    if len(set(interval.onset_by_role.values())) > 1:
        phrase = " · ".join(f"{role} {step}" for role, step in interval.onset_by_role.items())
        yield f"    first seen   {phrase}"
    if len(interval.growth) > 1:
        phrase = " → ".join(f"{amount:.2g}" for _, amount in interval.growth[:8])
        yield f"    largest |Δ|  {phrase}"


def _where(finding: Finding, interval: Interval, run: RunReport) -> Iterator[str]:
    """The first bad step of an interval: its first tensors or files, in model order."""
    here = [location for location in finding.locations if location.step == interval.first_bad]
    yield from _tensors(here) if any(location.tensor for location in here) else _files(here, run)


def _tensors(locations: Sequence[Location]) -> Iterator[str]:
    by_tensor: dict[str, list[Location]] = defaultdict(list)
    for location in locations:
        by_tensor[location.tensor].append(location)
    width = max(len(visible(name)) for name in list(by_tensor)[:MAX_TENSORS])
    for name in list(by_tensor)[:MAX_TENSORS]:
        mine = by_tensor[name]
        # Locations come in order of roles, so the first is the parameter wherever that differs.
        worst = max((x for x in mine if x.role is mine[0].role), key=lambda x: x.max_abs_difference or 0.0)
        others = sorted({x.role.value for x in mine if x.role and x.role is not worst.role})
        also = f"; also {', '.join(others)}" if others else ""
        yield f"    {safe(name)}{' ' * (width - len(visible(name)))}  {_amount(worst)}{also}"
    if len(by_tensor) > MAX_TENSORS:
        yield f"    … and {len(by_tensor) - MAX_TENSORS} more (all in --format json)"


def _amount(location: Location) -> str:
    role = location.role.value if location.role else ""
    if location.num_elements_differ is None:
        return f"{role}  {location.coordinate}: {safe(location.detail)}"
    small = location.max_ulps is not None and 0 <= location.max_ulps < 1000
    ulps = f" ({location.max_ulps} ulp)" if small else ""
    return (
        f"{role}  {location.num_elements_differ} of {location.num_elements_compared} elements, "
        f"max |Δ| {location.max_abs_difference:.2g}{ulps}"
    )


def _files(locations: Sequence[Location], run: RunReport) -> Iterator[str]:
    for location in locations[:MAX_TENSORS]:
        ranks = run.mesh.global_ranks(location.coordinate) if location.coordinate.indices else None
        where = f"  {location.coordinate}" if location.coordinate.indices else ""
        where += f" (rank {', '.join(map(str, ranks))})" if ranks and len(ranks) <= 4 else ""
        yield f"    {safe(location.file)}{where}: {safe(location.detail)}"
    if len(locations) > MAX_TENSORS:
        yield f"    … and {len(locations) - MAX_TENSORS} more (all in --format json)"


def _trouble(run: RunReport) -> Iterator[str]:
    for path, reason in sorted(run.unrecognised.items()):
        yield f"  [yellow]not audited[/] {safe(path)}: {safe(reason)}"
    for step in run.steps:
        if step.state.commit is Commit.IN_PROGRESS:
            yield f"  step {step.state.step} is being written; not audited"
        for failure in step.failures:
            yield f"  [yellow]not readable[/] {safe(failure)}"
        for name in step.changed:
            yield f"  [yellow]changed while it was read[/] {safe(name)}"


def _coverage(run: RunReport) -> Iterator[str]:
    held = []
    for item in run.chosen:
        counts = run.counts(item.id)
        if counts[Outcome.HOLDS]:
            held.append(f"{item.id} {counts[Outcome.HOLDS]:,}")
    if held:
        yield f"  holds         {' · '.join(held)}"
    if run.not_asked():
        yield f"  not asked     {', '.join(run.not_asked())}: a higher --level judges them"
    for (identifier, reason), count in sorted(run.undetermined().items()):
        invariant = find(identifier)
        name = f" {invariant.name}" if invariant else ""
        yield f"  undetermined  {identifier}{name}: {count} · {safe(reason)}"
