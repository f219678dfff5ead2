"""Which tensors of the unsharded model a key of megatron-core's ``torch_dist`` format holds.

    decoder.layers.mlp.linear_fc2.weight        [num_layers, …]: all layers in one; a chunk's first offset is the layer
    decoder.layers.3.mlp.linear_fc2.weight      a layer by itself (``non_homogeneous_layers``)
    …mlp.experts.linear_fc1.weight              [(num_layers,) num_experts, …], or ``…experts.7.linear_fc1.weight``
    …linear_fc1.weight_w, …linear_fc1.weight_v  gate and up by themselves (``singleton_local_shards``)
    optimizer.state.<exp_avg|exp_avg_sq|fp32_param|param>.<key of the parameter>
    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_….bucket_idx_0.<param|exp_avg|exp_avg_sq>

The Catalog has a tensor for every layer and every expert, gate and up in one, under the name that the model itself has
(and with it the legacy format): ``decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight``. Norms are stored
under the name that they have where they are fused into the projection after them, also by models in which they aren't.
Source: megatron-core 0.16 ``transformer/transformer_block.py``, ``mlp.py``, ``moe/experts.py`` (sharded_state_dict),
``models/gpt/gpt_layer_specs.py`` (sharded_state_dict_keys_map), ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

from auditor.adapters.megatron_legacy.layout import is_buffer
from auditor.adapters.optimizer_index import ROLES
from auditor.model.catalog import Role

_STATE = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.state\.(?P<entry>\w{1,64})\.(?P<key>.+)", re.A | re.S)
_BUCKET = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.distributed\..+\.(?P<entry>\w{1,64})", re.A | re.S)
_STACKED = re.compile(r"(?P<head>(?:[^.]+\.){0,16}?layers\.)(?!\d)(?P<tail>.+)", re.A | re.S)
_EXPERTS = re.compile(
    r"(?P<head>(?:[^.]+\.){0,32}?experts\.)(?:experts\.)?(?P<number>\d{1,6}\.)?(?P<tail>.+)", re.A | re.S
)
_HALF = re.compile(r"(?P<whole>.*linear_fc1\.(?:weight|bias))_(?P<half>[wv])", re.S)
_MASTERS = ("fp32_param", "param")
_UNFUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.", "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}  # fmt: skip
_EMBEDDING, _HEAD = "embedding.", "output_layer."


@dataclass(frozen=True, slots=True)
class Key:
    """What a key says."""

    role: Role
    parameter: str
    """The parameter's own key, without what says that the optimizer keeps it."""
    suffix: str = ""
    """What the optimizer keeps besides the usual, appended to the parameter's name."""
    bucket: bool = False
    """Whether it is a buffer of the distributed optimizer as it lies in memory."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a stored array is cut into tensors."""

    name: str
    """With a place for the number of each of the leading dims."""
    num_leading: int = 0
    """Dims that number layers and experts."""
    half: int | None = None
    """0: the gate's half of a tensor, 1: the up projection's."""

    def tensor(self, numbers: tuple[int, ...]) -> str:
        """The name of one of its tensors."""
        return self.name.format(*numbers)


def read_key(key: str) -> Key:
    """What a key says of its role."""
    found = _BUCKET.fullmatch(key)
    if found is not None:
        return Key(_role(found["entry"]), key, bucket=True)
    found = _STATE.fullmatch(key)
    if found is None:
        return Key(Role.BUFFER if is_buffer(key) else Role.PARAMETER, key)
    role = _role(found["entry"])
    return Key(role, found["key"], f".{found['entry']}" if role is Role.MOMENT else "")


def _role(entry: str) -> Role:
    return Role.MASTER if entry in _MASTERS else ROLES.get(entry, Role.MOMENT)


def cut(parameter: str, known: Collection[str], *, fused: bool) -> Cut:
    """How the array under a parameter's key is cut. ``fused``: whether norms have the name that they are stored by."""
    name, half, leading = parameter, None, 0
    found = _HALF.fullmatch(name)
    if found is not None and {f"{found['whole']}_{letter}" for letter in "wv"} <= set(known):
        name, half = found["whole"], "wv".index(found["half"])
    name = name.replace("{", "{{").replace("}", "}}")
    for stored, own in () if fused else _UNFUSED.items():
        name = name.replace(stored, own)
    found = _STACKED.fullmatch(name)
    if found is not None:
        name, leading = f"{found['head']}{{}}.{found['tail']}", 1
    found = _EXPERTS.fullmatch(name)
    if found is not None and not found["tail"].startswith("local_experts."):
        number = found["number"] or "{}."
        name, leading = f"{found['head']}local_experts.{number}{found['tail']}", leading + (found["number"] is None)
    return Cut(name, leading, half)


def each(start: tuple[int, ...], stop: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All positions in a box."""
    return product(*(range(low, high) for low, high in zip(start, stop, strict=True)))


def order_of(name: str, seen: int) -> int:
    """Where a tensor stands in the model: embeddings, layers by number, what follows them, the head.

    ``seen``: its place among all, for those that nothing else tells apart. An index lists them as ranks stored them.
    """
    if name.startswith(_EMBEDDING):
        place = 0
    elif name.startswith(_HEAD):
        place = 1 << 22
    else:
        layer = re.search(r"layers\.(\d{1,6})\.", name, re.A)
        place = 1 + int(layer[1]) if layer else 1 << 21
    return place << 24 | min(seen, (1 << 24) - 1)
