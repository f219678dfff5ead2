"""The saved steps of one run, one after the other: each is judged by the one before it, which alone is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from auditor.invariants.invariant import Invariant
from auditor.invariants.neighbours import History, Neighbours
from auditor.model.catalog import Catalog
from auditor.model.finding import Judgement, Location, Severity
from auditor.model.joint import Beside, Joint
from auditor.model.observation import OBSERVED, Observations
from auditor.model.run import StepEvidence

FIRST_SAVE = "no earlier save of its format was looked at"
TOO_LARGE = "two saves so large are compared element by element at level full alone"
_NOTHING = Observations(np.zeros(0, OBSERVED))


def as_listed(catalog: Catalog, unread: str) -> StepEvidence:
    """A step of which nothing was measured yet."""
    return StepEvidence(catalog, _NOTHING, unread)


def with_joints(known: Observations, seen: Observations) -> Observations:
    """What is known of a step, and what was measured over it and the save before."""
    num_bytes = known.num_bytes_reread + seen.num_bytes_reread
    return replace(known, joints=seen.joints, num_bytes_reread=num_bytes, changed=seen.changed)


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked of a save and the one before it, before the weights of either are known."""

    before: StepEvidence | None = None
    """As it was listed."""
    beside: Beside | None = None
    why_not: str = ""
    """Why nothing is asked, where that is not because there is nothing to ask."""
    remembered: dict[str, object] = field(default_factory=dict)
    """What was worked out of both for asking."""


NOTHING_ASKED = Asking()


@dataclass(slots=True)
class Succession:
    """Of one run: for every format the newest save so far, and what all saves said of each tensor in few numbers."""

    listed: dict[str, StepEvidence] = field(default_factory=dict)
    """The newest save whose headers were read."""
    recalled: dict[str, bool] = field(default_factory=dict)
    """Whether that is the very one that a ledger knows."""
    before: dict[str, StepEvidence] = field(default_factory=dict)
    """The newest that was measured."""
    history: dict[str, History] = field(default_factory=dict)
    doubted: dict[str, frozenset[str]] = field(default_factory=dict)
    jumped: dict[str, Mapping[tuple[str, str], Sequence[Location]]] = field(default_factory=dict)
    rates: dict[str, frozenset[object]] = field(default_factory=dict)
    """The betas that all saves so far record."""

    def beside(
        self, after: StepEvidence, items: Sequence[Invariant], said: Mapping[str, Judgement], most_bytes: float, *,
        recalled: bool,
    ) -> Asking:  # fmt: skip
        """What is to be measured of a save and the one before it at once; it is the one before the next then.

        ``said``: what is known of the two already. ``most_bytes``: of both saves, that may be read for it.
        ``recalled``: whether a ledger knows the save as it is.
        """
        name = after.catalog.format
        before = self.listed.get(name)
        if before is not None and before.catalog.step >= after.catalog.step:
            return NOTHING_ASKED
        self.listed[name], self.recalled[name] = after, recalled
        if before is None:
            return NOTHING_ASKED
        asking = {item.joints: None for item in items if item.joints and item.id not in said}
        why_not = after.unread or before.unread
        if why_not or not asking:
            return Asking(before, why_not=why_not)
        neighbours = Neighbours(before, after)
        joints = list(dict.fromkeys(joint for ask in filter(None, asking) for joint in ask(neighbours)))
        if _num_bytes(neighbours, joints) > most_bytes:
            return Asking(before, None, TOO_LARGE, neighbours.remembered)
        beside = Beside(before.catalog, joints) if joints else None
        return Asking(before, beside, remembered=neighbours.remembered)

    def judge(
        self, after: StepEvidence, items: Sequence[Invariant], said: Mapping[str, Judgement], asking: Asking
    ) -> dict[str, Judgement]:
        """What every one of ``items`` says about a save by the one before it.

        ``said``: what they said of the same two saves when they were last compared, where that is known. ``asking``:
        what was asked before the save was read.
        """
        name = after.catalog.format
        before = self.before.get(name)
        judges = {item.id: item.judge_motion for item in items if item.judge_motion}
        if before is None or before.catalog.step >= after.catalog.step:
            return {identifier: Judgement(not_applicable={FIRST_SAVE: 1}) for identifier in judges}
        neighbours = Neighbours(before, after, self.history[name], self.doubted[name], self.jumped[name])
        if asking.before is not None and asking.before.catalog is before.catalog:
            neighbours.joints, neighbours.why_not_joined = after.observations.joints, asking.why_not
            neighbours.remembered = asking.remembered
        again = {item.id: said[item.id] for item in items if item.joints and item.id in said}
        return {
            identifier: judge(neighbours) for identifier, judge in judges.items() if identifier not in again
        } | again

    def take(self, evidence: StepEvidence, judgements: Mapping[str, Judgement], items: Sequence[Invariant]) -> None:
        """Let a save be the one by which the next is judged; tensors with an error in it are doubted there."""
        name = evidence.catalog.format
        known = self.before.get(name)
        if known is not None and known.catalog.step >= evidence.catalog.step:
            return
        self.history.setdefault(name, History()).add(known, evidence)
        betas = (group.hyperparameters.get("betas") for group in evidence.catalog.groups)
        self.rates[name] = self.rates.get(name, frozenset()) | frozenset(betas)
        self._follow(evidence, judgements, items)

    def resume(
        self, evidence: StepEvidence, judgements: Mapping[str, Judgement], items: Sequence[Invariant],
        history: History, rates: Set[tuple[float, ...]],
    ) -> None:  # fmt: skip
        """Go on after a save that a ledger knows as it is, with what that keeps of it and of the saves before it."""
        name = evidence.catalog.format
        self.listed[name], self.recalled[name] = as_listed(evidence.catalog, evidence.unread), True
        self.history[name], self.rates[name] = history, frozenset(betas or None for betas in rates)
        self._follow(evidence, judgements, items)

    def _follow(
        self, evidence: StepEvidence, judgements: Mapping[str, Judgement], items: Sequence[Invariant]
    ) -> None:  # fmt: skip
        name = evidence.catalog.format
        self.before[name] = evidence
        severities = {item.id: item.severity for item in items}
        self.jumped[name] = {
            (item.id, violation.subject): violation.locations
            for item in items
            if item.lasting and item.id in judgements
            for violation in judgements[item.id].violations
        }
        places = [
            location
            for identifier, judgement in judgements.items()
            for violation in judgement.violations
            if (violation.severity or severities[identifier]) >= Severity.ERROR
            for location in violation.locations
        ]
        self.doubted[name] = frozenset(place.tensor for place in places if place.tensor) | _held(
            evidence.catalog, {place.file for place in places if not place.tensor}
        )


def _num_bytes(neighbours: Neighbours, joints: Sequence[Joint]) -> int:
    """Of the tensors of both saves that ``joints`` name."""
    sides = {True: neighbours.after.catalog, False: neighbours.before.catalog}
    streams = {stream for joint in joints for stream in joint.streams}
    tensors = [sides[is_later].tensors[number] for is_later, number in streams]
    return sum(tensor.num_elements * tensor.dtype.bits // 8 for tensor in tensors)


def _held(catalog: Catalog, files: Set[str]) -> frozenset[str]:
    """Names of the tensors of which some piece lies in one of these files."""
    numbers = [number for number, file in enumerate(catalog.files) if file.name in files]
    rows = np.isin(catalog.pieces.file, numbers)
    return frozenset(catalog.tensors[number].name for number in np.unique(catalog.pieces.tensor[rows]).tolist())
