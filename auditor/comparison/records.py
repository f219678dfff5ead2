"""What both sides record beside their tensors: rates, betas, counters, seeds, the dtype of masters. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auditor.comparison.holding import Holding
from auditor.comparison.outcome import SUSPECT, Compared
from auditor.comparison.rounding import counted_steps
from auditor.model.catalog import Role, Scalar
from auditor.model.finding import LikelyCause
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import Hyperparameter

OPTIMIZER = ("lr", "initial_lr", "eps", "weight_decay", "amsgrad", "momentum", "maximize", "bias_correction")
"""What moves weights, and leaves the gradients of a first step alone."""
BETAS = "betas"
COUNT, RANDOM = "optimizer_step", "random_state"
_KEPT = {Role.MASTER: "masters", Role.FIRST_MOMENT: "first moments", Role.SECOND_MOMENT: "second moments"}
_SOURCE = "the files themselves"


class Reach(enum.Enum):
    """What a number that is recorded otherwise explains."""

    WEIGHTS = "weights"
    """Not the gradients of a first step."""
    ALL = "whatever differs"
    DRAWS = "what is drawn at random"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One number that both sides record, and that differs; or one that a single side records."""

    text: str
    reach: Reach
    file: str = ""
    """The candidate's file that says it, by its own name; empty where several do."""

    @property
    def place(self) -> str:
        """The text, with the file."""
        return f"{self.text}, in {self.file}" if self.file else self.text


def recorded(reference: Holding, candidate: Holding, *, alone: bool) -> tuple[Recorded, ...]:
    """What is recorded otherwise, first what moves weights.

    ``alone``: also what one side alone records, and settings that agree as float32 numbers (optax, Megatron keep such)
    and no further.
    """
    settings = _settings(reference, candidate, alone=alone)
    return (*settings, *_dtypes(reference, candidate), *_scalars(reference, candidate, alone=alone))


def recorded_beside(known: Sequence[Recorded], found: Sequence[tuple[str, str]]) -> tuple[Recorded, ...]:
    """What is known to be recorded otherwise, and of what files hold beside tensors what that does not say."""
    names = {one.text.partition(" ")[0] for one in known}
    more = [(text, file) for text, file in found if text.partition(" ")[0].rpartition(".")[2] not in names]
    return (*known, *(Recorded(text, Reach.ALL, file) for text, file in more))


def recorded_causes(found: Sequence[Recorded], where: str = "") -> list[LikelyCause]:
    """What is recorded otherwise, offered as one cause; none for nothing. ``where``: in which step, if in another."""
    texts = list(dict.fromkeys(one.place for one in found))
    more = f"; and {len(texts) - 4} more" if len(texts) > 4 else ""
    return [LikelyCause(f"recorded otherwise{where}: {'; '.join(texts[:4])}{more}", _SOURCE)] if texts else []


def explaining(found: Sequence[Recorded], rows: Sequence[Compared], *, first_step: bool) -> list[Recorded]:
    """What of it explains all that differs: after a first step from equal weights no rate explains a gradient."""
    gradients = any(row.pair.role is Role.FIRST_MOMENT and row.standing in SUSPECT for row in rows)
    return [one for one in found if one.reach is not Reach.WEIGHTS or not (first_step and gradients)]


def _settings(reference: Holding, candidate: Holding, *, alone: bool) -> Iterator[Recorded]:
    alike = reference.format == candidate.format
    for name in (*OPTIMIZER, BETAS):
        sides = [_by_parameter(holding, name, exact=alone) for holding in (reference, candidate)]
        if alike and any(None in side for side in sides):
            numbered = [_by_number(holding, name, exact=alone) for holding in (reference, candidate)]
            # Groups that don't say which parameters are theirs are told apart by their order.
            sides = numbered if numbered[0].keys() == numbered[1].keys() else sides
        reach = Reach.ALL if name == BETAS else Reach.WEIGHTS
        yield from (Recorded(text, reach, _file_of(candidate, name)) for text in _differing(name, *sides))
        if alone and alike and bool(sides[0]) != bool(sides[1]):
            yield Recorded(f"{name} is recorded by the {'reference' if sides[0] else 'candidate'} alone", reach)


_Values = dict[str | None, set[object]]


def _differing(name: str, own: _Values, theirs: _Values) -> Iterator[str]:
    """What of one setting differs, in words, with the parameters, or groups, of which it does."""
    common = [key for key in own if key in theirs]
    if None in own or None in theirs or not common:
        sides = [{value for values in side.values() for value in values} for side in (own, theirs)]
        if all(sides) and sides[0] != sides[1]:
            yield f"{name} {_listed(sides[0])} against {_listed(sides[1])}"
        return
    texts: dict[str, list[str]] = {}
    for key in common:
        if own[key] != theirs[key]:
            text = f"{name} {_listed(own[key])} against {_listed(theirs[key])}"
            texts.setdefault(text, []).append(str(key))
    for text, names in texts.items():
        yield text + _of(names, len(common))


