"""What one rank file of a legacy Megatron-LM checkpoint holds: parameters, and the optimizer's state tied to them.

The optimizer's state is torch's, keyed by integers (``optimizer_index``). Megatron hands parameters over in model
order, dealt out to a group with weight decay and one without: biases and what has one dim. Its 16-bit optimizer puts
an fp32 master in the place of every 16-bit parameter and saves the masters group by group, in the same order, as
``fp32_from_fp16_params``. Source: Megatron-LM ``megatron/core/optimizer/__init__.py`` (_get_param_groups) and
``optimizer.py`` (Float16OptimizerWithFloat16Params).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from auditor.adapters.deepspeed_files import StepFile, megatron_args
from auditor.adapters.megatron_legacy_files import flattened, models_in
from auditor.adapters.megatron_legacy_layout import is_buffer
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


def read_state(file: StepFile) -> RankState:
    """The tensors of one file; nothing where it could not be read."""
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
        named = {f"optimizer.{at}": item for at, item in enumerate(saved)}
        nameless = {entry: tensor for path, item in named.items() for entry, tensor in _nameless(item, path)}
        reason = "several optimizers are chained: which parameters each has is not recorded" if nameless else ""
        return RankState(model, slots, nameless, reason)
    nameless = dict(_nameless(saved, "optimizer"))
    if not nameless:
        return RankState(model, slots)
    found, reason = _named(saved, parameters, apply_to_qk=bool(megatron_args(file).get("apply_wd_to_qk_layernorm")))
    return RankState(model, slots | found, nameless, reason)


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


def _named(
    saved: Any, parameters: Mapping[str, tuple[int, str, StoredTensor]], *, apply_to_qk: bool
) -> tuple[dict[Slot, StoredTensor], str]:
    """State and masters with the parameters they belong to, or the reason why that isn't known."""
    state, masters, inside, key = _parts(saved)
    if state is None:
        return {}, "the optimizer's parameter groups are not recorded"
    shapes = {path: tensor.shape for path, (_, _, tensor) in parameters.items()}

    def exempt(name: str, shape: tuple[int, ...]) -> bool:
        normalised = "q_layernorm." in name or "k_layernorm." in name
        return undecayed(name, shape) and not (apply_to_qk and normalised)

    attached = attach(shapes, state, [split_by_decay(shapes, state, exempt)])
    found: dict[Slot, StoredTensor] = {}
    for number, what, tensor in state.flat() if attached.names else ():
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


def fused_step(file: StepFile) -> float | None:
    """The optimizer's step where it is a number in the first group (Apex and Transformer Engine keep it there)."""
    state, _, _, _ = _parts(file.tree.get("optimizer"))
    step = state.groups[0].get("step") if state and state.groups else None
    usable = isinstance(step, (int, float)) and not isinstance(step, bool) and abs(step) < 1 << 53
    return float(step) if usable and step is not None else None


def flat_buffers(file: StepFile) -> Iterator[tuple[str, Role, StoredTensor]]:
    """The flat buffers of a distributed optimizer's file with their paths: ``<buffer>.<dtypes>.<param|exp_avg|…>``."""
    roles = {"param": Role.MASTER, "exp_avg": Role.FIRST_MOMENT, "exp_avg_sq": Role.SECOND_MOMENT}
    stack: list[tuple[str, Any, int]] = [("distrib_optim", file.tree, 0)]
    while stack:
        path, value, depth = stack.pop()
        if not isinstance(value, dict) or depth > 4:
            continue
        for key, item in value.items():
            if isinstance(item, StoredTensor) and key in roles:
                yield f"{path}.{key}", roles[key], item
            elif isinstance(item, dict):
                stack.append((f"{path}.{_text(key)}"[:256], item, depth + 1))


def _text(key: object) -> str:
    return ",".join(map(_text, key)) if isinstance(key, tuple) and len(key) < 4 else str(key)[:64]
