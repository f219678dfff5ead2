"""OPT: what is recorded of the optimizer besides its moments can be true: finite settings, counters that have begun."""

from __future__ import annotations

import math
from collections import defaultdict

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.optimizer_state import plain
from auditor.invariants.recorded import files_with_groups
from auditor.invariants.related import MOMENTS, Collected, by_role, of_tensor, seen_whole, why_unread
from auditor.model.catalog import Role, Scalar
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.optimizer import Hyperparameter
from auditor.model.run import StepEvidence

_FINITE = frozenset({"lr", "betas", "eps", "weight_decay", "momentum", "dampening"})
"""Hyperparameters of the update itself. Others may be infinite: a limit that is never reached."""


def hyperparameters_are_finite(evidence: StepEvidence) -> Judgement:
    """No group records a NaN, or an infinite factor of its update."""
    catalog, found = evidence.catalog, Collected()
    for file, groups in files_with_groups(catalog):
        for group in groups:
            wrong = [
                f"{key} {value}" for key, value in sorted(group.hyperparameters.items()) if not _can_be(key, value)
            ]
            found.num_holds += not wrong
            if wrong:
                detail = f"parameter group {group.number} has {', '.join(wrong)}"
                at = Location(catalog.step, file, coordinate=group.coordinate, detail=detail)
                name = catalog.within(file)
                found.violations.append(Violation(f"{name} group {group.number}", (at,), f"{name}: {detail}"))
    if not catalog.groups:
        found.not_applicable["no hyperparameters are recorded"] += 1
    return found.judgement()


def _can_be(key: str, value: Hyperparameter) -> bool:
    numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, float)]
    return not any(math.isnan(one) or (math.isinf(one) and key in _FINITE) for one in numbers)


def counters_have_begun(evidence: StepEvidence) -> Judgement:
    """No parameter whose moments hold something has counted no step."""
    catalog, found = evidence.catalog, Collected()
    whole, roles = seen_whole(catalog, evidence.observations), by_role(catalog)
    zero: dict[str, list[Scalar]] = defaultdict(list)
    for scalar in catalog.scalars:
        if scalar.name == "optimizer_step" and scalar.tensor:
            if scalar.value == 0:
                zero[scalar.tensor].append(scalar)
            else:
                found.num_holds += 1
    for name, scalars in zero.items():
        numbers = [roles[role][name] for role in MOMENTS if name in roles[role]]
        used = [number for number in numbers if number in whole and whole[number].num_nonzero]
        if used:
            detail = "has counted no step, its moments are not zero"
            at = of_tensor(evidence, used[0], detail=detail)
            location = Location(at.step, scalars[0].file, name, Role.COUNTER, at.order, scalars[0].coordinate,
                                detail=detail)  # fmt: skip
            found.violations.append(Violation(plain(name), (location,), f"{plain(name)} {detail}"))
        elif all(number in whole for number in numbers):
            found.num_holds += 1
        else:
            found.unknown(why_unread(evidence), name)
    if not zero and not found.num_holds:
        found.not_applicable["no count of optimizer steps is recorded for single parameters"] += 1
    return found.judgement()


INVARIANTS = (
    Invariant(
        "OPT008", "hyperparameter-not-finite", Severity.ERROR,
        statement="No hyperparameter of a group is NaN; learning rate, betas, epsilon, weight decay and momentum are "
                  "finite.",
        rationale="The next step multiplies every weight of the group by it: all become NaN at once.",
        source="torch/optim/adam.py: only values given to the constructor are checked, not those of a state dict",
        example="rank_0.pt: parameter group 0 has lr nan",
        misses="A finite setting that is wrong; one that is kept as a tensor; settings that a scheduler makes "
               "anew when it resumes.",
        hint="Set it right before resuming. A learning rate becomes NaN when a scheduler divides by a count of zero.",
        judge_step=hyperparameters_are_finite, one_fault=True,
        likely_causes=(LikelyCause("a schedule was computed from a length or loss that was zero or NaN",
                                   "torch/optim/lr_scheduler.py"),),
    ),
    Invariant(
        "OPT009", "counter-zero", Severity.ERROR,
        statement="A parameter with moments that aren't zero has counted at least one optimizer step.",
        rationale="Bias correction starts anew while the moments are old: the first updates after a resume come out "
                  "up to many times too large.",
        source="deepspeedai/DeepSpeed#5289; torch/optim/adam.py counts a step before it fills the moments",
        example="head.weight has counted no step, its moments are not zero",
        misses="Counters that were set back to another number than 0 (OPT007, INT005, INT011); counts of whole groups, "
               "which some optimizers never update.",
        hint="Set the counters to the number of steps that the moments have seen before resuming.",
        needs=Needs.WEIGHTS, judge_step=counters_have_begun, goes_first=True, one_fault=True,
        likely_causes=(LikelyCause("a conversion or resume did not carry the counters over",
                                   "deepspeedai/DeepSpeed#5289"),),
    ),
)  # fmt: skip
