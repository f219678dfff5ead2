"""What an invariant is: a record, and a pure function that judges one step, one run or the waivers by it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from auditor.invariants.neighbours import Neighbours
from auditor.model.catalog import Catalog
from auditor.model.finding import Judgement, LikelyCause, Severity
from auditor.model.joint import Joint
from auditor.model.observation import DifferenceClass
from auditor.model.pairing import Pairing
from auditor.model.run import RunState, StepEvidence
from auditor.model.waiver import Waiver

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

IN_ALL_ROLES = frozenset({"MOT"})
"""Families whose violations are one story with whatever is wrong with another role of the same tensor: what moves
between two saves is weight, master and moments at once."""

StepJudge = Callable[[StepEvidence], Judgement]
RunJudge = Callable[[RunState], dict[int, Judgement]]
NeighbourJudge = Callable[[Neighbours], Judgement]
WaiverJudge = Callable[[Sequence[Waiver], date], Judgement]


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
    judge_motion: NeighbourJudge | None = None
    """Judges a saved step by the one before it."""
    joints: Callable[[Neighbours], Sequence[Joint]] | None = None
    """What must have been compared element by element over both saves for ``judge_motion`` to speak."""
    judge_waivers: WaiverJudge | None = None
    """Judges the configuration on a day. Its violations are about no step: they have no locations."""
    likely_causes: tuple[LikelyCause, ...] = ()
    causes_by_class: Mapping[DifferenceClass, tuple[LikelyCause, ...]] = field(default_factory=dict)
    """Causes that fit differences of one class better than ``likely_causes`` do."""
    pairings: Callable[[Catalog], Sequence[Pairing]] | None = None
    """Which pairs of tensors must have been compared element by element for it to speak."""
    reads: Callable[[Catalog], Iterable[int]] | None = None
    """Of an invariant that needs weights: the tensors that are stored more than once or claimed equal, of which alone
    it speaks. None: of all, or of those that ``pairings`` names."""
    goes_first: bool = False
    """Whether it goes before the others of its family, whatever its number: it explains them."""
    ranks_as: str = ""
    """The family at whose place in the order of precedence it stands, where that is not its own: a file of another save
    explains what doesn't fit it, as a lost one does; a NaN in one replica, that it differs from the others."""
    lasting: bool = False
    """Whether what it speaks of stays without showing again: a jump, from which every later save descends. It is over
    only where a later judgement has its subject among those that :attr:`~auditor.model.finding.Judgement.held`."""
    one_fault: bool = False
    """Whether subjects that violate it in different steps are still one fault (a drift, spreading NaNs)."""

    @property
    def family(self) -> str:
        """The three letters."""
        return self.id[:3]

    @property
    def rank(self) -> tuple[int, str]:
        """Place in the order of precedence."""
        return PRECEDENCE.index(self.ranks_as or self.family), self.goes_first * " " + self.id
