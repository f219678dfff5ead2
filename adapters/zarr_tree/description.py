"""What an export says of its source in the attributes of ``steps/<n>/catalog``, taken with care: all of it is optional.

Entries that are not what the layout page says are left out: they describe, they decide nothing about what is stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from auditor.adapters.adapter import MAX_RANKS
from auditor.containers.zarr_array import MAX_DIMS, MAX_EXTENT
from auditor.model.catalog import File, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import APART, DTYPES, DType
from auditor.model.mesh import Coordinate, Mesh, Replicate, Shard
from auditor.model.optimizer import Hyperparameter, ParameterGroup, Tie

_NUMBERS = {"NaN", "Infinity", "-Infinity"}
_AXES = 16
_MAX_GLOBS = 1000
AXIS = re.compile(r"[a-z][a-z0-9_]{0,31}", re.A)
"""What a mesh axis may be called."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A tensor that must be there."""

    name: str
    role: Role
    dtype: DType
    shape: tuple[int, ...]
    order: int
    replicas: tuple[Coordinate, ...] = ()


def count(value: Any, below: int = 1 << 62) -> int | None:
    """A number of things; not a truth value, which is an integer too."""
    return value if type(value) is int and 0 <= value < below else None


def coordinate(value: Any) -> Coordinate | None:
    """A coordinate written as axis to index."""
    if not isinstance(value, dict) or len(value) > _AXES:
        return None
    good = all(AXIS.fullmatch(axis) and count(n, MAX_RANKS) is not None for axis, n in value.items())
    return Coordinate.of(**value) if good else None


def mesh(attributes: Mapping[str, Any]) -> Mesh | None:
    """The mesh of a step; None where it states none that can be."""
    stated = attributes.get("mesh")
    if not isinstance(stated, dict) or len(stated) > _AXES:
        return None
    if not all(AXIS.fullmatch(axis) and count(n, MAX_RANKS + 1) for axis, n in stated.items()):
        return None
    order = words(attributes.get("rank_order"))
    ordered = sorted(order) == sorted(stated) and bool(order)
    found = Mesh(tuple((axis, stated[axis]) for axis in (order if ordered else stated)), ordered=ordered)
    return found if found.num_ranks <= MAX_RANKS else None


def placement(value: Any) -> dict[str, Shard | Replicate]:
    """How a tensor lies on the mesh: axis to ``replicate`` or ``shard:<dim>``."""
    found: dict[str, Shard | Replicate] = {}
    for axis, how in value.items() if isinstance(value, dict) else ():
        kind, _, dim = how.partition(":") if isinstance(how, str) else ("", "", "")
        if how == "replicate":
            found[axis] = Replicate()
        elif kind == "shard" and dim.isascii() and dim.isdigit() and len(dim) < 3:
            found[axis] = Shard(int(dim))
    return found


def words(value: Any) -> tuple[str, ...]:
    """A list of strings."""
    good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return tuple(value) if good else ()


def globs(said: Mapping[str, Any]) -> tuple[str, ...]:
    """Which tensors of its source a step holds: globs over their names; all where it says nothing."""
    return words(said.get("tensors"))[:_MAX_GLOBS] or ("*",)


