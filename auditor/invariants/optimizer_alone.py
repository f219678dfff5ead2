"""Which state the optimizer keeps, where nothing tells which parameters it has: by what it keeps for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from auditor.invariants.optimizer_state import KeptState, moments_are_complete
from auditor.model.catalog import FileState
from auditor.model.dtype import DType, Kind
from auditor.model.finding import Judgement, Violation
from auditor.model.run import StepEvidence

_PAIR = ("exp_avg", "exp_avg_sq")
_UNKNOWN = "the optimizer keeps nothing for it, and the files don't say which parameters it has"


def state_is_complete(evidence: StepEvidence) -> Judgement:
    """Every parameter that has moments, or must have some, has all of them with its shape.

    Megatron-core records groups without their parameters. Where every group is of Adam, one moment comes with the
    other, a master with both, and of parameters in a dtype that has masters each that is updated has one.
    """
    kept = KeptState(evidence.catalog)
    adam = all({"betas", "eps"} <= {*group.hyperparameters} for group in kept.catalog.groups)
    known = {key for keys in kept.state.values() for key in keys}
    if kept.trained or not kept.catalog.groups or not adam or kept.nameless or not known.issuperset(_PAIR):
        return moments_are_complete(evidence)
    if any(file.state is not FileState.PRESENT for file in kept.catalog.files):
        return Judgement(undetermined={"moments may be in a file that could not be read": ("the optimizer",)})
    mastered = {dtype for name in kept.masters for dtype in _low_dtypes(kept, name)}
    violations, unknown, num_holds = [], [], 0
    for name in kept.parameters:
        have = kept.state.get(name, {})
        lacking = _lacking(kept, name, have, mastered)
        if lacking:
            violations.append(_violation(kept, name, have, lacking))
        elif have:
            num_holds += 1
        else:
            unknown.append(name)
    return Judgement(num_holds, tuple(violations), {_UNKNOWN: tuple(unknown)} if unknown else {})


def _low_dtypes(kept: KeptState, name: str) -> set[DType]:
    """The dtypes in which a parameter is stored, of those that are less precise than its master."""
    found = {kept.catalog.tensors[number].dtype for number in kept.parameters.get(name, ())}
    return {dtype for dtype in found if dtype.kind is Kind.FLOAT and dtype.bits < 32}


def _lacking(
    kept: KeptState, name: str, have: Mapping[str, Sequence[int]], mastered: set[DType]
) -> tuple[str, ...]:  # fmt: skip
    """What the optimizer must keep for a parameter and doesn't."""
    others = set(have) - {*_PAIR}
    if others and not set(_PAIR) & set(have):
        # Another optimizer's, beside Adam.
        return ()
    lacking = [key for key in _PAIR if key not in have] if have or name in kept.masters else []
    if have and name not in kept.masters and _low_dtypes(kept, name) & mastered:
        lacking.append("master")
    return tuple(lacking)


def _violation(kept: KeptState, name: str, have: Mapping[str, Sequence[int]], lacking: tuple[str, ...]) -> Violation:
    there = [*sorted(have), *(["a master"] if name in kept.masters else [])]
    detail = f"has {', '.join(there)} but no {' and no '.join(lacking)}"
    number = next(iter(have.values()))[0] if have else kept.masters[name][0]
    return Violation(name, (kept.lacks(number, lacking[0], detail),), f"{name} {detail}")
