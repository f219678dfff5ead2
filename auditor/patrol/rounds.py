"""One round: list what is there, audit what changed, newest first, read some of the old again, tell what is new."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from auditor import __version__
from auditor.audit import audit
from auditor.errors import NothingToAuditError
from auditor.ledger.keeper import run_name
from auditor.ledger.tree import Ledger
from auditor.model.run import Commit
from auditor.patrol.budget import Budget, BudgetSpentError
from auditor.patrol.lease import HELD_SECONDS, Lease
from auditor.patrol.memory import FOLDER, Known, Memory, Turn
from auditor.patrol.notices import changes, keyed, tell
from auditor.patrol.outcome import Patrolled, RunOutcome, Status
from auditor.patrol.rereading import ID as ROTTEN
from auditor.patrol.rereading import changed_at_rest, num_turns, steps_in_turn
from auditor.patrol.survey import Found
from auditor.report.json_report import config_digest, run_object
from auditor.reports import Report, RunReport
from auditor.settings import Settings, StepChoice
from auditor.storage.memory import MemoryStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.roots import below, store_at
from auditor.storage.store import StorageError
from auditor.storage.writer import Writer
from auditor.verdict import ExitCode, exit_codes, ordered

SURVEY_COUNTS_SECONDS = 3600.0
"""For how long a listing that was broken off is good to go on with."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a round does, besides how runs are audited."""

    budget_bytes: float = 0.0
    budget_seconds: float = 0.0
    reread: float = 0.0
    """Share of the old steps that are read again in one round, 0 to 1."""
    share: tuple[int, int] = (1, 1)
    """Which part of the runs this process takes, of how many."""
    webhook: str = field(default="", repr=False)
    lock_seconds: float = HELD_SECONDS


def patrol(
    root: str, ledger: Ledger, settings: Settings, choices: Choices, *,
    done: Callable[[RunOutcome], None] = lambda outcome: None,
    progress: Callable[[str, int], None] = lambda path, num_bytes: None,
    now: Callable[[], float] = time.time,
) -> Patrolled:  # fmt: skip
    """One round over every run below ``root``, a path or URL.

    ``done`` is told of every run when it is done with. ``ledger`` must have a writer.

    Raises:
        LockedError: another patrol of the same share is at work, or took the lock over.
        StorageError: the root can't be listed; the ledger can't be read.
        WriteError: the ledger does not take what is written.
    """
    assert ledger.writer is not None
    share = f"{choices.share[0]}-of-{choices.share[1]}"
    begun = time.monotonic()
    ledger.begin()
    lease = Lease(ledger.store, ledger.writer, f"{FOLDER}/locks/{share}", choices.lock_seconds, now=now)
    with lease.held():
        budget = Budget(choices.budget_bytes, choices.budget_seconds, lease.check)
        unlocked = Ledger(ledger.store, _Held(ledger.writer))
        memory = Memory(ledger.store, ledger.writer, share)
        work = _Round(root, unlocked, memory, settings, choices, budget, progress, now)
        result = work.run(done)
        if memory.lost:
            result.forgotten = True
            result.notes.append(f"not written down, so it is found out and told again: {memory.lost[0]}")
    result.seconds = time.monotonic() - begun
    return result


@dataclass(frozen=True, slots=True)
class _Held:
    """A writer whose lock the patrol has already, in a kind of its own."""

    inner: Writer

    @property
    def location(self) -> str:
        return self.inner.location

    def write(self, name: str, content: bytes) -> None:
        self.inner.write(name, content)

    def create(self, name: str, content: bytes) -> bool:
        return self.inner.create(name, content)

    def remove(self, name: str) -> None:
        self.inner.remove(name)

    def locked(self) -> _Held:
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *failure: object) -> None:
        return None


