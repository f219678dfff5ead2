"""What `auditor ledger` says of a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError
from auditor.errors import NothingToAuditError, UsageError
from auditor.ledger.changes import BEGINNING, is_on
from auditor.ledger.folder import open_ledger
from auditor.ledger.record import StepAccount, StepRecord
from auditor.ledger.tree import Ledger, RecordName
from auditor.ledger.upkeep import compact, manifest
from auditor.model.catalog import Role
from auditor.model.finding import Outcome
from auditor.report.text_safety import visible


def show_lines(ledger: Ledger) -> Iterator[str]:
    """Every record, a line each: step, branch, what was measured and violated, and how far its weights moved.

    Of records of one step it is said which of them is the run's now.
    """
    for run in ledger.runs():
        yield visible(run)
        before: StepRecord | None = None
        accounts = _accounts(ledger, run)
        standing = _standings(accounts)
        for name in sorted(ledger.names(run), key=lambda name: _order(name, accounts.get(name))):
            try:
                record = ledger.record(name)
            except DamagedError as error:
                yield f"  step {name.step:>8} · damaged: {visible(str(error))}"
                continue
            yield f"  {_line(record.account)}{_moved_phrase(before, record)}{standing.get(name, '')}"
            before = before if standing.get(name, _CURRENT) != _CURRENT else record


_CURRENT, _AGAIN, _BACK = " · current", " · saved again since", " · the run was set back behind it since"


def _accounts(ledger: Ledger, run: str) -> dict[RecordName, StepAccount]:
    """Those of a run that can be read."""
    accounts: dict[RecordName, StepAccount] = {}
    for name in ledger.names(run):
        with suppress(DamagedError):
            accounts[name] = ledger.account(name)
    return accounts


def _order(name: RecordName, account: StepAccount | None) -> tuple[int, int, int]:
    """By step; of one step by branch and save, not by the digests of their files."""
    if account is None:
        return name.step, 0, 0
    return name.step, account.lineage[-1][0] if account.lineage else 0, account.sequence


def _standings(accounts: Mapping[RecordName, StepAccount]) -> dict[RecordName, str]:
    """What became of each record since; of the others of such a step, that they are current."""
    newest = max((account.lineage for account in accounts.values() if account.lineage), key=lambda one: one[-1],
                 default=BEGINNING)  # fmt: skip
    last: dict[int, int] = {}
    for account in accounts.values():
        if is_on(newest, account):
            last[account.step] = max(last.get(account.step, 0), account.sequence)
    found = {
        name: _AGAIN if is_on(newest, account) else _BACK
        for name, account in accounts.items()
        if account.sequence != last.get(account.step) or not is_on(newest, account)
    }
    doubled = {name.step for name in found}
    return found | {name: _CURRENT for name in accounts if name.step in doubled and name not in found}


def _line(account: StepAccount) -> str:
    said = account.said
    bad = sorted(key for key, judged in said.judgements.items() if judged.outcome is Outcome.VIOLATED)
    branch = f" branch {account.lineage[-1][0]}" if account.lineage and account.lineage[-1][0] else ""
    again = f" save {account.sequence + 1}" if account.sequence else ""
    return (
        f"step {account.step:>8}{branch}{again} · {visible(account.format)} · level {visible(said.level).lower()} · "
        f"{len(account.tensors):,} tensors, {account.num_pieces:,} pieces · {', '.join(bad) or 'nothing violated'}"
    )


def _moved_phrase(before: StepRecord | None, record: StepRecord) -> str:
    moved = distance(before, record) if before is not None else None
    return f" · weights moved by {moved:.2g} of their length" if moved is not None else ""


def distance(one: StepRecord, other: StepRecord, role: Role = Role.PARAMETER) -> float | None:
    """The relative distance of all tensors of a role by their sketches; None where no tensor has one in both."""
    left, right = _sketches(one, role), _sketches(other, role)
    apart = length = 0.0
    for key in left.keys() & right.keys():
        apart += float(np.sum((left[key] - right[key]) ** 2))
        length += float(np.sum(left[key] ** 2))
    return float(np.sqrt(apart / length)) if length > 0 else None


def _sketches(record: StepRecord, role: Role) -> dict[object, NDArray[np.float64]]:
    found: dict[object, NDArray[np.float64]] = {}
    contents = record.contents
    for row in np.lexsort((contents.replica, contents.tensor))[::-1].tolist():
        what = record.account.tensors[int(contents.tensor[row])]
        if what.role is role and contents.sketch[row] >= 0:
            # The lowest replica comes last and stays.
            found[what.name, what.shape] = contents.sketches[int(contents.sketch[row])]
    return found


def lines(action: str, folder: str) -> Iterator[tuple[str, bool]]:
    """The lines that an action prints, and whether what each tells of is sound.

    Raises:
        UsageError: there is no such action, or the folder is no ledger.
        NothingToAuditError: there is no ledger.
        WriteError, LockedError: as :func:`~auditor.ledger.upkeep.compact`.
    """
    if action not in _ACTIONS:
        raise UsageError(f"auditor ledger {action}: there are {', '.join(_ACTIONS)}")
    ledger = open_ledger(folder)
    if not ledger.exists():
        raise NothingToAuditError(f"{folder}: no ledger is there")
    yield from _ACTIONS[action](ledger)


def _verified(ledger: Ledger) -> Iterator[tuple[str, bool]]:
    count = 0
    for run in ledger.runs():
        for name in ledger.names(run):
            damage = ledger.damage(name)
            count += not damage
            if damage:
                yield visible(damage), False
    yield f"{count} records are what was written", True


def _compacted(ledger: Ledger) -> Iterator[tuple[str, bool]]:
    removed = compact(ledger)
    yield from ((f"removed {name.folder}", True) for name in removed)
    yield f"{len(removed)} records of which others hold and say as much were removed", True


_ACTIONS: dict[str, Callable[[Ledger], Iterator[tuple[str, bool]]]] = {
    "show": lambda ledger: ((line, True) for line in show_lines(ledger)),
    "verify": _verified,
    "compact": _compacted,
    "export": lambda ledger: ((visible(line), True) for line in manifest(ledger)),
}
