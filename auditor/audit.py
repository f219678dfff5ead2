"""The one orchestration: discover, read each step's Catalog, observe, judge, join over steps.

Steps are taken one after the other; of a step that is done only judgements stay, so memory does not grow with weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from auditor.discovery import RunSource, StepSource, discover
from auditor.errors import NothingToAuditError, UsageError
from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.registry import invariants, select
from auditor.model.catalog import Catalog, FileState, Role
from auditor.model.finding import Finding, Judgement, Outcome
from auditor.model.mesh import NO_MESH, Mesh
from auditor.model.observation import Observations, unobserved
from auditor.model.run import Commit, PointerState, RunState, StepEvidence, StepState, decide_commits, step_state
from auditor.model.waiver import Waiver, apply_baseline, apply_waivers
from auditor.observe.checksums import verify_checksums
from auditor.observe.difference import measure_differences
from auditor.observe.one_pass import observe, wanted_rows
from auditor.settings import DEFAULTS, Level, Settings
from auditor.storage.retrying import RetryingStore
from auditor.storage.store import Entry, StorageError, Store
from auditor.storage.union import UnionStore
from auditor.timeline.findings import findings
from auditor.timeline.last_good import NEEDED, last_good

LARGE_RUN_BYTES = 16 << 30
"""Runs larger than this are by default read at `replicas`, and at `values` only in the newest step."""


@dataclass(slots=True)
class Coverage:
    """How much of what is there was looked at."""

    num_tensors: int = 0
    num_pieces: int = 0
    num_bytes_total: int = 0
    """Of all files of the audited steps."""
    num_bytes_read: int = 0
    """Of weights."""
    num_bytes_reread: int = 0
    """Once more: of weights, to measure differences; of whole files, to verify checksums."""


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
    chosen: tuple[Invariant, ...] = ()
    seconds: float = 0.0

    def mesh_of(self, step: int) -> Mesh:
        """The mesh that wrote a step; meshes may change at a resume."""
        return next((item.mesh for item in self.steps if item.state.step == step), self.mesh)

    def counts(self, identifier: str) -> dict[Outcome, int]:
        """Outcomes of one invariant over all steps, in subjects."""
        total = dict.fromkeys(Outcome, 0)
        for step in self.steps:
            judged = step.judgements.get(identifier)
            if judged is None:
                continue
            total[Outcome.HOLDS] += judged.num_holds
            total[Outcome.VIOLATED] += len(judged.violations)
            total[Outcome.UNDETERMINED] += sum(map(len, judged.undetermined.values()))
            total[Outcome.NOT_APPLICABLE] += sum(judged.not_applicable.values())
        return total

    def unjudged(self) -> list[str]:
        """Ids of all invariants about which this audit says nothing: ignored, not selected, or beyond the level."""
        silent = set(self.not_asked())
        return [item.id for item in invariants() if item not in self.chosen or item.id in silent]

    def beyond_level(self) -> dict[Level, list[str]]:
        """Level to the chosen invariants that no step judges, because it takes that level."""
        found: dict[Level, list[str]] = {}
        for item in self.chosen:
            if item.judge_step and all(step.level < _REACHED[item.needs] for step in self.steps):
                found.setdefault(_REACHED[item.needs], []).append(item.id)
        return found

    def not_asked(self) -> list[str]:
        """Ids of chosen invariants about which no step says anything, because no step's level reaches them."""
        return [name for names in self.beyond_level().values() for name in names]

    def undetermined(self) -> dict[tuple[str, str], int]:
        """(Invariant id, reason) to the largest number of subjects in any step."""
        return self.reasons("undetermined")

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
    expired: tuple[Waiver, ...] = ()
    """Waivers past their day: what they accepted counts again, and each is itself something to be told."""


Progress = Callable[[str, int], None]
"""Told the step's path and the bytes just read."""


def audit(
    store: Store, settings: Settings = DEFAULTS, *, executor: Executor | None = None,
    progress: Progress = lambda path, num_bytes: None, now: float | None = None,
) -> Report:  # fmt: skip
    """Audit everything below the store's root.

    ``executor``: where units of work run; a thread pool of ``settings.threads`` by default. ``now``: the time against
    which ``settle`` is held, seconds since the epoch.

    Raises:
        NothingToAuditError: there is no checkpoint, or no step that was asked for.
        UsageError: settings that name unknown invariants or steps.
        StorageError: the root can't be listed.
    """
    try:
        chosen = select(settings.select, settings.ignore)
    except LookupError as error:
        raise UsageError(str(error)) from error
    # Each root tries again by itself, so that a union stays one: its roots have a pointer each.
    store = UnionStore([*map(RetryingStore, store.roots)]) if isinstance(store, UnionStore) else RetryingStore(store)
    threads = settings.threads or min(8, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads)
    try:
        judged = tuple(item for item in invariants() if item in chosen or item.family in NEEDED)
        job = _Audit(store, settings, chosen, judged, executor or pool, progress, time.time() if now is None else now)
        runs = [job.run(source) for source in discover(store)]
    finally:
        # Without it an interrupt would wait until all queued work is done.
        pool.shutdown(cancel_futures=True)
    runs = [run for run in runs if run.steps or run.unrecognised]
    if not any(run.steps for run in runs):
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")
    if settings.tensors and not any(run.coverage.num_tensors for run in runs):
        raise NothingToAuditError(f"{store.location}: no tensor matches --tensors {settings.tensors}")
    today = datetime.fromtimestamp(job.now, UTC).date()
    expired = tuple(waiver for waiver in settings.waivers if waiver.expired(today))
    return Report(store.location, runs, settings, expired)


