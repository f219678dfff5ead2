"""OPT: the optimizer's state belongs to these parameters, its counters and hyperparameters agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from auditor.invariants.invariant import Invariant
from auditor.invariants.optimizer_alone import state_is_complete
from auditor.invariants.optimizer_lost import what_moves_has_moments
from auditor.invariants.optimizer_owners import state_belongs_to_parameters
from auditor.invariants.optimizer_state import (
    KeptState,
    plain,
    trained_parameters_have_moments,
)
from auditor.invariants.recorded import files_with_groups
from auditor.model.catalog import Catalog, Role, Scalar, Tensor
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import ParameterGroup
from auditor.model.run import StepEvidence, files_of_another_step

_SAME_ALONG = frozenset({"dp", "edp", "cp", "tp"})
"""Axes along which ranks run one optimizer; other stages and experts may have groups of their own."""
_COMPARED = frozenset({
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "maximize", "initial_lr",
    "max_lr", "min_lr", "lr_mult", "wd_mult", "decoupled_weight_decay", "alpha", "centered", "lr_decay", "ns_steps",
    "bias_correction",
})  # fmt: skip
"""Hyperparameters that ranks share. Optimizers of people's own may keep the rank itself in a group."""
_NO_COUNTERS = "no count of optimizer steps is recorded for single parameters"


def _counters(catalog: Catalog) -> dict[str, list[Scalar]]:
    """File to the counters of single parameters in it."""
    found: dict[str, list[Scalar]] = defaultdict(list)
    for scalar in catalog.scalars:
        if scalar.name == "optimizer_step" and scalar.tensor:
            found[scalar.file].append(scalar)
    return found


def _usual(values: Iterable[float]) -> float:
    """The most frequent value, the largest of several."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def _tensors(catalog: Catalog) -> dict[str, Tensor]:
    """Counters by name."""
    return {tensor.name: tensor for tensor in catalog.tensors if tensor.role is Role.COUNTER}


def _at(catalog: Catalog, scalar: Scalar, tensors: Mapping[str, Tensor], detail: str) -> Location:
    tensor = tensors.get(scalar.tensor)
    order, role = tensor.order if tensor else -1, Role.COUNTER if scalar.tensor else None
    return Location(catalog.step, scalar.file, scalar.tensor, role, order, scalar.coordinate, detail=detail)


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"


def _apart(coordinate: Coordinate) -> Coordinate:
    """What of a coordinate tells ranks apart that need not agree."""
    return coordinate.along(axis for axis, _ in coordinate.indices if axis not in _SAME_ALONG)


# Counters


def ranks_count_alike(evidence: StepEvidence) -> Judgement:
    """Ranks that run one optimizer have counted the same steps for each parameter, and for all of them."""
    catalog = evidence.catalog
    by_file = _counters(catalog)
    if not by_file:
        return Judgement(not_applicable={_NO_COUNTERS: 1})
    stale, tensors = files_of_another_step(catalog), _tensors(catalog)
    cells: dict[tuple[str, Coordinate], list[Scalar]] = defaultdict(list)
    for file, counters in by_file.items():
        # A file whose counters are another save's altogether is INT005's.
        if file not in stale:
            for scalar in counters:
                cells[plain(scalar.tensor), _apart(scalar.coordinate)].append(scalar)
    violations = [*_uncounted(catalog, by_file)]
    num_holds = 0
    for (name, _), scalars in cells.items():
        most = _usual(scalar.value for scalar in scalars)
        odd = [scalar for scalar in scalars if scalar.value != most]
        num_holds += not odd
        if odd:
            detail = f"was updated {_times(odd[0].value)} here, {_times(most)} on other ranks"
            locations = tuple(_at(catalog, scalar, tensors, detail) for scalar in odd)
            message = f"{name} {detail} ({catalog.within(odd[0].file)})"
            violations.append(Violation(name, locations, message, minority=tuple(scalar.coordinate for scalar in odd)))
    return Judgement(num_holds, tuple(violations))


def _uncounted(catalog: Catalog, by_file: Mapping[str, Sequence[Scalar]]) -> Iterable[Violation]:
    """Parameters with both of Adam's moments in a file that counts steps for others of their group, not for them."""
    kept = KeptState(catalog)
    counted = {plain(tensor.name) for tensor in _tensors(catalog).values()}
    counted |= {plain(scalar.tensor) for scalars in by_file.values() for scalar in scalars}
    groups = {kept.trained[name].number for name in counted if name in kept.trained}
    for name, group in kept.trained.items():
        have = kept.state.get(name, {})
        if group.number in groups and name not in counted and {"exp_avg", "exp_avg_sq"} <= have.keys():
            detail = "has moments but no count of their steps, other parameters of its group have one"
            location = kept.location(have["exp_avg"][0], detail)
            if location.file in by_file:
                yield Violation(name, (location,), f"{name} {detail}")


