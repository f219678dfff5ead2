"""The files of one step with a ``torch.save`` file a rank, and what one file holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.adapters.adapter import MAX_RANKS, Folder
from auditor.adapters.file_steps import are_of_module
from auditor.adapters.optimizer_index import IndexedState, indexed_state
from auditor.adapters.other_tensors import inner_tensors, is_tensor, kind_of
from auditor.adapters.step_file import StepFile
from auditor.adapters.step_names import StepName, step_name
from auditor.adapters.torch_per_rank.distributed import PartReader, flat_state, is_part
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import StoredTensor
from auditor.model.dtype import Kind

NAME = re.compile(r"(?P<head>(?:.*?(?<![a-z]))?rank[-_.]?)(?P<rank>\d{1,6})(?P<tail>(?:\D.*)?\.(?:pt|pth|bin|ckpt))")
_RANK = re.compile(r"rank[-_.]?$")
_OTHER_AXIS = re.compile(r"(?:^|.*[^a-z])(?:mp|tp|pp|ep|cp|sp|zero|tensor|pipeline|expert)[-_.]rank[-_.]?")
"""Ranks of another axis than data-parallel ones."""
_MODELS = ("model", "state_dict", "module", "model_state_dict", "model_state", "net", "weights", "params")
AVERAGES = ("ema", "model_ema", "ema_model", "ema_state_dict", "state_dict_ema", "ema_model_state_dict")
"""Under which scripts keep a moving average of the model's weights: a second state dict."""
STEPS = ("step", "iteration", "global_step", "global_steps", "iter_num", "iter", "num_updates")
_SETTINGS = ("args", "config", "cfg", "hparams", "hyper_parameters")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "model_parallel_size", "tensor_parallel_size",
          "pipeline_parallel_size", "tp_size", "pp_size", "tp", "pp", "local_steps", "sync_every", "diloco_sync_steps",
          "zero_stage")  # fmt: skip
"""Above 1 each of these lets ranks hold what others don't: parts, or weights that they average now and then."""
_BUFFER = re.compile(r"(?:.*\.)?(?:running_mean|running_var|num_batches_tracked)")
_LIVE = "current_model_state"
"""Where Lightning's ``WeightAveraging`` puts the weights; ``state_dict`` then holds their average."""
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state",
               "optimizer_states", "optimizers", "last_optimizer_state")  # fmt: skip
"""Under which scripts keep the optimizer's state; Lightning keeps a list of them (``optimizer_states``)."""
_FLAT = re.compile(r"(?:.*\.)?_?flat_param(?:_\d+)?")
"""What FSDP1 calls the parameters of one unit laid end to end, of which each rank has a part."""


@dataclass(frozen=True, slots=True)
class Series:
    """Files that differ in the rank alone."""

    head: str
    tail: str
    names: Mapping[int, str]
    """By rank."""
    doubles: Sequence[str] = ()
    whole: bool = False
    """Whether its one file is all that was saved, not one rank's."""

    def name(self, rank: int) -> str:
        """The file of a rank, its number as long as the others' are where those begin with zeros."""
        known = [name[len(self.head) : -len(self.tail)] for name in self.names.values()]
        width = max((len(number) for number in known if number.startswith("0")), default=1)
        return self.names.get(rank, f"{self.head}{rank:0{width}d}{self.tail}")


def series_in(folder: Folder) -> list[Series]:
    """The series in a folder, those with most files first; of a file that is looked at by itself, its own."""
    if folder.alone:
        (name,) = folder.files
        found = NAME.fullmatch(name)
        if found is None or _OTHER_AXIS.fullmatch(found["head"]) or int(found["rank"]) >= MAX_RANKS:
            return [Series(name, "", {0: name})]
        return [Series(found["head"], found["tail"], {int(found["rank"]): name})]
    names: dict[tuple[str, str], dict[int, str]] = {}
    doubles: dict[tuple[str, str], list[str]] = {}
    for name in folder.files:
        found = NAME.fullmatch(name)
        if found is None or _OTHER_AXIS.fullmatch(found["head"]) or "rank" in found["tail"]:
            continue
        of_series = names.setdefault((found["head"], found["tail"]), {})
        if int(found["rank"]) in of_series or int(found["rank"]) >= MAX_RANKS:
            doubles.setdefault((found["head"], found["tail"]), []).append(name)
        else:
            of_series[int(found["rank"])] = name
    found_series = [Series(*key, of_series, doubles.get(key, ())) for key, of_series in names.items()]
    return sorted(found_series, key=lambda item: -len(item.names))


