"""OPT: what the numbers of the optimizer's moments say by themselves, whatever the gradients were."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.moment_bound import Bound, moment_bound
from auditor.invariants.recorded import Betas, RecordedGroups, betas, lacking, num_steps
from auditor.invariants.related import (
    MOMENTS,
    Collected,
    Seen,
    by_role,
    drifted,
    of_pair,
    of_row,
    of_tensor,
    seen_whole,
    siblings,
    why_unread,
)  # fmt: skip
from auditor.model.catalog import Catalog, Role
from auditor.model.dtype import FLOAT32
from auditor.model.finding import Judgement, LikelyCause, Severity, Violation
from auditor.model.optimizer import ParameterGroup
from auditor.model.pairing import Pairing, PairKind, PairResult
from auditor.model.run import StepEvidence

# OPT010: the second moment is not negative


def second_moment_is_not_negative(evidence: StepEvidence) -> Judgement:
    """No element of a second moment is below zero; -0 is none."""
    catalog, seen = evidence.catalog, evidence.observations.pieces
    found = Collected()
    whole = seen_whole(catalog, evidence.observations)
    for number, rows in catalog.rows_by_tensor.items():
        tensor = catalog.tensors[number]
        if tensor.role is not Role.SECOND_MOMENT:
            continue
        bad = rows[seen["minimum"][rows] < 0]
        if len(bad):
            lowest = float(seen["minimum"][bad].min())
            location = of_row(evidence, number, int(bad[0]), detail=f"down to {lowest:.3g}")
            message = f"the second moment of {tensor.name} is negative, down to {lowest:.3g}"
            found.violations.append(Violation(tensor.name, (location,), message))
        elif number in whole:
            found.num_holds += 1
        else:
            found.unknown(why_unread(evidence), tensor.name)
    if not any(tensor.role is Role.SECOND_MOMENT for tensor in catalog.tensors):
        found.not_applicable["no second moment is stored"] += 1
    return found.judgement()


# OPT011: the first moment is within what the second allows

_AS_ADAM = frozenset(
    f"{kind}{name}" for kind in ("", "fused", "cpu", "deepspeedcpu", "hybrid", "distributedfused", "torch")
    for name in ("adam", "adamw", "lamb", "nadam", "radam")
) | {"adamwtorch", "adamwtorchfused", "adamwhf", "adamwapexfused"}  # fmt: skip
"""Optimizers that keep both moments by the recursion, whatever they make of them."""
_OTHERWISE = re.compile(
    "adabelief|onebit|zeroone|dadapt|prodigy|adopt|adan|adamax|ademamix|adamini|adammini|sophia|adafactor|lion|sgd|muon"
    "|adagrad|rmsprop|adadelta|came|schedulefree|8bit|4bit|novograd|laprop|signum|shampoo|soap"
)
_OTHERS_KEYS = frozenset({"d", "d_coef", "growth_rate", "freeze_step", "var_freeze_step"})
"""Hyperparameters that tell of another recursion where no class is recorded: D-Adaptation, 1-bit Adam."""
_FEW = 4
"""Of fewer tensors, that most violate the bound says nothing about the optimizer."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The moments of one parameter, and by which bound they are judged."""

    first: int
    second: int
    pairing: Pairing | None = None
    bound: Bound | None = None
    betas: Betas | None = None
    known_class: bool = False
    reason: str = ""
    """Why there is no bound."""
    applies: bool = True


def moment_pairings(catalog: Catalog) -> list[Pairing]:
    """First and second moments of one name whose decay rates are recorded."""
    return [asked.pairing for asked in _asked(catalog) if asked.pairing is not None]


def _asked(catalog: Catalog) -> Iterator[_Asked]:
    groups, steps, roles = RecordedGroups(catalog), num_steps(catalog), by_role(catalog)
    seconds = roles[Role.SECOND_MOMENT]
    for name, first in roles[Role.FIRST_MOMENT].items():
        second = seconds.get(name)
        if second is None or catalog.tensors[first].shape != catalog.tensors[second].shape:
            continue
        asked = _of_groups(first, second, groups.of(name))
        if asked.betas is not None:
            left, right = catalog.tensors[first].dtype, catalog.tensors[second].dtype
            bound = moment_bound(asked.betas, left, right, steps)
            if isinstance(bound, str):
                asked = replace(asked, reason=bound)
            else:
                pairing = Pairing(PairKind.BOUND, first, second, bound.limit, bound.floor)
                asked = replace(asked, pairing=pairing, bound=bound)
        yield asked


