"""Whose state the optimizer keeps: every moment and master is that of a parameter which is there."""

from __future__ import annotations

from auditor.invariants.optimizer_state import KeptState, fits, plain, shapes_of
from auditor.model.catalog import FileState, Role, Tensor
from auditor.model.finding import Judgement, Violation
from auditor.model.run import StepEvidence


def state_belongs_to_parameters(evidence: StepEvidence) -> Judgement:
    """Every moment and every master is that of a parameter which is there; a master has its shape."""
    catalog, kept = evidence.catalog, KeptState(evidence.catalog)
    violations: list[Violation] = []
    open_for = _why_open(kept)
    undetermined: dict[str, list[str]] = {reason: list(names) for reason, names in kept.nameless.items()}
    num_holds = 0
    for number, tensor in enumerate(catalog.tensors):
        if tensor.role is not Role.MASTER and number not in kept.owners:
            continue
        owner = kept.owners[number][0] if number in kept.owners else plain(tensor.name)
        detail = _misfit(kept, owner, number, tensor)
        # What was chosen by name is chosen with its parameter, unless it has a name of its own.
        if (tensor.undetermined and owner not in kept.parameters) or (
            detail and kept.partial and tensor.role is Role.MOMENT
        ):
            continue
        if detail and open_for:
            undetermined.setdefault(open_for, []).append(tensor.name)
        elif detail:
            message = f"{tensor.name} ({tensor.role.value}) {detail}"
            violations.append(Violation(tensor.name, (kept.location(number, detail),), message))
        num_holds += not detail
    if not num_holds and not violations and not undetermined:
        return Judgement(not_applicable={"no optimizer state is stored": 1})
    return Judgement(num_holds, tuple(violations), {key: tuple(names) for key, names in undetermined.items()})


def _why_open(kept: KeptState) -> str:
    """Why a parameter that isn't there need not be missing; empty where it is."""
    if any(file.state is not FileState.PRESENT for file in kept.catalog.files):
        return "its parameter may be in a file that could not be read"
    # An optimizer saved by itself: its model lies elsewhere.
    return "" if kept.parameters else "no model was read in this step"


def _misfit(kept: KeptState, owner: str, number: int, tensor: Tensor) -> str:
    if owner not in kept.parameters:
        return "is state of a parameter that is not there"
    if tensor.role is not Role.MASTER or fits(kept, owner, number):
        return ""
    return f"has shape {list(tensor.shape)}, the parameter {shapes_of(kept, owner)}"
