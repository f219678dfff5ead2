"""What a comparison says: of a pair of tensors, of a step, of two runs. Pure."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from auditor.comparison.matching import Pair
from auditor.comparison.rounding import Threshold
from auditor.model.catalog import Role
from auditor.model.finding import LikelyCause, Severity


class Standing(enum.Enum):
    """How two tensors stand to each other. Values are the report's words."""

    EQUAL = "equal"
    CAST = "equal but for the dtype"
    ROUNDING = "rounding"
    SUSPICIOUS = "suspicious"
    BEYOND = "beyond rounding"
    REORDERED = "other order"
    SHAPE = "other shape"
    LACKING = "not in the candidate"
    EXTRA = "not in the reference"
    UNDETERMINED = "undetermined"


DIFFERENT = (Standing.BEYOND, Standing.REORDERED, Standing.SHAPE, Standing.LACKING, Standing.EXTRA)
PROVED = (Standing.EQUAL, Standing.CAST)
SUSPECT = (Standing.BEYOND, Standing.SUSPICIOUS)
OPEN = (Standing.ROUNDING, Standing.SUSPICIOUS, Standing.UNDETERMINED)
"""What may still turn out to be beyond rounding, by what all tensors show together."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much a pair differs."""

    relative: float
    """Frobenius norm of the difference over that of the reference."""
    num_differ: int
    num_elements: int
    largest: float
    first_index: tuple[int, ...] = ()
    length: float = 0.0
    """Frobenius norm of the reference."""
    spread: float = 1.0
    """How far elements lie from their own mean, relative to ``length``."""
    num_far: int = -1
    """Elements that are farther apart than one distance between numbers; -1 where that is not known."""
    num_not_nearest: int = -1
    """Elements that are not the wider side's number rounded to nearest, where dtypes differ."""
    num_larger: int = -1
    """Elements that are farther from zero in the candidate; -1 where that is not known."""
    estimated: bool = False
    """Whether it is told from sketches: within about a tenth."""

    @property
    def one_sided(self) -> bool:
        """Whether more elements grew than shrank, or fewer, than falls to rounding but once in 10,000 tensors."""
        if self.num_larger < 0 or self.num_differ < 16:
            return False
        return abs(2 * self.num_larger - self.num_differ) >= 4 * math.sqrt(self.num_differ)


@dataclass(frozen=True, slots=True)
class Power:
    """The smallest planted errors that would have been found in one tensor."""

    factor: float
    """A tensor scaled by one plus this."""
    rolled: float | None
    """Relative size of the reference against itself moved by one row; None where it has no rows."""
    detects_roll: bool
    smallest_part: int
    """Of how many equal parts of a sum one may lack before it is no more found; 0 where even half of it is not."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one tensor's difference may be: the one that leaves least of it open."""

    text: str
    source: str
    rest: float
    """Of the difference, what it leaves open."""
    held_by: str = ""
    """Which rank, or part, holds all of it; empty where it is nobody's alone."""
    factor: float = math.nan
    """As which multiple of the reference it explains the tensor; of a second moment, the gradient's. NaN: as none."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One pair of tensors."""

    pair: Pair
    standing: Standing
    amount: Amount | None = None
    threshold: Threshold | None = None
    detail: str = ""
    """The permutation, the shapes, or why nothing is determined."""
    narrowed: bool = False
    """Whether the candidate has fewer bits for it, so that something was lost on the way."""
    holds: str = ""
    """Which other tensor of the reference the candidate has here, in every bit."""
    cause: Explanation | None = None
    power: Power | None = None
    shown: str = ""
    """What the candidate's own files call it, where that differs."""
    computed: bool = False
    """Whether its name says that it follows from sizes alone: nothing is lost with it."""

    @property
    def margin(self) -> float:
        """The difference as a multiple of its threshold; NaN where there is none."""
        if self.amount is None or self.threshold is None or not self.threshold.relative:
            return math.nan
        return self.amount.relative / self.threshold.relative

    @property
    def severity(self) -> Severity | None:
        """How bad it is; None where nothing is wrong."""
        if self.standing in DIFFERENT:
            minor = self.pair.role in (Role.BUFFER, Role.COUNTER)
            minor = minor and self.standing not in (Standing.BEYOND, Standing.REORDERED)
            minor = minor or (self.computed and self.standing in (Standing.LACKING, Standing.EXTRA))
            # A converter that keeps more state than there was (masters of tied names) takes nothing away.
            more = self.standing is Standing.EXTRA and self.pair.role is not Role.PARAMETER
            return Severity.WARNING if minor or more else Severity.ERROR
        return Severity.WARNING if self.standing is Standing.SUSPICIOUS else None


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Two saved steps."""

    step: int
    """Of the reference."""
    candidate_step: int
    paths: tuple[str, str]
    formats: tuple[str, str]
    rows: tuple[Compared, ...]
    """In model order."""
    num_steps: float = 0.0
    """Optimizer steps for which differences could grow."""
    notes: tuple[str, ...] = ()
    """What was not compared, and why."""
    failures: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    causes: tuple[LikelyCause, ...] = ()
    """That concern several tensors at once; the surest first."""
    gathered: frozenset[Explanation] = frozenset()
    """Explanations of single tensors that ``causes`` state for all of them."""
    recorded: tuple[str, ...] = ()
    """What is recorded otherwise on the other side: rates, counters, dtypes of the optimizer's state."""
    num_bytes_read: int = 0
    uncompared: tuple[str, ...] = ()
    """What had to be equal, and could not be compared."""

    def counts(self) -> Counter[Standing]:
        """Pairs by standing."""
        return Counter(row.standing for row in self.rows)

    def of(self, *standings: Standing) -> list[Compared]:
        """The pairs that stand so."""
        return [row for row in self.rows if row.standing in standings]


