"""The upkeep of a ledger: records that others make superfluous, and lists of files for other tools."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.containers.damage import DamagedError
from auditor.ledger.record import StepAccount
from auditor.ledger.tree import COMMIT, Ledger, RecordName
from auditor.model.catalog import FileState
from auditor.storage.store import StorageError


def compact(ledger: Ledger) -> list[RecordName]:
    """Remove records of contents of which another record says and holds at least as much; which were removed.

    Records of other contents of a step, and of other branches, stay. A record's commit goes first: who is killed
    meanwhile leaves nothing that readers take for a record.

    Raises:
        WriteError: storage does not do it.
        LockedError: an audit writes into the ledger.
    """
    assert ledger.writer is not None
    removed = []
    with ledger.writer.locked():
        for run in ledger.runs():
            for name in superfluous(ledger, run):
                parts = ledger.parts(name)
                ledger.writer.remove(f"{name.folder}/{COMMIT}")
                for part in parts:
                    ledger.writer.remove(f"{name.folder}/{part}")
                removed.append(name)
    return removed


def superfluous(ledger: Ledger, run: str) -> list[RecordName]:
    """Records that another makes superfluous."""
    known: dict[tuple[int, str], list[tuple[RecordName, StepAccount]]] = {}
    for name in ledger.names(run):
        try:
            account = ledger.account(name)
        except (DamagedError, StorageError):
            continue
        known.setdefault((name.step, name.identity), []).append((name, account))
    found = []
    for records in known.values():
        kept: list[StepAccount] = []
        for name, account in sorted(records, key=lambda item: _worth(item[1]), reverse=True):
            if any(_covers(other, account) for other in kept):
                found.append(name)
            else:
                kept.append(account)
    return found


def _worth(account: StepAccount) -> tuple[int, int, int, str]:
    measured = account.measured
    num_measured = len(measured.pairs) + len(measured.asked)
    return account.num_contents, num_measured, len(account.said.judgements), account.said.tool


def _covers(one: StepAccount, other: StepAccount) -> bool:
    """Whether all that ``other`` holds and says is in ``one``, said by the same choices or a later version."""
    mine, theirs = ({pair.pairing for pair in account.measured.pairs} for account in (one, other))
    return (
        one.catalog == other.catalog
        and one.said.choices == other.said.choices
        and one.num_contents >= other.num_contents
        and mine >= theirs
        and set(one.measured.asked) >= set(other.measured.asked)
        and one.said.judgements.keys() >= other.said.judgements.keys()
    )


def manifest(ledger: Ledger) -> Iterator[str]:
    """The files of all newest contents, as lines of ``sha256sum``, where their digests were taken; else as comments.

    A line that begins with ``#`` gives size and storage's identity of a file of which no digest was taken.
    """
    for run in ledger.runs():
        newest: dict[tuple[int, str], StepAccount] = {}
        for name in ledger.names(run):
            account = ledger.account(name)
            key = account.step, account.folder
            if key not in newest or newest[key].sequence <= account.sequence:
                newest[key] = account
        for _, account in sorted(newest.items()):
            taken = account.measured.checksums
            for number, file in enumerate(account.files):
                if file.state is FileState.PRESENT:
                    path = f"{account.folder}/{file.name}"
                    digest = taken[number].sha256 if number in taken else ""
                    yield f"{digest}  {path}" if digest else f"# {file.num_bytes} {file.identity}  {path}"
