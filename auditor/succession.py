"""The saved steps of one run, one after the other: each is judged by the one before it, which alone is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from auditor.invariants.invariant import Invariant
from auditor.invariants.neighbours import History, Neighbours
from auditor.model.catalog import Catalog
from auditor.model.finding import Judgement, Severity
from auditor.model.joint import Joint
from auditor.model.run import StepEvidence
from auditor.observe.joints import compare_steps, works
from auditor.storage.store import Store

FIRST_SAVE = "no earlier save of its format was looked at"
MOST_BYTES = 128 << 20
"""Of two saves together that are read once more and held against each other element by element, below level full."""


@dataclass(frozen=True, slots=True)
class Reader:
    """By whom, and from where, two saves are read in lock-step."""

    store: Store
    executor: Executor
    most_bytes: float = MOST_BYTES
    why_not: str = ""
    """Why they aren't."""


@dataclass(slots=True)
class Succession:
    """Of one run: for every format the newest save so far, and what all saves said of each tensor in few numbers."""

    before: dict[str, StepEvidence] = field(default_factory=dict)
    history: dict[str, History] = field(default_factory=dict)
    doubted: dict[str, frozenset[str]] = field(default_factory=dict)
    recalled: dict[str, bool] = field(default_factory=dict)
    """Whether the newest save so far is the very one that a ledger knows."""
    num_bytes: int = 0
    """Read for comparing the last save that was judged with the one before it."""

    def judge(
        self, after: StepEvidence, items: Sequence[Invariant], reader: Reader, said: Mapping[str, Judgement]
    ) -> dict[str, Judgement]:
        """What every one of ``items`` says about a save by the one before it.

        ``said``: what they said of the same two saves when they were last compared, where that is known.
        """
        name, self.num_bytes = after.catalog.format, 0
        before = self.before.get(name)
        judges = {item.id: item.judge_motion for item in items if item.judge_motion}
        if before is None or before.catalog.step >= after.catalog.step:
            return {identifier: Judgement(not_applicable={FIRST_SAVE: 1}) for identifier in judges}
        if not self.recalled[name]:
            # What was said by the save before does not hold any more where that was written anew.
            said = {}
        history, doubted = self.history.get(name, History()), self.doubted.get(name, frozenset())
        neighbours = Neighbours(before, after, history, doubted)
        wanted = [item for item in items if item.joints and item.id not in said]
        asked = list(
            dict.fromkeys(joint for ask in {item.joints for item in wanted} if ask for joint in ask(neighbours))
        )
        self._compare(neighbours, asked, reader)
        again = {item.id: said[item.id] for item in items if item.joints and item.id in said}
        return {
            identifier: judge(neighbours) for identifier, judge in judges.items() if identifier not in again
        } | again

    def _compare(self, neighbours: Neighbours, asked: Sequence[Joint], reader: Reader) -> None:
        """Read both saves for what was asked, where that is allowed."""
        before, after = neighbours.before, neighbours.after
        neighbours.why_not_joined = after.unread or before.unread or reader.why_not
        if neighbours.why_not_joined or not asked:
            return
        work = works(reader.store, before.catalog, after.catalog, asked)
        if sum(one.num_bytes for one in work) > reader.most_bytes:
            neighbours.why_not_joined = "two saves so large are compared element by element at level full alone"
            return
        neighbours.joints, self.num_bytes = compare_steps(work, reader.executor)

    def take(
        self, evidence: StepEvidence, judgements: Mapping[str, Judgement], items: Sequence[Invariant], *, recalled: bool
    ) -> None:
        """Let a save be the one before the next; tensors with an error in it are doubted there.

        ``recalled``: whether a ledger knows it as it is.
        """
        name = evidence.catalog.format
        known = self.before.get(name)
        if known is not None and known.catalog.step >= evidence.catalog.step:
            return
        self.history.setdefault(name, History()).add(known, evidence)
        self.before[name], self.recalled[name] = evidence, recalled
        severities = {item.id: item.severity for item in items}
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


def _held(catalog: Catalog, files: Set[str]) -> frozenset[str]:
    """Names of the tensors of which some piece lies in one of these files."""
    numbers = [number for number, file in enumerate(catalog.files) if file.name in files]
    rows = np.isin(catalog.pieces.file, numbers)
    return frozenset(catalog.tensors[number].name for number in np.unique(catalog.pieces.tensor[rows]).tolist())
