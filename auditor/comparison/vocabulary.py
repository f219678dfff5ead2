"""A vocabulary that one side pads: which rows both have, and whether the rest may be padding at all."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.comparison.heads import recorded_vocabulary
from auditor.comparison.lockstep import Distance, Stored, measure
from auditor.view.assemble import SourceLostError

NAMES = ("embed", "wte", "lm_head", "output_layer")
"""Parts of the names of tensors with a row a token, which some pad."""
MULTIPLE = 8
"""Of what padded vocabularies are: Megatron-LM pads to 128, ``pad_to_multiple_of`` is 8 or more."""


@dataclass(frozen=True, slots=True)
class Common:
    """The rows that both sides have."""

    apart: Distance
    text: str


def in_common(reference: Stored, candidate: Stored) -> Common | None:
    """The rows that both have of a vocabulary; None where the rest is no padding, or something can't be read."""
    left, right = reference.tensor, candidate.tensor
    alike = left.shape[1:] == right.shape[1:] and left.dtype == right.dtype and len(left.shape) > 1
    sides = sorted((reference, candidate), key=lambda side: side.tensor.shape[:1])
    if not alike or not any(word in left.name for word in NAMES) or not _pads(*sides):
        return None
    count = sides[0].tensor.shape[0]
    try:
        apart = measure(reference, candidate, (count, *left.shape[1:]))
    except SourceLostError:
        return None
    longer, rest = "candidate" if right.shape[0] > count else "reference", sides[1].tensor.shape[0] - count
    return Common(apart, f"the first {count} rows; the {longer} has {rest} more, a vocabulary's padding")


def _pads(shorter: Stored, longer: Stored) -> bool:
    """Whether the rows that one side has more may be padding: they are no recorded ones, and make a round number."""
    count, most = shorter.tensor.shape[0], longer.tensor.shape[0]
    if recorded_vocabulary(shorter.source) > count:
        return False
    return 0 < recorded_vocabulary(longer.source) <= count or most % MULTIPLE == 0
