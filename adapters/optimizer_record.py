"""Puts what one file records of a torch optimizer into the Catalog: parameter groups, counts of steps, loss scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.counters import read_numbers
from auditor.adapters.optimizer_index import IndexedState, is_count, is_setting, settings
from auditor.adapters.schedule_record import schedule_of
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Scalar
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import Hyperparameter, ParameterGroup
from auditor.storage.store import Store

Place = tuple[str, int, str]
"""``state`` or ``group``, the parameter's or group's number, the key."""


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """What one file holds of an optimizer besides moments and masters."""

    file: str
    """Path below the root."""
    coordinate: Coordinate
    state: IndexedState
    parameters: Sequence[tuple[str, ...] | None] = ()
    """Per group, the names of its tensors in the Catalog; None or nothing where they aren't known."""
    counted: Mapping[int, str] = field(default_factory=dict)
    """Parameter number to the name under which the Catalog has the count of its steps."""
    optimizer: str = ""
    otherwise: Mapping[str, Hyperparameter] = field(default_factory=dict)
    """Hyperparameters that are recorded elsewhere in the file, for groups that lack them."""
    num_before: int = 0
    """Groups of other optimizers in the file, with which these are numbered through."""
    of_model: str = ""
    """Which model's it is, where several were saved together: each counts by itself."""
    schedule: Mapping[Any, Any] = field(default_factory=dict)
    """As :func:`~auditor.adapters.schedule_record.schedule_in`."""


def record(builder: CatalogBuilder, store: Store, saved: SavedOptimizer) -> None:
    """Add groups, and a scalar ``optimizer_step`` for each parameter, or for the file where groups alone count.

    Counts that are tensors are read: they are metadata. A group that counts 0 says nothing: some optimizers never
    update the group's own counter.
    """
    numbers = read_numbers(store, saved.file, _single(saved.state))
    steps = {number: saved.state.counts.get(number) for number in saved.counted}
    steps |= {number: value for (what, number, _), value in numbers.items() if what == "state"}
    tensors = {number: kept["step"].dtype for number, kept in saved.state.tensors.items() if "step" in kept}
    for number, value in steps.items():
        if value is not None:
            name, dtype = saved.counted.get(number, ""), tensors.get(number)
            builder.scalars.append(
                Scalar("optimizer_step", value, saved.file, saved.coordinate, name, dtype, saved.of_model)
            )
    groups = [_group(saved, number, numbers) for number in range(len(saved.state.groups))]
    builder.groups.extend(groups)
    own = Counter(group.step for group in groups if group.step)
    if own and not any(value is not None for value in steps.values()):
        value = max(own, key=own.__getitem__)
        builder.scalars.append(Scalar("optimizer_step", value, saved.file, saved.coordinate, optimizer=saved.of_model))


def _single(state: IndexedState) -> dict[Place, StoredTensor]:
    """Counts and hyperparameters that are kept as tensors: those of groups first, they are few."""
    found: dict[Place, StoredTensor] = {}
    for number, group in enumerate(state.groups):
        for key, value in group.items():
            if isinstance(value, StoredTensor) and (key == "step" or is_setting(key)):
                found["group", number, key] = value
    for number, kept in state.tensors.items():
        if "step" in kept:
            found["state", number, "step"] = kept["step"]
    return found


def _group(saved: SavedOptimizer, number: int, numbers: Mapping[Place, float]) -> ParameterGroup:
    group = saved.state.groups[number]
    read = {key: value for (what, at, key), value in numbers.items() if (what, at) == ("group", number)}
    step = read.pop("step", group.get("step"))
    hyperparameters = {**saved.otherwise, **settings(group), **read}
    return ParameterGroup(
        saved.num_before + number, saved.file, saved.coordinate, saved.optimizer, hyperparameters,
        saved.parameters[number] if number < len(saved.parameters) else None,
        float(step) if is_count(step) else None, of_model=saved.of_model,
        schedule=schedule_of(saved.schedule, number, len(saved.state.groups)),
    )  # fmt: skip


def from_args(args: Mapping[str, object]) -> dict[str, Hyperparameter]:
    """Adam's hyperparameters as Megatron's ``args`` record them, by torch's names."""
    first, second, eps = (args.get(key) for key in ("adam_beta1", "adam_beta2", "adam_eps"))
    found: dict[str, Hyperparameter] = {}
    if isinstance(first, float) and isinstance(second, float):
        found["betas"] = first, second
    return found | ({"eps": eps} if isinstance(eps, float) else {})


def record_loss_scale(builder: CatalogBuilder, store: Store, file: str, coordinate: Coordinate, scaler: Any) -> None:
    """Add a scalar ``loss_scale`` where ``scaler`` is the state of a scaler that may skip steps."""
    scale = scaler.get("scale") if isinstance(scaler, dict) else None
    if isinstance(scale, StoredTensor):
        scale = read_numbers(store, file, {"scale": scale}).get("scale")
    if is_count(scale):
        builder.scalars.append(Scalar("loss_scale", float(scale), file, coordinate))
