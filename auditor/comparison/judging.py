"""How one pair of tensors stands: equal by digest, else measured, explained, held against its threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from auditor.comparison.averaged import told_of_mean
from auditor.comparison.calibration import at_least
from auditor.comparison.holding import Holding, Key, Lanes
from auditor.comparison.lockstep import FEWEST, Distance, Stored, measure
from auditor.comparison.matching import Pair, is_computed
from auditor.comparison.one_set import MOMENTS, SAME_NUMBERS, UNRELATED, WEIGHTS, OneSet, standing_of, stored_twice
from auditor.comparison.outcome import DIFFERENT, Amount, Compared, Standing
from auditor.comparison.permutation import explain_order
from auditor.comparison.power import power_of
from auditor.comparison.precision import COARSENED, data_parallel, narrowed, share_coarse
from auditor.comparison.replaying import Left, left_over
from auditor.comparison.rounding import IN_COMMON, Model, Motion, Threshold, of_moment, of_weight, uncertainty
from auditor.comparison.softness import motion_of
from auditor.comparison.vocabulary import in_common
from auditor.model.catalog import Role
from auditor.model.dtype import DTYPES, DType, Kind
from auditor.view.assemble import SourceLostError

COARSE = 0.99
"""Of a gradient's elements: from here on they are taken for numbers of a narrower dtype."""
VAGUE = "calibrate with reruns of the reference"
ROUNDING_OF_ZERO = "the reference is zero, and what the candidate has is no larger than rounding in its layer"
COMPUTED = "it follows from sizes alone, and is no part of what was trained"
EXACT = Threshold(0.0, "numbers of this dtype are equal, or they are others", "derived")

Contents = dict[tuple[Role, str, tuple[int, ...], Lanes], str]
"""Role, dtype, shape and digest to what a tensor is called."""
Allowed = tuple[float, float]
"""Optimizer steps since both were equal, and the largest difference by rounding, as a length."""


