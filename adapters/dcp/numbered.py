"""Names for the parameters of an optimizer whose state was saved as torch's own ``state_dict`` has it: by number.

Scripts that don't go through ``get_state_dict`` save ``optimizer.state.<number>.exp_avg``. What the numbers stand for
is told as in files of one rank: by the order of the model, which ``planner_data`` keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from auditor.adapters.dcp.names import Names, is_number, optimizer_key
from auditor.adapters.dcp.objects import gather_groups
from auditor.adapters.dcp.sources import Source, every_key
from auditor.adapters.optimizer_index import (
    Attached,
    IndexedState,
    attach,
    consecutive,
    indexed_state,
    split_by_decay,
    without_frozen,
)
from auditor.containers.dcp_columns import Described
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role, c_strides

_UNREAD = "which parameters the numbers in its optimizer's state stand for could not be read"


def attach_numbers(names: Names, sources: Sequence[Source]) -> None:
    """Tell ``names`` what the numbers of each such optimizer stand for, or why that isn't known."""
    kept: dict[str, dict[int, dict[str, StoredTensor]]] = {}
    others: set[str] = set()
    for key in every_key(sources):
        found = optimizer_key(key)
        if found is None or not found.parameter:
            continue
        if not is_number(found.parameter):
            others.add(found.optimizer)
            continue
        tensor = next((s.index.tensors[key] for s in sources if key in s.index.tensors), None)
        own = kept.setdefault(found.optimizer, {}).setdefault(int(found.parameter), {})
        if tensor is not None and tensor.dtype is not None:
            own[found.entry] = _stored(tensor)
    for optimizer in kept.keys() - others:
        state = next(filter(None, (_state(source, optimizer, kept[optimizer]) for source in sources)), None)
        shapes = _shapes(names, sources)
        orders = [split_by_decay(shapes, state), split_by_decay(shapes, state, _bias)] if state else []
        names.attached[optimizer] = (
            attach(shapes, state, [consecutive(shapes, state), *orders], without_frozen(shapes, state))
            if state
            else Attached({}, (), _UNREAD)
        )


def _bias(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith("bias")


def _stored(tensor: Described) -> StoredTensor:
    assert tensor.dtype is not None
    return StoredTensor(tensor.dtype, tensor.shape, c_strides(tensor.shape), 0, tensor.name)


def _state(
    source: Source, optimizer: str, tensors: Mapping[int, Mapping[str, StoredTensor]]
) -> IndexedState | None:  # fmt: skip
    """An optimizer's state in torch's form, put together from its items."""
    groups = gather_groups(source)
    own = {int(g.label): g.entries for g in groups.values() if g.optimizer == optimizer and is_number(g.label)}
    state: dict[str, Any] = {"param_groups": [own[number] for number in sorted(own)], "state": dict(tensors)}
    return indexed_state(state) if own else None


def _shapes(names: Names, sources: Sequence[Source]) -> dict[str, tuple[int, ...]]:
    """The model's parameters in its own order."""
    found: dict[str, tuple[int, ...]] = {}
    for key in every_key(sources):
        tensor = next((s.index.tensors[key] for s in sources if key in s.index.tensors), None)
        if tensor is not None and optimizer_key(key) is None:
            role, name = names.tensor(key, tensor.dtype, tensor.shape)
            if role is Role.PARAMETER:
                found.setdefault(name, tensor.shape)
    return found
