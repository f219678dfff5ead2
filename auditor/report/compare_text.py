"""A comparison for a person at a terminal, as lines with rich's markup."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from auditor.comparison.matching import module_of
from auditor.comparison.outcome import PROVED, Compared, Comparison, Standing, StepComparison
from auditor.comparison.proposal import Proposed
from auditor.comparison.verdict import exit_code, verdict
from auditor.report.text_report import safe, size
from auditor.settings import Settings

MAX_MODULES = 12
"""Modules shown of a step; the JSON report has all."""
MAX_TENSORS = 6
"""Tensors shown of a module."""
_COLOURS = {"equal": "green", "agrees": "green", "differs": "red"}
_SIGN = {Standing.ROUNDING: "≈", Standing.SUSPICIOUS: "?", Standing.LACKING: "-", Standing.EXTRA: "+",
         Standing.UNDETERMINED: "·"}  # fmt: skip


def compare_lines(found: Comparison, settings: Settings, *, verbose: bool = False) -> Iterator[str]:
    """The whole comparison, line by line. ``verbose``: also what is equal, and every derivation."""
    yield f"reference  [bold]{safe(found.reference)}[/bold]"
    yield f"candidate  [bold]{safe(found.candidate)}[/bold]"
    for note in found.maps:
        yield f"names      {safe(note)}"
    for side, steps in zip(("reference", "candidate"), found.steps_alone, strict=True):
        if steps:
            yield f"steps      in the {side} alone, not compared: {', '.join(map(str, steps[:8]))}" + (
                ", …" if len(steps) > 8 else ""
            )
    for path, reason in sorted(found.refused.items()):
        yield f"[yellow]no rerun[/]   {safe(path)}, nothing is taken from it: {safe(reason)}"
    for path, reason in sorted(found.unrecognised.items()):
        yield f"[yellow]not compared[/] {safe(path)}: {safe(reason)}"
    for step in found.steps:
        yield ""
        yield from _step(step, found, verbose)
    yield ""
    yield from _over_steps(found)
    word = verdict(found, settings)
    colour = _COLOURS.get(word.replace(",", "").split()[0], "yellow")
    yield f"[bold {colour}]{word}[/] · {_read(found)}"
    yield f"exit code {int(exit_code(found, settings))}"


def _read(found: Comparison) -> str:
    total = sum(step.num_bytes_read for step in found.steps)
    ledgers = " (digests from ledgers)" if found.from_ledgers else ""
    return f"read {size(total)} of tensors{ledgers} · {found.seconds:.1f} s"


def _step(step: StepComparison, found: Comparison, verbose: bool) -> Iterator[str]:
    against = "" if step.step == step.candidate_step else f" against {step.candidate_step}"
    numbers = f"step {step.step}{against}"
    formats = " against ".join(dict.fromkeys(step.formats))
    yield f"[bold]{numbers}[/bold]  {formats} · {_counted(step)}"
    for note in step.notes:
        yield f"  {safe(note)}"
    for failure in step.failures:
        yield f"  [yellow]not readable[/] {safe(failure)}"
    for text in step.uncompared:
        yield f"  [yellow]not compared[/] {safe(text)}"
    for name in step.changed:
        yield f"  [yellow]changed while it was read[/] {safe(name)}"
    for text in step.recorded:
        yield f"  recorded   {safe(text)}"
    for cause in step.causes:
        yield f"  maybe      {safe(cause.text)} ({safe(cause.source)})"
    yield from _modules(step, found, verbose)


def _counted(step: StepComparison) -> str:
    counts = step.counts()
    named = [f"{counts[standing]:,} {standing.value}" for standing in Standing if counts[standing]]
    return " · ".join(named) or "no tensor in common"


def _modules(step: StepComparison, found: Comparison, verbose: bool) -> Iterator[str]:
    modules: dict[str, dict[str, list[Compared]]] = {}
    for row in step.rows:
        if verbose or _is_told(row):
            modules.setdefault(module_of(row.pair.name), {}).setdefault(row.pair.name, []).append(row)
    failing = {id(row) for row in found.failing(step)}

    def last(rows: Iterable[Compared]) -> int:
        """What fails is shown first, then what is suspicious, else in model order: not all is shown."""
        each = list(rows)
        return 0 if any(id(row) in failing for row in each) else 2 - any(row.severity is not None for row in each)

    places = sorted(modules.items(), key=lambda one: last(row for rows in one[1].values() for row in rows))
    for name, tensors in places[: None if verbose else MAX_MODULES]:
        yield f"  {safe(name) or '(no module)'}"
        for rows in sorted(tensors.values(), key=last)[: None if verbose else MAX_TENSORS]:
            yield from _tensor(rows, step, any(id(row) in failing for row in rows), verbose)
        if len(tensors) > MAX_TENSORS and not verbose:
            yield f"    … and {len(tensors) - MAX_TENSORS} more"
    if len(modules) > MAX_MODULES and not verbose:
        yield f"  … and {len(modules) - MAX_MODULES} more modules (all in --format json)"


def _is_told(row: Compared) -> bool:
    """Whether a person wants to see it without asking."""
    return row.standing not in (*PROVED, Standing.ROUNDING) or bool(row.detail and row.standing in PROVED)


def _tensor(rows: Sequence[Compared], step: StepComparison, failing: bool, verbose: bool) -> Iterator[str]:
    """All roles of one tensor: the worst in full, the others in a few words."""
    worst = max(rows, key=lambda row: (row.severity or 0, -1.0 if math.isnan(row.margin) else row.margin))
    sign = "=" if worst.standing in PROVED else _SIGN.get(worst.standing, "≠")
    last = worst.pair.name.rpartition(".")[2]
    other = f" (there {worst.shown})" if worst.shown else ""
    colour = "red" if failing else "yellow" if worst.standing is Standing.SUSPICIOUS else ""
    text = f"{sign} {last}  {_role(worst)}  {worst.standing.value}{_amount(worst)}{other}"
    text += f": {worst.detail}" if worst.detail else ""
    yield f"    [{colour}]{safe(text)}[/]" if colour else f"    {safe(text)}"
    if worst.threshold is not None and worst.standing not in PROVED:
        yield f"        {safe(_threshold(worst))}"
    beside = [f"{_role(row)} {row.standing.value}{_short(row)}" for row in rows if row is not worst]
    if beside:
        yield f"        also {safe(', '.join(beside))}"
    if worst.cause is not None and worst.cause not in step.gathered:
        yield f"        maybe {safe(worst.cause.text)} ({safe(worst.cause.source)})"
    for row in rows if verbose else ():
        if row.power is not None:
            yield f"        {_role(row)}: {safe(power_phrase(row))}"


def _role(row: Compared) -> str:
    return row.pair.role.value.replace("_", " ")


def _short(row: Compared) -> str:
    return "" if math.isnan(row.margin) or row.standing in PROVED else f" ({_times(row.margin)})"


def power_phrase(row: Compared) -> str:
    """What would have been found."""
    power = row.power
    if power is None:
        return ""
    roll = "a row moved" if power.detects_roll else "not a row moved"
    part = f"one of up to {power.smallest_part} summands lacking" if power.smallest_part else "no lacking summand"
    return f"would be found: a factor of {1 + power.factor:.8g}, {roll}, {part}"


def _amount(row: Compared) -> str:
    amount = row.amount
    if amount is None or row.standing in PROVED:
        return ""
    about = "≈ " if amount.estimated else ""
    where = f", {amount.num_differ:,} of {amount.num_elements:,} elements" if amount.num_differ >= 0 else ""
    margin = f", {_times(row.margin)} the threshold" if not math.isnan(row.margin) else ""
    return f"  |Δ|/|reference| {about}{amount.relative:.2g}{margin}{where}"


def _times(margin: float) -> str:
    return f"{margin:.2g} ×" if margin < 100 else f"{margin:,.0f} ×" if margin < 1e9 else f"{margin:.1g} ×"


def _threshold(row: Compared) -> str:
    assert row.threshold is not None
    count = row.threshold.num_runs
    runs = f" of {count} {'rerun' if count == 1 else 'reruns'}" if count else ""
    return f"rounding up to {row.threshold.relative:.2g}, {row.threshold.kind}{runs}: {row.threshold.how}"


def _over_steps(found: Comparison) -> Iterator[str]:
    if len(found.steps) > 1:
        beyond, equal = found.first_beyond, found.last_equal
        if equal is not None:
            yield f"equal up to step {equal}"
        if beyond is not None:
            names = list(dict.fromkeys(row.pair.name for row in found.failing(beyond)))
            yield f"first different in step {beyond.step}, in model order: {safe(_few(names))}"
    for growing in found.growing:
        points = " → ".join(f"{size:.2g}" for _, size in growing.points[:8])
        at = f" at step {growing.jump}" if growing.jump is not None else ""
        yield f"{growing.role.value.replace('_', ' '):<14} {growing.course.value}{at}: {points}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def proposed_lines(rules: Sequence[Proposed]) -> Iterator[str]:
    """Proposed name rules as the tables of a configuration file."""
    if not rules:
        yield "# every tensor has its counterpart, or nothing speaks for any"
    for rule in rules:
        yield from map(safe, rule.lines())
        yield ""
