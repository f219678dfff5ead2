"""CST: a model weight is its fp32 master rounded to its dtype, and masters are not secretly low-precision numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.motion_expected import ExpectedMotion
from auditor.invariants.related import (
    Collected,
    Seen,
    by_role,
    drifted,
    of_pair,
    of_tensor,
    seen_whole,
    why_unread,
)
from auditor.model.catalog import Catalog, Role
from auditor.model.dtype import FLOAT32, Kind
from auditor.model.finding import Judgement, LikelyCause, Severity, Violation
from auditor.model.pairing import Pairing, PairKind, PairResult
from auditor.model.run import StepEvidence

# CST001: weights are their masters, rounded

_FEW_OF = 1000
"""One element in so many, off by one unit in the last place, is another rounding; more is not."""
_ANY_FEW = 4
"""So many are few in a tensor of any size."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter and its master."""

    weight: int
    master: int
    pairing: Pairing | None = None
    reason: str = ""
    """Why they are not compared."""


def master_pairings(catalog: Catalog) -> list[Pairing]:
    """Parameters and the masters of the same name."""
    return [one.pairing for one in _weights(catalog) if one.pairing is not None]


def _weights(catalog: Catalog) -> Iterator[_Weight]:
    roles = by_role(catalog)
    for name, master in roles[Role.MASTER].items():
        weight = roles[Role.PARAMETER].get(name)
        if weight is None:
            continue
        left, right = catalog.tensors[weight], catalog.tensors[master]
        if left.shape != right.shape:
            yield _Weight(weight, master, reason="weight and master have different shapes")
        elif left.dtype == right.dtype:
            yield _Weight(weight, master, Pairing(PairKind.EQUAL, weight, master))
        elif left.dtype.kind is not Kind.FLOAT or right.dtype.kind is not Kind.FLOAT or left.dtype.bits < 16:
            yield _Weight(weight, master, reason="the weight is quantised, and its scales are not known")
        elif left.dtype.bits >= right.dtype.bits:
            yield _Weight(weight, master, reason="the weight is not stored in fewer bits than its master")
        else:
            yield _Weight(weight, master, Pairing(PairKind.CAST, weight, master))


def weights_are_rounded_masters(evidence: StepEvidence) -> Judgement:
    """Every weight is its master rounded to nearest, ties to even; equal to it where both have one dtype."""
    catalog = evidence.catalog
    found = Collected()
    doubted = drifted(catalog, evidence.observations)
    for one in _weights(catalog):
        name = catalog.tensors[one.weight].name
        results = evidence.observations.pairs.get(one.pairing, ()) if one.pairing else ()
        wrong = [result for result in _best(results) if result.num_beyond]
        if one.pairing is None:
            found.unknown(one.reason, name)
        elif wrong:
            found.violations.append(_unequal(evidence, one, wrong, doubted))
        elif not results or not all(result.complete for result in results):
            found.unknown(why_unread(evidence), name)
        else:
            found.num_holds += 1
    _unpaired(catalog, found)
    return found.judgement()


def _best(results: Sequence[PairResult]) -> list[PairResult]:
    """Per replica of the weight, the master that fits it best: of masters that differ, REP speaks."""
    best: dict[int, PairResult] = {}
    for result in results:
        known = best.get(result.left_replica)
        if known is None or result.num_beyond < known.num_beyond:
            best[result.left_replica] = result
    return list(best.values())


def _unequal(evidence: StepEvidence, one: _Weight, wrong: Sequence[PairResult], doubted: frozenset[int]) -> Violation:
    assert one.pairing is not None
    weight = evidence.catalog.tensors[one.weight]
    # Where the master's replicas differ and the weight's don't, it is the master that something else speaks of.
    accused = one.master if one.master in doubted and one.weight not in doubted else one.weight
    worst = max(wrong, key=lambda result: (result.num_beyond - result.num_one_ulp, result.num_beyond))
    share = f"{worst.num_beyond} of {worst.num_compared} elements"
    exact = one.pairing.kind is PairKind.EQUAL
    what = "equal to its master" if exact else f"its master rounded to {weight.dtype.name}"
    message = f"{weight.name} is not {what}: {share}{'' if exact else _distance(worst)}"
    severity = Severity.WARNING if all(map(_is_rounding, wrong)) else Severity.ERROR
    detail = f"{share} are not {what}{'' if exact else _distance(worst)}"
    locations = tuple(of_pair(evidence, one.pairing, result, detail, accused) for result in wrong)
    return Violation(weight.name, locations, message, severity=severity)


