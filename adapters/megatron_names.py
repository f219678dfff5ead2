"""How Megatron's parameters lie on the tensor-parallel axis, decided by name and recorded sizes.

Never by equal shapes: with four ranks and the usual ffn = 4·hidden, a rank's part of ``dense_h_to_4h.bias`` is exactly
as long as a norm. A name's formula gives its full shape; the stored shape must be that (replicated) or that divided by
the number of ranks (sharded). Anything else, and any unknown name, is undetermined.
Source: Megatron-LM ``megatron/core/tensor_parallel/layers.py`` and the layer classes that use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from auditor.model.mesh import Replicate, Shard


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the whole model as recorded; None where they are not."""

    hidden: int | None = None
    ffn: int | None = None
    vocab: int | None = None

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
_FINAL_NORM = Rule("", ("hidden",), _ALL)
_POSITIONS = "position_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Placed:
    """How one parameter lies on the axis; ``how`` is None where that isn't known, with the reason."""

    how: Shard | Replicate | None
    reason: str = ""


def rule_for(name: str) -> Rule | None:
    """The rule for a parameter called ``name`` within its pipeline layer."""
    if name in ("weight", "bias"):
        return _FINAL_NORM
    return next((rule for rule in RULES if name == rule.suffix or name.endswith(f".{rule.suffix}")), None)


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
    for dim, (term, stored) in enumerate(zip(rule.shape, local, strict=True)):
        full = sizes.of(term)
        cut = isinstance(rule.placement, Shard) and rule.placement.dim == dim
        # A gated first projection is two halves on every rank: without its size it can't be told from a plain one.
        if full is None and (not cut or (term == "ffn" and dim == 0)):
            return Placed(None, f"no size is recorded to hold its dim {dim} against")
        if full is not None and stored * (degree if cut else 1) != full:
            return Placed(None, f"dim {dim} is stored as {stored}; its name and the recorded sizes imply "
                                f"{full // degree if cut else full}")  # fmt: skip
    return Placed(rule.placement)


def sizes_from(args: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
    """Recorded sizes: Megatron's ``args``, and the hidden size also from a weight whose dim 1 is never cut."""

    def number(key: str) -> int | None:
        value = args.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    hidden = number("hidden_size")
    uncut = ("self_attention.query_key_value.weight", "mlp.dense_h_to_4h.weight", "word_embeddings.weight")
    if hidden is None:
        hidden = next((s[1] for name, s in shapes.items() if name.endswith(uncut) and len(s) == 2), None)
    return Sizes(hidden, number("ffn_hidden_size"), number("padded_vocab_size"))
