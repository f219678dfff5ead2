"""What an audit says: outcomes of invariants, violations with their place, findings over the steps of a run."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from auditor.model.catalog import Role
from auditor.model.mesh import EVERYWHERE, Coordinate
from auditor.model.observation import DifferenceClass
from auditor.model.region import Box

MAX_NAMED = 4
"""Files that a reason names; of more, how many."""


class Outcome(enum.Enum):
    """What is known of one statement about one subject."""

    HOLDS = "holds"
    VIOLATED = "violated"
    NOT_APPLICABLE = "not applicable"
    UNDETERMINED = "undetermined"


class Severity(enum.IntEnum):
    """The harm, not our confidence."""

    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class Location:
    """Where, in one saved step, something is wrong, and by how much."""

    step: int
    file: str = ""
    tensor: str = ""
    role: Role | None = None
    order: int = -1
    """The tensor's place in model order."""
    coordinate: Coordinate = EVERYWHERE
    reference: Coordinate = EVERYWHERE
    """For a difference: what it was measured against."""
    holder: Coordinate = EVERYWHERE
    """For a difference: all that is known of the ranks that hold the differing part of ``coordinate``'s replica."""
    reference_holder: Coordinate = EVERYWHERE
    reference_file: str = ""
    ranks: tuple[int, ...] = ()
    """Global ranks of ``coordinate``, where more is known of them than the mesh tells."""
    reference_ranks: tuple[int, ...] = ()
    region: Box | None = None
    num_elements: int = 0
    """Elements concerned: missing, overlapping, not finite."""
    num_elements_differ: int | None = None
    num_elements_compared: int | None = None
    max_abs_difference: float | None = None
    relative_difference: float | None = None
    max_ulps: int | None = None
    num_bits_differ: int | None = None
    num_equal_as_numbers: int | None = None
    sketched_difference: float | None = None
    """Relative distance from the reference by sketches, where it was not measured: beyond the evidence budget."""
    first_index: tuple[int, ...] | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Violation:
    """A statement that does not hold of one subject in one step."""

    subject: str
    """What the timeline follows over the steps: a tensor's name, a file's name below the step, a pointer."""
    locations: tuple[Location, ...]
    message: str = ""
    sides: tuple[tuple[Coordinate, ...], ...] = ()
    """For replicas: the coordinates, sorted into classes of equal content."""
    severity: Severity | None = None
    """Where it differs from the invariant's own."""
    minority: tuple[Coordinate, ...] = ()
    """Which side is likely wrong, where a majority says so."""
    explained_by: frozenset[str] = frozenset()
    """Files whose own damage explains this; then it is a consequence and no finding."""
    explains: frozenset[str] = frozenset()
    """Invariants, by id or family, whose violations in the same step are consequences of this, wherever they are."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one invariant says about one step: how many subjects hold, which don't, which aren't known and why."""

    num_holds: int = 0
    violations: tuple[Violation, ...] = ()
    undetermined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Reason to the subjects that it concerns."""
    not_applicable: Mapping[str, int] = field(default_factory=dict)
    """Reason to the number of subjects."""
    held: frozenset[str] = frozenset()
    """Subjects that hold although something about them is undetermined (replicas along an axis that isn't stored), or
    although they jumped before: that was undone."""

    def merged(self, other: Judgement) -> Judgement:
        """Both together: of two folders that hold one step."""
        undetermined = {
            reason: (*self.undetermined.get(reason, ()), *other.undetermined.get(reason, ()))
            for reason in {**self.undetermined, **other.undetermined}
        }
        not_applicable = {
            reason: self.not_applicable.get(reason, 0) + other.not_applicable.get(reason, 0)
            for reason in {**self.not_applicable, **other.not_applicable}
        }
        return Judgement(
            self.num_holds + other.num_holds, (*self.violations, *other.violations), undetermined, not_applicable,
            self.held & other.held,
        )  # fmt: skip

    def joined(self, motion: Judgement) -> Judgement:
        """What a step says by itself, and by the save before it where there is one."""
        if motion.outcome is Outcome.NOT_APPLICABLE:
            return self
        return replace(self.merged(motion), held=self.held | motion.held)

    def doubted(self, changed: Sequence[str]) -> Judgement:
        """The judgement of a step whose files ``changed`` while they were read: nothing in it can be relied on."""
        names = tuple(violation.subject for violation in self.violations) or ("the step",)
        few = ", ".join(changed[:MAX_NAMED]) + (f" and {len(changed) - MAX_NAMED} more" if changed[MAX_NAMED:] else "")
        return Judgement(undetermined={f"{few} changed while it was read": names})

    @property
    def outcome(self) -> Outcome:
        """The one word for the step."""
        if self.violations:
            return Outcome.VIOLATED
        if self.undetermined:
            return Outcome.UNDETERMINED
        return Outcome.HOLDS if self.num_holds else Outcome.NOT_APPLICABLE


@dataclass(frozen=True, slots=True)
class Growth:
    """How a fault's size goes on over the saved steps of an interval."""

    law: str
    """``constant``, ``linear``, ``exponential``, or ``irregular`` where none of them fits."""
    rate: float
    """Linear: size a step. Exponential: steps in which it doubles. Else 0."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of saved steps in which a fault shows."""

    last_good: int | None
    """The last audited step before it; None if the first saved step is bad already."""
    first_bad: int
    last_bad: int
    healed: int | None
    """The first good step after it; None if there is none."""
    num_subjects: int = 0
    onset_by_role: Mapping[str, int] = field(default_factory=dict)
    """Role to the first bad step in which the fault shows in it."""
    growth: tuple[tuple[int, float], ...] = ()
    """(step, size of the fault in it)."""
    measure: str = ""
    """What the size is: ``largest difference``, ``distance by sketch`` (relative), ``elements``."""
    law: Growth | None = None


@dataclass(frozen=True, slots=True)
class LikelyCause:
    """A cause that fits, offered with its source; never a fact."""

    text: str
    source: str
    axes: tuple[str, ...] = ()
    """Mesh axes along which replicas must differ for it to fit; empty: it fits whatever differs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A violated invariant over the run: one fault, whatever number of tensors and steps shows it."""

    id: str
    name: str
    severity: Severity
    message: str
    hint: str
    locations: tuple[Location, ...]
    """Step by step, in model order."""
    intervals: tuple[Interval, ...] = ()
    difference_class: DifferenceClass | None = None
    minority: tuple[Coordinate, ...] = ()
    consequences: tuple[str, ...] = ()
    """Ids of other invariants that the same fault violates."""
    likely_causes: tuple[LikelyCause, ...] = ()
    waived: bool = False
    """Accepted by the user; shown, but does not fail the audit."""
    in_baseline: bool = False
    """Known from an earlier report; shown, but does not fail the audit."""

    @property
    def accepted(self) -> bool:
        """Whether it is waived or known."""
        return self.waived or self.in_baseline
