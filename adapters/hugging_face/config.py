"""Which tensors a model has, from ``config.json``: names and shapes of the architectures that are known here.

An architecture that is not known, a size that is not recorded, quantised or pruned weights: then nothing is implied,
and the reason is kept. A tied head is simply not stored, so it may be absent when the configuration ties.
Source: huggingface/transformers, ``models/*/modeling_*.py`` and ``configuration_*.py`` (5.24, spelling of older ones).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.model.dtype import DTYPES, DType
from auditor.model.optimizer import Tie

MAX_LAYERS = 1 << 10
MAX_SIZE = 1 << 24
MAX_ELEMENTS = 1 << 40
"""Layers, any recorded size, and elements of one tensor, of the largest model that is believed."""

Shapes = dict[str, tuple[int, ...]]


class NotImpliedError(Exception):
    """The configuration does not tell which tensors the model has; the message says why."""


@dataclass(frozen=True, slots=True)
class Implied:
    """What a configuration implies, spelled as the checkpoint spells its names."""

    required: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optional: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors that may be absent: tied heads, heads and poolers that not every class has."""
    unknown: str = ""
    """Why nothing is implied; empty where something is."""
    ties: tuple[Tie, ...] = ()
    """The embedding and the head, where the configuration ties them."""
    order: tuple[str, ...] = ()
    """Names in the order of the model's own ``named_parameters()``; a tied head is not among them."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, where it is implied."""
        return self.required.get(name, self.optional.get(name))


