"""What a JAX training state records of its optimizer besides moments: counts of steps, hyperparameters, groups.

optax records neither parameter groups nor its own names. A group here is what has the same kinds of state: parameters
that ``multi_transform`` or a mask treats alike. Each state of a chain counts by itself; the count of the first state
with moments is that of its parameters, others (of schedules) are counters of their own. Hyperparameters are known where
``inject_hyperparams`` put them into the state. Source: optax ``schedules/_inject.py``, ``transforms/_accumulation.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.counters import MAX_VALUE
from auditor.adapters.optax.paths import Path, below
from auditor.adapters.optax.tree import STEPS, OptaxTree
from auditor.model.catalog import Role, Scalar
from auditor.model.mesh import EVERYWHERE, Coordinate
from auditor.model.optimizer import Hyperparameter, ParameterGroup

MAX_NUMBERS = 4096
"""Numbers of one state that are read; each may be a request of its own."""
_INJECTED, _SCHEDULED = "hyperparams", "hyperparams_states"
_SETTINGS = {"learning_rate": "lr"}
_ANEW = "plateau_count"
"""Beside a ``count`` that begins anew now and then."""
_PACE = frozenset({"mini_step", "notfinite_count"})
"""Fields of states that let what is below them take fewer steps than they are called for; outside, calls count."""


def numbers(tree: OptaxTree) -> list[int]:
    """Leaves of one element that are metadata: counts and hyperparameters."""
    wanted = [
        at
        for at, (leaf, meaning) in enumerate(zip(tree.leaves, tree.meanings, strict=True))
        if not leaf.shape and (meaning.role is Role.COUNTER or _INJECTED in tree.paths[at])
    ]
    return wanted[:MAX_NUMBERS]


def recorded_step(tree: OptaxTree, values: Mapping[int, float]) -> int | None:
    """The step that the training loop keeps in its state. It need not be the number of the save: some number epochs."""
    for at, value in values.items():
        if tree.root_of[at] is None and tree.paths[at][-1] in STEPS and 0 <= value < MAX_VALUE:
            return int(value)
    return None


def record(
    builder: CatalogBuilder, tree: OptaxTree, values: Mapping[int, float], file: str,
    coordinate: Coordinate = EVERYWHERE,
) -> None:  # fmt: skip
    """Add counters and groups. ``values``: of the leaves that :func:`numbers` names, as far as they could be read."""
    recorded = _Recorded(tree, values)
    for at, value in values.items():
        own, dtype = tree.meanings[at].name, tree.leaves[at].dtype
        for name in recorded.counted_by(at, own):
            builder.scalars.append(Scalar("optimizer_step", value, file, coordinate, name, dtype, recorded.called(at)))
        if tree.paths[at][-1] == "total_notfinite":
            builder.scalars.append(Scalar("skipped_steps", value, file, coordinate))
    number = len(builder.groups)
    for names, settings in recorded.groups():
        builder.groups.append(ParameterGroup(number, file, coordinate, "", settings, names, from_state=True))
        number += 1


class _Recorded:
    """The states of one tree's optimizers."""

    def __init__(self, tree: OptaxTree, values: Mapping[int, float]) -> None:
        self.tree = tree
        self.nodes: dict[Path, dict[Path, None]] = defaultdict(dict)
        """State to the parameters for which it keeps something."""
        for kept in tree.kept.values():
            if kept.parameter in tree.parameters:
                self.nodes[kept.node].setdefault(kept.parameter)
        paths = [path for path, root in zip(tree.paths, tree.root_of, strict=True) if root is not None]
        self.num_optimizers = len({root for root in tree.root_of if root is not None})
        self.anew = {path[:-1] for path in paths if path[-1] == _ANEW}
        self.paced = {path[:-1] for path in paths if path[-1] in _PACE}
        stepped = {path[:-1] for path in paths if path[-1] == "step"}
        self.conditional = stepped & {path[: path.index("inner_state")] for path in paths if "inner_state" in path}
        counts = [path[:-1] for at, path in enumerate(tree.paths) if at in values and path[-1] == "count"]
        self.primary: dict[Path, list[Path]] = defaultdict(list)
        """State to the parameters whose steps it counts: of several that do, the first."""
        counted: set[Path] = set()
        for node in counts:
            self.primary[node] = [path for path in self.nodes.get(node, ()) if path not in counted]
            counted.update(self.primary[node])
        self.settings = self._injected(values)

    def counted_by(self, at: int, own: str) -> list[str]:
        """What a leaf counts the optimizer's steps of: parameters, or itself alone; nothing where it counts others."""
        path, root = self.tree.paths[at], self.tree.root_of[at]
        if root is None or path[-1] != "count" or path[:-1] in self.anew:
            return []
        if any(below(path, node) for node in self.conditional) or not self._at_pace(path, root):
            return []
        return [self.tree.name_of(parameter) for parameter in self.primary[path[:-1]]] or [own]

    def called(self, at: int) -> str:
        """The name of the optimizer whose leaf this is, where there are several."""
        root = self.tree.root_of[at]
        return self.tree.joined(root) if root is not None and self.num_optimizers > 1 else ""

    def _at_pace(self, path: Path, root: Path) -> bool:
        """Whether a count is one of steps that were taken, where some calls of the optimizer take none."""
        paced = [node for node in self.paced if below(node, root)]
        return not paced or any(below(path, node) for node in paced)

    def _injected(self, values: Mapping[int, float]) -> dict[Path, dict[str, Hyperparameter]]:
        """State to the hyperparameters that hold in it and below."""
        found: dict[Path, dict[str, float]] = defaultdict(dict)
        scheduled: dict[Path, set[str]] = defaultdict(set)
        for at, path in enumerate(self.tree.paths):
            if _INJECTED in path[:-1] and at in values:
                found[path[: path.index(_INJECTED)]][path[-1]] = values[at]
            elif _SCHEDULED in path[:-1]:
                where = path.index(_SCHEDULED)
                scheduled[path[:where]].add(path[where + 1])
        return {node: _by_torchs_names(own, scheduled[node]) for node, own in found.items()}

    def groups(self) -> Iterator[tuple[tuple[str, ...], dict[str, Hyperparameter]]]:
        """Parameters that have the same states, with what is recorded of them."""
        states: dict[Path, list[Path]] = defaultdict(list)
        for node, parameters in self.nodes.items():
            for parameter in parameters:
                states[parameter].append(node)
        alike: dict[tuple[Path, ...], list[Path]] = defaultdict(list)
        for parameter, nodes in states.items():
            alike[tuple(nodes)].append(parameter)
        for states_of, members in alike.items():
            settings: dict[str, Hyperparameter] = {}
            for outer in sorted(self.settings, key=len):
                if any(below(node, outer) for node in states_of):
                    settings |= self.settings[outer]
            yield tuple(map(self.tree.name_of, members)), settings


def _by_torchs_names(own: Mapping[str, float], scheduled: set[str]) -> dict[str, Hyperparameter]:
    """Optax's hyperparameters by the names that torch has for them."""
    found: dict[str, Hyperparameter] = {_SETTINGS.get(key, key): value for key, value in own.items()}
    if "b1" in own and "b2" in own:
        found["betas"] = own["b1"], own["b2"]
        found.pop("b1"), found.pop("b2")
    if "learning_rate" in scheduled:
        found["initial_lr"] = None
    return found
