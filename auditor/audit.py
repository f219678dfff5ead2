"""The one orchestration: discover, read each step's Catalog, observe, judge, join over steps.

Steps are taken one after the other; of a step that is done only judgements stay, so memory does not grow with weights.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import partial

from auditor.bisecting import few_steps
from auditor.containers.ahead import read_ahead, reading_ahead
from auditor.discovery import RunSource, StepSource, discover
from auditor.errors import NothingToAuditError, UsageError
from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.registry import invariants, select
from auditor.ledger.keeper import Keeper, Recalled, folder_of, run_name
from auditor.ledger.record import Asked
from auditor.ledger.tree import Ledger
from auditor.listing import Listing
from auditor.model.catalog import Catalog, FileState
from auditor.model.finding import Finding, Judgement
from auditor.model.observation import Observations, unobserved
from auditor.model.run import Commit, PointerState, RunState, StepEvidence, decide_commits, step_state, with_content
from auditor.model.waiver import apply_baseline, apply_waivers
from auditor.observe.checksums import verify_checksums
from auditor.observe.difference import measure_differences
from auditor.observe.executors import executor_of
from auditor.observe.kernel_choice import choose
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything, Joined, Runner, Share
from auditor.reports import REACHED, Report, RunReport, StepReport, step_from_ledger, unread
from auditor.settings import DEFAULTS, Level, Settings
from auditor.storage.retrying import RetryingStore
from auditor.storage.store import Entry, Store, num_readers
from auditor.storage.throttled import ThrottledStore
from auditor.storage.union import UnionStore
from auditor.storage.writer import FolderWriter
from auditor.succession import MOST_BYTES, Reader, Succession
from auditor.timeline.findings import findings, findings_of_no_step
from auditor.timeline.last_good import NEEDED, last_good
from auditor.witnesses import witness_of

Progress = Callable[[str, int], None]
"""Told the step's path and the bytes just read."""


def audit(
    store: Store, settings: Settings = DEFAULTS, *, executor: Executor | None = None,
    progress: Progress = lambda path, num_bytes: None, now: float | None = None, shares: Store | None = None,
    ledger: Ledger | None = None, run: str = "",
) -> Report:  # fmt: skip
    """Audit everything below the store's root.

    ``executor``: where units of work run; a thread pool of ``settings.threads`` by default. ``now``: the time against
    which ``settle`` is held, seconds since the epoch. ``shares``: a folder to which :func:`audit_share` was written in
    several processes; what they measured is not read again. ``ledger``: where what was measured and said is kept; of
    steps that it knows and that did not change no weights are read. ``run``: what the run is called in the ledger; its
    folder's name by default.

    Raises:
        NothingToAuditError: there is no checkpoint, or no step that was asked for.
        UsageError: settings that name unknown invariants or steps; a ledger that is none.
        StorageError: the root can't be listed.
        LockedError: another audit writes into the ledger.
        WriteError: the ledger does not take what is written.
    """
    begun = time.time() if now is None else now
    with _means(store, settings, executor) as (readable, workers):
        runner = Joined.of(shares) if shares else Everything(workers)
        job = replace(_audit_of(readable, settings, workers, runner, progress, begun), ledger=ledger, run_name=run)
        sources = discover(readable)
        with ledger.writer.locked() if ledger and ledger.writer else nullcontext():
            runs = [job.run(source) for source in sources]
    runs = [run for run in runs if run.steps or run.unrecognised]
    if not any(run.steps for run in runs):
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")
    if settings.tensors and not any(run.coverage.num_tensors for run in runs):
        raise NothingToAuditError(f"{store.location}: no tensor matches --tensors {settings.tensors}")
    return Report(store.location, runs, settings)


def audit_share(
    store: Store, settings: Settings, number: int, of: int, folder: str, *,
    progress: Progress = lambda path, num_bytes: None,
) -> Share:  # fmt: skip
    """Measure share ``number`` (1 the first) of a run's weights, judge nothing, and write what was measured.

    ``folder``: on the local disk, outside of the checkpoints; the share is a file in it.

    Raises:
        NothingToAuditError, UsageError, StorageError: as :func:`audit`.
        WriteError: the share can't be written.
    """
    if not 1 <= number <= of:
        raise UsageError(f"there is no share {number} of {of}")
    target = FolderWriter(folder)
    target.refuse_sources([root.location for root in (store.roots if isinstance(store, UnionStore) else [store])])
    with _means(store, settings, None) as (readable, workers):
        share = Share(workers, number, of)
        job = _audit_of(readable, settings, workers, share, progress, time.time())
        sources = [job.chosen_steps(source) for source in discover(readable)]
        for steps in sources:
            levels = job.listing.levels(steps, settings.level)
            job = replace(job, num_bytes_ahead=job.listing.weights_ahead(steps, levels))
            for step, level in zip(steps, levels, strict=True):
                catalog = job.catalogs(step, level)[1]
                job.measure(catalog, job.asked(catalog, level), step.folder.path)
    if not any(sources):
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")
    target.make()
    target.write(share.name, share.content())
    return share


