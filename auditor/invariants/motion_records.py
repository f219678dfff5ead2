"""MOT: what two saves record of counters, tensors and learning rates follows one from the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.learning_rates import follows, scheduled_rate
from auditor.invariants.neighbours import Neighbours
from auditor.invariants.optimizer_state import plain
from auditor.invariants.related import Collected, by_role, of_tensor
from auditor.model.catalog import Catalog, FileState, Role
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.optimizer import ParameterGroup
from auditor.model.run import counters_that_go_together, num_skipped

# MOT005: counters advance as steps do


def counters_advance_with_steps(neighbours: Neighbours) -> Judgement:
    """Where the optimizer counted a step for each step of the run so far, it still does."""
    before, after = neighbours.before.catalog, neighbours.after.catalog
    usual = neighbours.counted.usual
    if usual is None:
        return Judgement(not_applicable={"no optimizer steps are counted in both saves": 1})
    old, new = usual
    skipped = num_skipped(before), num_skipped(after)
    if old != before.step - skipped[0]:
        return Judgement(not_applicable={"the optimizer's counter is not the number of the step": 1})
    if new < old:
        return Judgement(not_applicable={"the optimizer began anew: MOT006 speaks of it": 1})
    wanted = after.step - before.step - (skipped[1] - skipped[0])
    if new - old == wanted:
        return Judgement(1)
    if new - old < wanted:
        reason = "fewer steps were counted than lie between the saves, and skipped ones are rarely recorded"
        return Judgement(undetermined={reason: ("the optimizer's counter",)})
    between = f"between step {before.step} and {after.step}"
    message = f"the optimizer counted {new - old:g} steps {between}, until then one each"
    return Judgement(violations=(_of_counters(after, message),))


def _of_counters(catalog: Catalog, message: str) -> Violation:
    files = sorted({scalar.file for scalar in counters_that_go_together(catalog)}) or [catalog.path]
    locations = tuple(Location(catalog.step, file, detail=message) for file in files)
    return Violation("the optimizer's counter", locations, message)


# MOT006: the optimizer went on


def the_optimizer_went_on(neighbours: Neighbours) -> Judgement:
    """No counter of optimizer steps fell since the save before."""
    catalog, found = neighbours.after.catalog, Collected()
    usual = neighbours.counted.usual
    if usual is None:
        return Judgement(not_applicable={"no optimizer steps are counted in both saves": 1})
    old, new = usual
    if new < old:
        message = f"the optimizer began anew: it counts {new:g} steps, {old:g} in step {neighbours.before.catalog.step}"
        return Judgement(violations=(_of_counters(catalog, message),))
    for name, number in _counted(neighbours.after.catalog).items():
        updates = neighbours.counted.of(name)
        if updates is None:
            continue
        if updates.most >= 0:
            found.num_holds += 1
            continue
        detail = f"counts {-updates.most:g} steps fewer than in step {neighbours.before.catalog.step}"
        location = of_tensor(neighbours.after, number, detail=detail)
        message = f"the optimizer's state of {name} began anew: it {detail}"
        found.violations.append(Violation(name, (location,), message, severity=Severity.NOTE))
    found.num_holds += not found.violations
    return found.judgement()


def _counted(catalog: Catalog) -> Mapping[str, int]:
    """Plain name to a tensor of every parameter for which steps are counted."""
    names = {plain(scalar.tensor) for scalar in catalog.scalars if scalar.name == "optimizer_step" and scalar.tensor}
    found: dict[str, int] = {}
    for role in (Role.FIRST_MOMENT, Role.PARAMETER):
        for name, number in by_role(catalog)[role].items():
            if plain(name) in names:
                found.setdefault(plain(name), number)
    return found


# MOT007: names, shapes and dtypes stay

_COMPARED = (Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.BUFFER)
_STATE = frozenset({Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT})
"""Whether it has to be there is asked of each step by OPT001 and OPT006."""


def tensors_stay(neighbours: Neighbours) -> Judgement:
    """Every tensor of the save before is there, in its shape and dtype; what is new is noted."""
    found = Collected()
    both = (neighbours.before.catalog, neighbours.after.catalog)
    present = all(file.state is FileState.PRESENT for catalog in both for file in catalog.files)
    whole = present and not any(catalog.unseen for catalog in both)
    old, new = by_role(neighbours.before.catalog), by_role(neighbours.after.catalog)
    for role in _COMPARED:
        if not old[role] or not new[role]:
            gone = old[role] and not new[role]
            if gone:
                found.not_applicable[f"no {role.value} is stored in this step"] += len(old[role])
            continue
        comparable = _placeless(neighbours, {**old[role], **new[role]})
        for name in comparable:
            if name in old[role] and name in new[role]:
                _judge_form(neighbours, found, role, name, old[role][name], new[role][name])
            elif role in _STATE:
                continue
            elif not whole:
                found.unknown("a file of one of the two saves is not there or can't be read", name)
            elif name in old[role]:
                found.violations.append(_lost(neighbours, role, name, old[role][name]))
            elif neighbours.history.of(role, name).num_saves:
                found.undone(name)
            else:
                found.violations.append(_added(neighbours, role, name, new[role][name]))
    if not found.num_holds and not found.violations and not found.undetermined:
        found.not_applicable["no role is stored in both saves"] += 1
    return found.judgement()


def _placeless(neighbours: Neighbours, names: Iterable[str]) -> list[str]:
    """Names that mean the same tensor in both saves: a rank's own part does only on the same mesh."""
    same = neighbours.before.catalog.mesh == neighbours.after.catalog.mesh
    return [name for name in names if same or plain(name) == name]


