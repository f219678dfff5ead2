"""Since when: the stretches of saved steps in which a fault shows.

History need not be monotone: drift heals and comes back, so a fault has a list of intervals, each bracketed by the
last good step before it and the first good step after it. A step in which nothing could be determined is neither.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from auditor.model.finding import Interval, Location
from auditor.timeline.growth import law_of


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
    subjects = set()
    for step in bad:
        for location in locations.get(step, ()):
            subjects.add(location.tensor or location.file)
            if location.role:
                onset.setdefault(location.role.value, step)
    measure, growth = _growth(bad, locations)
    law = law_of(growth)
    return Interval(last_good, bad[0], bad[-1], healed, len(subjects), onset, growth, measure if growth else "", law)


def _growth(
    bad: Sequence[int], locations: Mapping[int, Sequence[Location]]
) -> tuple[str, tuple[tuple[int, float], ...]]:  # fmt: skip
    """The size of a fault in every bad step, by the first measure that some step has, and what it is."""
    for name, size in _MEASURES.items():
        found = {step: [value for x in locations.get(step, ()) if (value := size(x)) is not None] for step in bad}
        if any(found.values()):
            combine = sum if name == "elements" else max
            return name, tuple((step, float(combine(sizes))) for step, sizes in found.items() if sizes)
    return "", ()


_MEASURES: dict[str, Callable[[Location], float | None]] = {
    "largest difference": lambda x: x.max_abs_difference,
    "distance by sketch": lambda x: x.sketched_difference,
    "elements": lambda x: float(x.num_elements) if x.num_elements else None,
}