def step_in_rank_name(name: str) -> StepName | None:
    """The step in the name of a rank's file, whose rank is left out; None where there is none.

    >>> step_in_rank_name("step_10_rank_0.pt").number, step_in_rank_name("rank0_epoch3.pt").number
    (10, 3)
    """
    found = NAME.fullmatch(name)
    if found is None or _OTHER_AXIS.fullmatch(found["head"]):
        return None
    return step_name(f"{_RANK.sub('', found['head'])}{found['tail']}")


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank file holds."""

    model: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Key within the state dict to tensor: whole, or as much as this file has of it."""
    parts: Sequence[str] = ()
    """Keys of records that say that the file holds a part, of which it is not known where it lies."""
    path: str = ""
    """Where the state dict is in the file, with a dot."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Key to the kind of tensor that it is, where its elements can't be read."""
    reader: PartReader = field(default_factory=PartReader)
    """What the file's records of parts have in common."""
    optimizer: IndexedState | None = None
    saved: str = ""
    """Where in the file that is, with a dot."""

    @property
    def found(self) -> bool:
        """Whether there is a state dict."""
        return bool(self.model or self.parts)

    def parameters(self) -> dict[str, StoredTensor]:
        """What an optimizer may have been handed: no buffers, no integers, no second names of tied parameters."""
        places: dict[object, str] = {}
        for key, tensor in self.model.items():
            if not is_buffer(key, tensor):
                places.setdefault((tensor.storage, tensor.offset, tensor.shape), key)
        return {key: self.model[key] for key in places.values()}


def is_buffer(key: str, tensor: StoredTensor) -> bool:
    """Running statistics; and integers, which can't be trained."""
    return bool(_BUFFER.fullmatch(key)) or tensor.dtype.kind not in (Kind.FLOAT, Kind.COMPLEX)


def rank_state(file: StepFile) -> RankState:
    """The model's and the optimizer's state of one file."""
    reader = PartReader()
    within, tree = _where_kept(file.tree)
    state = _model(tree, reader)
    saved, kept = _saved_optimizer(tree)
    optimizer = indexed_state(_whole(kept, reader)) if state.found else None
    if optimizer:
        flat = [tensor for name, tensor in state.parameters().items() if _FLAT.fullmatch(name)]
        optimizer = _with_flat_state(optimizer, flat)
    return replace(
        state, path=f"{within}{state.path}", reader=reader, optimizer=optimizer, saved=f"{within}{saved}."
    )  # fmt: skip


def _where_kept(tree: Mapping[Any, Any]) -> tuple[str, Mapping[Any, Any]]:
    """Where in a file the state dicts are, with a dot: Composer puts all under ``state``. And what is there."""
    inside = tree.get("state")
    if isinstance(inside, dict) and any(isinstance(inside.get(key), dict) for key in _MODELS):
        return "state.", inside
    return "", tree


def state_alone(file: StepFile) -> tuple[str, IndexedState | None]:
    """Where an optimizer's state is in a file that holds no model, with a dot; and that state."""
    saved, kept = ("", file.tree) if _has_form_of_optimizer(file.tree) else _saved_optimizer(file.tree)
    return f"{saved}." if saved else "", indexed_state(kept)


