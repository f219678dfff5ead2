"""The audit of one saved step: read its Catalog, observe, judge it by itself and by the save before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from auditor.containers.ahead import read_ahead
from auditor.invariants.invariant import Invariant, Needs
from auditor.ledger.keeper import Keeper, Recalled, folder_of
from auditor.ledger.part import among, of_chosen
from auditor.ledger.record import Asked, recalled, save_identity
from auditor.listing import Listing
from auditor.model.catalog import Catalog, FileState
from auditor.model.finding import Judgement
from auditor.model.joint import Beside
from auditor.model.mesh import NO_MESH
from auditor.model.observation import Observations, unobserved
from auditor.model.run import Commit, PointerState, StepEvidence, StepState, decide_commits, step_state, with_content
from auditor.observe.checksums import verify_checksums
from auditor.observe.difference import measure_differences
from auditor.observe.kernel_choice import choose
from auditor.observe.one_pass import Pass, begin, wanted_rows
from auditor.observe.shares import Everything, Runner
from auditor.reports import REACHED, RunReport, StepReport, unread
from auditor.settings import Level, Settings
from auditor.sources import StepSource
from auditor.stated_optimizer import with_stated
from auditor.storage.store import ObjectMissingError, Store, num_readers
from auditor.storage.watched import WatchedStore
from auditor.succession import NOTHING_ASKED, Asking, Succession, as_listed, with_joints
from auditor.timeline.last_good import NEEDED
from auditor.unchanged import Known as KnownStep
from auditor.unchanged import Listed, history_of, kept_history
from auditor.vanishing import taken_away, withheld
from auditor.witnesses import witness_of

Progress = Callable[[str, int], None]
"""Told the step's path and the bytes just read."""
NEAR_BYTES, FAR_BYTES = 2 << 30, 128 << 20
"""Of two saves together that are read beside each other below level full, from local disks and where storage is far
away: seconds. It takes longer than all else at that level, of which every byte is read once."""
NO_WEIGHTS = Asked(np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose headers were read and whose weights are being measured."""

    source: StepSource
    level: Level
    full: Catalog
    catalog: Catalog
    """Of the tensors that were chosen."""
    state: StepState
    asked: Asked | None = None
    """None where the step is still being saved: nothing is asked of it."""
    known: Recalled | None = None
    """What the ledger has of it."""
    asking: Asking = NOTHING_ASKED
    """What is to be measured over it and the save before."""
    repeated: Mapping[str, Judgement] = field(default_factory=dict)
    """What was said of the two before and holds still."""
    measuring: Pass | None = None
    listing: str = ""
    """Digest of its files, for a ledger; empty where something was read that is not listed."""
    absent: tuple[str, ...] = ()
    """What was looked for beside it and isn't there."""

    @property
    def judged_by(self) -> str:
        """The save by which its motion is judged, as a ledger names it."""
        if self.known and self.repeated:
            return self.known.record.account.said.before
        return save_identity(self.asking.before.catalog) if self.asking.before else ""


@dataclass(frozen=True, slots=True)
class StepAudit:
    """By what, and for what, the steps of a run are audited."""

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
    sketched: bool = False
    """Whether sketches are made, for a ledger."""
    num_bytes_ahead: int = 0
    """About how much will be read of the run: what decides which kernels are worth their loading."""
    keeper: Keeper | None = None
    """What the ledger has of the run, to which this audit adds."""
    memory: Keeper | None = None
    """The same, where only what was measured is taken from it."""
    succession: Succession = field(default_factory=Succession)
    """Of the run under way."""

    def begin(
        self, source: StepSource, level: Level, pointers: Sequence[PointerState], before: StepState | None, *,
        newest: bool,
    ) -> Begun:  # fmt: skip
        """Read a step's headers and have its weights measured. ``before``: the step before it, where one is known."""
        watched = WatchedStore(self.store)
        full, catalog = self.catalogs(source, level, watched)
        state = step_state(full, self.listing.modified(source), listed=level > Level.NAMES)
        if newest:
            others = [before] if before else []
            *_, state = decide_commits([*others, state], pointers, self.now, self.settings.settle_seconds)
        in_progress = state.commit is Commit.IN_PROGRESS
        still = withheld(full, self.listing, source, in_progress=in_progress)
        if still is not full:
            # Of what is not the step any more nothing is asked, and nothing said to the steps beside it.
            state = replace(step_state(still, self.listing.modified(source)), cut_short=())
            catalog = still if catalog is full else replace(catalog, files=still.files, scalars=(), problems=())
            return Begun(source, level, still, catalog, state, NO_WEIGHTS)
        if in_progress:
            return Begun(source, level, full, catalog, state)
        asked = self.asked(catalog, level)
        known = self.recall(full, catalog, asked)
        repeated = self.repeated(catalog, level, known)
        asking = self.beside(catalog, level, known, repeated)
        wanted = NO_WEIGHTS if known else asked
        measuring = self.begin_pass(catalog, wanted, source.folder.path, asking.beside)
        listed = Listed(self.listing, pointers)
        of_files = listed.digest_of_all(source, full, watched.seen) if self.keeper else ()
        return Begun(source, level, full, catalog, state, asked, known, asking, repeated, measuring, *of_files)

    def finish(self, begun: Begun, report: RunReport) -> StepReport:
        """Wait for a step's measures and judge it; steps are finished in order, or at least by rising number."""
        source, level, full, catalog, known = begun.source, begun.level, begun.full, begun.catalog, begun.known
        if begun.asked is None:
            return StepReport(begun.state, Level.NAMES, {}, {}, mesh=full.mesh)
        if full.mesh is not NO_MESH:
            report.mesh = full.mesh
        observations = self.observations(begun, begun.asked)
        state = with_content(begun.state, catalog, observations)
        where = folder_of(self.store.location, source.folder.path)
        changed = tuple(
            sorted({*observations.changed, *(f.name for f in catalog.files if f.state is FileState.CHANGED)})
        )
        if self.keeper and not changed:
            state = self.keeper.place(catalog, observations, state, known, where)
        report.coverage.add(full, catalog, observations)
        named = source.match.named_step
        witness = (
            witness_of(self.store, source.folder.path, full.step, self.listing.modified(source))
            if level >= Level.REPLICAS
            else None
        )
        rates = self.succession.rates.get(catalog.format, frozenset())
        evidence = StepEvidence(
            catalog, observations, unread(level), self.settings.strict_buffers, named, witness, rates
        )
        judgements = self.judge(evidence, level, self.judged)
        items = self.reached(level, self.judged)
        for key, judged in self.succession.judge(evidence, items, begun.repeated, begun.asking).items():
            judgements[key] = judgements[key].joined(judged) if key in judgements else judged
        # Whether a step is whole is asked of all its tensors, whatever was selected.
        whole = StepEvidence(full, observations if catalog is full else unobserved(full), named_step=named)
        wholeness = self.wholeness(whole, level, every_weight=level >= Level.VALUES and catalog is full)
        if not changed:
            self.succession.take(evidence, judgements, self.judged)
        else:
            judgements = {key: item.doubted(changed) for key, item in judgements.items()}
            wholeness = {key: item.doubted(changed) for key, item in wholeness.items()}
        failures = _failures(catalog, {} if changed else observations.failures)
        if self.keeper and level > Level.NAMES and not failures and not changed:
            self.keep(begun, observations, judgements, wholeness, state)
        return StepReport(state, level, judgements, wholeness, changed, failures, full.opaque, full.mesh, bool(known))

    def keep(
        self, begun: Begun, observations: Observations, judgements: Mapping[str, Judgement],
        wholeness: Mapping[str, Judgement], state: StepState,
    ) -> None:  # fmt: skip
        """Have the ledger keep what was measured and said of a step."""
        assert self.keeper
        assert begun.asked
        catalog, run = begun.catalog, self.succession
        said = self.keeper.said(
            state, judgements, wholeness, begun.level.name, catalog, begun.judged_by, begun.listing, begun.absent,
            run.rates[catalog.format],
        )  # fmt: skip
        history = kept_history(catalog, run.history[catalog.format])
        where = folder_of(self.store.location, begun.source.folder.path)
        self.keeper.keep(catalog, observations, begun.asked, said, begun.known, where, history)

    def resume(self, known: KnownStep) -> bool:
        """Go on after a step that is unchanged, of which headers alone are read; False where that can't be."""
        assert self.keeper
        _, catalog = self.catalogs(known.source, known.level)
        with self.keeper.noting():
            record = self.keeper.ledger.record(known.name)
            seen = recalled(record, catalog, self.asked(catalog, known.level))
            if seen is not None:
                evidence = StepEvidence(catalog, seen, unread(known.level), self.settings.strict_buffers)
                said, history = known.account.said, history_of(record.account, record.history)
                self.succession.resume(evidence, said.judgements, self.judged, history, frozenset(said.rates))
                return True
        return False

    def wanted(self) -> Mapping[Level, frozenset[str]]:
        """Level to the ids of what speaks of a step at it."""
        return {
            level: frozenset(i.id for i in self.reached(level, self.judged) if i.judge_step or i.judge_motion)
            for level in Level
        }

    def catalogs(
        self, source: StepSource, level: Level, watched: WatchedStore | None = None
    ) -> tuple[Catalog, Catalog]:  # fmt: skip
        """All that a step stores, and of it the tensors that were chosen."""
        options = replace(self.settings.options, names_only=level is Level.NAMES)
        if level > Level.NAMES:
            read_ahead(self.store, self.listing.files(source))
        try:
            full = source.adapter.read(watched or self.store, source.folder, source.match, options)
        except ObjectMissingError:
            if not self.listing.changed(source):
                raise
            full = taken_away(source, self.listing)
        full = with_stated(full, options.optimizer)
        return full, full.only(self.settings.wants_tensor) if self.settings.tensors else full

    def judge(self, evidence: StepEvidence, level: Level, items: Sequence[Invariant]) -> dict[str, Judgement]:
        """What is said of a step by itself."""
        return {item.id: item.judge_step(evidence) for item in self.reached(level, items) if item.judge_step}

    def wholeness(self, evidence: StepEvidence, level: Level, *, every_weight: bool) -> dict[str, Judgement]:
        """What must be known of a step to call it good. ``every_weight``: whether all of them were to be read.

        Where they weren't, it was not asked whether every chunk decodes, and nothing else of weights is known either.
        """
        needed = [item for item in self.judged if item.family in NEEDED]
        judged = self.judge(evidence, level, needed)
        if every_weight:
            return judged
        of_weights = {item.id for item in needed if item.needs is Needs.WEIGHTS}
        return {key: replace(one, undetermined={}) if key in of_weights else one for key, one in judged.items()}

    @staticmethod
    def reached(level: Level, items: Sequence[Invariant]) -> list[Invariant]:
        """Those that can speak at a level."""
        return [item for item in items if level >= REACHED[item.needs]]

    def observations(self, begun: Begun, asked: Asked) -> Observations:
        """What the pass over the weights measured, and the targeted ones after it."""
        catalog = begun.catalog
        seen = begun.measuring.finish() if begun.measuring else None
        if begun.known:
            known = begun.known.observations
            seen = known if seen is None else with_joints(known, seen)
            if catalog is begun.full:
                return seen
            # Of all tensors, not every difference is measured.
            asked = replace(asked, checksums=False)
        seen = seen or unobserved(catalog)
        if asked.differences and not seen.changed:
            seen = measure_differences(self.store, catalog, seen)
        if asked.checksums:
            progress = partial(self.progress, begun.source.folder.path)
            seen = verify_checksums(self.store, catalog, seen, self.executor, progress, digests=asked.digests)
        return seen

    def recall(self, full: Catalog, catalog: Catalog, asked: Asked) -> Recalled | None:
        """What a ledger knows of what is asked."""
        if self.memory is None or catalog is full:
            return self.memory.recall(catalog, asked) if self.memory else None
        chosen = full.chosen(self.settings.wants_tensor)
        found = self.memory.recall(full, among(full, chosen, asked))
        return replace(found, observations=of_chosen(full, chosen, found.observations)) if found else None

    def repeated(self, catalog: Catalog, level: Level, known: Recalled | None) -> Mapping[str, Judgement]:
        """What was said before of the same step by the same save before it, at such a level."""
        levels = {one.name for one in Level if one == level or one >= level >= Level.VALUES}
        # What was said by the save before does not hold any more where that was written anew.
        before = self.succession.listed.get(catalog.format)
        if not (self.keeper and known and before and self.succession.recalled[catalog.format]):
            return {}
        return self.keeper.repeated(known, levels, save_identity(before.catalog))

    def beside(
        self, catalog: Catalog, level: Level, known: Recalled | None = None,
        repeated: Mapping[str, Judgement] | None = None,
    ) -> Asking:  # fmt: skip
        """What is to be read of a step and the save before it in lock-step."""
        most = math.inf if level >= Level.FULL else NEAR_BYTES if num_readers(self.store) <= 1 else FAR_BYTES
        # What a ledger knows is in no share.
        most = 0 if known and not isinstance(self.runner, Everything) else most
        items = self.reached(level, self.judged)
        return self.succession.beside(
            as_listed(catalog, unread(level)), items, repeated or {}, most, recalled=bool(known)
        )

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

    def begin_pass(self, catalog: Catalog, asked: Asked, path: str, beside: Beside | None) -> Pass | None:
        """The pass over what was asked for, and over the save before; None where that is nothing."""
        if not len(asked.rows) and not asked.pairings and not beside:
            return None
        progress = partial(self.progress, path)
        kernels = choose(self.num_bytes_ahead, self.settings.kernels).name
        return begin(
            self.store, catalog, asked.rows, self.runner, progress, asked.pairings, kernels,
            sketched=self.sketched and len(asked.rows) > 0, beside=beside,
        )  # fmt: skip


def _failures(catalog: Catalog, failures: Mapping[int, str]) -> tuple[str, ...]:
    """What storage refused: while the step was listed, and while its weights were read."""
    listed = [f"{file.name}: {file.detail}" for file in catalog.files if file.state is FileState.UNREADABLE]
    files = catalog.files
    read = [f"{files[at].name}: {text}" for at, text in failures.items() if files[at].state is FileState.PRESENT]
    return (*listed, *read)
