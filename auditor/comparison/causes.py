"""What one tensor's difference may be: a factor, a part along a mesh axis, decay. Offered, never a fact. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from auditor.comparison.lockstep import Distance, Profile
from auditor.comparison.matching import Pair
from auditor.comparison.outcome import Explanation
from auditor.comparison.rounding import Threshold
from auditor.model.catalog import Role, Tensor
from auditor.model.mesh import Mesh, Shard

SAME_FACTOR = 0.02
"""A multiple that leaves less than this of itself over is one; two factors this close are the same."""
CONTRAST = 10.0
"""Parts that differ must do so by so many times more than those that don't."""
FILLED = 0.5
"""Of what a rank holds, so much must differ: one that computes otherwise does so in more than a few elements."""
MOST_LEFT = 0.3
"""Of a difference, so much may be left where a multiple of the reference explains it."""
ALIKE = 1.5
"""Two that leave so nearly the same over explain it equally well."""
GUESSED = (2, 4, 8)
"""Degrees that are tried where no mesh is recorded."""
UNNAMED = "rank"
"""The axis of a mesh of which nothing but the number of ranks is known."""
OWN = "the numbers themselves"
SCALED = "a sum that is not averaged, a loss or clipping scaled otherwise"
GRADIENT = "NVIDIA/Megatron-LM#673; NVIDIA/Megatron-LM#906"
CLIPPED = "deepspeedai/DeepSpeed#1801"
_ZERO_CENTRED = "huggingface/transformers GemmaRMSNorm; megatron-core layernorm_zero_centered_gamma"


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
        for value, form in ((factor, "{}"), (1 / factor if factor else 0.0, "one over the {}")):
            for axis, degree in sizes.items():
                if math.isclose(value, degree, rel_tol=SAME_FACTOR):
                    return form.format(f"{degree} ranks" + (f" of {axis}" if axis != UNNAMED else ""))
        return ""


def explanation_of(
    pair: Pair, tensors: Sequence[Tensor], found: Distance, threshold: Threshold | None, setting: Setting
) -> Explanation | None:
    """What one tensor's difference looks like: of all that fits, what leaves least of it open."""
    limit, rounding = (threshold.beyond, threshold.relative) if threshold is not None else (0.0, 0.0)
    if found.num_differ == 1 and found.num_elements > 1:
        text = "one element alone: damage of memory, wire or storage; arithmetic errs in more"
        return Explanation(text, OWN, 0.0)
    if not 0 < found.relative < math.inf:
        return None
    copied = threshold is not None and threshold.stored
    fits = [
        *_offset(pair, found), *_factor(pair, found, limit, setting, copied=copied),
        *_parts(pair, tensors, found, limit, setting),
    ]  # fmt: skip
    least = min((one.rest for one in fits), default=0.0)
    # What is left within rounding is explained, by whichever leaves it.
    best = [one for one in fits if one.rest <= max(ALIKE * least, rounding / found.relative)]
    if len(best) < 2:
        return best[0] if best else None
    sources = "; ".join(dict.fromkeys(one.source for one in best))
    return Explanation(f"one of: {'; or '.join(one.text for one in best)}", sources, least)


def _offset(pair: Pair, found: Distance) -> Iterator[Explanation]:
    """One number, added to every element of a weight."""
    away, count = found.sums[1] - found.sums[0], found.num_summed
    if pair.role not in (Role.PARAMETER, Role.MASTER, Role.EMA) or count < 2:
        return
    rest = math.sqrt(max(0.0, 1 - away**2 / count / found.apart))
    if rest < SAME_FACTOR:
        size = math.copysign(found.largest, away)
        text = f"every element is the reference's and {size:.4g}: an offset, as of norms whose weights lie around 0"
        yield Explanation(text, _ZERO_CENTRED, rest)


def _factor(
    pair: Pair, found: Distance, limit: float, setting: Setting, *, copied: bool
) -> Iterator[Explanation]:  # fmt: skip
    factor = found.factor
    # One number is a multiple of any other; an average of activations is no gradient.
    if not math.isfinite(factor) or found.num_summed < 2 or pair.role is Role.BUFFER:
        return
    left = found.beside_factor * math.sqrt(found.candidate / found.reference)
    rest = left / found.relative
    if pair.role in (Role.PARAMETER, Role.MASTER, Role.EMA):
        if rest < MOST_LEFT:
            what = f"the difference is a multiple of the weight itself ({factor - 1:+.3g} of it)"
            why = "scaled on its way" if copied else "weight decay that differs"
            yield Explanation(f"{what}: {why}", OWN, rest, factor=factor)
    elif rest < MOST_LEFT and left < factor * max(limit, SAME_FACTOR) and abs(factor - 1) > max(limit, 1e-3):
        own = math.sqrt(factor) if pair.role is Role.SECOND_MOMENT and factor > 0 else factor
        named = setting.named(own)
        what = f"it is {factor:.4g} times the reference" + (f": {named}" if named else "")
        yield Explanation(f"{what}; {SCALED}", GRADIENT, rest, factor=own)


def _parts(
    pair: Pair, tensors: Sequence[Tensor], found: Distance, limit: float, setting: Setting
) -> Iterator[Explanation]:
    seen = set[tuple[int, tuple[Fraction, ...], str]]()
    for dim, profile in enumerate(found.profiles):
        for axis, degree in setting.degrees(dim, tensors):
            part = _part(profile, tensors[0].shape[dim], degree, limit)
            if part is None or found.num_differ * degree < FILLED * found.num_elements:
                continue
            if len(part.numbers) > 1 and not axis and pair.role in (Role.PARAMETER, Role.MASTER):
                # Where no layout says how a weight is cut, several parts at once are more likely chance.
                continue
            if (dim, part.lines, axis) in seen:
                continue
            seen.add((dim, part.lines, axis))
            numbers = ", ".join(map(str, part.numbers))
            where = _where(axis, numbers, degree)
            text = (
                f"along dim {dim} all of it is in what {where} holds{part.factor}: one rank computed, clipped, or was "
                "written, otherwise than the rest"
            )
            yield Explanation(text, CLIPPED, math.sqrt(part.rest / found.apart), held_by=where)


def _where(axis: str, numbers: str, degree: int) -> str:
    if not axis:
        return f"part {numbers} of {degree} equal parts"
    return f"rank {numbers} of {degree}" if axis == UNNAMED else f"{axis} rank {numbers} of {degree}"


@dataclass(frozen=True, slots=True)
class _Part:
    """Parts of a dim that differ, where others don't."""

    numbers: tuple[int, ...]
    degree: int
    rest: float
    """Of the squared difference, what lies elsewhere."""
    factor: str
    """Which multiple of the reference they are, in words, where they are one."""

    @property
    def lines(self) -> tuple[Fraction, ...]:
        """Which stretch of the dim they are, whatever the number of parts."""
        inside = [number in self.numbers for number in range(self.degree)]
        edges = [at for at in range(1, self.degree) if inside[at] != inside[at - 1]]
        return tuple(Fraction(at, self.degree) for at in ([0] if inside[0] else []) + edges)


def _part(profile: Profile, extent: int, degree: int, limit: float) -> _Part | None:
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
    alike = np.ptp(factors) < SAME_FACTOR * abs(factors.mean()) and abs(factors.mean() - 1) > SAME_FACTOR
    factor = f", about {factors.mean():.3g} times the reference" if alike else ""
    return _Part(tuple(np.flatnonzero(~good).tolist()), degree, float(apart[good].sum()), factor)
