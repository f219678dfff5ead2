"""REP: replicas of one tensor are bitwise equal."""

from __future__ import annotations

from dataclasses import replace

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.replica_witness import InMemory, in_memory
from auditor.model.catalog import LOST, WITHHELD, Catalog, Role, Tensor
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.mesh import Coordinate
from auditor.model.observation import Difference, DifferenceClass, ReplicaGroup, distance, replica_groups
from auditor.model.run import StepEvidence


def replicas_are_equal(evidence: StepEvidence) -> Judgement:
    """All stored replicas of a tensor have the same bits."""
    catalog, observations = evidence.catalog, evidence.observations
    violations, held, lost = [], [], set()
    undetermined: dict[str, list[str]] = {}
    groups = {group.tensor: group for group in replica_groups(catalog, observations)}
    witnessed, unseen = in_memory(evidence), InMemory(undetermined=evidence.witness.lacks if evidence.witness else "")
    not_replicated = 0
    for number, tensor in enumerate(catalog.tensors):
        group = groups.get(number)
        if tensor.role is Role.PADDING:
            continue
        known = witnessed.get(number, unseen)
        reasons = _reasons(tensor, known)
        for reason in reasons:
            undetermined.setdefault(reason, []).append(tensor.name)
        if group is not None and len(group.classes) > 1:
            violations.append(_violation(evidence, tensor, group))
        elif known.violation:
            violations.append(known.violation)
        elif group is None:
            if known.num_places > 1 and not reasons:
                held.append(tensor.name)
            else:
                not_replicated += not reasons
        elif group.incomplete:
            undetermined.setdefault(_why_incomplete(evidence, group), []).append(tensor.name)
            lost.add(tensor.name)
        else:
            held.append(tensor.name)
    not_applicable = {"not replicated": not_replicated} if not_replicated else {}
    return Judgement(
        len(held), tuple(violations), {reason: tuple(names) for reason, names in undetermined.items()}, not_applicable,
        frozenset(held) - lost,
    )  # fmt: skip


def _reasons(tensor: Tensor, known: InMemory) -> list[str]:
    """Why something of a tensor's replicas is not known; empty where the witness saw all of them."""
    if known.num_places and not known.undetermined:
        return []
    axes = ", ".join(tensor.stored_once)
    once = f"stored once along {axes}: other replicas are not on disk (auditor.hooks witnesses them)"
    doubt = known.undetermined if known.num_places or tensor.stored_once else ""
    return [*filter(None, (doubt or tensor.undetermined, once if tensor.stored_once else ""))]


def replicated(catalog: Catalog) -> list[int]:
    """Numbers of the tensors that are stored more than once."""
    return [number for number, places in enumerate(catalog.replicas) if len(places) > 1]


def _why_incomplete(evidence: StepEvidence, group: ReplicaGroup) -> str:
    catalog = evidence.catalog
    states = {catalog.file_of(row).state for row in catalog.rows_by_tensor.get(group.tensor, [])}
    if states & LOST:
        return "a replica is lost with its file"
    if states & WITHHELD or evidence.observations.failures:
        return "storage did not give a replica's bytes"
    return evidence.unread or "a replica was not read"


def _violation(evidence: StepEvidence, tensor: Tensor, group: ReplicaGroup) -> Violation:
    places = evidence.catalog.replicas[group.tensor]
    sides = tuple(tuple(places[member] for member in members) for members in group.classes)
    minority = tuple(place for side in sides[1:] for place in side) if group.majority else ()
    severity = Severity.WARNING if tensor.role is Role.BUFFER and not evidence.strict_buffers else None
    return Violation(
        tensor.name, tuple(_locations(evidence, tensor, group)), f"{tensor.name} differs",
        sides=sides, severity=severity, minority=minority,
    )  # fmt: skip


def _locations(evidence: StepEvidence, tensor: Tensor, group: ReplicaGroup) -> list[Location]:
    places = evidence.catalog.replicas[group.tensor]
    measured = {diff.coordinate: diff for diff in evidence.observations.differences.get(group.tensor, ())}
    reference = group.classes[0] if group.majority else min(group.classes, key=lambda members: members[0])
    return [
        _location(
            evidence, tensor, group.tensor, places[member], places[reference[0]], measured.get(places[members[0]])
        )
        for members in group.classes
        if members != reference
        for member in members
    ]


