"""What one round of a patrol says."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from auditor.verdict import ExitCode, ordered


class Status(enum.Enum):
    """What became of one run in one round."""

    AUDITED = "audited"
    UNCHANGED = "unchanged"
    """Nothing below it changed since it was audited: what was found then still counts."""
    UNREACHED = "unreached"
    """A budget ended before it."""
    REFUSED = "refused"
    """It could not be read."""
    GONE = "gone"


@dataclass(slots=True)
class RunOutcome:
    """One run."""

    path: str
    status: Status
    exit_codes: list[int] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    """All that are known of it, old or new."""
    last_good_step: int | None = None
    num_bytes_read: int = 0
    """Of weights."""
    detail: str = ""
    documents: list[dict[str, Any]] = field(default_factory=list)
    """What a JSON report says of it, where it was audited; several where the files of one folder are several runs."""


@dataclass(slots=True)
class Patrolled:
    """One round."""

    location: str
    runs: list[RunOutcome] = field(default_factory=list)
    num_keys: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    unrecognised: dict[str, str] = field(default_factory=dict)
    """Folders with files of checkpoints that no format recognises."""
    new: list[dict[str, Any]] = field(default_factory=list)
    """Findings that are told for the first time."""
    resolved: list[dict[str, Any]] = field(default_factory=list)
    """Findings that were told and are no more."""
    num_bytes_reread: int = 0
    """Read to see whether old steps still hold what they held."""
    num_steps_reread: int = 0
    turn: str = ""
    """How far reading again has come."""
    notes: list[str] = field(default_factory=list)
    forgotten: bool = False
    """Whether something could not be written down: it is found out, and told, again."""
    seconds: float = 0.0

    @property
    def num_bytes_read(self) -> int:
        """Of weights that were new."""
        return sum(run.num_bytes_read for run in self.runs)

    @property
    def not_audited(self) -> dict[str, str]:
        """Folders of which nothing is known, with the reason."""
        return {**self.unrecognised, **self.refused}

    def count(self, status: Status) -> int:
        """Runs of one status."""
        return sum(run.status is status for run in self.runs)

    @property
    def exit_codes(self) -> list[ExitCode]:
        """All that apply, first the one that wins. What was not reached or refused is not clean: incomplete."""
        runs = [run for run in self.runs if run.status is not Status.GONE]
        found = {ExitCode(code) for run in runs for code in run.exit_codes}
        # One run without a finished step is no reason for alarm where others have some.
        if found - {ExitCode.NOTHING, ExitCode.HOLDS} or ExitCode.HOLDS in found:
            found -= {ExitCode.NOTHING}
        unread = any(run.status in (Status.UNREACHED, Status.REFUSED) for run in runs)
        if self.not_audited or self.forgotten or unread:
            found.add(ExitCode.INCOMPLETE)
        if not runs:
            found.add(ExitCode.NOTHING)
        return ordered(found or {ExitCode.HOLDS})
