"""NUM: scales of low-precision formats can be divided and multiplied by."""

from __future__ import annotations

import math

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.related import Collected
from auditor.model.catalog import FP8_AMAX, FP8_SCALE, Role, Scalar
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.run import StepEvidence


def scales_are_usable(evidence: StepEvidence) -> Judgement:
    """No recorded scale is zero, negative or not finite."""
    found = Collected()
    for order, scalar in enumerate(evidence.catalog.scalars):
        if scalar.name not in (FP8_SCALE, FP8_AMAX):
            continue
        least = math.ulp(0.0) if scalar.name == FP8_SCALE else 0.0
        if math.isfinite(scalar.value) and scalar.value >= least:
            found.num_holds += 1
        else:
            found.violations.append(_unusable(evidence, scalar, order))
    if not found.num_holds and not found.violations:
        found.not_applicable["no scale is recorded"] += 1
    return found.judgement()


def _unusable(evidence: StepEvidence, scalar: Scalar, order: int) -> Violation:
    """An infinite largest value alone is passed over by who computes scales."""
    detail = f"holds {scalar.value:g}"
    location = Location(
        evidence.catalog.step, scalar.file, scalar.tensor, Role.OBJECT, order, scalar.coordinate, detail=detail
    )
    severity = Severity.NOTE if scalar.name == FP8_AMAX and not scalar.value < 0 else None
    return Violation(scalar.tensor, (location,), f"{scalar.tensor} {detail}", severity=severity)


INVARIANTS = (
    Invariant(
        "NUM005", "scale-unusable", Severity.ERROR,
        statement="Every recorded scale of FP8 is a finite number above zero; every recorded largest value is finite "
                  "and not negative (a note where it is not finite: the scale is then left as it was).",
        rationale="Weights, activations and gradients are multiplied by scales and divided by them: one that is zero "
                  "or not finite makes all of a matrix product so, in the first step after a restart.",
        source="NVIDIA/TransformerEngine pytorch/module/base.py (get_extra_state), common/recipe",
        example="decoder.layers.mlp.linear_fc1._extra_state[3].scale_fwd holds 0",
        misses="Scales that are plausible but of another step; formats that keep none (current and block scaling); "
               "states in forms that are not known, which are counted and shown by `inspect`.",
        hint="Resume from the last good step, or without the extra states: scales are then found anew.",
        judge_step=scales_are_usable, needs=Needs.HEADERS,
    ),
)  # fmt: skip
