"""What a checkpoint records of the optimizer about one tensor: its hyperparameters and how many steps were taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from auditor.invariants.optimizer_state import plain
from auditor.model.catalog import Catalog
from auditor.model.optimizer import Hyperparameter, ParameterGroup


class RecordedGroups:
    """The parameter groups of one Catalog, by the tensors they were given."""

    def __init__(self, catalog: Catalog) -> None:
        self._all = catalog.groups
        self._by_name: dict[str, list[ParameterGroup]] = defaultdict(list)
        for group in catalog.groups:
            for name in group.parameters or ():
                self._by_name[name].append(group)
        self._nameless = tuple(group for group in catalog.groups if group.parameters is None)

    def of(self, name: str) -> Sequence[ParameterGroup]:
        """The groups that hold a tensor; where no file says which do, all that may."""
        return self._by_name.get(name) or self._by_name.get(plain(name)) or self._nameless or self._all


def number(value: Hyperparameter) -> float | None:
    """A hyperparameter that is a number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Betas:
    """The decay rates that a group used, as far as it records them."""

    lowest: float
    """Smallest decay rate of the first moment."""
    highest: float
    second: float
    """Decay rate of the second moment."""


def betas(group: ParameterGroup) -> Betas | None:
    """The decay rates of a group; None where it records none, or not one for each moment.

    A schedule that cycles the momentum (torch's OneCycleLR) leaves its bounds in the group.
    """
    pair = group.hyperparameters.get("betas")
    if not isinstance(pair, tuple) or len(pair) != 2:
        return None
    cycle = [number(group.hyperparameters.get(key)) for key in ("base_momentum", "max_momentum")]
    first = [pair[0], *(value for value in cycle if value is not None)]
    if not all(0 <= value < 1 for value in (*first, pair[1])):
        return None
    return Betas(min(first), max(first), pair[1])


def num_steps(catalog: Catalog) -> float | None:
    """No fewer than the steps that any moment has seen; None where no counter is recorded.

    The largest of all counters and of the step itself: one that was set back must not make the steps look few.
    """
    counted = [scalar.value for scalar in catalog.scalars if scalar.name == "optimizer_step"]
    counted += [group.step for group in catalog.groups if group.step is not None]
    return max(*counted, float(catalog.step)) if counted and max(counted) >= 1 else None
