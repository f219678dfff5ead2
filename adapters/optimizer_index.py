"""Which parameter an integer in a torch optimizer's state dict stands for.

``torch.optim.Optimizer.state_dict`` gives no names. It numbers parameters in the order in which they were handed over,
group after group: ``param_groups[i]["params"]`` holds those numbers and ``state`` is keyed by them (source: torch
``torch/optim/optimizer.py``, ``pack_group``). Which order they were handed over in is the training code's affair; three
are usual:

- *consecutive*: ``model.parameters()``, which is the order of the model's state dict without buffers and without the
  later names of tied parameters; several groups cut it into runs;
- *split by decay*: the same order, dealt out to a group with weight decay and one without (biases and what has one
  dim). Source: Megatron-LM ``megatron/core/optimizer/__init__.py`` (``_get_param_groups``) and many training scripts.

- *decayed first*: dealt out so to exactly these two groups in this order, which both may have a weight decay of 0.
  Source: transformers ``trainer.py`` (``create_optimizer``).

Any of them may have been handed over without the frozen parameters. Shapes of the moments then tell which those are,
where they differ: numbers go on in the model's order, so that the first place that a parameter can have and the last
are found by walking through the model from either end. Where the two are one it is that parameter; the others (some of
several equal layers are frozen) stay without a name.

Since torch 2.6 an optimizer that was handed ``named_parameters()`` records the names, as ``param_names`` of each group.
What FSDP gathers (``optim_state_dict``) has names in the place of numbers: in groups, and as keys of the state.

Nothing is guessed: an order counts only if every group has as many parameters as it says and every stored moment has
its parameter's shape, and names are attached only if all orders that fit agree (without frozen parameters: as far as
they do). Where none fits, one under which most
moments do is taken if no other order could make the rest fit: then it is the state that is damaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from auditor.adapters.other_tensors import inner_tensors, is_tensor
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role
from auditor.model.optimizer import Hyperparameter

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name to shape, in the order of the model."""
Order = tuple[tuple[str, ...], ...]
"""Per group, the names in the order of the group's numbers."""

ROLES = {
    "exp_avg": Role.FIRST_MOMENT, "exp_avg_sq": Role.SECOND_MOMENT, "momentum_buffer": Role.MOMENT,
    "step": Role.COUNTER,
}  # fmt: skip
"""What torch's optimizers call their state. Other tensors are moments under a name of their own."""
MAX_PARAMETERS = 1 << 20
MAX_SETTINGS = 64
"""Hyperparameters of one group, and numbers in one of them, that are looked at."""
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""What has its parameter's shape in every optimizer."""
_NO_SETTINGS = frozenset({"params", "param_names", "step", "foreach", "fused", "capturable", "differentiable"})
"""What groups hold besides hyperparameters: who is in them, how far they are, how the arithmetic is carried out."""


@dataclass(frozen=True, slots=True)
class IndexedState:
    """Optimizer state in torch's form."""

    groups: tuple[Mapping[Any, Any], ...]
    """Hyperparameters of each group."""
    numbers: tuple[tuple[int, ...], ...]
    """Each group's parameters."""
    tensors: Mapping[int, Mapping[str, StoredTensor]]
    """Parameter number to what is kept for it."""
    counts: Mapping[int, float] = field(default_factory=dict)
    """Parameter number to the count of its steps, where that is kept as a plain number."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Parameter number to the name that stands in its place, where the state is kept by name."""

    def key(self, number: int) -> str:
        """By what the file has a parameter's state."""
        return self.names.get(number, str(number))

    @property
    def orphans(self) -> frozenset[int]:
        """Numbers that no group has."""
        return frozenset(self.tensors).difference(*self.numbers)

    def flat(self) -> Iterator[tuple[int, str, StoredTensor]]:
        """All stored tensors with their parameter's number and their key."""
        for number, kept in self.tensors.items():
            for key, tensor in kept.items():
                yield number, key, tensor


@dataclass(frozen=True, slots=True)
class Attached:
    """Parameter numbers to names."""

    names: Mapping[int, str]
    order: Order = ()
    reason: str = ""
    """Why numbers have no name, where some have none that should."""


