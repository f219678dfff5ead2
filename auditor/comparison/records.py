"""Numbers that both sides record beside their tensors: rates, betas, counters. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.comparison.holding import Holding

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "maximize", "bias_correction")


def recorded(reference: Holding, candidate: Holding, *, counters: bool) -> tuple[str, ...]:
    """What is recorded otherwise; ``counters``: also counts and other numbers, by name."""
    found = list(_hyperparameters(reference, candidate))
    if counters:
        found += _scalars(reference, candidate)
    return tuple(found)


def _hyperparameters(reference: Holding, candidate: Holding) -> Iterator[str]:
    for name in HYPERPARAMETERS:
        own, theirs = (
            {group.hyperparameters[name] for group in side.groups if name in group.hyperparameters}
            for side in (reference, candidate)
        )
        if own and theirs and own != theirs:
            yield f"{name} {_listed(own)} against {_listed(theirs)}"


def _scalars(reference: Holding, candidate: Holding) -> Iterator[str]:
    sides = []
    for side in (reference, candidate):
        found: dict[str, set[float]] = {}
        for scalar in side.scalars:
            found.setdefault(scalar.name if not scalar.tensor else f"{scalar.name} of {scalar.tensor}", set()).add(
                scalar.value
            )
        sides.append(found)
    own, theirs = sides
    for name in sorted(own.keys() | theirs.keys()):
        if name not in own or name not in theirs:
            yield f"{name} is recorded by the {'reference' if name in own else 'candidate'} alone"
        elif own[name] != theirs[name] and not all(value != value for value in own[name] | theirs[name]):
            yield f"{name} {_listed(own[name])} against {_listed(theirs[name])}"


def _listed(values: object) -> str:
    assert isinstance(values, set)
    named = sorted(map(str, values))
    return ", ".join(named[:4]) + (", …" if len(named) > 4 else "")
