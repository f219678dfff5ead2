"""OPT: no two parameters share one optimizer state, and no parameter has one moment in the place of two."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.optimizer_state import plain
from auditor.invariants.related import (
    MOMENTS,
    Collected,
    Seen,
    by_role,
    of_tensor,
    seen_whole,
    why_unread,
)
from auditor.model.catalog import Catalog, Role, Tensor
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, LikelyCause, Severity, Violation
from auditor.model.run import StepEvidence, optimizer_step

_JUDGED = (*MOMENTS, Role.MASTER)
_TELLS_NOTHING = "all zero, not finite, one constant, or nearly so"
_FEWEST = 16
"""So many elements that aren't zero are not equal by chance."""


def state_is_not_shared(evidence: StepEvidence) -> Judgement:
    """No two parameters have bitwise equal moments or masters, unless they are tied."""
    catalog = evidence.catalog
    found = Collected()
    whole = seen_whole(catalog, evidence.observations)
    moved = _moved(catalog, whole)
    contents: dict[object, list[int]] = defaultdict(list)
    for number, tensor in enumerate(catalog.tensors):
        if tensor.role not in _JUDGED or tensor.dtype.kind is not Kind.FLOAT:
            continue
        reason = _exempt(tensor, whole.get(number), moved)
        if reason:
            found.not_applicable[reason] += 1
        elif tensor.undetermined:
            # State without a name may be one parameter's, kept twice.
            found.unknown(tensor.undetermined, tensor.name)
        elif number not in whole:
            found.unknown(why_unread(evidence), tensor.name)
        else:
            contents[tensor.role, tensor.dtype, tensor.shape, whole[number].lanes].append(number)
    roles = by_role(catalog)
    for members in contents.values():
        names = [catalog.tensors[number].name for number in members]
        others = list(_untied(catalog, names))
        if len(others) < 2:
            found.num_holds += len(members)
        else:
            kept = [number for number in members if catalog.tensors[number].name in others]
            found.violations.append(_violation(evidence, kept, roles, whole))
    if not any(tensor.role in _JUDGED for tensor in catalog.tensors):
        found.not_applicable["no optimizer state is stored"] += 1
    return found.judgement()


def _moved(catalog: Catalog, whole: Mapping[int, Seen]) -> frozenset[str]:
    """Names of the parameters that the optimizer has moved: a first step may be taken at a learning rate of zero."""
    steps = optimizer_step(catalog)
    if steps is not None and steps < 2:
        return frozenset()
    seconds = by_role(catalog)[Role.SECOND_MOMENT]
    return frozenset(name for name, number in seconds.items() if number in whole and whole[number].num_nonzero)


def _exempt(tensor: Tensor, seen: Seen | None, moved: frozenset[str]) -> str:
    """Why equal content of this tensor and another would prove nothing."""
    if sum(extent > 1 for extent in tensor.shape) < 2:
        return "a vector: two biases of one sum get the same gradients"
    if seen is not None and (seen.num_telling < _FEWEST or seen.minimum == seen.maximum):
        return _TELLS_NOTHING
    if tensor.role is Role.MASTER and tensor.name not in moved:
        return "a master that was not moved yet: layers and experts may begin as copies"
    return ""


def _untied(catalog: Catalog, names: Sequence[str]) -> Iterator[str]:
    """The names, of those that are tied to one another (or are one parameter in two places) only the first."""
    seen: set[str] = set()
    for name in names:
        partners = {other for tie in catalog.ties if plain(name) in tie.names for other in tie.names} | {plain(name)}
        if not partners & seen:
            yield name
        seen.add(plain(name))


def _violation(
    evidence: StepEvidence, members: Sequence[int], roles: Mapping[Role, Mapping[str, int]], whole: Mapping[int, Seen]
) -> Violation:
    tensors = [evidence.catalog.tensors[number] for number in members]
    names, role = [tensor.name for tensor in tensors], tensors[0].role
    if role is Role.MASTER:
        alike = _alike(names, [roles[role] for role in MOMENTS], whole)
    else:
        alike = _alike(names, [roles[role] for role in (Role.MASTER, Role.PARAMETER)], whole)
    what = "moments" if role is Role.MASTER else "weights"
    # Parameters that agree in everything may be one that is stored twice, siblings in one module terms of one sum;
    # state that agrees otherwise belongs to one only.
    summed = role is not Role.MASTER and (_are_siblings(names) or _are_branches(evidence.catalog, members))
    severity = Severity.ERROR if alike is False and not summed else Severity.WARNING
    also = {None: "", True: f", and so are their {what}", False: f", but their {what} are not"}[alike]
    more = f" (and of {len(names) - 2} more)" if len(names) > 2 else ""
    message = f"{role.value.replace('_', ' ')}s of {' and '.join(names[:2])}{more} are the same numbers{also}"
    locations = tuple(
        of_tensor(evidence, number, tensor.num_elements, f"equal to that of {names[tensor is tensors[0]]}")
        for number, tensor in zip(members, tensors, strict=True)
    )
    return Violation(names[0], locations, message, severity=severity)


def _are_siblings(names: Sequence[str]) -> bool:
    """Whether names differ in one component alone, and that not by number: ``a.weight``, ``b.weight``."""
    columns = [set(parts) for parts in zip(*(plain(name).split(".") for name in names), strict=False)]
    odd = [column for column in columns if len(column) > 1]
    same_length = len({name.count(".") for name in map(plain, names)}) == 1
    return same_length and len(odd) == 1 and not any(part.isdigit() for part in odd[0])