def indexed_state(value: object) -> IndexedState | None:
    """``value`` as optimizer state in torch's form, or None where it is something else."""
    if not isinstance(value, dict):
        return None
    groups, state = value.get("param_groups"), value.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict) or len(state) > MAX_PARAMETERS:
        return None
    numbers = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not all(isinstance(of_group, list) for of_group in numbers):
        return None
    flat = [number for of_group in numbers for number in of_group or ()]
    if len(flat) > MAX_PARAMETERS:
        return None
    if flat and all(type(name) is str for name in flat):
        return _by_name(groups, state, flat)
    if not all(type(number) is int for number in flat):
        return None
    kept = {number: of for number, of in state.items() if type(number) is int and isinstance(of, dict)}
    return _state(groups, [tuple(of_group or ()) for of_group in numbers], kept)


def _by_name(groups: Sequence[Any], state: Mapping[Any, Any], flat: Sequence[str]) -> IndexedState:
    """State with names in the place of numbers, which it is given here in the order of the groups."""
    kept = {name: of for name, of in state.items() if type(name) is str and isinstance(of, dict)}
    numbered = {name: number for number, name in enumerate(dict.fromkeys([*flat, *kept]))}
    named_groups = [{**group, "param_names": group["params"]} for group in groups]
    numbers = [tuple(numbered[name] for name in group["params"]) for group in groups]
    found = _state(named_groups, numbers, {numbered[name]: of for name, of in kept.items()})
    return replace(found, names={number: name for name, number in numbered.items()})


def _state(
    groups: Sequence[Any], numbers: Sequence[tuple[int, ...]], kept: Mapping[int, Mapping[Any, Any]]
) -> IndexedState:
    tensors = {number: dict(_tensors_in(of)) for number, of in kept.items()}
    counts = {number: float(of["step"]) for number, of in kept.items() if is_count(of.get("step"))}
    return IndexedState(tuple(groups), tuple(numbers), tensors, counts)