def counters_move_together(evidence: StepEvidence) -> Judgement:
    """Within a file all counters of one optimizer's steps are equal, those of groups that are kept at all included."""
    catalog = evidence.catalog
    by_file, tensors = _counters(catalog), _tensors(catalog)
    groups = dict(files_with_groups(catalog))
    violations: list[Violation] = []
    num_holds = 0
    for file in dict.fromkeys((*by_file, *groups)):
        own: dict[str, list[Scalar]] = defaultdict(list)
        for scalar in by_file.get(file, []):
            own[scalar.optimizer].append(scalar)
        steps = [group.step for group in groups.get(file, ()) if group.step]
        for counters in own.values():
            usual = _usual(scalar.value for scalar in counters)
            odd = [scalar for scalar in counters if scalar.value != usual]
            for scalar in odd:
                detail = f"was updated {_times(scalar.value)}, most parameters of its file {_times(usual)}"
                name = plain(scalar.tensor)
                violations.append(Violation(name, (_at(catalog, scalar, tensors, detail),), f"{name} {detail}"))
            num_holds += len(counters) - len(odd)
        if steps and (own or len(steps) > 1):
            usual = _usual([scalar.value for scalar in by_file.get(file, [])] or steps)
            violations += _odd_groups(catalog, groups[file], usual)
            num_holds += sum(step == usual for step in steps)
    if not num_holds and not violations:
        return Judgement(not_applicable={_NO_COUNTERS: 1})
    return Judgement(num_holds, tuple(violations))


def _odd_groups(catalog: Catalog, groups: Sequence[ParameterGroup], usual: float) -> Iterable[Violation]:
    for group in groups:
        if group.step and group.step != usual:
            detail = f"parameter group {group.number} counts {group.step:g} steps, the others {usual:g}"
            # No gradient is needed for these to count: only a group that was added later counts less.
            yield replace(_of_group(catalog, group, detail), severity=Severity.WARNING)


def _of_group(catalog: Catalog, group: ParameterGroup, detail: str) -> Violation:
    file = catalog.within(group.file)
    location = Location(catalog.step, group.file, coordinate=group.coordinate, detail=detail)
    return Violation(f"{file} group {group.number}", (location,), f"{file}: {detail}", minority=(group.coordinate,))


def counters_can_count(evidence: StepEvidence) -> Judgement:
    """No counter stands still because its dtype can't represent the next number."""
    catalog, tensors = evidence.catalog, _tensors(evidence.catalog)
    counters = [scalar for scalar in catalog.scalars if scalar.name == "optimizer_step" and scalar.dtype is not None]
    stuck: dict[str, list[Scalar]] = defaultdict(list)
    for scalar in counters:
        if scalar.saturated and catalog.step > scalar.value:
            stuck[plain(scalar.tensor) or catalog.within(scalar.file)].append(scalar)
    violations = []
    for subject, scalars in stuck.items():
        dtype, value = scalars[0].dtype, scalars[0].value
        name = dtype.name if dtype else ""
        detail = f"is {name} and reads {value:g} at step {catalog.step}: {value:g} + 1 is {value:g} there"
        locations = tuple(_at(catalog, scalar, tensors, detail) for scalar in scalars)
        violations.append(Violation(subject, locations, f"the count of optimizer steps of {subject} {detail}"))
    if not counters:
        return Judgement(not_applicable={"no counter is stored as a tensor": 1})
    return Judgement(len(counters) - sum(map(len, stuck.values())), tuple(violations))


# Hyperparameters


def ranks_use_one_setting(evidence: StepEvidence) -> Judgement:
    """Ranks that run one optimizer have the same hyperparameters in each of its groups, and as many groups."""
    catalog = evidence.catalog
    cells: dict[tuple[Coordinate, str], dict[str, list[ParameterGroup]]] = defaultdict(dict)
    for file, groups in files_with_groups(catalog):
        cells[_apart(groups[0].coordinate), groups[0].of_model][file] = groups
    shared = [files for files in cells.values() if len(files) > 1]
    if not shared:
        reason = "one file a pipeline stage records hyperparameters" if cells else "no hyperparameters are recorded"
        return Judgement(not_applicable={reason: 1})
    violations: list[Violation] = []
    num_holds = 0
    for files in shared:
        found = [*_unequal(catalog, files)]
        violations += found
        num_holds += len(files) - len({location.file for violation in found for location in violation.locations})
    return Judgement(num_holds, tuple(violations))