class Description:
    """The entries of one step. ``path``: the step's folder, in which source files are called by their names."""

    def __init__(self, said: Mapping[str, Any], path: Callable[[str], str]) -> None:
        self.said, self.path = said, path

    def _entries(self, key: str, *texts: str) -> Iterator[dict[str, Any]]:
        """The entries of a list that are dictionaries in which ``texts`` are strings."""
        rows = self.said.get(key)
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and all(isinstance(row.get(text), str) for text in texts):
                yield row

    def tensors(self) -> list[Listed | None]:
        """What must be there, by position in the list; None for an entry that says nothing."""
        rows, replicas = self.said.get("tensors"), self.said.get("replicas")
        if not isinstance(rows, list):
            return []
        stated = replicas if isinstance(replicas, list) and len(replicas) == len(rows) else [None] * len(rows)
        return [_listed(row, places(where)) for row, where in zip(rows, stated, strict=True)]

    def lost_files(self) -> Iterator[File]:
        """Source files that could not be had when the step was exported."""
        states = {state.value: state for state in FileState}
        rows = self.said.get("files")
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, list) or len(row) != 5 or not all(isinstance(row[at], str) for at in (0, 2, 4)):
                continue
            state = states.get(row[2], FileState.PRESENT)
            if state is not FileState.PRESENT:
                told = f"{row[4] or row[2]} (in the checkpoint that was exported)"
                yield File(self.path(row[0]), 0, "", state, _place(row[3]), told)

    def scalars(self) -> Iterator[Scalar]:
        """Numbers that the source's files record."""
        for row in self._entries("scalars", "name", "file"):
            value = _number(row.get("value"))
            if isinstance(value, (int, float)):
                tensor, dtype, optimizer = row.get("tensor"), row.get("dtype"), row.get("optimizer")
                yield Scalar(
                    row["name"], float(value), self.path(row["file"]), _place(row.get("coordinate")),
                    tensor if isinstance(tensor, str) else "", DTYPES.get(dtype) if isinstance(dtype, str) else None,
                    optimizer if isinstance(optimizer, str) else "",
                )  # fmt: skip

    def problems(self) -> Iterator[Problem]:
        """What the source's adapter found wrong."""
        kinds = {kind.name.lower(): kind for kind in ProblemKind}
        for row in self._entries("problems", "kind", "message", "file", "tensor"):
            order = row.get("order")
            if row["kind"] in kinds:
                yield Problem(
                    kinds[row["kind"]], self.path(row["file"]), row["message"], _place(row.get("coordinate")),
                    row["tensor"], order if type(order) is int else -1, row.get("ignored") is True,
                )  # fmt: skip

    def groups(self, chosen: Callable[[str], bool]) -> Iterator[ParameterGroup]:
        """The optimizer's parameter groups, with those of their parameters that are ``chosen``."""
        for row in self._entries("groups", "file", "optimizer"):
            number, stated, step = count(row.get("number")), row.get("hyperparameters"), _number(row.get("step"))
            values = {name: _number(value) for name, value in stated.items()} if isinstance(stated, dict) else {}
            names = row.get("parameters")
            if number is None:
                continue
            yield ParameterGroup(
                number, self.path(row["file"]), _place(row.get("coordinate")), row["optimizer"],
                {name: value for name, value in values.items() if _is_hyperparameter(value)},
                None if names is None else tuple(filter(chosen, words(names))),
                float(step) if isinstance(step, (int, float)) and not isinstance(step, bool) else None,
                row.get("from_state") is True,
                of if isinstance(of := row.get("of_model"), str) else "",
            )  # fmt: skip

    def ties(self, chosen: Callable[[str], bool]) -> Iterator[Tie]:
        """Parameters that are said to be tied and are all ``chosen``."""
        for row in self._entries("ties", "source"):
            names = words(row.get("names"))
            if len(names) > 1 and all(map(chosen, names)):
                yield Tie(names, row["source"])

    def not_implied(self) -> str | None:
        """As the Catalog's field."""
        value = self.said.get("not_implied")
        return value if isinstance(value, str) else None


def _listed(row: Any, replicas: tuple[Coordinate, ...]) -> Listed | None:
    kinds = (str, str, str, list, int)
    if not isinstance(row, list) or len(row) != len(kinds) or not all(map(isinstance, row, kinds)):
        return None
    role = next((role for role in Role if role.value == row[1]), None)
    shape = tuple(n for n in row[3] if count(n) is not None)
    if role is None or row[2] not in DTYPES or len(shape) != len(row[3]) or len(shape) > MAX_DIMS:
        return None
    if math.prod(filter(None, shape)) > MAX_EXTENT:
        return None
    return Listed(row[0], role, APART[row[2]], shape, row[4], replicas)


def places(value: Any) -> tuple[Coordinate, ...]:
    """A list of coordinates, each once; none where it is no such list."""
    found = [coordinate(item) for item in value] if isinstance(value, list) and len(value) <= MAX_RANKS else []
    good = tuple(dict.fromkeys(place for place in found if place is not None))
    return good if len(good) == len(found) else ()


def _place(value: Any) -> Coordinate:
    return coordinate(value) or Coordinate()


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_number, value))
    return float(value) if isinstance(value, str) and value in _NUMBERS else value


def _is_hyperparameter(value: Hyperparameter | Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, (int, float)) for item in value)
    return value is None or isinstance(value, (int, float, bool, str))