def _saved_optimizer(tree: Mapping[Any, Any]) -> tuple[str, object]:
    """Where an optimizer's state is in a file, and that; of several nothing, as nothing tells which is whose."""
    key = next((key for key in _OPTIMIZERS if key in tree), "")
    if not key:
        formed = [key for key, value in tree.items() if isinstance(key, str) and _has_form_of_optimizer(value)]
        key = formed[0] if len(formed) == 1 else ""
    kept = tree.get(key)
    if isinstance(kept, list):
        return (f"{key}.0", kept[0]) if len(kept) == 1 else (key, None)
    if isinstance(kept, dict) and len(kept) == 1 and _has_form_of_optimizer(only := next(iter(kept.values()))):
        return f"{key}.{next(iter(kept))}", only
    return key, kept


def _has_form_of_optimizer(value: object) -> bool:
    """Whether it is what torch's ``Optimizer.state_dict`` returns, under whatever key a script put it."""
    if not isinstance(value, dict):
        return False
    groups = value.get("param_groups")
    return isinstance(value.get("state"), dict) and isinstance(groups, list) and bool(groups)


def _model(tree: Mapping[Any, Any], reader: PartReader) -> RankState:
    # Of a finished training some keep the average alone, and None for the model.
    averages_alone = any(tree.get(key, "") is None for key in _MODELS)
    for key in (_LIVE, *_MODELS, *(AVERAGES if averages_alone else ())):
        inside = tree.get(key)
        if isinstance(inside, dict) and (state := _state_dict(inside, f"{key}.", reader)).found:
            return state
    state = _state_dict(tree, "", reader)
    distributed = any(map(is_part, tree.values()))
    return state if 2 * len(state.model) > len(tree) or distributed else RankState()


def holds_model(file: StepFile) -> bool:
    """Whether a file that nobody named holds a model: a state dict by its place or by its tensors' names."""
    state = rank_state(file)
    return state.found and (bool(state.path) or are_of_module((*state.model, *state.parts)))


def _whole(saved: object, reader: PartReader) -> object:
    """Optimizer state with the tensors that its records of parts stand for."""
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not isinstance(state, dict):
        return saved
    kept = {
        number: {key: reader.read(value) if is_part(value) else value for key, value in of.items()}
        if isinstance(of, dict) else of
        for number, of in state.items()
    }  # fmt: skip
    return {**saved, "state": kept}


def _with_flat_state(state: IndexedState, parameters: Sequence[StoredTensor]) -> IndexedState:
    """State of FSDP1's flat parameters, which it keeps as plain tensors, as parts like those are."""
    numbers = [number for of_group in state.numbers for number in of_group]
    if not parameters or len(numbers) != len(parameters):
        return state
    owners = dict(zip(numbers, parameters, strict=True))
    tensors = {
        number: {key: flat_state(owners[number], kept) for key, kept in of.items()} if number in owners else of
        for number, of in state.tensors.items()
    }
    return replace(state, tensors=tensors)


def averages(file: StepFile, state: RankState) -> dict[str, StoredTensor]:
    """Moving averages of the model's weights, by their path in the file."""
    found: dict[str, StoredTensor] = {}
    for key in (*AVERAGES, *(("state_dict",) if isinstance(file.tree.get(_LIVE), dict) else ())):
        inside = file.tree.get(key)
        if isinstance(inside, dict) and state.path != f"{key}.":
            average = _state_dict(inside, f"{key}.", state.reader)
            found |= {f"{key}.{name}": tensor for name, tensor in average.model.items()}
    return found


def lost_keys(states: Mapping[int, RankState]) -> tuple[int, tuple[str, ...]] | None:
    """The one rank whose model lacks tensors that all others have, and their keys; None if it isn't plain that it does.

    It is, if the files hold one model: more than half of all keys are in every file with one shape, and a single rank
    lacks the rest (stages of a pipeline and experts of their own lack each other's). Of two files, one may as well have
    too much: there, what is lost has a sibling in the same module, which both have.
    """
    every = dict.fromkeys(key for state in states.values() for key in state.model)
    shared = {key for key in every if all(key in state.model for state in states.values())}
    equal = sum(len({state.model[key].shape for state in states.values()}) == 1 for key in shared)
    lacking = {rank for rank, state in states.items() if any(key not in state.model for key in every)}
    if len(states) < 2 or len(lacking) != 1 or 2 * equal <= len(every):
        return None
    (rank,) = lacking
    lost = [key for key in every if key not in states[rank].model]
    if len(states) == 2:
        modules = {key.rpartition(".")[0] for key in shared} - {""}
        lost = [key for key in lost if key.rpartition(".")[0] in modules]
    return (rank, tuple(lost)) if lost else None


