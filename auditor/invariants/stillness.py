"""Which stored parts of trained tensors have the bits of the save before, and which of them must have moved.

A first moment is multiplied by its decay rate at every step and gets (1 - b1) times a gradient added. An element that
isn't zero thus keeps its bits only if that gradient is the moment itself, to its last bit. In 8 or more elements at
once that does not happen: a part of a first moment with the bits of the save before was not stepped, whatever the
gradients were. The same holds for the momentum buffer of SGD. Second moments say less: in bfloat16 they don't decay.

A weight is known to move where the last step that its own moments tell of is well above its rounding
(:class:`~auditor.invariants.motion_expected.ExpectedMotion`), or where it is a part of float32 of a tensor whose other
parts did. A file of low-precision weights whose masters moved is judged as a whole: its weights are stale if none of
them moved and all those in other files did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.motion_expected import ExpectedMotion
from auditor.invariants.neighbours import TRAINED, Key, Neighbours
from auditor.invariants.optimizer_state import plain
from auditor.invariants.recorded import RecordedGroups, next_rates, number, why_no_rate
from auditor.model.catalog import Catalog, Role
from auditor.model.dtype import Kind
from auditor.model.optimizer import ParameterGroup

FEWEST = 8
"""Elements that aren't zero: of fewer, equal bits say little."""
_FEWEST_WEIGHTS = 64
_FEWEST_ROUNDED = 512
"""Low-precision weights in one file: so many don't all round to what they were while those of other files don't."""
_VANISHING = 1e-30
"""Moments below it may be flushed to zero or stand still in the smallest numbers of float32."""


def decays(role: Role, name: str) -> bool:
    """Whether a tensor is an average that every step changes."""
    return role is Role.FIRST_MOMENT or (role is Role.MOMENT and name.endswith("momentum_buffer"))


@dataclass(frozen=True, slots=True)
class Part:
    """A piece that must have other bits than in the save before."""

    row: int
    key: Key
    file: int
    still: bool