def _location(
    evidence: StepEvidence, tensor: Tensor, number: int, place: Coordinate, reference: Coordinate,
    measured: Difference | None,
) -> Location:  # fmt: skip
    catalog = evidence.catalog
    one, other = (catalog.replicas[number].index(where) for where in (place, reference))
    mine, theirs = _differing_rows(evidence, number, one, other), _differing_rows(evidence, number, other, one)
    common = Location(
        catalog.step, _file(catalog, mine), tensor.name, tensor.role, tensor.order, place, reference,
        _holder(catalog, place, mine), _holder(catalog, reference, theirs), _file(catalog, theirs),
    )  # fmt: skip
    if measured is None:
        return replace(
            common, detail="unequal by digest; not measured, beyond the evidence budget",
            sketched_difference=distance(evidence.observations.sketches, number, one, other),
        )  # fmt: skip
    return replace(
        common, num_elements_differ=measured.num_elements_differ,
        num_elements_compared=measured.num_elements_compared, max_abs_difference=measured.max_abs_difference,
        relative_difference=measured.relative_difference, max_ulps=measured.max_ulps,
        first_index=measured.first_index, num_bits_differ=measured.num_bits_differ,
        num_equal_as_numbers=measured.num_equal_as_numbers,
    )  # fmt: skip


def _differing_rows(evidence: StepEvidence, number: int, one: int, other: int) -> list[int]:
    """The pieces of replica ``one`` that differ from the piece of the same region of ``other``; all, if cut unlike."""
    catalog, seen = evidence.catalog, evidence.observations.pieces
    theirs = {catalog.pieces.region(int(row)): int(row) for row in catalog.rows_of(number, other)}
    rows = [int(row) for row in catalog.rows_of(number, one)]
    pairs = [(row, theirs.get(catalog.pieces.region(row))) for row in rows]
    unlike = [
        row for row, match in pairs
        if match is not None and any(seen[row][lane] != seen[match][lane] for lane in ("lane0", "lane1"))
    ]  # fmt: skip
    return unlike or rows


def _holder(catalog: Catalog, place: Coordinate, rows: list[int]) -> Coordinate:
    """The replica's place and every other index that all of ``rows`` share."""
    shared = set.intersection(*(set(catalog.pieces[row].coordinate.indices) for row in rows)) if rows else set()
    return Coordinate.of(**dict(shared)).merged(place)


def _file(catalog: Catalog, rows: list[int]) -> str:
    return catalog.file_of(rows[0]).name if rows else ""


_OTHER_FILE = LikelyCause("a file of another step or run among the others", "hiyouga/LlamaFactory#655")
_FLIPPED = LikelyCause("a bit flipped in memory or storage", "pytorch/torchtitan#4324")
_KERNELS = LikelyCause("non-deterministic kernels: differences began as single ulps", "pytorch/pytorch#160169")

INVARIANTS = (
    Invariant(
        "REP001", "replicas-differ", Severity.ERROR,
        statement="All stored replicas of one tensor (parameter, master, moments, buffer) have the same bits.",
        rationale="Every rank computes with its own replica. Once they differ, each step trains several models at "
                  "once; loss and accuracy show nothing, and merging the ranks gives a model that nobody trained.",
        source="BLOOM-176B, 2022: bigscience chronicles; deepspeedai/DeepSpeed#1801",
        example="input_layernorm.weight differs between tp=0 and tp=1 since step 17100 (last good 17000)",
        misses="Replicas that the writer threw away before saving, unless the hook left a witness of them "
               "(docs/witness.md); replicas that are equally wrong.",
        hint="Resume from the last good step after the cause is repaired; resynchronising replicas hides the damage "
             "already done to whichever side was wrong.",
        needs=Needs.WEIGHTS, judge_step=replicas_are_equal, reads=replicated, one_fault=True,
        likely_causes=(
            LikelyCause("gradient clipping or its norm differs between ranks",
                        "deepspeedai/DeepSpeed#1801", ("tp", "pp", "ep")),
            LikelyCause("gradients of replicated parameters are not summed over the axis "
                        "(sequence parallelism, router, norms)", "pytorch/torchtitan#2387; NVIDIA/Megatron-LM#619",
                        ("tp", "ep", "cp")),
            LikelyCause("gradients were not reduced over data-parallel ranks (unused parameters, accumulation with "
                        "changing submodules, manual optimisation)", "pytorch/pytorch#128949; pytorch/pytorch#69031",
                        ("dp",)),
        ),
        causes_by_class={
            DifferenceClass.SINGLE_BIT: (_FLIPPED,), DifferenceClass.GROSS: (_OTHER_FILE, _FLIPPED),
            DifferenceClass.ISOLATED_ULPS: (_KERNELS,), DifferenceClass.NOISE_SEEDED_GROWTH: (_KERNELS,),
            DifferenceClass.EQUAL_AS_NUMBERS: (_KERNELS,),
        },
    ),
)  # fmt: skip
