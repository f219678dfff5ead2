"""NUM: values are finite, not collapsed, and of a size that their siblings in other layers have too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.motion_expected import ExpectedMotion
from auditor.invariants.optimizer_state import KeptState, plain
from auditor.invariants.related import Collected, Seen, layer, of_tensor, seen_whole, siblings, why_unread
from auditor.model.catalog import Role, Tensor
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.observation import Read
from auditor.model.run import StepEvidence


def values_are_finite(evidence: StepEvidence) -> Judgement:
    """No element of any tensor is NaN or infinite."""
    catalog, seen = evidence.catalog, evidence.observations.pieces
    violations, num_holds = [], 0
    unread: list[str] = []
    kept = KeptState(catalog)
    for number, rows in catalog.rows_by_tensor.items():
        tensor = catalog.tensors[number]
        if tensor.role is Role.PADDING:
            continue
        bad = rows[(seen["num_nan"][rows] > 0) | (seen["num_infinite"][rows] > 0)]
        if len(bad):
            violations.append(_not_finite(evidence, number, bad, kept))
        elif np.all(seen["read"][rows] == Read.DONE):
            num_holds += 1
        else:
            unread.append(tensor.name)
    return Judgement(num_holds, tuple(violations), {why_unread(evidence): tuple(unread)} if unread else {})


def _not_finite(evidence: StepEvidence, number: int, bad: NDArray[np.int64], kept: KeptState) -> Violation:
    """What a tensor holds that is no number, in the replica that holds most."""
    catalog, seen = evidence.catalog, evidence.observations.pieces
    tensor, places = catalog.tensors[number], catalog.replicas[number]
    counts = np.zeros(len(places), np.int64)
    np.add.at(counts, catalog.pieces.replica[bad], (seen["num_nan"] + seen["num_infinite"])[bad].astype(np.int64))
    worst, num_bad = int(counts.argmax()), int((counts > 0).sum())
    total = int(counts[worst])
    where = f" on {places[worst]}" if num_bad < len(places) else ""
    where += f" ({num_bad} of {len(places)} replicas)" if 1 < num_bad < len(places) else ""
    what = "1 number that is not finite" if total == 1 else f"{total} numbers that are not finite"
    message = f"{tensor.name} ({tensor.role.value}) holds {what}{where}"
    severity = Severity.NOTE if _is_meant(evidence, number, bad, kept) else None
    if severity is None and tensor.role is Role.OBJECT:
        # What nobody trains, and no optimizer is known to use, need not harm the next step.
        severity = Severity.WARNING
    return Violation(tensor.name, tuple(_location(evidence, int(row)) for row in bad), message, severity=severity)


def _is_meant(evidence: StepEvidence, number: int, bad: NDArray[np.int64], kept: KeptState) -> bool:
    """Whether a tensor may be infinite on purpose: a mask, a range that nothing was seen of, a best loss so far.

    No optimizer has them. Where it isn't known what it has: those without any ordinary number, as masks are.
    """
    tensor, seen = evidence.catalog.tensors[number], evidence.observations.pieces
    name, rows = plain(tensor.name), evidence.catalog.rows_by_tensor[number]
    if seen["num_nan"][bad].any():
        return False
    num_zero, num_infinite = int(seen["num_zero"][rows].sum()), int(seen["num_infinite"][rows].sum())
    num_elements = int(evidence.catalog.pieces.num_elements()[rows].sum())
    plain_mask = num_zero + num_infinite == num_elements
    vector = sum(extent > 1 for extent in tensor.shape) < 2
    if tensor.role is Role.OBJECT:
        # Of a matrix of numbers, masks aside, nobody knows whether it is a model's.
        return vector or plain_mask or 4 * num_infinite >= num_elements
    if name in kept.trained or name in kept.state:
        return False
    if tensor.role is Role.BUFFER:
        return True
    return tensor.role is Role.PARAMETER and (bool(kept.trained) or (plain_mask and (num_zero > 0 or vector)))


def _location(evidence: StepEvidence, row: int) -> Location:
    catalog, seen = evidence.catalog, evidence.observations.pieces[row]
    piece = catalog.pieces[row]
    tensor = catalog.tensors[piece.tensor]
    nan, infinite = int(seen["num_nan"]), int(seen["num_infinite"])
    return Location(
        catalog.step, catalog.files[piece.file].name, tensor.name, tensor.role, tensor.order, piece.coordinate,
        num_elements=nan + infinite, detail=f"{nan} NaN, {infinite} infinite",
    )  # fmt: skip


_WEIGHTS = (Role.PARAMETER, Role.MASTER)
_FEWEST = 64
"""Elements: of smaller tensors, equal or zero elements say little."""
_UNDERFLOWN = 2.0**-100
"""No initialisation, and no number of steps with weight decay in use, leaves a matrix of numbers below this."""
_STARTS_AT_ZERO = re.compile("lora_|adapter|zero_conv", re.IGNORECASE)
"""Names of what is zero by design until it is trained."""
_ADDS_TO_STREAM = re.compile(
    r"(?:^|[./])(?:o_proj|out_proj|c_proj|down_proj|proj|fc_out|dense|dense_4h_to_h|linear_proj|linear_fc2|fc2|wo|w2)[./]weight$"
)
"""Projections whose zeros make a block add nothing: models are made deeper so."""


def _judged(evidence: StepEvidence, found: Collected) -> Iterator[tuple[list[int], Mapping[int, Seen]]]:
    """Families of matrices with what was seen of each; what can't be judged is noted."""
    catalog = evidence.catalog
    whole = seen_whole(catalog, evidence.observations)
    for family in siblings(catalog, _WEIGHTS):
        tensor = catalog.tensors[family[0]]
        if not _is_matrix(tensor):
            found.not_applicable[f"a vector, or fewer than {_FEWEST} elements, or no floats"] += len(family)
            continue
        finite = [number for number in family if number in whole and not whole[number].num_not_finite]
        for number in family:
            if number not in whole:
                found.unknown(why_unread(evidence), catalog.tensors[number].name)
            elif number not in finite:
                found.unknown("it holds numbers that are not finite", catalog.tensors[number].name)
        if finite:
            yield finite, whole


