"""In which order adapted modules lie in their layer, told by the shapes of the optimizer's state. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from auditor.adapters.optimizer_index import IndexedState, Order, Shapes

_LAYER = re.compile(r"\.([0-9]{1,6})\.")
_PARTS = ("lora_A", "lora_B")
_Pair = tuple[tuple[int, ...], tuple[int, ...]]


def by_layers(shapes: Shapes, state: IndexedState) -> Order | None:
    """The order of an adapter's parameters, layer by layer; None where shapes leave it open.

    PEFT hands over a module's two factors one after the other, and layers in the model's order; files keep names by the
    alphabet. Inside a layer a module is known by the shapes of its factors where no other has the same.
    """
    numbers = [number for of_group in state.numbers for number in of_group]
    if len(numbers) != len(shapes) or len([group for group in state.numbers if group]) != 1:
        return None
    found, at, layers = list[str](), 0, _layers(shapes)
    for modules in layers.values():
        pairs = {pair: module for module, pair in modules.items()}
        if len(pairs) < len(modules):
            return None
        for _ in modules:
            first, second = (_shape(state, number) for number in numbers[at : at + 2])
            module = pairs.pop((first, second), None)
            if module is None:
                return None
            found += [module.replace("*", part) for part in _PARTS]
            at += 2
    if not layers:
        return None
    names = iter(found)
    return tuple(tuple(next(names) for _ in of_group) for of_group in state.numbers)


def _layers(shapes: Shapes) -> Mapping[str, dict[str, _Pair]]:
    """By layer, in order, modules (their names with a star for the factor) and the shapes of both; empty for others."""
    found: dict[str, dict[str, _Pair]] = {}
    for name in shapes:
        if _PARTS[0] in name:
            other = name.replace(*_PARTS)
            place = _LAYER.search(name)
            if other not in shapes or place is None:
                return {}
            found.setdefault(place[1], {})[name.replace(_PARTS[0], "*")] = shapes[name], shapes[other]
    whole = 2 * sum(map(len, found.values())) == len(shapes)
    return {number: found[number] for number in sorted(found, key=int)} if whole else {}


def _shape(state: IndexedState, number: int) -> tuple[int, ...]:
    kept = state.tensors.get(number, {})
    return kept["exp_avg"].shape if "exp_avg" in kept else ()
