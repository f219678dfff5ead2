"""What an error may be: a factor, a part along a mesh axis, decay, a lost sum. Offered, never a fact. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from auditor.comparison.lockstep import Distance, Profile
from auditor.comparison.matching import Pair, module_of
from auditor.comparison.outcome import Compared, Standing
from auditor.comparison.precision import COARSENED
from auditor.comparison.rounding import Threshold
from auditor.invariants.related import layer
from auditor.model.catalog import Role, Tensor
from auditor.model.finding import LikelyCause
from auditor.model.mesh import Mesh, Shard

SAME_FACTOR = 0.02
"""A multiple that leaves less than this over is one; two factors this close are the same."""
CONTRAST = 10.0
"""Parts that differ must do so by so many times more than those that don't."""
FILLED = 0.5
"""Of what a rank holds, so much must differ: one that computes otherwise does so in more than a few elements."""
MOST = 0.8
"""Where more of the gradients differ, the fault lies where all of them come from."""
GUESSED = (2, 4, 8)
"""Degrees that are tried where no mesh is recorded."""
OWN = "the numbers themselves"
_EXPERT = re.compile(r"^holds the reference's \S*experts\.[0-9]+\.\S*$")
_ALL_IN = "all of it is in what "
_GRADIENT = "NVIDIA/Megatron-LM#673; NVIDIA/Megatron-LM#906"
_NORMS = "NVIDIA/Megatron-LM#1446; NVIDIA/Megatron-LM#599"
_TIED = "NVIDIA/Megatron-LM#656"
_CLIPPED = "deepspeedai/DeepSpeed#1801"
_OVERLAP = "deepspeedai/DeepSpeed#1801; NVIDIA/Megatron-LM#656"


@dataclass(frozen=True, slots=True)
class Setting:
    """Of both sides, what is known of how tensors lie on ranks."""

    meshes: tuple[Mesh, Mesh]

    def degrees(self, dim: int, tensors: Sequence[Tensor]) -> list[tuple[str, int]]:
        """Axes that cut a dim, with their degrees; guesses without a name where no layout says."""
        found: dict[tuple[str, int], None] = {}
        for mesh, tensor in zip(self.meshes, tensors, strict=True):
            for axis, how in tensor.placement:
                if how == Shard(dim) and mesh.degree(axis) > 1:
                    found[axis, mesh.degree(axis)] = None
        return list(found) or [("", degree) for degree in GUESSED]

    def named(self, factor: float) -> str:
        """Which degree a factor is, or one over which; empty where none."""
        sizes = {axis: degree for mesh in self.meshes for axis, degree in mesh.axes if degree > 1}
        for value, form in ((factor, "{} ranks of {}"), (1 / factor if factor else 0.0, "one over the {} ranks of {}")):
            for axis, degree in sizes.items():
                if math.isclose(value, degree, rel_tol=SAME_FACTOR):
                    return form.format(degree, axis)
        return ""


def causes_of(
    pair: Pair, tensors: Sequence[Tensor], found: Distance, threshold: Threshold | None, setting: Setting
) -> tuple[LikelyCause, ...]:
    """What one tensor's difference looks like."""
    limit = threshold.beyond if threshold is not None else 0.0
    texts = [*_factor(pair, found, limit, setting), *_parts(pair, tensors, found, limit, setting)]
    return tuple(texts[:2])


def _factor(pair: Pair, found: Distance, limit: float, setting: Setting) -> Iterator[LikelyCause]:
    factor, left = found.factor, found.beside_factor
    if not math.isfinite(factor):
        return
    weight = pair.role in (Role.PARAMETER, Role.MASTER, Role.EMA)
    if weight and found.apart and left * math.sqrt(found.candidate) < 0.3 * math.sqrt(found.apart):
        yield LikelyCause(
            f"the difference is a multiple of the weight itself ({factor - 1:+.3g} of it): weight decay that differs",
            OWN,
        )
    elif not weight and left < max(limit, SAME_FACTOR) and abs(factor - 1) > max(limit, 1e-3):
        named = setting.named(math.sqrt(factor) if pair.role is Role.SECOND_MOMENT and factor > 0 else factor)
        what = f"it is {factor:.4g} times the reference" + (f": {named}" if named else "")
        yield LikelyCause(f"{what}; a sum that is not averaged, a loss or clipping scaled otherwise", _GRADIENT)


def _parts(
    pair: Pair, tensors: Sequence[Tensor], found: Distance, limit: float, setting: Setting
) -> Iterator[LikelyCause]:
    if found.num_differ == 1 and found.num_elements > 1:
        yield LikelyCause("one element alone: damage of memory, wire or storage; arithmetic errs in more", OWN)
        return
    for dim, profile in enumerate(found.profiles):
        for axis, degree in setting.degrees(dim, tensors):
            text = _part(profile, tensors[0].shape[dim], degree, limit)
            if text and not axis and pair.role in (Role.PARAMETER, Role.MASTER) and "," in text[0]:
                # Where no layout says how a weight is cut, several parts at once are more likely chance.
                continue
            if text and found.num_differ * degree >= FILLED * found.num_elements:
                where = f"{axis} rank {text[0]} of {degree}" if axis else f"part {text[0]} of {degree} equal parts"
                yield LikelyCause(
                    f"along dim {dim} {_ALL_IN}{where} holds{text[1]}: one rank computed, clipped, or was "
                    "written, otherwise than the rest", _CLIPPED,
                )  # fmt: skip
                return


