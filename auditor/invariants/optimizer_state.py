"""Which state the optimizer keeps for which parameter, by the Catalog alone: moments that lack, that fit nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from auditor.model.catalog import Catalog, FileState, Role
from auditor.model.finding import Judgement, Location, Violation
from auditor.model.optimizer import ParameterGroup, parameter_of
from auditor.model.run import StepEvidence, optimizer_step

_PLACE = re.compile(r"@[a-z]+=\d+(?:,[a-z]+=\d+)*$")
_KEYS = {Role.FIRST_MOMENT: "exp_avg", Role.SECOND_MOMENT: "exp_avg_sq"}
_ROLES = {key: role for role, key in _KEYS.items()} | {"master": Role.MASTER}
_SHAPED = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""What has its parameter's shape in every optimizer that keeps it under this name."""
_FACTORS = (
    ("exp_avg_sq", ("exp_avg_sq_row", "exp_avg_sq_col")), ("exp_avg_sq", ("v_row", "v_col")),
    ("variance", ("row_var", "col_var")),
)  # fmt: skip
"""Adafactor's second moment, whole or as the factors of a matrix: its first implementations, optax's and torch's."""
_UNIFORM = frozenset({
    "square_avg", "grad_avg", "acc_delta", "sum", "exp_inf", "prev", "step_size", "ax", "eta", "mu", "momentum_buffer",
    "exp_avg",
})  # fmt: skip
"""What torch's other optimizers keep: for every parameter of a group the same (source: torch/optim)."""
_EIGHT_BIT = ("state1", "state2")
_STATE = (Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.MOMENT)
_SURELY_STEPPED = 1000
"""From this step on an optimizer has taken one: before, gradients may still be accumulated or a loss scale sought."""


def plain(name: str) -> str:
    """A tensor's name without the place whose own it is.

    >>> plain("3.bias@pp=1,tp=0"), plain("3.bias")
    ('3.bias', '3.bias')
    """
    return _PLACE.sub("", name)


