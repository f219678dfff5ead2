"""AUX: ranks draw random numbers of their own."""

from __future__ import annotations

from collections import defaultdict

from auditor.invariants.invariant import Invariant
from auditor.model.catalog import Catalog, Scalar
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.run import StepEvidence

_LEAST_ALONE = 2
"""So many ranks with a state of their own show that it is not the rule to share one. A single one may have drawn
numbers that the others didn't, as loggers do on the first rank."""


def random_states_are_ranks_own(evidence: StepEvidence) -> Judgement:
    """Where most ranks have a random state of their own, all have."""
    catalog = evidence.catalog
    sharing: dict[float, list[Scalar]] = defaultdict(list)
    for scalar in catalog.scalars:
        if scalar.name == "random_state":
            sharing[scalar.value].append(scalar)
    num_ranks = sum(map(len, sharing.values()))
    if num_ranks < 2:
        return Judgement(not_applicable={"no random states of several ranks are stored": 1})
    shared = [ranks for ranks in sharing.values() if len(ranks) > 1]
    alone = len(sharing) - len(shared)
    if shared and (alone < _LEAST_ALONE or 2 * alone < num_ranks):
        names = tuple(catalog.within(rank.file) for ranks in shared for rank in ranks)
        reason = "several ranks have one random state, as where all were seeded alike or share a part of the model"
        return Judgement(alone, undetermined={reason: names})
    return Judgement(alone, tuple(_violation(catalog, ranks, alone) for ranks in shared))


def _violation(catalog: Catalog, ranks: list[Scalar], alone: int) -> Violation:
    first, *others = (catalog.within(rank.file) for rank in ranks)
    detail = f"holds the random state of {first}; {alone} other ranks have one of their own"
    locations = tuple(
        Location(catalog.step, rank.file, coordinate=rank.coordinate, detail=detail) for rank in ranks[1:]
    )
    return Violation(first, locations, f"{', '.join(others[:3])} {detail}")


INVARIANTS = (
    Invariant(
        "AUX004", "random-state-shared", Severity.WARNING,
        statement="Where at least half of the ranks have a random state of their own, the others have too.",
        rationale="After a resume ranks with one state drop out the same units and draw the same samples: less noise "
                  "than was meant, and data that is seen twice.",
        source="docs/design.md, section 7; transformers trainer.py (_load_rng_state) loads a file a rank",
        example="rng_state_3.pth holds the random state of rng_state_1.pth; 6 other ranks have one of their own",
        misses="Ranks that all have one state: the Trainer seeds every rank alike, so that its own saves are so. "
               "Groups of ranks with a state each may be those that share a part of the model. Undetermined, both.",
        hint="Seed by rank when resuming, or take the file from a copy of the save.",
        judge_step=random_states_are_ranks_own,
    ),
)  # fmt: skip