@contextmanager
def _means(store: Store, settings: Settings, executor: Executor | None) -> Iterator[tuple[Store, Executor]]:
    """The store as it may be read, and who does the work."""

    def careful(root: Store) -> Store:
        limit = settings.max_bytes_per_second
        return RetryingStore(ThrottledStore(root, limit) if limit else root)

    # Each root tries again by itself, so that a union stays one: its roots have a pointer each.
    readable = UnionStore([*map(careful, store.roots)]) if isinstance(store, UnionStore) else careful(store)
    if executor:
        yield readable, executor
        return
    threads = settings.threads or num_readers(readable) or min(8, os.cpu_count() or 1)
    with executor_of(threads, settings.scheduler) as workers:
        yield readable, workers


def _audit_of(
    store: Store, settings: Settings, executor: Executor, runner: Runner, progress: Progress, now: float
) -> _Audit:
    try:
        chosen = select(settings.select, settings.ignore)
    except LookupError as error:
        raise UsageError(str(error)) from error
    judged = tuple(item for item in invariants() if item in chosen or item.family in NEEDED)
    return _Audit(store, settings, chosen, judged, executor, runner, progress, now, Listing(store))


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
    runner: Runner
    progress: Progress
    now: float
    listing: Listing
    num_bytes_ahead: int = 0
    """About how much will be read of the run: what decides which kernels are worth their loading."""
    ledger: Ledger | None = None
    run_name: str = ""
    keeper: Keeper | None = None
    """What the ledger has of the run."""
    succession: Succession = field(default_factory=Succession)
    """Of the run under way."""

    def run(self, source: RunSource) -> RunReport:
        begun = time.monotonic()
        report = RunReport(source.path, unrecognised=source.unrecognised, chosen=self.chosen)
        sources = self.chosen_steps(source)
        pointers = tuple(PointerState(pointer.file, pointer.target) for pointer in source.pointers)
        newest = source.steps[-1]
        report.num_saved_before = source.steps.index(sources[0]) if sources else 0
        whole_run = len(sources) == len(source.steps)
        levels = self.listing.levels(sources, self.settings.level)
        ahead = self.listing.weights_ahead(sources, levels)
        job = replace(self, num_bytes_ahead=ahead, keeper=self.keeper_of(source), succession=Succession())

        def look(at: int) -> StepReport:
            return job.step(sources[at], levels[at], report, pointers, newest=sources[at] is newest)

        if self.settings.bisect:
            report.steps, report.bisected = few_steps(len(sources), look)
            whole_run = whole_run and len(report.steps) == len(sources)
        else:
            for at in range(len(sources)):
                with reading_ahead(self.store, self.coming(sources, levels, at + 1)):
                    report.steps.append(look(at))
        states = tuple(step.state for step in report.steps)
        complete = bool(sources) and sources[-1] is newest
        states = decide_commits(states, pointers, self.now, self.settings.settle_seconds, newest_included=complete)
        report.steps = [replace(step, state=state) for step, state in zip(report.steps, states, strict=True)]
        if job.keeper:
            self.remember(job.keeper, report, source)
        # Pointers may name steps that were not asked for: what they say of those is not judged then.
        states = tuple(step.state for step in report.steps)
        run = RunState(states, pointers if whole_run else (), whole_run, kept=job.keeper is not None)
        self.conclude(report, run)
        report.seconds = time.monotonic() - begun
        return report

    def coming(self, sources: Sequence[StepSource], levels: Sequence[Level], at: int) -> Sequence[Entry]:
        """The files of a step whose headers will be read next."""
        return self.listing.files(sources[at]) if at < len(sources) and levels[at] > Level.NAMES else ()

    def keeper_of(self, source: RunSource) -> Keeper | None:
        """What the ledger has of a run; None without one, or where some of the tensors alone are asked for."""
        if self.ledger is None or self.settings.tensors:
            return None
        alone = source.steps[0].folder.path == source.path
        given = f"{self.run_name}/{source.path}".rstrip("/") if self.run_name else ""
        name = given or run_name(self.store.location, source.path, alone=alone)
        return Keeper.of(self.ledger, name, (self.settings.strict_buffers, self.settings.options))

    def remember(self, keeper: Keeper, report: RunReport, source: RunSource) -> None:
        """Add the steps that the ledger alone knows."""
        gone = keeper.gone({step.match.step for step in source.steps}, source.path)
        wanted = self.settings.steps.choose(sorted({account.step for account in gone}))
        if "latest" in self.settings.steps.text:
            wanted = set()
        told = [account for account in gone if account.step in wanted]
        report.steps = sorted([*report.steps, *map(step_from_ledger, told)], key=lambda step: step.state.step)
        report.branches, report.ledger_notes, report.unwritten = keeper.branches(), keeper.notes, keeper.unwritten

    def chosen_steps(self, source: RunSource) -> list[StepSource]:
        chosen = self.settings.steps.choose(sorted({step.match.step for step in source.steps}))
        return [step for step in source.steps if step.match.step in chosen]

    def step(
        self, source: StepSource, level: Level, report: RunReport, pointers: Sequence[PointerState], *, newest: bool
    ) -> StepReport:
        folder = source.folder
        full, catalog = self.catalogs(source, level)
        modified = self.listing.modified(source)
        state = step_state(full, modified)
        if newest:
            before = [item.state for item in report.steps[-1:]]
            *_, state = decide_commits([*before, state], pointers, self.now, self.settings.settle_seconds)
            if state.commit is Commit.IN_PROGRESS:
                return StepReport(state, Level.NAMES, {}, {}, mesh=full.mesh)
        report.mesh = full.mesh
        asked = self.asked(catalog, level)
        known = self.keeper.recall(catalog, asked) if self.keeper else None
        observations = known.observations if known else self.observe(catalog, asked, folder.path)
        state = with_content(state, catalog, observations)
        where = folder_of(self.store.location, folder.path)
        if self.keeper and not observations.changed:
            state = self.keeper.place(catalog, observations, state, known, where)
        report.coverage.add(full, catalog, observations)
        named = source.match.named_step
        witness = witness_of(self.store, folder.path, full.step, modified) if level >= Level.REPLICAS else None
        evidence = StepEvidence(catalog, observations, unread(level), self.settings.strict_buffers, named, witness)
        judgements = self.judge(evidence, level, self.judged)
        judgements |= self.judge_motion(evidence, level, known)
        report.coverage.num_bytes_reread += self.succession.num_bytes
        # Whether a step is whole is asked of all its tensors, whatever was selected.
        whole = StepEvidence(full, observations if catalog is full else unobserved(full), named_step=named)
        wholeness = self.judge(whole, level, [item for item in self.judged if item.family in NEEDED])
        changed = tuple(
            sorted({*observations.changed, *(f.name for f in catalog.files if f.state is FileState.CHANGED)})
        )
        if not changed:
            self.succession.take(evidence, judgements, self.judged, recalled=bool(known))
        else:
            judgements = {key: item.doubted(changed) for key, item in judgements.items()}
            wholeness = {key: item.doubted(changed) for key, item in wholeness.items()}
        failures = _failures(catalog, {} if changed else observations.failures)
        if self.keeper and level > Level.NAMES and not failures and not changed:
            said = self.keeper.said(state, judgements, wholeness, level.name, full)
            self.keeper.keep(catalog, observations, asked, said, known, where)
        return StepReport(state, level, judgements, wholeness, changed, failures, full.opaque, full.mesh, bool(known))

    def catalogs(self, source: StepSource, level: Level) -> tuple[Catalog, Catalog]:
        """All that a step stores, and of it the tensors that were chosen."""
        options = replace(self.settings.options, names_only=level is Level.NAMES)
        if level > Level.NAMES:
            read_ahead(self.store, self.listing.files(source))
        full = source.adapter.read(self.store, source.folder, source.match, options)
        return full, full.only(self.settings.wants_tensor) if self.settings.tensors else full

    def judge(self, evidence: StepEvidence, level: Level, items: Sequence[Invariant]) -> dict[str, Judgement]:
        return {item.id: item.judge_step(evidence) for item in self.reached(level, items) if item.judge_step}

    @staticmethod
    def reached(level: Level, items: Sequence[Invariant]) -> list[Invariant]:
        """Those that can speak at a level."""
        return [item for item in items if level >= REACHED[item.needs]]

    def observe(self, catalog: Catalog, asked: Asked, path: str) -> Observations:
        seen = self.measure(catalog, asked, path)
        if asked.differences and not seen.changed:
            seen = measure_differences(self.store, catalog, seen)
        if asked.checksums:
            progress = partial(self.progress, path)
            seen = verify_checksums(self.store, catalog, seen, self.executor, progress, digests=asked.digests)
        return seen

    def judge_motion(self, evidence: StepEvidence, level: Level, known: Recalled | None) -> dict[str, Judgement]:
        """What is said of a step by the save before it."""
        whole = isinstance(self.runner, Everything)
        why_not = "" if whole else "saves are not compared element by element where the work is shared out"
        reader = Reader(self.store, self.executor, math.inf if level >= Level.FULL else MOST_BYTES, why_not)
        levels = {one.name for one in Level if one == level or one >= level >= Level.VALUES}
        said = self.keeper.repeated(known, levels) if self.keeper and known else {}
        return self.succession.judge(evidence, self.reached(level, self.judged), reader, said)

    def asked(self, catalog: Catalog, level: Level) -> Asked:
        """What the chosen invariants need to have measured."""
        asking = [item for item in self.chosen if item.needs is Needs.WEIGHTS and level >= Level.REPLICAS]
        pairings = [p for item in asking if item.pairings and level >= Level.VALUES for p in item.pairings(catalog)]
        tensors = {number for item in asking if item.reads for number in item.reads(catalog)}
        tensors.update(number for pairing in pairings for number in (pairing.left, pairing.right))
        everything = level >= Level.VALUES and any(not item.reads and not item.pairings for item in asking)
        checksums = level >= Level.FULL and any(item.needs is Needs.CHECKSUMS for item in self.chosen)
        rows = wanted_rows(catalog, None if everything else tensors)
        return Asked(
            rows,
            tuple(dict.fromkeys(pairings)),
            level >= Level.REPLICAS,
            checksums,
            checksums and self.keeper is not None,
        )

    def measure(self, catalog: Catalog, asked: Asked, path: str) -> Observations:
        """One pass over what was asked for."""
        if not len(asked.rows) and not asked.pairings:
            return unobserved(catalog)
        progress = partial(self.progress, path)
        kernels = choose(self.num_bytes_ahead, self.settings.kernels).name
        # A share is measured for an audit that has the ledger.
        sketched = bool(self.ledger or self.settings.ledger) and not self.settings.tensors
        return observe(
            self.store, catalog, asked.rows, self.runner, progress, asked.pairings, kernels, sketched=sketched
        )

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
        report.findings = self.accept(findings(judged, self.chosen) + self.beside(report))
        accepted = {item.id for item in report.findings if item.accepted}
        open_ids = {item.id for item in report.findings if not item.accepted}
        serious = {item.id for item in self.judged if item.severity >= self.settings.fail_on} - (accepted - open_ids)
        good = {number: dict(found) for number, found in judged.items()}
        for step in report.steps:
            good.setdefault(step.state.step, {}).update(step.wholeness)
        report.last_good, report.rejected = last_good(
            run.steps, good, report.findings, self.settings.fail_on, serious=serious, strict=self.settings.strict
        )

    def today(self) -> date:
        return datetime.fromtimestamp(self.now, UTC).date()

    def beside(self, report: RunReport) -> list[Finding]:
        """What is wrong with the configuration: one finding for every waiver that ran out."""
        found = []
        for item in self.chosen:
            if item.judge_waivers:
                judged = report.beside[item.id] = item.judge_waivers(self.settings.waivers, self.today())
                found += findings_of_no_step(item, judged)
        return found

    def accept(self, found: list[Finding]) -> list[Finding]:
        """The findings, marked where the user knows them."""
        if self.settings.baseline:
            found = apply_baseline(found, self.settings.baseline)
        return apply_waivers(found, self.settings.waivers, self.today())


def _failures(catalog: Catalog, failures: Mapping[int, str]) -> tuple[str, ...]:
    """What storage refused: while the step was listed, and while its weights were read."""
    listed = [f"{file.name}: {file.detail}" for file in catalog.files if file.state is FileState.UNREADABLE]
    files = catalog.files
    read = [f"{files[at].name}: {text}" for at, text in failures.items() if files[at].state is FileState.PRESENT]
    return (*listed, *read)
