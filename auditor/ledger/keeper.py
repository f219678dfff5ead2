"""What one audit has of its ledger: what is known of the run's steps, and the place to keep more."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from auditor import __version__
from auditor.containers.damage import DamagedError
from auditor.ledger.changes import BEGINNING, Lineage, change_since, continued, is_on
from auditor.ledger.record import (
    Asked,
    Place,
    Said,
    StepAccount,
    StepRecord,
    below_root,
    has_files_of,
    is_of,
    keepable,
    moved,
    recalled,
    record_of,
)
from auditor.ledger.tree import Ledger, RecordName
from auditor.model.catalog import Catalog
from auditor.model.finding import Judgement
from auditor.model.observation import Observations
from auditor.model.run import Change, StepState
from auditor.storage.store import Entry, StorageError, base_name, join
from auditor.storage.writer import WriteError


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a record gives instead of a pass over the weights."""

    record: StepRecord
    observations: Observations


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps that were audited and are not on the way to the newest step: the run was set back."""

    number: int
    steps: tuple[int, ...]
    violated: Mapping[str, int]
    """Id of an invariant to the first of the steps that violated it."""


@dataclass(slots=True)
class Keeper:
    """One run's steps in a ledger."""

    ledger: Ledger
    run: str
    choices: str
    """Digest of the choices that change a judgement."""
    notes: list[str] = field(default_factory=list)
    """What is wrong with the ledger itself; nothing of that is believed."""
    unwritten: list[str] = field(default_factory=list)
    """What the ledger did not take."""
    accounts: dict[RecordName, StepAccount] = field(default_factory=dict)
    root: str = ""
    """Digest of where the run lies."""
    present: frozenset[int] = frozenset()
    """The steps that are there."""
    placed: dict[tuple[int, str], Place] = field(default_factory=dict)
    """By step and folder, those of this audit."""
    location: str = ""
    """What a person calls the root of the store that is audited."""

    @classmethod
    def of(cls, ledger: Ledger, run: str, choices: Sequence[object]) -> Keeper:
        """What a ledger has of one run. ``choices``: those that change a judgement.

        Raises:
            UsageError: the folder is no ledger.
            StorageError: it can't be read.
        """
        digest = hashlib.blake2b(repr(tuple(choices)).encode(), digest_size=8).hexdigest()
        keeper = cls(ledger, run, digest)
        names: list[RecordName] = []
        if ledger.exists():
            with keeper.noting():
                names = ledger.names(run)
        for name in names:
            with keeper.noting():
                keeper.accounts[name] = ledger.account(name)
        return keeper

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is damaged in the ledger, or can't be read, is noted and not used."""
        try:
            yield
        except (DamagedError, StorageError) as error:
            self.notes.append(str(error))

    def recall(self, catalog: Catalog, asked: Asked) -> Recalled | None:
        """What was measured of this very content; of several records, of the one that says most."""
        mine = [
            name for name, account in self.accounts.items() if name.step == catalog.step and is_of(account, catalog)
        ]
        for name in sorted(mine, key=lambda name: self.rank(self.accounts[name]), reverse=True):
            with self.noting():
                record = self.ledger.record(name)
                found = recalled(record, catalog, asked)
                if found is not None:
                    return Recalled(record, found)
        return None

    def rank(self, account: StepAccount) -> tuple[int, bool, int, int, int]:
        """What makes a record the better one: the later content, the same choices and version, how much it says.

        Last, by how near a save it was judged: of equal ones it would be chance which is taken.
        """
        said = account.said
        same = (said.choices, said.tool) == (self.choices, __version__)
        before = said.before.partition(" ")[0]
        near = int(before) if before.isdecimal() else -1
        return account.sequence, same, len(said.judgements), account.num_contents, near

    def place(
        self, catalog: Catalog, observations: Observations, state: StepState, known: Recalled | None, folder: str
    ) -> StepState:
        """Find the step's place among those audited before; its state, with what became of it since."""
        mine = {
            name: account
            for name, account in self.accounts.items()
            if (account.step, account.folder) == (catalog.step, folder)
        }
        key = catalog.step, folder

        def told(account: StepAccount) -> Change | None:
            change: Change | None = moved(account.said.state.change, lambda path: below_root(path, catalog.path))
            return change

        same = (
            known.record.account if known else next((one for one in mine.values() if has_files_of(one, catalog)), None)
        )
        if same is not None:
            self.placed[key] = Place(folder, same.sequence, same.lineage)
            return replace(state, change=told(same), audited_before=same.said.state.audited_before)
        if not mine:
            self.placed[key] = Place(folder, 0, self.lineage_of(state, anew=False))
            return state
        last = max(mine, key=lambda name: self.rank(mine[name]))
        earlier = mine[last]
        self.placed[key] = Place(folder, earlier.sequence + 1, earlier.lineage)
        with self.noting():
            change = change_since(self.ledger.record(last), catalog, observations)
            if change is not None and not change.num_kept:
                self.placed[key] = replace(self.placed[key], lineage=self.lineage_of(state, anew=True))
            return replace(state, change=change or told(earlier), audited_before=True)
        return state

    def lineage_of(self, state: StepState, *, anew: bool) -> Lineage:
        """The branch of a step of which this content was not audited before."""
        below = [(step, place.lineage) for (step, _), place in self.placed.items() if step < state.step]
        if not below:
            below = [(one.step, one.lineage) for one in self.accounts.values() if one.step < state.step]
        previous = max(below, key=lambda item: (item[0], item[1]), default=(0, BEGINNING))[1]
        return continued(previous, state.step, state.modified, self.accounts.values(), anew=anew)

    @property
    def lineage(self) -> Lineage:
        """That of the newest step which is there; of the newest that is known where none is."""
        known = [place.lineage for place in self.placed.values()] or [one.lineage for one in self.accounts.values()]
        return max(filter(None, known), key=lambda one: one[-1], default=BEGINNING)

    def gone(self, present: Iterable[int], path: str) -> list[StepAccount]:
        """Steps on the way to the newest one that are there no more, with what was said of each, told from ``path``."""
        there = set(present)
        best: dict[int, StepAccount] = {}
        for account in sorted(self.accounts.values(), key=self.rank):
            if account.step not in there and is_on(self.lineage, account):
                best[account.step] = account
        return [_told(account, path) for _, account in sorted(best.items())]

    def branches(self) -> list[Branch]:
        """What was audited and is not on the way to the newest step."""
        others: dict[int, dict[int, StepAccount]] = {}
        for account in sorted(self.accounts.values(), key=self.rank):
            if not is_on(self.lineage, account) and account.lineage:
                others.setdefault(account.lineage[-1][0], {})[account.step] = account
        return [_branch(number, accounts) for number, accounts in sorted(others.items())]

    def is_of(self, entries: Iterable[Entry]) -> bool:
        """Whether what is kept under the run's name is of this run: kept from this place, or some file is the same.

        A run that was moved keeps the identities of its files.
        """
        if not self.accounts or any(account.root in ("", self.root) for account in self.accounts.values()):
            return True
        known = {(f.num_bytes, f.identity) for account in self.accounts.values() for f in account.files if f.identity}
        return any((entry.num_bytes, entry.identity) in known for entry in entries)

    def repeated(self, known: Recalled, levels: Collection[str], before: str) -> Mapping[str, Judgement]:
        """What was said of a step by the same choices and version at one of these levels; else nothing.

        ``before``: the save that is before it now (:func:`save_identity`). It must be the one by which the step was
        judged, unless that is deleted: what was said by it then is more than what can be said without it.
        """
        said = known.record.account.said
        return said.judgements if said.level in levels and self.holds(said, before) else {}

    def holds(self, said: Said, before: str) -> bool:
        """Whether what was said is what these choices and this version say, and by the same save ``before``."""
        step = said.before.partition(" ")[0]
        deleted = step.isdecimal() and int(step) not in self.present
        same = (said.choices, said.tool) == (self.choices, __version__)
        return same and (said.before == before or deleted)

    def told(self, account: StepAccount, path: str) -> StepAccount:
        """An account of a step that is there, in ``path``; its place is that of this audit."""
        self.placed[account.step, account.folder] = Place(account.folder, account.sequence, account.lineage)
        return _told_from(account, path)

    def said(
        self, state: StepState, judgements: Mapping[str, Judgement], wholeness: Mapping[str, Judgement], level: str,
        catalog: Catalog, before: str, listing: str, absent: Iterable[str], rates: frozenset[object],
    ) -> Said:  # fmt: skip
        """What this audit says of a step.

        ``before``: the save by which its motion was judged; ``listing``: digest of its files; ``absent``: what was
        looked for beside it and isn't there; ``rates``: betas that it and the saves before it record.
        """
        numbers = sorted(rate if isinstance(rate, tuple) else () for rate in rates)
        return Said(
            state, judgements, wholeness, level, __version__, self.choices, dict(catalog.opaque), catalog.mesh, before,
            listing, tuple(map(base_name, absent)) if listing else (), tuple(numbers),
        )  # fmt: skip

    def keep(
        self, catalog: Catalog, observations: Observations, asked: Asked, said: Said, known: Recalled | None,
        folder: str, history: NDArray[np.float64],
    ) -> None:  # fmt: skip
        """Write what was measured and said, where the ledger does not have it.

        A ledger that does not take it is noted: the report must not be lost by it.
        """
        if self.ledger.writer is None or not keepable(catalog, observations):
            return
        if known is not None and self._is_said(known.record.account.said, said):
            return
        record = record_of(catalog, observations, asked, said, self.placed[catalog.step, folder], history)
        record = replace(record, account=replace(record.account, root=self.root))
        if known is not None:
            record = _more(known.record, record)
        try:
            name = self.ledger.add(self.run, record)
        except WriteError as error:
            self.unwritten.append(str(error))
        else:
            self.accounts[name] = record.account

    @staticmethod
    def _is_said(before: Said, said: Said) -> bool:
        same = all(getattr(before, name) == getattr(said, name) for name in ("choices", "tool", "before", "listing"))
        return same and said.judgements.keys() <= before.judgements.keys()


