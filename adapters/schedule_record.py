"""What a torch schedule records of itself, for the groups whose learning rates it sets.

``LRScheduler.state_dict`` is the schedule's own attributes without its class: ``base_lrs``, ``last_epoch`` and what its
form needs. Source: torch ``optim/lr_scheduler.py``, 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from auditor.adapters.optimizer_index import MAX_SETTINGS
from auditor.model.optimizer import Hyperparameter

_BESIDE = frozenset({"base_lrs", "_last_lr", "_schedule_phases", "_anneal_func_type"})
"""What isn't a number in schedules whose form is recorded. Others are made of several schedules, of milestones, of a
script's functions, or follow a metric."""


def schedule_in(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The one schedule that a file holds, by itself or in a list; empty where it holds none or several."""
    found = [one for value in list(tree.values())[:MAX_SETTINGS] for one in _schedules(value)]
    return found[0] if len(found) == 1 else {}


def _schedules(value: object) -> Iterator[Mapping[Any, Any]]:
    for one in value[:MAX_SETTINGS] if isinstance(value, list) else [value]:
        if isinstance(one, dict) and isinstance(one.get("base_lrs"), list) and type(one.get("last_epoch")) is int:
            yield one


def schedule_of(schedule: Mapping[Any, Any], number: int, num_groups: int) -> dict[str, Hyperparameter]:
    """What it records for one group: its numbers, and ``base_lr``; empty where its form is not recorded."""
    bases = schedule.get("base_lrs", ())
    if len(bases) != num_groups or not _is_number(bases[number]) or len(schedule) > MAX_SETTINGS:
        return {}
    own = {key: value for key, value in schedule.items() if key not in _BESIDE and not isinstance(value, bool)}
    if not all(type(key) is str and _is_number(value) for key, value in own.items()):
        return {}
    found: dict[str, Hyperparameter] = dict(own)
    phases = schedule.get("_schedule_phases")
    if isinstance(phases, list) and len(phases) <= MAX_SETTINGS:
        ends = [phase.get("end_step") for phase in phases if isinstance(phase, dict)]
        found["phases"] = tuple(float(end) for end in ends if isinstance(end, (int, float)) and _is_number(end))
        found["anneal"] = str(schedule.get("_anneal_func_type", ""))[:16]
    return {**found, "base_lr": float(bases[number])}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