class _Sizes:
    """The configuration's numbers, each held to be possible."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def count(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= limit:
            raise NotImpliedError(f"config.json records no possible {key}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.config.get(key)
        return value if isinstance(value, bool) else default


@dataclass(frozen=True, slots=True)
class _Family:
    """Architectures whose tensors are named alike."""

    base: str
    """What goes before the names of the base model inside the whole one; a bare base model lacks it."""
    head: str
    """The output head that may be tied to the embedding; empty where there is none."""
    ties: bool
    """Whether the head is tied where the configuration does not say."""
    shapes: Callable[[_Sizes], tuple[Shapes, Shapes]]
    """Required and optional tensors, without the tied head's."""
    embedding: str


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _conv1d(name: str, rows: int, columns: int) -> Shapes:
    """GPT-2's transposed linear layer."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (columns,)}


def _in_layers(prefix: str, layer: Shapes, num_layers: int) -> Shapes:
    return {f"{prefix}{number}.{name}": shape for number in range(num_layers) for name, shape in layer.items()}


def _llama(sizes: _Sizes, *, default_heads: int | None = None, qkv_bias: bool = False) -> tuple[Shapes, Shapes]:
    hidden, heads = sizes.count("hidden_size"), sizes.count("num_attention_heads")
    wide = sizes.count("intermediate_size")
    head = sizes.count("head_dim", hidden // heads)
    queries, keys = heads * head, sizes.count("num_key_value_heads", default_heads or heads) * head
    bias, mlp_bias = sizes.flag("attention_bias", default=False), sizes.flag("mlp_bias", default=False)
    layer = {
        **_linear("self_attn.q_proj", queries, hidden, bias=bias or qkv_bias),
        **_linear("self_attn.k_proj", keys, hidden, bias=bias or qkv_bias),
        **_linear("self_attn.v_proj", keys, hidden, bias=bias or qkv_bias),
        **_linear("self_attn.o_proj", hidden, queries, bias=bias),
        **_linear("mlp.gate_proj", wide, hidden, bias=mlp_bias), **_linear("mlp.up_proj", wide, hidden, bias=mlp_bias),
        **_linear("mlp.down_proj", hidden, wide, bias=mlp_bias),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    layers = _in_layers("model.layers.", layer, sizes.count("num_hidden_layers", limit=MAX_LAYERS))
    embedding: Shapes = {"model.embed_tokens.weight": (sizes.count("vocab_size"), hidden)}
    return embedding | layers | {"model.norm.weight": (hidden,)}, {}


def _mistral(sizes: _Sizes) -> tuple[Shapes, Shapes]:
    return _llama(sizes, default_heads=8)


def _qwen2(sizes: _Sizes) -> tuple[Shapes, Shapes]:
    return _llama(sizes, qkv_bias=True)


def _gpt2(sizes: _Sizes) -> tuple[Shapes, Shapes]:
    if sizes.flag("add_cross_attention", default=False):
        raise NotImpliedError("config.json adds cross-attention, whose tensors are not known")
    hidden = sizes.count("n_embd")
    wide = sizes.count("n_inner", 4 * hidden)
    layer = {
        **_norm("ln_1", hidden), **_conv1d("attn.c_attn", hidden, 3 * hidden), **_conv1d("attn.c_proj", hidden, hidden),
        **_norm("ln_2", hidden), **_conv1d("mlp.c_fc", hidden, wide), **_conv1d("mlp.c_proj", wide, hidden),
    }  # fmt: skip
    layers = _in_layers("transformer.h.", layer, sizes.count("n_layer", limit=MAX_LAYERS))
    embeddings: Shapes = {
        "transformer.wte.weight": (sizes.count("vocab_size"), hidden),
        "transformer.wpe.weight": (sizes.count("n_positions"), hidden),
    }
    return embeddings | layers | _norm("transformer.ln_f", hidden), {}


def _gpt_neox(sizes: _Sizes) -> tuple[Shapes, Shapes]:
    hidden, wide = sizes.count("hidden_size"), sizes.count("intermediate_size")
    bias = sizes.flag("attention_bias", default=True)
    layer = {
        **_norm("input_layernorm", hidden), **_norm("post_attention_layernorm", hidden),
        **_linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
        **_linear("attention.dense", hidden, hidden, bias=bias),
        **_linear("mlp.dense_h_to_4h", wide, hidden, bias=True),
        **_linear("mlp.dense_4h_to_h", hidden, wide, bias=True),
    }  # fmt: skip
    layers = _in_layers("gpt_neox.layers.", layer, sizes.count("num_hidden_layers", limit=MAX_LAYERS))
    embedding: Shapes = {"gpt_neox.embed_in.weight": (sizes.count("vocab_size"), hidden)}
    return embedding | layers | _norm("gpt_neox.final_layer_norm", hidden), {}


def _bert(sizes: _Sizes) -> tuple[Shapes, Shapes]:
    hidden, wide = sizes.count("hidden_size"), sizes.count("intermediate_size")
    layer = {
        **{key: shape for part in ("query", "key", "value")
           for key, shape in _linear(f"attention.self.{part}", hidden, hidden, bias=True).items()},
        **_linear("attention.output.dense", hidden, hidden, bias=True), **_norm("attention.output.LayerNorm", hidden),
        **_linear("intermediate.dense", wide, hidden, bias=True),
        **_linear("output.dense", hidden, wide, bias=True), **_norm("output.LayerNorm", hidden),
    }  # fmt: skip
    layers = _in_layers("bert.encoder.layer.", layer, sizes.count("num_hidden_layers", limit=MAX_LAYERS))
    outside = {
        "bert.embeddings.word_embeddings.weight": (sizes.count("vocab_size"), hidden),
        "bert.embeddings.position_embeddings.weight": (sizes.count("max_position_embeddings"), hidden),
        "bert.embeddings.token_type_embeddings.weight": (sizes.count("type_vocab_size", 2), hidden),
        **_norm("bert.embeddings.LayerNorm", hidden),
    }  # fmt: skip
    return outside | layers, _linear("bert.pooler.dense", hidden, hidden, bias=True)


def _bert_masked(sizes: _Sizes) -> tuple[Shapes, Shapes]:
    required, optional = _bert(sizes)
    hidden, vocabulary = sizes.count("hidden_size"), sizes.count("vocab_size")
    transform = _linear("cls.predictions.transform.dense", hidden, hidden, bias=True)
    transform |= _norm("cls.predictions.transform.LayerNorm", hidden)
    # Two names of one bias; which of them is stored changed over the versions.
    either: Shapes = {"cls.predictions.bias": (vocabulary,), "cls.predictions.decoder.bias": (vocabulary,)}
    return required | transform, optional | either


_LLAMA, _BERT = "model.embed_tokens.weight", "bert.embeddings.word_embeddings.weight"
_FAMILIES = {
    "LlamaForCausalLM": _Family("model.", "lm_head.weight", False, _llama, _LLAMA),
    "MistralForCausalLM": _Family("model.", "lm_head.weight", False, _mistral, _LLAMA),
    "Qwen2ForCausalLM": _Family("model.", "lm_head.weight", False, _qwen2, _LLAMA),
    "GPT2LMHeadModel": _Family("transformer.", "lm_head.weight", True, _gpt2, "transformer.wte.weight"),
    "GPTNeoXForCausalLM": _Family("gpt_neox.", "embed_out.weight", False, _gpt_neox, "gpt_neox.embed_in.weight"),
    "BertModel": _Family("bert.", "", True, _bert, _BERT),
    "BertForMaskedLM": _Family("bert.", "cls.predictions.decoder.weight", True, _bert_masked, _BERT),
}
"""By the class that ``architectures`` names."""

_SPELLINGS = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"), ("embed_out.", "lm_head."))
"""Newer and other spelling of the same name."""


def implied(config: Mapping[str, Any], stored: Collection[str]) -> Implied:
    """The tensors of the model that ``config`` describes, spelled as the names that are ``stored``."""
    try:
        family = _family(config)
        required, optional = family.shapes(_Sizes(config))
        if max(map(math.prod, required.values())) > MAX_ELEMENTS:
            raise NotImpliedError("config.json records sizes beyond any model's")
    except NotImpliedError as error:
        return Implied(unknown=str(error))
    tied = bool(family.head) and _Sizes(config).flag("tie_word_embeddings", default=family.ties)
    if family.head:
        (optional if tied else required)[family.head] = required[family.embedding]
    bare = any(_bare(name, family.base) in stored for name in required) and not any(
        name.startswith(family.base) for name in stored
    )
    spell = {name: _spelled(_bare(name, family.base) if bare else name, stored) for name in required | optional}
    # A bare base model has no head, whatever class its configuration names.
    names = (spell[family.embedding], spell[family.head]) if tied and not bare else ()
    own = [name for name in (*required, *optional) if not (tied and name == family.head)]
    order = sorted(own, key=lambda name: 3 if name == family.head else _registered(name))
    return Implied(
        {spell[name]: shape for name, shape in required.items()}, {spell[name]: s for name, s in optional.items()},
        ties=(Tie(names, _tie_source(config)),) if names else (), order=tuple(spell[name] for name in order),
    )  # fmt: skip


def _registered(name: str) -> int:
    """Of BERT's prediction head, which comes last, a module's own parameters go before those of its parts."""
    return 0 if not name.startswith("cls.") else 1 if name.endswith(("predictions.bias", "decoder.bias")) else 2


def _tie_source(config: Mapping[str, Any]) -> str:
    recorded = isinstance(config.get("tie_word_embeddings"), bool)
    return f"config.json: {'tie_word_embeddings' if recorded else 'what its architecture does unless told otherwise'}"


def _family(config: Mapping[str, Any]) -> _Family:
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise NotImpliedError("config.json names no architecture")
    if named[0] not in _FAMILIES:
        raise NotImpliedError(f"config.json names {named[0][:100]}, an architecture that is not known")
    for key in ("quantization_config", "pruned_heads"):
        if config.get(key):
            raise NotImpliedError(f"config.json has a {key}, so tensors are not those of the plain architecture")
    return _FAMILIES[named[0]]


def _bare(name: str, base: str) -> str:
    return name.removeprefix(base)


def _spelled(name: str, stored: Collection[str]) -> str:
    if name in stored:
        return name
    others = (name.replace(one, other) for one, other in _SPELLINGS if one in name)
    return next((other for other in others if other in stored), name)


def recorded_dtype(config: Mapping[str, Any]) -> DType | None:
    """The dtype in which the model was saved, if the configuration records one."""
    value = config.get("dtype", config.get("torch_dtype"))
    return DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
