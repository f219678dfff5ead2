"""The audit of one run: its steps one after the other, then what they say together.

While a step's weights are measured, the next one's headers are read. Of a step that is done only judgements stay, so
memory does not grow with the number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime

from auditor.bisecting import few_steps
from auditor.containers.ahead import reading_ahead
from auditor.ledger.keeper import Keeper, root_digest, run_name
from auditor.ledger.tree import Ledger
from auditor.model.finding import Finding, Judgement
from auditor.model.run import Commit, PointerState, RunState, decide_commits
from auditor.model.waiver import apply_baseline, apply_waivers
from auditor.reports import RunReport, StepReport, step_from_ledger
from auditor.settings import Level, Settings
from auditor.sources import RunSource, StepSource
from auditor.step_audit import Begun, StepAudit
from auditor.storage.store import Entry
from auditor.succession import Succession
from auditor.timeline.findings import findings, findings_of_no_step
from auditor.timeline.last_good import last_good
from auditor.unchanged import Known, Listed, known_steps


@dataclass(frozen=True, slots=True)
class RunAudit:
    """How every run below a path is audited."""

    of_step: StepAudit
    ledger: Ledger | None = None
    run_name: str = ""

    @property
    def settings(self) -> Settings:
        """All choices."""
        return self.of_step.settings

    def run(self, source: RunSource) -> RunReport:
        """Audit one run."""
        begun = time.monotonic()
        report = RunReport(
            source.path,
            unrecognised=source.unrecognised,
            vanished=source.vanished,
            chosen=self.of_step.chosen,
            nested=source.beside,
            order=source.order,
        )
        sources = self.chosen_steps(source)
        pointers = tuple(PointerState(pointer.file, pointer.target) for pointer in source.pointers)
        newest = source.steps[-1]
        report.num_saved_before = source.steps.index(sources[0]) if sources else 0
        whole_run = len(sources) == len(source.steps)
        levels = self.of_step.listing.levels(sources, self.settings.level)
        weights = self.of_step.listing.weights_ahead(sources, levels)
        kept = self.keeper_of(source)
        # Of some of the tensors nothing is kept: others would be missing from the record.
        keeper = None if self.settings.tensors else kept
        job = replace(
            self.of_step, num_bytes_ahead=weights, keeper=keeper, memory=kept, succession=Succession()
        )  # fmt: skip
        steps = list(zip(sources, levels, strict=True))
        report.steps = self.audited(job, steps, pointers, source, report)
        whole_run = whole_run and len(report.steps) == len(sources)
        states = tuple(step.state for step in report.steps)
        complete = bool(sources) and sources[-1] is newest
        states = decide_commits(
            states, pointers, self.of_step.now, self.settings.settle_seconds, newest_included=complete
        )
        report.steps = [replace(step, state=state) for step, state in zip(report.steps, states, strict=True)]
        if job.keeper:
            self.remember(job.keeper, report, source)
        # Pointers may name steps that were not asked for: what they say of those is not judged then.
        states = tuple(step.state for step in report.steps)
        run = RunState(states, pointers if whole_run else (), whole_run, kept=job.keeper is not None)
        self.conclude(report, run)
        report.seconds = time.monotonic() - begun
        return report

    def audited(
        self, job: StepAudit, steps: Sequence[tuple[StepSource, Level]], pointers: Sequence[PointerState],
        source: RunSource, report: RunReport,
    ) -> list[StepReport]:  # fmt: skip
        """What is said of every step, each by itself and by the save before it."""
        job, known = self.unchanged(job, steps, pointers, source)
        for step in known:
            report.coverage.add_known(step.account)
            report.mesh = step.account.said.mesh

        def begin(at: int, before: Begun | None = None) -> Begun:
            state = before.state if before else known[-1].account.said.state if known else None
            return job.begin(*steps[at], pointers, state, newest=steps[at][0] is source.steps[-1])

        if self.settings.bisect:
            found, report.bisected = few_steps(len(steps), lambda at: job.finish(begin(at), report))
            return found
        ahead = lambda at: reading_ahead(job.store, self.coming(steps, at))  # noqa: E731
        rest = range(len(known), len(steps))
        others = _overlapping(rest, ahead, begin, lambda begun: job.finish(begun, report))
        return [*(step.report() for step in known), *others]

    def unchanged(
        self, job: StepAudit, steps: Sequence[tuple[StepSource, Level]], pointers: Sequence[PointerState],
        source: RunSource,
    ) -> tuple[StepAudit, list[Known]]:  # fmt: skip
        """The first steps, as far as a ledger knows them as they are, and the audit that goes on after them."""
        if job.keeper is None or self.settings.bisect:
            return job, []
        listed = Listed(job.listing, pointers)
        found = known_steps(job.keeper, listed, steps, job.wanted(), higher=self.settings.level is None)
        if found and found[-1].source is source.steps[-1]:
            states = [step.account.said.state for step in found[-2:]]
            *_, newest = decide_commits(states, pointers, job.now, self.settings.settle_seconds)
            if newest.commit is Commit.IN_PROGRESS:
                found.pop()
        # What follows is judged by the newest of its format.
        last = {step.account.format: step for step in found} if len(found) < len(steps) else {}
        if all(job.resume(step) for step in last.values()):
            return job, found
        return replace(job, succession=Succession()), []

    def coming(self, steps: Sequence[tuple[StepSource, Level]], at: int) -> Sequence[Entry]:
        """The files of a step whose headers will be read next."""
        return self.of_step.listing.files(steps[at][0]) if at < len(steps) and steps[at][1] > Level.NAMES else ()

    def keeper_of(self, source: RunSource) -> Keeper | None:
        """What the ledger has of a run; None without one."""
        if self.ledger is None:
            return None
        # A file beside the steps of a run (last.ckpt) is a run by itself, not that one.
        alone = not source.beside and bool(source.steps) and source.steps[0].folder.path == source.path
        choices = self.settings.strict_buffers, self.settings.options
        present = frozenset(step.match.step for step in source.steps)
        where = self.of_step.store.location, source.path
        if self.run_name:
            keeper = self.kept(f"{self.run_name}/{source.path}".rstrip("/"), choices)
            return replace(keeper, present=present, location=where[0])
        name, root = run_name(*where, alone=alone), root_digest(*where, alone=alone)
        keeper = replace(self.kept(name, choices), root=root)
        if not keeper.is_of(entry for step in source.steps for entry in self.of_step.listing.files(step)):
            # Another run of this name.
            keeper = replace(self.kept(f"{name}@{root}", choices), root=root)
        return replace(keeper, present=present, location=where[0])

    def deleted(self) -> RunReport | None:
        """What the ledger says of a run of which no step is there any more; None where it knows none."""
        source = RunSource("", [])
        keeper = self.keeper_of(source)
        if keeper is None or not keeper.accounts or self.settings.tensors:
            return None
        report = RunReport("", chosen=self.of_step.chosen)
        self.remember(keeper, report, source)
        self.conclude(report, RunState(tuple(step.state for step in report.steps), kept=True))
        return report

    def kept(self, name: str, choices: Sequence[object]) -> Keeper:
        """What the ledger has under a name."""
        assert self.ledger is not None
        return Keeper.of(self.ledger, name, choices)

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
        """Those of its steps that were asked for."""
        chosen = self.settings.steps.choose(sorted({step.match.step for step in source.steps}))
        return [step for step in source.steps if step.match.step in chosen]

    def conclude(self, report: RunReport, run: RunState) -> None:
        """What all steps say together: findings, and the last good step."""
        judged: dict[int, dict[str, Judgement]] = {}
        for step in report.steps:
            if step.state.commit is not Commit.IN_PROGRESS:
                known = judged.setdefault(step.state.step, {})
                for identifier, judgement in step.judgements.items():
                    known[identifier] = known[identifier].merged(judgement) if identifier in known else judgement
        for item in self.of_step.judged:
            if item.judge_run:
                for number, judgement in item.judge_run(run).items():
                    judged.setdefault(number, {})[item.id] = judgement
        ids = {item.id for item in self.of_step.chosen}
        report.steps = [
            replace(step, judgements={k: j for k, j in judged.get(step.state.step, {}).items() if k in ids})
            for step in report.steps
        ]
        report.findings = self.accept(findings(judged, self.of_step.chosen) + self.beside(report))
        accepted = {item.id for item in report.findings if item.accepted}
        open_ids = {item.id for item in report.findings if not item.accepted}
        serious = {item.id for item in self.of_step.judged if item.severity >= self.settings.fail_on} - (
            accepted - open_ids
        )
        good = {number: dict(found) for number, found in judged.items()}
        for step in report.steps:
            good.setdefault(step.state.step, {}).update(step.wholeness)
        report.last_good, report.rejected = last_good(
            run.steps, good, report.findings, self.settings.fail_on, serious=serious, strict=self.settings.strict
        )

    def today(self) -> date:
        """The day on which waivers are held against their last."""
        return datetime.fromtimestamp(self.of_step.now, UTC).date()

    def beside(self, report: RunReport) -> list[Finding]:
        """What is wrong with the configuration: one finding for every waiver that ran out."""
        found = []
        for item in self.of_step.chosen:
            if item.judge_waivers:
                judged = report.beside[item.id] = item.judge_waivers(self.settings.waivers, self.today())
                found += findings_of_no_step(item, judged)
        return found

    def accept(self, found: list[Finding]) -> list[Finding]:
        """The findings, marked where the user knows them."""
        if self.settings.baseline:
            found = apply_baseline(found, self.settings.baseline)
        return apply_waivers(found, self.settings.waivers, self.today())


def _overlapping(
    numbers: range, ahead: Callable[[int], AbstractContextManager[None]], begin: Callable[[int, Begun | None], Begun],
    finish: Callable[[Begun], StepReport],
) -> Iterator[StepReport]:  # fmt: skip
    """Steps in their order: the headers of one are read while the weights of the one before it are measured."""
    waiting: Begun | None = None
    for at in numbers:
        with ahead(at + 1):
            begun = begin(at, waiting)
            if waiting:
                yield finish(waiting)
            waiting = begun
    if waiting:
        yield finish(waiting)