@dataclass(frozen=True, slots=True)
class _Audit:
    """One audit under way."""

    store: Store
    settings: Settings
    chosen: tuple[Invariant, ...]
    """Reported."""
    judged: tuple[Invariant, ...]
    """Those, and what must be known of a step to call it good."""
    executor: Executor
    progress: Progress
    now: float

    def run(self, source: RunSource) -> RunReport:
        begun = time.monotonic()
        report = RunReport(source.path, unrecognised=source.unrecognised, chosen=self.chosen)
        chosen = self.settings.steps.choose(sorted({step.match.step for step in source.steps}))
        sources = [step for step in source.steps if step.match.step in chosen]
        pointers = tuple(PointerState(pointer.file, pointer.target) for pointer in source.pointers)
        newest = source.steps[-1]
        report.num_saved_before = source.steps.index(sources[0]) if sources else 0
        whole_run = len(sources) == len(source.steps)
        levels = self.levels(sources)
        for step, level in zip(sources, levels, strict=True):
            report.steps.append(self.step(step, level, report, pointers, newest=step is newest))
        states = tuple(step.state for step in report.steps)
        states = decide_commits(
            states,
            pointers,
            self.now,
            self.settings.settle_seconds,
            newest_included=bool(sources) and sources[-1] is newest,
        )
        report.steps = [replace(step, state=state) for step, state in zip(report.steps, states, strict=True)]
        # Pointers may name steps that were not asked for: what they say of those is not judged then.
        self.conclude(report, RunState(states, pointers if whole_run else (), whole_run))
        report.seconds = time.monotonic() - begun
        return report

    def files_of(self, source: StepSource) -> Iterator[Entry]:
        """A step's files: those in its folder, and those one level below (a folder a rank)."""
        yield from source.folder.files.values()
        for name in source.folder.folders.values():
            try:
                yield from (entry for entry in self.store.list(name.name) if not entry.is_folder)
            except StorageError:
                continue

    def levels(self, sources: Sequence[StepSource]) -> list[Level]:
        if self.settings.level is not None:
            return [self.settings.level] * len(sources)
        total = sum(entry.num_bytes for source in sources for entry in self.files_of(source))
        if len(sources) == 1 or total <= LARGE_RUN_BYTES:
            return [Level.VALUES] * len(sources)
        return [Level.REPLICAS] * (len(sources) - 1) + [Level.VALUES]

    def step(
        self,
        source: StepSource,
        level: Level,
        report: RunReport,
        pointers: Sequence[PointerState],
        *,
        newest: bool,
    ) -> StepReport:
        folder = source.folder
        options = replace(self.settings.options, names_only=level is Level.NAMES)
        full = source.adapter.read(self.store, folder, source.match, options)
        modified = max((entry.modified for entry in self.files_of(source)), default=0.0)
        state = step_state(full, modified)
        if newest:
            (state,) = decide_commits([state], pointers, self.now, self.settings.settle_seconds)
            if state.commit is Commit.IN_PROGRESS:
                return StepReport(state, Level.NAMES, {}, {}, mesh=full.mesh)
        report.mesh = full.mesh
        catalog = full.only(self.settings.wants_tensor) if self.settings.tensors else full
        observations = self.observe(catalog, level, folder.path)
        self.count(report.coverage, full, catalog, observations)
        evidence = StepEvidence(catalog, observations, _unread(level), self.settings.strict_buffers)
        judgements = self.judge(evidence, level, self.judged)
        # Whether a step is whole is asked of all its tensors, whatever was selected.
        whole = evidence if catalog is full else StepEvidence(full, unobserved(full))
        wholeness = self.judge(whole, level, [item for item in self.judged if item.family in NEEDED])
        changed = tuple(
            sorted({*observations.changed, *(f.name for f in catalog.files if f.state is FileState.CHANGED)})
        )
        if changed:
            judgements = {key: _doubted(item, changed) for key, item in judgements.items()}
            wholeness = {key: _doubted(item, changed) for key, item in wholeness.items()}
        failures = tuple(
            f"{file.name}: {file.detail}" for file in catalog.files if file.state is FileState.UNREADABLE
        ) + tuple(
            f"{catalog.files[number].name}: {text}"
            for number, text in observations.failures.items()
            if catalog.files[number].state is FileState.PRESENT and not changed
        )
        return StepReport(state, level, judgements, wholeness, changed, failures, full.opaque, full.mesh)

    def judge(self, evidence: StepEvidence, level: Level, items: Sequence[Invariant]) -> dict[str, Judgement]:
        return {
            item.id: item.judge_step(evidence) for item in items if item.judge_step and level >= _REACHED[item.needs]
        }

    def observe(self, catalog: Catalog, level: Level, path: str) -> Observations:
        wanted = {item.needs for item in self.chosen}
        seen = unobserved(catalog)
        if level >= Level.REPLICAS and Needs.WEIGHTS in wanted:
            seen = self.weights(catalog, level, path)
        if level >= Level.FULL and Needs.CHECKSUMS in wanted:
            seen = verify_checksums(self.store, catalog, seen, self.executor, partial(self.progress, path))
        return seen

    def weights(self, catalog: Catalog, level: Level, path: str) -> Observations:
        asking = [item for item in self.chosen if item.needs is Needs.WEIGHTS]
        pairings = [p for item in asking if item.pairings and level >= Level.VALUES for p in item.pairings(catalog)]
        tensors = {number for item in asking if item.reads for number in item.reads(catalog)}
        tensors.update(number for pairing in pairings for number in (pairing.left, pairing.right))
        everything = level >= Level.VALUES and any(not item.reads and not item.pairings for item in asking)
        rows = wanted_rows(catalog, None if everything else tensors)
        progress = partial(self.progress, path)
        seen = observe(self.store, catalog, rows, self.executor, progress, pairings, self.settings.kernels)
        return seen if seen.changed else measure_differences(self.store, catalog, seen)

    @staticmethod
    def count(coverage: Coverage, full: Catalog, catalog: Catalog, seen: Observations) -> None:
        coverage.num_tensors += sum(tensor.role is not Role.PADDING for tensor in catalog.tensors)
        coverage.num_pieces += len(catalog.pieces)
        coverage.num_bytes_total += sum(file.num_bytes for file in full.files)
        coverage.num_bytes_read += seen.num_bytes_read
        coverage.num_bytes_reread += seen.num_bytes_reread

    def conclude(self, report: RunReport, run: RunState) -> None:
        judged: dict[int, dict[str, Judgement]] = {}
        for step in report.steps:
            if step.state.commit is not Commit.IN_PROGRESS:
                known = judged.setdefault(step.state.step, {})
                for identifier, judgement in step.judgements.items():
                    known[identifier] = known[identifier].merged(judgement) if identifier in known else judgement
        for item in self.judged:
            if item.judge_run:
                for number, judgement in item.judge_run(run).items():
                    judged.setdefault(number, {})[item.id] = judgement
        ids = {item.id for item in self.chosen}
        report.steps = [
            replace(step, judgements={k: j for k, j in judged.get(step.state.step, {}).items() if k in ids})
            for step in report.steps
        ]
        report.findings = self.accept(findings(judged, self.chosen))
        accepted = {item.id for item in report.findings if item.accepted}
        open_ids = {item.id for item in report.findings if not item.accepted}
        serious = {item.id for item in self.judged if item.severity >= self.settings.fail_on} - (accepted - open_ids)
        good = {number: dict(found) for number, found in judged.items()}
        for step in report.steps:
            good.setdefault(step.state.step, {}).update(step.wholeness)
        report.last_good, report.rejected = last_good(
            run.steps, good, report.findings, self.settings.fail_on, serious=serious, strict=self.settings.strict
        )

    def accept(self, found: list[Finding]) -> list[Finding]:
        """The findings, marked where the user knows them, and one for every waiver that ran out."""
        today = datetime.fromtimestamp(self.now, UTC).date()
        if self.settings.baseline:
            found = apply_baseline(found, self.settings.baseline)
        return apply_waivers(found, self.settings.waivers, today)


_REACHED = {
    Needs.NAMES: Level.NAMES, Needs.HEADERS: Level.HEADERS, Needs.WEIGHTS: Level.REPLICAS, Needs.CHECKSUMS: Level.FULL,
}  # fmt: skip
"""The lowest level at which an invariant can speak."""


def _unread(level: Level) -> str:
    return f"not all weights are read at level {level.name.lower()}" if level < Level.VALUES else ""


def _doubted(judgement: Judgement, changed: Sequence[str]) -> Judgement:
    """A judgement of a step that changed while it was read: nothing that it says can be relied on."""
    names = tuple(violation.subject for violation in judgement.violations) or ("the step",)
    return Judgement(undetermined={f"{', '.join(changed)} changed while it was read": names})
