"""A run: the saved steps of one training, their pointers, and which of them are committed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from auditor.model.catalog import Catalog, FileState
from auditor.model.observation import Observations


class Commit(enum.Enum):
    """Whether a step was finished by its writer."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    IN_PROGRESS = "in progress"


@dataclass(frozen=True, slots=True)
class StepState:
    """What the timeline knows of one saved step besides its outcomes."""

    step: int
    path: str
    format: str
    whole: bool
    """Whether every file that the recorded mesh implies is there."""
    missing: tuple[str, ...] = ()
    modified: float = 0.0
    """Newest file's time, seconds since the epoch."""
    commit: Commit = Commit.COMMITTED


@dataclass(frozen=True, slots=True)
class PointerState:
    """A file that names the step to resume from."""

    file: str
    target: str
    """Path of the step that it names; empty where the text names nothing that may be looked at."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The run as a whole: what run-scoped invariants see."""

    steps: tuple[StepState, ...]
    """In order of step number, then path."""
    pointers: tuple[PointerState, ...] = ()
    complete: bool = True
    """Whether all saved steps are in ``steps``; if not, nothing can be said of pointers."""


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """All that is known of one step: what step-scoped invariants see."""

    catalog: Catalog
    observations: Observations
    unread: str = ""
    """Why no weights were read, where none were asked for."""
    strict_buffers: bool = False


def step_state(catalog: Catalog, modified: float) -> StepState:
    """The state of a step just read; what is committed is decided over the run."""
    missing = tuple(file.name for file in catalog.files if file.state is FileState.MISSING)
    return StepState(catalog.step, catalog.path, catalog.format, not missing, missing, modified)


def decide_commits(
    steps: Sequence[StepState], pointers: Sequence[PointerState], now: float, settle_seconds: float
) -> tuple[StepState, ...]:
    """Which steps are committed, for formats that write no marker into the step.

    A step is committed when the pointer or a later committed step says so, or when all files are there that its
    recorded mesh implies. The newest step, if not committed and younger than ``settle_seconds``, is in progress.
    """
    pointed = {pointer.target for pointer in pointers}
    decided: list[StepState] = []
    later_committed = False
    for position, state in enumerate(reversed(steps)):
        if later_committed or state.whole or state.path in pointed:
            commit, later_committed = Commit.COMMITTED, True
        elif position == 0 and now - state.modified < settle_seconds:
            commit = Commit.IN_PROGRESS
        else:
            commit = Commit.UNCOMMITTED
        decided.append(replace(state, commit=commit))
    return tuple(reversed(decided))
