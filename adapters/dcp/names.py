"""What the keys of a saved state dict mean: which parameter, in which role.

DCP flattens nested dictionaries into keys joined by dots, and names may hold dots themselves; ``planner_data`` records
how a key is made up, where it was flattened by DCP itself. Known writers:

    torch's own get_state_dict   model.<name>, optimizer.state.<name>.<key>, optimizer.param_groups.<i>.<key>
    torch's tutorial             app.model.<name>, app.optim.state.<name>.<key>
    torchtitan                   <name>, optimizer.state.<name>.<key>, optimizer.param_groups.<name>.<key>, …
    Lightning                    state_dict.<name>, optimizer_0.state.<name>.<key>

Sources: pytorch/torch ``distributed/checkpoint/state_dict.py``; pytorch/torchtitan ``components/checkpoint.py``;
Lightning-AI ``lightning/fabric/strategies/model_parallel.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.adapters.optimizer_index import Attached, role_and_name
from auditor.model.catalog import Role
from auditor.model.dtype import DType, Kind

MODELS = ("model", "state_dict", "model_state_dict", "module", "weights")
_AVERAGES = ("ema", "ema_model", "model_ema", "ema_state_dict")
STEPS = ("step", "global_step", "iteration", "global_steps", "train_state.step", "trainer_state.global_step")
_OTHERS = re.compile(
    r"(?:train_state|trainer_state|(?:lr_)?schedulers?|dataloader|data_loader|rng|rng_states?|random_states?|loops|"
    r"callbacks|hparams|extra_state|progress|metrics)(?:[._]\d+)?", re.A,
)  # fmt: skip
_OPTIMIZER = re.compile(
    r"(?:(?P<head>[\w.]{1,200})\.)?(?P<optimizer>optim(?:izers?|s)?(?:_states?)?(?:_dict)?(?:[._]\d{1,4})?)\.(?P<rest>"
    r"(?:state|param_groups)\..+)",
    re.A | re.S,
)
_BARE = re.compile(r"(?:state\.(?:.+)\.(?:exp_avg|exp_avg_sq|step|momentum_buffer)|param_groups\..+)", re.A | re.S)
_BUFFER = re.compile(r"(?:.*\.)?(?:running_mean|running_var|num_batches_tracked)", re.S)
_WRAPPER = "module."
MAX_ROOT, MAX_NAME = 256, 4096
"""Characters within which the part of a key ends that leads to a model, and of a key that may have such a part."""


@dataclass(frozen=True, slots=True)
class OptimizerKey:
    """A key of an optimizer's state."""

    optimizer: str
    """Which optimizer: the part of the key before ``state`` or ``param_groups``."""
    group: str
    """For an entry of a parameter group, the group's number or the parameter's name; else empty."""
    parameter: str
    entry: str
    """What is kept: ``exp_avg``, ``lr`` …"""


def optimizer_key(key: str) -> OptimizerKey | None:
    """The parts of a key of an optimizer's state; None for other keys.

    >>> optimizer_key("optimizer.state.layers.0.weight.exp_avg").parameter
    'layers.0.weight'
    """
    found = _OPTIMIZER.fullmatch(key)
    if found is None and not _BARE.fullmatch(key):
        return None
    optimizer = ".".join(filter(None, (found["head"], found["optimizer"]))) if found else ""
    what, _, rest = (found["rest"] if found else key).partition(".")
    name, _, entry = rest.rpartition(".")
    if not name or not entry:
        return None
    grouped = what == "param_groups"
    return OptimizerKey(optimizer, name if grouped else "", "" if grouped else name, entry)


def is_number(name: str) -> bool:
    """Whether a part of a key is a number of a group or a parameter."""
    return len(name) < 10 and name.isdecimal()


