"""The aggregate file of older writers: ``checkpoint``, a msgpack map of the whole state beside a folder an array.

    {"params": {"bias": "PLACEHOLDER://params.bias"}, "step": 3}   Orbax before 0.6; small arrays may lie in the file
    {"version": 3, "optimizer": {"target": …, "state": …}}           t5x; an array apart is a TensorStore spec

Sources: orbax-checkpoint 0.2 ``pytree_checkpoint_handler.py``; t5x ``checkpoints.py``, ``state_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from auditor.adapters.optax.paths import Path
from auditor.adapters.orbax.arrays import Chunk, StoredArray
from auditor.containers.flax_msgpack import read_flax
from auditor.containers.state_array import Plain, StateArray
from auditor.containers.zarr_array import ZarrArray
from auditor.storage.store import Handle

_PLACEHOLDER = "PLACEHOLDER://"


@dataclass(frozen=True, slots=True)
class LegacyLeaf:
    """One leaf of the state."""

    path: Path
    name: str = ""
    """Folder of its array, where it is apart."""
    held: StateArray | None = None
    """The array that the file itself holds."""
    value: float | None = None
    """The number that it is."""


def read_legacy(handle: Handle) -> list[LegacyLeaf]:
    """Read the file without the weights in it; leaves that are neither arrays nor numbers are left out.

    Raises:
        DamagedError: it is no msgpack map, or contradicts itself.
        LimitError: it asks for more than an honest one needs.
        StorageError: storage failed.
    """
    tree = dict(read_flax(handle).tree)
    if "optimizer" in tree:
        tree.pop("version", None)
    return list(_leaves(tree, ()))


def _leaves(tree: Mapping[str, Any], path: Path) -> Iterator[LegacyLeaf]:
    for key, node in tree.items():
        here = (*path, key)
        if isinstance(node, dict):
            apart = _apart(node)
            if apart:
                yield LegacyLeaf(here, apart)
            else:
                yield from _leaves(node, here)
        elif isinstance(node, StateArray):
            yield LegacyLeaf(here, held=node)
        elif isinstance(node, Plain) and isinstance(node.value, str):
            if node.value.startswith(_PLACEHOLDER):
                yield LegacyLeaf(here, node.value.removeprefix(_PLACEHOLDER))
        elif isinstance(node, Plain) and node.value is not None:
            yield LegacyLeaf(here, value=float(node.value))


def _apart(node: Mapping[str, Any]) -> str:
    """The folder that a TensorStore spec names; empty where it is none. Whatever leads to the folder is left out."""
    driver, place = node.get("driver"), node.get("kvstore")
    path = place.get("path") if isinstance(place, dict) else None
    if not isinstance(driver, Plain) or not isinstance(path, Plain) or not isinstance(path.value, str):
        return ""
    return path.value.rstrip("/").rpartition("/")[2]


def held_array(leaf: LegacyLeaf, file: str) -> StoredArray | None:
    """An array that the file itself holds as one of one chunk; None where it isn't held or is cut into parts."""
    held = leaf.held
    if held is None or held.dtype is None or len(held.stretches) != 1:
        return None
    array = ZarrArray({}, held.shape, tuple(max(1, n) for n in held.shape), held.dtype.name)
    (stretch,) = held.stretches
    chunks = {(0,) * len(held.shape): Chunk(file, stretch.offset, stretch.num_bytes)} if array.num_chunks else {}
    return StoredArray(".".join(leaf.path), file, array, chunks=chunks)
