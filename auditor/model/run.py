"""A run: the saved steps of one training, their pointers, and which of them are committed."""

from __future__ import annotations

import enum
import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from auditor.model.catalog import Catalog, FileState, Role, Scalar
from auditor.model.observation import Content, Observations, contents
from auditor.model.witness import Witness

_DRAWN = re.compile(r"(?:.*/)?[0-9a-f]{24,64}")
"""Names of files that a writer draws by chance."""
_MOMENTS = frozenset({Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.MOMENT})

_STATE = _MOMENTS | {Role.MASTER}


class Commit(enum.Enum):
    """Whether a step was finished by its writer."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    IN_PROGRESS = "in progress"


class ChangeKind(enum.Enum):
    """How a step differs from what was audited under its number before."""

    PARTLY = "partly changed"
    """Some of its files are those that were audited, others hold something else, or are gone."""
    ANEW = "saved again"
    """None of its files is one that was audited."""


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a step since it was audited."""

    kind: ChangeKind
    changed: tuple[str, ...] = ()
    """Files with weights that hold something else now."""
    rewritten: tuple[str, ...] = ()
    """Files that were written again, of which it is not known what they hold, or that hold no weights."""
    lost: tuple[str, ...] = ()
    num_kept: int = 0
    """Files that are as they were."""


@dataclass(frozen=True, slots=True)
class StepState:
    """What the timeline knows of one saved step besides its outcomes."""

    step: int
    path: str
    format: str
    whole: bool
    """Whether every file that the recorded mesh implies is there."""
    missing: tuple[str, ...] = ()
    cut_short: tuple[str, ...] = ()
    """Files that ended too early when they were read, where no other is damaged."""
    unfinished: str = ""
    """What says that its writer did not finish it, in formats that mark this; empty where nothing does."""
    finished: bool = False
    """Whether the format's own mark says that it did."""
    modified: float = 0.0
    """Newest file's time, seconds since the epoch."""
    commit: Commit = Commit.COMMITTED
    optimizer_step: float | None = None
    """The optimizer's own counter, as most files record it."""
    counters: str = ""
    """Digest of all its counters, where it counts for each parameter: they need not go on together."""
    optimizer_files: tuple[str, ...] = ()
    """Files that record it."""
    state_files: tuple[str, ...] | None = None
    """Files that hold anything of the optimizer, as they are called in every step; their folder, where they are called
    by chance. None where that isn't known."""
    moved: bool = True
    """Whether the optimizer has taken steps at all: a run may have been saved before its first."""
    num_skipped: float = 0.0
    """Steps that were skipped so far because gradients overflowed, as far as that is recorded."""
    loss_scale: float | None = None
    """By which gradients are multiplied, where it is recorded; a skipped step may lower it."""
    moments: tuple[Content, ...] = ()
    """What was read of the moments; of the fp32 masters where the optimizer keeps no moments."""
    updated: tuple[Content, ...] = ()
    """What was read of the parameters that the optimizer is known to update. Others move without it: averages of
    weights, target networks."""
    parameters: tuple[Content, ...] = ()
    """What was read of all parameters."""
    everything: tuple[Content, ...] = ()
    """What was read of all tensors, padding left out."""
    drawn: str = ""
    """Digest of what the writer drew by chance for the files that hold its parameters, their names or a number of the
    save; empty where there is nothing of that."""
    sizes: str = ""
    """Digest of names and sizes of the files that hold its tensors, but for those whose names are drawn by chance."""
    num_ranks: int = 1
    """Of the mesh."""
    ranks_counted: bool = False
    """Whether that is the number of ranks of which files are there, and recorded nowhere."""
    deleted: bool = False
    """Whether its files are gone: what is known of it is from the ledger."""
    audited_before: bool = False
    """Whether the ledger knows something else under this number."""
    change: Change | None = None
    """What became of it since; None where nothing of what it holds did, or it was not audited before."""


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
    kept: bool = False
    """Whether there is a ledger that tells what was audited before."""

    @property
    def on_disk(self) -> tuple[StepState, ...]:
        """The steps that are there, without those that the ledger alone knows."""
        return tuple(state for state in self.steps if not state.deleted)


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
    witness: Witness | None = None
    """What the ranks held in memory, where the hook left it."""
    rates_before: frozenset[object] = frozenset()
    """The betas that earlier saves record."""