@dataclass(frozen=True)
class Bench:
    """Two holdings on the bench, and by what their tensors are judged."""

    reference: Holding
    candidate: Holding
    model: Model
    noise: Mapping[Key, Threshold] = field(default_factory=dict)
    """Calibrated thresholds."""
    contents: Contents = field(default_factory=dict)
    """What the reference holds, here and in the step before, to how it is called."""
    before: Mapping[Key, Allowed] = field(default_factory=dict)
    """What rounding was allowed of weights in the step before."""
    allowed: dict[Key, Allowed] = field(default_factory=dict)
    """And what it is allowed in this one; filled as pairs are judged."""
    coarse_ones: dict[str, bool] = field(default_factory=dict)
    """Parameters whose gradients are made of bfloat16 numbers, as they may be; and whether the reference's are, too."""

    def judge(self, pair: Pair) -> tuple[Compared, Distance | None]:
        """How a pair stands, and what was measured of it where it was."""
        if pair.reference is None or pair.candidate is None:
            return self._lone(pair), None
        left, right = self.reference.tensors[pair.reference], self.candidate.tensors[pair.candidate]
        row = Compared(pair, Standing.UNDETERMINED, shown=self.candidate.renamed.get(right.name, ""))
        if left.shape != right.shape:
            padded = self._padded(row)
            if padded is not None:
                return padded, None
            return replace(row, standing=Standing.SHAPE, detail=_shapes(left.shape, right.shape)), None
        if (left.dtype.kind is Kind.COMPLEX) is not (right.dtype.kind is Kind.COMPLEX):
            return replace(row, standing=Standing.BEYOND, detail=f"{left.dtype.name} against {right.dtype.name}"), None
        own, theirs = self.reference.distinct(pair.reference), self.candidate.distinct(pair.candidate)
        if not own or not theirs:
            side = "reference" if not own else "candidate"
            return replace(row, detail=f"not read whole in the {side}"), None
        if left.dtype == right.dtype and self._equal(own, theirs):
            torn = f"{len(own)} replicas differ from each other, alike on both sides" if len(own) > 1 else ""
            return replace(row, standing=Standing.EQUAL, detail=torn), None
        try:
            return self._unequal(row, own, theirs)
        except SourceLostError as error:
            return replace(row, detail=str(error)), None

    def _padded(self, row: Compared) -> Compared | None:
        """A vocabulary that one side pads; None where it is none, or can't be read."""
        own, theirs = row.pair.reference or 0, row.pair.candidate or 0
        if self.reference.source is None or self.candidate.source is None:
            return None
        found = in_common(Stored(self.reference.source, own), Stored(self.candidate.source, theirs))
        if found is None:
            return None
        row = replace(row, detail=found.text)
        if not found.apart.num_differ:
            return replace(row, standing=Standing.EQUAL)
        return self.against(replace(row, amount=amount_of(found.apart)))

    def _lone(self, pair: Pair) -> Compared:
        if pair.reference is not None:
            row, tensor = Compared(pair, Standing.LACKING), self.reference.tensors[pair.reference]
        else:
            row = Compared(pair, Standing.EXTRA, shown=self.candidate.renamed.get(pair.name, ""))
            tensor = self.candidate.tensors[pair.candidate or 0]
        # A mask or a table of frequencies is no loss.
        return replace(row, computed=True, detail=COMPUTED) if is_computed(tensor) else row

    def _equal(self, own: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether the replicas of both sides hold the same, also where those of one side drifted apart."""
        return {*map(self.reference.lanes, own)} == {*map(self.candidate.lanes, theirs)}

    def _unequal(self, row: Compared, own: list[int], theirs: list[int]) -> tuple[Compared, Distance | None]:
        """The pair of replicas that lie farthest apart speaks for the tensor."""
        pair = row.pair
        assert pair.reference is not None
        assert pair.candidate is not None
        notes = [f"{len(rows)} replicas of the {side} differ from each other" for rows, side in
                 ((own, "reference"), (theirs, "candidate")) if len(rows) > 1]  # fmt: skip
        row = replace(row, detail="; ".join(notes))
        if self.reference.source is None or self.candidate.source is None:
            return self._by_sketch(row, own[0], theirs), None
        left = Stored(self.reference.source, pair.reference, int(self.reference.contents.replica[own[0]]))
        found: tuple[float, Stored, Distance] | None = None
        for at in theirs[:4]:
            right = Stored(self.candidate.source, pair.candidate, int(self.candidate.contents.replica[at]))
            apart = measure(left, right)
            if found is None or apart.relative > found[0]:
                found = apart.relative, right, apart
        assert found is not None
        row = self._told(row, left, *found[1:])
        if len(own) > 1 and found[2].largest:
            row = replace(row, detail=_joined(row.detail, told_of_mean(self.reference, pair.reference, found[1])))
        return row, found[2]

    def _told(self, row: Compared, left: Stored, right: Stored, apart: Distance) -> Compared:
        row = replace(row, amount=amount_of(apart))
        if left.tensor.dtype != right.tensor.dtype and not apart.num_not_rounded and not apart.num_odd:
            narrow = f"{left.tensor.dtype.name} against {right.tensor.dtype.name}, rounded to nearest"
            fewer = right.tensor.dtype.bits < left.tensor.dtype.bits
            return replace(row, standing=Standing.CAST, detail=_joined(row.detail, narrow), narrowed=fewer)
        if left.tensor.dtype.epsilon and not apart.largest and not apart.num_odd:
            return replace(row, standing=Standing.ROUNDING, detail=_joined(row.detail, SAME_NUMBERS))
        known, row = row.detail, self.against(row)
        if row.standing is Standing.ROUNDING:
            return row
        other = self._elsewhere(right)
        if other:
            return self._misplaced(replace(row, holds=other, detail=_joined(known, f"holds the reference's {other}")))
        narrow = narrowed(left, right)
        if narrow:
            detail = f"the reference's numbers, rounded to {narrow} on their way"
            return replace(row, standing=Standing.BEYOND, detail=_joined(known, detail))
        is_open = row.standing is Standing.UNDETERMINED and row.threshold is not None and not row.threshold.stored
        order = explain_order(left, right, self._same_values(row.pair), by_chance=is_open)
        return replace(row, standing=Standing.REORDERED, detail=_joined(known, order)) if order else row

    def _elsewhere(self, right: Stored) -> str:
        """Which other tensor of the reference the candidate holds here."""
        assert self.candidate.source is not None
        row = next(r for r in self.candidate.rows[right.number] if self.candidate.contents.replica[r] == right.replica)
        what = right.tensor
        return self.contents.get((what.role, what.dtype.name, what.shape, self.candidate.lanes(row)), "")

    def _misplaced(self, row: Compared) -> Compared:
        """What holds another tensor's numbers; of constants (a fresh norm) that says nothing."""
        totals = self.candidate.contents.totals[self.candidate.rows[row.pair.candidate or 0][0]]
        says = row.standing is Standing.UNDETERMINED and totals["minimum"] != totals["maximum"]
        return replace(row, standing=Standing.BEYOND) if says else row

    def _same_values(self, pair: Pair) -> bool:
        """Whether both may hold the same numbers in another order."""
        assert pair.reference is not None
        assert pair.candidate is not None
        if self.reference.tensors[pair.reference].dtype != self.candidate.tensors[pair.candidate].dtype:
            return False
        own = self.reference.contents.totals[self.reference.rows[pair.reference][0]]
        theirs = self.candidate.contents.totals[self.candidate.rows[pair.candidate][0]]
        same = all(own[name] == theirs[name] for name in ("minimum", "maximum", "num_zero", "num_nan"))
        return bool(same and math.isclose(own["sum_squares"], theirs["sum_squares"], rel_tol=1e-9))

    def _by_sketch(self, row: Compared, own: int, theirs: list[int]) -> Compared:
        left = self.reference.contents.sketch[own]
        rights = [int(self.candidate.contents.sketch[at]) for at in theirs]
        if left < 0 or min(rights) < 0:
            return replace(row, detail=_joined(row.detail, "the digests differ; there is no sketch to tell how far"))
        one = self.reference.contents.sketches[left]
        size = float(np.linalg.norm(one))
        apart = max(float(np.linalg.norm(one - self.candidate.contents.sketches[right])) for right in rights)
        count = int(np.prod(self.reference.tensors[row.pair.reference or 0].shape))
        relative = apart / size if size else math.inf
        spread = self._spread(own, size, count)
        amount = Amount(relative, -1, count, math.nan, length=size, spread=spread, estimated=True)
        return self.against(replace(row, amount=amount))

    def _spread(self, row: int, size: float, count: int) -> float:
        """About how far elements lie from their mean, where extrema alone are kept: a quarter of what lies between."""
        if count < FEWEST:
            return 1.0
        totals = self.reference.contents.totals
        between = float(totals["maximum"][row]) - float(totals["minimum"][row])
        return min(1.0, between / 4 * math.sqrt(count) / size) if size and math.isfinite(between) else 1.0

    def against(self, row: Compared) -> Compared:
        """A measured pair held against its threshold."""
        assert row.amount is not None
        found = self.threshold(row.pair, row.amount)
        strange = row.pair.role in WEIGHTS and row.amount.relative > IN_COMMON * row.amount.spread
        shape = self.reference.tensors[row.pair.reference or 0].shape
        is_zero = row.pair.role in MOMENTS and not row.amount.length
        if is_zero and self.model.rounds(row.pair, shape, row.amount.largest):
            return replace(row, detail=_joined(row.detail, ROUNDING_OF_ZERO))
        if not math.isfinite(row.amount.relative):
            return replace(row, standing=Standing.BEYOND, detail=_joined(row.detail, _odd(row.amount)))
        if isinstance(found, str):
            if strange:
                return replace(row, standing=Standing.BEYOND, detail=_joined(row.detail, UNRELATED))
            return replace(row, detail=_joined(row.detail, found))
        if found.stored:
            standing, why = standing_of(self.model, row.amount, found)
            return replace(row, standing=standing, threshold=found, detail=_joined(row.detail, why))
        relative = row.amount.relative
        standing = Standing.ROUNDING if relative <= found.relative else Standing.SUSPICIOUS
        if found is EXACT and row.amount.num_differ:
            standing = Standing.BEYOND
        if relative > found.beyond:
            standing = Standing.BEYOND
        elif found.vague and strange:
            standing, row = Standing.BEYOND, replace(row, detail=_joined(row.detail, UNRELATED))
        elif found.relative < relative <= found.unstated:
            standing = Standing.UNDETERMINED
            row = replace(row, detail=_joined(row.detail, self.model.longer(row.pair, shape)))
        elif found.vague:
            standing = Standing.UNDETERMINED
            row = replace(row, detail=_joined(row.detail, f"rounding may be {found.relative:.2g} of it: {VAGUE}"))
        return replace(row, standing=standing, threshold=found)

    def replayed(self, row: Compared) -> Compared:
        """A weight one step from equal ones: its difference beside what its own moments explain of it."""
        if row.amount is None or row.pair.role not in (Role.PARAMETER, Role.MASTER):
            return row
        try:
            left = left_over(self.reference, self.candidate, self.model, row.pair)
        except SourceLostError as error:
            return replace(row, detail=_joined(row.detail, str(error)))
        if left is None:
            return row
        if left.relative <= left.threshold.relative:
            return self._explained(row, left)
        standing = Standing.BEYOND if left.relative > left.threshold.beyond else Standing.SUSPICIOUS
        margin = left.relative / left.threshold.relative
        # Of another save's weights, which are wrong in any case, this tells by how much where their threshold is vague.
        is_open = row.holds and row.threshold is not None and row.threshold.vague
        if (row.standing in DIFFERENT and not is_open) or row.margin > margin:
            return row
        amount = replace(row.amount, relative=left.relative)
        kept = "; ".join(part for part in row.detail.split("; ") if VAGUE not in part)
        detail = _joined(kept, "its own moments do not lead there from the weights that both sides had")
        return replace(row, standing=standing, amount=amount, threshold=left.threshold, detail=detail)

    @staticmethod
    def _explained(row: Compared, left: Left) -> Compared:
        """A weight that is where its own moments lead: its rounding is theirs, which are judged themselves."""
        is_open = row.standing is Standing.UNDETERMINED and row.threshold is not None and row.threshold.vague
        if not is_open or left.threshold.vague or row.amount is None:
            return row
        amount = replace(row.amount, relative=left.relative)
        detail = "where its own moments lead"
        return replace(row, standing=Standing.ROUNDING, amount=amount, threshold=left.threshold, detail=detail)

    def coarse(self, row: Compared) -> Compared:
        """A first moment whose gradient was kept in bfloat16: within rounding, suspicious where it should not be one.

        A computation in bfloat16 gives such gradients by itself, unless they are sums over ranks.
        """
        pair, own, theirs = row.pair, self.reference.source, self.candidate.source
        measured = row.standing in (Standing.ROUNDING, Standing.SUSPICIOUS, Standing.BEYOND) and row.amount is not None
        if not measured or pair.role is not Role.FIRST_MOMENT or self.model.num_steps != 1 or self.model.betas is None:
            return row
        if own is None or theirs is None or pair.reference is None or pair.candidate is None:
            return row
        beta = self.model.betas[0]
        try:
            if share_coarse(Stored(theirs, pair.candidate), beta) < COARSE:
                return row
            alike = share_coarse(Stored(own, pair.reference), beta) > 0.5
        except SourceLostError as error:
            return replace(row, detail=_joined(row.detail, str(error)))
        if alike or (self.model.compute == DTYPES["bfloat16"] and data_parallel(self.candidate) == 1):
            self.coarse_ones[pair.name] = alike
            return row
        detail = f"{COARSENED}, the reference's is not: it was summed, or kept, in bfloat16"
        standing = Standing.SUSPICIOUS if row.standing is Standing.ROUNDING else row.standing
        return replace(row, standing=standing, detail=_joined(row.detail, detail))

    def powered(self, row: Compared, measured: Distance | None, same: OneSet | None) -> Compared:
        """With what would have been found, on the same numbers.

        Raises:
            SourceLostError: they can't be read.
        """
        pair = row.pair
        if pair.reference is None or pair.candidate is None or self.reference.source is None:
            return row
        own = Stored(self.reference.source, pair.reference)
        measured = measured or measure(own, own)
        found = row.threshold or self.threshold(pair, amount_of(measured))
        if same is not None and not isinstance(found, str) and found.relative:
            found = same.threshold(self.narrower(pair))
        if isinstance(found, str) or not found.relative:
            return row
        return replace(row, threshold=found, power=power_of(found, measured))

    def threshold(self, pair: Pair, amount: Amount) -> Threshold | str:
        """Up to which difference a pair is within rounding, or why that is not known."""
        assert pair.reference is not None
        what = self.reference.tensors[pair.reference]
        weight = pair.role not in (*MOMENTS, Role.BUFFER, Role.COUNTER)
        if pair.role is Role.COUNTER or not what.dtype.epsilon:
            return EXACT
        known = self.noise.get((pair.role, pair.name))
        if not weight:
            bound = of_moment(self.model, pair, self.narrower(pair), what.shape, amount.length)
            return bound if known is None else at_least(known, bound)
        motion = self.motion(pair)
        derived: Threshold | str = stored_twice(self.narrower(pair), amount.spread)
        if motion is not None:
            derived = self._kept(
                pair, amount, of_weight(self.model, self.narrower(pair), amount.length, amount.spread, motion)
            )
        if known is None:
            return derived
        if isinstance(derived, str):
            return replace(known, unrelated=amount.spread)
        # Few elements of a weight go far, where a gradient is nearly zero, and seldom the same in a rerun: what reruns
        # tell of gradients leads further than what they tell of weights.
        how = known.how if known.relative > derived.relative else f"{derived.how}, by the noise of reruns"
        most = max(known.relative, derived.relative)
        return replace(known, relative=most, how=how, unrelated=derived.unrelated)

    def _kept(self, pair: Pair, amount: Amount, found: Threshold | str) -> Threshold | str:
        """The threshold of a weight, with what steps before allowed: gradients that were small then may not be now."""
        if isinstance(found, str):
            return found
        key, steps = (pair.role, pair.name), max(1.0, self.model.num_steps)
        then, far = self.before.get(key, (steps, 0.0))
        since = far / amount.length + found.relative * max(0.0, steps - then) / steps
        if since > found.relative:
            found = replace(found, relative=since, how=f"{found.how}, and {far / amount.length:.3g} of step {then:g}")
        self.allowed[key] = steps, found.relative * amount.length
        return found

    def narrower(self, pair: Pair) -> DType:
        """Of both sides' dtypes the one with fewer bits behind the point."""
        sides = (self.reference.tensors[pair.reference or 0], self.candidate.tensors[pair.candidate or 0])
        return min((tensor.dtype for tensor in sides), key=lambda dtype: dtype.mantissa_bits)

    def one_dtype(self, pair: Pair) -> bool:
        """Whether both sides keep the numbers in one dtype, so that copying them rounds nothing."""
        return self.reference.tensors[pair.reference or 0].dtype == self.candidate.tensors[pair.candidate or 0].dtype

    def motion(self, pair: Pair) -> Motion | None:
        """What a step does to a weight; None without optimizer state on both sides."""
        numbers = self.reference.numbers
        first, second = (numbers.get((role, pair.name)) for role in (Role.FIRST_MOMENT, Role.SECOND_MOMENT))
        theirs = self.candidate.numbers.get((Role.FIRST_MOMENT, pair.name))
        if first is None or theirs is None:
            return None
        shape, size = self.reference.tensors[first].shape, self.reference.size(first)
        known = self.noise.get((Role.FIRST_MOMENT, pair.name))
        noise, root = uncertainty(self.model, pair, shape, size, known), math.sqrt(math.prod(shape))
        lone = not size and self.candidate.size(theirs) > 0
        if second is None or lone:
            # Adamax and Lion step by one length whatever the gradient's, and Adam does where there is but rounding.
            return Motion(2.0 * root, 0.0 if lone else root)
        if self.reference.source is None or self.reference.tensors[second].shape != shape:
            return Motion(2.0 * root, root)
        source = self.reference.source
        return motion_of(Stored(source, first), Stored(source, second), noise, self.model)


def amount_of(apart: Distance) -> Amount:
    """The part of a measure that stays."""
    return Amount(
        apart.relative, apart.num_differ, apart.num_elements, apart.largest, apart.first, apart.length,
        spread=apart.spread, num_far=apart.num_far, num_larger=apart.num_larger,
        num_not_nearest=apart.num_not_rounded,
    )  # fmt: skip


def _odd(amount: Amount) -> str:
    # An infinite distance is that of elements that are no numbers, unless what is there lies beside a zero reference.
    return "the reference is zero" if amount.largest and not amount.length else "elements are finite on one side alone"


def _joined(one: str, other: str) -> str:
    return f"{one}; {other}" if one and other else one or other


def _shapes(*shapes: tuple[int, ...]) -> str:
    return " against ".join("×".join(map(str, shape)) or "scalar" for shape in shapes)
