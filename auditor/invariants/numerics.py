"""NUM: values are finite."""

from __future__ import annotations

import numpy as np

from auditor.invariants.invariant import Invariant, Needs
from auditor.model.catalog import Role
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.observation import Read
from auditor.model.run import StepEvidence


def values_are_finite(evidence: StepEvidence) -> Judgement:
    """No element of any tensor is NaN or infinite."""
    catalog, seen = evidence.catalog, evidence.observations.pieces
    violations, num_holds = [], 0
    unread: list[str] = []
    for number, rows in catalog.rows_by_tensor.items():
        tensor = catalog.tensors[number]
        if tensor.role is Role.PADDING:
            continue
        bad = rows[(seen["num_nan"][rows] > 0) | (seen["num_infinite"][rows] > 0)]
        if len(bad):
            locations = tuple(_location(evidence, int(row)) for row in bad)
            total = int((seen["num_nan"][bad] + seen["num_infinite"][bad]).sum())
            message = f"{tensor.name} ({tensor.role.value}) holds {total} numbers that are not finite"
            violations.append(Violation(tensor.name, locations, message))
        elif np.all(seen["read"][rows] == Read.DONE):
            num_holds += 1
        else:
            unread.append(tensor.name)
    reason = evidence.unread or "some of its bytes were not read"
    return Judgement(num_holds, tuple(violations), {reason: tuple(unread)} if unread else {})


def _location(evidence: StepEvidence, row: int) -> Location:
    catalog, seen = evidence.catalog, evidence.observations.pieces[row]
    piece = catalog.pieces[row]
    tensor = catalog.tensors[piece.tensor]
    nan, infinite = int(seen["num_nan"]), int(seen["num_infinite"])
    return Location(
        catalog.step, catalog.files[piece.file].name, tensor.name, tensor.role, tensor.order, piece.coordinate,
        num_elements=nan + infinite, detail=f"{nan} NaN, {infinite} infinite",
    )  # fmt: skip


INVARIANTS = (
    Invariant(
        "NUM001", "not-finite", Severity.ERROR,
        statement="Every element of every parameter, master, moment and buffer is a finite number. Padding of flat "
                  "buffers is left out: it is uninitialised in healthy runs.",
        rationale="A NaN in a weight spreads to everything; one in a moment does so at the next step.",
        source="ultralytics/ultralytics#24307; NVIDIA/nvidia-resiliency-ext#349",
        example="4.mlp.dense_4h_to_h.weight (second_moment) holds 3 numbers that are not finite",
        misses="Finite nonsense: nearly all hardware corruption is finite (about 99 %, arXiv 2605.04213).",
        hint="Resume from the last good step with the batch that caused it skipped; look at the loss scale and norms.",
        needs=Needs.WEIGHTS, judge_step=values_are_finite, one_fault=True,
        likely_causes=(LikelyCause("a loss or gradient overflowed and the step was not skipped",
                                   "ultralytics/ultralytics#24307"),),
    ),
)  # fmt: skip
