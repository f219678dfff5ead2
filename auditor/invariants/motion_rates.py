"""What is recorded of one parameter's optimizer between two saves, and the bounds that follow. Pure numbers.

With b1, b2 the decay rates, g the gradients and n steps between the saves, every step rounded to the worst side
(:mod:`~auditor.invariants.moment_bound`):

    |m| <= p |m| + q |g|        v + F >= r (v + F) + s g^2        F = 2 eta / (1 - b2)

Second moments only decay by r, so v2 + F >= r^n (v1 + F). For weights, Cauchy-Schwarz over the n steps and
x <= -ln(1 - x) bound the sum of all |g| / sqrt(v), whatever the gradients were, by what v itself became:

    sum |g_t| / sqrt(v_t + F) <= sqrt(n / s * (ln((v2 + F) / (v1 + F)) + n ln(1 / r)))

and the recursion of m turns it into one of all |m| / sqrt(v): ``docs/motion-bound.md`` has the derivation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.invariants.learning_rates import largest_between
from auditor.invariants.moment_bound import moment_bound, round_off, step_rates
from auditor.invariants.neighbours import Neighbours, Updates
from auditor.invariants.optimizer_values import kept_by_adam
from auditor.invariants.recorded import Betas, RecordedGroups, lacking, number, rates_fell, why_no_rate
from auditor.model.catalog import Role
from auditor.model.dtype import DType
from auditor.model.optimizer import ParameterGroup

_LEAST_KEPT = 1e-6
"""Of a second moment: after more steps, its decay says nothing."""
_MOST_LOST = 0.5
"""By rounding, of what is kept of a second moment or of a weight."""
_ADAM = frozenset({
    "adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam", "fusedadamw", "adamwtorch", "adamwtorchfused",
    "adamwapexfused", "torchadam", "torchadamw",
})  # fmt: skip
"""Classes whose step is lr * m / (sqrt(v) + eps), bias-corrected."""
NOT_ONE_STEP = "the saves are not one optimizer step apart"
_NO_CLASS = (
    "neither the optimizer's class is recorded nor does its group have all of Adam's settings; where no betas are "
    'recorded, auditor.toml can state under [optimizer]: class = "adamw"'
)
NO_STEP = "no optimizer step was counted for it since the save before"
DOES_NOT_APPLY = frozenset({NOT_ONE_STEP, NO_STEP})
"""Reasons for which a statement is not about two saves, rather than not known of them."""
_UNSCHEDULED = 10.0
"""Times the largest recorded rate that a schedule may reach which leaves no largest: torch's CyclicLR."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Of one parameter: both saves agree on it."""

    betas: Betas
    updates: Updates
    round_off: float
    """Of the moments' dtype."""
    floor: float
    """F: what underflow can take from a second moment in all."""
    groups: tuple[tuple[ParameterGroup, ...], tuple[ParameterGroup, ...]]
    dtypes: tuple[DType, DType]
    scheduled: float | None = None
    """The largest rate between the saves by the form of a schedule that both follow; None where none is recorded."""
    falling: bool = False
    """Whether rates were logged that only fell, from before the first save on."""

    @property
    def second(self) -> float:
        """Decay rate of the second moment."""
        return self.betas.second

    @property
    def highest(self) -> float:
        """Largest decay rate of the first moment."""
        return self.betas.highest

    @property
    def kept_of_second(self) -> float:
        """r^n: no less than this is left of a second moment."""
        return float(step_rates(self.highest, self.second, self.round_off).v ** self.updates.most)

    def why_no_decay(self) -> str:
        """Why nothing follows for the second moment; empty where something does."""
        if self.kept_of_second < _LEAST_KEPT:
            return "so many steps lie between the saves that nothing of a second moment has to be left"
        if self.second**self.updates.most * (1 - _MOST_LOST) > self.kept_of_second:
            return "rounding of the second moment's dtype leaves no useful bound"
        return ""

    def why_no_replay(self) -> str:
        """Why moments can't be replayed."""
        if (self.updates.fewest, self.updates.most) != (1, 1):
            return NOT_ONE_STEP
        if self.betas.lowest != self.betas.highest:
            return "its decay rates follow a schedule"
        return "its moments are stored in too few bits to be replayed" if self.round_off > 2.0**-20 else ""

    def why_no_update(self, dtype: DType) -> str:
        """Why the weight can't be replayed."""
        if reason := self.why_no_replay() or self.why_no_adam():
            return reason
        if dtype.mantissa_bits < 23:
            return "the weight has too few bits to be replayed, and no master is stored"
        if any(group.hyperparameters.get("amsgrad") is True for group in self.groups[1]):
            return "amsgrad divides by its own maximum"
        return lacking(self.all_groups) or why_no_rate(self.all_groups)

    @property
    def all_groups(self) -> list[ParameterGroup]:
        """Of both saves."""
        return [*self.groups[0], *self.groups[1]]

    def why_no_adam(self) -> str:
        """Why it isn't known that the step is Adam's."""
        for group in self.all_groups:
            kind = "".join(c for c in group.optimizer.rpartition(".")[2].lower() if c.isalnum())
            if kind and kind not in _ADAM:
                return f"the step of its optimizer ({kind}) is not plain Adam's"
            if not kind and "amsgrad" not in group.hyperparameters:
                return _NO_CLASS
            odd = {"momentum_decay", "rectify", "weight_decouple", "delta", "trust_clip", "max_coeff", "clip_threshold"}
            if odd & group.hyperparameters.keys():
                return "its hyperparameters are not those of plain Adam"
        return ""

    @property
    def assumed(self) -> str:
        """What the largest rate rests on, where no schedule records it."""
        if self.knows_peak or self.scheduled is not None:
            return ""
        return f", if the learning rate was never above {self.largest_rate():g}"

    def largest_rate(self) -> float:
        """No smaller than any rate between the saves, as far as that is recorded.

        Rates of both saves, what a schedule began with, and what it leaves as its largest (OneCycleLR, Megatron). A
        schedule that leaves none may have gone beyond: CyclicLR records its smallest alone. Where rates only fell, that
        of the save before is the largest.
        """
        if self.scheduled is not None:
            return self.scheduled
        if self.falling:
            return max(map(_rate, self.all_groups))
        known = [
            (number(group.hyperparameters.get(key)) or 0.0)
            * max(number(group.hyperparameters.get("lr_mult")) or 1.0, 1.0)
            for group in self.all_groups
            for key in ("lr", "initial_lr", "max_lr")
        ]
        scheduled = any(
            "initial_lr" in group.hyperparameters and "max_lr" not in group.hyperparameters for group in self.all_groups
        )
        same = len({_rate(group) for group in self.all_groups}) == 1
        return max(known) * (1.0 if not scheduled and (same or self.knows_peak) else _UNSCHEDULED)

    @property
    def knows_peak(self) -> bool:
        """Whether every group records the largest rate of its schedule."""
        return all("max_lr" in group.hyperparameters for group in self.all_groups)

    def candidates(self, dtype: DType) -> Iterator[tuple[float, ...]]:
        """Constants of the replay: the step may have used the rate of either save, and decay of either kind."""
        step = self.updates.first + 1
        for rate in dict.fromkeys(_rate(group) for group in self.all_groups):
            for group in self.groups[1]:
                decay = number(group.hyperparameters.get("weight_decay")) or 0.0
                eps = number(group.hyperparameters.get("eps")) or 0.0
                corrected = group.hyperparameters.get("bias_correction", True)
                corrections = (1 - self.highest**step, 1 - self.second**step) if corrected else (1.0, 1.0)
                for weight_decay in dict.fromkeys((decay, 0.0)):
                    yield rate, weight_decay, eps, *corrections, round_off(dtype, 52)