def _judge_form(neighbours: Neighbours, found: Collected, role: Role, name: str, old: int, new: int) -> None:
    one, other = neighbours.before.catalog.tensors[old], neighbours.after.catalog.tensors[new]
    changes = []
    if one.shape != other.shape:
        changes.append(f"shape {list(other.shape)}, {list(one.shape)}")
    if one.dtype != other.dtype:
        changes.append(f"dtype {other.dtype.name}, {one.dtype.name}")
    if not changes:
        found.num_holds += 1
        return
    if not (_is_known(neighbours.before.catalog, old) and _is_known(neighbours.after.catalog, new)):
        # What can't be read may say anything of itself.
        found.unknown("a file of one of the two saves is not there or can't be read", name)
        return
    detail = f"has {' and '.join(changes)} in step {neighbours.before.catalog.step}"
    location = of_tensor(neighbours.after, new, other.num_elements, detail)
    found.violations.append(Violation(name, (location,), f"{name} ({role.value}) {detail}", severity=Severity.WARNING))


def _is_known(catalog: Catalog, number: int) -> bool:
    """Whether a tensor's files are there and could be read."""
    rows = catalog.rows_by_tensor.get(number, ())
    files = set(catalog.pieces.file[rows].tolist()) if len(rows) else ()
    return bool(files) and all(catalog.files[file].state is FileState.PRESENT for file in files)


def _lost(neighbours: Neighbours, role: Role, name: str, number: int) -> Violation:
    tensor, catalog = neighbours.before.catalog.tensors[number], neighbours.after.catalog
    detail = f"was in step {neighbours.before.catalog.step} and is not stored any more"
    location = Location(catalog.step, catalog.path, name, role, tensor.order, detail=detail)
    severity = Severity.NOTE if role is Role.BUFFER else Severity.WARNING
    return Violation(name, (location,), f"{name} ({role.value}) {detail}", severity=severity)


def _added(neighbours: Neighbours, role: Role, name: str, number: int) -> Violation:
    detail = f"was not in step {neighbours.before.catalog.step}"
    location = of_tensor(neighbours.after, number, detail=detail)
    return Violation(name, (location,), f"{name} ({role.value}) {detail}", severity=Severity.NOTE)


# MOT014: learning rates are those of the recorded schedule

_ROUNDING = 1e-6
"""Relative: rates are computed in float64 or, where they are kept as tensors, in float32."""