def _more(before: StepRecord, now: StepRecord) -> StepRecord:
    """What was measured then, which is more than was asked for now, with what is said now."""
    old, account = before.account, now.account
    if (old.said.choices, old.said.tool) == (account.said.choices, account.said.tool):
        merged = {**old.said.judgements, **account.said.judgements}
        account = replace(account, said=replace(account.said, judgements=merged))
    account = replace(
        account, measured=old.measured, num_contents=old.num_contents, num_sketches=old.num_sketches
    )  # fmt: skip
    return replace(before, account=account, history=now.history)


def _told(account: StepAccount, path: str) -> StepAccount:
    """An account of a step in the run at ``path``, whose folder is gone."""
    found = _told_from(account, join(path, account.folder))
    return replace(found, said=replace(found.said, state=replace(found.said.state, deleted=True)))


def _told_from(account: StepAccount, step: str) -> StepAccount:
    """An account whose paths are told from the step's path."""
    said = moved(account.said, lambda kept: below_root(kept, step))
    return replace(account, said=replace(said, state=replace(said.state, path=step)))


def _branch(number: int, accounts: Mapping[int, StepAccount]) -> Branch:
    violated: dict[str, int] = {}
    for step in sorted(accounts):
        for identifier, judgement in accounts[step].said.judgements.items():
            if judgement.violations:
                violated.setdefault(identifier, step)
    return Branch(number, tuple(sorted(accounts)), dict(sorted(violated.items())))


def run_name(location: str, path: str, *, alone: bool) -> str:
    """What a run is called in a ledger: its folder's name. ``alone``: the path is a step, which lies in the run."""
    parts = [part for part in f"{location}/{path}".split("/") if part not in ("", ".")]
    parts = parts[:-1] if alone else parts
    return parts[-1] if parts else "run"


def root_digest(location: str, path: str, *, alone: bool) -> str:
    """A digest of where a run lies, whether it is named by itself or found in a folder of runs."""
    parts = [part for part in f"{location}/{path}".split("/") if part not in ("", ".")]
    whole = "/".join(parts[:-1] if alone else parts)
    return hashlib.blake2b(whole.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def folder_of(location: str, path: str) -> str:
    """What a step's folder is called."""
    return base_name(path or location.rstrip("/")) or "."
