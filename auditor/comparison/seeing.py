"""Under which names each side is seen: renames that were stated, and a built-in map where one brings names together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from auditor.comparison.command import Choices
from auditor.comparison.holding import Holding
from auditor.comparison.side import Seeing, Side
from auditor.model.catalog import Catalog
from auditor.model.name_map import NameRule, mapped

Reader = Callable[[Seeing, bool], Holding]


@dataclass(frozen=True, slots=True)
class Views:
    """How both sides are seen."""

    own: tuple[NameRule, ...] = ()
    theirs: tuple[NameRule, ...] = ()
    notes: tuple[str, ...] = ()

    def seeing_reference(self, catalog: Catalog) -> Catalog:
        """A Catalog as the reference's is seen."""
        return mapped(catalog, self.own)

    def reference(self, read: Reader, sketched: bool) -> Holding:
        """The reference's step."""
        return _seen(read, sketched, self.own)

    def candidate(self, read: Reader, sketched: bool) -> Holding:
        """The candidate's step."""
        return _seen(read, sketched, self.theirs)


def _seen(read: Reader, sketched: bool, rules: Sequence[NameRule]) -> Holding:
    holding = read(_under(rules), sketched)
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


def _under(rules: Sequence[NameRule]) -> Seeing:
    def seen(catalog: Catalog) -> Catalog:
        return mapped(catalog, rules)

    return seen


def views_of(reference: Side, candidate: Side, steps: tuple[int, int], choices: Choices) -> Views:
    """How both sides are seen."""
    return Views(theirs=choices.rename)