def kept_by_adam(groups: Sequence[ParameterGroup]) -> Betas | str:
    """The decay rates of the two plain averages that groups keep, or why it isn't known that they keep such."""
    asked = _of_groups(-1, -1, groups)
    return asked.betas if asked.betas is not None else asked.reason


def _of_groups(first: int, second: int, groups: Sequence[ParameterGroup]) -> _Asked:
    """What the groups that may hold a parameter say of its decay rates."""
    asked = _Asked(first, second)
    kinds = {re.sub("[^a-z0-9]", "", group.optimizer.rpartition(".")[2].lower()) for group in groups}
    rates = {betas(group) for group in groups}
    if not groups:
        return replace(asked, reason=lacking(groups))
    if any(_OTHERWISE.search(kind) for kind in kinds):
        return replace(asked, reason="its optimizer does not keep two plain moving averages", applies=False)
    if any(_OTHERS_KEYS & group.hyperparameters.keys() for group in groups):
        return replace(asked, reason="its hyperparameters are not those of plain Adam")
    if kinds - _AS_ADAM - {""}:
        return replace(asked, reason="how its optimizer keeps moments is not known")
    if len(rates) > 1:
        return replace(asked, reason="the parameter groups that may hold it disagree on betas")
    (rate,) = rates
    reason = "" if rate else lacking(groups, ["betas"]) or "its betas are not one for each of two moments"
    return replace(asked, betas=rate, known_class=bool(kinds - {""}), reason=reason)


def first_moment_is_within_the_second(evidence: StepEvidence) -> Judgement:
    """|m| <= C_n (1 + tau) sqrt(v + floor) in every element: what Cauchy-Schwarz leaves of Adam's two averages."""
    catalog = evidence.catalog
    found = Collected()
    whole = seen_whole(catalog, evidence.observations)
    doubted = drifted(catalog, evidence.observations)
    anonymous, num_judged = [], 0
    for asked in _asked(catalog):
        name = catalog.tensors[asked.first].name
        if asked.pairing is None:
            if asked.applies:
                found.unknown(asked.reason, name)
            else:
                found.not_applicable[asked.reason] += 1
            continue
        results = evidence.observations.pairs.get(asked.pairing, ())
        beyond = [result for result in results if result.num_beyond]
        reason = _why_silent(evidence, asked, results, whole)
        if reason:
            found.unknown(reason, name)
            continue
        num_judged += 1
        if not beyond:
            found.num_holds += 1
            continue
        if evidence.rates_before - {group.hyperparameters.get("betas") for group in catalog.groups}:
            found.unknown("its betas were changed since an earlier save", name)
            continue
        anonymous += [] if asked.known_class else [len(found.violations)]
        found.violations.append(_beyond(evidence, asked, beyond, whole, doubted))
    if len(anonymous) >= _FEW and 2 * len(anonymous) > num_judged:
        # No class is recorded and most moments break the recursion: as likely another optimizer as a fault.
        for at in anonymous:
            found.violations[at] = replace(found.violations[at], severity=Severity.WARNING)
    _without_second(catalog, found)
    return found.judgement()


def _why_silent(evidence: StepEvidence, asked: _Asked, results: Sequence[PairResult], whole: dict[int, Seen]) -> str:
    """Why the results prove neither; empty where they do."""
    beyond = max((result.largest for result in results if result.num_beyond), default=0.0)
    first, second = whole.get(asked.first), whole.get(asked.second)
    if beyond:
        return _rounded_away(evidence.catalog, asked, beyond, first, second)
    if not results or not all(result.complete for result in results):
        return why_unread(evidence)
    if asked.bound and first and second and first.largest > 0 and second.maximum <= asked.bound.floor:
        return "the second moment is below what its dtype resolves"
    return ""


def _rounded_away(catalog: Catalog, asked: _Asked, beyond: float, first: Seen | None, second: Seen | None) -> str:
    """Moments kept in fewer bits than their dtype has (cast on some load) are judged by the round-off of those."""
    dtypes = [catalog.tensors[number].dtype for number in (asked.first, asked.second)]
    if asked.betas is None or dtypes != [FLOAT32, FLOAT32]:
        return ""
    bits = [_mantissa_bits(seen.bits_used) for seen in (first, second) if seen and seen.num_nonzero >= 64]
    coarse = moment_bound(asked.betas, FLOAT32, FLOAT32, num_steps(catalog), min([*bits, 23]))
    if isinstance(coarse, str):
        return coarse
    return "" if beyond > coarse.limit else "its moments are stored wider than they were kept"


def _mantissa_bits(bits_used: int) -> int:
    low = (bits_used & -bits_used).bit_length() - 1
    return max(23 - low, 1)


