"""What a user can choose for one audit."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from auditor.adapters.adapter import Options
from auditor.errors import UsageError
from auditor.model.finding import Severity
from auditor.model.name_map import NameRule
from auditor.model.waiver import Known, Waiver


class Level(enum.IntEnum):
    """How much is read; every level includes the one before."""

    NAMES = 0
    HEADERS = 1
    REPLICAS = 2
    VALUES = 3
    FULL = 4


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Which steps to audit, as written after ``--steps``."""

    text: str = ""

    def choose(self, steps: list[int]) -> set[int]:
        """Of the saved ``steps``, those that are meant; all where nothing is stated.

        Raises:
            UsageError: the text is no list of numbers, inclusive ranges and ``latest``.
        """
        if not self.text:
            return set(steps)
        ranges = self.check()
        latest = steps[-1:] if any(part.strip() == "latest" for part in self.text.split(",")) else []
        return {*latest, *(step for step in steps if any(first <= step <= last for first, last in ranges))}

    def check(self) -> list[tuple[int, int]]:
        """The ranges that are meant, inclusive.

        Raises:
            UsageError: as :meth:`choose`.
        """
        ranges = []
        for part in filter(None, map(str.strip, self.text.split(","))):
            low, colon, high = part.partition(":")
            if part == "latest":
                continue
            try:
                first = int(low or 0)
                last = (int(high) if high else 1 << 62) if colon else first
            except ValueError as error:
                raise UsageError(f"--steps {self.text}: {part!r} is no step, FIRST:LAST or latest") from error
            if first < 0 or last < first:
                raise UsageError(f"--steps {self.text}: {part!r} holds no step; write FIRST:LAST, the smaller first")
            ranges.append((first, last))
        return ranges


@dataclass(frozen=True, slots=True)
class Settings:
    """All choices of one audit."""

    steps: StepChoice = StepChoice()
    level: Level | None = None
    """None: values for small runs, replicas and the newest step's values for large ones."""
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    tensors: str = ""
    """Glob over tensor names; empty for all."""
    fail_on: Severity = Severity.ERROR
    strict: bool = False
    strict_buffers: bool = False
    settle_seconds: float = 600.0
    threads: int = 0
    """0: as many as the machine has processors, at most 8; 16 over object stores."""
    options: Options = field(default_factory=Options)
    waivers: tuple[Waiver, ...] = ()
    name_map: tuple[NameRule, ...] = ()
    """How tensors are called, and lie, in what they are compared with."""
    baseline: Known = frozenset()
    """What an earlier report said: only what is not in it fails the audit."""
    origins: tuple[str, ...] = ()
    """Choices that were not made by flag, with where they were made."""
    kernels: str = "auto"
    """``numpy``, ``numba``, or ``auto``: numba where it is installed and enough is read to be worth its loading."""
    scheduler: str = ""
    """Address of a Dask scheduler whose workers read and measure; empty: threads of this process."""
    max_bytes_per_second: float = 0.0
    """How fast each process may read; 0: as fast as it can."""
    bisect: bool = False
    """Whether only so many steps are looked at as bracket the onset of what the newest one shows."""
    ledger: str = ""
    """Where what was measured and said is kept; empty: nowhere."""

    def wants_tensor(self, name: str) -> bool:
        """Whether the tensor is among the chosen ones."""
        return not self.tensors or fnmatchcase(name, self.tensors)


MEANS = frozenset({"threads", "kernels", "scheduler", "max_bytes_per_second", "ledger"})
"""Choices that say how the work is done; none of them changes what is found."""

DEFAULTS = Settings()
