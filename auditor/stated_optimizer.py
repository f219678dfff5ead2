"""What the configuration says of an optimizer whose checkpoints don't: optax keeps moments and a count, no settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from auditor.errors import UsageError
from auditor.model.catalog import Catalog
from auditor.model.optimizer import Hyperparameter, ParameterGroup

_NUMBERS = ("lr", "max_lr", "eps", "weight_decay")
KEYS = ("class", "betas", *_NUMBERS)


def stated_optimizer(configuration: Mapping[str, Any]) -> ParameterGroup | None:
    """``[optimizer]``: ``class``, ``betas``, ``lr`` (constant) or ``max_lr`` (a schedule's largest), ``eps``, ...

    Raises:
        UsageError: an unknown key, or a value that none can have.
    """
    table = configuration.get("optimizer")
    if table is None:
        return None
    if not isinstance(table, dict) or set(table) - set(KEYS):
        raise UsageError(f"[optimizer] holds {', '.join(KEYS)}")
    found: dict[str, Hyperparameter] = {}
    if "betas" in table:
        pair = table["betas"]
        if not isinstance(pair, list) or len(pair) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in pair):
            raise UsageError("[optimizer] betas are two numbers from 0 to below 1: [0.9, 0.999]")
        found["betas"] = (float(pair[0]), float(pair[1]))
    for key in _NUMBERS:
        if key in table:
            if not _is_number(table[key]) or table[key] < 0:
                raise UsageError(f"[optimizer] {key} = {table[key]}: no number from 0 on")
            found[key] = float(table[key])
    return ParameterGroup(0, "", optimizer=str(table.get("class", "")).lower(), hyperparameters=found)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def with_stated(catalog: Catalog, stated: ParameterGroup | None) -> Catalog:
    """The Catalog with what the user says of its optimizer, where it records no betas; what it records counts more."""
    if stated is None or any("betas" in group.hyperparameters for group in catalog.groups):
        return catalog
    groups = catalog.groups or (ParameterGroup(0, catalog.path),)
    return replace(catalog, groups=tuple(_filled(group, stated) for group in groups))


def _filled(group: ParameterGroup, stated: ParameterGroup) -> ParameterGroup:
    hyperparameters = {**stated.hyperparameters, **group.hyperparameters}
    # A transformation's name (scale_by_adam) tells what is kept, not which step is made of it.
    return replace(group, optimizer=stated.optimizer or group.optimizer, hyperparameters=hyperparameters)
