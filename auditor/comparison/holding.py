"""What one side of a comparison holds of one step: its tensors, and what was measured of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from auditor.ledger.contents import NOTHING, Contents
from auditor.model.catalog import Catalog, Role, Scalar, Tensor
from auditor.model.mesh import NO_MESH, Mesh
from auditor.model.observation import Observations
from auditor.model.optimizer import ParameterGroup, Tie
from auditor.storage.store import Store

Lanes = tuple[int, int]
Key = tuple[Role, str]


@dataclass(frozen=True, slots=True)
class Source:
    """Where elements can be read."""

    store: Store
    catalog: Catalog


@dataclass(frozen=True)
class Holding:
    """One step of one side. From a checkpoint with ``source``; from a ledger without."""

    step: int
    path: str
    format: str
    tensors: tuple[Tensor, ...]
    contents: Contents = NOTHING
    """Of every replica that was read whole."""
    mesh: Mesh = NO_MESH
    groups: tuple[ParameterGroup, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    ties: tuple[Tie, ...] = ()
    source: Source | None = None
    failures: tuple[str, ...] = ()
    """What storage refused, and files that are lost or damaged: of what lies in them nothing is known."""
    changed: tuple[str, ...] = ()
    """Files that changed while they were read."""
    num_bytes_read: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)
    """What a tensor is called here, to what it is called in its own files, where that differs."""

    @cached_property
    def numbers(self) -> dict[Key, int]:
        """Role and name to the tensor's number; the first where several have them."""
        found: dict[Key, int] = {}
        for number, tensor in enumerate(self.tensors):
            found.setdefault((tensor.role, tensor.name), number)
        return found

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """Tensor number to the rows of its contents, the lowest replica first."""
        found: dict[int, list[int]] = {}
        for row in np.lexsort((self.contents.replica, self.contents.tensor)).tolist():
            found.setdefault(int(self.contents.tensor[row]), []).append(row)
        return found

    def lanes(self, row: int) -> Lanes:
        """The tensor digest of one content."""
        totals = self.contents.totals
        return int(totals["lane0"][row]), int(totals["lane1"][row])

    def content(self, number: int) -> tuple[object, ...] | None:
        """By what a tensor is the same as another; None where it was not read."""
        rows, what = self.rows.get(number), self.tensors[number]
        return (what.role, what.dtype, what.shape, self.lanes(rows[0])) if rows else None

    @cached_property
    def alike(self) -> dict[tuple[object, ...], list[int]]:
        """Content to the tensors that hold it."""
        found: dict[tuple[object, ...], list[int]] = {}
        for number in self.rows:
            key = self.content(number)
            if key is not None:
                found.setdefault(key, []).append(number)
        return found

    def distinct(self, number: int) -> list[int]:
        """The rows of the contents of one tensor that differ from each other, the lowest replica's first."""
        found: dict[Lanes, int] = {}
        for row in self.rows.get(number, ()):
            found.setdefault(self.lanes(row), row)
        return list(found.values())

    def size(self, number: int) -> float:
        """Euclidean length of the lowest replica's finite elements; 0 where it was not read."""
        rows = self.rows.get(number)
        return float(np.sqrt(self.contents.totals["sum_squares"][rows[0]])) if rows else 0.0


def names_of(holding: Holding, roles: Sequence[Role]) -> list[str]:
    """Names of the tensors of some roles, in model order."""
    chosen = [tensor for tensor in holding.tensors if tensor.role in roles]
    return list(dict.fromkeys(tensor.name for tensor in sorted(chosen, key=lambda one: one.order)))


def failures_of(catalog: Catalog, observations: Observations) -> tuple[str, ...]:
    """What kept tensors from being read: files that storage refused, that are lost, damaged or broken."""
    files = {number: f"{catalog.files[number].name}: {text}" for number, text in observations.failures.items()}
    for row, text in observations.broken.items():
        number = int(catalog.pieces.file[row])
        files.setdefault(number, f"{catalog.files[number].name}: {text}")
    return tuple(files[number] for number in sorted(files))
