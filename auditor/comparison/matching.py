"""Which tensor of one side is held against which of the other. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from auditor.comparison.holding import Holding
from auditor.model.catalog import Role, Tensor

COMPARED = (
    Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.MOMENT, Role.BUFFER, Role.EMA,
    Role.COUNTER,
)  # fmt: skip
"""In the order in which they are shown. Padding is no part of a model, objects are no numbers."""
_WEIGHTS = (Role.PARAMETER, Role.MASTER)


@dataclass(frozen=True, slots=True)
class Filter:
    """Tensors that are compared, by globs over names."""

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        """Whether a tensor is compared."""
        chosen = not self.only or any(fnmatchcase(name, glob) for glob in self.only)
        return chosen and not any(fnmatchcase(name, glob) for glob in self.ignore)


EVERYTHING = Filter()
_MASK = re.compile(r"(?:.*\.)?(?:attn|attention)\.bias")
_COMPUTED = re.compile(
    r"(?:.*\.)?(?:freqs_cis|inv_freq|masked_bias|position_ids|(?:de|en)coder\.version|rotary_emb\.(?:cos|sin)_cached)"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the reference and the one of the candidate that it is held against; None: that side lacks it."""

    name: str
    role: Role
    order: int
    reference: int | None
    candidate: int | None


@dataclass(frozen=True, slots=True)
class Matching:
    """All pairs of one step."""

    pairs: tuple[Pair, ...]
    """In model order, roles in the order of :data:`COMPARED`."""
    roles_of_reference: tuple[Role, ...]
    """Stored by the reference alone: nothing is said of them."""
    roles_of_candidate: tuple[Role, ...]


def match(reference: Holding, candidate: Holding, chosen: Filter, *, every_role: bool = False) -> Matching:
    """Tensors of one role and name belong together.

    Where one side's weights have the dtype of the other side's masters (an export in full precision) or stand alone as
    masters (ZeRO-3), weights are held against masters. Roles that one side does not store at all are not compared,
    unless ``every_role`` must be there.
    """
    pairs = [pair for pair in _pairs(reference, candidate) if chosen.wants(pair.name)]
    stored = [{role for role in COMPARED if any(_has(pair, role, side) for pair in pairs)} for side in (0, 1)]
    alone = [() if every_role else _in_order(stored[side] - stored[1 - side]) for side in (0, 1)]
    kept = [pair for pair in pairs if pair.role not in (*alone[0], *alone[1])]
    kept.sort(key=lambda pair: (pair.order, pair.name, COMPARED.index(pair.role)))
    return Matching(tuple(kept), alone[0], alone[1])


def _has(pair: Pair, role: Role, side: int) -> bool:
    return pair.role is role and (pair.candidate if side else pair.reference) is not None


def _in_order(roles: set[Role]) -> tuple[Role, ...]:
    return tuple(role for role in COMPARED if role in roles)


def _pairs(reference: Holding, candidate: Holding) -> Iterator[Pair]:
    own = _by_role(reference)
    theirs = _by_role(candidate)
    crossed = _crossed(reference, candidate)
    for role in COMPARED:
        for name in dict.fromkeys((*own.get(role, {}), *theirs.get(role, {}))):
            left, right = own.get(role, {}).get(name), theirs.get(role, {}).get(name)
            if role in (*_WEIGHTS, Role.BUFFER) and name in crossed:
                continue
            side, number = (reference, left) if left is not None else (candidate, right)
            assert number is not None
            yield Pair(name, role, side.tensors[number].order, left, right)
    for name, (left, right) in crossed.items():
        role = Role.BUFFER if Role.BUFFER in _roles(reference, candidate, left, right) else Role.PARAMETER
        yield Pair(name, role, reference.tensors[left].order, left, right)


def _roles(reference: Holding, candidate: Holding, left: int, right: int) -> set[Role]:
    return {reference.tensors[left].role, candidate.tensors[right].role}


def _by_role(holding: Holding) -> dict[Role, dict[str, int]]:
    found: dict[Role, dict[str, int]] = {}
    for (role, name), number in holding.numbers.items():
        found.setdefault(role, {})[name] = number
    return found


def _crossed(reference: Holding, candidate: Holding) -> dict[str, tuple[int, int]]:
    """Weights that are held against masters, and buffers that the other side's files don't tell from weights."""
    found = {}
    for name in {name for role, name in (*reference.numbers, *candidate.numbers) if role is Role.BUFFER}:
        left, right = ([(role, side.numbers[role, name]) for role in (*_WEIGHTS, Role.BUFFER) if (role, name) in
                        side.numbers] for side in (reference, candidate))  # fmt: skip
        if len(left) == len(right) == 1 and left[0][0] is not right[0][0]:
            found[name] = left[0][1], right[0][1]
    names = {name for role, name in (*reference.numbers, *candidate.numbers) if role in _WEIGHTS}
    for name in names - found.keys():
        left, right = _weights(reference, name), _weights(candidate, name)
        if not left or not right or {role for role, _ in left} & {role for role, _ in right} == set(_WEIGHTS):
            continue
        same_role = [(a, b) for a in left for b in right if a[0] is b[0]]
        if any(_dtype(reference, a) == _dtype(candidate, b) for a, b in same_role):
            continue
        alike = [(a, b) for a in left for b in right if _dtype(reference, a) == _dtype(candidate, b)]
        if alike or not same_role:
            (a, b), *_ = alike or [(left[-1], right[-1])]
            found[name] = a[1], b[1]
    return found


def _weights(holding: Holding, name: str) -> list[tuple[Role, int]]:
    return [(role, holding.numbers[role, name]) for role in _WEIGHTS if (role, name) in holding.numbers]


def _dtype(holding: Holding, entry: tuple[Role, int]) -> str:
    return holding.tensors[entry[1]].dtype.name


def module_of(name: str) -> str:
    """The module that a tensor belongs to: its name without the last part.

    >>> module_of("layers.0.norm.weight"), module_of("scale")
    ('layers.0.norm', '')
    """
    return name.rpartition(".")[0]


def is_computed(tensor: Tensor) -> bool:
    """Whether a tensor is a mask, a table of frequencies, or a version: some files hold them, and no loader needs them.

    Source: what transformers' models ignore when they load, ``_keys_to_ignore_on_load_unexpected``.
    """
    mask = tensor.shape[:2] == (1, 1) and len(tensor.shape) == 4 and _MASK.fullmatch(tensor.name)
    return bool(mask or _COMPUTED.fullmatch(tensor.name))


def tied_to(holding: Holding, number: int, matched: Set[int | None]) -> Tensor | None:
    """Another tensor of the same side and role, among ``matched``, that holds the same content: a tied one."""
    key = holding.content(number)
    found = holding.alike.get(key, ()) if key is not None else ()
    return next((holding.tensors[other] for other in found if other in matched), None)
