"""OPT001 between two saves: a parameter that moves without moments has lost them.

A frozen one proves itself: it has none, and rests. One that moved was stepped, and an optimizer that keeps moments for
others of its kind had some for it as well.
"""

from __future__ import annotations

import re

from auditor.invariants.neighbours import Key, Neighbours
from auditor.invariants.optimizer_state import KeptState, plain, stateless_groups
from auditor.invariants.related import Collected
from auditor.model.catalog import FileState, Role
from auditor.model.finding import Judgement, Severity, Violation

MOVES_BY_ITSELF = re.compile(
    r"ema|averag|target|teacher|shadow|swa|momentum|running|slow|queue|codebook|stat|mean|var|count|scale|step"
    r"|router|bias_correction|expert_bias|old|ref",
    re.IGNORECASE,
)
"""Names of what moves without an optimizer: averages, targets, statistics."""


def what_moves_has_moments(neighbours: Neighbours) -> Judgement:
    """No parameter without moments moved where it had some in the save before, or its group has for others."""
    found, kept, past = Collected(), neighbours.kept, KeptState(neighbours.before.catalog)
    lost = any(file.state is not FileState.PRESENT for file in neighbours.after.catalog.files)
    if lost or not kept.state or kept.nameless or past.nameless:
        return Judgement()
    stateless = stateless_groups(kept)
    tied = {plain(name) for tie in neighbours.after.catalog.ties for name in tie.names}
    for key in neighbours.shared:
        name = plain(key[1])
        if key[0] is not Role.PARAMETER or kept.state.get(name) or name in kept.masters or name in tied:
            continue
        had, group = bool(past.state.get(name)), kept.trained.get(name)
        if key not in neighbours.seen or (group and group.number in stateless):
            continue
        if had or (group and not MOVES_BY_ITSELF.search(name)):
            _judge(neighbours, found, key, had=had)
    return found.judgement()


def _judge(neighbours: Neighbours, found: Collected, key: Key, *, had: bool) -> None:
    old, new = neighbours.seen[key]
    if old.lanes == new.lanes:
        found.num_holds += 1
        return
    step = neighbours.before.catalog.step
    had_some = f"no moments any more, which it had in step {step}" if had else "no moments, others have"
    detail = f"has {had_some}, though it moved since"
    location = neighbours.kept.lacks(neighbours.shared[key][1], "exp_avg", detail)
    severity = Severity.ERROR if had else Severity.WARNING
    found.violations.append(Violation(plain(key[1]), (location,), f"{plain(key[1])} {detail}", severity=severity))
