"""One set of weights, stored twice: what converts, reshards or saves again does not compute. Pure.

Two runs that were trained apart in another order differ by rounding nearly everywhere. Where most of what was trained
is equal in every bit, nothing was: what differs there is no noise of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from auditor.comparison.holding import Holding
from auditor.comparison.matching import Pair
from auditor.comparison.outcome import OPEN, PROVED, Amount, Compared, Standing
from auditor.comparison.rounding import SAYS_NOTHING, Model, Threshold
from auditor.model.catalog import Role
from auditor.model.dtype import DType

SHARE = 0.5
"""Of the elements that were trained: from here on those that are equal in every bit speak for all."""
APART = 1000
"""Optimizer steps from which on equal moments say so. Runs that were trained apart keep many in their first steps: what
differs by less than a computation in bfloat16 rounds is not seen by it (docs/rounding-bound.md)."""
TWICE_ROUNDED = 1 / 16
"""Of a tensor's elements, what a rounding in between moves to a number that is not the nearest: by way of float16 to
bfloat16 (11 and 8 bits) the one in eight that comes to lie on a tie, of which half go the other way."""
MOMENTS = (Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.MOMENT)
WEIGHTS = (Role.PARAMETER, Role.MASTER, Role.EMA)
_ADAPTER = re.compile(r"(?:^|[._])(?:lora|dora|hada|lokr|oft|ia3|vera|adapters?|prompt_encoder)(?:[._]|$)")
"""In names of PEFT's and other libraries' adapters."""
_STATISTICS = re.compile(r"(?:^|\.)(?:running|moving)_(?:mean|var|variance)$")
"""What normalisation over batches keeps of activations."""
NO_ROUNDING = 0.01
"""Relative difference of averages of the same activations that no order of adding them up makes."""
SAME_NUMBERS = "equal as numbers"
UNRELATED = "it has no more in common with the reference than unrelated weights have"
ROUNDED_OTHERWISE = "a copy in one dtype rounds nothing, and elements differ by one distance between numbers"
NOT_NEAREST = "elements are not the nearest numbers of the narrower dtype, as those of other tensors are"
ONE_SIDED = "what differs is nearly all larger, or nearly all smaller: a factor or a cut-off, no rounding to nearest"
_APART = (
    "more than one set of weights, stored twice, and less than weights that have nothing in common: how far training "
    "leads apart is told by optimizer state that is known to be its own, on both sides, or by reruns of the reference "
    "(--calibrate)"
)
_TRAINED = (
    "trained apart, and without optimizer state that is known to be its own, on both sides, nothing tells how far that "
    "may lead: --calibrate"
)


def stored_twice(dtype: DType, spread: float) -> Threshold:
    """One set of weights: rounded on its way, an element differs by no more than one distance between numbers."""
    how = f"one set of weights, stored twice: 2^-{dtype.mantissa_bits}"
    return Threshold(dtype.epsilon, how, "derived", unrelated=spread, stored=True)


def standing_of(model: Model, amount: Amount, threshold: Threshold) -> tuple[Standing, str]:
    """How a weight stands of which nothing is known but its own numbers, and why."""
    if not amount.relative:
        return Standing.ROUNDING, SAME_NUMBERS
    if amount.relative > threshold.beyond:
        return Standing.BEYOND, UNRELATED
    if model.trained:
        return Standing.UNDETERMINED, _TRAINED
    if amount.num_far or amount.relative > threshold.relative:
        return Standing.UNDETERMINED, _APART
    if threshold.vague:
        return Standing.UNDETERMINED, "its elements differ from each other by no more than by rounding"
    return Standing.ROUNDING, ""


@dataclass(frozen=True, slots=True)
class OneSet:
    """Both sides hold what was trained once."""

    share: float
    """Of the elements that were trained, those that are equal in every bit (or, of weights alone, but once rounded)."""
    nearest: bool = False
    """Whether most of them are in the narrower dtype what is nearest in the wider one: all was rounded so."""

    @staticmethod
    def threshold(dtype: DType) -> Threshold:
        """What is beyond rounding once it is known that no training came between."""
        return stored_twice(dtype, 0.0)

    def settled(self, row: Compared, dtype: DType, *, one_dtype: bool) -> Compared:
        """A row as it stands where nothing but one rounding can have come between; in ``one_dtype`` not even that."""
        amount = row.amount
        if amount is None or not amount.relative or row.standing not in OPEN or not dtype.epsilon:
            return row
        if row.pair.role is Role.BUFFER:
            # What a framework computes anew (rotary frequencies) is no part of what was trained.
            return row
        threshold = self.threshold(dtype)
        detail = f"{self.share:.1%} of what was trained is equal, or rounded once: no training came between"
        # How far training leads apart is beside the point now; that its replicas differ is not.
        detail = "; ".join((*(part for part in row.detail.split("; ") if "replicas" in part), detail))
        if amount.num_far < 0 and amount.relative <= threshold.relative:
            return row
        if amount.num_far or amount.relative > threshold.relative:
            return replace(row, standing=Standing.BEYOND, threshold=threshold, detail=detail)
        if amount.num_far == 0 and (one_dtype or self.nearest):
            usual = TWICE_ROUNDED * amount.num_elements
            many = amount.num_not_nearest > usual + 4 * math.sqrt(usual)
            standing = Standing.BEYOND if amount.one_sided or many else Standing.SUSPICIOUS
            how = ONE_SIDED if amount.one_sided else ROUNDED_OTHERWISE if one_dtype else NOT_NEAREST
            return replace(row, standing=standing, threshold=threshold, detail=f"{detail}; {how}")
        if amount.num_far == 0 and amount.one_sided:
            # Where all was cut off, it is how this export was made: no rounding to nearest, and nobody's error alone.
            detail = f"{detail}; {ONE_SIDED}"
            return replace(row, standing=Standing.SUSPICIOUS, threshold=threshold, detail=detail)
        standing = Standing.SUSPICIOUS if threshold.relative > SAYS_NOTHING * amount.spread else Standing.ROUNDING
        return replace(row, standing=standing, threshold=threshold, detail=detail)


def with_statistics(rows: Sequence[Compared]) -> list[Compared]:
    """The rows, with averages of activations beyond rounding that differ where all that was trained is equal.

    Weights and moments that are equal in every bit were trained by equal activations.
    """
    trained = [row for row in rows if row.pair.role in (*WEIGHTS, *MOMENTS)]
    if not trained or any(row.standing is not Standing.EQUAL for row in trained):
        return list(rows)
    detail = "all weights and moments are equal in every bit, and so were activations: their averages are not"
    return [
        replace(row, standing=Standing.BEYOND, detail=detail)
        if row.pair.role is Role.BUFFER and row.standing in OPEN and row.amount is not None
        and row.amount.relative > NO_ROUNDING and _STATISTICS.search(row.pair.name)
        else row
        for row in rows
    ]  # fmt: skip


def is_adapter(row: Compared) -> bool:
    """Whether a tensor is trained while most of its model is frozen: that the rest is equal says nothing of it."""
    return _ADAPTER.search(row.pair.name) is not None


def one_sets(rows: Sequence[Compared], left: Holding, model: Model) -> Mapping[bool, OneSet | None]:
    """Whether both sides hold one set, of adapters (True) and of all else: each speaks for itself."""
    return {kind: _one_set([row for row in rows if is_adapter(row) is kind], left, model) for kind in (False, True)}


def _one_set(rows: Sequence[Compared], left: Holding, model: Model) -> OneSet | None:
    """Whether both sides hold one set.

    Counted are moments, where both sides have any, for weights may be frozen; else weights, also such as were rounded
    once. Zeros (experts that no token chose) count on no side.
    """
    has_state = any(row.pair.role in MOMENTS and _both(row.pair) for row in rows)
    # A kernel that adds up in another order leaves all but its own gradient equal for one step, and many for a few.
    if model.num_steps < APART if has_state else model.trained:
        return None
    roles = MOMENTS if has_state else WEIGHTS
    total = proved = cast = 0
    for row in rows:
        number = row.pair.reference
        if row.pair.role not in roles or number is None or not _both(row.pair) or not left.size(number):
            continue
        count = left.tensors[number].num_elements
        total += count
        proved += count if _is_same(row, rounded=not has_state) else 0
        cast += count if row.standing is Standing.CAST else 0
    return OneSet(proved / total, cast >= SHARE * total) if total and proved >= SHARE * total else None


def _is_same(row: Compared, *, rounded: bool) -> bool:
    once = rounded and row.standing is Standing.ROUNDING and row.amount is not None and not row.amount.num_far
    return once or row.standing in PROVED


def _both(pair: Pair) -> bool:
    return pair.reference is not None and pair.candidate is not None