def _state_dict(tree: Mapping[Any, Any], path: str, reader: PartReader) -> RankState:
    tensors: dict[str, StoredTensor] = {}
    unplaced: list[str] = []
    unread: dict[str, str] = {}
    for key, value in tree.items():
        tensor = value if isinstance(value, StoredTensor) else reader.read(value)
        if isinstance(key, str) and tensor is not None:
            tensors[key] = tensor
        elif isinstance(key, str) and is_part(value):
            unplaced.append(key)
        elif isinstance(key, str) and isinstance(value, Opaque) and is_tensor(value):
            inside = inner_tensors(value)
            tensors |= {f"{key}.{name}": tensor for name, tensor in inside.items()}
            unread |= {} if inside else {key: kind_of(value)}
    return RankState(tensors, unplaced, path, unread=unread)


def recorded(file: StepFile, *keys: str) -> int | None:
    """A count that a file records at its top level."""
    for key in keys:
        value = file.tree.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
            return value
    return None


def looks_cut(state: RankState, num_ranks: int) -> str:
    """What in its shapes says that a file holds parts of tensors, though nothing records that.

    Weights of layers have two dims: of one with another length than their bias they were laid flat. A norm is as long
    as a row that some layer takes: where all are shorter by a factor of the ranks, rows were dealt out. Not so where
    tensors have more dims: norms of convolutions are as long as those have rows.
    """
    shapes = {key: tensor.shape for key, tensor in state.parameters().items()}
    flat = {key: shape[0] for key, shape in shapes.items() if len(shape) == 1 and key.endswith(".weight")}
    for key, length in flat.items():
        bias = shapes.get(f"{key.removesuffix('weight')}bias")
        if bias is not None and bias != (length,):
            return f"{key} has one dim, and its bias another length: weights seem to be laid flat and cut"
    widths = {shape[1] for shape in shapes.values() if len(shape) > 1}
    factors = [n for n in range(2, min(num_ranks, MAX_RANKS) + 1) if num_ranks % n == 0]
    of_layers = all(len(shape) <= 2 for shape in shapes.values())
    if of_layers and flat and widths and not widths & {*flat.values()}:
        factor = next((n for n in factors if all(n * length in widths for length in flat.values())), 0)
        if factor:
            key, length = next(iter(flat.items()))
            return f"{key} has {length} elements, layers take {factor * length}: files seem to hold parts"
    return ""


def flat_parameter(file: StepFile) -> str:
    """A name by which the file holds a part of what several ranks hold together."""
    for inside in filter(None, map(file.tree.get, _MODELS)):
        named = inside.items() if isinstance(inside, dict) else ()
        flat = (name for name, value in named if isinstance(name, str) and isinstance(value, StoredTensor))
        for name in filter(_FLAT.fullmatch, flat):
            return f"{name} is FSDP's: of flat parameters each rank has a part"
    return ""


def parallel_setting(file: StepFile) -> str:
    """A recorded setting, or a name, by which ranks hold different parts or weights of their own."""
    if flat := flat_parameter(file):
        return flat
    for key in _SETTINGS:
        settings = file.tree.get(key)
        values = settings.attributes() if isinstance(settings, Opaque) else settings
        for name in _SIZES:
            size = values.get(name) if isinstance(values, dict) else None
            if isinstance(size, int) and size > 1:
                return f"{key} records {name} {size}: rank files need not be replicas"
        strategy = values.get("sharding_strategy") if isinstance(values, dict) else None
        if isinstance(strategy, str) and strategy.upper() not in ("NO_SHARD", "DDP", "NONE", ""):
            return f"{key} records sharding_strategy {strategy[:64]}: rank files need not be replicas"
    return ""