class Stillness:
    """What moved between two saves and what didn't."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self._expected = ExpectedMotion(neighbours.after)
        self._groups = [RecordedGroups(side.catalog) for side in (neighbours.before, neighbours.after)]

    @cached_property
    def _compared(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Rows of the save that were held against the one before, and whether they have its bits."""
        old, new = self.neighbours.pieces
        one, other = self.neighbours.before.observations.pieces[old], self.neighbours.after.observations.pieces[new]
        return new, (one["lane0"] == other["lane0"]) & (one["lane1"] == other["lane1"])

    @cached_property
    def still_rows(self) -> frozenset[int]:
        """Rows of the save that have the bits of the one before."""
        rows, still = self._compared
        return frozenset(rows[still].tolist())

    @cached_property
    def _by_tensor(self) -> Mapping[int, tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Tensor number to its rows that were compared, and whether each is still."""
        rows, still = self._compared
        tensors = self.neighbours.after.catalog.pieces.tensor[rows]
        order = np.argsort(tensors, kind="stable")
        cuts = np.flatnonzero(np.diff(tensors[order])) + 1
        return {
            int(tensors[part[0]]): (rows[part], still[part]) for part in np.split(order, cuts) if len(part)
        }  # fmt: skip

    def stepped(self, key: Key) -> bool | None:
        """Whether the optimizer took a step for a tensor since; None where nothing tells."""
        updates = self.neighbours.counted.of(key[1])
        if updates is not None:
            return updates.fewest >= 1
        return None

    @cached_property
    def moments(self) -> list[Part]:
        """Pieces of first moments that must have changed: their tensor was stepped, as they or its count tell."""
        found: list[Part] = []
        for key, (_, number_of) in self.neighbours.shared.items():
            if decays(*key) and number_of in self._by_tensor and key[1] not in self.neighbours.doubted:
                rows, still = self._by_tensor[number_of]
                chosen = self._alive(rows)
                rows, still = rows[chosen], still[chosen]
                if len(rows) and (self.stepped(key) or not still.all()):
                    found += self._parts(key, rows, still)
        return found

    def _alive(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        catalog, seen = self.neighbours.after.catalog, self.neighbours.after.observations.pieces[rows]
        nonzero = catalog.pieces.num_elements()[rows] - seen["num_zero"]
        largest = np.maximum(np.abs(seen["minimum"]), np.abs(seen["maximum"]))
        odd = (seen["num_nan"] > 0) | (seen["num_infinite"] > 0)
        alive: NDArray[np.bool_] = (nonzero >= FEWEST) & (largest > _VANISHING) & ~odd
        return alive

    def _parts(self, key: Key, rows: NDArray[np.int64], still: NDArray[np.bool_]) -> list[Part]:
        files = self.neighbours.after.catalog.pieces.file[rows]
        return [
            Part(row, key, file, at_rest)
            for row, file, at_rest in zip(rows.tolist(), files.tolist(), still.tolist(), strict=True)
        ]

    @cached_property
    def carriers(self) -> dict[str, Key]:
        """Name of every trained parameter to the tensor that its motion is judged by: its master where it has one."""
        found: dict[str, Key] = {}
        for role in TRAINED:
            for key in self.neighbours.shared:
                dtype = self.neighbours.after.catalog.tensors[self.neighbours.shared[key][1]].dtype
                if key[0] is role and plain(key[1]) in self.neighbours.trained and dtype.kind is Kind.FLOAT:
                    found.setdefault(key[1], key)
        return found

    @cached_property
    def whole_still(self) -> dict[str, bool]:
        """Name of every trained parameter that was read whole in both saves to whether it has the same bits."""
        return {
            name: self.neighbours.seen[key][0].lanes == self.neighbours.seen[key][1].lanes
            for name, key in self.carriers.items()
            if key in self.neighbours.seen
        }

    def why_unmoved(self, name: str) -> str:
        """Why a trained parameter may have the bits of the save before; empty where it must have moved."""
        key = self.carriers[name]
        first = self.neighbours.seen.get((Role.FIRST_MOMENT, name))
        if first is None:
            return "no first moment of it was read in both saves, which would tell whether it was stepped"
        if first[0].lanes == first[1].lanes:
            return "its first moment stands still as well: it is frozen, got no gradient, or no step was taken"
        if reason := why_no_rate(self._stepped_by(name)):
            return reason
        dtype = self.neighbours.after.catalog.tensors[self.neighbours.shared[key][1]].dtype
        return self._expected.why_unmoved_at(min(self.rates(name)), name, self.neighbours.seen[key][1], dtype)

    def _stepped_by(self, name: str) -> list[ParameterGroup]:
        """The groups whose rates tell of steps between the saves.

        Those of the save before alone where its rate is that of the step after it, which may have been the largest: at
        the end of a schedule it is zero.
        """
        sides = self._groups[:1] if next_rates(self.neighbours.before.catalog) else self._groups
        return [group for side in sides for group in side.of(name)]

    def rates(self, name: str) -> list[float]:
        """The learning rates that they record for a parameter; 0 where one records none."""
        rates = [number(group.hyperparameters.get("lr")) for group in self._stepped_by(name)]
        return [rate or 0.0 for rate in rates] or [0.0]

    def group_moved(self, name: str) -> bool:
        """Whether another parameter of the same group has other bits than before: its learning rate wasn't zero."""
        mine = self._groups[1].of(name)
        others = (other for other, still in self.whole_still.items() if not still and other != name)
        return any(self._groups[1].of(other) == mine for other in others)

    @cached_property
    def weights(self) -> list[Part]:
        """Pieces of weights that must have changed."""
        found: list[Part] = []
        catalog = self.neighbours.after.catalog
        for name, key in self.carriers.items():
            number_of = self.neighbours.shared[key][1]
            if number_of not in self._by_tensor or name in self.neighbours.doubted:
                continue
            rows, still = self._by_tensor[number_of]
            if self.whole_still.get(name):
                if not self.why_unmoved(name) and self.group_moved(name):
                    found += self._parts(key, rows, still)
            elif catalog.tensors[number_of].dtype.mantissa_bits >= 23:
                large = self._alive(rows) & (catalog.pieces.num_elements()[rows] >= _FEWEST_WEIGHTS)
                found += self._parts(key, rows[large], still[large])
        return found

    @cached_property
    def rounded(self) -> list[Part]:
        """Pieces of low-precision weights whose masters moved."""
        found: list[Part] = []
        catalog = self.neighbours.after.catalog
        for name, key in self.carriers.items():
            number_of = self.neighbours.shared.get((Role.PARAMETER, name), (0, -1))[1]
            moved = key[0] is Role.MASTER and self.whole_still.get(name) is False
            if not moved or number_of not in self._by_tensor or catalog.tensors[number_of].dtype.mantissa_bits >= 23:
                continue
            rows, still = self._by_tensor[number_of]
            large = self._alive(rows) & (catalog.pieces.num_elements()[rows] >= _FEWEST_WEIGHTS)
            found += self._parts((Role.PARAMETER, name), rows[large], still[large])
        return found

    @cached_property
    def stale_files(self) -> dict[int, tuple[int, int]]:
        """Files that hold nothing that moved, while others do: number to (parts at rest, other files that moved).

        A file in which weights alone must have moved counts only if those are parts of two tensors or more: rows of one
        embedding may all be without a gradient.
        """
        moved: dict[int, int] = defaultdict(int)
        at_rest: dict[int, list[Part]] = defaultdict(list)
        for part in (*self.moments, *self.weights):
            if part.still:
                at_rest[part.file].append(part)
            else:
                moved[part.file] += 1
        found = self._stale_weight_files()
        for file, parts in at_rest.items():
            several = len({part.key for part in parts}) > 1 or any(decays(*part.key) for part in parts)
            if file not in moved and moved and several:
                found[file] = len(parts), len(moved)
        return found

    def _stale_weight_files(self) -> dict[int, tuple[int, int]]:
        """Files of low-precision weights of which none moved, where all those in other files did."""
        by_file: dict[int, list[Part]] = defaultdict(list)
        for part in self.rounded:
            by_file[part.file].append(part)
        at_rest = {file: parts for file, parts in by_file.items() if all(part.still for part in parts)}
        others = [part for file, parts in by_file.items() if file not in at_rest for part in parts]
        sizes = self.neighbours.after.catalog.pieces.num_elements()
        if not others or any(part.still for part in others):
            return {}
        return {
            file: (len(parts), len(by_file) - len(at_rest))
            for file, parts in at_rest.items()
            if sum(int(sizes[part.row]) for part in parts) >= _FEWEST_ROUNDED
        }


def of(neighbours: Neighbours) -> Stillness:
    """What stood still between two saves; worked out once for all invariants."""
    found = neighbours.remembered.get("stillness")
    if not isinstance(found, Stillness):
        found = neighbours.remembered["stillness"] = Stillness(neighbours)
    return found


def file_name(catalog: Catalog, file: int) -> str:
    """A file's path below its step."""
    return catalog.within(catalog.files[file].name)
