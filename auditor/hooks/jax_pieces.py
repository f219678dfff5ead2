"""What a JAX process holds: the parts of every array of a tree on its own devices, named as Orbax names them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from auditor.model.mesh import Coordinate
from auditor.model.region import Box


@dataclass(frozen=True, slots=True)
class Held:
    """One device's part of an array."""

    key: str
    values: Any
    """On one device."""
    shape: tuple[int, ...]
    box: Box
    place: Coordinate
    """Along the axes on which its replicas lie."""
    stripe: tuple[int, int, int] | None
    """The dim, start and stop, within the part, of what Orbax lets this replica write; None: all, or nothing told."""


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf with its key: the path's parts joined by dots."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield ".".join(_part(entry) for entry in path), leaf


def _part(entry: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def pieces_of(key: str, leaf: Any) -> Iterator[Held]:
    """The parts on this process's devices; nothing of what is no jax.Array."""
    if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return
    shape = tuple(leaf.shape)
    shards = leaf.addressable_shards
    num_replicas = _num_replicas(leaf)
    axes = replicated_axes(leaf.sharding)
    for shard in shards:
        starts = tuple(part.indices(extent)[0] for part, extent in zip(shard.index, shape, strict=True))
        box = Box(starts, tuple(a + n for a, n in zip(starts, shard.data.shape, strict=True)))
        place = _place(leaf.sharding, shard, axes) if num_replicas > 1 else Coordinate()
        yield Held(key, shard.data, shape, box, place, _stripe(box, shard.replica_id, num_replicas))


def _num_replicas(leaf: Any) -> int:
    indices = leaf.sharding.devices_indices_map(leaf.shape).values()
    counts: dict[str, int] = {}
    for index in indices:
        counts[str(index)] = counts.get(str(index), 0) + 1
    return max(counts.values(), default=1)


def replicated_axes(sharding: Any) -> tuple[str, ...]:
    """The named axes of the mesh along which an array is replicated; empty where the sharding names none."""
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return ()
    used = {axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)}
    return tuple(str(axis) for axis, degree in mesh.shape.items() if axis not in used and degree > 1)


def _place(sharding: Any, shard: Any, axes: tuple[str, ...]) -> Coordinate:
    if not axes:
        return Coordinate.of(replica=int(shard.replica_id))
    mesh = sharding.mesh
    where = next(at for at, device in _devices(mesh) if device == shard.device)
    indices = dict(zip(map(str, mesh.axis_names), where, strict=True))
    return Coordinate.of(**{axis: int(indices[axis]) for axis in axes})


def _devices(mesh: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    import numpy as np

    for at in np.ndindex(mesh.devices.shape):
        yield at, mesh.devices[at]


def _stripe(box: Box, replica: int, num_replicas: int) -> tuple[int, int, int] | None:
    """As Orbax cuts a shard: the first dim that the number of replicas divides, one part a replica."""
    if num_replicas < 2 or not box.num_elements:
        return None
    dim = next((at for at, extent in enumerate(box.shape) if extent % num_replicas == 0), None)
    if dim is None:
        return None
    each = box.shape[dim] // num_replicas
    return dim, replica * each, (replica + 1) * each
