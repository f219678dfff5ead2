"""Since when, by looking at few steps: halving between a good step and a bad one, fault by fault. Pure.

It finds one border between good and bad for every fault that shows in the newest step, with about log2(N) looks each;
faults share looks. It can't know of a fault that healed before the newest step, of an earlier interval of the same
fault, nor of what lies between two steps that it did not look at and that agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from auditor.timeline.onset import Mark

Look = Callable[[int], Mapping[str, Mark]]
"""What the step at a position says of every fault; faults that it does not name are unknown there."""


def bisect(count: int, look: Look) -> list[int]:
    """The positions, of ``count`` steps in order, at which was looked.

    >>> marks = [Mark.GOOD] * 37 + [Mark.BAD] * 27
    >>> bisect(64, lambda at: {"REP001": marks[at]})
    [0, 31, 35, 36, 37, 39, 47, 63]
    """
    seen: dict[int, Mapping[str, Mark]] = {}

    def at(position: int) -> Mapping[str, Mark]:
        if position not in seen:
            seen[position] = look(position)
        return seen[position]

    newest = count - 1
    for fault in [name for name, mark in at(newest).items() if mark is Mark.BAD]:
        at(0)
        while (position := _next(seen, fault, newest)) is not None:
            at(position)
    return sorted(seen)


def _next(seen: Mapping[int, Mapping[str, Mark]], fault: str, newest: int) -> int | None:
    """Where to look next for the border of one fault; None where it is found, or nothing is left to look at."""
    marks = {position: found.get(fault, Mark.UNKNOWN) for position, found in seen.items()}
    high = newest
    for position in sorted(marks, reverse=True):
        # The last stretch: bad from here to the newest step, as far as was looked.
        if marks[position] is Mark.GOOD:
            break
        if marks[position] is Mark.BAD:
            high = position
    low = max((position for position, mark in marks.items() if mark is Mark.GOOD and position < high), default=None)
    if low is None:
        # Bad in the first step already, or nothing good was found yet: what is unknown there may be known further on.
        if marks.get(0) is not Mark.UNKNOWN:
            return None
        low = 0
    middle = (low + high) // 2
    left = [position for position in range(low + 1, high) if position not in seen]
    return min(left, key=lambda position: (abs(position - middle), position), default=None)
