"""How Megatron's parameters lie on the tensor-parallel axis, decided by name and recorded sizes.

Never by equal shapes: with four ranks and the usual ffn = 4·hidden, a rank's part of ``dense_h_to_4h.bias`` is exactly
as long as a norm. A name's formula gives its full shape; the stored shape must be that (replicated) or that divided by
the number of ranks (sharded). Anything else, and any unknown name, is undetermined.
Source: Megatron-LM ``megatron/core/tensor_parallel/layers.py`` and the layer classes that use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from auditor.adapters.optimizer_index import is_count
from auditor.adapters.step_file import StepFile
from auditor.containers.pickle_machine import Opaque
from auditor.model.mesh import Replicate, Shard


def megatron_args(file: StepFile) -> Mapping[str, object]:
    """Megatron's ``args`` as saved in an mp_rank file, empty where they aren't."""
    args = file.tree.get("args")
    return args.attributes() if isinstance(args, Opaque) else args if isinstance(args, dict) else {}


def recorded_progress(args: Mapping[str, object]) -> dict[str, float]:
    """What ``args`` say of the data that was seen: Megatron keeps its count of samples there, beside the seed."""
    found = {name: args.get(name) for name in ("consumed_train_samples", "seed")}
    return {name: float(value) for name, value in found.items() if is_count(value)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the whole model as recorded; None where they are not."""

    hidden: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    qkv: int | None = None
    """Rows of the fused query, key and value projection."""
    attention: int | None = None
    """Width of all heads together."""
    head: int | None = None
    """Width of one head."""
    experts: int | None = None
    """Experts of one layer, which its router scores."""
    gated: bool = False
    """Whether the first projection of the MLP is two of them, gate above up. Each rank then holds both halves."""

    def of(self, term: str) -> int | None:
        """The value of a term of a formula, such as ``3 hidden``; None where it is not recorded."""
        factor, _, word = term.rpartition(" ")
        size: int | None = getattr(self, word)
        return None if size is None else size * int(factor or 1)


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of parameter."""

    suffix: str
    """How the name ends, at a dot."""
    shape: tuple[str, ...]
    """The full shape, as terms of :class:`Sizes`."""
    placement: Shard | Replicate
    synchronised_over_stages: bool = False
    """Whether pipeline stages that both hold it keep it equal (tied embedding)."""


_ROWS, _COLUMNS, _ALL = Shard(0), Shard(1), Replicate()

RULES = (
    Rule("word_embeddings.weight", ("vocab", "hidden"), _ROWS, synchronised_over_stages=True),
    Rule("word_embeddings.norm.weight", ("hidden",), _ALL),
    Rule("word_embeddings.norm.bias", ("hidden",), _ALL),
    Rule("self_attention.query_key_value.weight", ("3 hidden", "hidden"), _ROWS),
    Rule("self_attention.query_key_value.bias", ("3 hidden",), _ROWS),
    Rule("mlp.dense_h_to_4h.weight", ("ffn", "hidden"), _ROWS),
    Rule("mlp.dense_h_to_4h.bias", ("ffn",), _ROWS),
    Rule("self_attention.dense.weight", ("hidden", "hidden"), _COLUMNS),
    Rule("mlp.dense_4h_to_h.weight", ("hidden", "ffn"), _COLUMNS),
    Rule("self_attention.dense.bias", ("hidden",), _ALL),
    Rule("mlp.dense_4h_to_h.bias", ("hidden",), _ALL),
    *(
        Rule(f"{norm}.{part}", ("hidden",), _ALL)
        for norm in ("input_layernorm", "post_attention_layernorm", "final_layernorm")
        for part in ("weight", "bias")
    ),
)
CORE_RULES = (
    Rule("self_attention.linear_qkv.weight", ("qkv", "hidden"), _ROWS),
    Rule("self_attention.linear_qkv.bias", ("qkv",), _ROWS),
    Rule("self_attention.linear_proj.weight", ("hidden", "attention"), _COLUMNS),
    Rule("self_attention.linear_proj.bias", ("hidden",), _ALL),
    Rule("self_attention.q_layernorm.weight", ("head",), _ALL),
    Rule("self_attention.k_layernorm.weight", ("head",), _ALL),
    Rule("mlp.linear_fc1.weight", ("ffn", "hidden"), _ROWS),
    Rule("mlp.linear_fc1.bias", ("ffn",), _ROWS),
    Rule("mlp.linear_fc2.weight", ("hidden", "ffn"), _COLUMNS),
    Rule("mlp.linear_fc2.bias", ("hidden",), _ALL),
    Rule("mlp.router.weight", ("experts", "hidden"), _ALL),
    Rule("output_layer.weight", ("vocab", "hidden"), _ROWS),
    *(
        # Norms that are fused into the projection after them keep the norm's placement.
        Rule(f"{norm}{part}", ("hidden",), _ALL)
        for norm in ("pre_mlp_layernorm.", "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
        for part in ("weight", "bias")
    ),
)
"""Names of megatron-core. Source: ``megatron/core/models/gpt/gpt_layer_specs.py``; ``transformer/attention.py``."""
_FINAL_NORM = Rule("", ("hidden",), _ALL)
_POSITIONS = "position_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Placed:
    """How one parameter lies on the axis; ``how`` is None where that isn't known, with the reason."""

    how: Shard | Replicate | None
    reason: str = ""
    halves: bool = False
    """Whether a rank's part is two equal parts that lie half the tensor apart (gate and up)."""


