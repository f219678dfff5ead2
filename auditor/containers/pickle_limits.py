"""What a pickle may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.containers.damage import LimitError


@dataclass(frozen=True, slots=True)
class Limits:
    """What an honest pickle of a checkpoint never exceeds."""

    num_bytes: int = 64 << 20
    num_opcodes: int = 5_000_000
    """Bounds the time: about 0.5 µs each in both passes together."""
    num_memory: int = 256 << 20
    """Bytes of the pickle and all that is made of it. They are counted from above before anything is made, so that an
    honest pickle takes about half of what is counted."""
    num_stack: int = 10_000_000
    num_nesting: int = 10_000
    """Containers within each other: CPython's own pickler recurses, and stops at 1000 (at 10,000 from 3.12 on)."""
    num_copied: int = 20_000_000
    """Elements of all arguments of calls together."""
    num_long_bytes: int = 1024
    """Bytes of one integer: decimal conversion and arithmetic on longer ones would take quadratic time."""
    num_name_bytes: int = 4096
    """Bytes of the module or the name of one global: they are put together for each call."""


LIMITS = Limits()


class MemoryLimitError(LimitError):
    """The records would take more than :attr:`Limits.num_memory`."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"its pickle would take more than {num_bytes} bytes of memory")
