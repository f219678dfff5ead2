"""Megatron's names, and its fused tensors, as Hugging Face's Llama (and its kin), GPT-2 and GPT-NeoX have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from auditor.comparison.bare_names import parameters
from auditor.comparison.heads import divisors, probed, recorded_heads
from auditor.comparison.holding import Source
from auditor.model.catalog import Tensor
from auditor.model.name_map import NameRule

_LLAMA = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    ("decoder.layers.{n}.input_layernorm.weight", "model.layers.{n}.input_layernorm.weight"),
    ("decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight", "model.layers.{n}.input_layernorm.weight"),
    ("decoder.layers.{n}.self_attention.linear_proj.{p}", "model.layers.{n}.self_attn.o_proj.{p}"),
    ("decoder.layers.{n}.self_attention.q_layernorm.weight", "model.layers.{n}.self_attn.q_norm.weight"),
    ("decoder.layers.{n}.self_attention.k_layernorm.weight", "model.layers.{n}.self_attn.k_norm.weight"),
    ("decoder.layers.{n}.pre_mlp_layernorm.weight", "model.layers.{n}.post_attention_layernorm.weight"),
    ("decoder.layers.{n}.mlp.linear_fc1.layer_norm_weight", "model.layers.{n}.post_attention_layernorm.weight"),
    ("decoder.layers.{n}.mlp.linear_fc2.{p}", "model.layers.{n}.mlp.down_proj.{p}"),
    ("decoder.final_layernorm.weight", "model.norm.weight"),
    ("output_layer.weight", "lm_head.weight"),
)
_GPT2 = (
    ("embedding.word_embeddings.weight", "wte.weight"),
    ("embedding.position_embeddings.weight", "wpe.weight"),
    ("decoder.layers.{n}.input_layernorm.{p}", "h.{n}.ln_1.{p}"),
    ("decoder.layers.{n}.pre_mlp_layernorm.{p}", "h.{n}.ln_2.{p}"),
    ("decoder.layers.{n}.self_attention.linear_proj.bias", "h.{n}.attn.c_proj.bias"),
    ("decoder.layers.{n}.mlp.linear_fc1.bias", "h.{n}.mlp.c_fc.bias"),
    ("decoder.layers.{n}.mlp.linear_fc2.bias", "h.{n}.mlp.c_proj.bias"),
    ("decoder.final_layernorm.{p}", "ln_f.{p}"),
)
_GPT2_TRANSPOSED = (
    ("decoder.layers.{n}.self_attention.linear_proj.weight", "h.{n}.attn.c_proj.weight"),
    ("decoder.layers.{n}.mlp.linear_fc1.weight", "h.{n}.mlp.c_fc.weight"),
    ("decoder.layers.{n}.mlp.linear_fc2.weight", "h.{n}.mlp.c_proj.weight"),
)
_NEOX = (
    ("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight"),
    ("decoder.layers.{n}.input_layernorm.{p}", "gpt_neox.layers.{n}.input_layernorm.{p}"),
    ("decoder.layers.{n}.pre_mlp_layernorm.{p}", "gpt_neox.layers.{n}.post_attention_layernorm.{p}"),
    ("decoder.layers.{n}.self_attention.linear_qkv.{p}", "gpt_neox.layers.{n}.attention.query_key_value.{p}"),
    ("decoder.layers.{n}.self_attention.linear_proj.{p}", "gpt_neox.layers.{n}.attention.dense.{p}"),
    ("decoder.layers.{n}.mlp.linear_fc1.{p}", "gpt_neox.layers.{n}.mlp.dense_h_to_4h.{p}"),
    ("decoder.layers.{n}.mlp.linear_fc2.{p}", "gpt_neox.layers.{n}.mlp.dense_4h_to_h.{p}"),
    ("decoder.final_layernorm.{p}", "gpt_neox.final_layer_norm.{p}"),
    ("output_layer.weight", "embed_out.weight"),
)
_QKV = "decoder.layers.{n}.self_attention.linear_qkv"
_OLDER = {
    "self_attention.linear_qkv": "{attention}.query_key_value", "self_attention.linear_proj": "{attention}.dense",
    "pre_mlp_layernorm": "post_attention_layernorm", "linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h",
}  # fmt: skip
"""megatron-core's words to those of Megatron-LM before it."""
_Family = tuple[list[NameRule], Callable[[int], list[NameRule]] | None, tuple[int, ...]]
"""Rules but for query, key and value; those by the number of groups in which these lie; sizes that the groups cut."""


def megatron(source: Source, target: Source) -> list[NameRule]:
    """Rules for a checkpoint of Megatron's, new or old."""
    own, theirs = parameters(source.catalog), parameters(target.catalog)
    spelling = _Spelling(own)

    def spelled(rules: Iterable[NameRule]) -> list[NameRule]:
        return [replace(rule, source=spelling(rule.source)) for rule in rules]

    if any(name.startswith("gpt_neox.") for name in theirs):
        return spelled(NameRule(name, (to,)) for name, to in _NEOX)
    family = _gpt2 if any(name.endswith("wte.weight") for name in theirs) else _llama
    rules, fused, sizes = family(theirs)
    if fused is None:
        return spelled(rules)
    first = spelling(_QKV.replace("{n}", "0") + ".weight")
    counts = [part for part in _groups(source, target, own.get(first)) if part in divisors(*sizes)]
    return spelled(rules) + probed(
        source, target, first, lambda count: spelled(fused(count)), counts or divisors(*sizes)
    )  # fmt: skip


