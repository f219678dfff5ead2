"""Thresholds from reruns of the reference: each tensor's own noise, step by step; and what is no rerun of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from auditor.comparison.holding import Holding, Key
from auditor.comparison.lockstep import Stored, measure
from auditor.comparison.matching import Filter, Pair, match
from auditor.comparison.records import Reach, recorded
from auditor.comparison.rounding import IN_COMMON, SAYS_NOTHING, Model, Threshold, counted_steps, of_moment
from auditor.comparison.side import Seeing, Side
from auditor.model.catalog import Role
from auditor.model.dtype import DTYPES
from auditor.view.assemble import SourceLostError

LEAST, SPREAD = 2.0, 2.0
"""With R reruns, noise may be 2 + 2/√R times the largest of them: four times with one, three times with four. Another
layout rounds at other places: up to 1.84 times as much as one rerun, 1.64 times as four (docs/rounding-bound.md)."""
SUSPICIOUS = 3.0
"""Up to this multiple of a calibrated threshold a difference is suspicious."""
FAR = 30.0
"""A rerun whose gradients, one step from equal weights, differ by so many times their derived round-off is none."""
TF32 = "float16"
"""The dtype with as many bits behind the point as the products of TF32 have, which no file tells from float32's."""
QUIET = "the reruns lack this step or equal the reference in every bit: they tell no noise, thresholds are derived"
_WEIGHTS = (Role.PARAMETER, Role.MASTER)


@dataclass(frozen=True, slots=True)
class _Apart:
    """How far a rerun's tensor is from the reference's."""

    pair: Pair
    relative: float
    length: float
    """Of the reference's tensor."""
    spread: float = 0.0
    """By how much of that unrelated ones differ, over √2."""


@dataclass
class Reruns:
    """Runs that do what the reference does, and add up in another order; step by step."""

    sides: tuple[Side, ...]
    seeing: Seeing
    chosen: Filter
    stated: bool = False
    """Whether it is stated in which dtype they computed, so that the derived round-off is theirs."""
    refused: dict[str, str] = field(default_factory=dict)
    """Where one lies, to why it is no rerun; filled step by step. Of those nothing more is taken."""
    equal: dict[str, float] = field(default_factory=dict)
    """Where one lies, to the optimizer steps counted when all its weights were last the reference's."""

    @property
    def none_left(self) -> bool:
        """Whether reruns were named, and none of them is one."""
        return bool(self.sides) and len(self.refused) == len(self.sides)

    def thresholds(
        self, step: int, reference: Holding, candidate: Holding, model: Model
    ) -> tuple[Mapping[Key, Threshold], tuple[str, ...]]:
        """By role and name, up to which difference the reruns agree with the reference; and what is to be said of them.

        Empty where they tell nothing. Tensors that happen to be equal in all reruns, or nearly so, have the noise that
        is usual for their role.
        """
        runs, notes = [], []
        for side in self.sides:
            if side.location in self.refused or step not in side.steps:
                continue
            rerun = side.steps[step](self.seeing, False)
            found = self._measured(reference, rerun)
            why = self._none(side, rerun, reference, candidate, found, model)
            if why:
                self.refused[side.location] = why
                continue
            runs.append({(one.pair.role, one.pair.name): one.relative for one in found})
            level = _median(one.relative for one in _of(found, Role.FIRST_MOMENT))
            if level >= SAYS_NOTHING:
                notes.append(f"{side.location}: its gradients differ by {level:.2g} of themselves, as unrelated ones "
                             "do: another seed, other data, or rounding that grew so far")  # fmt: skip
        noise = _joined(runs)
        quiet = bool(self.sides) and not noise and not self.none_left
        return noise, (*notes, *((QUIET,) if quiet else ()))

    def _measured(self, reference: Holding, rerun: Holding) -> list[_Apart]:
        """Every tensor that a rerun has as well."""
        pairs = match(reference, rerun, self.chosen).pairs
        found = (_apart(reference, rerun, pair) for pair in pairs)
        return [one for one in found if one is not None and math.isfinite(one.relative)]

    def _none(
        self, side: Side, rerun: Holding, reference: Holding, candidate: Holding, found: Sequence[_Apart], model: Model
    ) -> str:  # fmt: skip
        """Why a run is no rerun of the reference; empty where nothing says so."""
        otherwise = [
            one.place for one in recorded(reference, rerun, alone=False)
            if one.reach is not Reach.DRAWS and "loss_scale" not in one.text
        ]  # fmt: skip
        if otherwise:
            return f"recorded otherwise in step {reference.step}: {'; '.join(otherwise[:3])}"
        if _is_candidate(rerun, candidate, found):
            return "it is the candidate itself, which can't tell noise from error"
        weights = _of(found, *_WEIGHTS)
        if _unrelated(weights, reference):
            return (
                f"in step {reference.step} its weights have no more in common with the reference's than unrelated ones"
            )
        counted = counted_steps(reference) or float(reference.step)
        since = counted - self.equal.get(side.location, -math.inf)
        if weights and not any(one.relative for one in weights):
            self.equal[side.location] = counted
        return self._too_far(reference, found, model) if since == 1 else ""

    def _too_far(self, reference: Holding, found: Sequence[_Apart], model: Model) -> str:
        """Whether gradients of one step from equal weights differ by more than rounding ever makes of them."""
        moments, derived = _of(found, Role.FIRST_MOMENT), dict[str, Threshold]()
        coarsest = min(model.compute, DTYPES[TF32], key=lambda dtype: dtype.mantissa_bits)
        model = replace(model, num_steps=1.0, compute=coarsest)
        for one in moments:
            what = reference.tensors[one.pair.reference or 0]
            threshold = of_moment(model, one.pair, what.dtype, what.shape, one.length)
            if isinstance(threshold, Threshold):
                derived[one.pair.name] = threshold
        level, own = _median(one.relative for one in moments), _median(one.relative for one in derived.values())
        most = min(SAYS_NOTHING, FAR * own) if self.stated and own else SAYS_NOTHING
        if level <= most:
            return ""
        return (
            f"in step {reference.step}, one step from equal weights, its gradients differ by {level:.2g} of themselves"
            + (f" (rounding: {own:.2g})" if self.stated and own else "") + ": other data, another seed, or a fault"
        )  # fmt: skip


