"""Whether an optimizer must have moved a weight, by what one step records of it: hyperparameters, counters, moments."""

from __future__ import annotations

import math

from auditor.invariants.recorded import RecordedGroups, number, why_no_rate
from auditor.invariants.related import MOMENTS, Seen, by_role, seen_whole
from auditor.model.catalog import Role
from auditor.model.dtype import FLOAT32, DType
from auditor.model.run import StepEvidence, optimizer_step

_MARGIN = 16.0
"""How far the predicted motion must be above the round-off of the largest weight for its absence to mean anything."""
_FIRST_STEPS = 8
"""The first may be taken at a learning rate of zero; RAdam's first five don't divide by sqrt(v)."""
_WARM_UP = 1000
"""Steps for which a schedule may have kept the rate at zero: the recorded one is that of the next step."""


class ExpectedMotion:
    """Of the weights of one step."""

    def __init__(self, evidence: StepEvidence) -> None:
        self._whole, self._roles = seen_whole(evidence.catalog, evidence.observations), by_role(evidence.catalog)
        self._groups = RecordedGroups(evidence.catalog)
        steps = optimizer_step(evidence.catalog)
        self._steps = evidence.catalog.step if steps is None else steps

    def why_unmoved(self, name: str, seen: Seen | None) -> str:
        """Why a weight may still be what it was made of; empty where the optimizer must have moved it."""
        if self._steps < _FIRST_STEPS:
            return f"fewer than {_FIRST_STEPS} optimizer steps were taken"
        groups = self._groups.of(name)
        if self._steps < _WARM_UP and any("initial_lr" in group.hyperparameters for group in groups):
            return "the learning rate follows a schedule, which may have begun with steps at zero"
        if reason := why_no_rate(groups):
            return reason
        return self.why_unmoved_at(min(number(group.hyperparameters.get("lr")) or 0.0 for group in groups), name, seen)

    def why_unmoved_at(self, rate: float, name: str, seen: Seen | None, dtype: DType = FLOAT32) -> str:
        """Why a step at ``rate`` may have left a weight of ``dtype`` as it was; empty if it can't.

        A step moves some element by about lr * |m| / (sqrt(v) + eps), with m the largest first moment and v the largest
        second; bias correction at worst quarters it.
        """
        first, second = (self._whole.get(self._roles[role].get(name, -1)) for role in MOMENTS)
        if first is None or second is None or seen is None:
            return "its moments were not read"
        epsilons = [number(group.hyperparameters.get("eps")) or 1e-8 for group in self._groups.of(name)]
        # AMSGrad divides by the largest second moment there ever was.
        largest = self._whole.get(self._roles[Role.MOMENT].get(f"{name}.max_exp_avg_sq", -1))
        most = max(second.maximum, largest.maximum if largest else 0.0, 0.0)
        motion = rate * first.largest / (math.sqrt(most) + max(epsilons, default=1e-8))
        round_off = 2.0 ** -(dtype.mantissa_bits + 1)
        return "" if motion > _MARGIN * round_off * seen.largest else "its steps may have been below rounding"
