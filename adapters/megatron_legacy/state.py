"""What one rank file of a legacy Megatron-LM checkpoint holds: parameters, and the optimizer's state tied to them.

The optimizer's state is torch's, keyed by integers (``optimizer_index``). Megatron hands parameters over in model
order, dealt out to a group with weight decay and one without: biases and what has one dim. Its 16-bit optimizer puts
an fp32 master in the place of every 16-bit parameter and saves the masters group by group, in the same order, as
``fp32_from_fp16_params``. Source: Megatron-LM ``megatron/core/optimizer/__init__.py`` (_get_param_groups) and
``optimizer.py`` (Float16OptimizerWithFloat16Params).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from auditor.adapters.megatron_legacy.buffers import FlatState, flat_state
from auditor.adapters.megatron_legacy.files import Place, StepFiles, flattened, models_in
from auditor.adapters.megatron_legacy.layout import is_buffer
from auditor.adapters.megatron_names import megatron_args
from auditor.adapters.optimizer_index import (
    ROLES,
    Attached,
    IndexedState,
    attach,
    indexed_state,
    role_and_name,
    split_by_decay,
    undecayed,
)
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role


class Slot(NamedTuple):
    """What is kept of one tensor in one rank file."""

    chunk: int
    key: str
    """The model's key."""
    role: Role
    suffix: str = ""
    """What the optimizer keeps besides the usual, appended to the tensor's name."""
    path: str = ""
    """Where in the file it is."""
    apart: bool = False
    """Whether that is the distributed optimizer's file."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank file's tensors."""

    model: Mapping[int, Mapping[str, StoredTensor]] = field(default_factory=dict)
    """Chunk to key to tensor."""
    slots: Mapping[Slot, StoredTensor] = field(default_factory=dict)
    """All that has a name."""
    nameless: Mapping[tuple[str, Role], StoredTensor] = field(default_factory=dict)
    """Optimizer state by its path in the file, whether or not it also has a name."""
    reason: str = ""
    """Why the optimizer's state has no names."""
    orphans: Mapping[tuple[str, Role], StoredTensor] = field(default_factory=dict)
    """State of numbers that no parameter group has, by its path in the file."""
    optimizers: tuple[NumberedState, ...] = ()
    """What is recorded of each optimizer besides tensors; several where they are chained."""
    distributed: FlatState = field(default_factory=FlatState)
    """What the distributed optimizer's file holds."""


@dataclass(frozen=True, slots=True)
class NumberedState:
    """One optimizer's groups and the parameters that its numbers stand for."""

    path: str
    """Where in the file it is."""
    state: IndexedState
    names: Mapping[int, str] = field(default_factory=dict)
    """Parameter number to the path of the parameter in the file; empty where that isn't known."""


def read_state(files: StepFiles, at: Place) -> RankState:
    """The tensors of one rank's files; nothing of what could not be read."""
    file, apart = files.models[at], files.optimizers.get(at)
    state, parameters = _read(file)
    if apart is None or apart.content is None:
        return state
    found = flat_state(apart, parameters, megatron_args(file) or files.args, at, files.degrees)
    slots = {
        Slot(parameters[name][0], parameters[name][1], role, "", path, apart=True): tensor
        for (name, role, path), tensor in found.tensors.items()
    }
    return replace(state, slots={**state.slots, **slots}, reason=state.reason or found.reason, distributed=found)


def _read(file: StepFile) -> tuple[RankState, dict[str, tuple[int, str, StoredTensor]]]:
    """The tensors of one model file, and its parameters as an optimizer was handed them."""
    chunks = models_in(file.tree)
    model = {number: flattened(value) for number, (_, value) in enumerate(chunks)}
    slots = {
        Slot(number, key, Role.BUFFER if is_buffer(key) else Role.PARAMETER, "", f"{chunks[number][0]}.{key}"): tensor
        for number, keys in model.items()
        for key, tensor in keys.items()
    }
    parameters: dict[str, tuple[int, str, StoredTensor]] = {}
    seen = set()
    for slot, tensor in slots.items():
        place = tensor.storage, tensor.offset
        if slot.role is Role.PARAMETER and place not in seen:
            parameters[slot.path] = slot.chunk, slot.key, tensor
            seen.add(place)
    saved = file.tree.get("optimizer")
    if isinstance(saved, list):
        chained = {f"optimizer.{at}": item for at, item in enumerate(saved)}
        nameless = {entry: tensor for path, item in chained.items() for entry, tensor in _nameless(item, path)}
        reason = "several optimizers are chained: which parameters each has is not recorded" if nameless else ""
        optimizers = tuple(found for path, item in chained.items() for found in _numbered(item, path, {}))
        return RankState(model, slots, nameless, reason, optimizers=optimizers), parameters
    nameless = dict(_nameless(saved, "optimizer"))
    attached = _attached(saved, parameters, apply_to_qk=bool(megatron_args(file).get("apply_wd_to_qk_layernorm")))
    optimizers = tuple(_numbered(saved, "optimizer", attached.names))
    if not nameless:
        return RankState(model, slots, optimizers=optimizers), parameters
    found, reason = _named(saved, parameters, attached)
    if reason:
        unnamed = tuple(_numbered(saved, "optimizer", {}))
        return RankState(model, slots, nameless, reason, optimizers=unnamed), parameters
    return RankState(model, slots | found, nameless, "", _orphans(optimizers, nameless), optimizers), parameters