def _is_matrix(tensor: Tensor) -> bool:
    dims = sum(extent > 1 for extent in tensor.shape)
    return dims >= 2 and tensor.num_elements >= _FEWEST and tensor.dtype.kind is Kind.FLOAT and tensor.dtype.bits >= 8


def weights_are_not_collapsed(evidence: StepEvidence) -> Judgement:
    """No matrix is all zero or one value where its siblings in other layers aren't, and none is all denormals."""
    found, expected = Collected(), ExpectedMotion(evidence)
    for family, whole in _judged(evidence, found):
        constant = [number for number in family if whole[number].minimum == whole[number].maximum]
        for number in family:
            seen = whole[number]
            if number in constant:
                _judge_constant(evidence, found, number, seen, (len(constant), len(family)), expected)
            elif seen.largest < _UNDERFLOWN:
                detail = f"no number is beyond {seen.largest:.2g}"
                found.violations.append(_collapsed(evidence, number, detail, detail))
            else:
                found.num_holds += 1
    _leave_out_idle_blocks(found)
    return found.judgement()


def _judge_constant(
    evidence: StepEvidence, found: Collected, number: int, seen: Seen, counts: tuple[int, int],
    expected: ExpectedMotion,
) -> None:  # fmt: skip
    """A matrix of one value, of which there are ``counts[0]`` among ``counts[1]`` siblings."""
    name, others = evidence.catalog.tensors[number].name, counts[1] - counts[0]
    if _STARTS_AT_ZERO.search(name) and seen.num_nonzero == 0:
        found.not_applicable["zero by design until it is trained"] += 1
    elif others < 2 or others <= counts[0]:
        found.unknown("all its elements are equal, and not enough siblings' aren't", name)
    else:
        detail = f"all elements are {seen.minimum:g}"
        violation = _collapsed(evidence, number, detail, f"{detail}, those of {others} siblings aren't")
        idle = seen.num_nonzero == 0 and _ADDS_TO_STREAM.search(name) and expected.why_unmoved(name, seen)
        found.violations.append(replace(violation, severity=Severity.NOTE if idle else None))


def _collapsed(evidence: StepEvidence, number: int, detail: str, text: str) -> Violation:
    tensor = evidence.catalog.tensors[number]
    location = of_tensor(evidence, number, tensor.num_elements, detail)
    return Violation(tensor.name, (location,), f"{tensor.name} ({tensor.role.value}) is collapsed: {text}")


def _leave_out_idle_blocks(found: Collected) -> None:
    """A layer of which both projections into the stream are zero, and nothing else, adds nothing.

    Deeper models are made from trained ones by such blocks.
    """
    by_layer: dict[str, list[Violation]] = {}
    for violation in found.violations:
        by_layer.setdefault(layer(violation.subject), []).append(violation)
    for violations in by_layer.values():
        idle = {violation.subject for violation in violations if _ADDS_TO_STREAM.search(violation.subject)}
        if len(idle) == 2 and idle == {violation.subject for violation in violations}:
            reason = "a block that adds nothing: its two projections into the stream are zero"
            found.not_applicable[reason] += len(violations)
            found.violations[:] = [item for item in found.violations if item not in violations]


_BEYOND = 2.0**10
"""Times the siblings' median. Depth-scaled initialisation spreads siblings by 1 / sqrt(2 * layers), training by some
tens; a flipped high exponent bit, or a scale that was not applied (2**7 to 2**9 for float8, more for integers), is
beyond."""
_LARGE = 1.0
"""Root mean square of a matrix from which its size alone is unusual: siblings that began at zero may be far apart."""
_FEWEST_SIBLINGS = 4


