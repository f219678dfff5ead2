"""How much one round may read. A step that was begun is finished: a budget that no step fits is still progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from auditor.errors import AuditorError


class BudgetSpentError(AuditorError):
    """The round has read or lasted as long as it may."""


@dataclass(slots=True)
class Budget:
    """Bytes and seconds; 0 is no limit."""

    num_bytes: float = 0.0
    seconds: float = 0.0
    check: Callable[[], None] = lambda: None
    """Called between steps; what it raises ends the round."""
    clock: Callable[[], float] = time.monotonic
    spent: int = 0
    begun: float = field(init=False)
    step: str | None = None

    def __post_init__(self) -> None:
        self.begun = self.clock()

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return bool(self.num_bytes or self.seconds)

    def is_spent(self) -> bool:
        """Whether nothing more may be begun."""
        over = bool(self.num_bytes) and self.spent >= self.num_bytes
        return over or (bool(self.seconds) and self.clock() - self.begun >= self.seconds)

    def progress(self, step: str, num_bytes: int) -> None:
        """Told of what was read of a step.

        Raises:
            BudgetSpentError: the step is another one than before, and nothing more may be begun.
        """
        if step != self.step:
            self.check()
            if self.step is not None and self.is_spent():
                self.step = None
                raise BudgetSpentError("the budget is spent")
            self.step = step
        self.spent += num_bytes

    def begin_run(self) -> None:
        """Another run begins.

        Raises:
            BudgetSpentError: nothing more may be begun.
        """
        self.step = None
        self.check()
        if self.is_spent():
            raise BudgetSpentError("the budget is spent")
