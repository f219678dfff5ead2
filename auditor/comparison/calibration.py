"""Thresholds from reruns of the reference: each tensor's own noise, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from auditor.comparison.holding import Holding, Key
from auditor.comparison.lockstep import Stored, measure
from auditor.comparison.matching import Filter, match
from auditor.comparison.rounding import Threshold
from auditor.comparison.side import Seeing, Side
from auditor.model.catalog import Role
from auditor.view.assemble import SourceLostError

LEAST, SPREAD = 2.0, 2.0
"""With R reruns, noise may be 2 + 2/√R times the largest of them: four times with one, three times with four. Another
layout rounds at other places: up to 1.84 times as much as one rerun, 1.64 times as four (docs/rounding-bound.md)."""
SUSPICIOUS = 3.0
"""Up to this multiple of a calibrated threshold a difference is suspicious."""


@dataclass(frozen=True, slots=True)
class Reruns:
    """Runs that do what the reference does, and add up in another order."""

    sides: tuple[Side, ...]
    seeing: Seeing
    chosen: Filter

    def thresholds(self, step: int, reference: Holding) -> Mapping[Key, Threshold]:
        """By role and name, up to which difference the reruns agree with the reference; empty where they tell nothing.

        Tensors that happen to be equal in all reruns, or nearly so, have the noise that is usual for their role.
        """
        runs = [found for side in self.sides if step in side.steps and (found := self._noise(side, step, reference))]
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

    def _noise(self, side: Side, step: int, reference: Holding) -> dict[Key, float]:
        """Relative difference of every tensor that a rerun has as well."""
        rerun = side.steps[step](self.seeing, False)
        found: dict[Key, float] = {}
        for pair in match(reference, rerun, self.chosen).pairs:
            if pair.reference is None or pair.candidate is None:
                continue
            noise = _apart(reference, pair.reference, rerun, pair.candidate)
            if noise is not None and math.isfinite(noise):
                found[pair.role, pair.name] = noise
        return found


def _apart(reference: Holding, own: int, rerun: Holding, theirs: int) -> float | None:
    left, right = reference.distinct(own), rerun.distinct(theirs)
    what, other = reference.tensors[own], rerun.tensors[theirs]
    if not left or not right or (what.shape, what.dtype) != (other.shape, other.dtype):
        return None
    if reference.lanes(left[0]) == rerun.lanes(right[0]):
        return 0.0
    if reference.source is None or rerun.source is None:
        return None
    try:
        return measure(Stored(reference.source, own), Stored(rerun.source, theirs)).relative
    except SourceLostError:
        return None


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


def lacking(steps: Sequence[int], sides: Sequence[Side]) -> list[int]:
    """Steps that no rerun has."""
    return [step for step in steps if not any(step in side.steps for side in sides)]
