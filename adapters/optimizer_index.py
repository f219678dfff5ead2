"""Which parameter an integer in a torch optimizer's state dict stands for.

``torch.optim.Optimizer.state_dict`` gives no names. It numbers parameters in the order in which they were handed over,
group after group: ``param_groups[i]["params"]`` holds those numbers and ``state`` is keyed by them (source: torch
``torch/optim/optimizer.py``, ``pack_group``). Which order they were handed over in is the training code's affair; two
are usual:

- *consecutive*: ``model.parameters()``, which is the order of the model's state dict without buffers and without the
  later names of tied parameters; several groups cut it into runs;
- *split by decay*: the same order, dealt out to a group with weight decay and one without (biases and what has one
  dim). Source: Megatron-LM ``megatron/core/optimizer/__init__.py`` (``_get_param_groups``) and many training scripts.

Nothing is guessed: an order counts only if every group has as many parameters as it says and every stored moment has
its parameter's shape, and names are attached only if all orders that fit agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role

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


@dataclass(frozen=True, slots=True)
class IndexedState:
    """Optimizer state in torch's form."""

    groups: tuple[Mapping[Any, Any], ...]
    """Hyperparameters of each group."""
    numbers: tuple[tuple[int, ...], ...]
    """Each group's parameters."""
    tensors: Mapping[int, Mapping[str, StoredTensor]]
    """Parameter number to what is kept for it."""

    def flat(self) -> Iterator[tuple[int, str, StoredTensor]]:
        """All stored tensors with their parameter's number and their key."""
        for number, kept in self.tensors.items():
            for key, tensor in kept.items():
                yield number, key, tensor


@dataclass(frozen=True, slots=True)
class Attached:
    """Parameter numbers to names; without names, the reason."""

    names: Mapping[int, str]
    order: Order = ()
    reason: str = ""


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
    if len(flat) > MAX_PARAMETERS or not all(type(number) is int for number in flat):
        return None
    tensors = {
        number: {key: t for key, t in kept.items() if isinstance(key, str) and isinstance(t, StoredTensor)}
        for number, kept in state.items()
        if type(number) is int and isinstance(kept, dict)
    }
    return IndexedState(tuple(groups), tuple(tuple(of_group or ()) for of_group in numbers), tensors)


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


def attach(shapes: Shapes, state: IndexedState, orders: Sequence[Order | None]) -> Attached:
    """Names for the numbers of ``state``, if exactly one of ``orders`` fits counts and shapes."""
    known = [order for order in orders if order is not None]
    if not known:
        num_handed = sum(map(len, state.numbers))
        reason = f"the optimizer has {num_handed} parameters in {len(state.numbers)} groups; no known order of the "
        return Attached({}, (), f"{reason}model's {len(shapes)} fits that")
    fitting = {order: names for order in known if (names := _names(shapes, state, order)) is not None}
    if not fitting:
        return Attached({}, (), "shapes of the optimizer's state fit no known order of the model's parameters")
    if len({tuple(sorted(names.items())) for names in fitting.values()}) > 1:
        return Attached({}, (), "the optimizer's state fits several orders of the model's parameters")
    order, names = next(iter(fitting.items()))
    return Attached(names, order)


def _names(shapes: Shapes, state: IndexedState, order: Order) -> dict[int, str] | None:
    """Numbers to names by ``order``, or None where some stored tensor's shape is not its parameter's."""
    names: dict[int, str] = {}
    for numbers, of_group in zip(state.numbers, order, strict=True):
        if len(numbers) != len(of_group):
            return None
        names |= dict(zip(numbers, of_group, strict=True))
    if len(names) != sum(map(len, order)) or not state.tensors.keys() <= names.keys():
        return None
    for number, key, tensor in state.flat():
        # Counters are kept without dims whatever the parameter's shape is.
        if tensor.shape != shapes[names[number]] and (key != "step" or tensor.num_elements != 1):
            return None
    return names


def role_and_name(name: str, key: str) -> tuple[Role, str]:
    """The role of what the optimizer keeps under ``key`` for parameter ``name``, and the tensor's name."""
    return (ROLES[key], name) if key in ROLES else (Role.MOMENT, f"{name}.{key}")