@dataclass(slots=True)
class _Round:
    root: str
    ledger: Ledger
    memory: Memory
    settings: Settings
    choices: Choices
    budget: Budget
    progress: Callable[[str, int], None]
    now: Callable[[], float]

    def run(self, done: Callable[[RunOutcome], None]) -> Patrolled:
        result = Patrolled(self.root)
        found = self.survey(result)
        digest = f"{config_digest(self.settings)} {__version__}"
        known = {item.path: self.memory.known(item.path) or Known() for item in found}
        changed = [i for i in found if (known[i.path].digest, known[i.path].choices) != (i.digest, digest)]
        changed.sort(key=lambda item: (not known[item.path].unreached, -item.modified, item.path))
        unchanged = {item.path for item in found} - {item.path for item in changed}
        for item in found:
            if item.path in unchanged:
                self.finish(result, done, item.path, _as_before(item.path, known[item.path]), known[item.path])
        reached = self.newest_steps(changed, result)
        for item in changed:
            outcome = self.whole(item, known[item.path], digest, reached.get(item.path))
            self.finish(result, done, item.path, outcome, known[item.path])
        if self.choices.reread:
            self.reread([item for item in found if item.path in unchanged], known, result)
        if not result.refused:
            self.forget_gone({item.path for item in found}, result, done)
        self.announce(result, known)
        return result

    def survey(self, result: Patrolled) -> list[Found]:
        """The runs of this share."""
        now = self.now()
        store = RetryingStore(store_at(self.root))
        survey = self.memory.survey(store, now, SURVEY_COUNTS_SECONDS)
        survey.run(lambda survey: self.memory.save_survey(survey, self.now()))
        self.memory.forget_survey()
        result.num_keys, result.refused = survey.num_keys, survey.refused
        result.unrecognised = {path: why for path, why in survey.unrecognised.items() if self.mine(path)}
        return [item for item in survey.found if self.mine(item.path)]

    def mine(self, path: str) -> bool:
        number, of = self.choices.share
        digest = hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) % of == number - 1

    def newest_steps(self, changed: list[Found], result: Patrolled) -> dict[str, int]:
        """Under a budget the newest step of every run comes before any older one; path to bytes read."""
        read: dict[str, int] = {}
        for item in changed if self.budget.limited and len(changed) > 1 else ():
            try:
                self.budget.begin_run()
                report = self.audit(item, replace(self.settings, steps=StepChoice("latest")), self.ledger)
                read[item.path] = sum(run.coverage.num_bytes_read for run in report.runs)
            except BudgetSpentError:
                break
            except (NothingToAuditError, StorageError):
                continue
        return read

    def whole(self, item: Found, known: Known, digest: str, read_before: int | None) -> RunOutcome:
        """Audit one run; what is known of it is changed accordingly, not yet written."""
        outcome = RunOutcome(item.path, Status.AUDITED)
        before = self.budget.spent
        known.unreached = False
        known.digest = ""
        try:
            self.budget.begin_run()
            report = self.audit(item, self.settings, self.ledger)
        except BudgetSpentError:
            known.unreached = True
            outcome = replace(_as_before(item.path, known), status=Status.UNREACHED)
        except NothingToAuditError as error:
            known.exit_codes, known.findings = [int(ExitCode.NOTHING)], []
            outcome.exit_codes, outcome.detail = known.exit_codes, str(error).splitlines()[0]
        except StorageError as error:
            outcome = replace(_as_before(item.path, known), status=Status.REFUSED, detail=str(error))
        else:
            self.learn(item, report, known, digest, outcome)
        outcome.num_bytes_read = self.budget.spent - before + (read_before or 0)
        return outcome

    def learn(self, item: Found, report: Report, known: Known, digest: str, outcome: RunOutcome) -> None:
        """Take over what an audit says."""
        runs = [_of_what_is_there(run) for run in report.runs]
        documents = [run_object(run, report.settings, report.location) for run in runs]
        rotten = [found for found in known.findings if found["id"] == ROTTEN]
        findings = [finding for document in documents for finding in document["findings"]]
        known.findings = [keyed(item.path, finding) for finding in findings] + rotten
        codes = [int(code) for code in ordered(code for run in runs for code in exit_codes(run, report.settings))]
        known.exit_codes = _with_violation(codes) if rotten else codes
        good = [run.last_good.step for run in report.asked_for if run.last_good]
        known.last_good_step = good[0] if len(good) == len(report.asked_for) == 1 else None
        in_progress = any(step.state.commit is Commit.IN_PROGRESS for run in report.runs for step in run.steps)
        # What was refused or changed meanwhile, or isn't finished yet, is looked at again although no key changes.
        again = in_progress or {int(ExitCode.INCOMPLETE), int(ExitCode.CHANGED)} & set(codes)
        known.digest, known.choices = "" if again else item.digest, digest
        outcome.exit_codes, outcome.findings = known.exit_codes, known.findings
        outcome.last_good_step, outcome.documents = known.last_good_step, documents
        outcome.detail = next((f"ledger not written: {text}" for text in _unwritten(report)), "")

    def audit(self, item: Found, settings: Settings, ledger: Ledger) -> Report:
        store = store_at(below(self.root, item.path))
        # Runs in its folder were found by themselves.
        return audit(
            store, settings, ledger=ledger, progress=self.told, now=self.now(), run=self.name(item.path), nested=False
        )

    def told(self, path: str, num_bytes: int) -> None:
        self.budget.progress(path, num_bytes)
        self.progress(path, num_bytes)

    def name(self, path: str) -> str:
        """What a run is called in the ledger: its path, so that two of one name aren't taken for one."""
        return path or run_name(self.root, "", alone=False)

    def finish(
        self, result: Patrolled, done: Callable[[RunOutcome], None], path: str, outcome: RunOutcome, known: Known
    ) -> None:
        if outcome.status is not Status.UNCHANGED:
            self.memory.remember(path, known)
        result.runs.append(outcome)
        done(outcome)

    def forget_gone(self, present: set[str], result: Patrolled, done: Callable[[RunOutcome], None]) -> None:
        """Runs that were deleted; their findings are over."""
        for path in [path for path in self.memory.runs() if path not in present and self.mine(path)]:
            known = self.memory.known(path) or Known()
            result.resolved += known.announced
            outcome = RunOutcome(path, Status.GONE)
            result.runs.append(outcome)
            done(outcome)

    # Reading again

    def reread(self, items: list[Found], known: dict[str, Known], result: Patrolled) -> None:
        """Read again the steps whose turn it is; a turn that a budget cuts short is gone on with."""
        of = num_turns(self.choices.reread)
        turn = self.memory.turn()
        if turn.of != of:
            turn = Turn(turn.number if turn.of else 0, of)
        before = self.budget.spent
        complete = True
        for item, step in self.due(items, turn):
            try:
                self.budget.begin_run()
            except BudgetSpentError:
                complete = False
                break
            self.reread_step(item, step, known[item.path], result)
            turn.done.append(f"{item.path}:{step}")
            self.memory.remember_turn(turn)
        result.num_bytes_reread = self.budget.spent - before
        result.turn = f"turn {turn.number % of + 1} of {of}" + ("" if complete else ", to be gone on with")
        if complete:
            self.memory.remember_turn(Turn(turn.number + 1, of))

    def due(self, items: list[Found], turn: Turn) -> Iterator[tuple[Found, int]]:
        """Steps whose turn it is and that were not read yet in it."""
        done = set(turn.done)
        for item in items:
            for step in steps_in_turn(self.ledger, self.name(item.path), turn.number, turn.of):
                if f"{item.path}:{step}" not in done:
                    yield item, step

    def reread_step(self, item: Found, step: int, known: Known, result: Patrolled) -> None:
        # A ledger that knows nothing makes all be read; what is measured is kept beside what was.
        forgetful = Ledger(MemoryStore({}, self.ledger.location), self.ledger.writer)
        try:
            report = self.audit(item, replace(self.settings, steps=StepChoice(str(step))), forgetful)
        except NothingToAuditError:
            return  # its files are gone, and the ledger outlives them
        except StorageError as error:
            result.notes.append(f"{item.path or '.'}: step {step} was not read again: {error}")
            return
        if failures := _unwritten(report):
            result.notes.append(f"{item.path or '.'}: step {step} was not held against the ledger: {failures[0]}")
            return
        result.num_steps_reread += 1
        old = {found["key"] for found in known.findings}
        rotten = [keyed(item.path, found) for found in changed_at_rest(self.ledger, self.name(item.path), step)]
        unseen = [found for found in rotten if found["key"] not in old]
        if unseen:
            known.findings += unseen
            known.exit_codes = _with_violation(known.exit_codes)
            self.memory.remember(item.path, known)
            outcome = next(run for run in result.runs if run.path == item.path)
            outcome.findings, outcome.exit_codes = known.findings, known.exit_codes

    # Telling

    def announce(self, result: Patrolled, known: dict[str, Known]) -> None:
        """Tell the webhook what is new and what is over; told is only what it took."""
        told: dict[str, list[dict[str, object]]] = {}
        for path, item in sorted(known.items()):
            present = [found for found in item.findings if not (found["waived"] or found["in_baseline"])]
            new, resolved = changes(item.announced, present)
            if new or resolved:
                result.new += [dict(found) for found in new]
                result.resolved += [dict(found) for found in resolved]
                told[path] = present
        gone = [run.path for run in result.runs if run.status is Status.GONE]
        if self.choices.webhook and (result.new or result.resolved):
            failure = tell(self.choices.webhook, self.notice(result))
            if failure:
                result.notes.append(f"{failure}; it is told again in the next round")
                return
        for path, present in told.items():
            known[path].announced = present
            self.memory.remember(path, known[path])
        for path in gone:
            self.memory.forget(path)

    def notice(self, result: Patrolled) -> dict[str, object]:
        return {
            "schema_version": 1, "patrol": result.location, "new": result.new, "resolved": result.resolved,
            "exit_code": int(result.exit_codes[0]),
        }  # fmt: skip


def _as_before(path: str, known: Known) -> RunOutcome:
    return RunOutcome(path, Status.UNCHANGED, list(known.exit_codes), list(known.findings), known.last_good_step)


def _of_what_is_there(run: RunReport) -> RunReport:
    """Without findings that concern deleted steps alone: nobody can act on those, and a patrol must fall silent."""
    there = {step.state.step for step in run.steps if not step.state.deleted}
    found = [item for item in run.findings if not item.locations or any(at.step in there for at in item.locations)]
    return replace(run, findings=found)


def _unwritten(report: Report) -> list[str]:
    return [text for run in report.runs for text in run.unwritten]


def _with_violation(codes: list[int]) -> list[int]:
    return sorted({*codes, int(ExitCode.VIOLATED)} - {int(ExitCode.HOLDS)})
