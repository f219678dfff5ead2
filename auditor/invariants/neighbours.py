"""Two saved steps of one run, one after the other: what invariants between steps see, and what they have in common."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.optimizer_state import KeptState, plain
from auditor.invariants.related import Seen, by_role, seen_whole
from auditor.model.catalog import Catalog, Role
from auditor.model.finding import Location
from auditor.model.joint import Joint, JointResult
from auditor.model.observation import Read
from auditor.model.run import StepEvidence, num_skipped, optimizer_steps

TRAINED = (Role.MASTER, Role.PARAMETER)
Key = tuple[Role, str]
_REMEMBERED = 16
"""Saves of which is known what each tensor held, by a hash of 64 bits."""
_HELD = frozenset({Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.MOMENT})
DOUBTED = "something is wrong with it in the save before"


@dataclass(frozen=True, slots=True)
class Sizes:
    """One measure of a tensor's size over the saves so far, in few numbers."""

    last: float = 0.0
    """In the newest save in which the tensor was read whole."""
    num_good: int = 0
    """Saves up to the newest in which it was a positive number, without one in between in which it wasn't."""
    largest_change: float = 0.0
    """From one save in which it was a positive number to the next such one, as a power of two."""
    last_good: float = 0.0

    def then(self, size: float) -> Sizes:
        """With the next save's."""
        if not (size > 0 and math.isfinite(size)):
            return Sizes(size, 0, self.largest_change, self.last_good)
        change = abs(math.log2(size) - math.log2(self.last_good)) if self.last_good else 0.0
        return Sizes(size, self.num_good + 1, max(self.largest_change, change), size)


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier saves said of one tensor."""

    num_moved: int = 0
    """Times that its bits were others than in the save before."""
    num_still: int = 0
    num_saves: int = 0
    """In which it was read whole."""
    mean: Sizes = Sizes()
    """Root mean square."""
    largest: Sizes = Sizes()
    """Largest absolute value."""

    def then(self, before: Seen | None, after: Seen) -> Past:
        """With the next save. ``before``: what was seen in the last one."""
        moved = before is not None and before.lanes != after.lanes
        return Past(
            self.num_moved + moved, self.num_still + (before is not None and not moved), self.num_saves + 1,
            self.mean.then(after.root_mean_square), self.largest.then(after.largest),
        )  # fmt: skip

    def numbers(self) -> tuple[float, ...]:
        """All of it, as a ledger keeps it."""
        sizes = (getattr(one, item.name) for one in (self.mean, self.largest) for item in fields(Sizes))
        return self.num_moved, self.num_still, self.num_saves, *sizes

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Past:
        """What :meth:`numbers` made."""
        moved, still, saves = (int(number) for number in numbers[:3])
        sizes = (numbers[3:7], numbers[7:])
        mean, largest = (Sizes(last, int(good), change, kept) for last, good, change, kept in sizes)
        return cls(moved, still, saves, mean, largest)


@dataclass(slots=True)
class History:
    """What all saves so far said of each tensor: a few numbers a tensor, whatever the number of saves."""

    past: dict[Key, Past] = field(default_factory=dict)
    held: dict[Key, array[int]] = field(default_factory=dict)
    """Step and content, one after the other, of as many saves as :data:`_REMEMBERED`. A ledger does not keep it."""

    def of(self, role: Role, name: str) -> Past:
        """The past of one tensor."""
        return self.past.get((role, name), Past())

    def add(self, before: StepEvidence | None, after: StepEvidence) -> None:
        """Take in the next save."""
        old = {} if before is None else seen_by_key(before)
        for key, seen in seen_by_key(after).items():
            self.past[key] = self.of(*key).then(old.get(key), seen)
            # A folder's name may tell a number that no array holds.
            if key[0] in _HELD and after.catalog.step < 1 << 63:
                held = self.held.setdefault(key, array("q"))
                held.extend((after.catalog.step, hash(seen.lanes)))
                del held[: -2 * _REMEMBERED]

    def step_with(self, key: Key, lanes: tuple[int, int]) -> int | None:
        """The newest of the last saves in which a tensor held this."""
        held = self.held.get(key, array("q"))
        return next((held[at] for at in range(len(held) - 2, -1, -2) if held[at + 1] == hash(lanes)), None)


@dataclass(eq=False)
class Neighbours:
    """A saved step and the one before it."""

    before: StepEvidence
    after: StepEvidence
    history: History = field(default_factory=History)
    """Of all saves up to ``before``."""
    doubted: frozenset[str] = frozenset()
    """Tensors with which something is wrong in ``before``: what was done since says nothing of them."""
    jumped: Mapping[tuple[str, str], Sequence[Location]] = field(default_factory=dict)
    """Id of a lasting invariant and a subject that violates it in ``before``, to where it does."""
    joints: Mapping[Joint, Sequence[JointResult]] = field(default_factory=dict)
    """What was measured element by element over both; a joint that was not asked for, or not read, is not in it."""
    why_not_joined: str = ""
    """Why nothing was, where nothing was asked for."""
    remembered: dict[str, object] = field(default_factory=dict, repr=False, compare=False)
    """What several invariants work out of these two saves, so that one does it for all."""

    @cached_property
    def shared(self) -> Mapping[Key, tuple[int, int]]:
        """Role and name of every tensor that both have in one shape and dtype, to its numbers in ``before``, ``after``.

        Left out are those whose name tells a rank's own part: the parts differ where the mesh does.
        """
        old, new = (by_role(evidence.catalog) for evidence in (self.before, self.after))
        same_mesh = self.before.catalog.mesh == self.after.catalog.mesh
        found: dict[Key, tuple[int, int]] = {}
        for role, names in new.items():
            for name, number in names.items():
                known = old[role].get(name)
                if known is None or (not same_mesh and plain(name) != name):
                    continue
                one, other = self.before.catalog.tensors[known], self.after.catalog.tensors[number]
                if one.shape == other.shape and one.dtype == other.dtype:
                    found[role, name] = known, number
        return found

    @cached_property
    def seen(self) -> Mapping[Key, tuple[Seen, Seen]]:
        """The same, to what was measured of them, for those that were read whole in both and are not doubted."""
        old = seen_whole(self.before.catalog, self.before.observations)
        new = seen_whole(self.after.catalog, self.after.observations)
        return {
            key: (old[one], new[other])
            for key, (one, other) in self.shared.items()
            if one in old and other in new and key[1] not in self.doubted
        }

    def why_unseen(self, name: str = "") -> str:
        """Why a tensor is not among those of :attr:`seen`."""
        if name in self.doubted:
            return DOUBTED
        return self.after.unread or self.before.unread or "it was not read whole in both saves"

    @cached_property
    def counted(self) -> Counted:
        """How many steps the optimizer took in between."""
        return Counted(self.before.catalog, self.after.catalog)

    @cached_property
    def kept(self) -> KeptState:
        """The optimizer's state in ``after``."""
        return KeptState(self.after.catalog)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Plain names of parameters that the optimizer has: it names them, or keeps a moment or master for them."""
        masters = {plain(name) for role, name in self.shared if role is Role.MASTER}
        return frozenset(self.kept.state) | frozenset(self.kept.trained) | masters

    @cached_property
    def pieces(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of both that hold the same region of the same tensor at the same place, and were read."""
        old, rows = _tags(self.before, dict(self.shared.values()))
        new, own = _tags(self.after, {number: number for _, number in self.shared.values()})
        _, mine, theirs = np.intersect1d(old, new, return_indices=True)
        return rows[mine], own[theirs]