def _unequal(catalog: Catalog, files: Mapping[str, Sequence[ParameterGroup]]) -> Iterable[Violation]:
    """What files that must agree record otherwise than most of them; the first where there is no most."""
    lengths = Counter(map(len, files.values()))
    most = max(lengths, key=lambda length: lengths[length])
    for file, groups in files.items():
        if len(groups) != most:
            detail = f"records {len(groups)} parameter groups, other ranks {most}"
            at = Location(catalog.step, file, coordinate=groups[0].coordinate, detail=detail)
            yield Violation(catalog.within(file), (at,), f"{catalog.within(file)} {detail}")
    for number in range(most):
        members = [groups[number] for groups in files.values() if len(groups) == most]
        for key in sorted(_COMPARED.intersection(*(group.hyperparameters for group in members))):
            values = [(group, _text(group.hyperparameters[key])) for group in members]
            counts = Counter(value for _, value in values)
            usual = max(counts, key=lambda value: counts[value])
            for group, value in values:
                if value != usual:
                    detail = f"parameter group {group.number} has {key} {value}, on other ranks {usual}"
                    yield _of_group(catalog, group, detail)


def _text(value: object) -> str:
    return f"({', '.join(map(repr, value))})" if isinstance(value, tuple) else repr(value)


_STEPS_IN_SEVERAL_PLACES = LikelyCause(
    "a conversion or resume filled one of the places where the step is kept", "deepspeedai/DeepSpeed#6691"
)
_PARTIAL = LikelyCause(
    "one rank's or one part's state was saved in the place of the whole", "huggingface/transformers#23034"
)

