"""What a person or a job calls: audit everything below a path, or measure one share of it."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace

from auditor.discovery import discover
from auditor.errors import NothingToAuditError, UsageError
from auditor.invariants.registry import invariants, select
from auditor.ledger.tree import Ledger
from auditor.listing import Listing
from auditor.means import means
from auditor.observe.shares import Everything, Joined, Runner, Share
from auditor.reports import Report, RunReport
from auditor.run_audit import RunAudit
from auditor.settings import DEFAULTS, Settings
from auditor.step_audit import Progress, StepAudit
from auditor.storage.store import Store
from auditor.storage.union import UnionStore
from auditor.storage.writer import FolderWriter
from auditor.succession import Succession
from auditor.timeline.last_good import NEEDED


def audit(
    store: Store, settings: Settings = DEFAULTS, *, executor: Executor | None = None,
    progress: Progress = lambda path, num_bytes: None, now: float | None = None, shares: Store | None = None,
    ledger: Ledger | None = None, run: str = "", nested: bool = True,
) -> Report:  # fmt: skip
    """Audit everything below the store's root.

    ``executor``: where units of work run; a thread pool of ``settings.threads`` by default. ``now``: the time against
    which ``settle`` is held, seconds since the epoch. ``shares``: a folder to which :func:`audit_share` was written in
    several processes; what they measured is not read again. ``ledger``: where what was measured and said is kept; of
    steps that it knows and that did not change no weights are read. ``run``: what the run is called in the ledger; its
    folder's name by default. ``nested``: whether runs in the folder of another run are audited as well.

    Raises:
        NothingToAuditError: there is no checkpoint, or no step that was asked for.
        UsageError: settings that name unknown invariants or steps; a ledger that is none.
        StorageError: the root can't be listed.
        LockedError: another audit writes into the ledger.
        WriteError: the ledger does not take what is written.
    """
    begun = time.time() if now is None else now
    with means(store, settings, executor) as (readable, workers):
        runner = Joined.of(shares) if shares else Everything(workers)
        of_step = _step_audit(readable, settings, workers, runner, progress, begun, sketched=ledger is not None)
        job = RunAudit(of_step, ledger, run)
        with ledger.writer.locked() if ledger and ledger.writer else nullcontext():
            runs = _runs(job, readable, nested)
    runs = [run for run in runs if run.steps or run.unrecognised]
    if not any(run.steps for run in runs):
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")
    if settings.tensors and not any(run.coverage.num_tensors for run in runs):
        raise NothingToAuditError(f"{store.location}: no tensor matches --tensors {settings.tensors}")
    return Report(store.location, runs, settings)


def _runs(job: RunAudit, store: Store, nested: bool) -> list[RunReport]:
    """All runs below the root; where there is none, the one that lay there, by the ledger."""
    try:
        sources = discover(store, nested=nested)
    except NothingToAuditError:
        deleted = job.deleted()
        if deleted is None:
            raise
        return [deleted]
    return [job.run(source) for source in sources]


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
    with means(store, settings, None) as (readable, workers):
        share = Share(workers, number, of)
        # A share is measured for an audit that has the ledger.
        job = _step_audit(readable, settings, workers, share, progress, time.time(), sketched=bool(settings.ledger))
        sources = [RunAudit(job).chosen_steps(source) for source in discover(readable)]
        for steps in sources:
            levels = job.listing.levels(steps, settings.level)
            ahead = job.listing.weights_ahead(steps, levels)
            job = replace(job, num_bytes_ahead=ahead, succession=Succession())
            for step, level in zip(steps, levels, strict=True):
                catalog = job.catalogs(step, level)[1]
                asking = job.beside(catalog, level)
                if begun := job.begin_pass(catalog, job.asked(catalog, level), step.folder.path, asking.beside):
                    begun.finish()
    if not any(sources):
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")
    target.make()
    target.write(share.name, share.content())
    return share


def _step_audit(
    store: Store, settings: Settings, executor: Executor, runner: Runner, progress: Progress, now: float, *,
    sketched: bool,
) -> StepAudit:  # fmt: skip
    try:
        chosen = select(settings.select, settings.ignore)
    except LookupError as error:
        raise UsageError(str(error)) from error
    judged = tuple(item for item in invariants() if item in chosen or item.family in NEEDED)
    sketched = sketched and not settings.tensors
    return StepAudit(
        store, settings, chosen, judged, executor, runner, progress, now, Listing(store), sketched=sketched
    )
