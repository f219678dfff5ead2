"""The report for a person at a terminal, as lines with rich's markup."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.markup import escape

from auditor.invariants.registry import invariants
from auditor.model.finding import Finding, Interval, Location, Outcome, Severity
from auditor.model.run import Commit
from auditor.report.lone_steps import look_alike
from auditor.report.open_questions import named, open_lines, unjudged
from auditor.report.text_safety import visible
from auditor.reports import Report, RunReport, StepReport
from auditor.settings import Level
from auditor.timeline.last_good import ABOUT_THE_RUN
from auditor.verdict import counted, exit_code, verdict

MAX_TENSORS = 8
"""Tensors shown of a finding; the JSON report has all."""
_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_COUNTED = {
    "error": ("error", "errors"), "warning": ("warning", "warnings"), "note": ("note", "notes"),
    "waived": ("waived finding", "waived findings"),
    "in_baseline": ("finding that the baseline knows", "findings that the baseline knows"),
}  # fmt: skip
_VERDICT_COLOURS = {"holds": "green", "violated": "red", "incomplete": "yellow", "undetermined": "yellow"}


def text_lines(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """The whole report, line by line. ``verbose``: also what holds and what is not applicable, one by one."""
    for number, run in enumerate(report.runs):
        if number:
            yield ""
        yield from _run(run, report, verbose)
    if len(report.runs) > 1:
        words = Counter(verdict(run, report.settings) for run in report.runs)
        yield ""
        counted_words = " · ".join(f"{word} {words[word]}" for word in _VERDICT_COLOURS if words[word])
        yield f"{len(report.runs)} runs: {counted_words}"
        yield from map(safe, look_alike(report.runs))
    if report.settings.origins:
        yield f"settings: {safe(', '.join(report.settings.origins))}"
    yield f"exit code {int(exit_code(report))}"


def safe(text: object) -> str:
    """Anything that came from a file, harmless for terminal and markup."""
    return escape(visible(str(text)))


def _run(run: RunReport, report: Report, verbose: bool) -> Iterator[str]:
    name = f"{report.location}/{run.path}".rstrip("/")
    formats = sorted({step.state.format for step in run.steps})
    steps = [step.state.step for step in run.steps]
    yield f"[bold]{safe(name)}[/bold]"
    yield f"  {', '.join(formats)} · {safe(run.mesh)} · {_steps_phrase(steps)}{run.order and f', {run.order}'}"
    yield f"  {_read_phrase(run)}"
    for finding in run.findings:
        yield ""
        yield from _finding(finding, run)
    yield ""
    yield from _trouble(run)
    yield from _coverage(run, verbose)
    yield from _branches(run)
    word = verdict(run, report.settings)
    yield f"  [bold {_VERDICT_COLOURS[word]}]{word}[/]{_why_word(run, report)} · {_good_phrase(run, report)}"


def _why_word(run: RunReport, report: Report) -> str:
    """What the word is not the whole of: findings that don't fail, and what --strict adds."""
    word = verdict(run, report.settings)
    strict = report.settings.strict and run.undetermined() and word == "undetermined"
    phrase = " (--strict: undetermined fails)" if strict else ""
    if word == "violated":
        return phrase
    counts = counted(run.findings)
    return phrase + "".join(f", {counts[key]} {_COUNTED[key][counts[key] > 1]}" for key in _COUNTED if counts[key])


