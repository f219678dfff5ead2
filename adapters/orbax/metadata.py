"""What Orbax writes beside the arrays: the tree, how every array lay on the mesh, and in which stripes it was written.

    _METADATA                      the tree: path of keys to what the leaf is
    _sharding                      base64 of an array's name to its mesh and partition spec
    array_metadatas/process_<n>    an array's name to the shape that each replica wrote, and kinds of random keys

An array's name is its path joined with dots, which two paths may share. Source: orbax-checkpoint 0.4 to 0.12,
``_src/metadata``.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.adapter import MAX_RANKS
from auditor.containers.damage import DamagedError
from auditor.containers.json_document import parse_json, read_json
from auditor.containers.zarr_array import MAX_DIMS
from auditor.containers.zarr_codecs import counts
from auditor.storage.store import Handle

_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple", "Empty"})


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """One leaf of the tree."""

    path: tuple[str, ...]
    value_type: str
    """``jax.Array``, ``np.ndarray``, ``scalar``, ``string``; of nodes without leaves their kind."""
    stored: bool = True
    """Whether there is an array of it."""
    folder: str = ""
    """What its array is called on disk, where that is recorded."""

    @property
    def name(self) -> str:
        """What its array is called on disk."""
        return self.folder or ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Tree:
    """``_METADATA``."""

    leaves: tuple[TreeLeaf, ...]
    use_ocdbt: bool | None = None
    """None where it does not say."""
    use_zarr3: bool | None = None


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an array lay on the mesh."""

    axes: tuple[tuple[str, int], ...]
    """Axes of the mesh and their degrees, slowest first."""
    spec: tuple[tuple[str, ...], ...]
    """Per dim the axes that cut it, outermost first; dims at the end may be left out."""


@dataclass(frozen=True, slots=True)
class Written:
    """How an array was written."""

    write_shape: tuple[int, ...] | None
    """Of what one replica wrote."""
    random_key: str = ""
    """Implementation of the random keys that it holds."""


@dataclass(frozen=True, slots=True)
class Shardings:
    """``_sharding``."""

    by_name: Mapping[str, Sharding | None] = field(default_factory=dict)
    """None for an array that one device held whole."""


def read_tree(handle: Handle) -> Tree:
    """Read ``_METADATA``.

    Raises:
        DamagedError: it is no such document.
        StorageError: storage failed.
    """
    document = read_json(handle)
    rows = document.get("tree_metadata") if isinstance(document, dict) else None
    if not isinstance(rows, dict):
        raise DamagedError("it describes no tree")
    stated = [document.get(key) for key in ("use_ocdbt", "use_zarr3")]
    ocdbt, zarr3 = (value if isinstance(value, bool) else None for value in stated)
    return Tree(tuple(_leaf(row) for row in rows.values()), ocdbt, zarr3)


def _leaf(row: Any) -> TreeLeaf:
    keys, value = (
        (row.get(key) for key in ("key_metadata", "value_metadata")) if isinstance(row, dict) else (None, None)
    )
    if not isinstance(keys, list) or not isinstance(value, dict) or not all(isinstance(key, dict) for key in keys):
        raise DamagedError("a leaf of its tree has no path")
    path = tuple(str(key.get("key"))[:4096] for key in keys)
    kind = value.get("value_type")
    name = kind if isinstance(kind, str) else ""
    empty = value.get("skip_deserialize") is True and name in _EMPTY
    return TreeLeaf(path, name, not empty and name != "string")


def _dictionary(handle: Handle) -> dict[str, Any]:
    document = read_json(handle)
    if not isinstance(document, dict):
        raise DamagedError("it is no dictionary")
    return document


def read_shardings(handle: Handle) -> Shardings:
    """Read ``_sharding``; shardings that say nothing of a mesh are left out.

    Raises:
        DamagedError: it is no such document.
        StorageError: storage failed.
    """
    document = _dictionary(handle)
    found: dict[str, Sharding | None] = {}
    parsed: dict[str, tuple[Sharding | None, bool]] = {}
    for key, text in document.items():
        if not isinstance(text, str):
            continue
        if text not in parsed:
            said = parse_json(text.encode("utf-8", "replace"))
            kind = said.get("sharding_type") if isinstance(said, dict) else None
            parsed[text] = _sharding(said), kind == "SingleDeviceSharding"
        sharding, single = parsed[text]
        if sharding is not None or single:
            found[_decoded(key)] = sharding
    return Shardings(found)


def _decoded(key: str) -> str:
    try:
        return b64decode(key, validate=True).decode("utf-8")
    except (binascii.Error, ValueError) as error:
        raise DamagedError("the name of an array in it is not base64") from error


def _sharding(said: Any) -> Sharding | None:
    if not isinstance(said, dict) or said.get("sharding_type") != "NamedSharding":
        return None
    degrees, names, spec = counts(said.get("shape")), said.get("axis_names"), said.get("partition_spec")
    if degrees is None or not isinstance(names, list) or not isinstance(spec, list) or len(spec) > MAX_DIMS:
        return None
    if not all(isinstance(name, str) and name.isidentifier() for name in names):
        return None
    if len(set(names)) != len(names) or len(names) != len(degrees) or not 0 < math.prod(degrees) <= MAX_RANKS:
        return None
    cut = tuple(_axes(entry) for entry in spec)
    used = [axis for axes in cut for axis in axes]
    known = set(used) <= set(names) and len(set(used)) == len(used)
    return Sharding(tuple(zip(names, degrees, strict=True)), cut) if known else None


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes that cut a dim: none, one, or a list, outermost first."""
    if isinstance(entry, list):
        return tuple(str(axis) for axis in entry)
    return (entry,) if isinstance(entry, str) else ()


def read_written(handle: Handle) -> dict[str, Written]:
    """Read one file of ``array_metadatas``.

    Raises:
        DamagedError: it is no such document.
        StorageError: storage failed.
    """
    document = read_json(handle)
    rows = document.get("array_metadatas") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise DamagedError("it describes no arrays")
    return dict(_written(rows))


def _written(rows: list[Any]) -> Iterator[tuple[str, Written]]:
    for row in rows:
        said = row.get("array_metadata") if isinstance(row, dict) else None
        if isinstance(said, dict) and isinstance(said.get("param_name"), str):
            extra = said.get("ext_metadata")
            kind = extra.get("random_key_impl") if isinstance(extra, dict) else None
            yield said["param_name"], Written(counts(said.get("write_shape")), kind if isinstance(kind, str) else "")


def read_step_metadata(handle: Handle) -> bool:
    """Read ``_CHECKPOINT_METADATA``: whether it says when the step was committed.

    Raises:
        DamagedError: it is no such document.
        StorageError: storage failed.
    """
    document = _dictionary(handle)
    return document.get("commit_timestamp_nsecs") is not None