def _tensors_in(kept: Mapping[Any, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors kept for one parameter; of subclasses, as optimizers of eight bits have, what they are made of."""
    for key, value in kept.items():
        if isinstance(key, str) and isinstance(value, StoredTensor):
            yield key, value
        elif isinstance(key, str) and isinstance(value, Opaque) and is_tensor(value):
            # One key of the parameter's state, whatever dots are in it.
            yield from ((f"{key}:{name.replace('.', ':')}", tensor) for name, tensor in inner_tensors(value).items())


def is_count(value: object) -> TypeGuard[int | float]:
    """Whether a value may be a count of steps."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 53


def is_setting(key: object) -> bool:
    """Whether a group's entry under this key is a hyperparameter."""
    return isinstance(key, str) and key not in _NO_SETTINGS and len(key) <= MAX_SETTINGS


def settings(group: Mapping[Any, Any]) -> dict[str, Hyperparameter]:
    """The hyperparameters of one group; those kept as tensors, and objects of any other kind, are left out."""
    found: dict[str, Hyperparameter] = {}
    for key, value in [*group.items()][:MAX_SETTINGS]:
        if not is_setting(key):
            continue
        if value is None or isinstance(value, (bool, float)) or (isinstance(value, str) and len(value) < 256):
            found[key] = value
        elif isinstance(value, int) and abs(value) < 1 << 53:
            found[key] = float(value)
        elif (
            isinstance(value, (list, tuple))
            and len(value) <= MAX_SETTINGS
            and all(isinstance(one, float) or is_count(one) for one in value)
        ):
            found[key] = tuple(map(float, value))
    return found


def consecutive(shapes: Shapes, state: IndexedState) -> Order | None:
    """Groups as runs of the model's order; None where the counts don't fit."""
    if sum(map(len, state.numbers)) != len(shapes):
        return None
    names = iter(shapes)
    return tuple(tuple(next(names) for _ in numbers) for numbers in state.numbers)


def undecayed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the usual rule exempts a parameter from weight decay: a bias, or one dim."""
    return name.endswith("bias") or len(shape) <= 1


def split_by_decay(
    shapes: Shapes, state: IndexedState, exempt: Callable[[str, tuple[int, ...]], bool] = undecayed
) -> Order | None:
    """The model's order dealt out to groups with and without weight decay; None where the groups don't tell them apart.

    Megatron records ``wd_mult`` (0 or 1), others ``weight_decay`` alone.
    """
    decayed = [bool(group.get("wd_mult", group.get("weight_decay"))) for group in state.groups]
    if len(set(decayed)) != len(decayed):
        return None
    order = tuple(tuple(name for name, shape in shapes.items() if exempt(name, shape) is not flag) for flag in decayed)
    whole = sum(map(len, order)) == len(shapes)
    return order if whole and tuple(map(len, order)) == tuple(map(len, state.numbers)) else None


def decayed_first(shapes: Shapes, state: IndexedState) -> Order | None:
    """The model's order dealt out to two groups, what the usual rule exempts from weight decay in the second.

    None where the counts don't fit, or the second group alone has a weight decay.
    """
    if len(state.groups) != 2 or state.groups[1].get("weight_decay"):
        return None
    exempt = [undecayed(name, shape) for name, shape in shapes.items()]
    order = tuple(
        tuple(name for name, flag in zip(shapes, exempt, strict=True) if flag is second) for second in (False, True)
    )
    return order if tuple(map(len, order)) == tuple(map(len, state.numbers)) else None


def without_frozen(shapes: Shapes, state: IndexedState) -> tuple[Order, ...]:
    """The usual orders less parameters that were not handed over: of each the first and the last that shapes allow.

    None where as many were handed over as the model has, or no moments are stored to tell them by.
    """
    if sum(map(len, state.numbers)) >= len(shapes) or not state.tensors:
        return ()
    ways = [_walked([*shapes], [n for numbers in state.numbers for n in numbers], shapes, state)]
    decayed = [bool(group.get("wd_mult", group.get("weight_decay"))) for group in state.groups]
    for flags in dict.fromkeys([(True, False), tuple(decayed)]) if len(decayed) == 2 else ():
        if len(set(flags)) == 2:
            dealt = [[name for name, shape in shapes.items() if undecayed(name, shape) is not flag] for flag in flags]
            parts = [
                _walked(names, numbers, shapes, state) for names, numbers in zip(dealt, state.numbers, strict=True)
            ]
            ways.append([[*first, *second] for first, second in zip(*parts, strict=True)] if all(parts) else [])
    flat = list(dict.fromkeys(tuple(way) for both in ways for way in both))
    cuts = [0]
    for numbers in state.numbers:
        cuts.append(cuts[-1] + len(numbers))
    return tuple(tuple(way[low:high] for low, high in itertools.pairwise(cuts)) for way in flat)


def _walked(names: Sequence[str], numbers: Sequence[int], shapes: Shapes, state: IndexedState) -> list[list[str]]:
    """The first and the last of the ``names``, in their order, that the ``numbers`` can be; none if they can't be."""
    found = []
    for way in (1, -1):
        rest = iter(names[::way])
        chosen = [
            next((name for name in rest if _misfit(state.tensors.get(n, {}), shapes[name]) is None), "")
            for n in numbers[::way]
        ]
        if "" in chosen:
            return []
        found.append(chosen[::way])
    return found


def named(shapes: Shapes, state: IndexedState) -> Order | None:
    """The order that the groups record by name; None where they don't, or name what the model does not have."""
    order = []
    for group, numbers in zip(state.groups, state.numbers, strict=True):
        names = group.get("param_names")
        if not isinstance(names, list) or len(names) != len(numbers) or not all(isinstance(n, str) for n in names):
            return None
        order.append(tuple(name if name in shapes else f"module.{name}" for name in names))
    known = all(name in shapes for names in order for name in names)
    return tuple(order) if known and any(order) else None


def attach(
    shapes: Shapes, state: IndexedState, orders: Sequence[Order | None], frozen: Sequence[Order] = ()
) -> Attached:  # fmt: skip
    """Names for the numbers of ``state``, if exactly one of ``orders`` fits counts and shapes.

    ``frozen``: where none does, those less what was not handed over (:func:`without_frozen`).
    """
    recorded = named(shapes, state)
    if state.names and recorded is None:
        unknown = next((name for name in state.names.values() if name not in shapes), "")
        return Attached({}, (), f"the optimizer's state is kept by names, of which the model lacks {unknown}")
    known = [recorded] if recorded else [order for order in orders if order is not None]
    if not known and frozen:
        return _agreed(state, frozen)
    if not known:
        num_handed = sum(map(len, state.numbers))
        reason = f"the optimizer has {num_handed} parameters in {len(state.numbers)} groups; no known order of the "
        return Attached({}, (), f"{reason}model's {len(shapes)} fits that")
    numbered = {order: names for order in known if (names := _numbered(state, order)) is not None}
    fitting = {order: names for order, names in numbered.items() if not _misfits(shapes, state, names)}
    if not fitting:
        fitting = {order: names for order, names in numbered.items() if recorded or _damaged(shapes, state, names)}
    if not fitting:
        return Attached({}, (), "shapes of the optimizer's state fit no known order of the model's parameters")
    if len({tuple(sorted(names.items())) for names in fitting.values()}) > 1:
        return Attached({}, (), "the optimizer's state fits several orders of the model's parameters")
    order, names = next(iter(fitting.items()))
    return Attached(names, order)


def _agreed(state: IndexedState, orders: Sequence[Order]) -> Attached:
    """The names on which all orders agree."""
    ways = [[name for names in order for name in names] for order in orders]
    numbers = [number for of_group in state.numbers for number in of_group]
    names = {number: way[0] for number, *way in zip(numbers, *ways, strict=True) if len(set(way)) == 1}
    alike = "not all parameters were handed to the optimizer, and which of several of one shape it has is not recorded"
    return Attached(names, orders[0], alike if len(names) < len(numbers) else "")


def _numbered(state: IndexedState, order: Order) -> dict[int, str] | None:
    """Numbers to names by ``order``, or None where the counts don't fit."""
    names: dict[int, str] = {}
    for numbers, of_group in zip(state.numbers, order, strict=True):
        if len(numbers) != len(of_group):
            return None
        names |= dict(zip(numbers, of_group, strict=True))
    return names if len(names) == sum(map(len, order)) else None


def _misfits(shapes: Shapes, state: IndexedState, names: Mapping[int, str]) -> dict[int, tuple[int, ...]]:
    """Parameter numbers whose state has not the parameter's shape, with the shape that it has."""
    found: dict[int, tuple[int, ...]] = {}
    for number, kept in state.tensors.items():
        if number in names and (odd := _misfit(kept, shapes[names[number]])) is not None:
            found[number] = odd
    return found


def _misfit(kept: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of what is kept for a parameter, if it isn't that of the parameter."""
    for key in _SHAPED:
        if key in kept and kept[key].shape != shape:
            return kept[key].shape
    # Counters and the like have one element whatever the parameter's shape is; factors lack one dim of two.
    sized = {key: tensor.shape for key, tensor in kept.items() if tensor.num_elements != 1}
    row, column = shape[:-1], (*shape[:-2], *shape[-1:])
    factors = {
        "exp_avg_sq_row": row, "exp_avg_sq_col": column, "row_var": (*row, 1), "col_var": (*shape[:-2], 1, *shape[-1:]),
    }  # fmt: skip
    fits = any(stored in (shape, factors.get(key)) for key, stored in sized.items())
    return None if fits or not sized else next(iter(sized.values()))


def _damaged(shapes: Shapes, state: IndexedState, names: Mapping[int, str]) -> bool:
    """Whether some state has a shape that no order would explain, while most fits.

    Another order deals the same shapes out otherwise; shapes that none of the parameters concerned has are foreign in
    any. Of ``model.parameters()`` in one group, two that have each other's shape are taken for exchanged.
    """
    odd = _misfits(shapes, state, names)
    wanted = sorted(shapes[names[number]] for number in odd)
    foreign = not set(odd.values()) & set(wanted)
    exchanged = len(odd) == 2 and len(state.groups) == 1 and sorted(odd.values()) == wanted
    return 2 * len(odd) < len(state.tensors) and (foreign or exchanged)


def role_and_name(name: str, key: str) -> tuple[Role, str]:
    """The role of what the optimizer keeps under ``key`` for parameter ``name``, and the tensor's name.

    Where it isn't known which parameter it is, the place of its state (``optimizer.state.9``) is its name: what is kept
    for one parameter belongs together all the same.
    """
    return (ROLES[key], name) if key in ROLES else (Role.MOMENT, f"{name}.{key}")
