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

from auditor.adapters.optimizer_index import role_and_name
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
    return OptimizerKey(
        optimizer, name if what == "param_groups" else "", "" if what == "param_groups" else name, entry
    )


class Names:
    """The keys of one checkpoint."""

    def __init__(self, keys: Iterable[str], paths: Mapping[str, Sequence[Any]]) -> None:
        self._paths = paths
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
        if recorded or all(key in self._paths for key in keys):
            return tuple(sorted(recorded))
        own = [key for key in keys if not _is_other(key) and key not in STEPS]
        for root in (*MODELS, *(f"app.{root}" for root in MODELS)):
            inside = [key.removeprefix(f"{root}.") for key in own if key.startswith(f"{root}.")]
            # A model may have a part of this very name: then it is the optimizer that tells.
            if inside and (len(inside) == len(own) or self._trained.intersection(inside)):
                return (f"{root}.",)
        return ()

    def _in_model(self, key: str) -> str | None:
        """The name within the model, None for what is not the model's."""
        for root in self.roots:
            if key.startswith(root):
                return key[len(root) :]
        return None if self.roots or _is_other(key) or key in STEPS else key

    def tensor(self, key: str, dtype: DType | None, shape: Sequence[int]) -> tuple[Role, str]:
        """The role of the tensor under ``key``, and its name."""
        kept = optimizer_key(key)
        if kept is not None:
            return role_and_name(self._plain(kept.parameter or f"{kept.optimizer}.{kept.group}"), kept.entry)
        name = self._in_model(key)
        if name is not None:
            counted = dtype is not None and dtype.kind not in (Kind.FLOAT, Kind.COMPLEX)
            return Role.BUFFER if counted or _BUFFER.fullmatch(name) else Role.PARAMETER, self._plain(name)
        first, _, rest = key.partition(".")
        if first in _AVERAGES and rest:
            return Role.EMA, self._plain(rest)
        return (Role.COUNTER if key in STEPS and not shape else Role.OBJECT), key

    def parameter(self, name: str) -> str:
        """The Catalog's name of what an optimizer calls ``name``."""
        return self._plain(name)

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
