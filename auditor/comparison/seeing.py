"""Under which names each side is seen: renames that were stated, and a built-in map where one brings names together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from auditor.comparison.command import Choices
from auditor.comparison.heads import recorded_heads
from auditor.comparison.holding import Holding, Source
from auditor.comparison.maps import MAPS
from auditor.comparison.matching import EVERYTHING, Filter
from auditor.comparison.outcome import PROVED, Compared, Standing
from auditor.comparison.side import Seeing, Side
from auditor.model.catalog import Catalog, Role
from auditor.model.name_map import NameRule, mapped

STATED = "put config.json (or params.json) with their number beside either side"
Reader = Callable[[Seeing, bool], Holding]


@dataclass(frozen=True, slots=True)
class Views:
    """How both sides are seen."""

    own: tuple[NameRule, ...] = ()
    theirs: tuple[NameRule, ...] = ()
    notes: tuple[str, ...] = ()
    chosen: Filter = EVERYTHING
    """Of the tensors, those that are read."""
    doubts: tuple[tuple[str, str], ...] = ()
    """Patterns of names to what is taken for granted of such tensors, and recorded nowhere."""

    def doubted(self, rows: Sequence[Compared]) -> list[Compared]:
        """The rows, with tensors undetermined that are the same if heads lie as the numbers say, and nothing else does.

        A conversion that cut all heads wrongly is equal as well, under another number of them.
        """
        found = []
        for row in rows:
            good = row.standing in (*PROVED, Standing.ROUNDING)
            text = next(
                (what for name, what in self.doubts if good and NameRule(name, (name,)).match(row.pair.name)), ""
            )
            doubt = f"the same numbers if {text}, which no configuration records: {STATED}"
            found.append(
                replace(row, standing=Standing.UNDETERMINED, amount=None, threshold=None, detail=doubt) if text else row
            )
        return found

    def seeing_reference(self, catalog: Catalog) -> Catalog:
        """A Catalog as the reference's is seen."""
        return _under(self.own, self.chosen)(catalog)

    def reference(self, read: Reader, sketched: bool) -> Holding:
        """The reference's step."""
        return _seen(read, sketched, self.own, self.chosen)

    def candidate(self, read: Reader, sketched: bool) -> Holding:
        """The candidate's step."""
        return _seen(read, sketched, self.theirs, self.chosen)


def _seen(read: Reader, sketched: bool, rules: Sequence[NameRule], chosen: Filter) -> Holding:
    holding = read(_under(rules, chosen), sketched)
    if holding.source is not None or not rules:
        return holding
    # Of a ledger there is no Catalog; names alone can change there.
    tensors = tuple(replace(tensor, name=_renamed(tensor.name, rules)) for tensor in holding.tensors)
    return replace(holding, tensors=tensors)


def _renamed(name: str, rules: Sequence[NameRule]) -> str:
    for rule in rules:
        found = rule.renamed(name)
        if found:
            return found
    return name


def _under(rules: Sequence[NameRule], chosen: Filter) -> Seeing:
    def seen(catalog: Catalog) -> Catalog:
        found = mapped(catalog, rules)
        return found if chosen == EVERYTHING else found.only(chosen.wants)

    return seen


def views_of(reference: Side, candidate: Side, steps: tuple[int, int], choices: Choices) -> Views:
    """How both sides are seen, and which tensors of them."""
    return replace(_views(reference, candidate, steps, choices), chosen=choices.chosen)


def _views(reference: Side, candidate: Side, steps: tuple[int, int], choices: Choices) -> Views:
    """How both sides are seen: stated rules first; then, where names still differ, the built-in map that joins most.

    Rules are for the candidate's names, unless more fit when the reference is seen under them.
    """
    if reference.store is None or candidate.store is None:
        return Views(theirs=choices.rename)
    own = Source(reference.store, reference.catalogs[steps[0]]())
    theirs = Source(candidate.store, candidate.catalogs[steps[1]]())
    if choices.rename:
        return _of_rules("stated rules", own, theirs, choices.rename)
    plain, most = _in_common(own.catalog, theirs.catalog), min(_count(own.catalog), _count(theirs.catalog))
    asked = choices.map not in ("auto", "none")
    if plain == most and not asked:
        return Views()
    names = [choices.map] if asked else [*MAPS] if choices.map == "auto" else []
    best = (-1 if asked else plain), Views()
    for view in (view for name in names for view in _both_ways(name, own, theirs)):
        if view[0] > best[0]:
            best = view
        if best[0] == most:
            break
    return best[1]


def _both_ways(name: str, own: Source, theirs: Source) -> Iterator[tuple[int, Views]]:
    for rules, mine in ((MAPS[name].build(theirs, own), False), (MAPS[name].build(own, theirs), True)):
        if rules:
            yield _scored(name, own, theirs, tuple(rules), mine)


def _of_rules(name: str, own: Source, theirs: Source, rules: tuple[NameRule, ...]) -> Views:
    sides = [_scored(name, own, theirs, rules, mine) for mine in (False, True)]
    return replace(max(sides, key=lambda side: side[0])[1], notes=(), doubts=())


def _scored(name: str, own: Source, theirs: Source, rules: tuple[NameRule, ...], mine: bool) -> tuple[int, Views]:
    left, right = (mapped(own.catalog, rules), theirs.catalog) if mine else (own.catalog, mapped(theirs.catalog, rules))
    count = _in_common(left, right)
    side = "reference" if mine else "candidate"
    note = f"map {name} on the {side}: {count} of {_count(left)} parameters against {_count(right)} have a counterpart"
    doubts = tuple(_doubts(rules))
    # Configurations are read only where a rule asks: each map is tried from both sides.
    if doubts and recorded_heads(own, theirs) is not None:
        doubts = ()
    if doubts:
        note += f"; no configuration records the heads: how they lie is told by the numbers ({doubts[0][1]})"
    return count, Views(rules if mine else (), () if mine else rules, (note,), doubts=doubts)


def _doubts(rules: Sequence[NameRule]) -> Iterator[tuple[str, str]]:
    for rule in filter(_of_heads, rules):
        # What is rotated is cut in halves of a head.
        what = (
            f"a head is {2 * rule.groups} wide"
            if rule.within > 1
            else f"heads lie in {rule.groups} group{'s' * (rule.groups > 1)}"
        )
        yield from ((name, what) for name in dict.fromkeys(rule.targets))


def _of_heads(rule: NameRule) -> bool:
    """Whether a rule asks how heads lie: for what is rotated head by head, or holds query, key and value of each."""
    fused = any(word in rule.source for word in ("linear_qkv", "query_key_value"))
    return rule.within > 1 or (fused and len(rule.targets) > 1)


def _keys(catalog: Catalog) -> set[tuple[str, tuple[int, ...]]]:
    roles = (Role.PARAMETER, Role.MASTER)
    return {(tensor.name, tensor.shape) for tensor in catalog.tensors if tensor.role in roles}


def _in_common(one: Catalog, other: Catalog) -> int:
    return len(_keys(one) & _keys(other))


def _count(catalog: Catalog) -> int:
    return len(_keys(catalog))