def _by_parameter(holding: Holding, name: str, *, exact: bool) -> _Values:
    """The values that a setting has for each parameter; under None for groups that don't say which are theirs."""
    found: _Values = {}
    for group in holding.groups:
        if name in group.hyperparameters:
            for parameter in (None,) if group.parameters is None else group.parameters:
                value = group.hyperparameters[name]
                found.setdefault(parameter, set()).add(value if exact else _single(value))
    return found


def _by_number(holding: Holding, name: str, *, exact: bool) -> _Values:
    """The values that a setting has in each group, over all files."""
    found: _Values = {}
    for group in holding.groups:
        if name in group.hyperparameters:
            value = group.hyperparameters[name]
            found.setdefault(f"group {group.number}", set()).add(value if exact else _single(value))
    return found


def _single(value: Hyperparameter) -> Hyperparameter:
    """A number as float32 keeps it."""
    if isinstance(value, tuple):
        return tuple(_single(each) for each in value)  # type: ignore[misc]
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        return float(f"{np.float32(value):.7g}")


def _file_of(holding: Holding, name: str) -> str:
    return _only(group.file for group in holding.groups if not name or name in group.hyperparameters)


def _of(names: Sequence[str], count: int) -> str:
    return "" if len(names) == count else f" (for {_few(names)})"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _only(files: Iterable[str]) -> str:
    named = {file.rpartition("/")[2] for file in files}
    return named.pop() if len(named) == 1 else ""


def _dtypes(reference: Holding, candidate: Holding) -> Iterator[Recorded]:
    for role, what in _KEPT.items():
        names = [name for kind, name in reference.numbers if kind is role and (role, name) in candidate.numbers]
        sides = [
            {side.tensors[side.numbers[role, name]].dtype.name for name in names} for side in (reference, candidate)
        ]
        if sides[0] != sides[1]:
            yield Recorded(f"{what} in {_listed(sides[0])} against {_listed(sides[1])}", Reach.ALL)


def _scalars(reference: Holding, candidate: Holding, *, alone: bool) -> Iterator[Recorded]:
    own, theirs = _by_name(reference.scalars), _by_name(candidate.scalars)
    differing: dict[tuple[str, str], list[str]] = {}
    for key in sorted(own.keys() | theirs.keys()):
        name, tensor = key
        if key not in own or key not in theirs:
            if alone:
                side = "reference" if key in own else "candidate"
                differing.setdefault((name, f"{name} is recorded by the {side} alone"), []).append(tensor)
        elif not _equal(own[key], theirs[key], by_place=name == RANDOM and not alone):
            values = (_listed(set(side[key].values())) for side in (own, theirs))
            text = "random states differ" if name == RANDOM else f"{name} {' against '.join(values)}"
            differing.setdefault((name, text), []).append(tensor)
    counts = counted_steps(reference), counted_steps(candidate)
    if all(counts) and counts[0] != counts[1] and not any(name == COUNT for name, _ in differing):
        yield Recorded(f"optimizer steps {counts[0]:g} against {counts[1]:g}", Reach.ALL, _file_of(candidate, ""))
    for (name, text), tensors in differing.items():
        file = _only(one.file for one in candidate.scalars if one.name == name)
        of = f" of {_few(tensors)}" if tensors[0] else ""
        yield Recorded(text + of, Reach.DRAWS if name == RANDOM else Reach.ALL, file)


_Named = dict[tuple[str, str], dict[Coordinate, float]]


def _by_name(scalars: Sequence[Scalar]) -> _Named:
    """By name, and the parameter that it is of, what each place records."""
    found: _Named = {}
    for one in scalars:
        found.setdefault((one.name, one.tensor), {})[one.coordinate] = one.value
    return found


def _equal(own: Mapping[Coordinate, float], theirs: Mapping[Coordinate, float], *, by_place: bool) -> bool:
    """Whether two sides record one thing; ``by_place``: of another number of ranks nothing is said."""
    if by_place and own.keys() != theirs.keys():
        return True
    values = {*own.values()}, {*theirs.values()}
    if all(math.isnan(value) for side in values for value in side):
        return True
    return own == theirs if by_place else values[0] == values[1]


def _listed(values: Iterable[object]) -> str:
    named = sorted(map(str, values))
    return ", ".join(named[:4]) + (", …" if len(named) > 4 else "")
