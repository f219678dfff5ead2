"""One side of a comparison: a run, one step of it, or a ledger; step by step what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial

from auditor.comparison.holding import Holding, Source, failures_of
from auditor.containers.damage import DamagedError
from auditor.discovery import one_run
from auditor.errors import NothingToAuditError, UsageError
from auditor.ledger.contents import contents_of
from auditor.ledger.folder import open_ledger
from auditor.ledger.tree import Ledger, RecordName
from auditor.means import means
from auditor.model.catalog import Catalog, FileState, Tensor
from auditor.model.dtype import DTYPES
from auditor.observe.kernel_choice import choose
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.settings import Settings
from auditor.sources import StepSource
from auditor.stated_optimizer import with_stated
from auditor.storage.roots import open_store
from auditor.storage.store import ObjectMissingError, StorageError, Store

Progress = Callable[[str, int], None]
"""Told the step's path and the bytes just read."""
Seeing = Callable[[Catalog], Catalog]
"""How a Catalog is seen: under which names, in which form."""
_PLAIN = "zarr.json"


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared, by step. Of no step is anything read before it is asked for."""

    location: str
    steps: Mapping[int, Callable[[Seeing, bool], Holding]]
    """Step to what reads it: told how its Catalog is seen, and whether sketches are wanted."""
    is_ledger: bool = False
    unrecognised: Mapping[str, str] = field(default_factory=dict)
    catalogs: Mapping[int, Callable[[], Catalog]] = field(default_factory=dict)
    """Step to its Catalog, read from names and headers alone; empty for a ledger."""
    store: Store | None = None
    """Where the files of the Catalogs lie."""


def open_side(path: str, settings: Settings, stack: ExitStack, progress: Progress) -> Side:
    """The side that a path names: a checkpoint, a run, or a ledger (``LEDGER#RUN`` where it has several runs).

    Raises:
        NothingToAuditError: there is nothing of the kind.
        UsageError: several runs are there, or a ledger that is none.
        StorageError: the root can't be read.
    """
    found = _ledger_at(path)
    if found is not None:
        return _ledger_side(*found)
    entered: AbstractContextManager[tuple[Store, Executor]] = means(open_store([path]), settings, None)
    store, executor = stack.enter_context(entered)
    run = one_run(store)
    by_step: dict[int, StepSource] = {}
    # Of files that record one step, one whose name counts it comes before `last.ckpt` and the like, its copies.
    for source in sorted(run.steps, key=lambda source: source.match.numbered is None):
        by_step.setdefault(source.match.step, source)
    twice = {
        source.folder.path: f"it records step {step}, as {by_step[step].folder.path} does: name it by itself"
        for source in run.steps
        if source is not by_step[step := source.match.step] and source.match.numbered is not None
    }
    readers = {step: partial(_read, store, executor, settings, progress, source) for step, source in by_step.items()}
    catalogs = {step: partial(_catalog, store, settings, source) for step, source in by_step.items()}
    return Side(store.location, readers, unrecognised={**run.unrecognised, **twice}, catalogs=catalogs, store=store)


def _catalog(store: Store, settings: Settings, source: StepSource) -> Catalog:
    read = source.adapter.read(store, source.folder, source.match, settings.options)
    return with_stated(read, settings.options.optimizer)


def _read(
    store: Store, executor: Executor, settings: Settings, progress: Progress, source: StepSource,
    seeing: Seeing, sketched: bool,
) -> Holding:  # fmt: skip
    catalog = seeing(_catalog(store, settings, source))
    rows = wanted_rows(catalog)
    num_bytes = int(catalog.num_bytes()[rows].sum()) if len(rows) else 0
    kernels = choose(num_bytes, settings.kernels).name
    told = partial(progress, source.folder.path)
    seen = observe(store, catalog, rows, Everything(executor), told, (), kernels, sketched=sketched)
    changed = {*seen.changed, *(file.name for file in catalog.files if file.state is FileState.CHANGED)}
    return Holding(
        catalog.step, source.folder.path, catalog.format, catalog.tensors, contents_of(catalog, seen), catalog.mesh,
        catalog.groups, catalog.scalars, catalog.ties, Source(store, catalog), failures_of(catalog, seen),
        tuple(sorted(changed)), seen.num_bytes_read,
    )  # fmt: skip


def _ledger_at(path: str) -> tuple[Ledger, str] | None:
    """The ledger at a path and the run that is meant, where it is a ledger."""
    for root, run in dict.fromkeys([(path, ""), (path.rpartition("#")[0], path.rpartition("#")[2])]):
        if not root:
            continue
        ledger = open_ledger(root)
        try:
            with ledger.store.open(_PLAIN):
                pass
        except (ObjectMissingError, StorageError):
            continue
        try:
            if ledger.exists():
                return ledger, run
        except UsageError:
            continue
    return None


def _ledger_side(ledger: Ledger, run: str) -> Side:
    runs = ledger.runs()
    if not run and len(runs) != 1:
        if not runs:
            raise NothingToAuditError(f"{ledger.location}: the ledger has no run")
        raise UsageError(f"{ledger.location} keeps {len(runs)} runs; name one: LEDGER#{runs[0]}; {', '.join(runs)}")
    name = run or runs[0]
    if name not in runs:
        raise UsageError(f"{ledger.location} keeps no run {name}; there are {', '.join(runs)}")
    newest: dict[int, tuple[int, int]] = {}
    try:
        names = ledger.names(name)
        ranks = [ledger.account(one).sequence for one in names]
    except DamagedError as error:
        raise StorageError(str(error)) from error
    for at, (one, rank) in enumerate(zip(names, ranks, strict=True)):
        if one.step not in newest or rank >= newest[one.step][0]:
            newest[one.step] = rank, at
    readers = {step: partial(_recall, ledger, names[at]) for step, (_, at) in newest.items()}
    return Side(f"{ledger.location}#{name}", readers, is_ledger=True)


def _recall(ledger: Ledger, name: RecordName, seeing: Seeing, sketched: bool) -> Holding:
    try:
        record = ledger.record(name)
    except DamagedError as error:
        raise StorageError(str(error)) from error
    account = record.account
    tensors = tuple(
        Tensor(kept.name, kept.role, DTYPES[kept.dtype], kept.shape, kept.order) for kept in account.tensors
    )
    return Holding(
        account.step, account.folder, account.format, tensors, record.contents, account.said.mesh,
        scalars=account.scalars,
    )  # fmt: skip
