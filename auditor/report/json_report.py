"""The machine report. Its keys are a promise, held by ``report.schema.json`` in this folder."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from auditor import __version__
from auditor.model.finding import Finding, Interval, Location, Outcome
from auditor.model.region import Box
from auditor.reports import Report, RunReport
from auditor.settings import MEANS, Settings
from auditor.verdict import ExitCode, counted, exit_code, exit_codes, step_verdict, verdict

SCHEMA_VERSION = 1


def to_json(report: Report) -> str:
    """The report as one JSON document; several runs are wrapped in one object."""
    return json.dumps(document(report), indent=2, ensure_ascii=True, allow_nan=False)


def document(report: Report) -> dict[str, Any]:
    """The report as what JSON can hold."""
    runs = [run_object(run, report.settings, report.location) for run in report.runs]
    if len(runs) == 1:
        return runs[0]
    return {"schema_version": SCHEMA_VERSION, "exit_code": int(exit_code(report)), "runs": runs}


def failure(message: str, code: int) -> str:
    """The document of a command that has no report: nothing to audit, wrong usage, storage that refuses."""
    error = {"kind": ExitCode(code).name.lower(), "message": message}
    return json.dumps({"schema_version": SCHEMA_VERSION, "exit_code": code, "error": error}, ensure_ascii=True)


def run_object(run: RunReport, settings: Settings, location: str) -> dict[str, Any]:
    """One run."""
    codes = exit_codes(run, settings)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": f"{location}/{run.path}".rstrip("/"),
        "verdict": verdict(run, settings),
        "exit_code": int(codes[0]),
        "exit_codes": [int(code) for code in codes],
        "mesh": dict(run.mesh.axes),
        "steps": [
            {
                "step": step.state.step, "path": step.state.path, "format": step.state.format,
                "verdict": step_verdict(step, run, settings), "commit": step.state.commit.value,
                "level": step.level.name.lower(), "changed": list(step.changed), "failures": list(step.failures),
                "opaque": dict(sorted(step.opaque.items())), "from_ledger": step.recalled,
                "deleted": step.state.deleted,
            }
            for step in run.steps
        ],
        "last_good_step": run.last_good.step if run.last_good else None,
        "num_findings": counted(run.findings),
        "findings": [_finding(finding, run) for finding in run.findings],
        "undetermined": [
            {"id": identifier, "reason": reason, "num_subjects": count}
            for (identifier, reason), count in sorted(run.undetermined().items())
        ],
        "unrecognised": [{"path": path, "reason": reason} for path, reason in sorted(run.unrecognised.items())],
        "vanished": list(run.vanished),
        "branches": [
            {"branch": branch.number, "steps": list(branch.steps), "violated": dict(branch.violated)}
            for branch in run.branches
        ],
        "ledger_notes": [*run.ledger_notes, *run.unwritten], "bisected": run.bisected or None,
        "tool_version": __version__,
        "config_digest": config_digest(settings),
        "coverage": {
            "num_tensors": run.coverage.num_tensors, "num_pieces": run.coverage.num_pieces,
            "num_bytes_total": run.coverage.num_bytes_total, "num_bytes_read": run.coverage.num_bytes_read,
            "num_bytes_reread": run.coverage.num_bytes_reread, "not_asked": run.not_asked(),
            "by_invariant": _by_invariant(run),
        },
    }  # fmt: skip


def config_digest(settings: Settings) -> str:
    """Equal for equal choices: tells whether two reports answer the same question."""
    text = json.dumps({name: repr(getattr(settings, name)) for name in settings.__slots__ if name not in MEANS})
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _by_invariant(run: RunReport) -> dict[str, dict[str, int]]:
    words = {
        Outcome.HOLDS: "holds", Outcome.VIOLATED: "violated", Outcome.UNDETERMINED: "undetermined",
        Outcome.NOT_APPLICABLE: "not_applicable",
    }  # fmt: skip
    return {item.id: {words[o]: count for o, count in run.counts(item.id).items()} for item in run.chosen}


def _finding(finding: Finding, run: RunReport) -> dict[str, Any]:
    return {
        "id": finding.id, "name": finding.name, "severity": finding.severity.name.lower(),
        "class": finding.difference_class.value if finding.difference_class else None,
        "consequences": list(finding.consequences), "waived": finding.waived,
        "in_baseline": finding.in_baseline,
        "minority": [place.as_dict() for place in finding.minority],
        "message": finding.message, "hint": finding.hint,
        "likely_causes": [{"text": cause.text, "source": cause.source} for cause in finding.likely_causes],
        "intervals": [_interval(interval) for interval in finding.intervals],
        "locations": [_location(location, run) for location in finding.locations],
    }  # fmt: skip


def _interval(interval: Interval) -> dict[str, Any]:
    return {
        "last_good": interval.last_good, "first_bad": interval.first_bad, "last_bad": interval.last_bad,
        "healed": interval.healed, "num_subjects": interval.num_subjects,
        "onset_by_role": dict(interval.onset_by_role),
        "growth": [[step, number(size)] for step, size in interval.growth], "measure": interval.measure or None,
        "law": {"law": interval.law.law, "rate": interval.law.rate} if interval.law else None,
    }  # fmt: skip


def _location(location: Location, run: RunReport) -> dict[str, Any]:
    holder = location.holder.merged(location.coordinate)
    ranks = location.ranks or (run.mesh_of(location.step).global_ranks(holder) if holder.indices else None)
    optional: Mapping[str, Any] = {
        "reference": location.reference.as_dict() or None,
        "region": _region(location.region),
        "num_elements": location.num_elements or None,
        "num_elements_differ": location.num_elements_differ,
        "num_elements_compared": location.num_elements_compared,
        "max_abs_difference": number(location.max_abs_difference),
        "relative_difference": number(location.relative_difference),
        "max_ulps": location.max_ulps,
        "sketched_difference": number(location.sketched_difference),
        "first_index": list(location.first_index) if location.first_index is not None else None,
        "global_ranks": list(ranks) if ranks else None,
        "detail": location.detail or None,
    }
    return {
        "step": location.step, "tensor": location.tensor or None,
        "role": location.role.value if location.role else None, "coordinate": location.coordinate.as_dict(),
        "file": location.file or None, **{key: value for key, value in optional.items() if value is not None},
    }  # fmt: skip


def _region(region: Box | None) -> list[list[int]] | None:
    return [list(pair) for pair in zip(region.start, region.stop, strict=True)] if region else None


def number(value: float | None) -> float | str | None:
    """A number as JSON can hold it: the non-finite ones as strings."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
