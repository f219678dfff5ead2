"""TIE: parameters that are one tensor in the model hold the same numbers, and the one that is loaded is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.related import Collected, Seen, by_role, of_pair, of_tensor, seen_replicas, why_unread
from auditor.model.catalog import Catalog, FileState, Role
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.optimizer import Tie
from auditor.model.pairing import Pairing, PairKind
from auditor.model.run import StepEvidence

_ROLES = (Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT)
"""What must be equal. Optimizers keep state for the first of tied parameters, or for each, with the same gradients."""


def _couples(catalog: Catalog) -> Iterator[tuple[Tie, int, int]]:
    """Ties with their first tensor and one of the others, per role in which both are stored."""
    roles = by_role(catalog)
    for tie in catalog.ties:
        for role in _ROLES:
            stored = [roles[role][name] for name in tie.names if name in roles[role]]
            yield from ((tie, stored[0], other) for other in stored[1:])


def tied_tensors(catalog: Catalog) -> Iterable[int]:
    """Numbers of the tensors that are tied to another stored one."""
    return sorted({number for _, one, other in _couples(catalog) for number in (one, other)})


def tied_pairings(catalog: Catalog) -> list[Pairing]:
    """Tied parameters stored in two precisions: digests can't compare those."""
    return [found for _, one, other in _couples(catalog) if (found := _pairing(catalog, one, other)) is not None]


def _pairing(catalog: Catalog, one: int, other: int) -> Pairing | None:
    tensors = catalog.tensors
    floats = all(
        tensors[number].dtype.kind is Kind.FLOAT and tensors[number].dtype.bits >= 16 for number in (one, other)
    )
    narrow, wide = sorted((one, other), key=lambda number: tensors[number].dtype.bits)
    same_width = tensors[one].dtype.bits == tensors[other].dtype.bits
    if not floats or same_width or tensors[one].shape != tensors[other].shape:
        return None
    return Pairing(PairKind.CAST, narrow, wide)


def tied_are_equal(evidence: StepEvidence) -> Judgement:
    """Tied parameters, their masters and their moments hold the same numbers."""
    catalog = evidence.catalog
    found = Collected()
    replicas = seen_replicas(catalog, evidence.observations)
    for tie, one, other in _couples(catalog):
        left, right = catalog.tensors[one], catalog.tensors[other]
        pairing = _pairing(catalog, one, other)
        if left.shape != right.shape:
            found.unknown("tied tensors are stored with different shapes (a padded vocabulary?)", right.name)
        elif pairing is not None:
            _judge_pair(evidence, found, tie, other, pairing)
        elif left.dtype != right.dtype:
            found.unknown("tied tensors are stored in dtypes that can't be compared", right.name)
        else:
            _judge_digests(evidence, found, tie, (one, other), replicas)
    if not catalog.ties:
        found.not_applicable["nothing says that parameters are tied"] += 1
    elif not any(True for _ in _couples(catalog)):
        found.not_applicable["tied parameters are stored once"] += 1
    return found.judgement()


def _judge_digests(
    evidence: StepEvidence, found: Collected, tie: Tie, couple: tuple[int, int], replicas: Mapping[int, Sequence[Seen]]
) -> None:
    """Every replica of the second must be equal to one of the first's: where those differ, REP speaks."""
    one, other = couple
    name = evidence.catalog.tensors[other].name
    known = {seen.lanes for seen in replicas.get(one, ())}
    mine = [seen.lanes for seen in replicas.get(other, ())]
    whole = all(len(replicas.get(number, ())) == len(evidence.catalog.replicas[number]) for number in couple)
    if not whole:
        found.unknown(why_unread(evidence), name)
    elif all(lanes in known for lanes in mine):
        found.num_holds += 1
    else:
        detail = "unequal by digest"
        found.violations.append(_violation(evidence, tie, couple, of_tensor(evidence, other, detail=detail)))


