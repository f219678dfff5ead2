"""A comparison as one JSON document; its keys are specified in compare.schema.json."""

from __future__ import annotations

import json
import math
from typing import Any

from auditor import __version__
from auditor.comparison.outcome import Compared, Comparison, Explanation, Power, StepComparison
from auditor.comparison.rounding import Threshold
from auditor.comparison.verdict import exit_codes, verdict
from auditor.model.finding import LikelyCause
from auditor.settings import Settings


def to_json(found: Comparison, settings: Settings) -> str:
    """The document. Numbers that aren't finite are strings."""
    codes = exit_codes(found, settings)
    beyond = found.first_beyond
    document = {
        "schema_version": 1, "tool_version": __version__, "reference": found.reference, "candidate": found.candidate,
        "verdict": verdict(found, settings), "exit_code": int(codes[0]), "exit_codes": [int(code) for code in codes],
        "exact": found.exact, "names": list(found.maps), "reruns": list(found.reruns),
        "refused_reruns": dict(found.refused),
        "last_equal_step": found.last_equal, "first_different_step": beyond.step if beyond else None,
        "steps_alone": {"reference": list(found.steps_alone[0]), "candidate": list(found.steps_alone[1])},
        "unrecognised": dict(found.unrecognised),
        "growth": [
            {"role": one.role.value, "course": one.course.value, "jump": one.jump,
             "points": [[step, _number(size)] for step, size in one.points]}
            for one in found.growing
        ],
        "steps": [_step(step) for step in found.steps],
    }  # fmt: skip
    return json.dumps(document, indent=2, allow_nan=False)


def _step(step: StepComparison) -> dict[str, Any]:
    return {
        "step": step.step, "candidate_step": step.candidate_step, "paths": list(step.paths),
        "formats": list(step.formats), "num_steps": _number(step.num_steps),
        "counts": dict(sorted((standing.value, count) for standing, count in step.counts().items())),
        "notes": list(step.notes), "failures": list(step.failures), "changed": list(step.changed),
        "not_compared": list(step.uncompared),
        "recorded": list(step.recorded), "likely_causes": [_cause(cause) for cause in step.causes],
        "num_bytes_read": step.num_bytes_read, "tensors": [_row(row) for row in step.rows],
    }  # fmt: skip


def _row(row: Compared) -> dict[str, Any]:
    amount = row.amount
    return {
        "tensor": row.pair.name, "role": row.pair.role.value, "candidate_tensor": row.shown or row.pair.name,
        "standing": row.standing.value, "severity": row.severity.name.lower() if row.severity is not None else None,
        "detail": row.detail or None,
        "relative_difference": _number(amount.relative) if amount else None,
        "num_elements_differ": amount.num_differ if amount and amount.num_differ >= 0 else None,
        "max_abs_difference": _number(amount.largest) if amount and not amount.estimated else None,
        "first_index": list(amount.first_index) if amount else None,
        "estimated": amount.estimated if amount else False,
        "threshold": _threshold(row.threshold), "margin": _number(row.margin) if row.threshold else None,
        "likely_causes": [_cause(row.cause)] if row.cause else [], "power": _power(row.power),
    }  # fmt: skip


def _threshold(threshold: Threshold | None) -> dict[str, Any] | None:
    if threshold is None:
        return None
    return {
        "relative": _number(threshold.relative), "beyond": _number(threshold.beyond), "kind": threshold.kind,
        "num_reruns": threshold.num_runs, "derivation": threshold.how,
    }  # fmt: skip


def _power(power: Power | None) -> dict[str, Any] | None:
    if power is None:
        return None
    return {
        "factor": _number(1 + power.factor), "rolled_row": None if power.rolled is None else _number(power.rolled),
        "detects_rolled_row": power.detects_roll, "lacking_summand_of": power.smallest_part,
    }  # fmt: skip


def _cause(cause: LikelyCause | Explanation) -> dict[str, str]:
    return {"text": cause.text, "source": cause.source}


def _number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)