def _good_phrase(run: RunReport, report: Report) -> str:
    """The last good step, and what that rests on."""
    if run.last_good is None:
        newest = f": {run.rejected[0][1]}" if len(run.steps) == 1 and run.rejected else ""
        return f"no good step among the {len(run.steps)} looked at{safe(newest)}"
    phrase = f"last good step {run.last_good.step}"
    if run.findings:
        phrase += f" ({safe(run.last_good.path or '.')})"
    serious = unjudged(run)
    tensors = report.settings.tensors
    left_out = [*([named(serious)] if serious else []), *([f"tensors other than {tensors}"] if tensors else [])]
    return f"{phrase}, not having judged {safe(', '.join(left_out))}" if left_out else phrase


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
    again = (
        f", {size(seen.num_bytes_reread)} again for differences, saves or checksums" if seen.num_bytes_reread else ""
    )
    kept = sum(step.recalled for step in run.steps)
    again += f", {kept} of {len(run.steps)} steps from the ledger" if kept else ""
    gone = [step.state.step for step in run.steps if step.state.deleted]
    again += f" ({_numbers(gone)} deleted since)" if gone else ""
    return (
        f"{phrase}: read {size(seen.num_bytes_read)} of tensors in {size(seen.num_bytes_total)} of files{again} · "
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
        if finding.id not in ABOUT_THE_RUN and len(run.steps) > 1:
            yield f"  {_interval_phrase(interval, finding, run)}"
        yield from _onsets(interval)
        yield from _where(finding, interval, run)
    yield ""
    if finding.minority:
        places = ", ".join(map(str, finding.minority))
        yield f"  majority  the others agree; likely wrong: {places} (a majority can be wrong: see `auditor explain`)"
    for cause in finding.likely_causes[:2]:
        yield f"  maybe     {safe(cause.text)} ({safe(cause.source)})"
    yield f"  next      {_back_phrase(finding, run)}{safe(finding.hint)}"


def _back_phrase(finding: Finding, run: RunReport) -> str:
    """Which step to go back to, where that is the question, and what it descends from."""
    if run.last_good is None or finding.severity is not Severity.ERROR or finding.accepted:
        return ""
    good, newest = run.last_good.step, max(step.state.step for step in run.steps)
    before = [interval for interval in finding.intervals if interval.first_bad < good]
    if good == newest:
        return f"The newest step, {good}, is good. "
    if not before or not finding.difference_class:
        return f"Go back to step {good}. "
    first = before[0]
    clean = f"the last step before that is {first.last_good}" if first.last_good is not None else "none is before that"
    span = f"{first.first_bad} to {first.last_bad}"
    return f"Go back to step {good}; it descends from the drift of steps {span} ({clean}). "


def _ranks_phrase(finding: Finding, run: RunReport) -> str:
    """Global ranks of the places that differ, where they are known and few."""
    ranks: dict[str, set[int]] = {}
    for x in finding.locations:
        if x.num_elements_differ is None and not x.ranks:
            continue
        mesh = run.mesh_of(x.step)
        sides = ((x.coordinate, x.holder, x.ranks), (x.reference, x.reference_holder, x.reference_ranks))
        for place, holder, known in sides:
            ranks.setdefault(str(place), set()).update(known or mesh.global_ranks(holder) or ())
    if not 0 < len(ranks) <= 4 or not all(0 < len(found) <= 8 for found in ranks.values()):
        return ""
    named = (f"{place}: rank{'s' if len(found) > 1 else ''} {', '.join(map(str, sorted(found)))}"
             for place, found in sorted(ranks.items()))  # fmt: skip
    return f" ({'; '.join(named)})"


def _interval_phrase(interval: Interval, finding: Finding, run: RunReport) -> str:
    before = f"last good {interval.last_good}" if interval.last_good is not None else _unknown_before(interval, run)
    word = "healed" if finding.difference_class else "good again"
    if interval.healed is None and interval.first_bad != interval.last_bad:
        if not any(location.step == interval.last_bad for location in finding.locations):
            return f"since step [bold]{interval.first_bad}[/bold] ({before}), not undone by {interval.last_bad}"
        return f"since step [bold]{interval.first_bad}[/bold] ({before}), still so at {interval.last_bad}"
    if interval.healed is None:
        return f"at step [bold]{interval.first_bad}[/bold] ({before})"
    if interval.first_bad == interval.last_bad:
        return f"at step [bold]{interval.first_bad}[/bold] only ({before}), {word} at {interval.healed}"
    return f"since step [bold]{interval.first_bad}[/bold] ({before}), {word} at {interval.healed}"


def _unknown_before(interval: Interval, run: RunReport) -> str:
    """Why no good step is known before a fault."""
    if any(step.state.step < interval.first_bad for step in run.steps):
        # A step that was judged and is not good would be of the fault.
        return "in earlier saves this can't be judged"
    return "none before it was looked at" if run.num_saved_before else "no step before it"


def _onsets(interval: Interval) -> Iterator[str]:
    if len(set(interval.onset_by_role.values())) > 1:
        phrase = " · ".join(f"{role} {step}" for role, step in interval.onset_by_role.items())
        yield f"    first seen   {phrase}"
    if len(interval.growth) > 1:
        label = {"largest difference": "largest |Δ|", "distance by sketch": "distance ≈ ", "elements": "elements   "}
        phrase = " → ".join(_size(size) for _, size in interval.growth[:8])
        more = " → …" if len(interval.growth) > 8 else ""
        yield f"    {label[interval.measure]}  {phrase}{more}{_law_phrase(interval)}"


def _size(size: float) -> str:
    """A count as it is, any other number to two digits."""
    return f"{size:.0f}" if size.is_integer() else f"{size:.2g}"


def _law_phrase(interval: Interval) -> str:
    law = interval.law
    if law is None:
        return ""
    rate = {"linear": f", {law.rate:.2g} a step", "exponential": f", doubles in {law.rate:.3g} steps"}
    return f" ({law.law}{rate.get(law.law, '')})"


def _where(finding: Finding, interval: Interval, run: RunReport) -> Iterator[str]:
    """The first bad step of an interval: its first tensors or files, in model order."""
    here = [location for location in finding.locations if location.step == interval.first_bad]
    yield from _tensors(here) if any(location.tensor for location in here) else _files(here, run)


def _tensors(locations: Sequence[Location]) -> Iterator[str]:
    by_tensor: dict[str, list[Location]] = defaultdict(list)
    for location in locations:
        by_tensor[location.tensor].append(location)
    width = max(len(visible(name)) for name in list(by_tensor)[:MAX_TENSORS])
    yield f"    at step {locations[0].step}, in model order:"
    for name in list(by_tensor)[:MAX_TENSORS]:
        mine = by_tensor[name]
        # Locations come in order of roles, so the first is the parameter wherever that differs.
        worst = max((x for x in mine if x.role is mine[0].role), key=lambda x: x.max_abs_difference or 0.0)
        others = sorted({x.role.value for x in mine if x.role and x.role is not worst.role})
        also = f"; also {', '.join(others)}" if others else ""
        yield f"      {safe(name)}{' ' * (width - len(visible(name)))}  {_amount(worst)}{also}"
    if len(by_tensor) > MAX_TENSORS:
        yield f"    … and {len(by_tensor) - MAX_TENSORS} more (all in --format json)"


def _amount(location: Location) -> str:
    role = location.role.value if location.role else ""
    if location.num_elements_differ is None:
        return f"{role}  {location.coordinate}: {safe(location.detail)}"
    small = location.max_ulps is not None and 0 <= location.max_ulps < 1000
    ulps = f" ({location.max_ulps} ulp)" if small else ""
    gap = location.max_abs_difference or 0.0
    size = f"max |Δ| {gap:.2g}{ulps}" if math.isfinite(gap) else "one side not finite"
    first = f" at {list(location.first_index)}" if location.num_elements_differ == 1 and location.first_index else ""
    return f"{role}  {location.num_elements_differ} of {location.num_elements_compared} elements{first}, {size}"


def _files(locations: Sequence[Location], run: RunReport) -> Iterator[str]:
    for location in locations[:MAX_TENSORS]:
        mesh = run.mesh_of(location.step)
        ranks = mesh.global_ranks(location.coordinate) if location.coordinate.indices else None
        where = f"  {location.coordinate}" if location.coordinate.indices else ""
        where += f" (rank {', '.join(map(str, ranks))})" if ranks and len(ranks) <= 4 else ""
        yield f"    {safe(location.file)}{where}: {safe(location.detail)}"
    if len(locations) > MAX_TENSORS:
        yield f"    … and {len(locations) - MAX_TENSORS} more (all in --format json)"


def _numbers(steps: Sequence[int]) -> str:
    """A few steps by their numbers, many by the first and the last."""
    few = len(steps) <= 4
    return ", ".join(map(str, steps)) if few else f"{len(steps)} of {steps[0]} … {steps[-1]}"


def _branches(run: RunReport) -> Iterator[str]:
    """What was audited and is not on the way to the newest step."""
    for branch in run.branches:
        bad = ", ".join(f"{identifier} from {step}" for identifier, step in branch.violated.items())
        yield f"  set back        the ledger holds steps {_numbers(branch.steps)} of before{f': {bad}' if bad else ''}"
    for failure in run.unwritten[:MAX_TENSORS]:
        yield f"  [yellow]ledger[/]          not written: {safe(failure)}"
    if run.bisected:
        yield f"  bisected        {run.bisected}"
    for note in run.ledger_notes:
        yield f"  [yellow]ledger[/]          not used: {safe(note)}"


def _trouble(run: RunReport) -> Iterator[str]:
    for path, reason in sorted(run.unrecognised.items()):
        yield f"  [yellow]not audited[/] {safe(path)}: {safe(reason)}"
    for path in run.vanished:
        yield f"  [yellow]changed while it was read[/] {safe(path)}: it was listed, and gone before it was looked into"
    for step in run.steps:
        if step.state.commit is Commit.IN_PROGRESS:
            yield f"  step {step.state.step} is being written; not audited{_early_ends(step)}"
        for failure in step.failures:
            yield f"  [yellow]not readable[/] {safe(failure)}"
        for name in step.changed[:MAX_TENSORS]:
            yield f"  [yellow]changed while it was read[/] {safe(name)}"
        if len(step.changed) > MAX_TENSORS:
            yield f"    … and {len(step.changed) - MAX_TENSORS} more of step {step.state.step}"


def _early_ends(step: StepReport) -> str:
    """Which of its files are cut short so far: one that was copied so a minute ago looks the same."""
    names = step.state.cut_short
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f": {safe(names[0])}{more} is cut short so far; damage if it stays so (--settle)" if names else ""


def _coverage(run: RunReport, verbose: bool) -> Iterator[str]:
    yield from _told(run) if verbose else _folded(run)
    ignored = [item.id for item in invariants() if item not in run.chosen]
    if ignored:
        chosen = ", ".join(sorted(item.id for item in run.chosen))
        few = len(ignored) <= len(run.chosen)
        yield f"  ignored         {', '.join(ignored) if few else f'all but {chosen}'}"
    for level, names in run.beyond_level().items():
        them, shown = "it" if len(names) == 1 else "them", ", ".join(names) if verbose else named(names)
        yield f"  not asked       {shown}: --level {level.name.lower()} judges {them}"
    for line in open_lines(run, folded=not verbose):
        yield f"  undetermined    {safe(line)}"


def _folded(run: RunReport) -> Iterator[str]:
    """How many invariants hold and don't apply."""
    counts = {item.id: run.counts(item.id) for item in run.chosen}
    holding = [of for of in counts.values() if of[Outcome.HOLDS] and not of[Outcome.VIOLATED]]
    silent = [of for of in counts.values() if 0 < of[Outcome.NOT_APPLICABLE] == sum(of.values())]
    if not holding and not silent:
        return
    words = [f"{len(holding)} invariants, {sum(of[Outcome.HOLDS] for of in holding):,} times"]
    words += [
        f"{name} {of[Outcome.HOLDS]:,} times and {of[Outcome.VIOLATED]:,} times not"
        for name, of in counts.items()
        if of[Outcome.VIOLATED]
    ]
    words += [f"{len(silent)} not applicable"] if silent else []
    yield f"  holds           {' · '.join(words)} (--verbose lists them)"


def _told(run: RunReport) -> Iterator[str]:
    """Every invariant by itself."""
    words = []
    for item in run.chosen:
        counts = run.counts(item.id)
        violated = f" and {counts[Outcome.VIOLATED]:,} not" if counts[Outcome.VIOLATED] else ""
        if counts[Outcome.HOLDS] or violated:
            words.append(f"{item.id} {counts[Outcome.HOLDS]:,}{violated}")
    if words:
        yield f"  holds           {' · '.join(words)}"
    inapplicable: dict[str, list[str]] = {}
    for (identifier, reason), count in sorted(run.reasons("not_applicable").items()):
        # One reason often keeps a whole family silent: one line, not one an invariant.
        inapplicable.setdefault(reason, []).append(f"{identifier} {count:,}" if count > 1 else identifier)
    for reason, names in inapplicable.items():
        yield f"  not applicable  {', '.join(names)} · {safe(reason)}"
