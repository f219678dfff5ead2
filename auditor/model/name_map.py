"""Name maps: a Catalog seen as another framework would have stored it. Names, order of dims, stacks; no bytes move.

Frameworks call one weight by different names, keep matrices transposed (torch ``[out, in]``, JAX ``[in, out]``), stack
layers into one tensor or fuse several into one. A rule says how; a :class:`Catalog` under rules has the same pieces
with other regions and strides, so that its tensors have the digests of the other framework's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from auditor.model.catalog import Catalog, Piece, Role, Tensor, c_strides, placed_in_file
from auditor.model.mesh import Coordinate, Replicate, Shard
from auditor.model.optimizer import parameter_of
from auditor.model.pieces_builder import PiecesBuilder
from auditor.model.region import Box, as_boxes

MAX_LAYERS = 1 << 12
"""Tensors into which one is taken apart."""
_FIELD = re.compile(r"\{([a-z]\w{0,30})\}")


@lru_cache(1 << 10)
def _pattern(source: str) -> re.Pattern[str]:
    """What fits the names that a rule is for."""
    pattern, at = "", 0
    for found in _FIELD.finditer(source):
        kind = "[0-9]+" if found[1] == "n" else "[^.]+"
        pattern += re.escape(source[at : found.start()]) + f"(?P<{found[1]}>{kind})"
        at = found.end()
    return re.compile(pattern + re.escape(source[at:]))


def _filled(target: str, words: Mapping[str, str]) -> str:
    """A name with its words. A built-in map's target is another checkpoint's name, in which braces may stand."""
    return _FIELD.sub(lambda found: words.get(found[1], found[0]), target)


@dataclass(frozen=True, slots=True)
class NameRule:
    """How tensors of one pattern are called, and lie, elsewhere. Dims are permuted first, then cut or stacked."""

    source: str
    """Name here; ``{n}`` is a number, any other ``{word}`` a part of a name without dots."""
    targets: tuple[str, ...]
    """Names there, with the same words; several where the tensor is cut."""
    transpose: tuple[int, ...] | None = None
    """New dim i is old dim ``transpose[i]``; empty for all dims in reverse."""
    stack: int | None = None
    """The new dim along which tensors lie in the order of ``{n}``, which the name there lacks."""
    split: int = 0
    """The dim along which a tensor with several ``targets`` is cut."""
    sizes: tuple[int, ...] = ()
    """Extents of the parts; equal ones if none are given."""
    groups: int = 1
    """Equal stretches of the dim, each cut by itself: a target has its part of each, one after the other."""
    unstack: int | None = None
    """The dim that is taken apart: its indices are the ``{n}`` of the targets, which ``source`` lacks. ``split`` counts
    the dims that are left."""
    within: int = 1
    """Equal stretches of the dim that stay where they are: each is cut in its groups, and its parts stay inside it."""

    def match(self, name: str) -> Mapping[str, str] | None:
        """The words of a name that fits."""
        fit = _pattern(self.source).fullmatch(name)
        return fit.groupdict() if fit else None

    def renamed(self, name: str) -> str:
        """What a name becomes where nothing but the name changes; empty where it doesn't fit, or more would change."""
        moved = len(self.targets) > 1 or self.transpose is not None or (self.stack, self.unstack) != (None, None)
        words = None if moved else self.match(name)
        return "" if words is None else _filled(self.targets[0], words)

    def flaw(self) -> str:
        """What is wrong with the rule itself; empty if nothing is."""
        known = _FIELD.findall(self.source)
        wanted = {word for target in self.targets for word in _FIELD.findall(target)}
        if len(set(known)) < len(known) or not self.source or not self.targets or not all(self.targets):
            return "it needs from and to, and each {word} once"
        if self.stack is not None and ("n" not in known or "n" in wanted or len(self.targets) > 1):
            return "to stack, {n} must be in from and not in to, which is one name"
        if self.unstack is not None:
            every = all("n" in _FIELD.findall(target) for target in self.targets)
            if "n" in known or not every or self.stack is not None:
                return "to unstack, {n} must be in every name of to, and not in from"
            wanted.discard("n")
        lacking = set(known) - wanted - ({"n"} if self.stack is not None else set())
        if wanted - set(known) or lacking:
            return "from and to need the same {words}"
        if self.transpose and sorted(self.transpose) != list(range(len(self.transpose))):
            return "transpose is true or an order of dims"
        for key, count in (("groups", self.groups), ("within", self.within)):
            if count < 1 or (count > 1 and len(self.targets) < 2):
                return f"{key} is a number of stretches that are cut, so to has several names (or one several times)"
        if self.sizes and (len(self.sizes) != len(self.targets) or min(self.sizes) < 1):
            return "sizes has one extent for each name in to"
        return ""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A part that is taken along one dim, and where it goes."""

    dim: int
    start: int
    count: int
    place: int
    """Where it begins in the target."""
    extent: int
    """The target's."""
    step: int = 1
    """From one index that is taken to the next."""

    def of(self, start: int, stop: int) -> range:
        """Which of the indices that are taken, counted from the first of them, lie from ``start`` to ``stop``."""
        first = max(0, -(-(start - self.start) // self.step))
        return range(first, max(first, min(self.count, -(-(stop - self.start) // self.step))))


@dataclass(frozen=True, slots=True)
class _Move:
    """One tensor on its way into one target."""

    number: int
    name: str
    order: tuple[int, ...]
    """The permutation of its dims."""
    cuts: tuple[_Cut, ...] = ()
    """What is taken of it; at most one along a dim."""
    stacked: tuple[int, int, int] | None = None
    """New dim, place on it, its extent."""
    dropped: int | None = None
    """The dim that is lost, because a part of one index was taken of it."""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What becomes of a tensor's shape."""
        found = [shape[dim] for dim in self.order]
        for cut in self.cuts:
            found[cut.dim] = cut.extent
        if self.stacked:
            found.insert(self.stacked[0], self.stacked[2])
        if self.dropped is not None:
            del found[self.dropped]
        return tuple(found)

    @property
    def plain(self) -> bool:
        """Whether only the name changes."""
        return not self.cuts and self.stacked is None and self.order == tuple(range(len(self.order)))

    def loses(self, how: Shard | Replicate) -> bool:
        """Whether an axis of the mesh cut the dim that is lost: what is left lies at one of its indices."""
        return isinstance(how, Shard) and self.dropped is not None and self.order[self.dropped] == how.dim

    def placed(self, how: Shard | Replicate) -> Shard | Replicate:
        """What becomes of a placement."""
        if not isinstance(how, Shard) or how.dim not in self.order:
            return how
        dim = self.order.index(how.dim)
        if self.dropped is not None and dim >= self.dropped:
            return Shard(dim - 1)
        return Shard(dim + (self.stacked is not None and dim >= self.stacked[0]))


def mapped(catalog: Catalog, rules: Sequence[NameRule]) -> Catalog:
    """``catalog`` under the first rule that fits each tensor; tensors that none fits stay as they are.

    A stack of which a member lacks, or whose members differ in shape, dtype or replicas, is left in parts.
    """
    moves = _kept_apart(catalog, list(_moves(catalog, rules))) if rules else []
    if not moves:
        return catalog
    tensors, replicas, numbers = list[Tensor](), list[tuple[Coordinate, ...]](), dict[object, int]()
    pieces, target = PiecesBuilder(), list[int]()
    for move in moves:
        old = catalog.tensors[move.number]
        key = (old.role if move.stacked else move.number, move.name) if move.stacked or move.cuts else len(tensors)
        if key not in numbers:
            numbers[key] = len(tensors)
            placement = tuple((axis, move.placed(how)) for axis, how in old.placement if not move.loses(how))
            tensors.append(replace(old, name=move.name, shape=move.shape(old.shape), placement=placement))
            replicas.append(catalog.replicas[move.number])
        target.append(numbers[key])
    for move, number in zip(moves, target, strict=True):
        for row in catalog.rows_by_tensor.get(move.number, ()):
            _add(pieces, catalog, catalog.pieces[int(row)], move, number)
    seen = replace(catalog, tensors=tuple(tensors), replicas=tuple(replicas), pieces=pieces.build())
    return _renamed(seen, catalog, moves)


class _Rules:
    """Rules in order. Those for one name each, of which a map may have one a tensor, are found without trying all."""

    def __init__(self, rules: Sequence[NameRule]) -> None:
        self.patterns = [(at, rule) for at, rule in enumerate(rules) if "{" in rule.source]
        self.names: dict[str, tuple[int, NameRule]] = {}
        for at, rule in enumerate(rules):
            if "{" not in rule.source:
                self.names.setdefault(rule.source, (at, rule))

    def first(self, name: str) -> tuple[NameRule | None, Mapping[str, str] | None]:
        """The first rule that fits, and the words of the name."""
        last, known = self.names.get(name, (None, None))
        for at, rule in self.patterns:
            if last is not None and at > last:
                break
            words = rule.match(name)
            if words is not None:
                return rule, words
        return known, None if known is None else {}


def _moves(catalog: Catalog, rules: Sequence[NameRule]) -> Iterator[_Move]:
    ordered = _Rules(rules)
    shapes = {tensor.name: tensor.shape for tensor in catalog.tensors if tensor.role is Role.PARAMETER}
    for number, tensor in enumerate(catalog.tensors):
        owner = tensor.name
        if tensor.role is Role.MOMENT and owner not in shapes:
            owner = parameter_of(owner)
        rule, words = ordered.first(owner)
        same = tuple(range(len(tensor.shape)))
        of_shape = not tensor.dtype.packed and shapes.get(owner, tensor.shape) == tensor.shape
        if rule is None or words is None or not of_shape:
            yield _Move(number, tensor.name, same)
            continue
        order = same if rule.transpose is None else rule.transpose or same[::-1]
        if len(order) != len(same):
            yield _Move(number, tensor.name, same)
            continue
        yield from _by_rule(rule, words, _Move(number, tensor.name, order), tensor, tensor.name[len(owner) :])


def _by_rule(
    rule: NameRule, words: Mapping[str, str], move: _Move, tensor: Tensor, suffix: str
) -> Iterator[_Move]:  # fmt: skip
    shape = move.shape(tensor.shape)
    if rule.unstack is not None:
        yield from _layers(rule, words, move, shape, suffix)
        return
    names = _names(rule, words, suffix)
    if rule.stack is not None and rule.stack <= len(shape):
        yield replace(move, name=names[0], stacked=(rule.stack, int(words["n"]), 0))
    elif len(names) == 1:
        yield replace(move, name=names[0])
    elif rule.split < len(shape) and (sizes := _sizes(rule, shape[rule.split])):
        yield from _cuts(rule, move, names, sizes, rule.split)
    else:
        yield replace(move, order=tuple(range(len(shape))))


def _layers(
    rule: NameRule, words: Mapping[str, str], move: _Move, shape: Sequence[int], suffix: str
) -> Iterator[_Move]:  # fmt: skip
    """Every index of a dim as a tensor of its own, or as several where it is cut besides."""
    dim = rule.unstack if rule.unstack is not None and rule.unstack < len(shape) else None
    left = [] if dim is None else [*range(dim), *range(dim + 1, len(shape))]
    several = len(rule.targets) > 1
    sizes = _sizes(rule, shape[left[rule.split]]) if several and rule.split < len(left) else ()
    if dim is None or shape[dim] > MAX_LAYERS or (several and not sizes):
        yield replace(move, order=tuple(range(len(shape))))
        return
    for number in range(shape[dim]):
        names = _names(rule, {**words, "n": str(number)}, suffix)
        one = replace(move, name=names[0], cuts=(_Cut(dim, number, 1, 0, 1),), dropped=dim)
        yield from _cuts(rule, one, names, sizes, left[rule.split]) if several else (one,)


def _names(rule: NameRule, words: Mapping[str, str], suffix: str) -> list[str]:
    return [_filled(target, words) + suffix for target in rule.targets]


def _cuts(rule: NameRule, move: _Move, names: Sequence[str], sizes: Sequence[int], dim: int) -> Iterator[_Move]:
    """Every part of every group, to its place in the target; a name that comes several times has its parts in turn."""
    extents = {name: sum(size for own, size in zip(names, sizes, strict=True) if own == name) for name in names}
    stride, low = sum(sizes) // rule.within // rule.groups, 0
    begun = dict.fromkeys(names, 0)
    for name, size in zip(names, sizes, strict=True):
        length = size // rule.within // rule.groups
        for stretch in range(rule.within):
            start = stretch * rule.groups * stride + low
            place = stretch * extents[name] // rule.within + begun[name]
            # Single lines at equal distances are one part with a stride: an attention has thousands of them.
            parts = [_Cut(dim, start, rule.groups, place, extents[name], stride)] if length == 1 else [
                _Cut(dim, start + group * stride, length, place + group * length, extents[name])
                for group in range(rule.groups)
            ]  # fmt: skip
            yield from (replace(move, name=name, cuts=(*move.cuts, part)) for part in parts)
        low += length
        begun[name] += size // rule.within


def _sizes(rule: NameRule, extent: int) -> tuple[int, ...]:
    """Extents of the parts; none where they don't make up the dim, or don't fall into groups."""
    sizes = rule.sizes or (extent // len(rule.targets),) * len(rule.targets)
    each = rule.groups * rule.within
    return sizes if sum(sizes) == extent and not any(size % each for size in sizes) else ()


def _kept_apart(catalog: Catalog, moves: list[_Move]) -> list[_Move]:
    """The moves with extents of stacks; members of stacks that aren't whole, or alike, stay under their own names."""
    members: dict[object, list[_Move]] = defaultdict(list)
    for move in moves:
        if move.stacked:
            members[catalog.tensors[move.number].role, move.name].append(move)
    whole: dict[object, int] = {}
    for key, stack in members.items():
        places = sorted(move.stacked[1] for move in stack if move.stacked)
        alike = {(t.shape, t.dtype, t.replica_axes, catalog.replicas[m.number]) for m in stack
                 if (t := catalog.tensors[m.number])}  # fmt: skip
        if places == list(range(len(stack))) and len(alike) == 1:
            whole[key] = len(stack)
    found = []
    for move in moves:
        key, tensor = (catalog.tensors[move.number].role, move.name), catalog.tensors[move.number]
        if move.stacked and key in whole:
            move = replace(move, stacked=(move.stacked[0], move.stacked[1], whole[key]))
        elif move.stacked:
            move = _Move(move.number, tensor.name, tuple(range(len(tensor.shape))))
        found.append(move)
    return found


def _add(pieces: PiecesBuilder, catalog: Catalog, piece: Piece, move: _Move, number: int) -> None:
    """Add what of a piece goes where ``move`` leads."""
    tensor = catalog.tensors[move.number]
    if move.plain:
        own = None if piece.strides == c_strides(piece.shape) else piece.strides
        pieces.add(number, piece.file, piece.offset, piece.region, piece.coordinate, replica=piece.replica,
                   key=piece.key, strides=own)  # fmt: skip
        return
    for box in as_boxes(piece.region, tensor.shape):
        offset, strides = placed_in_file(piece, tensor.shape, box)
        start, stop, steps = ([side[dim] for dim in move.order] for side in (box.start, box.stop, strides))
        taken = [cut.of(start[cut.dim], stop[cut.dim]) for cut in move.cuts]
        if not all(taken):
            continue
        for cut, part in zip(move.cuts, taken, strict=True):
            dim = cut.dim
            offset += (cut.start + part.start * cut.step - start[dim]) * steps[dim]
            start[dim], stop[dim] = cut.place + part.start, cut.place + part.stop
            steps[dim] *= cut.step
        if move.stacked:
            dim, place, _ = move.stacked
            start.insert(dim, place)
            stop.insert(dim, place + 1)
            steps.insert(dim, 1)
        if move.dropped is not None:
            del start[move.dropped], stop[move.dropped], steps[move.dropped]
        at = piece.offset + offset * tensor.dtype.stored_bits // 8
        pieces.add(number, piece.file, at, Box(tuple(start), tuple(stop)), piece.coordinate, replica=piece.replica,
                   key=piece.key, strides=steps)  # fmt: skip


def _renamed(found: Catalog, before: Catalog, moves: Sequence[_Move]) -> Catalog:
    """The Catalog with the new names wherever tensors are named besides."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for move in moves:
        names[before.tensors[move.number].name].setdefault(move.name)
    first = {name: next(iter(new)) for name, new in names.items()}
    apart = {before.tensors[move.number].name for move in moves if move.dropped is not None}
    scalars = tuple(
        replace(one, tensor=name)
        for one in before.scalars
        for name in (names[one.tensor] if one.tensor in apart else (first.get(one.tensor, one.tensor),))
    )
    groups = tuple(
        one if one.parameters is None
        else replace(one, parameters=tuple(dict.fromkeys(n for old in one.parameters for n in names.get(old, (old,)))))
        for one in before.groups
    )  # fmt: skip
    ties = tuple(replace(tie, names=tuple(first.get(name, name) for name in tie.names)) for tie in before.ties)
    return replace(found, scalars=scalars, groups=groups, ties=ties)


def collisions(catalog: Catalog) -> list[str]:
    """Names that two tensors of one role have: rules that lead two to one place."""
    counts = Counter((tensor.role, tensor.name) for tensor in catalog.tensors)
    return sorted({name for (_, name), count in counts.items() if count > 1})
