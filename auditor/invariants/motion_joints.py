"""What is measured of two saves element by element, and of which parameters nothing can be (docs/motion-bound.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from auditor.invariants import stillness
from auditor.invariants.motion_rates import Recorded, motion_bound, recorded, why_set_otherwise
from auditor.invariants.neighbours import Neighbours
from auditor.model.catalog import Role
from auditor.model.joint import Joint, JointKind


@dataclass(frozen=True, slots=True)
class Asked:
    """One parameter's joint of one kind, or why there is none."""

    name: str
    role: Role
    number: int
    joint: Joint | None = None
    reason: str = ""
    assumed: str = ""
    """What is taken to hold without being recorded: then a violation is a warning."""


def joints(neighbours: Neighbours) -> list[Joint]:
    """All that is to be measured between two saves."""
    return [asked.joint for kind in JointKind for asked in asked_of(neighbours, kind) if asked.joint is not None]


def asked_of(neighbours: Neighbours, kind: JointKind) -> list[Asked]:
    """What is asked of every parameter for one kind of joint; worked out once for all invariants."""
    found = neighbours.remembered.get(kind.value)
    if not isinstance(found, list):
        found = neighbours.remembered[kind.value] = list(_ASK[kind](neighbours))
    return found


def _of(neighbours: Neighbours, role: Role, name: str) -> tuple[int, int]:
    """The tensor's numbers in both saves; -1 where they don't both have it."""
    return neighbours.shared.get((role, name), (-1, -1))


def _rest(neighbours: Neighbours) -> Iterable[Asked]:
    for key, (old, new) in neighbours.shared.items():
        if stillness.decays(*key) and neighbours.after.catalog.tensors[new].dtype.mantissa_bits >= 7:
            yield Asked(key[1], key[0], new, Joint(JointKind.REST, (new,), (old,)))


def _each(neighbours: Neighbours) -> Iterable[tuple[str, Recorded | str]]:
    """Every parameter with a second moment, with what is recorded of it or why nothing can be said."""
    for role, name in neighbours.shared:
        if role is Role.SECOND_MOMENT:
            yield name, recorded(neighbours, name)


def _decay(neighbours: Neighbours) -> Iterable[Asked]:
    for name, known in _each(neighbours):
        old, new = _of(neighbours, Role.SECOND_MOMENT, name)
        asked = Asked(name, Role.SECOND_MOMENT, new)
        if isinstance(known, str):
            yield replace(asked, reason=known)
        elif reason := known.why_no_decay():
            yield replace(asked, reason=reason)
        else:
            yield replace(asked, joint=Joint(JointKind.DECAY, (new,), (old,), (known.kept_of_second, known.floor)))


def _weights(neighbours: Neighbours) -> Iterable[tuple[Asked, int, Recorded | str]]:
    """The weight of every parameter, its number in the save before, and what is recorded of it.

    Or why nothing can be said: of moments of which it isn't known whose they are, that there is no weight to hold them
    against.
    """
    for name, known in _each(neighbours):
        role = Role.MASTER if (Role.MASTER, name) in neighbours.shared else Role.PARAMETER
        old, new = _of(neighbours, role, name)
        moment = _of(neighbours, Role.SECOND_MOMENT, name)[1]
        if new >= 0:
            yield Asked(name, role, new), old, known
        elif reason := neighbours.after.catalog.tensors[moment].undetermined:
            yield Asked(name, Role.SECOND_MOMENT, moment), -1, reason


def _stride(neighbours: Neighbours) -> Iterable[Asked]:
    for asked, old, known in _weights(neighbours):
        name, new = asked.name, asked.number
        (first, _), (second_old, second) = (_of(neighbours, r, name) for r in (Role.FIRST_MOMENT, Role.SECOND_MOMENT))
        dtype = neighbours.after.catalog.tensors[new].dtype
        bound = known if isinstance(known, str) else why_set_otherwise(name) or motion_bound(known, dtype)
        if isinstance(bound, str) or first < 0:
            yield replace(asked, reason=bound if isinstance(bound, str) else "it has no first moment")
        else:
            assert not isinstance(known, str)
            joint = Joint(JointKind.STRIDE, (new, second), (old, second_old, first), bound)
            # The function takes new and old of each in turn.
            yield replace(asked, joint=joint, assumed=known.assumed)


def _variance(neighbours: Neighbours) -> Iterable[Asked]:
    for name, known in _each(neighbours):
        (first_old, first), (old, new) = (_of(neighbours, r, name) for r in (Role.FIRST_MOMENT, Role.SECOND_MOMENT))
        asked = Asked(name, Role.SECOND_MOMENT, new)
        reason = known if isinstance(known, str) else known.why_no_replay()
        if reason or first < 0:
            yield replace(asked, reason=str(reason) or "it has no first moment")
        else:
            assert not isinstance(known, str)
            constants = known.highest, known.second, known.round_off
            yield replace(asked, joint=Joint(JointKind.VARIANCE, (new, first), (old, first_old), constants))


def _update(neighbours: Neighbours) -> Iterable[Asked]:
    for asked, old, known in _weights(neighbours):
        name, new = asked.name, asked.number
        dtype = neighbours.after.catalog.tensors[new].dtype
        reason = known if isinstance(known, str) else why_set_otherwise(name) or known.why_no_update(dtype)
        first, second = (_of(neighbours, r, name)[1] for r in (Role.FIRST_MOMENT, Role.SECOND_MOMENT))
        if reason or first < 0:
            yield replace(asked, reason=str(reason) or "it has no first moment")
            continue
        assert not isinstance(known, str)
        for constants in known.candidates(dtype):
            yield replace(asked, joint=Joint(JointKind.UPDATE, (new, first, second), (old,), constants))


_ASK: dict[JointKind, Callable[[Neighbours], Iterable[Asked]]] = {
    JointKind.DECAY: _decay, JointKind.STRIDE: _stride, JointKind.REST: _rest, JointKind.VARIANCE: _variance,
    JointKind.UPDATE: _update,
}  # fmt: skip
