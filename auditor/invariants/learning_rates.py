"""The learning rate that a recorded schedule has at its own count. Pure numbers.

With b the rate that a group began with, t the schedule's count (source: torch ``optim/lr_scheduler.py``, 2.13):

    cosine          e + (b - e) (1 + cos(pi t / T)) / 2         e = eta_min, T = T_max
    warm restarts   the same with t = T_cur, T = T_i
    linear          b (s + (f - s) min(t, n) / n)               s, f = start_factor, end_factor, n = total_iters
    constant        b s up to n, b then                         s = factor
    polynomial      b (1 - min(t, n) / n) ** power
    steps           b gamma ** (t div step_size)
    exponential     b gamma ** t
    one cycle       from initial_lr to max_lr and to min_lr, by cosines or straight

Which of them it is, is told by what is recorded. torch computes most of them from one step to the next, so that
rounding adds up: by less than 1e-5 of the largest rate over a million steps, as long as nobody else sets the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from auditor.model.optimizer import ParameterGroup

Numbers = Mapping[str, Any]


def _cosine(s: Numbers, at: float, period: float) -> float:
    return float(s["eta_min"] + (s["base_lr"] - s["eta_min"]) * (1 + math.cos(math.pi * at / period)) / 2)


def _part(s: Numbers) -> float:
    """How much of its way a schedule of ``total_iters`` has gone, 0 to 1."""
    return float(min(s["last_epoch"], s["total_iters"]) / s["total_iters"])


_FORMS: tuple[tuple[frozenset[str], Callable[[Numbers], float]], ...] = (
    (frozenset({"T_cur", "T_i", "eta_min"}), lambda s: _cosine(s, s["T_cur"], s["T_i"])),
    (frozenset({"T_max", "eta_min"}), lambda s: _cosine(s, s["last_epoch"], s["T_max"])),
    (
        frozenset({"start_factor", "end_factor", "total_iters"}),
        lambda s: s["base_lr"] * (s["start_factor"] + (s["end_factor"] - s["start_factor"]) * _part(s)),
    ),
    (
        frozenset({"factor", "total_iters"}),
        lambda s: s["base_lr"] * (s["factor"] if s["last_epoch"] < s["total_iters"] else 1.0),
    ),
    (frozenset({"power", "total_iters"}), lambda s: s["base_lr"] * (1 - _part(s)) ** s["power"]),
    (frozenset({"step_size", "gamma"}), lambda s: s["base_lr"] * s["gamma"] ** (s["last_epoch"] // s["step_size"])),
    (frozenset({"gamma"}), lambda s: s["base_lr"] * s["gamma"] ** s["last_epoch"]),
)
"""What a form records besides count and base, the narrower first."""
_OFF = 1e-5
"""Of the largest rate: what rounding adds up to over a million steps."""
_MOST_COUNTS = 1024
_EVERY = frozenset({"base_lr", "last_epoch", "verbose", "_step_count"})


def scheduled_rate(schedule: Numbers, group: Numbers) -> float | None:
    """The rate of a group at its schedule's count; None where the form, or a number of it, is not recorded.

    ``group``: the group's hyperparameters, among which OneCycleLR leaves its own.
    """
    try:
        if "phases" in schedule:
            rate = _one_cycle(schedule, group)
        else:
            own = schedule.keys() - _EVERY
            form = next((of for keys, of in _FORMS if own == keys or own - {"T_0", "T_mult"} == keys), None)
            rate = form(schedule) if form else None
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return None
    return rate if isinstance(rate, float) and math.isfinite(rate) else None


def follows(group: ParameterGroup) -> bool:
    """Whether a group has the rate that its schedule has."""
    rate, wanted = group.hyperparameters.get("lr"), scheduled_rate(group.schedule, group.hyperparameters)
    if wanted is None or not isinstance(rate, (int, float)):
        return False
    known = (wanted, group.schedule.get("base_lr"), group.hyperparameters.get("max_lr"))
    largest = max(abs(value) for value in known if isinstance(value, (int, float)))
    return abs(rate - wanted) <= _OFF * largest


def largest_between(before: ParameterGroup, after: ParameterGroup) -> float | None:
    """The largest rate that a schedule has from one count to a later one; None where its form is not recorded.

    Both groups must have the rate of their count, or something else sets it. Of very many counts some are looked at.
    """
    old, new = before.schedule, after.schedule
    counts = [schedule.get("last_epoch") for schedule in (old, new)]
    if old.keys() != new.keys() or not all(isinstance(count, (int, float)) for count in counts):
        return None
    first, last = (float(count) for count in counts if isinstance(count, (int, float)))
    if not (last >= first and follows(before) and follows(after)):
        return None
    if "T_cur" in new and (new["T_i"] != old["T_i"] or _number(new["T_cur"]) - _number(old["T_cur"]) != last - first):
        return max(_number(new["base_lr"]), _number(new["eta_min"]))
    stride = max((last - first) / _MOST_COUNTS, 1.0)
    found = (_back(new, stride * k) for k in range(int((last - first) / stride) + 1))
    rates = (scheduled_rate(schedule, after.hyperparameters) for schedule in found)
    return max((rate for rate in rates if rate is not None), default=None)


def _back(schedule: Numbers, steps: float) -> dict[str, Any]:
    """A schedule as it was so many steps ago, in the same cycle."""
    return {**schedule, **{key: schedule[key] - steps for key in ("last_epoch", "T_cur") if key in schedule}}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _one_cycle(schedule: Numbers, group: Numbers) -> float | None:
    ends, count = schedule["phases"], schedule["last_epoch"]
    if len(ends) != 2 or schedule["anneal"] not in ("cos", "linear"):
        return None
    rates = group["initial_lr"], group["max_lr"], group["min_lr"]
    phase = 0 if count <= ends[0] else 1
    since = (0.0, *ends)[phase]
    part = (count - since) / (ends[phase] - since)
    start, stop = rates[phase : phase + 2]
    gone = part if schedule["anneal"] == "linear" else (1 - math.cos(math.pi * part)) / 2
    return float(start + (stop - start) * gone)
