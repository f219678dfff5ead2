"""MOT003 beyond the save before: tensors that hold what an older save held, while they moved in between.

A weight of float32 or a first moment that comes back to old numbers in all of its elements was not trained there. Where
most of a step comes back an old state was restored or copied, of which MOT015 speaks.
"""

from __future__ import annotations

from collections.abc import Iterator

from auditor.invariants.neighbours import Key, Neighbours
from auditor.invariants.optimizer_lost import MOVES_BY_ITSELF
from auditor.invariants.optimizer_state import plain
from auditor.invariants.related import of_tensor
from auditor.invariants.stillness import FEWEST, decays
from auditor.model.catalog import Role
from auditor.model.finding import Violation

_FEWEST_WEIGHTS = 64
"""Weights whose steps have one size alone (signs of gradients) may come back; so many don't at once."""


def parts_of_older_saves(neighbours: Neighbours) -> Iterator[Violation]:
    """Trained tensors that come back to what they were before the save before, while most others move on."""
    moved = {key: neighbours.history.step_with(key, lanes) for key, lanes in _moved(neighbours).items()}
    for of_moments in (False, True):
        steps = {key: step for key, step in moved.items() if decays(*key) is of_moments}
        returned = {key: step for key, step in steps.items() if step is not None}
        if 2 * len(returned) < len(steps):
            yield from (_of_tensor(neighbours, key, step) for key, step in returned.items())


def _moved(neighbours: Neighbours) -> dict[Key, tuple[int, int]]:
    """What is trained, can't come back by chance, and has other bits than in the save before: its lanes."""
    tensors = neighbours.after.catalog.tensors
    found: dict[Key, tuple[int, int]] = {}
    for key, (old, new) in neighbours.seen.items():
        wide = tensors[neighbours.shared[key][1]].dtype.mantissa_bits >= 23 and plain(key[1]) in neighbours.trained
        weight = key[0] in (Role.PARAMETER, Role.MASTER) and wide and not MOVES_BY_ITSELF.search(key[1])
        fewest = FEWEST if decays(*key) else _FEWEST_WEIGHTS
        if (weight or decays(*key)) and old.lanes != new.lanes and new.num_telling >= fewest:
            found[key] = new.lanes
    return found


def _of_tensor(neighbours: Neighbours, key: Key, step: int) -> Violation:
    detail = f"has the bits of step {step}, in between it moved, and others move on"
    location = of_tensor(neighbours.after, neighbours.shared[key][1], detail=detail)
    return Violation(key[1], (location,), f"{key[1]} ({key[0].value}) is of an older save: it {detail}")