def step_state(catalog: Catalog, modified: float, *, listed: bool = True) -> StepState:
    """The state of a step just read; what is committed is decided over the run.

    ``listed``: whether headers were read, not names alone.
    """
    missing = tuple(file.name for file in catalog.files if file.state is FileState.MISSING)
    skipped = num_skipped(catalog)
    return StepState(
        catalog.step, catalog.path, catalog.format, not missing, missing, _cut_short(catalog), catalog.unfinished,
        catalog.finished, modified,
        optimizer_step=optimizer_step(catalog), counters=_digest_of_counters(catalog), moved=catalog.step > skipped,
        num_skipped=skipped,
        loss_scale=max((scalar.value for scalar in catalog.scalars if scalar.name == "loss_scale"), default=None),
        optimizer_files=tuple(sorted({scalar.file for scalar in counters_of_files(catalog)})),
        state_files=_state_files(catalog) if listed else None,
        num_ranks=catalog.mesh.num_ranks, ranks_counted=catalog.ranks_counted,
        drawn=_digest_of_drawn(catalog),
        sizes=_digest(sorted(_sizes(catalog))),
    )  # fmt: skip


def _state_files(catalog: Catalog) -> tuple[str, ...] | None:
    """None where no parameter was listed, or a file could not be read: it may be the one with the state."""
    roles = [tensor.role for tensor in catalog.tensors]
    if Role.PARAMETER not in roles or any(file.state is not FileState.PRESENT for file in catalog.files):
        return None
    of_state = np.array([role in _STATE for role in roles])[catalog.pieces.tensor]
    found = {catalog.files[number].name for number in np.unique(catalog.pieces.file[of_state]).tolist()}
    found.update(scalar.file for scalar in _counting(catalog))
    found.update(group.file for group in catalog.groups)
    names = map(catalog.within, found)
    return tuple(sorted({posixpath.dirname(name) if _DRAWN.fullmatch(name) else name for name in names}))


def _cut_short(catalog: Catalog) -> tuple[str, ...]:
    if any(file.state is FileState.DAMAGED for file in catalog.files):
        return ()
    return tuple(file.name for file in catalog.files if file.state is FileState.CUT_SHORT)


def _sizes(catalog: Catalog) -> Iterable[tuple[str, int]]:
    """An index may hold the folder's own path, and be longer in one that is called otherwise."""
    for number in np.unique(catalog.pieces.file).tolist():
        file = catalog.files[number]
        name = catalog.within(file.name)
        if not _DRAWN.fullmatch(name):
            yield name, file.num_bytes


def _digest_of_drawn(catalog: Catalog) -> str:
    held = [tensor.role is Role.PARAMETER for tensor in catalog.tensors]
    of_parameters = np.array(held or [False])[catalog.pieces.tensor]
    files = [catalog.files[number] for number in np.unique(catalog.pieces.file[of_parameters]).tolist()]
    names = ((file.save_id, catalog.within(file.name)) for file in files)
    drawn = {save_id or name for save_id, name in names if save_id or _DRAWN.fullmatch(name)}
    return _digest(sorted(drawn)) if drawn else ""