_CODES = re.compile(r"codebook|quantiz|(?<![a-z])vq(?![a-z])", re.IGNORECASE)


def why_set_otherwise(name: str) -> str:
    """Why more than the optimizer may move a weight: codes that nothing is mapped to are drawn anew."""
    return "by its name a codebook, whose unused codes are set anew" if _CODES.search(name) else ""


def _rate(group: ParameterGroup) -> float:
    return number(group.hyperparameters.get("lr")) or 0.0


def recorded(neighbours: Neighbours, name: str) -> Recorded | str:
    """What both saves record of a parameter's optimizer, or why nothing follows."""
    key = f"recorded {name}"
    if key not in neighbours.remembered:
        neighbours.remembered[key] = _recorded(neighbours, name)
    found = neighbours.remembered[key]
    assert isinstance(found, (Recorded, str))
    return found


def _recorded(neighbours: Neighbours, name: str) -> Recorded | str:
    updates = neighbours.counted.of(name)
    if updates is None:
        return "no optimizer steps are counted for it in both saves"
    if updates.most < 1:
        return NO_STEP
    if not updates.certain:
        return "the optimizer may have begun anew since the save before"
    groups = [tuple(_groups(neighbours, side).of(name)) for side in (0, 1)]
    rates = [kept_by_adam(of_side) for of_side in groups]
    for rate in rates:
        if isinstance(rate, str):
            return rate
    if rates[0] != rates[1] or not isinstance(rates[0], Betas):
        return "the saves record different betas"
    numbers = [neighbours.shared.get((role, name)) for role in (Role.FIRST_MOMENT, Role.SECOND_MOMENT)]
    if any(pair is None for pair in numbers):
        return "its moments are not in both saves"
    dtypes = [neighbours.after.catalog.tensors[pair[1]].dtype for pair in numbers if pair is not None]
    u = max(round_off(dtype, 52) for dtype in dtypes)
    eta = max(2.0 ** (1 - dtype.bias) for dtype in dtypes)
    floor = 2 * eta / (1 - rates[0].second)
    peak = largest_between(groups[0][0], groups[1][0]) if len(groups[0]) == len(groups[1]) == 1 else None
    falling = rates_fell(neighbours.before.catalog, neighbours.after.catalog)
    return Recorded(rates[0], updates, u, floor, (groups[0], groups[1]), (dtypes[0], dtypes[1]), peak, falling)


