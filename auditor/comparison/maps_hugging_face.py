"""Two ways in which a model is published: Meta's files against Hugging Face's, and what is fused against its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from auditor.comparison.bare_names import bare, parameters
from auditor.comparison.heads import divisors, probed, recorded_heads
from auditor.comparison.holding import Source
from auditor.model.catalog import Tensor
from auditor.model.name_map import NameRule

_META = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("layers.{n}.attention.wv.weight", "model.layers.{n}.self_attn.v_proj.weight"),
    ("layers.{n}.attention.wo.weight", "model.layers.{n}.self_attn.o_proj.weight"),
    ("layers.{n}.feed_forward.w1.weight", "model.layers.{n}.mlp.gate_proj.weight"),
    ("layers.{n}.feed_forward.w2.weight", "model.layers.{n}.mlp.down_proj.weight"),
    ("layers.{n}.feed_forward.w3.weight", "model.layers.{n}.mlp.up_proj.weight"),
    ("layers.{n}.attention_norm.weight", "model.layers.{n}.input_layernorm.weight"),
    ("layers.{n}.ffn_norm.weight", "model.layers.{n}.post_attention_layernorm.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
)
_ROTATED = (("wq", "q_proj"), ("wk", "k_proj"))
_QUERY = "layers.0.attention.wq.weight"


def meta(source: Source, target: Source) -> list[NameRule]:
    """Meta's Llama, whose rotary embeddings turn neighbours, where Hugging Face's turn the halves of a head.

    So the rows of query and key lie otherwise in every head. Source: huggingface/transformers
    ``models/llama/convert_llama_weights_to_hf.py``, ``permute``.
    """
    own = parameters(source.catalog)
    sizes = [own[name].shape[0] for name in (_QUERY, _QUERY.replace("wq", "wk")) if name in own and own[name].shape]
    if len(sizes) < 2 or not all(sizes):
        return []

    def rotated(half: int) -> list[NameRule]:
        return [
            NameRule(f"layers.{{n}}.attention.{name}.weight", (f"model.layers.{{n}}.self_attn.{to}.weight",) * 2,
                     groups=half, within=size // (2 * half))
            for (name, to), size in zip(_ROTATED, sizes, strict=True)
        ]  # fmt: skip

    halves = [width // 2 for width in divisors(*sizes) if width % 2 == 0 and width > 2]
    recorded = recorded_heads(source, target)
    known = [half for half in halves if recorded and half * 2 == recorded[2]]
    rules = [NameRule(name, (to,)) for name, to in _META]
    # A head of two would leave the rows as they are: it is none, and a rotation that was left out is to be seen.
    return rules + (probed(source, target, _QUERY, rotated, known or halves) if halves else [])


_SPELLINGS = (
    (".block_sparse_moe.", ".mlp."), ("embedder.weight", "embed_tokens.weight"),
    ("decoder.layer_norm.", "decoder.final_layer_norm."), ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
)  # fmt: skip
"""Words for one thing: Mixtral's before and in transformers 5, Gemma's, metaseq's and old BERTs' and Hugging Face's."""
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
}  # fmt: skip
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What the parts of an expert are called: by most, and by Mixtral."""


def fused(source: Source, target: Source) -> list[NameRule]:
    """Query, key and value, gate and up, or all experts in one tensor, as the side has them that keeps them apart.

    Source: huggingface/transformers ``conversion_mapping.py`` (5.24, experts), ``models/gemma`` and ``models/opt``
    (4.47, ``convert_*``: metaseq keeps key, value and query in this order).
    """
    theirs = {_spelled(name): name for name in parameters(target.catalog)}
    shapes = {name: tensor.shape for name, tensor in parameters(target.catalog).items()}
    own = parameters(source.catalog)
    reordered = any(name.endswith("decoder.version") for name in own)
    rules = []
    for name, tensor in own.items():
        said = _spelled(name)
        if said in theirs:
            rules.append(NameRule(name, (theirs[said],)))
        elif ".experts." in said:
            rules += _experts(name, said, tensor, theirs, shapes)
        else:
            rules += _parts(name, said, theirs, shapes, reordered=reordered)
    return rules


def _spelled(name: str) -> str:
    name = bare(name)
    for word, other in _SPELLINGS:
        name = name.replace(word, other)
    return name


def _parts(
    name: str, said: str, theirs: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], *, reordered: bool
) -> Iterator[NameRule]:
    """A projection that is cut in rows, one part after the other."""
    for word, parts in _FUSED.items():
        before, found, after = said.partition(f"{word}.")
        names = [theirs.get(f"{before}{part}.{after}", "") for part in parts] if found else [""]
        if all(shapes.get(part) for part in names):
            if reordered and word == "qkv_proj":
                names = [names[1], names[2], names[0]]
            yield NameRule(name, tuple(names), sizes=tuple(shapes[part][0] for part in names))


def _experts(
    name: str, said: str, tensor: Tensor, theirs: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[NameRule]:
    """All experts of a layer, whose number is the first dim, as [out, in] or transposed."""
    before, _, word = said.partition(".experts.")
    for gate, up, down in _GATED:
        parts = {"gate_up_proj": (gate, up), "down_proj": (down,), "up_proj": (up,)}.get(word, ())
        first = [theirs.get(f"{before}.experts.0.{part}.weight", "") for part in parts]
        if not first or not all(len(shapes.get(one, ())) == 2 for one in first) or len(tensor.shape) != 3:
            continue
        rows, columns = sum(shapes[one][0] for one in first), shapes[first[0]][-1]
        turned = (0, 2, 1) if tensor.shape[1:] != (rows, columns) else None
        targets = tuple(one.replace(".experts.0.", ".experts.{n}.") for one in first)
        yield NameRule(name, targets, transpose=turned, unstack=0)
        return