@dataclass(frozen=True)
class KeptState:
    """Parameters and what the optimizer keeps for them, by plain name."""

    catalog: Catalog

    @cached_property
    def parameters(self) -> Mapping[str, Sequence[int]]:
        """Plain name to the numbers of the tensors that hold it: its masters, where the format keeps those alone."""
        return {**(self.masters if self.catalog.masters_alone else {}), **self._of_role(Role.PARAMETER)}

    @cached_property
    def masters(self) -> Mapping[str, Sequence[int]]:
        """Plain name of a parameter to the numbers of its masters."""
        return self._of_role(Role.MASTER)

    def _of_role(self, role: Role) -> Mapping[str, Sequence[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for number, tensor in enumerate(self.catalog.tensors):
            if tensor.role is role:
                found[plain(tensor.name)].append(number)
        return found

    @cached_property
    def trained(self) -> Mapping[str, ParameterGroup]:
        """Plain name of every parameter that a group names to the first such group."""
        found: dict[str, ParameterGroup] = {}
        seen: set[tuple[int, int]] = set()
        for group in self.catalog.groups:
            # Ranks share the tuple of names where they have the same group.
            if group.parameters is not None and (id(group.parameters), group.number) not in seen:
                seen.add((id(group.parameters), group.number))
                for name in group.parameters:
                    found.setdefault(plain(name), group)
        return found

    @cached_property
    def owners(self) -> Mapping[int, tuple[str, str]]:
        """Number of every moment to its parameter's plain name and its key; the name is empty where there is none."""
        found: dict[int, tuple[str, str]] = {}
        for number, tensor in enumerate(self.catalog.tensors):
            name = plain(tensor.name)
            if tensor.role in _KEYS:
                found[number] = name if name in self.parameters else "", _KEYS[tensor.role]
            elif tensor.role is Role.MOMENT:
                owner, _, key = name.rpartition(".")
                whole = name in self.parameters
                found[number] = (name, "momentum_buffer") if whole else (owner if owner in self.parameters else "", key)
        return found

    @cached_property
    def state(self) -> Mapping[str, Mapping[str, Sequence[int]]]:
        """Plain name of a parameter to key to the numbers of the tensors that hold it."""
        found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, (owner, key) in self.owners.items():
            if owner:
                found[owner][key].append(number)
        return found

    @cached_property
    def nameless(self) -> Mapping[str, Sequence[str]]:
        """Why it isn't known which parameter a moment or master belongs to, to their names."""
        found: dict[str, list[str]] = defaultdict(list)
        for number, tensor in enumerate(self.catalog.tensors):
            owner = self.owners[number][0] if number in self.owners else plain(tensor.name)
            if tensor.undetermined and tensor.role in (*_STATE, Role.MASTER) and owner not in self.parameters:
                found[tensor.undetermined].append(tensor.name)
        return found

    @cached_property
    def partial(self) -> bool:
        """Whether the Catalog lacks parameters that groups name: tensors were chosen, or files are lost."""
        return any(name not in self.parameters for name in self.trained)

    @cached_property
    def split(self) -> bool:
        """Whether each rank file has the whole state of some parameters and none of the others': ZeRO-1 by hand."""
        holders = [self.files_of(number for numbers in keys.values() for number in numbers)
                   for keys in self.state.values()]  # fmt: skip
        return all(len(files) == 1 for files in holders) and len(frozenset().union(*holders)) > 1

    @cached_property
    def unstepped(self) -> bool:
        """Whether the optimizer may not have taken a step: it keeps nothing and no step of its own is counted."""
        names = ("optimizer_step", "scheduler_steps")
        counted = [scalar.value for scalar in self.catalog.scalars if scalar.name in names]
        counted += [group.step or 0 for group in self.catalog.groups]
        return not self.state and not any(counted) and self.catalog.step < _SURELY_STEPPED

    def files_of(self, tensors: Iterable[int]) -> set[int]:
        """Numbers of the files in which pieces of these tensors lie."""
        rows = self.catalog.rows_by_tensor
        return {int(file) for tensor in tensors for file in self.catalog.pieces.file[rows.get(tensor, [])]}

    def location(self, number: int, detail: str) -> Location:
        """Where a tensor's first piece lies."""
        catalog, tensor = self.catalog, self.catalog.tensors[number]
        rows = catalog.rows_by_tensor.get(number)
        piece = catalog.pieces[int(rows[0])] if rows is not None and len(rows) else None
        file, at = (catalog.files[piece.file].name, piece.coordinate) if piece else ("", catalog.replicas[number][0])
        return Location(catalog.step, file, tensor.name, tensor.role, tensor.order, at, detail=detail)

    def lacks(self, number: int, key: str, detail: str) -> Location:
        """A tensor's place, but called by what lacks there."""
        at, role = self.location(number, detail), _ROLES.get(key, Role.MOMENT)
        return Location(at.step, at.file, plain(at.tensor), role, at.order, at.coordinate, detail=detail)


@dataclass(frozen=True, slots=True)
class _Needs:
    """Which keys every parameter of a group must have."""

    keys: tuple[str, ...] = ()
    unknown: str = ""
    """Why nothing is known of what must be there."""
    none: str = ""
    """Why nothing has to be there."""

    def lacking(self, kept: Iterable[str]) -> tuple[str, ...]:
        """The keys that are not among those ``kept``, nor are they as factors."""
        have = set(kept)
        have |= {key for key, factors in _FACTORS if have.issuperset(factors)}
        return tuple(key for key in self.keys if key not in have)


def _needs(group: ParameterGroup, kept: frozenset[str]) -> _Needs:
    """By what is kept for any parameter of the group, then by the hyperparameters. ``kept``: keys."""
    settings = group.hyperparameters
    adam = "betas" in settings and "eps" in settings
    if "proj_type" in settings or "update_proj_gap" in settings:
        return _Needs(unknown="its state lies in a space of lower rank, whose shapes are not known")
    for key, factors in _FACTORS:
        if kept.intersection(factors):
            return _Needs(("exp_avg", key) if "exp_avg" in kept else (key,))
    if group.from_state:
        return _Needs(tuple(sorted(kept)))
    if kept.intersection(_EIGHT_BIT):
        return _Needs(tuple(key for key in _EIGHT_BIT if key in kept))
    if "exp_avg_sq" in kept:
        largest = ("max_exp_avg_sq",) if settings.get("amsgrad") is True else ()
        return _Needs((*(("exp_avg",) if adam or "exp_avg" in kept else ()), "exp_avg_sq", *largest))
    if kept == {"exp_avg"}:
        return _Needs(("exp_avg", "exp_avg_sq") if adam else ("exp_avg",))
    if kept and kept <= _UNIFORM:
        return _Needs(tuple(sorted(kept)))
    if kept:
        return _Needs(unknown=f"what an optimizer that keeps {', '.join(sorted(kept)[:4])} must keep is not known")
    if "betas" in settings:
        return _Needs(("exp_avg", "exp_avg_sq") if adam else ("exp_avg",))
    if settings.get("momentum"):
        return _Needs(("momentum_buffer",))
    if "momentum" in settings:
        return _Needs(none="stochastic gradient descent without momentum keeps nothing")
    return _Needs(unknown="which optimizer it is, and so what it must keep, is not recorded")


def _needs_by_group(kept: KeptState) -> dict[int, _Needs]:
    keys: dict[int, set[str]] = defaultdict(set)
    first: dict[int, ParameterGroup] = {}
    for name, group in kept.trained.items():
        first.setdefault(group.number, group)
        keys[group.number].update(kept.state.get(name, ()))
    return {number: _needs(group, frozenset(keys[number])) for number, group in first.items()}


def stateless_groups(kept: KeptState) -> frozenset[int]:
    """Numbers of the groups whose parameters need no state."""
    return frozenset(number for number, needs in _needs_by_group(kept).items() if needs.none)


def _silence(kept: KeptState) -> Judgement | None:
    """What is said where moments can't be expected, or nothing tells which parameters have some."""
    catalog = kept.catalog
    if not catalog.groups and not kept.owners:
        return Judgement(not_applicable={"no optimizer state is stored": 1})
    if not kept.trained:
        reasons = kept.nameless or {"the files don't say which parameters the optimizer has": ("the optimizer",)}
        return Judgement(undetermined={reason: tuple(names) for reason, names in reasons.items()})
    skipped = max((s.value for s in catalog.scalars if s.name == "skipped_steps"), default=0.0)
    if not kept.state and (catalog.step <= skipped or optimizer_step(catalog) == 0):
        return Judgement(not_applicable={"the optimizer has not taken a step": 1})
    if not kept.state and any(scalar.name == "loss_scale" for scalar in catalog.scalars):
        reason = "steps may have been skipped so far: gradients are scaled, and skipped steps are not counted"
        return Judgement(undetermined={reason: ("the optimizer's moments",)})
    return None


def moments_are_complete(evidence: StepEvidence) -> Judgement:
    """Every parameter that has moments, or must have some, has all of them with its shape."""
    kept = KeptState(evidence.catalog)
    if silence := _silence(kept):
        return silence
    needs = _needs_by_group(kept)
    violations: list[Violation] = []
    undetermined: dict[str, list[str]] = {reason: list(names) for reason, names in kept.nameless.items()}
    legal: dict[str, int] = {}
    num_holds = 0
    for name, group in kept.trained.items():
        need, have = needs[group.number], kept.state.get(name, {})
        if name not in kept.parameters:
            continue
        if need.unknown:
            undetermined.setdefault(need.unknown, []).append(name)
        elif need.none:
            legal[need.none] = legal.get(need.none, 0) + 1
        elif found := _first_fault(kept, name, need, have, must=not kept.state or name in kept.masters):
            doubt = _doubt(kept, need) if not have else ""
            if doubt:
                undetermined.setdefault(doubt, []).append(name)
            else:
                violations.append(found)
        elif lost := _on_some_ranks(kept, name, have):
            if kept.split:
                undetermined.setdefault("its state is split over ranks, which other ranks need not hold", []).append(
                    name
                )
            else:
                violations.append(lost)
        else:
            num_holds += bool(have)
    return Judgement(num_holds, tuple(violations), {key: tuple(names) for key, names in undetermined.items()}, legal)


def _doubt(kept: KeptState, need: _Needs) -> str:
    """Why moments that were not found may be there all the same."""
    if any(file.state is not FileState.PRESENT for file in kept.catalog.files):
        return "its moments may be in a file that could not be read"
    if kept.unstepped:
        return "no parameter has moments and no optimizer step is counted: none was taken yet, or all state is lost"
    if kept.partial and not {"exp_avg", "momentum_buffer"}.intersection(need.keys):
        return "only some tensors were chosen, and its moments have names of their own"
    return ""


def _first_fault(
    kept: KeptState, name: str, need: _Needs, have: Mapping[str, Sequence[int]], *, must: bool
) -> Violation | None:
    """What is wrong with the state of one parameter. ``must``: whether it can't be without any."""
    if not have:
        if not must:
            return None
        number, detail = kept.parameters[name][0], f"has no {' and no '.join(need.keys)}"
        return Violation(name, (kept.lacks(number, need.keys[0], detail),), f"{name} {detail}")
    if lacking := need.lacking(have):
        number = next(iter(have.values()))[0]
        detail = f"has {', '.join(sorted(have))} but no {' and no '.join(lacking)}"
        return Violation(name, (kept.lacks(number, lacking[0], detail),), f"{name} {detail}")
    for key in sorted(have.keys() & _SHAPED):
        for number in have[key]:
            if not fits(kept, name, number):
                tensor = kept.catalog.tensors[number]
                detail = f"{key} has shape {list(tensor.shape)}, the parameter {shapes_of(kept, name)}"
                return Violation(name, (kept.location(number, detail),), f"{name}: its {detail}")
    return None


def shapes_of(kept: KeptState, name: str) -> str:
    """The shapes that a parameter has, in words."""
    return " or ".join(dict.fromkeys(str(list(kept.catalog.tensors[at].shape)) for at in kept.parameters[name]))


def fits(kept: KeptState, name: str, number: int) -> bool:
    """Whether a moment has its parameter's shape; of a rank's own part, as many elements as the part beside it."""
    catalog, numbers = kept.catalog, kept.parameters[name]
    if any(catalog.tensors[at].shape == catalog.tensors[number].shape for at in numbers):
        return True
    if not catalog.tensors[number].undetermined and not any(catalog.tensors[at].undetermined for at in numbers):
        return False
    files = kept.files_of([number])
    rows = [int(row) for at in numbers for row in catalog.rows_by_tensor.get(at, ())]
    beside = [catalog.pieces.region(row).num_elements for row in rows if int(catalog.pieces.file[row]) in files]
    return not beside or sum(beside) == catalog.tensors[number].num_elements


def _on_some_ranks(kept: KeptState, name: str, have: Mapping[str, Sequence[int]]) -> Violation | None:
    """A moment that some rank files hold and others, whose optimizer has the parameter too, don't."""
    found = (_on_others(kept, name, key, have[key]) for key in sorted(have.keys() & _SHAPED))
    return next((violation for violation in found if violation), None)


def _on_others(kept: KeptState, name: str, key: str, numbers: Sequence[int]) -> Violation | None:
    catalog = kept.catalog
    if not all(catalog.tensors[number].undetermined for number in numbers):
        return None
    tensor = catalog.tensors[numbers[0]]
    called = {catalog.tensors[number].name for number in numbers}
    # What a rank calls by a name that has the moment is in some file: a part of it need not be in this one.
    called |= {parameter_of(one) for one in called if tensor.role is Role.MOMENT}
    holders = {catalog.files[file].name for file in kept.files_of(numbers)}
    others = {file.name for file in catalog.files if file.state is FileState.PRESENT} - holders
    without = [group for group in catalog.groups if group.file in others
               and any(plain(other) == name and other not in called for other in group.parameters or ())]  # fmt: skip
    if not without or not holders:
        return None
    detail = f"holds no {key} of {name}, {catalog.within(min(holders))} does"
    locations = tuple(
        Location(catalog.step, group.file, name, tensor.role, tensor.order, group.coordinate, detail=detail)
        for group in without
    )
    return Violation(name, locations, f"{catalog.within(without[0].file)} {detail}")


def trained_parameters_have_moments(evidence: StepEvidence) -> Judgement:
    """No parameter that was handed to the optimizer is without any moments while others have theirs."""
    kept = KeptState(evidence.catalog)
    if silence := _silence(kept):
        return silence
    if not kept.state:
        return Judgement(not_applicable={"no parameter has moments": 1})
    needs = _needs_by_group(kept)
    violations: list[Violation] = []
    undetermined: dict[str, list[str]] = {}
    legal: dict[str, int] = {}
    num_holds = 0
    for name, group in kept.trained.items():
        need = needs[group.number]
        if name not in kept.parameters:
            continue
        told = "which parameters the optimizer has is told by their moments alone" if group.from_state else ""
        if reason := need.none or told or (name in kept.masters and "it has an fp32 master: OPT001 judges it"):
            legal[reason] = legal.get(reason, 0) + 1
        elif kept.state.get(name):
            num_holds += 1
        elif doubt := need.unknown or _doubt(kept, need):
            undetermined.setdefault(doubt, []).append(name)
        else:
            detail = f"is handed to the optimizer (group {group.number}) but has no moments, others have"
            location = kept.lacks(kept.parameters[name][0], need.keys[0], detail)
            violations.append(Violation(name, (location,), f"{name} {detail}"))
    return Judgement(num_holds, tuple(violations), {key: tuple(names) for key, names in undetermined.items()}, legal)