def weights_are_like_their_siblings(evidence: StepEvidence) -> Judgement:
    """No matrix is a thousand times as large as the same matrix of the other layers."""
    found = Collected()
    for family, whole in _judged(evidence, found):
        if len(family) <= _FEWEST_SIBLINGS:
            found.not_applicable[f"fewer than {_FEWEST_SIBLINGS} siblings in other layers"] += len(family)
            continue
        sizes = {number: whole[number].root_mean_square for number in family}
        usual = median(sizes.values())
        large = [number for number in family if sizes[number] > max(_BEYOND * usual, _LARGE) and usual > 0]
        found.num_holds += len(family) - len(large)
        found.violations += [_large(evidence, number, sizes[number], usual, family) for number in large]
    return found.judgement()


def _large(evidence: StepEvidence, number: int, size: float, usual: float, family: Sequence[int]) -> Violation:
    tensor = evidence.catalog.tensors[number]
    detail = f"root mean square {size:.3g}, {usual:.3g} in its siblings"
    location = of_tensor(evidence, number, tensor.num_elements, detail)
    message = (
        f"{tensor.name} ({tensor.role.value}) has root mean square {size:.3g}, "
        f"the median of its {len(family) - 1} siblings and itself is {usual:.3g}"
    )
    return Violation(tensor.name, (location,), message)


INVARIANTS = (
    Invariant(
        "NUM001", "not-finite", Severity.ERROR,
        statement="Every element of every parameter, master, moment and buffer is a finite number. Padding of flat "
                  "buffers is left out: it is uninitialised in healthy runs. A note where a buffer, or a tensor that "
                  "the optimizer was not given, is infinite and not NaN (masks and ranges begin so); where it isn't "
                  "known what it was given, one of infinities and zeros alone. Of what is neither of these nor the "
                  "optimizer's, a number or vector that is infinite (a best loss so far), or a mask, is a note, "
                  "anything else a warning.",
        rationale="A NaN in a weight spreads to everything; one in a moment does so at the next step.",
        source="ultralytics/ultralytics#24307; NVIDIA/nvidia-resiliency-ext#349",
        example="4.mlp.dense_4h_to_h.weight (second_moment) holds 3 numbers that are not finite",
        misses="Finite nonsense: nearly all hardware corruption is finite (about 99 %, arXiv 2605.04213).",
        hint="Resume from the last good step with the batch that caused it skipped; look at the loss scale and norms.",
        needs=Needs.WEIGHTS, judge_step=values_are_finite, one_fault=True, goes_first=True, ranks_as="REP",
        likely_causes=(LikelyCause("a loss or gradient overflowed and the step was not skipped",
                                   "ultralytics/ultralytics#24307"),),
    ),
    Invariant(
        "NUM002", "weights-collapsed", Severity.WARNING,
        statement="No matrix of 64 or more elements is all zero or all one value while most of its siblings (the same "
                  "name in other layers) aren't, and none holds only numbers below 2**-100. A note where it is one "
                  "projection into the stream, of zeros, that the optimizer need not have moved: blocks may begin so.",
        rationale="The weights were lost on the way: a buffer was saved before it was filled, or an export wrote "
                  "zeros.",
        source="NVIDIA/Megatron-LM#1570; deepspeedai/DeepSpeed#6791",
        example="4.mlp.dense_h_to_4h.weight (parameter) is collapsed: all elements are 0, those of 23 siblings aren't",
        misses="Part of a tensor; a tensor without siblings that is zero; vectors; layers added with zeros in both of "
               "their projections into the stream, and low-rank factors, which begin so by design.",
        hint="Look whether this layer was meant to begin so. If it was trained, take its weights from another step or "
             "from the masters.",
        needs=Needs.WEIGHTS, judge_step=weights_are_not_collapsed, one_fault=True,
        likely_causes=(
            LikelyCause("a buffer that is filled later, or shared, was saved", "NVIDIA/Megatron-LM#1570"),
            LikelyCause("the export wrote zeros for what it did not gather", "deepspeedai/DeepSpeed#6791"),
        ),
    ),
    Invariant(
        "NUM003", "weights-out-of-scale", Severity.WARNING,
        statement="The root mean square of a matrix is not beyond 1 and 1024 times the median of it and its four or "
                  "more siblings in other layers.",
        rationale="Training leaves the same matrix of all layers within some tens of each other: what is a thousand "
                  "times as large was damaged or is another tensor.",
        source="pytorch/torchtitan#4324; arXiv 2605.04213",
        example="4.mlp.dense_h_to_4h.weight (parameter) has root mean square 3.1e+15, the median of its 23 siblings "
                "and itself is 0.021",
        misses="Damage that leaves the size plausible, which most does; vectors, whose sizes differ in healthy models; "
               "matrices with fewer than four siblings.",
        hint="Look at the largest elements. A single one is a flipped bit; all of them, a scale that was not applied.",
        needs=Needs.WEIGHTS, judge_step=weights_are_like_their_siblings, one_fault=True,
        likely_causes=(
            LikelyCause("a bit flipped in memory or storage", "pytorch/torchtitan#4324"),
            LikelyCause("low-precision weights were saved without their scales", "NVIDIA/Megatron-LM#4994"),
        ),
    ),
)  # fmt: skip