def seen_by_key(evidence: StepEvidence) -> dict[Key, Seen]:
    """Role and name to what was measured, of every tensor that has them alone and was read whole."""
    whole = seen_whole(evidence.catalog, evidence.observations)
    names = by_role(evidence.catalog)
    return {
        (role, name): whole[number] for role, of_role in names.items() for name, number in of_role.items()
        if number in whole
    }  # fmt: skip


_MIX = np.uint64(0x9E3779B97F4A7C15)


def _tags(evidence: StepEvidence, number_of: Mapping[int, int]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """A hash of tensor, place and region for every piece that was read, and the pieces' rows.

    ``number_of``: tensor number here to the number that counts. A hash of 64 bits: a piece is at worst held against
    another one, whose content is another too.
    """
    catalog, pieces = evidence.catalog, evidence.catalog.pieces
    numbers = np.full(max(len(catalog.tensors), 1), -1, np.int64)
    numbers[list(number_of)] = list(number_of.values())
    rows = np.flatnonzero((evidence.observations.pieces["read"] == Read.DONE) & (numbers[pieces.tensor] >= 0))
    places = np.array([hash(place.indices) & 0xFFFFFFFF for place in pieces.coordinates] or [0], np.uint64)
    dims = pieces.num_dims[rows].astype(np.int64)
    with np.errstate(over="ignore"):
        tags = _mixed(numbers[pieces.tensor[rows]].astype(np.uint64), places[pieces.coordinate[rows]])
        for at in range(int(2 * np.where(dims < 0, 1, dims).max(initial=0))):
            inside = at < 2 * np.where(dims < 0, 1, dims)
            bound = pieces.pool[np.where(inside, pieces.region_at[rows] + at, 0)] if len(pieces.pool) else 0
            tags = np.where(inside, _mixed(tags, np.asarray(bound).astype(np.uint64)), tags)
    return tags, rows


def _mixed(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = (one ^ (other + _MIX + (one << np.uint64(6)) + (one >> np.uint64(2)))) * _MIX
    return mixed ^ (mixed >> np.uint64(29))


@dataclass(frozen=True, slots=True)
class Updates:
    """Optimizer steps between two saves, as far as they are counted."""

    fewest: float
    most: float
    """No more than these were taken."""
    first: float
    """No fewer than these were taken before."""
    certain: bool
    """Whether the optimizer surely went on from the state of the save before."""


class Counted:
    """Optimizer steps between two saves, for each parameter."""

    def __init__(self, before: Catalog, after: Catalog) -> None:
        self._sides = [_counters(catalog) for catalog in (before, after)]
        self._steps = before.step, after.step
        self._skipped = num_skipped(before), num_skipped(after)
        self._usual = optimizer_steps(before), optimizer_steps(after)

    def of(self, name: str) -> Updates | None:
        """The steps that were counted for a parameter; None where either save counts none."""
        old, new = (values.get(plain(name)) or values.get("") or () for values in self._sides)
        if not old or not new:
            return None
        fewest, most = min(new) - max(old), max(new) - min(old)
        return Updates(fewest, most, min(old), self._went_on(min(old), max(old), min(new), max(new)))

    def _went_on(self, fewest: float, old: float, new: float, most: float) -> bool:
        """Whether the optimizer can't have begun anew since the save before.

        One that had begun anew would count the steps since, no more. So it went on if it counts one a step and counts
        more than lie between the saves, or if it went on as it went before.
        """
        step, later = self._steps
        between = later - step - (self._skipped[1] - self._skipped[0])
        if fewest < 1 or new <= old or later <= step:
            return False
        advanced = new - old
        # A loop that numbers its steps from 0 has counted one more than its number.
        one_a_step = old <= step + (step > 1)
        return (advanced == between or new > later - step) if one_a_step else advanced * step == old * (later - step)

    @property
    def usual(self) -> tuple[float, float] | None:
        """What most files count in both saves; None where one counts nothing.

        Of several optimizers, it is the one that counted most nearly the steps of the run.
        """
        old, new = self._usual
        both = sorted(old.keys() & new.keys(), key=lambda name: (abs(old[name] - self._steps[0]), name))
        return (old[both[0]], new[both[0]]) if both else None


def _counters(catalog: Catalog) -> dict[str, list[float]]:
    """Plain name to what is counted for it; the empty name has what is counted for files and groups as a whole."""
    found: dict[str, list[float]] = defaultdict(list)
    for scalar in catalog.scalars:
        if scalar.name == "optimizer_step" and not scalar.saturated:
            found[plain(scalar.tensor)].append(scalar.value)
    if not found:
        found[""] += [group.step for group in catalog.groups if group.step]
    return found