def _judge_pair(evidence: StepEvidence, found: Collected, tie: Tie, other: int, pairing: Pairing) -> None:
    results = evidence.observations.pairs.get(pairing, ())
    name = evidence.catalog.tensors[other].name
    wrong = [result for result in results if result.num_beyond]
    if wrong:
        detail = f"{wrong[0].num_beyond} of {wrong[0].num_compared} elements differ beyond rounding"
        location = of_pair(evidence, pairing, wrong[0], detail, other)
        found.violations.append(_violation(evidence, tie, (pairing.left, pairing.right), location))
    elif not results or not all(result.complete for result in results):
        found.unknown(why_unread(evidence), name)
    else:
        found.num_holds += 1


def _violation(evidence: StepEvidence, tie: Tie, couple: tuple[int, int], location: Location) -> Violation:
    (first,) = {evidence.catalog.tensors[number].name for number in couple} - {location.tensor} or {location.tensor}
    role = location.role.value.replace("_", " ") if location.role else ""
    message = f"{location.tensor} ({role}) is not equal to {first}, to which it is tied ({tie.source})"
    return Violation(location.tensor, (location,), message)


def tied_source_is_stored(evidence: StepEvidence) -> Judgement:
    """Of tied parameters, the one from which loaders fill the others is stored."""
    catalog = evidence.catalog
    found = Collected()
    stored = {tensor.name for tensor in catalog.tensors if tensor.role in (Role.PARAMETER, Role.MASTER)}
    lost = [file for file in catalog.files if file.state is not FileState.PRESENT]
    problems = {problem.tensor: problem for problem in catalog.problems if problem.tensor}
    for tie in catalog.ties:
        first, others = tie.names[0], [name for name in tie.names[1:] if name in stored]
        if first in stored:
            found.num_holds += 1
        elif not others:
            found.not_applicable["none of the tied parameters is stored"] += 1
        elif lost:
            found.unknown("it may be in a file that could not be read", first)
        else:
            file = problems[first].file if first in problems else ""
            location = Location(catalog.step, file, first, detail=f"absent, {others[0]} is stored")
            message = f"{first} is absent, {others[0]}, which is tied to it ({tie.source}), is stored"
            found.violations.append(Violation(first, (location,), message))
    if not catalog.ties:
        found.not_applicable["nothing says that parameters are tied"] += 1
    return found.judgement()


INVARIANTS = (
    Invariant(
        "TIE001", "tied-differ", Severity.ERROR,
        statement="Parameters that the configuration or the file says are one tensor hold the same numbers, and so do "
                  "their masters and moments where each has its own.",
        rationale="Loaders fill one from the other and drop what the other held: the model that is loaded is not the "
                  "one that was trained.",
        source="NVIDIA/Megatron-LM#4641; huggingface/transformers#42612",
        example="lm_head.weight (parameter) is not equal to model.embed_tokens.weight, to which it is tied "
                "(config.json: tie_word_embeddings)",
        misses="Ties that nothing records; tied tensors of which one is padded: undetermined.",
        hint="Find out which side was trained. If the model unties them on purpose, say so in its configuration.",
        needs=Needs.WEIGHTS, judge_step=tied_are_equal, pairings=tied_pairings, reads=tied_tensors, one_fault=True,
        likely_causes=(
            LikelyCause("the two sides have different optimizers, or one is left out of the gradients' sum",
                        "NVIDIA/Megatron-LM#4641; NVIDIA/Megatron-LM#656"),
            LikelyCause("the configuration says tied, the model was trained untied", "huggingface/transformers#42612"),
        ),
    ),
    Invariant(
        "TIE002", "tied-source-missing", Severity.ERROR,
        statement="Where tied parameters are stored under one name, it is the name from which loaders fill the others.",
        rationale="Loaders keep random numbers for the absent one and overwrite the other with them.",
        source="deepspeedai/DeepSpeed#1896; huggingface/transformers#30202",
        example="model.embed_tokens.weight is absent, lm_head.weight, which is tied to it (config.json: "
                "tie_word_embeddings), is stored",
        misses="Loaders that look for either name, to which this is no harm; ties that nothing records.",
        hint="Store the tensor under the other name too, or make the export anew.",
        judge_step=tied_source_is_stored,
        likely_causes=(LikelyCause("the export knew only one of two tied names", "deepspeedai/DeepSpeed#1896"),),
    ),
)  # fmt: skip