def rates_follow_the_schedule(neighbours: Neighbours) -> Judgement:
    """No learning rate is beyond the largest of its recorded schedule, and its steps are counted as the run's are."""
    found, catalog = Collected(), neighbours.after.catalog
    judged: set[object] = set()
    for group in catalog.groups:
        rate, peak = group.hyperparameters.get("lr"), _peak(group.hyperparameters)
        key = group.file, group.number
        if key in judged or not isinstance(rate, (int, float)):
            continue
        judged.add(key)
        subject = f"group {group.number}"
        if peak is None:
            found.not_applicable["no schedule with a largest learning rate is recorded"] += 1
        elif rate <= peak * (1 + _ROUNDING):
            found.num_holds += 1
        else:
            message = f"the learning rate of {subject} is {rate:g}, the schedule's largest is {peak:g}"
            location = Location(catalog.step, group.file, coordinate=group.coordinate, detail=message)
            found.violations.append(Violation(subject, (location,), message))
    _judge_forms(neighbours, found)
    _judge_progress(neighbours, found)
    if not judged and not found.num_holds and not found.violations:
        found.not_applicable["no learning rate is recorded"] += 1
    return found.judgement()


def _peak(group: Mapping[str, object]) -> float | None:
    """The largest rate of a schedule that leaves it in the group: OneCycleLR and Megatron do."""
    peak, factor = group.get("max_lr"), group.get("lr_mult", 1.0)
    if not isinstance(peak, (int, float)) or not isinstance(factor, (int, float)):
        return None
    return float(peak) * max(float(factor), 1.0)


def _judge_forms(neighbours: Neighbours, found: Collected) -> None:
    """Where a schedule of known form is recorded and its rate was that of the group until now, it still is."""
    before = {
        (neighbours.before.catalog.within(group.file), group.number): group
        for group in neighbours.before.catalog.groups
    }
    for group in neighbours.after.catalog.groups:
        old = before.get((neighbours.after.catalog.within(group.file), group.number))
        if not group.schedule or old is None:
            continue
        rate, wanted, subject = group.hyperparameters.get("lr"), _scheduled(group), f"group {group.number}"
        if wanted is None or not isinstance(rate, (int, float)):
            found.unknown("the form of its schedule is not recorded", subject)
        elif follows(group):
            found.num_holds += 1
        elif not follows(old):
            found.unknown("its rate was not that of its schedule before: something else sets it, too", subject)
        else:
            step = neighbours.before.catalog.step
            agreed = f"its schedule's {wanted:g}; in step {step} they agreed"
            message = f"the learning rate of {subject} is {rate:g}, {agreed}"
            at = Location(neighbours.after.catalog.step, group.file, coordinate=group.coordinate, detail=message)
            found.violations.append(Violation(subject, (at,), message))


def _scheduled(group: ParameterGroup) -> float | None:
    return scheduled_rate(group.schedule, group.hyperparameters)


def _judge_progress(neighbours: Neighbours, found: Collected) -> None:
    """Megatron's scheduler counts samples: as many a step between two saves as from the beginning to the first.

    Batches that grow make it count more, never less.
    """
    old, new = (_progress(side.catalog) for side in (neighbours.before, neighbours.after))
    steps = neighbours.before.catalog.step, neighbours.after.catalog.step
    for file, count in new.items():
        known = old.get(file)
        if known is None or steps[0] < 1:
            continue
        each, since = known / steps[0], (count - known) / max(steps[1] - steps[0], 1)
        if since >= each * (1 - _ROUNDING):
            found.num_holds += 1
            continue
        message = f"{file}: its scheduler advanced by {since:g} a step since step {steps[0]}, by {each:g} before"
        location = Location(steps[1], _full(neighbours.after.catalog, file), detail=message)
        found.violations.append(Violation(file, (location,), message))


def _progress(catalog: Catalog) -> Mapping[str, float]:
    found: dict[str, float] = defaultdict(float)
    for scalar in catalog.scalars:
        if scalar.name == "scheduler.num_steps":
            found[catalog.within(scalar.file)] = scalar.value
    return found


def _full(catalog: Catalog, file: str) -> str:
    return f"{catalog.path}/{file}" if catalog.path else file