def rule_for(name: str) -> Rule | None:
    """The rule for a parameter called ``name`` within its pipeline layer."""
    if name in ("weight", "bias"):
        return _FINAL_NORM
    rules = (*RULES, *CORE_RULES)
    return next((rule for rule in rules if name == rule.suffix or name.endswith(f".{rule.suffix}")), None)


def place(name: str, local: tuple[int, ...], degree: int, sizes: Sizes, stated: Shard | Replicate | None) -> Placed:
    """How the parameter ``name``, stored with shape ``local`` on each of ``degree`` ranks, lies on the axis."""
    if stated is not None:
        if isinstance(stated, Shard) and stated.dim >= len(local):
            return Placed(None, f"it is stated to be cut along dim {stated.dim}, which it does not have")
        return Placed(stated)
    if degree == 1:
        return Placed(Replicate())
    if name.endswith(_POSITIONS):
        fits = len(local) == 2 and sizes.hidden == local[1]
        return Placed(Replicate()) if fits else Placed(None, "its stored shape is not that of a position table")
    rule = rule_for(name)
    if rule is None:
        return Placed(None, "its name is not known; state it under [placement.tp] in auditor.toml")
    return _by_formula(rule, local, degree, sizes)


def _by_formula(rule: Rule, local: tuple[int, ...], degree: int, sizes: Sizes) -> Placed:
    if len(local) != len(rule.shape):
        return Placed(None, f"it is stored with {len(local)} dims, its name implies {len(rule.shape)}")
    halves = sizes.gated and rule.shape[0] == "ffn"
    for dim, (term, stored) in enumerate(zip(rule.shape, local, strict=True)):
        full = sizes.of(term)
        if full is not None and halves and dim == 0:
            full *= 2
        cut = isinstance(rule.placement, Shard) and rule.placement.dim == dim
        # Gated first projections and grouped queries lie otherwise: without a size they can't be told from plain ones.
        if full is None and (not cut or (term in ("ffn", "qkv") and dim == 0)):
            return Placed(None, f"no size is recorded to hold its dim {dim} against")
        if full is not None and stored * (degree if cut else 1) != full:
            return Placed(None, f"dim {dim} is stored as {stored}; its name and the recorded sizes imply "
                                f"{full // degree if cut else full}")  # fmt: skip
    return Placed(rule.placement, halves=halves)


def sizes_from(args: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
    """Recorded sizes: Megatron's ``args``, and the hidden size also from a weight whose dim 1 is never cut."""
    hidden = _count(args, "hidden_size")
    uncut = ("self_attention.query_key_value.weight", "mlp.dense_h_to_4h.weight", "word_embeddings.weight")
    if hidden is None:
        hidden = next((s[1] for name, s in shapes.items() if name.endswith(uncut) and len(s) == 2), None)
    return Sizes(hidden, _count(args, "ffn_hidden_size"), _count(args, "padded_vocab_size"))


def core_sizes_from(args: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], degree: int) -> Sizes:
    """As :func:`sizes_from`, with what megatron-core's names need besides, for ``degree`` tensor-parallel ranks.

    A query group is never cut: with fewer groups than ranks the projection lies otherwise, and its size is left out.
    Source: Megatron-LM ``megatron/core/transformer/attention.py`` (linear_qkv), ``mlp.py`` (gated linear units).
    """
    sizes = replace(sizes_from(args, shapes), experts=_count(args, "num_experts"))
    heads = _count(args, "num_attention_heads")
    gated = any(args.get(key) is True for key in ("swiglu", "quick_geglu", "gated_linear_unit"))
    gated = gated and not args.get("glu_interleave_size")
    if heads is None or sizes.hidden is None:
        return replace(sizes, gated=gated)
    head = _count(args, "kv_channels") or sizes.hidden // heads
    groups = _count(args, "num_query_groups") if args.get("group_query_attention") is True else heads
    qkv = (heads + 2 * groups) * head if groups and groups % degree == 0 else None
    return replace(sizes, qkv=qkv, attention=heads * head, head=head, gated=gated)


def _count(args: Mapping[str, object], key: str) -> int | None:
    value = args.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
