"""A run: the saved steps of one training, their pointers, and which of them are committed."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from auditor.model.catalog import Catalog, FileState, Scalar
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
    optimizer_step: float | None = None
    """The optimizer's own counter, as most files record it."""
    optimizer_files: tuple[str, ...] = ()
    """Files that record it."""
    moved: bool = True
    """Whether the optimizer has taken steps at all: a run may have been saved before its first."""
    num_ranks: int = 1
    """Of the mesh."""
    ranks_counted: bool = False
    """Whether that is the number of ranks of which files are there, and recorded nowhere."""


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
    named_step: int | None = None
    """The step that the folder's name tells, in a form that the framework itself uses, beside a recorded one."""


def step_state(catalog: Catalog, modified: float) -> StepState:
    """The state of a step just read; what is committed is decided over the run."""
    missing = tuple(file.name for file in catalog.files if file.state is FileState.MISSING)
    skipped = max((scalar.value for scalar in catalog.scalars if scalar.name == "skipped_steps"), default=0.0)
    return StepState(
        catalog.step, catalog.path, catalog.format, not missing, missing, modified,
        optimizer_step=optimizer_step(catalog), moved=catalog.step > skipped == 0,
        optimizer_files=tuple(sorted({scalar.file for scalar in counters_of_files(catalog)})),
        num_ranks=catalog.mesh.num_ranks, ranks_counted=catalog.ranks_counted,
    )  # fmt: skip


def optimizer_step(catalog: Catalog) -> float | None:
    """The optimizer's own counter as most of the files record it; the one that fits the step best where they tie."""
    counts = Counter(scalar.value for scalar in counters_of_files(catalog))
    skipped = max((scalar.value for scalar in catalog.scalars if scalar.name == "skipped_steps"), default=0.0)
    expected = catalog.step - skipped
    return max(counts, key=lambda value: (counts[value], -abs(value - expected)), default=None)


def counters_of_files(catalog: Catalog) -> tuple[Scalar, ...]:
    """What every file records of the optimizer's own step as a whole.

    Where it counts for each parameter, that is the count which most of them have: single ones may be younger. Counters
    that their dtype keeps from going on say nothing.
    """
    counting = [scalar for scalar in catalog.scalars if scalar.name == "optimizer_step" and not scalar.saturated]
    found = [scalar for scalar in counting if not scalar.tensor]
    single: dict[str, list[Scalar]] = {}
    for scalar in counting:
        if scalar.tensor:
            single.setdefault(scalar.file, []).append(scalar)
    for scalars in single.values():
        counts = Counter(scalar.value for scalar in scalars)
        value = max(counts, key=lambda value: (counts[value], value))
        found.append(replace(scalars[0], value=value, tensor=""))
    return tuple(found)


def decide_commits(
    steps: Sequence[StepState],
    pointers: Sequence[PointerState],
    now: float,
    settle_seconds: float,
    *,
    newest_included: bool = True,
) -> tuple[StepState, ...]:
    """Which steps are committed, for formats that write no marker into the step.

    A step is committed when the pointer or a later committed step says so, or when all files are there that its
    recorded mesh implies. The newest step, if not committed and younger than ``settle_seconds``, is in progress; also
    where ranks are only counted and it has files of fewer than the step before: the others may be on their way.
    ``newest_included``: whether the last of ``steps`` is the newest that was saved; a later one commits them all.
    """
    pointed = {pointer.target for pointer in pointers}
    decided: list[StepState] = []
    later_committed = not newest_included
    for position, state in enumerate(reversed(steps)):
        young = position == 0 and now - state.modified < settle_seconds
        growing = young and state.ranks_counted and _has_fewer(state, steps[-2:])
        if later_committed or (state.whole and not growing) or state.path in pointed:
            commit, later_committed = Commit.COMMITTED, True
        elif young:
            commit = Commit.IN_PROGRESS
        else:
            commit = Commit.UNCOMMITTED
        decided.append(replace(state, commit=commit))
    return tuple(reversed(decided))


def _has_fewer(state: StepState, others: Sequence[StepState]) -> bool:
    """Whether one of the others has files of more ranks."""
    return any(other.num_ranks > state.num_ranks for other in others if other.format == state.format)