INVARIANTS = (
    Invariant(
        "MOT005", "counter-apart-from-steps", Severity.WARNING,
        statement="Where the optimizer's counter was the number of the step (less steps recorded as skipped), it "
                  "advances by no more than the difference of steps. Undetermined where it advances by less: skipped "
                  "steps are rarely recorded.",
        rationale="Steps were taken twice, or state of a later step was put in: optimizer and step don't belong to "
                  "each other.",
        source="deepspeedai/DeepSpeed#5289",
        example="the optimizer counted 170 steps between step 200 and 300, until then one each",
        misses="Counters that never were the number of the step; steps that were lost, which look as skipped ones do.",
        hint="Find what was done between the two saves: a resume from another step, or two updates in one step.",
        needs=Needs.HEADERS, judge_motion=counters_advance_with_steps,
        likely_causes=(LikelyCause("state of another step was loaded on resume", "deepspeedai/DeepSpeed#5289"),),
    ),
    Invariant(
        "MOT006", "optimizer-began-anew", Severity.WARNING,
        statement="The optimizer counts no fewer steps than in the save before; a note where only some parameters do.",
        rationale="The optimizer was reset: its moments are those of a few steps, and bias correction takes large "
                  "steps as at the beginning of training.",
        source="deepspeedai/DeepSpeed#7786; pytorch/pytorch#43706",
        example="the optimizer began anew: it counts 20 steps, 300 in step 300",
        misses="A reset after which more steps were taken than before it; optimizers that don't count.",
        hint="If it was not meant, resume from the save before with its optimizer state.",
        needs=Needs.HEADERS, judge_motion=the_optimizer_went_on, one_fault=True, goes_first=True,
        likely_causes=(LikelyCause("the run was resumed without its optimizer state", "deepspeedai/DeepSpeed#7786"),),
    ),
    Invariant(
        "MOT007", "tensors-changed", Severity.WARNING,
        statement="Every tensor of the save before is stored, with its shape and dtype. A note where tensors were "
                  "added and where a buffer is gone. Steps that store no optimizer state at all are not compared "
                  "with those that do.",
        rationale="A model does not change while it is trained. A tensor that is gone is filled with random numbers "
                  "by a loader that isn't strict.",
        source="huggingface/transformers#27293; deepspeedai/DeepSpeed#762",
        example="3.mlp.dense_4h_to_h.bias (parameter) was in step 200 and is not stored any more",
        misses="Moments that are gone (OPT001, OPT006); tensors that are gone in the first save; a rank's own parts "
               "where the mesh changed.",
        hint="If layers, adapters or vocabulary were changed on purpose, waive this for the step; else find the "
             "writer that left the tensor out.",
        needs=Needs.HEADERS, judge_motion=tensors_stay, lasting=True,
        likely_causes=(
            LikelyCause("a writer left out what it took for tied or frozen", "huggingface/transformers#27293"),
        ),
    ),
    Invariant(
        "MOT014", "rate-off-schedule", Severity.WARNING,
        statement="No learning rate is above the largest that its group records for the schedule (max_lr); where a "
                  "file holds the state of one of torch's schedules (cosine, warm restarts, OneCycle, linear, "
                  "constant, polynomial, steps, exponential), the rate is what that has at its count, if it was so in "
                  "the save before; and Megatron's scheduler advances by no fewer samples a step than until then.",
        rationale="A schedule that was begun anew, or stepped twice, trains at another rate than was planned.",
        source="deepspeedai/DeepSpeed#5289: schedulers stepped twice on resume",
        example="the learning rate of group 0 is 0.0006, the schedule's largest is 0.0003",
        misses="Schedules of a script's functions (LambdaLR, the Trainer's), those made of several, optax's: their "
               "form is not recorded. Rates that were off before.",
        hint="Compare the schedule's state with the step, and with the configuration that the run was begun with.",
        needs=Needs.HEADERS, judge_motion=rates_follow_the_schedule, one_fault=True,
        likely_causes=(LikelyCause("schedulers were stepped twice on resume", "deepspeedai/DeepSpeed#5289"),),
    ),
)  # fmt: skip
