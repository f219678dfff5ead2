"""Built-in name maps between what people convert from and to: which rules make one side's names the other's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from auditor.comparison.holding import Source
from auditor.comparison.lockstep import Stored, measure
from auditor.model.catalog import Catalog, Role, Tensor
from auditor.model.name_map import NameRule, mapped
from auditor.view.assemble import SourceLostError

WRAPPERS = (
    "module.",
    "_orig_mod.",
    "base_model.model.",
    "base_model.",
    "params.",
    "model.",
    "transformer.",
    "gpt_neox.",
)
"""What wrappers and heads put before a model's own names."""
MOST_PROBED = 1 << 26
"""Elements of a fused tensor that is read to tell how its heads lie."""
_NUMBERED = re.compile(r"(.*?)(\d+)\.(.*)")
_INDEXED = re.compile(r"_(\d+)(?=\.|$)")

Build = Callable[[Source, Source], list[NameRule]]


@dataclass(frozen=True, slots=True)
class NameMap:
    """One built-in map."""

    name: str
    build: Build
    """Rules under which the first side's tensors are called, and lie, as the second's."""


def _parameters(catalog: Catalog) -> dict[str, Tensor]:
    roles = (Role.BUFFER, Role.MASTER, Role.PARAMETER)
    return {tensor.name: tensor for role in roles for tensor in catalog.tensors if tensor.role is role}


def bare(name: str) -> str:
    """A name without what wrappers put before it.

    >>> bare("module.model.layers.0.norm.weight"), bare("transformer.h.0.ln_1.weight")
    ('layers.0.norm.weight', 'h.0.ln_1.weight')
    """
    while True:
        prefix = next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), "")
        if not prefix:
            return name
        name = name.removeprefix(prefix)


def _by_bare_name(source: Source, target: Source) -> list[NameRule]:
    """Wrappers: DeepSpeed, DDP, torch.compile, PEFT, and models with and without a head."""
    theirs = {bare(name): name for name in _parameters(target.catalog)}
    own = _parameters(source.catalog)
    return [NameRule(name, (theirs[bare(name)],)) for name in own if bare(name) in theirs and "{" not in name]


def _pipeline(source: Source, target: Source) -> list[NameRule]:
    """DeepSpeed's pipelines number all modules from the embedding on; models number their layers."""
    own, theirs = _parameters(source.catalog), _parameters(target.catalog)
    layers: dict[tuple[int, str], str] = {}
    for name in theirs:
        found = _NUMBERED.fullmatch(name)
        if found and found[1]:
            layers[int(found[2]), found[3]] = name
    numbered = {name: (int(fit[2]), fit[3]) for name in own if (fit := _NUMBERED.fullmatch(name)) and not fit[1]}
    offsets = {number - other for number, rest in numbered.values() for other, same in layers if same == rest}

    def hits(offset: int) -> int:
        return sum((number - offset, rest) in layers for number, rest in numbered.values())

    if not offsets:
        return []
    offset = max(sorted(offsets), key=hits)
    rules = {
        name: layers[number - offset, rest]
        for name, (number, rest) in numbered.items()
        if (number - offset, rest) in layers
    }
    return [NameRule(name, (to,)) for name, to in {**rules, **dict(_leftover(own, theirs, rules))}.items()]