INVARIANTS = (
    Invariant(
        "OPT001", "moments-incomplete", Severity.ERROR,
        statement="A parameter for which the optimizer keeps moments has all that this optimizer keeps, in its own "
                  "shape, on every rank that has the parameter. Once a step was taken some parameters have moments; "
                  "one with an fp32 master has them in any case. Where groups are of Adam and don't name "
                  "their parameters, a moment comes with the other one, and with a master where others have theirs. "
                  "A parameter that moves since the save before did not lose the moments that it had there; a warning "
                  "where it moves and had none, as others of its group have.",
        rationale="Optimizers start missing moments from zero without a word: resumed training begins with steps of "
                  "another size, and a moment of another shape belongs to something else.",
        source="deepspeedai/DeepSpeed#7786; huggingface/transformers#23034; facebookresearch/fairscale#380",
        example="layer.weight has exp_avg but no exp_avg_sq",
        misses="Moments that are another parameter's of the same shape. Two moments lost together for a parameter "
               "without master that rests, or of the first save, are OPT006. Undetermined: optimizers whose state is "
               "not known; before step 1000, "
               "nothing kept at all where no optimizer step is counted; ranks that each hold other parameters' state.",
        hint="Resume from the last good step; if that can't be, expect the first steps to be as after a restart of "
             "the optimizer, and warm up the learning rate.",
        judge_step=state_is_complete, judge_motion=what_moves_has_moments, likely_causes=(_PARTIAL,),
    ),
    Invariant(
        "OPT002", "state-without-parameter", Severity.ERROR,
        statement="Every moment and every fp32 master is that of a parameter which the checkpoint holds; a master has "
                  "its parameter's shape.",
        rationale="Optimizer and model were not saved by one run: loaders that go by position give every later "
                  "parameter the state of its neighbour.",
        source="facebookresearch/fairscale#380; pytorch/pytorch#54736",
        example="optimizer.state.9.exp_avg (first_moment) is state of a parameter that is not there",
        misses="Files that number state by position where no known order fits it, and steps in which no model was "
               "read (an optimizer saved by itself): undetermined.",
        hint="Compare the model's parameters with those of the code that saved the optimizer.",
        judge_step=state_belongs_to_parameters,
    ),
    Invariant(
        "OPT003", "ranks-count-differently", Severity.ERROR,
        statement="Data- and tensor-parallel ranks have counted the same number of optimizer steps for a parameter. "
                  "Where a group's parameters have counters, every one with Adam's moments has.",
        rationale="Replicas were not updated together; or bias correction starts anew for a parameter whose moments "
                  "are old, and its first updates come out many times too small or too large.",
        source="deepspeedai/DeepSpeed#5289; pytorch/pytorch#128949",
        example="head.weight was updated 290 times here, 300 times on other ranks (rank_1.pt)",
        misses="Of more than 1024 counters in a file as many are read, evenly spread. Files whose counters are all of "
               "another step are INT005. Data-parallel ranks whose state only one of them saved.",
        hint="Find out which rank skipped updates; the replicas of that parameter have drifted as well.",
        judge_step=ranks_count_alike,
    ),
    Invariant(
        "OPT004", "counter-saturated", Severity.ERROR,
        statement="No counter of optimizer steps is so large for its dtype that adding one changes nothing (256 in "
                  "bfloat16, 2048 in float16).",
        rationale="The counter stands still without a message: bias correction stays that of step 256, updates come "
                  "out about half as large as they should.",
        source="pytorch/ao#4915; deepspeedai/DeepSpeed#8496",
        example="the count of optimizer steps of head.weight is bfloat16 and reads 256 at step 300: 256 + 1 is 256 "
                "there",
        misses="Counters that were saved in a wider dtype than they are kept in; runs whose step counts something "
               "else than optimizer steps and is smaller.",
        hint="Keep the counter in float32 or as an integer and set it to the true number when resuming.",
        judge_step=counters_can_count, one_fault=True,
        likely_causes=(LikelyCause("the whole optimizer state was cast to the parameters' dtype", "pytorch/ao#4915"),),
    ),
    Invariant(
        "OPT005", "ranks-set-differently", Severity.ERROR,
        statement="Data- and tensor-parallel ranks have the same hyperparameters (learning rate, betas, epsilon, "
                  "weight decay …) in every parameter group, and the same number of groups. Groups of one file, and "
                  "pipeline stages, may differ.",
        rationale="Replicas are updated by other rules: they drift apart from here on.",
        source="docs/design.md, section 5; deepspeedai/DeepSpeed#5289: schedulers stepped twice on resume",
        example="rank_1.pt: parameter group 0 has lr 0.02, on other ranks 0.01",
        misses="Settings that are wrong on all ranks alike; data-parallel ranks of which one alone saved.",
        hint="Compare the ranks' configuration and schedulers; replicas have drifted if steps were taken since.",
        judge_step=ranks_use_one_setting, one_fault=True,
    ),
    Invariant(
        "OPT006", "parameter-without-moments", Severity.NOTE,
        statement="Every parameter that was handed to the optimizer has moments once others have. Legal exceptions "
                  "are parameters that never got a gradient: frozen ones, modules that training does not use.",
        rationale="Torch makes state when a parameter gets its first gradient, and loads a state dict that lacks some "
                  "without a word. If these were trained, their moments are lost.",
        source="huggingface/transformers#23034; torch/optim/adam.py (_init_group)",
        example="pooler.weight is handed to the optimizer (group 0) but has no moments, others have",
        misses="Parameters that were meant to be trained but not handed to the optimizer: in no group, they count as "
               "frozen. Not applicable where only their moments say which parameters the optimizer has (optax).",
        hint="If these parameters are frozen or unused, hand only trained ones to the optimizer, or waive this. Else "
             "compare with an earlier save.",
        judge_step=trained_parameters_have_moments, one_fault=True, likely_causes=(_PARTIAL,),
    ),
    Invariant(
        "OPT007", "counters-apart", Severity.NOTE,
        statement="Within a file, all counters of one optimizer's steps are equal, those of groups included (a "
                  "warning: they need no gradient). Legal exceptions are parameters that were unfrozen later or get no "
                  "gradient in some steps; a group that counts 0 is one whose optimizer never updates its counter.",
        rationale="Bias correction and schedules go by these counters; after a conversion that filled one place only, "
                  "part of the model is trained as at the start.",
        source="deepspeedai/DeepSpeed#5289; radixark/miles#1627",
        example="head.weight was updated 3 times, most parameters of its file 300 times",
        misses="Counters that are wrong all alike (INT005, INT011); of more than 1024 in a file as many are read.",
        hint="If the parameters were frozen for a while or are used only sometimes, waive this; else set the counters "
             "right before resuming.",
        judge_step=counters_move_together, one_fault=True, likely_causes=(_STEPS_IN_SEVERAL_PLACES,),
    ),
)  # fmt: skip
