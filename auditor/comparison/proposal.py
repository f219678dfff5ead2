"""`[[map]]` tables for tensors that have no counterpart, by digest, shape and statistics: to be read by a person."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from auditor.comparison.holding import Holding
from auditor.comparison.lockstep import Stored
from auditor.comparison.matching import Matching
from auditor.comparison.permutation import line_hashes
from auditor.model.catalog import Role, Tensor
from auditor.view.assemble import SourceLostError

_NUMBER = re.compile(r"(?<![A-Za-z0-9])[0-9]+(?![A-Za-z0-9])")
SAME_SIZE = 1e-9
"""Relative difference up to which two sums of squares of the same numbers, added in another order, are one."""
MOST_FUSED = 4
"""Tensors that are looked for in a fused one."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """One rule, and what speaks for it."""

    source: str
    targets: tuple[str, ...]
    evidence: str
    transpose: bool = False
    sizes: tuple[int, ...] = ()
    of_reference: bool = False
    """Whether the rule is for the reference's names."""

    def lines(self) -> Iterator[str]:
        """The table."""
        yield "[[map]]  # " + self.evidence + ("; for the reference's names" if self.of_reference else "")
        yield f'from = "{self.source}"'
        names = ", ".join(f'"{name}"' for name in self.targets)
        yield f"to = [{names}]" if len(self.targets) > 1 else f"to = {names}"
        if self.transpose:
            yield "transpose = true"
        if self.sizes:
            yield f"sizes = [{', '.join(map(str, self.sizes))}]"


@dataclass
class _Open:
    """The tensors of both sides that still have no counterpart, in model order."""

    left: Holding
    right: Holding
    own: list[int]
    theirs: list[int]
    found: list[Proposed] = field(default_factory=list)

    def take(self, own: Sequence[int], theirs: Sequence[int], evidence: str, *, transpose: bool = False) -> None:
        """Let tensors belong together: one and one, or one and the parts that it is fused of."""
        left = tuple(self.left.tensors[number].name for number in own)
        right = tuple(self.right.tensors[number].name for number in theirs)
        fused = len(right) > 1
        source, targets = (left[0], right) if fused else (right[0], left)
        parts = [self.right.tensors[n] for n in theirs] if fused else [self.left.tensors[n] for n in own]
        sizes = tuple(part.shape[0] for part in parts) if len(parts) > 1 else ()
        self.found.append(Proposed(source, targets, evidence, transpose, sizes, of_reference=fused))
        self.own = [number for number in self.own if number not in own]
        self.theirs = [number for number in self.theirs if number not in theirs]


def propose(left: Holding, right: Holding, matching: Matching) -> list[Proposed]:
    """Rules for parameters that one side alone has, surest evidence first; layers that go alike are one rule."""
    weights = (Role.PARAMETER, Role.MASTER)
    lone = [pair for pair in matching.pairs if pair.role in weights]
    own = [pair.reference for pair in lone if pair.candidate is None and pair.reference is not None]
    theirs = [pair.candidate for pair in lone if pair.reference is None and pair.candidate is not None]
    both = _Open(left, right, own, theirs)
    _by_digest(both)
    _by_transposition(both)
    _by_parts(both)
    _by_order(both)
    return _generalised(both.found)