def _is_rounding(result: PairResult) -> bool:
    few = max(_ANY_FEW, result.num_compared // _FEW_OF)
    return result.num_one_ulp == result.num_beyond <= few


def _distance(result: PairResult) -> str:
    """By how much elements are off, and what that looks like."""
    if _is_rounding(result):
        return ", each off by one ulp: another way of rounding"
    if result.num_one_ulp == result.num_beyond:
        return ", each off by one ulp: rounded otherwise, or one of the two is of a step nearby"
    ulps = f", {result.num_beyond - result.num_one_ulp} by more than one ulp"
    if 2 * result.num_beyond > result.num_compared:
        return f"{ulps}: as if the two were of different steps or tensors"
    return ulps


def _unpaired(catalog: Catalog, found: Collected) -> None:
    roles = by_role(catalog)
    if not roles[Role.MASTER]:
        found.not_applicable["no masters are stored"] += 1
    alone = roles[Role.MASTER].keys() - roles[Role.PARAMETER].keys()
    if alone:
        found.not_applicable["no weight is stored beside the master"] += len(alone)


# CST002: float32 holds float32

_LOW_BITS = {"bfloat16": 0xFFFF, "float16": 0x1FFF}
"""Bits of a float32 that are zero in every number that the narrower dtype holds."""
_FEWEST = 1024
"""Elements that aren't zero: of fewer, nothing is said."""


def float32_is_used(evidence: StepEvidence) -> Judgement:
    """Masters and second moments stored in float32 use its low bits once they were updated."""
    catalog = evidence.catalog
    found = Collected()
    whole, roles, expected = seen_whole(catalog, evidence.observations), by_role(catalog), ExpectedMotion(evidence)
    masters = {**roles[Role.PARAMETER], **roles[Role.MASTER]}
    for name, second in roles[Role.SECOND_MOMENT].items():
        if catalog.tensors[second].dtype == FLOAT32:
            _judge_bits(evidence, found, second, whole, "")
        master = masters.get(name)
        if master is not None and catalog.tensors[master].dtype == FLOAT32:
            _judge_bits(evidence, found, master, whole, expected.why_unmoved(name, whole.get(master)))
    if not roles[Role.SECOND_MOMENT]:
        found.not_applicable["no second moments are stored, which tell whether a weight was trained"] += 1
    return found.judgement()


def _judge_bits(evidence: StepEvidence, found: Collected, tensor: int, whole: Mapping[int, Seen], unmoved: str) -> None:
    what, seen = evidence.catalog.tensors[tensor], whole.get(tensor)
    if seen is None:
        found.unknown(why_unread(evidence), what.name)
    elif seen.num_nonzero < _FEWEST or seen.minimum == seen.maximum:
        found.not_applicable[f"fewer than {_FEWEST} elements that aren't zero, or one constant"] += 1
    elif all(seen.bits_used & bits for bits in _LOW_BITS.values()):
        found.num_holds += 1
    elif unmoved:
        found.unknown(unmoved, what.name)
    else:
        narrow = next(name for name, bits in _LOW_BITS.items() if not seen.bits_used & bits)
        detail = f"stored as float32, but every number is one of {narrow}"
        message = f"{what.name} ({what.role.value.replace('_', ' ')}) is {detail}"
        location = of_tensor(evidence, tensor, seen.num_elements, detail)
        found.violations.append(Violation(what.name, (location,), message))


INVARIANTS = (
    Invariant(
        "CST001", "weight-not-master", Severity.ERROR,
        statement="Every model weight is its fp32 master rounded to the weight's dtype, to nearest, ties to even; "
                  "equal where both have one dtype. A warning where few elements are off by one ulp.",
        rationale="The optimizer knows only the master. At the next step it overwrites the weight, and what the weight "
                  "held is lost: a loaded or edited model, or a step of training, vanishes without a word.",
        source="deepspeedai/DeepSpeed#762 (\"tripped us for over one month\"); NVIDIA/apex#1842",
        example="4.mlp.dense_h_to_4h.weight is not its master rounded to bfloat16: 1021 of 1024 elements, 998 by more "
                "than one ulp: as if the two were of different steps or tensors",
        misses="Weights and masters that are wrong alike. After one step the weight follows the master: a model loaded "
               "without its masters shows only in a step saved before the first update.",
        hint="Find out which of the two is right before resuming. If the weights were loaded or edited, rebuild the "
             "masters from them; if they are stale, export from the masters.",
        needs=Needs.WEIGHTS, judge_step=weights_are_rounded_masters, pairings=master_pairings, one_fault=True,
        likely_causes=(
            LikelyCause("masters were not refreshed after weights were loaded, edited or merged",
                        "deepspeedai/DeepSpeed#762; NVIDIA/apex#42"),
            LikelyCause("weights were saved before the updated masters were gathered into them",
                        "NVIDIA/Megatron-LM#950"),
            LikelyCause("masters kept as a 16-bit remainder were put together off by one ulp", "NVIDIA/apex#1842"),
        ),
    ),
    Invariant(
        "CST002", "low-precision-master", Severity.WARNING,
        statement="Masters and second moments stored as float32 hold numbers that narrower dtypes do not, once the "
                  "optimizer has moved them.",
        rationale="Masters exist to keep updates that are too small for the weight's dtype. Rounded, they lose them: "
                  "training stalls, norms at 1.0 first.",
        source="OpenTau#184; pytorch/pytorch#43706; NVIDIA/apex#1842",
        example="3.mlp.dense_h_to_4h.weight (master) is stored as float32, but every number is one of bfloat16",
        misses="Tensors with fewer than 1024 elements that aren't zero; masters that were rounded and have taken a "
               "step since; runs that record neither steps nor learning rate; the first eight optimizer steps, and the "
               "first thousand where the learning rate follows a schedule of torch's (it may have begun at zero).",
        hint="Look whether masters were rebuilt from low-precision weights, or state was cast to the parameters' dtype "
             "on load.",
        needs=Needs.WEIGHTS, judge_step=float32_is_used, one_fault=True,
        likely_causes=(
            LikelyCause("masters were rebuilt from the low-precision weights on resume", "pytorch/pytorch#43706"),
            LikelyCause("loading cast the optimizer's state to the parameters' dtype", "OpenTau#184"),
        ),
    ),
)  # fmt: skip
