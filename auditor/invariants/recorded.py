"""What a checkpoint records of the optimizer about one tensor: its hyperparameters and how many steps were taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from auditor.invariants.optimizer_state import plain
from auditor.model.catalog import Catalog
from auditor.model.optimizer import Hyperparameter, ParameterGroup
from auditor.model.run import optimizer_step


class RecordedGroups:
    """The different parameter groups of one Catalog, by the tensors they were given."""

    def __init__(self, catalog: Catalog) -> None:
        by_name: dict[str, dict[object, ParameterGroup]] = defaultdict(dict)
        nameless: dict[object, ParameterGroup] = {}
        seen: set[object] = set()
        for group in catalog.groups:
            content = group.optimizer, frozenset(group.hyperparameters.items())
            # Thousands of ranks record the same, and share the tuple of names where they do.
            if (content, id(group.parameters)) in seen:
                continue
            seen.add((content, id(group.parameters)))
            if group.parameters is None:
                nameless.setdefault(content, group)
            for name in group.parameters or ():
                by_name[name].setdefault(content, group)
        self._by_name = {name: tuple(groups.values()) for name, groups in by_name.items()}
        # Where no file says which group holds a tensor, all may.
        self._others = tuple(nameless.values()) or tuple(catalog.groups)

    def of(self, name: str) -> Sequence[ParameterGroup]:
        """The groups that hold a tensor, or may hold it."""
        return self._by_name.get(name) or self._by_name.get(plain(name)) or self._others


SETTINGS = {
    "class": '"adamw"', "betas": "[β1, β2]", "lr": "… (or max_lr, a schedule's largest)", "eps": "…",
    "weight_decay": "…",
}  # fmt: skip
"""What is to be known of Adam, as ``[optimizer]`` in auditor.toml states it."""
STEP = ("betas", "lr", "eps", "weight_decay")
"""What a step is computed from."""


def lacking(groups: Sequence[ParameterGroup], needed: Iterable[str] = STEP) -> str:
    """That some of the ``needed`` settings are not recorded, and how to state them; empty where all are.

    Where one lacks, all are named that do: whoever states one can state them all.
    """
    known = [_known(group) for group in groups] or [frozenset[str]()]
    if all(names.issuperset(needed) for names in known):
        return ""
    lacks = [name for name in SETTINGS if not all(name in names for names in known)]
    listed, are = (f"{', '.join(lacks[:-1])} and {lacks[-1]}", "are") if lacks[1:] else (lacks[0], "is")
    stated = ", ".join(f"{name} = {SETTINGS[name]}" for name in lacks)
    return f"{listed} {are} not recorded; auditor.toml can state under [optimizer]: {stated}"


def _known(group: ParameterGroup) -> frozenset[str]:
    """Which of the settings a group records; of ``lr`` any rate counts that tells how large it was."""
    names = {name for name, value in group.hyperparameters.items() if value is not None}
    names |= {"lr"} if names & {"initial_lr", "max_lr"} else set()
    # torch's Adam records no class, and alone has amsgrad.
    return frozenset(names | ({"class"} if group.optimizer or "amsgrad" in names else set()))


def why_no_rate(groups: Sequence[ParameterGroup]) -> str:
    """Why it is not known how large a step was, or that there was any; empty where every group records its rate."""
    rates = [number(group.hyperparameters.get("lr")) for group in groups]
    if reason := lacking(groups, ["lr"]):
        return reason
    if None in rates:
        return "the step's own learning rate is not recorded, and the largest of a schedule only bounds it from above"
    return "" if all(rates) else "its learning rate is zero"


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


def files_with_groups(catalog: Catalog) -> Iterator[tuple[str, list[ParameterGroup]]]:
    """Every file that records parameter groups, with them in order."""
    found: dict[str, list[ParameterGroup]] = {}
    for group in catalog.groups:
        found.setdefault(group.file, []).append(group)
    yield from ((file, sorted(groups, key=lambda group: group.number)) for file, groups in found.items())


def rates_fell(before: Catalog, after: Catalog) -> bool:
    """Whether the rates that were logged up to ``after`` only fell, and had begun to before ``before``."""
    since, until = (_largest(after, name) for name in ("rates_fall_since", "rates_logged_until"))
    return since is not None and until is not None and since <= before.step < until


def next_rates(catalog: Catalog) -> bool:
    """Whether the rates that are recorded are those of the step after: the schedule was stepped before the save."""
    steps = _largest(catalog, "scheduler_steps")
    counted = optimizer_step(catalog)
    counts = [group.schedule.get("last_epoch") for group in catalog.groups if group.schedule]
    return counted is not None and (steps == counted or (bool(counts) and all(count == counted for count in counts)))


def _largest(catalog: Catalog, name: str) -> float | None:
    return max((scalar.value for scalar in catalog.scalars if scalar.name == name), default=None)
