"""The register of invariants: each is a record, and a pure function that judges one step or one run by it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from auditor.model.finding import Judgement, LikelyCause, Severity
from auditor.model.observation import DifferenceClass
from auditor.model.run import RunState, StepEvidence

FAMILIES = {
    "INT": "integrity", "COV": "coverage", "MET": "metadata", "REP": "replicas", "TIE": "tying", "CST": "cast",
    "OPT": "optimizer", "NUM": "numerics", "MOT": "motion", "AUX": "auxiliary", "REF": "reference", "SEC": "security",
}  # fmt: skip
PRECEDENCE = ("INT", "COV", "MET", "REP", "CST", "OPT", "NUM", "MOT", "AUX", "TIE", "REF", "SEC")
"""Which id a fault gets that violates several invariants; the others become its consequences."""


class Needs(enum.IntEnum):
    """What must have been read for an invariant to speak."""

    NAMES = 0
    HEADERS = 1
    WEIGHTS = 2
    CHECKSUMS = 4


NEVER_A_CONSEQUENCE = frozenset({"SEC"})
"""Families whose violations stand for themselves whatever else is wrong with the same file."""

StepJudge = Callable[[StepEvidence], Judgement]
RunJudge = Callable[[RunState], dict[int, Judgement]]


@dataclass(frozen=True, slots=True)
class Invariant:
    """One statement that must hold."""

    id: str
    """Family and three digits; never used again for another statement."""
    name: str
    """The bad pattern, in words joined by hyphens."""
    severity: Severity
    statement: str
    """What must hold."""
    rationale: str
    """What goes wrong where it does not."""
    source: str
    """Where the statement or an incident is written down."""
    example: str
    """A finding, as one would read it."""
    misses: str
    """What a violation looks like that this does not see."""
    hint: str
    """The reader's next act."""
    needs: Needs = Needs.HEADERS
    judge_step: StepJudge | None = None
    judge_run: RunJudge | None = None
    likely_causes: tuple[LikelyCause, ...] = ()
    causes_by_class: Mapping[DifferenceClass, tuple[LikelyCause, ...]] = field(default_factory=dict)
    """Causes that fit differences of one class better than ``likely_causes`` do."""
    goes_first: bool = False
    """Whether it goes before the others of its family, whatever its number: it explains them."""
    one_fault: bool = False
    """Whether subjects that violate it in different steps are still one fault (a drift, spreading NaNs)."""

    @property
    def family(self) -> str:
        """The three letters."""
        return self.id[:3]

    @property
    def rank(self) -> tuple[int, str]:
        """Place in the order of precedence."""
        return PRECEDENCE.index(self.family), self.goes_first * " " + self.id


@lru_cache(maxsize=1)
def invariants() -> tuple[Invariant, ...]:
    """All invariants in order of precedence."""
    from auditor.invariants import coverage, integrity, metadata, numerics, replica, security

    found = [
        item for module in (integrity, coverage, metadata, replica, numerics, security) for item in module.INVARIANTS
    ]
    return tuple(sorted(found, key=lambda invariant: invariant.rank))


def find(wanted: str) -> Invariant | None:
    """The invariant with this id, in any case of letters."""
    return next((item for item in invariants() if item.id == wanted.upper()), None)


def select(chosen: Sequence[str], ignored: Sequence[str]) -> tuple[Invariant, ...]:
    """Invariants named by ``chosen`` (all, if empty) less those named by ``ignored``; names are ids or families.

    Raises:
        LookupError: a name is neither.
    """
    known = {item.id for item in invariants()} | set(FAMILIES)
    for name in (*chosen, *ignored):
        if name.upper() not in known:
            raise LookupError(f"{name} is neither an invariant nor a family; `auditor invariants` lists them")

    def named(item: Invariant, names: Sequence[str]) -> bool:
        return any(name.upper() in (item.id, item.family) for name in names)

    return tuple(item for item in invariants() if (not chosen or named(item, chosen)) and not named(item, ignored))