def _are_branches(catalog: Catalog, members: Sequence[int]) -> bool:
    """Whether these are the one matrix of each of some numbered modules (``branches.0.weight``), and of all of them.

    State of one layer that was put on another is of some layers, or of all their matrices.
    """
    of_role = [tensor for tensor in catalog.tensors if tensor.role is catalog.tensors[members[0]].role]
    matrices = [plain(tensor.name) for tensor in of_role if sum(extent > 1 for extent in tensor.shape) >= 2]
    found = [_NUMBERED.fullmatch(plain(catalog.tensors[number].name)) for number in members]
    whole = {match[1] for match in found if match}
    inside = {name for name in matrices if any(name.startswith(start) for start in whole)}
    return None not in found and len(whole) == 1 and len(inside) == len(members)


_NUMBERED = re.compile(r"(.*?\.)\d+(?:\.[^.\d][^.]*)*")
"""A name with one number in it: what comes before the number."""


def _alike(names: Sequence[str], roles: Sequence[Mapping[str, int]], whole: Mapping[int, Seen]) -> bool | None:
    """Whether these parameters are equal in the first of ``roles`` in which all were read; None where none was."""
    for numbers in roles:
        seen = [whole.get(numbers.get(name, -1)) for name in names]
        if all(one is not None for one in seen):
            return len({one.lanes for one in seen if one is not None}) == 1
    return None


def moments_are_two(evidence: StepEvidence) -> Judgement:
    """No parameter's first moment is bitwise its second."""
    catalog = evidence.catalog
    found = Collected()
    whole = seen_whole(catalog, evidence.observations)
    roles = by_role(catalog)
    seconds = roles[Role.SECOND_MOMENT]
    for name, number in roles[Role.FIRST_MOMENT].items():
        first, other = catalog.tensors[number], seconds.get(name)
        if other is None:
            found.not_applicable["it has no second moment"] += 1
        elif number not in whole or other not in whole:
            found.unknown(why_unread(evidence), name)
        elif whole[number].num_telling < 2 or whole[number].minimum == whole[number].maximum:
            found.not_applicable[_TELLS_NOTHING] += 1
        elif first.dtype == catalog.tensors[other].dtype and whole[number].lanes == whole[other].lanes:
            place = of_tensor(evidence, number, first.num_elements, "equal to its second moment")
            message = f"the first moment of {name} is its second moment, bit by bit"
            found.violations.append(Violation(name, (place,), message))
        else:
            found.num_holds += 1
    if not roles[Role.FIRST_MOMENT]:
        found.not_applicable["no first moments are stored"] += 1
    return found.judgement()


INVARIANTS = (
    Invariant(
        "OPT013", "state-shared", Severity.ERROR,
        statement="No two parameters of two or more dims have bitwise equal moments or masters, unless they are tied. "
                  "A warning where they agree in weights and moments alike (it may be one parameter under two names), "
                  "and for moments of siblings in one module, or of modules that are numbered and have one matrix each "
                  "(they may be terms of one sum).",
        rationale="Different parameters get different gradients. Equal state means that one of them was given the "
                  "other's: it is updated along the other's history.",
        source="facebookresearch/fairscale#380; pytorch/pytorch#54736; huggingface/transformers#24381",
        example="first moments of 3.mlp.dense_h_to_4h.weight and 4.mlp.dense_h_to_4h.weight are the same numbers, but "
                "their weights are not",
        misses="State that was exchanged between two parameters: each then has one that no other has. Vectors, whose "
               "gradients may be equal in healthy models. Parallel branches of equal input that are summed have equal "
               "moments in health: numbered ones with several matrices each are named as an error all the same.",
        hint="If the two are one tensor under two names, say so in the model's configuration. If not, don't resume "
             "from this step.",
        needs=Needs.WEIGHTS, judge_step=state_is_not_shared, goes_first=True, one_fault=True,
        likely_causes=(
            LikelyCause("state is keyed by position and was read in another order", "facebookresearch/fairscale#380"),
            LikelyCause("a converter wrote one layer in two places", "huggingface/transformers#24381"),
        ),
    ),
    Invariant(
        "OPT014", "moments-same", Severity.ERROR,
        statement="No parameter's first moment is bitwise equal to its second.",
        rationale="One is an average of gradients, the other of their squares. Equal numbers mean that both names were "
                  "given one buffer: the direction of the next steps is lost, and no loader complains.",
        source="seen in torch 2.13: FullyShardedDataParallel.optim_state_dict with FULL_STATE_DICT on CPU saves one "
               "storage for both (torch/distributed/fsdp/_optim_utils.py)",
        example="the first moment of blocks.0.up.weight is its second moment, bit by bit",
        misses="Moments of which all elements are equal or all but one zero.",
        hint="Don't resume from this step: the first moments are lost. Save the optimizer's state in another form "
             "(sharded) and compare.",
        needs=Needs.WEIGHTS, judge_step=moments_are_two, one_fault=True,
        likely_causes=(
            LikelyCause("the writer gathered both into one buffer", "torch.distributed.fsdp on CPU"),
        ),
    ),
)  # fmt: skip