def _groups(source: Source, target: Source, fused: Tensor | None) -> list[int]:
    """In how many stretches query, key and value lie; none where no configuration records the heads."""
    recorded = recorded_heads(target, source)
    if recorded is None or fused is None or not fused.shape:
        return []
    versions = [scalar.value for scalar in source.catalog.scalars if scalar.name == "checkpoint_version"]
    old = "query_key_value" in fused.name
    # What Megatron-LM takes a file without a version for.
    return [stretches(min(versions, default=0.0) if old else math.inf, recorded[1], fused.shape[0])]


def stretches(version: float, groups: int, num_rows: int) -> int:
    """In how many stretches of its rows a fused tensor holds query, key and value each.

    Source: NVIDIA/Megatron-LM ``megatron/checkpointing.py`` (2.4), ``fix_query_key_value_ordering``.

    >>> stretches(0, 4, 96), stretches(1.0, 4, 96), stretches(3.0, 4, 96)
    (1, 32, 4)
    """
    if version >= 2:
        return groups
    return num_rows // 3 if version >= 1 else 1


class _Spelling:
    """How megatron-core's names are spelled in a checkpoint, which may be an older one."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        stems = ("language_model.transformer.", "language_model.encoder.")
        self.stem = next((stem for stem in stems if any(name.startswith(stem) for name in own)), "")
        new = any(".self_attention." in name for name in own)
        self.attention = "self_attention" if new else "attention"

    def __call__(self, name: str) -> str:
        if not self.stem:
            return name
        for word, other in _OLDER.items():
            name = name.replace(word, other.replace("{attention}", self.attention))
        name = name.replace("decoder.", self.stem, 1)
        return name if name.startswith(self.stem) else f"language_model.{name}"


def _llama(theirs: Mapping[str, Tensor]) -> _Family:
    rules = [NameRule(name, (to,)) for name, to in _LLAMA]
    gated = tuple(f"model.layers.{{n}}.mlp.{part}_proj.weight" for part in ("gate", "up"))
    rules.append(NameRule("decoder.layers.{n}.mlp.linear_fc1.weight", gated))
    rules += _experts(theirs)
    q, k, v = (theirs.get(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv")
    if not (q and k and v and q.shape and k.shape and v.shape):
        return rules, None, ()
    sizes = q.shape[0], k.shape[0], v.shape[0]

    def fused(groups: int) -> list[NameRule]:
        return [
            NameRule(f"{_QKV}.{kind}", tuple(f"model.layers.{{n}}.self_attn.{x}_proj.{kind}" for x in "qkv"),
                     sizes=sizes, groups=groups)
            for kind in ("weight", "bias")
        ]  # fmt: skip

    return rules, fused, sizes


def _gpt2(theirs: Mapping[str, Tensor]) -> _Family:
    before = "transformer." if any(name.startswith("transformer.") for name in theirs) else ""
    rules = [NameRule(name, (before + to,)) for name, to in _GPT2]
    rules += [NameRule(name, (before + to,), transpose=()) for name, to in _GPT2_TRANSPOSED]
    weight = theirs.get(f"{before}h.0.attn.c_attn.weight")
    if weight is None or len(weight.shape) != 2:
        return rules, None, ()

    def fused(groups: int) -> list[NameRule]:
        to = f"{before}h.{{n}}.attn.c_attn."
        return [
            NameRule(f"{_QKV}.weight", (f"{to}weight",) * 3, transpose=(), split=1, groups=groups),
            NameRule(f"{_QKV}.bias", (f"{to}bias",) * 3, groups=groups),
        ]

    return rules, fused, (weight.shape[0],)


def _experts(theirs: Mapping[str, Tensor]) -> list[NameRule]:
    """Megatron's experts and router as Mixtral's, else as Qwen's and DeepSeek's: one by one, or stacked and fused."""
    mixtral = any(".block_sparse_moe." in name for name in theirs)
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    own, inner = "decoder.layers.{n}.mlp.", "model.layers.{n}." + ("block_sparse_moe." if mixtral else "mlp.")
    shared = "shared_experts" if any(".mlp.shared_experts." in name for name in theirs) else "shared_expert"
    rules = [
        NameRule(f"{own}router.weight", (f"{inner}gate.weight",)),
        NameRule(f"{own}router.expert_bias", (f"{inner}gate.e_score_correction_bias",)),
        NameRule(f"{own}shared_experts.gate_weight", (f"{inner}shared_expert_gate.weight",)),
    ]
    found = next((name for name in theirs if name.endswith(".mlp.experts.gate_up_proj")), "")
    for source, target in (("experts.local_experts.{e}", "experts.{e}"), ("shared_experts", shared)):
        if found and "{e}" in source:
            rules += _stacked(theirs, found.removesuffix("gate_up_proj"))
            continue
        *gated, down = (f"{inner}{target}.{part}.weight" for part in parts)
        rules.append(NameRule(f"{own}{source}.linear_fc1.weight", tuple(gated)))
        rules.append(NameRule(f"{own}{source}.linear_fc2.weight", (down,)))
    return rules


def _stacked(theirs: Mapping[str, Tensor], one: str) -> Iterator[NameRule]:
    """Experts that lie in one tensor a layer, as [out, in] or transposed."""
    both, down = (theirs.get(f"{one}{part}") for part in ("gate_up_proj", "down_proj"))
    if both is None or down is None or len(both.shape) != 3 or len(down.shape) != 3:
        return
    # Of [2 × inner, hidden] and [hidden, inner]; where the first is [hidden, 2 × inner] both lie the other way.
    turned = () if both.shape[2] == 2 * down.shape[1] else None
    for part, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        source = "decoder.layers.{layer}.mlp.experts.local_experts.{n}." + f"{part}.weight"
        yield NameRule(source, ("model.layers.{layer}.mlp.experts." + name,), transpose=turned, stack=0)
