"""What several tensors together look like: one factor, one rank, norms alone, weights of the save before. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.comparison.causes import CLIPPED, GRADIENT, OWN, SAME_FACTOR, SCALED, Setting
from auditor.comparison.matching import module_of
from auditor.comparison.one_set import WEIGHTS
from auditor.comparison.outcome import SUSPECT, Compared, Explanation, Standing
from auditor.comparison.permutation import PERIODIC
from auditor.comparison.precision import COARSENED
from auditor.comparison.together import CommonFactor, factor_cause
from auditor.invariants.related import layer
from auditor.model.catalog import Role
from auditor.model.finding import LikelyCause

MOST = 0.8
"""Where more of the gradients differ, the fault lies where all of them come from."""
_EXPERT = re.compile(r"(\S*experts\.)([0-9]+)(\.\S*)")
_TURNED = re.compile(r"(?:^|\.)(?:q|k|wq|wk|query|key|q_proj|k_proj)\.(?:weight|bias|kernel)$")
_ROTARY = "huggingface/transformers convert_llama_weights_to_hf.permute"
_NORMS = "NVIDIA/Megatron-LM#1446; NVIDIA/Megatron-LM#599"
_TIED = "NVIDIA/Megatron-LM#656"
_OVERLAP = "deepspeedai/DeepSpeed#1801; NVIDIA/Megatron-LM#656"
ARITHMETIC = (
    "moments agree and weights don't: the optimizer's arithmetic (rate, epsilon, correction, decay), or weights that "
    "were not updated"
)


@dataclass(frozen=True, slots=True)
class Shared:
    """What several tensors have in common."""

    causes: tuple[LikelyCause, ...] = ()
    gathered: frozenset[Explanation] = frozenset()
    """Explanations of single tensors that are said here for all of them."""


def shared_causes(rows: Sequence[Compared], factor: CommonFactor | None, setting: Setting) -> Shared:
    """What all that is wrong looks like, each cause once; ``factor``: that of all gradients, where they share one."""
    bad = [row for row in rows if row.standing in SUSPECT]
    causes = [*_of_weights(rows, bad), *_experts(rows), *_rotary(rows)]
    gathered = set[Explanation]()
    whole = 0.0 if factor is None else factor.factor
    if factor is not None:
        causes.append(factor_cause(factor, setting.named(whole)))
    for group in _groups(bad):
        gathered |= {row.cause for row in group if row.cause is not None}
        if not _is_factor(group[0]) or not _close(_factor(group[0]), whole):
            causes.append(_said(group, bad, setting))
    gradients = [row for row in bad if row.pair.role is Role.FIRST_MOMENT]
    told = sum(row.cause in gathered for row in gradients) > len(gradients) / 2
    if gradients and factor is None:
        causes += _places(gradients, sum(_has_amount(row) for row in rows), told=told)
    return Shared(tuple(causes), frozenset(gathered))


def _has_amount(row: Compared) -> bool:
    return row.pair.role is Role.FIRST_MOMENT and row.amount is not None


def _of_weights(rows: Sequence[Compared], bad: Sequence[Compared]) -> Iterator[LikelyCause]:
    """What only weights show: an update that came too late, or was computed otherwise."""
    weights = [row for row in bad if row.pair.role in (Role.PARAMETER, Role.MASTER)]
    stale = [row for row in rows if " of step " in row.holds]
    if stale:
        yield LikelyCause("weights of a save before: an update, or its gather, was not waited for", _OVERLAP)
    agree = any(map(_has_amount, rows)) and not any(row.pair.role is Role.FIRST_MOMENT for row in bad)
    if agree and any(not row.holds for row in weights):
        yield LikelyCause(ARITHMETIC, OWN)


def _groups(bad: Sequence[Compared]) -> list[list[Compared]]:
    """Rows of two tensors at least that have one explanation, in model order."""
    by_place: dict[str, list[Compared]] = {}
    factors: list[list[Compared]] = []
    for row in bad:
        if row.cause is not None and row.cause.held_by:
            by_place.setdefault(row.cause.held_by, []).append(row)
    for row in sorted(filter(_is_factor, bad), key=_away):
        if (
            factors
            and _of_weight(factors[-1][0]) == _of_weight(row)
            and _close(_away(factors[-1][0])[1], _away(row)[1])
        ):
            factors[-1].append(row)
        else:
            factors.append([row])
    groups = [*by_place.values(), *(sorted(group, key=lambda row: row.pair.order) for group in factors)]
    return [group for group in groups if len({row.pair.name for row in group}) > 1]


def _of_weight(row: Compared) -> bool:
    return row.pair.role in WEIGHTS


def _away(row: Compared) -> tuple[bool, float]:
    """By what rows are alike: of weights the multiple is one and little more, so that little; of moments the whole."""
    return _of_weight(row), _factor(row) - _of_weight(row)


def _is_factor(row: Compared) -> bool:
    return row.cause is not None and not row.cause.held_by and math.isfinite(row.cause.factor)


def _factor(row: Compared) -> float:
    return row.cause.factor if row.cause is not None else math.nan


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME_FACTOR)


def _said(group: Sequence[Compared], bad: Sequence[Compared], setting: Setting) -> LikelyCause:
    """One explanation for all tensors that have it."""
    names = list(dict.fromkeys(row.pair.name for row in group))
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    cause = group[0].cause
    assert cause is not None
    if cause.held_by:
        every = [row for row in bad if row.pair.role is Role.FIRST_MOMENT]
        own = sum(row.pair.role is Role.FIRST_MOMENT for row in group)
        what = f"{own} of {len(every)} gradients that differ do so" if own else f"{len(names)} tensors differ"
        return LikelyCause(
            f"{what} in what {cause.held_by} holds alone: that rank computed, clipped or scaled otherwise than the "
            f"rest ({listed})", CLIPPED,
        )  # fmt: skip
    if group[0].pair.role in WEIGHTS:
        return LikelyCause(
            f"the differences of {len(names)} weights are one multiple of the weights themselves "
            f"({cause.factor - 1:+.3g}): weight decay that differs ({listed})", OWN,
        )  # fmt: skip
    named = setting.named(cause.factor)
    return LikelyCause(
        f"gradients of {len(names)} tensors are {cause.factor:.4g} times the reference's"
        + (f", {named}" if named else "") + f": {SCALED} ({listed})", GRADIENT,
    )  # fmt: skip


def _places(gradients: Sequence[Compared], num_moments: int, *, told: bool) -> Iterator[LikelyCause]:
    """What the names of the gradients that differ tell; where they are ``told`` from each other, no more than that."""
    names = [row.pair.name for row in gradients]
    if all(_is_norm(name) for name in names):
        yield LikelyCause("gradients of norms alone: not summed over ranks (as sequence parallelism asks)", _NORMS)
    elif all("embed" in name or "wte" in name or "lm_head" in name for name in names):
        yield LikelyCause("the embedding's gradient alone: that of the tied head is not added", _TIED)
    elif told:
        return
    elif sum(COARSENED in row.detail for row in gradients) > len(gradients) / 2:
        yield LikelyCause("gradients were summed, or kept, in bfloat16 where the reference's were not", GRADIENT)
    elif len(names) > MOST * num_moments:
        modules = dict.fromkeys(
            module_of(row.pair.name) or row.pair.name for row in sorted(gradients, key=_margin, reverse=True)
        )
        yield LikelyCause(
            "nearly all gradients differ: an error of the forward pass, or of the loss, reaches them all; farthest "
            f"beyond rounding are {', '.join(list(modules)[:3])}", OWN,
        )  # fmt: skip
    else:
        nearest = max(gradients, key=lambda row: row.pair.order)
        others = len({layer(name) for name in names})
        yield LikelyCause(
            f"gradients flow from the loss to the embedding: of those that differ ({len(names)} in {others} layers), "
            f"{nearest.pair.name} is nearest to the loss", OWN,
        )  # fmt: skip


def _experts(rows: Sequence[Compared]) -> Iterator[LikelyCause]:
    """Experts of one layer that hold each other's weights, or one of them twice."""
    moved = []
    for row in rows:
        here, there = _EXPERT.fullmatch(row.pair.name), _EXPERT.fullmatch(row.holds)
        if here and there and (here[1], here[3]) == (there[1], there[3]):
            moved.append((row, here, there))
    if not moved:
        return
    if {here[0] for _, here, _ in moved} != {there[0] for _, _, there in moved}:
        _, here, there = moved[0]
        yield LikelyCause(f"expert {there[2]} is there twice, and what expert {here[2]} was is lost", OWN)
        return
    layers = {layer(row.pair.name) for row, _, _ in moved}
    routers = [
        row for row in rows if row.standing is Standing.REORDERED and layer(row.pair.name) in layers
        and row.pair.name.endswith(("router.weight", "gate.weight"))
    ]  # fmt: skip
    rest = (
        "and rows of the router with them: where both are in the same order the model is the same" if routers
        else "and the router's rows are not: tokens go to other experts than they were meant for"
    )  # fmt: skip
    yield LikelyCause(f"experts are in another order, {rest}", OWN)


def _rotary(rows: Sequence[Compared]) -> Iterator[LikelyCause]:
    """Queries and keys alone of which the rows of every head are in one other order."""
    turned = [row for row in rows if row.standing is Standing.REORDERED and PERIODIC in row.detail]
    if turned and all(_TURNED.search(row.pair.name) for row in turned):
        yield LikelyCause(
            "rows of queries and keys lie as another form of rotary embeddings wants them: neighbours that turn "
            "together against halves of a head", _ROTARY,
        )  # fmt: skip


def _margin(row: Compared) -> float:
    return -1.0 if math.isnan(row.margin) else row.margin


def _is_norm(name: str) -> bool:
    parts = name.lower().replace("_", ".").split(".")
    return any("norm" in part or part in ("ln", "ln1", "ln2", "lnf") for part in parts)
