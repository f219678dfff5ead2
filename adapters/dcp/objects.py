"""What a checkpoint by ``torch.distributed.checkpoint`` stores besides weights: parameter groups, counts of steps.

Every entry of a parameter group is an object of its own, under ``…param_groups.<i>.<entry>``; where the optimizer's
state was flattened, under ``…param_groups.<parameter>.<entry>``, once for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.counters import MAX_VALUE
from auditor.adapters.dcp.data import Expected, item_of
from auditor.adapters.dcp.names import STEPS, Names, OptimizerKey, is_number, optimizer_key
from auditor.adapters.dcp.sources import Source, coordinate_of
from auditor.adapters.optimizer_index import is_count, settings
from auditor.containers.dcp_items import SMALL_ITEM, Found, read_items
from auditor.model.catalog import Scalar
from auditor.model.optimizer import Hyperparameter, ParameterGroup
from auditor.storage.store import StorageError, Store, base_name

MAX_GROUPS = 1 << 16


@dataclass(slots=True)
class Group:
    """One parameter group, or one parameter's part of it."""

    optimizer: str
    label: str
    entries: dict[str, Any] = field(default_factory=dict)


def record_objects(builder: CatalogBuilder, names: Names, source: Source, step: int) -> None:
    """Add the groups and counters that one index leads to."""
    for key, row in _first_rows(source):
        value = source.contents.values.get(row)
        kept = optimizer_key(key)
        if kept is not None and not kept.group and kept.entry == "step" and is_count(value):
            _add_step(builder, names, source, row, kept)
        elif kept is None and key in STEPS and is_count(value) and abs(value - step) != 1:
            # Loops that count from 0 save the number of the step that they have done less one.
            builder.scalars.append(_scalar("global_steps", float(value), source, row))
    builder.groups.extend(_groups(names, source, gather_groups(source)))


def gather_groups(source: Source) -> dict[tuple[str, str], Group]:
    """Parameter groups by optimizer and number, or by optimizer and parameter."""
    groups: dict[tuple[str, str], Group] = {}
    for key, row in _first_rows(source):
        kept = optimizer_key(key)
        if kept is not None and kept.group and len(groups) < MAX_GROUPS:
            own = groups.setdefault((kept.optimizer, kept.group), Group(kept.optimizer, kept.group))
            own.entries[kept.entry] = source.contents.values[row]
    return groups


def recorded_step(store: Store, source: Source) -> int | None:
    """The step that was saved with the model, where one was; only its own item is read."""
    for key in STEPS:
        for row in source.rows.get(key, ())[:1]:
            file = source.file_of(row)
            item = item_of(Expected(source.index), row)
            item = replace(item, length=min(item.length, SMALL_ITEM), num_weight_bytes=0)
            try:
                with store.open(file) as handle:
                    found = next(read_items(handle, [item]))
            except StorageError:
                continue
            value = found.number if isinstance(found, Found) and found.number is not None else None
            if value is None and isinstance(found, Found):
                value = found.content if is_count(found.content) else None
            if value is not None and 0 <= value < MAX_VALUE:
                return int(value)
    return None


def _first_rows(source: Source) -> Iterator[tuple[str, int]]:
    """Every key of something that was read as metadata, with its first item."""
    return ((key, rows[0]) for key, rows in source.rows.items() if rows[0] in source.contents.values)


def _scalar(name: str, value: float, source: Source, row: int, tensor: str = "") -> Scalar:
    file = source.file_of(row)
    return Scalar(name, value, file, coordinate_of(base_name(file)), tensor, source.contents.dtypes.get(row))


def _add_step(builder: CatalogBuilder, names: Names, source: Source, row: int, kept: OptimizerKey) -> None:
    value = float(source.contents.values[row])
    name = names.parameter(kept.optimizer, kept.parameter) or f"{kept.optimizer}.state.{kept.parameter}"
    builder.scalars.append(_scalar("optimizer_step", value, source, row, name))


def _members(names: Names, group: Group) -> tuple[str, ...] | None:
    """The parameters that were handed to a group, as far as they are known; None where none is."""
    members = group.entries.get("params")
    if not isinstance(members, list) or not all(type(member) in (str, int) for member in members):
        return None
    numbered = group.optimizer in names.attached
    if any((type(member) is int) is not numbered for member in members):
        return None
    known = [names.parameter(group.optimizer, str(member)) for member in members]
    return tuple(name for name in known if name is not None) or (None if known else ())


def _groups(names: Names, source: Source, found: Mapping[tuple[str, str], Group]) -> Iterator[ParameterGroup]:
    """Parameter groups; those of single parameters with the same settings are one."""
    numbered = [group for group in found.values() if is_number(group.label)]
    for number, group in enumerate(sorted(numbered, key=lambda group: (group.optimizer, int(group.label)))):
        step = group.entries.get("step")
        yield ParameterGroup(
            number, source.path, source.coordinate, "", settings(group.entries), _members(names, group),
            float(step) if is_count(step) else None,
        )  # fmt: skip
    alike: dict[tuple[str, tuple[tuple[str, Hyperparameter], ...]], list[str]] = {}
    for group in found.values():
        if not is_number(group.label):
            own = tuple(sorted(settings(group.entries).items()))
            alike.setdefault((group.optimizer, own), []).append(
                names.parameter(group.optimizer, group.label) or group.label
            )
    for number, ((_, own), members) in enumerate(alike.items(), len(numbered)):
        yield ParameterGroup(number, source.path, source.coordinate, "", dict(own), tuple(members))