def _part(profile: Profile, extent: int, degree: int, limit: float) -> tuple[str, str] | None:
    """The parts of a dim that differ, where others don't, and by which factor."""
    bins = len(profile.apart)
    if degree < 2 or bins % degree or extent % degree:
        return None
    apart, product, square = (
        values.reshape(degree, -1).sum(axis=1) for values in (profile.apart, profile.product, profile.square)
    )
    if not square.all():
        return None
    sizes = np.sqrt(apart / square)
    good = (sizes <= limit) & (sizes * CONTRAST < sizes.max())
    if not good.any() or good.all() or sizes[~good].min() < CONTRAST * sizes[good].max():
        return None
    lines = profile.apart > limit**2 * profile.square
    if lines.reshape(degree, -1)[~good].mean() < FILLED:
        return None
    factors = (product / square)[~good]
    alike = np.ptp(factors) < SAME_FACTOR * abs(factors.mean())
    factor = f", about {factors.mean():.3g} times the reference" if alike else ""
    return ", ".join(map(str, np.flatnonzero(~good).tolist())), factor


def shared_causes(rows: Sequence[Compared], *, scaled: bool) -> tuple[LikelyCause, ...]:
    """What several tensors together look like; ``scaled``: whether all gradients are one multiple."""
    bad = [row for row in rows if row.standing in (Standing.BEYOND, Standing.SUSPICIOUS)]
    gradients = [row for row in bad if row.pair.role is Role.FIRST_MOMENT]
    weights = [row for row in bad if row.pair.role in (Role.PARAMETER, Role.MASTER)]
    moments = [row for row in rows if row.pair.role is Role.FIRST_MOMENT and row.amount is not None]
    found: list[LikelyCause] = []
    stale = [row for row in rows if row.detail.startswith("holds the reference's") and " of step " in row.detail]
    if stale:
        found.append(LikelyCause("weights of a save before: an update, or its gather, was not waited for", _OVERLAP))
    found += _experts(rows)
    if not gradients and moments and weights:
        found.append(
            LikelyCause(
                "moments agree and weights don't: the optimizer's arithmetic (rate, epsilon, correction, decay), or "
                "weights that were not updated",
                OWN,
            )
        )
    if gradients and not scaled:
        found += _places(gradients, moments)
    return tuple(found)


def _places(gradients: Sequence[Compared], moments: Sequence[Compared]) -> Iterator[LikelyCause]:
    names = [row.pair.name for row in gradients]
    held = Counter(where for row in gradients if (where := _held_by(row)))
    if held and held.most_common(1)[0][1] > len(gradients) / 2:
        ((where, count),) = held.most_common(1)
        yield LikelyCause(
            f"{count} of {len(names)} gradients that differ do so in what {where} holds alone: that rank computed, "
            "clipped or scaled otherwise than the rest", _CLIPPED,
        )  # fmt: skip
        return
    if all(_is_norm(name) for name in names):
        yield LikelyCause("gradients of norms alone: not summed over ranks (as sequence parallelism asks)", _NORMS)
    elif all("embed" in name or "wte" in name or "lm_head" in name for name in names):
        yield LikelyCause("the embedding's gradient alone: that of the tied head is not added", _TIED)
    elif sum(COARSENED in row.detail for row in gradients) > len(gradients) / 2:
        yield LikelyCause("gradients were summed, or kept, in bfloat16 where the reference's were not", _GRADIENT)
    elif len(names) > MOST * len(moments):
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
    """Experts of one layer that hold each other's weights."""
    moved = [row for row in rows if "experts." in row.pair.name and _EXPERT.search(row.detail)]
    if not moved:
        return
    layers = {layer(row.pair.name) for row in moved}
    routers = [
        row for row in rows if row.standing is Standing.REORDERED and layer(row.pair.name) in layers
        and row.pair.name.endswith(("router.weight", "gate.weight"))
    ]  # fmt: skip
    rest = (
        "and rows of the router with them: where both are in the same order the model is the same" if routers
        else "and the router's rows are not: tokens go to other experts than they were meant for"
    )  # fmt: skip
    yield LikelyCause(f"experts are in another order, {rest}", OWN)


def _held_by(row: Compared) -> str:
    """Which rank's, or part's, the whole difference of a tensor is; empty where it is nobody's alone."""
    texts = [cause.text.partition(_ALL_IN)[2].partition(" holds")[0] for cause in row.causes]
    return next((text for text in texts if text), "")


def _margin(row: Compared) -> float:
    return -1.0 if math.isnan(row.margin) else row.margin


def _is_norm(name: str) -> bool:
    parts = name.lower().replace("_", ".").split(".")
    return any("norm" in part or part in ("ln", "ln1", "ln2", "lnf") for part in parts)