def _groups(neighbours: Neighbours, side: int) -> RecordedGroups:
    found = neighbours.remembered.get(f"groups {side}")
    if not isinstance(found, RecordedGroups):
        found = RecordedGroups((neighbours.before, neighbours.after)[side].catalog)
        neighbours.remembered[f"groups {side}"] = found
    return found


def motion_bound(known: Recorded, dtype: DType) -> tuple[float, ...] | str:
    """Constants of the bound on a weight's motion, or why there is none. ``dtype``: the weight's."""
    if reason := known.why_no_adam():
        return reason
    if reason := lacking(known.all_groups):
        return reason
    if not known.largest_rate():
        return "its learning rate is zero"
    n, betas = known.updates.most, known.betas
    limit = moment_bound(betas, *known.dtypes, None)
    if isinstance(limit, str):
        return limit
    ends = [step_rates(beta1, betas.second, known.round_off) for beta1 in (betas.lowest, betas.highest)]
    p, q = max(end.m for end in ends), max(end.g for end in ends)
    r, s = ends[0].v, ends[0].g2
    rho = p / math.sqrt(r)
    eps = min((number(group.hyperparameters.get("eps")) or 0.0) for group in known.all_groups)
    if rho >= 1 or s <= 0 or eps**2 < known.floor:
        return "no bound on the step follows from its hyperparameters and the moments' dtype"
    weight_decay = max(number(group.hyperparameters.get("weight_decay")) or 0.0 for group in known.all_groups)
    rate, u = known.largest_rate(), round_off(dtype, 52)
    decays, rounds = n * rate * weight_decay, 2 * n * u
    if decays > _MOST_LOST or rounds > _MOST_LOST:
        return "so many steps lie between the saves that decay or rounding may have moved all of the weight"
    # One part in 10^4 for the arithmetic of the step itself, in single precision.
    return (
        rate * _correction(known) * (1 + 1e-4), rho / (1 - rho), q / (1 - rho) * math.sqrt(n / s), n * -math.log(r),
        known.floor, n * limit.limit, decays, rounds,
    )  # fmt: skip


def _correction(known: Recorded) -> float:
    """The largest factor by which bias correction makes a step longer: sqrt(1 - b2^t) / (1 - b1^t), or 1."""
    steps = [known.updates.first + k for k in range(1, int(min(known.updates.most, 1000)) + 1)]
    factors = [math.sqrt(1.0 - known.second**step) / (1.0 - float(known.highest**step)) for step in steps]
    return max([1.0, *factors])
