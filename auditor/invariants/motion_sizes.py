"""MOT008: no tensor is suddenly of another size than its own past says."""

from __future__ import annotations

import math

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.neighbours import Key, Neighbours, Past, Sizes
from auditor.invariants.related import Collected, Seen, of_tensor
from auditor.model.catalog import Role
from auditor.model.finding import Judgement, LikelyCause, Severity, Violation

_SAVES = 4
"""So many earlier saves make a past."""
_LEAST = {
    Role.PARAMETER: 4.0, Role.MASTER: 4.0, Role.EMA: 4.0, Role.FIRST_MOMENT: 16.0, Role.SECOND_MOMENT: 24.0,
    Role.MOMENT: 16.0,
}  # fmt: skip
"""Powers of two by which a size may change whatever the past. Healthy runs: weights by less than 1 from save to save,
once they are past their first steps; gradients, and so first moments, by 10 at a spike of the loss, and second moments
by twice that. A flipped bit of an exponent is 16, 32, 64 or 128 of them, or less than a doubling."""
_WEIGHTS = frozenset({Role.PARAMETER, Role.MASTER, Role.EMA})
_TIMES = 4.0
"""Of the largest change from save to save in the past."""


def sizes_follow_their_past(neighbours: Neighbours) -> Judgement:
    """Neither the root mean square nor the largest element of a tensor jumps from the save before."""
    found = Collected()
    for key, (_, number) in neighbours.shared.items():
        if key[0] not in _LEAST or neighbours.after.catalog.tensors[number].num_elements == 0:
            continue
        pair = neighbours.seen.get(key)
        past = neighbours.history.of(*key)
        if pair is None:
            found.unknown(neighbours.why_unseen(key[1]), key[1])
        elif past.num_saves < _SAVES:
            found.not_applicable[f"fewer than {_SAVES} earlier saves"] += 1
        elif ("MOT008", key[1]) in neighbours.jumped:
            _judge_after_jump(neighbours, found, key, pair[1], past)
        elif detail := _jump(key[0], pair[1], past):
            tensor = neighbours.after.catalog.tensors[number]
            location = of_tensor(neighbours.after, number, tensor.num_elements, detail)
            message = f"{tensor.name} ({key[0].value.replace('_', ' ')}) {detail}"
            found.violations.append(Violation(tensor.name, (location,), message))
        else:
            found.num_holds += 1
    if not found.num_holds and not found.violations and not found.undetermined and not found.not_applicable:
        found.not_applicable["no tensor is in both saves"] += 1
    return found.judgement()


def _judge_after_jump(neighbours: Neighbours, found: Collected, key: Key, seen: Seen, past: Past) -> None:
    """Of a tensor that jumped in the save before: moments forget, weights must have come back by half the way."""
    role, name = key
    if not any(location.role is role for location in neighbours.jumped["MOT008", name]):
        found.num_holds += 1
    elif role not in _WEIGHTS or _came_back(past.mean, seen.root_mean_square) or _came_back(past.largest, seen.largest):
        found.undone(name)
    else:
        found.unknown("it stayed as large, or as small, as it had become at once in the save before", name)


def _came_back(sizes: Sizes, size: float) -> bool:
    """Whether a size changed by half of the largest change that was seen, which was the jump, or more."""
    far = sizes.largest_change >= _LEAST[Role.PARAMETER] and size > 0 and math.isfinite(size) and sizes.last > 0
    return far and abs(math.log2(size) - math.log2(sizes.last)) >= sizes.largest_change / 2


def _jump(role: Role, seen: Seen, past: Past) -> str:
    """By how much a tensor's size is not what its past says; empty where it is."""
    words = (("its root mean square is", past.mean, seen.root_mean_square),
             ("its largest element is", past.largest, seen.largest))  # fmt: skip
    for words_of, sizes, size in words:
        # A size that was zero, or no number, of late says nothing.
        if sizes.num_good < _SAVES or not math.isfinite(size) or size <= 0:
            continue
        limit = max(_LEAST[role], _TIMES * sizes.largest_change)
        change = math.log2(size) - math.log2(sizes.last)
        if abs(change) > limit:
            times = f"2^{abs(change):.0f} times as {'large' if change > 0 else 'small'} as"
            known = f"in the save before ({sizes.last:.3g}); 2^{limit:.0f} at most was to be expected"
            return f"jumped: {words_of} {size:.3g}, {times} {known}"
    return ""


INVARIANTS = (
    Invariant(
        "MOT008", "size-jumped", Severity.WARNING,
        statement="With four earlier saves or more: neither root mean square nor largest element of a tensor changes "
                  "from one save to the next by more than 2^4 (weights), 2^16 (first moments), 2^24 (second "
                  "moments), or four times the largest such change of its own past, as powers of two.",
        rationale="One element with a flipped exponent bit is invisible in every mean and poisons its row at the "
                  "next step; a second moment that is far too large stops its weight for thousands of steps.",
        source="pytorch/pytorch#84803; pytorch/torchtitan#4324",
        example="3.mlp.dense_4h_to_h.weight (second moment) jumped: its largest element is 1.8e+19, 2^64 times as "
                "large as in the save before (1.02e-06); 2^24 at most was to be expected",
        misses="Jumps in the first saves; one element that becomes larger but not the largest; low bits.",
        hint="Look at the largest element and its neighbours. A single one is a flipped bit; a whole tensor is "
             "another tensor, or a loss that exploded.",
        needs=Needs.WEIGHTS, judge_motion=sizes_follow_their_past, one_fault=True, lasting=True,
        likely_causes=(LikelyCause("a bit flipped in memory or storage", "pytorch/torchtitan#4324"),),
    ),
)  # fmt: skip