def _beyond(
    evidence: StepEvidence, asked: _Asked, beyond: Sequence[PairResult], whole: dict[int, Seen], doubted: frozenset[int]
) -> Violation:
    assert asked.pairing is not None
    assert asked.bound is not None
    second = whole.get(asked.second)
    # The one that something else speaks of already: zero, negative, or with replicas that differ.
    accused = second is not None and (second.num_nonzero == 0 or second.minimum < 0)
    accused |= asked.second in doubted and asked.first not in doubted
    number = asked.second if accused else asked.first
    worst = max(result.largest for result in beyond)
    share = f"{beyond[0].num_beyond} of {beyond[0].num_compared} elements"
    detail = f"{share} beyond the bound, up to {worst:.3g} against {asked.bound.limit:.3g}"
    name = evidence.catalog.tensors[asked.first].name
    message = (
        f"the moments of {name} don't belong together: |first| is up to {worst:.3g} times the root of the second, "
        f"at most {asked.bound.limit:.3g} is possible ({share})"
    )
    return Violation(
        name, tuple(of_pair(evidence, asked.pairing, result, detail, number) for result in beyond), message
    )


def _without_second(catalog: Catalog, found: Collected) -> None:
    roles = by_role(catalog)
    alone = roles[Role.FIRST_MOMENT].keys() - roles[Role.SECOND_MOMENT].keys()
    if alone:
        found.not_applicable["it has no second moment"] += len(alone)
    if not any(tensor.role in MOMENTS for tensor in catalog.tensors):
        found.not_applicable["no moments are stored"] += 1


# OPT012: moments are not zero where others are not

_CERTAIN = 2.0**-40
"""A first moment beyond this proves that the second is not zero, if 1 - beta2 >= 1e-6 and C <= 1000 and the dtype has
8 bits of exponent: 1000 * sqrt(2 * 2**-126 / 1e-6) is 2**-42.6."""
_UNROUTED = re.compile(r"expert|lora_", re.IGNORECASE)
"""Names of what healthy runs may leave without gradients: experts that no token was sent to, fresh low-rank factors."""


def moments_are_not_zero(evidence: StepEvidence) -> Judgement:
    """No second moment is zero beside a first that isn't; no parameter's are both zero where its siblings' aren't."""
    catalog = evidence.catalog
    found = Collected()
    whole, roles = seen_whole(catalog, evidence.observations), by_role(catalog)
    zero: set[int] = set()
    known: set[int] = set()
    for name, number in roles[Role.FIRST_MOMENT].items():
        other = roles[Role.SECOND_MOMENT].get(name)
        first, second = whole.get(number), whole.get(-1 if other is None else other)
        if other is None or catalog.tensors[other].shape != catalog.tensors[number].shape:
            continue
        if first is None or second is None:
            found.unknown(why_unread(evidence), name)
        elif second.num_nonzero or first.num_nonzero:
            known.add(number)
            _judge_lone_zero(evidence, found, number, other, first, second)
        else:
            known.add(number)
            zero.add(number)
    for family in siblings(catalog, [Role.FIRST_MOMENT]):
        # Of state whose parameter isn't known, one shape does not make siblings.
        named = [number for number in family if number in known and not catalog.tensors[number].undetermined]
        _judge_family(evidence, found, named, zero, roles)
    if not any(tensor.role in MOMENTS for tensor in catalog.tensors):
        found.not_applicable["no moments are stored"] += 1
    return found.judgement()


def _judge_lone_zero(
    evidence: StepEvidence, found: Collected, first: int, second: int, seen: Seen, other: Seen
) -> None:
    """One of a parameter's moments may be all zero: the second, while the first isn't, only where it underflows."""
    name, dtype = evidence.catalog.tensors[second].name, evidence.catalog.tensors[second].dtype
    if other.num_nonzero:
        found.num_holds += 1
    elif seen.largest > _CERTAIN and dtype.exponent_bits >= 8:
        detail = f"all zero, the first moment reaches {seen.largest:.3g}"
        location = of_tensor(evidence, second, other.num_elements, detail)
        message = f"the second moment of {name} is all zero, its first moment reaches {seen.largest:.3g}"
        found.violations.append(Violation(name, (location,), message, severity=Severity.ERROR))
    else:
        found.unknown("the second moment may have underflowed to zero", name)


