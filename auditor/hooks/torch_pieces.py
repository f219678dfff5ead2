"""What a torch rank holds: the pieces of a state dict, under the names that its writer stores them by.

torch is imported when this module is: only hooks import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from auditor.model.dtype import DTYPES, DType
from auditor.model.mesh import Coordinate
from auditor.model.region import Box


@dataclass(frozen=True, slots=True)
class Held:
    """One piece that this rank holds."""

    key: str
    values: torch.Tensor
    """The local part."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    place: Coordinate
    """Along the axes on which its replicas lie."""


def resolved(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with what its Stateful members give in their place."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as torch.distributed.checkpoint flattens it: keys joined by dots."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return dict(flatten_state_dict(dict(state))[0])


def dtype_of(values: torch.Tensor) -> DType | None:
    """The dtype of a tensor, None where there are no kernels for it."""
    dtype = DTYPES.get(str(values.dtype).removeprefix("torch."))
    return dtype if dtype is not None and dtype.bits >= 8 else None


def pieces_of(key: str, value: Any, plain: Coordinate) -> Iterator[Held]:
    """What this rank holds of one entry of a state dict; nothing of what is no tensor.

    ``plain``: the place of tensors that are whole on every rank.
    """
    if _is_dtensor(value):
        yield from _of_dtensor(key, value)
    elif hasattr(value, "local_shards"):
        for shard in value.local_shards():
            start, extent = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            box = Box(tuple(start), tuple(a + n for a, n in zip(start, extent, strict=True)))
            yield Held(key, shard.tensor, tuple(value.size()), box, Coordinate())
    elif isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        yield Held(key, value, shape, Box((0,) * len(shape), shape), plain)


def pieces_of_optimizer(optimizer: Any, plain: Coordinate) -> Iterator[Held]:
    """What an optimizer keeps, by the keys of its state dict, which numbers parameters: ``state.3.exp_avg``.

    ``optimizer``: a torch optimizer, or what wraps one. No state dict is made: some gather it from all ranks.
    """
    own = getattr(optimizer, "optimizer", optimizer)
    parameters = [parameter for group in own.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in own.state.get(parameter, {}).items():
            yield from pieces_of(f"state.{number}.{key}", value, plain)


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def _of_dtensor(key: str, value: Any) -> Iterator[Held]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    here = value.device_mesh.get_coordinate()
    if here is None or any(placement.is_partial() for placement in value.placements):
        return
    shape = tuple(value.shape)
    extent, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    start = tuple(min(at, size) for at, size in zip(start, shape, strict=True))
    box = Box(start, tuple(a + n for a, n in zip(start, extent, strict=True)))
    names = axis_names(value.device_mesh)
    replicated = [at for at, placement in enumerate(value.placements) if placement.is_replicate()]
    place = {names[at]: int(here[at]) for at in replicated} | _outside(value.device_mesh)
    yield Held(key, value.to_local(), shape, box, Coordinate.of(**place))


def axis_names(mesh: Any) -> tuple[str, ...]:
    """The names of a DeviceMesh's axes."""
    return tuple(mesh.mesh_dim_names or (f"axis{number}" for number in range(mesh.ndim)))


def _outside(mesh: Any) -> dict[str, int]:
    """This rank's indices along the axes that the mesh was taken out of: tensors on it are whole along them."""
    root = getattr(mesh, "_get_root_mesh", lambda: None)()
    if root is None or root is mesh or root.mesh_dim_names is None or root.get_coordinate() is None:
        return {}
    inside = set(axis_names(mesh))
    return {
        name: int(index)
        for name, index in zip(root.mesh_dim_names, root.get_coordinate(), strict=True)
        if name not in inside and not any(name in own.split("_") for own in inside)
    }
