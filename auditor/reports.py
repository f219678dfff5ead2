"""What an audit says: of a step, of a run, of everything below the path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.registry import invariants
from auditor.ledger.keeper import Branch
from auditor.ledger.record import StepAccount
from auditor.model.catalog import Catalog, Role
from auditor.model.finding import Finding, Judgement, Outcome
from auditor.model.mesh import NO_MESH, Mesh
from auditor.model.observation import Observations
from auditor.model.run import StepState
from auditor.settings import Level, Settings

REACHED = {
    Needs.NAMES: Level.NAMES, Needs.HEADERS: Level.HEADERS, Needs.WEIGHTS: Level.REPLICAS, Needs.CHECKSUMS: Level.FULL,
}  # fmt: skip
"""The lowest level at which an invariant can speak."""


def unread(level: Level) -> str:
    """Why nothing is known of weights at a level; empty where it is."""
    return f"not all weights are read at level {level.name.lower()}" if level < Level.VALUES else ""


@dataclass(slots=True)
class Coverage:
    """How much of what is there was looked at."""

    num_tensors: int = 0
    num_pieces: int = 0
    num_bytes_total: int = 0
    """Of all files of the audited steps."""
    num_bytes_read: int = 0
    """Of tensors, of whatever role, each byte of them once."""
    num_bytes_reread: int = 0
    """Once more: of tensors, to measure differences; of whole files, to verify checksums."""

    def add(self, full: Catalog, catalog: Catalog, seen: Observations) -> None:
        """Count a step: all that it stores, and of it what was chosen."""
        self.num_tensors += sum(tensor.role is not Role.PADDING for tensor in catalog.tensors)
        self.num_pieces += len(catalog.pieces)
        self.num_bytes_total += sum(file.num_bytes for file in full.files)
        self.num_bytes_read += seen.num_bytes_read
        self.num_bytes_reread += seen.num_bytes_reread

    def add_known(self, account: StepAccount) -> None:
        """Count a step that a ledger knows, and of which nothing was opened."""
        self.num_tensors += sum(tensor.role is not Role.PADDING for tensor in account.tensors)
        self.num_pieces += account.num_pieces
        self.num_bytes_total += sum(file.num_bytes for file in account.files)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the audit says of one step."""

    state: StepState
    level: Level
    judgements: Mapping[str, Judgement]
    wholeness: Mapping[str, Judgement]
    """Judgements of INT and COV over all tensors, also those that weren't chosen."""
    changed: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """What storage refused; the audit of this step is incomplete."""
    opaque: Mapping[str, int] = field(default_factory=dict)
    mesh: Mesh = NO_MESH
    recalled: bool = False
    """Whether what was measured is from the ledger, and no weights were read."""


def step_from_ledger(account: StepAccount) -> StepReport:
    """What was said of a step whose files are gone, or unchanged."""
    said = account.said
    level = Level[said.level] if said.level in Level.__members__ else Level.NAMES
    return StepReport(
        said.state, level, said.judgements, said.wholeness, opaque=said.opaque, mesh=said.mesh, recalled=True
    )


@dataclass(slots=True)
class RunReport:
    """What the audit says of one run."""

    path: str
    mesh: Mesh = NO_MESH
    """Of the newest audited step."""
    num_saved_before: int = 0
    """Saved steps before the first that was looked at."""
    steps: list[StepReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    last_good: StepState | None = None
    rejected: list[tuple[int, str]] = field(default_factory=list)
    """Steps newer than the last good one (all, if there is none), newest first, with why they are not good."""
    coverage: Coverage = field(default_factory=Coverage)
    unrecognised: Mapping[str, str] = field(default_factory=dict)
    vanished: Sequence[str] = ()
    """Folders that were listed and gone when they were looked into."""
    chosen: tuple[Invariant, ...] = ()
    branches: list[Branch] = field(default_factory=list)
    """What the ledger knows of steps that are not on the way to the newest one."""
    bisected: str = ""
    """With --bisect: how many steps were looked at, and what that can't know."""
    ledger_notes: list[str] = field(default_factory=list)
    """What is wrong with the ledger; it was not used."""
    unwritten: list[str] = field(default_factory=list)
    """What the ledger did not take: the next audit reads those steps again."""
    beside: dict[str, Judgement] = field(default_factory=dict)
    """Judgements that are about no step, but about the configuration."""
    seconds: float = 0.0
    order: str = ""
    """By what its steps are ordered, where no framework did that."""
    nested: bool = False
    """Whether it lies in another run's folder, so that it isn't the one that is asked for by that."""

    def mesh_of(self, step: int) -> Mesh:
        """The mesh that wrote a step; meshes may change at a resume."""
        return next((item.mesh for item in self.steps if item.state.step == step), self.mesh)

    def counts(self, identifier: str) -> dict[Outcome, int]:
        """Outcomes of one invariant over all steps, in subjects."""
        total = dict.fromkeys(Outcome, 0)
        for judgements in (*(step.judgements for step in self.steps), self.beside):
            judged = judgements.get(identifier)
            if judged is None:
                continue
            total[Outcome.HOLDS] += judged.num_holds
            total[Outcome.VIOLATED] += len(judged.violations)
            total[Outcome.UNDETERMINED] += sum(map(len, judged.undetermined.values()))
            total[Outcome.NOT_APPLICABLE] += sum(judged.not_applicable.values())
        return total

    def unjudged(self) -> list[str]:
        """Ids of all invariants of checkpoints about which this audit says nothing.

        They were ignored, not selected, or are beyond the level.
        """
        silent = set(self.not_asked())
        of_checkpoints = [item for item in invariants() if not item.judge_waivers]
        return [item.id for item in of_checkpoints if item not in self.chosen or item.id in silent]

    def beyond_level(self) -> dict[Level, list[str]]:
        """Level to the chosen invariants that no step judges, because it takes that level."""
        found: dict[Level, list[str]] = {}
        for item in self.chosen:
            if (item.judge_step or item.judge_motion) and all(step.level < REACHED[item.needs] for step in self.steps):
                found.setdefault(REACHED[item.needs], []).append(item.id)
        return found

    def not_asked(self) -> list[str]:
        """Ids of chosen invariants about which no step says anything, because no step's level reaches them."""
        return [name for names in self.beyond_level().values() for name in names]

    def undetermined(self) -> dict[tuple[str, str], int]:
        """(Invariant id, reason) to the largest number of subjects in any step."""
        return self.reasons("undetermined")

    def steps_undetermined(self, identifier: str, reason: str) -> list[int]:
        """Steps in which an invariant is undetermined for one reason."""
        return [
            step.state.step
            for step in self.steps
            if identifier in step.judgements and reason in step.judgements[identifier].undetermined
        ]

    def reasons(self, outcome: Literal["undetermined", "not_applicable"]) -> dict[tuple[str, str], int]:
        """(Invariant id, reason) to the largest number of subjects in any step, for one kind of outcome."""
        found: dict[tuple[str, str], int] = {}
        for step in self.steps:
            for identifier, judged in step.judgements.items():
                for reason, names in getattr(judged, outcome).items():
                    count = names if isinstance(names, int) else len(names)
                    found[identifier, reason] = max(found.get((identifier, reason), 0), count)
        return found


@dataclass(slots=True)
class Report:
    """What the audit says of everything under the path."""

    location: str
    runs: list[RunReport]
    settings: Settings

    @property
    def asked_for(self) -> list[RunReport]:
        """The runs that are meant where one is asked for."""
        return [run for run in self.runs if not run.nested] or self.runs