def _judge_family(
    evidence: StepEvidence, found: Collected, family: Sequence[int], zero: set[int], roles: dict[Role, dict[str, int]]
) -> None:
    """Parameters whose moments are all zero, judged by their siblings in other layers."""
    tensors = evidence.catalog.tensors
    idle = [number for number in family if number in zero]
    busy = len(family) - len(idle)
    for number in idle:
        name = tensors[number].name
        if _UNROUTED.search(name):
            found.not_applicable["an expert or low-rank factor may have had no gradients yet"] += 1
        elif busy < 2 or busy <= len(idle):
            found.unknown("its moments are zero, and not enough siblings' aren't", name)
        else:
            both = (number, roles[Role.SECOND_MOMENT][name])
            detail = f"all zero, those of {busy} siblings aren't"
            locations = tuple(of_tensor(evidence, one, tensors[one].num_elements, detail) for one in both)
            message = f"both moments of {name} are all zero, those of {busy} siblings in other layers aren't"
            found.violations.append(Violation(name, locations, message))


INVARIANTS = (
    Invariant(
        "OPT010", "negative-second-moment", Severity.ERROR,
        statement="No element of a second moment is negative.",
        rationale="It is an average of squares. Its root is divided by: a negative one becomes NaN at the next step.",
        source="pytorch torch/optim/adam.py: exp_avg_sq is a sum of squares",
        example="the second moment of 4.mlp.dense_h_to_4h.weight is negative, down to -0.0031",
        misses="A wrong second moment that is positive; a sign that flipped on a zero.",
        hint="Don't resume from this step. Look whether first and second moments were exchanged or a bit was flipped.",
        needs=Needs.WEIGHTS, judge_step=second_moment_is_not_negative, goes_first=True, one_fault=True,
        likely_causes=(
            LikelyCause("first and second moments were exchanged when state was read or converted",
                        "facebookresearch/fairscale#380"),
            LikelyCause("a bit flipped in memory or storage", "pytorch/torchtitan#4324"),
        ),
    ),
    Invariant(
        "OPT011", "moments-contradict", Severity.ERROR,
        statement="|m| <= C_n (1 + tau) sqrt(v + floor) in every element, with C_n and tau from the recorded betas and "
                  "the stored dtype (7.27 for betas 0.9, 0.999 in float32; docs/optimizer-bound.md derives it).",
        rationale="Both moments average the same gradients, so no gradients whatever lead beyond it. Moments that "
                  "break it belong to two parameters or two steps, or were damaged; the next update is up to as many "
                  "times too large.",
        source="Cauchy-Schwarz on Adam's sums (Kingma and Ba, arXiv 1412.6980); facebookresearch/fairscale#380",
        example="the moments of 3.mlp.dense_4h_to_h.weight don't belong together: |first| is up to 512 times the root "
                "of the second, at most 7.27 is possible (1 of 1024 elements)",
        misses="Moments of another parameter or step with gradients of about the same size. Where an earlier "
               "save that was looked at records other betas, what is beyond is undetermined; where none is, betas are "
               "taken to have been those that are recorded.",
        hint="Don't resume from this step with this state. If most tensors are named and no class of optimizer is "
             "recorded, see first whether it is Adam at all, whether betas were changed some steps before, and whether "
             "[optimizer] in auditor.toml, if there is one, states the betas that were used.",
        needs=Needs.WEIGHTS, judge_step=first_moment_is_within_the_second, pairings=moment_pairings, one_fault=True,
        likely_causes=(
            LikelyCause("state, keyed by position, was put on another parameter", "facebookresearch/fairscale#380"),
            LikelyCause("expert and other state was mixed on resume", "NVIDIA/Megatron-LM#761"),
            LikelyCause("a bit flipped in memory or storage", "pytorch/torchtitan#4324"),
        ),
    ),
    Invariant(
        "OPT012", "moments-zero", Severity.NOTE,
        statement="No second moment is all zero while its first moment isn't (an error), and no parameter has two "
                  "moments of zeros while most of its siblings in other layers don't (a note: masked tasks and blocks "
                  "that begin by adding nothing get gradients of zero by design).",
        rationale="The optimizer forgot this tensor, or its state was lost on the way: at resume it takes steps as if "
                  "training began.",
        source="deepspeedai/DeepSpeed#7786; pytorch/pytorch#115607",
        example="both moments of 7.self_attention.dense.weight are all zero, those of 11 siblings in other layers "
                "aren't",
        misses="A parameter without siblings; moments of all layers gone alike; part of a tensor; experts and low-rank "
               "factors, which healthy runs may leave without gradients.",
        hint="Look whether the tensor was frozen or never reached on purpose. If not, its state was lost.",
        needs=Needs.WEIGHTS, judge_step=moments_are_not_zero, goes_first=True,
        likely_causes=(
            LikelyCause("part of the optimizer's state was not saved", "deepspeedai/DeepSpeed#7786"),
            LikelyCause("the parameter gets no gradient (a hook or a frozen flag was lost)", "pytorch/pytorch#115607"),
        ),
    ),
)  # fmt: skip