class Course(enum.Enum):
    """How differences go on over the steps. Values are the report's words."""

    NOISE = "noise-seeded growth"
    JUMP = "a jump"
    STEADY = "of steady size"
    AGREES = "within rounding throughout"
    OPEN = "undetermined"


@dataclass(frozen=True, slots=True)
class Growing:
    """How the difference of one role goes on over the steps."""

    role: Role
    course: Course
    points: tuple[tuple[int, float], ...]
    """(step, relative difference over all tensors of the role)."""
    jump: int | None = None
    """The step in which it jumped."""


@dataclass(slots=True)
class Comparison:
    """Two runs, or steps."""

    reference: str
    candidate: str
    steps: list[StepComparison] = field(default_factory=list)
    exact: bool = False
    """Whether rounding is a difference, too, and a narrower dtype."""
    resumed: bool = False
    """Whether recorded numbers must be equal, too."""
    reruns: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Of the reruns, those that are none, and why."""
    uncalibrated: bool = False
    """Whether reruns were named, and none of them is one."""
    maps: tuple[str, ...] = ()
    """Name maps that were chosen without being asked for, and how many tensors they brought together."""
    growing: tuple[Growing, ...] = ()
    unrecognised: Mapping[str, str] = field(default_factory=dict)
    steps_alone: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Steps of one side that the other does not have."""
    from_ledgers: bool = False
    """Whether both sides are: no weights are read."""
    seconds: float = 0.0

    @property
    def first_beyond(self) -> StepComparison | None:
        """The first step in which something is different."""
        return next((step for step in self.steps if self.fails(step)), None)

    @property
    def last_equal(self) -> int | None:
        """The newest step up to which all that was compared is equal in every step."""
        found = None
        for step in self.steps:
            if any(row.standing not in PROVED for row in step.rows) or not step.rows:
                break
            found = step.step
        return found

    def fails(self, step: StepComparison, at: Severity = Severity.ERROR) -> bool:
        """Whether something of a step is different."""
        return bool(self.failing(step, at) or (self.resumed and step.recorded))

    def failing(self, step: StepComparison, at: Severity = Severity.ERROR) -> list[Compared]:
        """The pairs of a step that are different."""
        rounded = [Standing.ROUNDING, Standing.SUSPICIOUS] if self.exact else []
        rounded += [Standing.CAST] if self.resumed else []
        return [
            row for row in step.rows
            if row.standing in rounded or (self.exact and row.narrowed)
            or (row.severity is not None and row.severity >= at)
        ]  # fmt: skip