def _by_digest(both: _Open) -> None:
    contents: dict[object, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, holding, numbers in ((0, both.left, both.own), (1, both.right, both.theirs)):
        for number in numbers:
            rows = holding.rows.get(number)
            if rows:
                what = holding.tensors[number]
                contents[what.shape, what.dtype, holding.lanes(rows[0])][side].append(number)
    for own, theirs in contents.values():
        if len(own) == len(theirs):
            # Several of one content (norms of ones) are told apart by their order alone.
            evidence = (
                "the same digest" if len(own) == 1 else f"the same digest as {len(own) - 1} others, in model order"
            )
            for one, other in zip(own, theirs, strict=True):
                both.take([one], [other], evidence)


def _by_transposition(both: _Open) -> None:
    for one in list(both.own):
        what = both.left.tensors[one]
        if len(what.shape) != 2 or both.left.source is None or both.right.source is None:
            continue
        for other in list(both.theirs):
            theirs = both.right.tensors[other]
            if theirs.shape != what.shape[::-1] or theirs.dtype != what.dtype or not _alike(both, [one], [other]):
                continue
            try:
                rows = line_hashes(Stored(both.left.source, one), 0)
                columns = line_hashes(Stored(both.right.source, other), 1)
            except SourceLostError:
                continue
            if (rows == columns).all():
                both.take([one], [other], "transposed, row by row", transpose=True)
                break


def _by_parts(both: _Open) -> None:
    """One tensor whose rows and squares are those of several neighbours of one module on the other side."""
    for fused in (False, True):
        singles, others = (both.own, both.theirs) if fused else (both.theirs, both.own)
        one_side, other_side = (both.left, both.right) if fused else (both.right, both.left)
        for single in list(singles):
            parts = _parts(one_side, single, other_side, list(others))
            if parts and all(part in (both.theirs if fused else both.own) for part in parts):
                # A rule cuts what is fused: it is for the names of the side that has it whole.
                ordered = _in_order(one_side, single, other_side, parts)
                own, theirs = ([single], ordered or parts) if fused else (ordered or parts, [single])
                evidence = "fused, row by row" if ordered else "rows and squares add up; how they lie is not proved"
                both.take(own, theirs, evidence)


def _parts(one: Holding, single: int, other: Holding, numbers: Sequence[int]) -> list[int]:
    whole = one.tensors[single]
    if not whole.shape:
        return []
    for count in range(2, MOST_FUSED + 1):
        for start in range(len(numbers) - count + 1):
            parts = list(numbers[start : start + count])
            tensors = [other.tensors[part] for part in parts]
            if _stack_of(whole, tensors) and math.isclose(
                sum(other.size(part) ** 2 for part in parts), one.size(single) ** 2, rel_tol=SAME_SIZE
            ):
                return parts
    return []


def _in_order(one: Holding, single: int, other: Holding, parts: Sequence[int]) -> list[int]:
    """The parts as they lie in the fused tensor, each whole; empty where they don't, or that can't be read."""
    if one.source is None or other.source is None:
        return []
    places: dict[int, int] = {}
    try:
        rows = line_hashes(Stored(one.source, single), 0)
        for part in parts:
            own = line_hashes(Stored(other.source, part), 0)
            starts = [at for at in range(len(rows) - len(own) + 1) if rows[at] == own[0]]
            fits = [at for at in starts if (rows[at : at + len(own)] == own).all()]
            if not fits:
                return []
            places[part] = fits[0]
    except SourceLostError:
        return []
    return sorted(parts, key=lambda part: places[part])


def _stack_of(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    same = all(part.shape[1:] == whole.shape[1:] and part.dtype == whole.dtype and part.shape for part in parts)
    return same and sum(part.shape[0] for part in parts) == whole.shape[0]


def _alike(both: _Open, own: Sequence[int], theirs: Sequence[int]) -> bool:
    sizes = [sum(side.size(number) ** 2 for number in numbers)
             for side, numbers in ((both.left, own), (both.right, theirs))]  # fmt: skip
    return math.isclose(*sizes, rel_tol=SAME_SIZE)


def _by_order(both: _Open) -> None:
    """What is left, where both sides have as many tensors of a shape: in model order, which proves nothing."""
    shapes: dict[tuple[int, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, holding, numbers in ((0, both.left, both.own), (1, both.right, both.theirs)):
        for number in numbers:
            shapes[holding.tensors[number].shape][side].append(number)
    for own, theirs in shapes.values():
        if len(own) == len(theirs):
            for one, other in zip(own, theirs, strict=True):
                size, against = both.left.size(one), both.right.size(other)
                both.take(
                    [one], [other], f"the same shape and place in the order alone (lengths {size:.3g}, {against:.3g})"
                )


def _generalised(found: Sequence[Proposed]) -> list[Proposed]:
    """Rules that differ in one number alone as one."""
    kept: dict[tuple[object, ...], Proposed] = {}
    for rule in found:
        numbers = {_NUMBER.findall(name)[0] for name in (rule.source, *rule.targets) if len(_NUMBER.findall(name)) == 1}
        single = all(len(_NUMBER.findall(name)) == 1 for name in (rule.source, *rule.targets)) and len(numbers) == 1
        if single:
            source, *targets = (_NUMBER.sub("{n}", name) for name in (rule.source, *rule.targets))
            rule = Proposed(source, tuple(targets), rule.evidence, rule.transpose, rule.sizes, rule.of_reference)
        key = rule.source, rule.targets, rule.transpose, rule.sizes
        weaker = key in kept and "alone" in rule.evidence
        if key not in kept or weaker:
            kept[key] = rule
    return list(kept.values())
