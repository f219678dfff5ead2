"""Old steps read again, for storage that loses bits without a word: all of them in so many rounds.

With 2 % a step belongs to one of 50 turns, by a digest of its name, and every round completes a turn or goes on with
the one that a budget cut short. Whatever was saved before a cycle of 50 turns began is read again in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from auditor.containers.damage import DamagedError
from auditor.invariants.registry import find
from auditor.ledger.record import StepRecord
from auditor.ledger.tree import Ledger, RecordName
from auditor.model.observation import Read

ID = "INT019"


def num_turns(share: float) -> int:
    """How many rounds it takes when each reads this share (0 to 1) of the steps."""
    return max(1, math.ceil(1 / share))


def in_turn(run: str, step: int, turn: int, of: int) -> bool:
    """Whether a step is read again in a turn."""
    text = f"{run}\0{step}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % of == turn % of


def steps_in_turn(ledger: Ledger, run: str, turn: int, of: int) -> list[int]:
    """Steps of a run of which the ledger has measurements, and whose turn it is."""
    try:
        steps = {name.step for name in ledger.names(run)} if ledger.exists() else set()
    except DamagedError:
        return []
    return sorted(step for step in steps if in_turn(run, step, turn, of))


def changed_at_rest(ledger: Ledger, run: str, step: int) -> Iterator[dict[str, Any]]:
    """A finding where the same version of a step's files was read with different content."""
    versions: dict[str, list[StepRecord]] = {}
    for name in ledger.names(run, step):
        record = _record(ledger, name)
        if record is not None:
            versions.setdefault(f"{name.identity} {record.account.catalog}", []).append(record)
    for records in versions.values():
        rows = sorted({row for other in records[1:] for row in _different(records[0], other)})
        if rows:
            yield _finding(step, records[0].account.folder, rows)


def _record(ledger: Ledger, name: RecordName) -> StepRecord | None:
    try:
        return ledger.record(name)
    except DamagedError:
        return None


def _different(one: StepRecord, other: StepRecord) -> list[int]:
    """Pieces that both have read and that are others, or that only one found."""
    if len(one.pieces) != len(other.pieces):
        return []
    both = (one.pieces["read"] == Read.DONE) & (other.pieces["read"] == Read.DONE)
    lost = (one.pieces["read"] == Read.LOST) != (other.pieces["read"] == Read.LOST)
    asked = (one.pieces["read"] != Read.NOT_ASKED) & (other.pieces["read"] != Read.NOT_ASKED)
    lanes = (one.pieces["lane0"] != other.pieces["lane0"]) | (one.pieces["lane1"] != other.pieces["lane1"])
    found: list[int] = np.flatnonzero((both & lanes) | (asked & lost)).tolist()
    return found


def _finding(step: int, folder: str, rows: Sequence[int]) -> dict[str, Any]:
    """As the JSON report has findings."""
    record = find(ID)
    assert record is not None
    return {
        "id": ID, "name": record.name, "severity": "error", "class": None, "consequences": [], "waived": False,
        "in_baseline": False, "minority": [],
        "message": f"{folder}: {len(rows)} pieces, first piece {rows[0]} of the Catalog, are not what they were when "
                   "they were first read, although storage tells the same version of every file",
        "hint": record.hint,
        "likely_causes": [],
        "intervals": [{"last_good": None, "first_bad": step, "last_bad": step, "healed": None}],
        "locations": [{"step": step, "tensor": None, "role": None, "coordinate": {}, "file": None}],
    }  # fmt: skip