class Names:
    """The keys of one checkpoint."""

    def __init__(self, keys: Iterable[str], paths: Mapping[str, Sequence[Any]]) -> None:
        self._paths = paths
        self.attached: dict[str, Attached] = {}
        """Optimizers whose state goes by numbers, to what these stand for."""
        known = [*keys]
        optimizers = {key: optimizer_key(key) for key in known}
        rest = [key for key, kept in optimizers.items() if kept is None]
        self._trained = {kept.parameter for kept in optimizers.values() if kept and kept.parameter}
        self.roots = self._model_roots(rest)
        inside = [name for key in rest if (name := self._in_model(key)) is not None]
        self.wrapped = bool(inside) and all(name.startswith(_WRAPPER) for name in inside)

    def _model_roots(self, keys: Sequence[str]) -> tuple[str, ...]:
        """What comes before the names of the model's tensors, each with its dot; none where they are bare."""
        recorded = {root for key in keys if key in self._paths and (root := _root(self._paths[key]))}
        if recorded:
            return tuple(sorted(recorded))
        own = [key for key in keys if not _is_other(key) and key not in STEPS]
        if self._trained.intersection(own):
            return ()
        if own and all(key in self._paths for key in own):
            return self._roots_by_optimizer(own)
        for root in (*MODELS, *(f"app.{root}" for root in MODELS)):
            inside = [key.removeprefix(f"{root}.") for key in own if key.startswith(f"{root}.")]
            # A model may have a part of this very name: then it is the optimizer that tells.
            if inside and (len(inside) == len(own) or self._trained.intersection(inside)):
                return (f"{root}.",)
        return self._roots_by_optimizer(own)

    def _roots_by_optimizer(self, keys: Sequence[str]) -> tuple[str, ...]:
        """A model under a key of somebody's own: what comes before names that the optimizer knows."""
        roots: dict[str, None] = {}
        for key in keys:
            dots = (at for at, letter in enumerate(key[:MAX_ROOT]) if letter == "." and len(key) < MAX_NAME)
            root = next((key[: at + 1] for at in dots if key[at + 1 :] in self._trained), None)
            roots |= {root: None} if root else {}
        return tuple(sorted(roots))

    def _in_model(self, key: str) -> str | None:
        """The name within the model, None for what is not the model's."""
        for root in self.roots:
            if key.startswith(root):
                return key[len(root) :]
        return None if self.roots or _is_other(key) or key in STEPS else key

    def tensor(self, key: str, dtype: DType | None, shape: Sequence[int]) -> tuple[Role, str]:
        """The role of the tensor under ``key``, and its name."""
        kept = optimizer_key(key)
        if kept is not None and kept.group:
            return Role.OBJECT, key
        if kept is not None:
            known = self.parameter(kept.optimizer, kept.parameter)
            return role_and_name(key.removesuffix(f".{kept.entry}") if known is None else known, kept.entry)
        name = self._in_model(key)
        if name is not None:
            counted = dtype is not None and dtype.kind not in (Kind.FLOAT, Kind.COMPLEX)
            return Role.BUFFER if counted or _BUFFER.fullmatch(name) else Role.PARAMETER, self._plain(name)
        first, _, rest = key.partition(".")
        if first in _AVERAGES and rest:
            return Role.EMA, self._plain(rest)
        return (Role.COUNTER if key in STEPS and not shape else Role.OBJECT), key

    def parameter(self, optimizer: str, name: str) -> str | None:
        """The Catalog's name of what an optimizer calls ``name``; None where that isn't known."""
        attached = self.attached.get(optimizer)
        if attached is None:
            return self._plain(name)
        return attached.names.get(int(name)) if is_number(name) else None

    def doubt(self, key: str) -> str:
        """Why it isn't known to which parameter the tensor under ``key`` belongs; empty where it is."""
        kept = optimizer_key(key)
        if kept is None or kept.group or self.parameter(kept.optimizer, kept.parameter) is not None:
            return ""
        return self.attached[kept.optimizer].reason or "no parameter group has its number"

    def _plain(self, name: str) -> str:
        return name.removeprefix(_WRAPPER) if self.wrapped else name


def _root(path: Sequence[Any]) -> str:
    """The part of a recorded path that leads to the model, with a dot."""
    for depth in (1, 2):
        if len(path) > depth and path[depth - 1] in MODELS and (depth == 1 or not _is_other(str(path[0]))):
            return "".join(f"{part}." for part in path[:depth])
    return ""


def _is_other(key: str) -> bool:
    """Whether a key is that of schedulers, data positions and the like."""
    first = key.partition(".")[0]
    return bool(_OTHERS.fullmatch(first)) or first in _AVERAGES
