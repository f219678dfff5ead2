"""What a round of a patrol found, for people, for machines, and as a line a finding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from auditor import __version__
from auditor.patrol.outcome import Patrolled, RunOutcome, Status
from auditor.report.text_report import size
from auditor.report.text_safety import visible

SCHEMA_VERSION = 1


def run_lines(outcome: RunOutcome) -> Iterator[str]:
    """One run: what became of it, and its findings."""
    good = f", last good step {outcome.last_good_step}" if outcome.last_good_step is not None else ""
    codes = f", exit code {outcome.exit_codes[0]}" if outcome.exit_codes else ""
    read = f", {size(outcome.num_bytes_read)} of tensors read" if outcome.num_bytes_read else ""
    yield visible(f"{outcome.path or '.'}: {outcome.status.value}{codes}{good}{read}")
    if outcome.detail:
        yield visible(f"  {outcome.detail}")
    for finding in outcome.findings:
        accepted = " (waived)" if finding["waived"] else " (in the baseline)" if finding["in_baseline"] else ""
        steps = finding["intervals"][:1]
        since = f" since step {steps[0]['first_bad']}" if steps else ""
        yield visible(
            f"  {finding['id']} {finding['name']} {finding['severity']}{since}: {finding['message']}{accepted}"
        )


def summary_lines(result: Patrolled) -> Iterator[str]:
    """The whole round."""
    counts = ", ".join(f"{count} {status.value}" for status in Status if (count := result.count(status)))
    yield f"{result.num_keys:,} keys, {len(result.runs)} runs: {counts or 'none'}"
    yield (
        f"{size(result.num_bytes_read)} of tensors read in {result.seconds:.1f} s; "
        f"{len(result.new)} findings are new, {len(result.resolved)} are over"
    )
    if result.turn:
        yield f"read again: {result.num_steps_reread} steps, {size(result.num_bytes_reread)}; {result.turn}"
    for path, reason in sorted(result.not_audited.items()):
        yield visible(f"not looked at: {path}: {reason}")
    yield from map(visible, result.notes)


def patrol_object(result: Patrolled) -> dict[str, Any]:
    """The round as one JSON document. ``runs[].reports`` is what ``check --format json`` says, where it was audited."""
    return {
        "schema_version": SCHEMA_VERSION, "tool_version": __version__, "patrol": result.location,
        "exit_code": int(result.exit_codes[0]), "exit_codes": [int(code) for code in result.exit_codes],
        "num_keys": result.num_keys, "num_bytes_read": result.num_bytes_read,
        "num_bytes_reread": result.num_bytes_reread, "num_steps_reread": result.num_steps_reread,
        "new": result.new, "resolved": result.resolved, "notes": result.notes,
        "refused": [{"path": path, "reason": reason} for path, reason in sorted(result.not_audited.items())],
        "runs": [
            {
                "path": run.path, "status": run.status.value, "exit_codes": run.exit_codes,
                "last_good_step": run.last_good_step, "num_bytes_read": run.num_bytes_read,
                "detail": run.detail or None, "findings": run.findings, "reports": run.documents,
            }
            for run in sorted(result.runs, key=lambda run: run.path)
        ],
    }  # fmt: skip


def finding_lines(outcome: RunOutcome) -> Iterator[str]:
    """One JSON object a line for every finding of one run; ``--format jsonl``."""
    for finding in outcome.findings:
        yield json.dumps({**finding, "status": outcome.status.value}, ensure_ascii=True)
