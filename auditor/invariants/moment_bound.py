"""The bound on a first moment by its second: Adam's own arithmetic as a checksum. Pure numbers.

With m = sum of (1-b1) b1^k g_k and v = sum of (1-b2) b2^k g_k^2 over the same gradients g (k steps ago), the
Cauchy-Schwarz inequality on the two geometric sums gives, whatever the gradients were,

    m^2 <= R_n v,    R_n = (b1^2/b2) R_{n-1} + (1-b1)^2/(1-b2),    R_0 = 0,

with the limit (1-b1)^2 / ((1-b2)(1 - b1^2/b2)) if b1^2 < b2: |m| <= 7.27 sqrt(v) for b1 = 0.9, b2 = 0.999. Rounding and
underflow only change the recursion's numbers. ``docs/optimizer-bound.md`` has the derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from auditor.invariants.recorded import Betas
from auditor.model.dtype import DType, Kind

MOST_SLACK = 0.5
"""If rounding could make the limit larger by more than this part of it, the bound says too little to be judged by."""
_MOST_STEPS = 100_000
"""Of the recursion; after them, the limit of endlessly many steps is taken."""
_SINGLE = 2.0**-24
"""Round-off of float32, in which betas are handed to compiled optimizers."""


@dataclass(frozen=True, slots=True)
class Bound:
    """|m| <= limit * sqrt(v + floor)."""

    limit: float
    floor: float
    exact: float
    """The limit in exact arithmetic: ``limit`` is this and the slack for rounding."""


@dataclass(frozen=True, slots=True)
class StepRates:
    """Factors of one step: of m and of the gradient in |m|, of v and of the squared gradient in v."""

    m: float
    g: float
    v: float
    g2: float

    @property
    def decay(self) -> float:
        """By what the ratio m² / v decays."""
        return self.m**2 / self.v

    @property
    def gain(self) -> float:
        """What a gradient adds to it."""
        return self.g**2 / self.g2


def step_rates(beta1: float, beta2: float, round_off: float) -> StepRates:
    """The factors if every operation rounds to the worst side.

    Formulas in use: ``m + (g - m)(1 - b1)`` or ``b1 m + (1 - b1) g``, ``b2 v + (1 - b2) g g``, each operation rounded,
    betas and 1 - beta taken in float32. At most three roundings of what is kept, four of what is added, one of a beta.
    """
    u, single = round_off, _SINGLE if round_off else 0.0
    w1, w2 = (1 - beta1) * (1 + single) + single, (1 - beta2) * (1 - single) - single
    return StepRates(
        m=(beta1 * (1 + single) + 2 * u * w1) * (1 + u) ** 3,
        g=w1 * (1 + 2 * u) * (1 + u) ** 3,
        v=beta2 * (1 - single) * (1 - u) ** 3,
        g2=max(w2, 0.0) * (1 - u) ** 4,
    )


@lru_cache(maxsize=256)
def _ratio(betas: Betas, round_off: float, num_steps: float | None) -> float:
    """sqrt(R_n) for the worst order of decay rates within the recorded range; infinite where there is no bound.

    R_n is convex in b1, so each step's worst rate is one end of the range.
    """
    ends = [step_rates(beta1, betas.second, round_off) for beta1 in {betas.lowest, betas.highest}]
    if any(end.v <= 0 or end.g2 <= 0 or end.decay >= 1 for end in ends):
        return math.inf
    limit = max(end.gain / (1 - end.decay) for end in ends)
    reached, steps = 0.0, 0.0
    while num_steps is not None and steps < num_steps:
        if steps >= _MOST_STEPS or reached > limit * (1 - 1e-12):
            return math.sqrt(limit)
        reached = max(end.decay * reached + end.gain for end in ends)
        steps += 1
    return math.sqrt(limit if num_steps is None else reached)


def round_off(dtype: DType, mantissa_bits: int) -> float:
    """The largest relative error of one operation whose result is stored with so many bits of mantissa.

    Half a unit in the last place for float32 and wider; a whole one below, where results may be rounded stochastically.
    """
    bits = min(mantissa_bits, dtype.mantissa_bits)
    return 2.0 ** -(bits + (bits >= 23))


def moment_bound(
    betas: Betas, first: DType, second: DType, num_steps: float | None, mantissa_bits: int = 52
) -> Bound | str:
    """The bound for moments stored so, or why there is none.

    Args:
        betas: recorded decay rates.
        first: dtype of the first moment.
        second: dtype of the second moment.
        num_steps: no fewer than the steps that were taken; None for any number.
        mantissa_bits: those in use, where they are fewer than the dtypes have.
    """
    if any(dtype.kind is not Kind.FLOAT or dtype.bits < 16 for dtype in (first, second)):
        return "the moments are quantised, and their scales are not known"
    exact = _ratio(betas, 0.0, num_steps)
    if math.isinf(exact):
        return "beta1² is not below beta2, so no bound follows"
    u = max(round_off(dtype, mantissa_bits) for dtype in (first, second))
    # Once more for moments that were computed in a wider dtype and rounded when they were stored.
    limit = _ratio(betas, u, num_steps) * (1 + u) / math.sqrt(1 - u)
    if limit > exact * (1 + MOST_SLACK):
        return "rounding of the moments' dtype leaves no useful bound"
    # Below the smallest normal number eta, a step may flush what is kept and what is added: at most eta each.
    eta = max(2.0 ** (1 - dtype.bias) for dtype in (first, second))
    return Bound(limit, 2 * eta / (1 - betas.second), exact)
