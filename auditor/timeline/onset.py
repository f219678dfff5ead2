"""Since when: the stretches of saved steps in which a fault shows.

History need not be monotone: drift heals and comes back, so a fault has a list of intervals, each bracketed by the
last good step before it and the first good step after it. A step in which nothing could be determined is neither.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from auditor.model.finding import Interval, Location


class Mark(enum.Enum):
    """What one step says about one fault."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


def intervals(marks: Mapping[int, Mark], locations: Mapping[int, Sequence[Location]]) -> tuple[Interval, ...]:
    """The bad stretches of a fault, given every audited step's mark and the locations of the bad ones.

    >>> found = intervals({1: Mark.GOOD, 2: Mark.BAD, 3: Mark.UNKNOWN, 4: Mark.GOOD, 5: Mark.BAD}, {})
    >>> [(i.last_good, i.first_bad, i.last_bad, i.healed) for i in found]
    [(1, 2, 2, 4), (4, 5, 5, None)]
    """
    found: list[Interval] = []
    last_good: int | None = None
    bad: list[int] = []
    for step in sorted(marks):
        if marks[step] is Mark.BAD:
            bad.append(step)
        elif marks[step] is Mark.GOOD:
            if bad:
                found.append(_interval(last_good, bad, step, locations))
            last_good, bad = step, []
    if bad:
        found.append(_interval(last_good, bad, None, locations))
    return tuple(found)


def _interval(
    last_good: int | None, bad: Sequence[int], healed: int | None, locations: Mapping[int, Sequence[Location]]
) -> Interval:
    onset: dict[str, int] = {}
    growth = []
    subjects = set()
    for step in bad:
        sizes = []
        for location in locations.get(step, ()):
            subjects.add(location.tensor or location.file)
            if location.role:
                onset.setdefault(location.role.value, step)
            if location.max_abs_difference is not None:
                sizes.append(location.max_abs_difference)
        if sizes:
            growth.append((step, max(sizes)))
    return Interval(last_good, bad[0], bad[-1], healed, len(subjects), onset, tuple(growth))
