"""What a user can choose for one audit."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from auditor.adapters.adapter import Options
from auditor.errors import UsageError
from auditor.model.finding import Severity
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
        chosen: set[int] = set()
        for part in self.text.split(","):
            low, colon, high = part.strip().partition(":")
            try:
                if low == "latest" and not colon:
                    chosen |= set(steps[-1:])
                elif colon:
                    first, last = int(low or 0), int(high) if high else 1 << 62
                    chosen |= {step for step in steps if first <= step <= last}
                else:
                    chosen |= {step for step in steps if step == int(low)}
            except ValueError as error:
                raise UsageError(f"--steps {self.text}: {part!r} is no step, FIRST:LAST or latest") from error
        return chosen


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
    """0: as many as the machine has processors, at most 8."""
    options: Options = field(default_factory=Options)
    waivers: tuple[Waiver, ...] = ()
    baseline: Known = frozenset()
    """What an earlier report said: only what is not in it fails the audit."""

    def wants_tensor(self, name: str) -> bool:
        """Whether the tensor is among the chosen ones."""
        return not self.tensors or fnmatchcase(name, self.tensors)


DEFAULTS = Settings()