def _numbered(saved: object, path: str, names: Mapping[int, str]) -> Iterator[NumberedState]:
    """One optimizer's groups; those of a distributed one don't say which parameters they have."""
    state, _, inside, _ = _parts(saved)
    if state is None and isinstance(saved, dict):
        inner = saved.get("optimizer") if inside else saved
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
            state = IndexedState(tuple(groups), tuple(() for _ in groups), {})
    if state is not None:
        yield NumberedState(f"{path}{inside}", state, names)


def _orphans(
    optimizers: tuple[NumberedState, ...], nameless: Mapping[tuple[str, Role], StoredTensor]
) -> dict[tuple[str, Role], StoredTensor]:
    heads = tuple(f"{item.path}.state.{number}." for item in optimizers for number in item.state.orphans)
    return {entry: tensor for entry, tensor in nameless.items() if heads and entry[0].startswith(heads)}


def _parts(saved: object) -> tuple[IndexedState | None, list[list[StoredTensor]], str, str]:
    """Torch's state, the masters of each group, and where in the file the two are."""
    if not isinstance(saved, dict):
        return None, [], "", ""
    inner = saved.get("optimizer") if "optimizer" in saved else saved
    key = "fp32_from_fp16_params" if "fp32_from_fp16_params" in saved else "fp32_from_fp16"
    groups = saved.get(key)
    masters = [
        [tensor for tensor in group if isinstance(tensor, StoredTensor)] if isinstance(group, list) else []
        for group in (groups if isinstance(groups, list) else ())
    ]
    return indexed_state(inner), masters, ".optimizer" if "optimizer" in saved else "", f".{key}"


def _nameless(saved: object, path: str) -> Iterator[tuple[tuple[str, Role], StoredTensor]]:
    """All state tensors and masters by their path in the file."""
    state, masters, inside, key = _parts(saved)
    for number, what, tensor in state.flat() if state else ():
        yield (f"{path}{inside}.state.{number}.{what}", ROLES.get(what, Role.MOMENT)), tensor
    for at, group in enumerate(masters):
        for number, tensor in enumerate(group):
            yield (f"{path}{key}.{at}.{number}", Role.MASTER), tensor


def _attached(saved: Any, parameters: Mapping[str, tuple[int, str, StoredTensor]], *, apply_to_qk: bool) -> Attached:
    """The parameters that the optimizer's numbers stand for."""
    state, _, _, _ = _parts(saved)
    if state is None:
        return Attached({}, (), "the optimizer's parameter groups are not recorded")
    shapes = {path: tensor.shape for path, (_, _, tensor) in parameters.items()}

    def exempt(name: str, shape: tuple[int, ...]) -> bool:
        normalised = "q_layernorm." in name or "k_layernorm." in name
        return undecayed(name, shape) and not (apply_to_qk and normalised)

    return attach(shapes, state, [split_by_decay(shapes, state, exempt)])


def _named(
    saved: Any, parameters: Mapping[str, tuple[int, str, StoredTensor]], attached: Attached
) -> tuple[dict[Slot, StoredTensor], str]:
    """State and masters with the parameters they belong to, or the reason why that isn't known."""
    state, masters, inside, key = _parts(saved)
    found: dict[Slot, StoredTensor] = {}
    for number, what, tensor in state.flat() if state else ():
        if number in attached.names:
            chunk, name, _ = parameters[attached.names[number]]
            role, full = role_and_name(name, what)
            suffix = full.removeprefix(name)
            found[Slot(chunk, name, role, suffix, f"optimizer{inside}.state.{number}.{what}")] = tensor
    of_masters = _masters(masters, attached, parameters, key)
    if attached.reason or of_masters is None:
        return {}, attached.reason or "the fp32 masters fit no known order of the model's parameters"
    return found | of_masters, ""


def _masters(
    masters: list[list[StoredTensor]], attached: Attached, parameters: Mapping[str, tuple[int, str, StoredTensor]],
    key: str,
) -> dict[Slot, StoredTensor] | None:  # fmt: skip
    """Masters with their parameters: those of a group's 16-bit parameters, in order. None where shapes don't fit."""
    found: dict[Slot, StoredTensor] = {}
    if not masters or not attached.order:
        return found
    if len(masters) != len(attached.order):
        return None
    for at, (group, names) in enumerate(zip(masters, attached.order, strict=True)):
        halves = [parameters[name] for name in names if parameters[name][2].dtype.bits == 16]
        if [tensor.shape for tensor in group] != [tensor.shape for _, _, tensor in halves]:
            return None
        for number, (tensor, (chunk, name, _)) in enumerate(zip(group, halves, strict=True)):
            found[Slot(chunk, name, Role.MASTER, "", f"optimizer{key}.{at}.{number}")] = tensor
    return found