def at_least(calibrated: Threshold, derived: Threshold | str) -> Threshold:
    """What reruns tell, or what is derived where that is more: a few reruns that differ by less refute no bound.

    Tokens that change their expert, say, are others in every rerun, and few.
    """
    if isinstance(derived, str) or derived.relative <= calibrated.relative:
        return calibrated
    how = f"{derived.how}; reruns differ by less, {calibrated.how}"
    return replace(derived, how=how, kind=calibrated.kind, num_runs=calibrated.num_runs)


def _unrelated(weights: Sequence[_Apart], reference: Holding) -> bool:
    """Whether weights that differ, at least half of all, have nothing in common: they began otherwise."""
    count = {id(one): reference.tensors[one.pair.reference or 0].num_elements for one in weights}
    differ = [one for one in weights if one.relative]
    if 2 * sum(count[id(one)] for one in differ) < sum(count.values()):
        return False
    unlike, apart = (math.hypot(*sizes) for sizes in ((one.spread * one.length for one in differ),
                                                      (one.relative * one.length for one in differ)))  # fmt: skip
    return apart > IN_COMMON * unlike > 0


def _joined(runs: Sequence[Mapping[Key, float]]) -> dict[Key, Threshold]:
    """The thresholds that reruns lead to together."""
    keys = {key for run in runs for key in run}
    largest = {key: max(run.get(key, 0.0) for run in runs) for key in keys}
    usual = _usual(largest)
    count = len(runs)
    factor = LEAST + SPREAD / math.sqrt(count) if count else 0.0
    return {
        key: _threshold(noise, usual.get(key[0], 0.0), factor, count)
        for key, noise in largest.items()
        if max(noise, usual.get(key[0], 0.0)) > 0
    }


def _of(found: Sequence[_Apart], *roles: Role) -> list[_Apart]:
    return [one for one in found if one.pair.role in roles]


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return median(listed) if listed else 0.0


def _is_candidate(rerun: Holding, candidate: Holding, found: Sequence[_Apart]) -> bool:
    """Whether all that a rerun has otherwise than the reference is the candidate's, in every bit."""
    differ = [one for one in found if one.relative]
    for one in differ:
        other = candidate.numbers.get((one.pair.role, one.pair.name))
        own = rerun.rows.get(one.pair.candidate or 0)
        theirs = candidate.rows.get(-1 if other is None else other)
        if not own or not theirs or rerun.lanes(own[0]) != candidate.lanes(theirs[0]):
            return False
    return bool(differ)


def _apart(reference: Holding, rerun: Holding, pair: Pair) -> _Apart | None:
    if pair.reference is None or pair.candidate is None:
        return None
    left, right = reference.distinct(pair.reference), rerun.distinct(pair.candidate)
    what, other = reference.tensors[pair.reference], rerun.tensors[pair.candidate]
    if not left or not right or (what.shape, what.dtype) != (other.shape, other.dtype):
        return None
    if reference.lanes(left[0]) == rerun.lanes(right[0]):
        return _Apart(pair, 0.0, reference.size(pair.reference))
    if reference.source is None or rerun.source is None:
        return None
    try:
        found = measure(Stored(reference.source, pair.reference), Stored(rerun.source, pair.candidate))
    except SourceLostError:
        return None
    return _Apart(pair, found.relative, found.length, found.spread)


def _usual(largest: Mapping[Key, float]) -> dict[Role, float]:
    """The median noise of every role, over the tensors that have some."""
    by_role: dict[Role, list[float]] = {}
    for (role, _), noise in largest.items():
        if noise > 0:
            by_role.setdefault(role, []).append(noise)
    return {role: median(values) for role, values in by_role.items()}


def _threshold(noise: float, usual: float, factor: float, count: int) -> Threshold:
    level = max(noise, usual)
    what = f"largest of {count} {noise:.2g}" + (f", usual for the role {usual:.2g}" if usual > noise else "")
    return Threshold(factor * level, f"{factor:.3g} times {level:.2g} ({what})", "calibrated", count,
                     suspicious=SUSPICIOUS)  # fmt: skip
