"""Whole modules in torch files: what their ``state_dict`` would hold.

``torch.save(model)`` pickles the object: the name of its class and its attributes, of which three say all that counts.
``_parameters`` and ``_buffers`` name tensors (buffers in ``_non_persistent_buffers_set`` are in no state dict),
``_modules`` the modules inside. The class itself is not needed, and nothing of it is run.
Source: torch ``nn/modules/module.py`` (``Module.state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from auditor.containers.damage import LimitError
from auditor.containers.pickle_machine import Opaque

_KINDS = ("_parameters", "_buffers", "_modules")
_MAX_DEPTH = 100
_MAX_CHARACTERS = 64 << 20
"""Of all names together. A module may lie in several others: a short pickle could ask for names without end."""


def with_state_dicts(tree: Any) -> Any:
    """A saved object, with a state dict for each module that it is or has at its top level.

    Raises:
        LimitError: modules are nested deeper than real ones, or have more names.
    """
    if isinstance(tree, dict):
        return {key: _state_dict(value) for key, value in tree.items()} if any(map(_is_module, tree.values())) else tree
    return _state_dict(tree)


def _is_module(value: object) -> bool:
    state = value.state if isinstance(value, Opaque) else None
    return isinstance(state, dict) and all(isinstance(state.get(kind), dict) for kind in _KINDS)


def _state_dict(value: Any) -> Any:
    """Names to values, in the order of ``Module.state_dict``; what is no module as it is."""
    if not _is_module(value):
        return value
    found: dict[str, object] = {}
    num_characters, inside = 0, [("", value.state, 0)]
    while inside:
        prefix, state, depth = inside.pop()
        own, buffers, children = (_named(state[kind]) for kind in _KINDS)
        own |= {name: buffers[name] for name in buffers if name not in _passing(state)}
        num_characters += sum(len(state[kind]) + 1 for kind in _KINDS)
        num_characters += sum(len(prefix) + len(name) for names in (own, children) for name in names)
        if depth > _MAX_DEPTH or num_characters > _MAX_CHARACTERS:
            raise LimitError("its modules lie inside each other without end")
        found |= {f"{prefix}{name}": tensor for name, tensor in own.items() if tensor is not None}
        nested = [(f"{prefix}{name}.", child.state, depth + 1) for name, child in children.items() if _is_module(child)]
        inside += reversed(nested)
    return found


def _passing(state: Mapping[Any, Any]) -> frozenset[Any] | set[Any]:
    """Buffers that no state dict has."""
    named = state.get("_non_persistent_buffers_set")
    return named if isinstance(named, set) else frozenset()


def _named(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(key, str)}