def _leftover(
    own: dict[str, Tensor], theirs: dict[str, Tensor], known: dict[str, str]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Tensors outside of layers: those whose names end alike, and are the only ones of their shape to do so."""
    free = [name for name in theirs if name not in known.values()]
    for name, tensor in own.items():
        if name in known:
            continue
        for parts in (3, 2, 1):
            ending = ".".join(name.split(".")[-parts:])
            fits = [
                other for other in free if theirs[other].shape == tensor.shape and f".{other}".endswith(f".{ending}")
            ]
            if len(fits) == 1:
                free.remove(fits[0])
                yield name, fits[0]
                break


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


def _megatron(source: Source, target: Source) -> list[NameRule]:
    """Megatron's names, and its fused tensors, as Hugging Face's Llama (and its kin), GPT-2 and GPT-NeoX have them."""
    theirs = _parameters(target.catalog)
    if any(name.startswith("gpt_neox.") for name in theirs):
        return [NameRule(name, (to,)) for name, to in _NEOX]
    if any(name.endswith("wte.weight") for name in theirs):
        return _gpt2(source, target)
    rules = [NameRule(name, (to,)) for name, to in _LLAMA]
    gated = tuple(f"model.layers.{{n}}.mlp.{part}_proj.weight" for part in ("gate", "up"))
    rules.append(NameRule("decoder.layers.{n}.mlp.linear_fc1.weight", gated))
    rules += _experts(theirs)
    q, k, v = (theirs.get(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv")
    if q and k and v:
        sizes = q.shape[0], k.shape[0], v.shape[0]

        def fused(groups: int) -> list[NameRule]:
            return [
                NameRule(f"{_QKV}.{kind}", tuple(f"model.layers.{{n}}.self_attn.{x}_proj.{kind}" for x in "qkv"),
                         sizes=sizes, groups=groups)
                for kind in ("weight", "bias")
            ]  # fmt: skip

        rules += probed(source, target, fused, _divisors(sizes))
    return rules


def _experts(theirs: dict[str, Tensor]) -> list[NameRule]:
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


def _stacked(theirs: dict[str, Tensor], one: str) -> Iterator[NameRule]:
    """Experts that lie in one tensor a layer, as [out, in] or transposed."""
    both, down = (theirs.get(f"{one}{part}") for part in ("gate_up_proj", "down_proj"))
    if both is None or down is None or len(both.shape) != 3 or len(down.shape) != 3:
        return
    # Of [2 × inner, hidden] and [hidden, inner]; where the first is [hidden, 2 × inner] both lie the other way.
    turned = () if both.shape[2] == 2 * down.shape[1] else None
    for part, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        source = "decoder.layers.{layer}.mlp.experts.local_experts.{n}." + f"{part}.weight"
        yield NameRule(source, ("model.layers.{layer}.mlp.experts." + name,), transpose=turned, stack=0)


def _gpt2(source: Source, target: Source) -> list[NameRule]:
    names = _parameters(target.catalog)
    before = "transformer." if any(name.startswith("transformer.") for name in names) else ""
    rules = [NameRule(name, (before + to,)) for name, to in _GPT2]
    rules += [NameRule(name, (before + to,), transpose=()) for name, to in _GPT2_TRANSPOSED]
    weight = names.get(f"{before}h.0.attn.c_attn.weight")
    if weight is None or len(weight.shape) != 2:
        return rules

    def fused(groups: int) -> list[NameRule]:
        to = f"{before}h.{{n}}.attn.c_attn."
        return [
            NameRule(f"{_QKV}.weight", (f"{to}weight",) * 3, transpose=(), split=1, groups=groups),
            NameRule(f"{_QKV}.bias", (f"{to}bias",) * 3, groups=groups),
        ]

    return rules + probed(source, target, fused, _divisors((weight.shape[0],)))


def _divisors(sizes: Sequence[int]) -> list[int]:
    """Numbers of groups that cut all sizes, the smallest first."""
    least = min(sizes)
    return [part for part in range(1, least + 1) if all(size % part == 0 for size in sizes)][:64]


def probed(
    source: Source, target: Source, fused: Callable[[int], list[NameRule]], groups: Sequence[int]
) -> list[NameRule]:  # fmt: skip
    """The rules with the number of groups under which the first layer is nearest to the other side's."""
    first = _QKV.replace("{n}", "0") + ".weight"
    own = source.catalog.only(lambda name: name == first)
    own_parameters = [tensor for tensor in own.tensors if tensor.role is Role.PARAMETER]
    if not own_parameters or own_parameters[0].num_elements > MOST_PROBED:
        return fused(1)
    theirs = {(tensor.role, tensor.name, tensor.shape): n for n, tensor in enumerate(target.catalog.tensors)}

    def apart(count: int) -> float:
        seen = mapped(own, fused(count))
        for number, tensor in enumerate(seen.tensors):
            other = theirs.get((tensor.role, tensor.name, tensor.shape))
            if tensor.role is Role.PARAMETER and other is not None:
                try:
                    return measure(Stored(Source(source.store, seen), number), Stored(target, other)).relative
                except SourceLostError:
                    break
        return float("inf")

    return fused(min(groups, key=apart))


def _flax(source: Source, target: Source) -> list[NameRule]:
    """Flax's names and its kernels, [in, out], as torch has them."""
    theirs = {bare(name): name for name in _parameters(target.catalog)}
    rules = []
    for name, tensor in _parameters(source.catalog).items():
        whole = bare(_INDEXED.sub(r".\1", name))
        path, _, last = whole.rpartition(".")
        kind = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(last, last)
        to = theirs.get(f"{path}.{kind}" if path else kind)
        if to is None or "{" in name:
            continue
        dims = len(tensor.shape)
        # Convolutions: spatial dims first, then in and out.
        order = (dims - 1, dims - 2, *range(dims - 2)) if last == "kernel" and dims > 1 else None
        rules.append(NameRule(name, (to,), transpose=order))
    return rules


MAPS = {
    found.name: found
    for found in (
        NameMap("wrappers", _by_bare_name), NameMap("megatron-hf", _megatron), NameMap("deepspeed-hf", _pipeline),
        NameMap("torch-flax", _flax),
    )
}  # fmt: skip
"""In the order in which they are tried."""
