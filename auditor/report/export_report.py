"""What an export says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from auditor.exporting import Exported
from auditor.report.text_report import size
from auditor.view.export_tensor import Written

MAX_REASONS = 20
"""Reasons that are printed; the rest is counted."""


def step_line(path: str, written: Written) -> str:
    """One step, when it is done."""
    kept = f", {written.num_kept} of them there already" if written.num_kept else ""
    lost = f", {written.lost.total()} chunks not written" if written.lost else ""
    unfinished = ", not finished" if written.changed else ""
    return f"{path}: {written.num_arrays} arrays{kept}, {size(written.num_bytes)} written{lost}{unfinished}"


def last_lines(result: Exported) -> Iterator[str]:
    """What is wrong, and what was done in all."""
    lost: Counter[str] = Counter()
    for written in result.steps.values():
        lost.update(written.lost)
    for reason, number in lost.most_common(MAX_REASONS):
        yield f"not exported: {reason} ({number} chunk{'' if number == 1 else 's'})"
    if len(lost) > MAX_REASONS:
        yield f"not exported: {len(lost) - MAX_REASONS} more reasons"
    for name, reason in result.unrecognised.items():
        yield f"not exported: {name}: {reason}"
    for name in result.changed[:MAX_REASONS]:
        yield f"{name} changed while it was read: its step is not finished; run the export again"
    total = sum(written.num_bytes for written in result.steps.values())
    whole = "incomplete" if result.incomplete or result.changed else "whole, verified by digest"
    steps = f"{len(result.steps)} step{'s' if len(result.steps) > 1 else ''}"
    yield f"{result.location}: {steps}, {size(total)} written, {whole}"
