"""What one audit has of its ledger: what is known of the run's steps, and the place to keep more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from auditor import __version__
from auditor.containers.damage import DamagedError
from auditor.ledger.record import Asked, Said, StepRecord, is_of, keepable, recalled, record_of
from auditor.ledger.tree import Ledger, RecordName
from auditor.model.catalog import Catalog
from auditor.model.finding import Judgement
from auditor.model.observation import Observations
from auditor.model.run import StepState
from auditor.storage.store import base_name


@dataclass(slots=True)
class Recalled:
    """What a record gives instead of a pass over the weights."""

    record: StepRecord
    observations: Observations


@dataclass(slots=True)
class Keeper:
    """One run's steps in a ledger."""

    ledger: Ledger
    run: str
    choices: str
    """Digest of the choices that change a judgement."""
    notes: list[str] = field(default_factory=list)
    """What is wrong with the ledger itself; nothing of that is believed."""
    names: dict[int, list[RecordName]] = field(default_factory=dict)

    @classmethod
    def of(cls, ledger: Ledger, run: str, choices: Sequence[object]) -> Keeper:
        """What a ledger has of one run. ``choices``: those that change a judgement.

        Raises:
            UsageError: the folder is no ledger.
            StorageError: it can't be read.
        """
        digest = hashlib.blake2b(repr(tuple(choices)).encode(), digest_size=8).hexdigest()
        keeper = cls(ledger, run, digest)
        if ledger.exists():
            with keeper.noting():
                for name in ledger.names(run):
                    keeper.names.setdefault(name.step, []).append(name)
        return keeper

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is damaged in the ledger is noted and not used."""
        try:
            yield
        except DamagedError as error:
            self.notes.append(str(error))

    def recall(self, catalog: Catalog, asked: Asked) -> Recalled | None:
        """What was measured of this very content; of several records, of the one that says most."""
        best: Recalled | None = None
        for name in self.names.get(catalog.step, ()):
            with self.noting():
                if is_of(self.ledger.account(name), catalog):
                    record = self.ledger.record(name)
                    found = recalled(record, catalog, asked)
                    if found is not None and (best is None or self.rank(record) > self.rank(best.record)):
                        best = Recalled(record, found)
        return best

    def rank(self, record: StepRecord) -> tuple[bool, int]:
        """What makes a record the better one: the same choices and version, then how much it says."""
        said = record.account.said
        return (said.choices, said.tool) == (self.choices, __version__), len(said.judgements)

    def said(
        self, state: StepState, judgements: Mapping[str, Judgement], wholeness: Mapping[str, Judgement], level: str,
        catalog: Catalog,
    ) -> Said:  # fmt: skip
        """What this audit says of a step."""
        return Said(state, judgements, wholeness, level, __version__, self.choices, dict(catalog.opaque), catalog.mesh)

    def keep(
        self, catalog: Catalog, observations: Observations, asked: Asked, said: Said, known: Recalled | None,
        folder: str,
    ) -> None:  # fmt: skip
        """Write what was measured and said, where the ledger does not have it.

        Raises:
            WriteError: the ledger does not take it.
        """
        if self.ledger.writer is None or not keepable(catalog, observations):
            return
        if known is None:
            record = record_of(catalog, observations, asked, said, folder)
        else:
            before = known.record.account.said
            same = (before.choices, before.tool) == (said.choices, said.tool)
            if same and said.judgements.keys() <= before.judgements.keys():
                return
            account = record_of(catalog, observations, asked, said, folder).account
            if same:
                merged = {**before.judgements, **account.said.judgements}
                account = replace(account, said=replace(account.said, judgements=merged))
            old = known.record.account
            # What was measured then is more than what was asked for now.
            account = replace(
                account, measured=old.measured, num_contents=old.num_contents, num_sketches=old.num_sketches
            )
            record = replace(known.record, account=account)
        name = self.ledger.add(self.run, record)
        mine = self.names.setdefault(name.step, [])
        if name not in mine:
            mine.append(name)


def run_name(location: str, path: str, *, alone: bool) -> str:
    """What a run is called in a ledger: its folder's name. ``alone``: the path is a step, which lies in the run."""
    parts = [part for part in f"{location}/{path}".split("/") if part not in ("", ".")]
    parts = parts[:-1] if alone else parts
    return parts[-1] if parts else "run"


def folder_of(location: str, path: str) -> str:
    """What a step's folder is called."""
    return base_name(path or location.rstrip("/")) or "."