def _digest(what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def with_content(state: StepState, catalog: Catalog, observations: Observations) -> StepState:
    """The state with the contents of what was read; as it is where files changed meanwhile."""
    if observations.changed:
        return state
    roles = [tensor.role for tensor in catalog.tensors]
    kept = _MOMENTS if _MOMENTS.intersection(roles) else {Role.MASTER}
    moments = [number for number, role in enumerate(roles) if role in kept]
    names = {catalog.tensors[number].name for number in moments}
    parameters = [number for number, role in enumerate(roles) if role is Role.PARAMETER]
    meant = [number for number, role in enumerate(roles) if role is not Role.PADDING]
    updated = [number for number in parameters if catalog.tensors[number].name in names]
    return replace(
        state,
        moments=contents(catalog, observations, moments),
        updated=contents(catalog, observations, updated),
        parameters=contents(catalog, observations, parameters),
        everything=contents(catalog, observations, meant),
    )


def num_skipped(catalog: Catalog) -> float:
    """Steps that were skipped so far, as far as that is recorded."""
    return max((scalar.value for scalar in catalog.scalars if scalar.name == "skipped_steps"), default=0.0)


def optimizer_step(catalog: Catalog) -> float | None:
    """The optimizer's own counter as most of the files record it; the one that fits the step best where they tie."""
    return _most_recorded(catalog, counters_of_files(catalog))


def optimizer_steps(catalog: Catalog) -> dict[str, float]:
    """The same of each optimizer, where several models were saved together and each has its own."""
    own: dict[str, list[Scalar]] = {}
    for scalar in counters_of_files(catalog):
        own.setdefault(scalar.optimizer, []).append(scalar)
    return {name: count for name, of in own.items() if (count := _most_recorded(catalog, of)) is not None}


def _most_recorded(catalog: Catalog, counters: Iterable[Scalar]) -> float | None:
    counts = Counter(scalar.value for scalar in counters)
    expected = catalog.step - num_skipped(catalog)
    return max(counts, key=lambda value: (counts[value], -abs(value - expected)), default=None)


def counters_of_files(catalog: Catalog) -> tuple[Scalar, ...]:
    """What every file records of the optimizer's own step as a whole.

    Where it counts for each parameter, that is the count which most of them have: single ones may be younger. Counters
    that their dtype keeps from going on say nothing.
    """
    found = [scalar for scalar in _counting(catalog) if not scalar.tensor]
    found += [
        replace(scalars[0], value=_usual(scalar.value for scalar in scalars), tensor="")
        for scalars in _single_counters(catalog).values()
    ]
    return tuple(found)


def counters_that_go_together(catalog: Catalog) -> tuple[Scalar, ...]:
    """What of :func:`counters_of_files` must be the same in all files.

    Where the counters of any one file differ, parameters are not all updated in each step (layers that are dropped,
    experts without a token), and what files count for single parameters says nothing of the file as a whole.
    """
    single = _single_counters(catalog)
    apart = any(len({scalar.value for scalar in scalars}) > 1 for scalars in single.values())
    return tuple(scalar for scalar in counters_of_files(catalog) if not (apart and scalar.file in single))


def files_of_another_step(catalog: Catalog) -> frozenset[str]:
    """Files whose optimizer state is of another step than most files' is."""
    usual = optimizer_steps(catalog)
    counters = counters_that_go_together(catalog)
    return frozenset(scalar.file for scalar in counters if scalar.value != usual[scalar.optimizer])


def _counting(catalog: Catalog) -> list[Scalar]:
    return [scalar for scalar in catalog.scalars if scalar.name == "optimizer_step" and not scalar.saturated]


def _single_counters(catalog: Catalog) -> dict[str, list[Scalar]]:
    """File to its counters of single parameters."""
    single: dict[str, list[Scalar]] = {}
    for scalar in _counting(catalog):
        if scalar.tensor:
            single.setdefault(scalar.file, []).append(scalar)
    return single


def _digest_of_counters(catalog: Catalog) -> str:
    """A digest of what most files count for each parameter; empty where none counts for single ones."""
    values: dict[str, list[float]] = {}
    for scalars in _single_counters(catalog).values():
        for scalar in scalars:
            values.setdefault(scalar.tensor, []).append(scalar.value)
    counts = sorted((name, _usual(found)) for name, found in values.items())
    return _digest(counts) if counts else ""


def _usual(values: Iterable[float]) -> float:
    """The most frequent value, the largest of several."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


MAX_AHEAD_SECONDS = 86_400.0
"""A step that is dated further ahead was not written by a clock that is a little wrong, and isn't young for ever."""


def decide_commits(
    steps: Sequence[StepState],
    pointers: Sequence[PointerState],
    now: float,
    settle_seconds: float,
    *,
    newest_included: bool = True,
) -> tuple[StepState, ...]:
    """Which steps are committed.

    Where the format marks a step as finished or unfinished, that decides. Else it is when the pointer or a later
    committed step says so, or when all files are there that its recorded mesh implies. The newest step, if not
    committed and younger than ``settle_seconds``, is in progress; also where nothing but the end of files lacks, and
    where ranks are only counted and it has files of fewer than the step before: the rest may be on its way.
    ``newest_included``: whether the last of ``steps`` is the newest that was saved; a later one commits them all.
    """
    pointed = {pointer.target for pointer in pointers}
    decided: list[StepState] = []
    later_committed = not newest_included
    for position, state in enumerate(reversed(steps)):
        young = position == 0 and -MAX_AHEAD_SECONDS < now - state.modified < settle_seconds
        fewer = state.ranks_counted and _has_fewer(state, steps[-2:])
        growing = young and (fewer or bool(state.cut_short))
        done = state.finished or later_committed or (state.whole and not growing) or state.path in pointed
        if done and not state.unfinished:
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
