"""AUX: what goes on beside the optimizer has gone as far as the optimizer."""

from __future__ import annotations

from auditor.invariants.invariant import Invariant
from auditor.model.catalog import Catalog
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.run import StepEvidence, num_skipped, optimizer_step

_SLACK = 1
"""A schedule is stepped right before or right after the save, as the writer's version has it."""

_SKIPPED = "skipped_steps"
"""Where an engine records it, its every other step is one of its optimizer's."""
_TRAINERS, _ENGINES = "scheduler_steps", "engine_schedule_steps"
"""Counts of a schedule: a trainer's, whose every step is one of its optimizer's; an engine's, whose optimizer may have
taken a step more, to make its state."""


def _counts(catalog: Catalog) -> frozenset[float]:
    """How many steps the optimizer has taken: what most of its counters say, and the farthest of them.

    Parameters that are not updated in every step lag behind.
    """
    counted = [s.value for s in catalog.scalars if s.name == "optimizer_step" and not s.saturated]
    usual = optimizer_step(catalog)
    return frozenset() if usual is None else frozenset({usual, max(counted)})


def _scaled(catalog: Catalog) -> bool:
    """Whether steps may have been skipped, which move neither optimizer nor schedule."""
    return any(scalar.name == "loss_scale" for scalar in catalog.scalars)


def _off(catalog: Catalog, count: float) -> str:
    """What a schedule's count contradicts; empty where it fits."""
    done = _counts(catalog)
    if done and all(abs(count - one) > _SLACK for one in done):
        return f"the optimizer's state is of step {max(done):g}"
    if count > catalog.step + _SLACK or (not done and not _scaled(catalog) and count < catalog.step - _SLACK):
        return f"the checkpoint's step is {catalog.step}"
    return ""


def schedule_fits_the_step(evidence: StepEvidence) -> Judgement:
    """A schedule that steps with the optimizer has been stepped as often."""
    catalog = evidence.catalog
    found = [scalar for scalar in catalog.scalars if scalar.name in (_TRAINERS, _ENGINES)]
    if not found:
        return Judgement(not_applicable={"no schedule is stored whose pace is known": 1})
    violations = []
    taken = catalog.step - num_skipped(catalog)
    paced = _paced(catalog) and (_by_engine(catalog) or not _scaled(catalog))
    for scalar in found:
        # An optimizer of another step is AUX003's, and no fault of the schedule.
        fits = paced and abs(scalar.value - taken) <= _SLACK
        if not fits and (against := _off(catalog, scalar.value)):
            detail = f"has its schedule at step {scalar.value:g}, {against}"
            at = Location(catalog.step, scalar.file, coordinate=scalar.coordinate, detail=detail)
            name = catalog.within(scalar.file)
            violations.append(Violation(name, (at,), f"{name} {detail}"))
    return Judgement(len(found) - len(violations), tuple(violations))


def _paced(catalog: Catalog) -> bool:
    """Whether every step of the checkpoint's is one of the optimizer's, of which a count is there."""
    names = {scalar.name for scalar in catalog.scalars}
    return bool(_counts(catalog) and names & {_TRAINERS, _SKIPPED})


def _by_engine(catalog: Catalog) -> bool:
    """Whether an engine counts the steps, and those that it skipped."""
    return any(scalar.name == _SKIPPED for scalar in catalog.scalars)


def _in_step(catalog: Catalog) -> bool:
    """Whether the optimizer has taken as many steps, those left out that were skipped."""
    done = _counts(catalog)
    if _by_engine(catalog):
        # More prove nothing: to make its state the engine lets some take one more, and the fused Adam of older versions
        # counted every sub-group of stage 3 (DeepSpeed ops/adam/fused_adam.py).
        return max(done) >= catalog.step - num_skipped(catalog)
    return catalog.step in done or (_scaled(catalog) and max(done) < catalog.step)


def optimizer_fits_the_step(evidence: StepEvidence) -> Judgement:
    """Where every step of the trainer or the engine is one of the optimizer's, the optimizer has taken as many."""
    catalog = evidence.catalog
    if not _paced(catalog):
        return Judgement(not_applicable={"no pace of the optimizer's steps is known": 1})
    if _in_step(catalog):
        return Judgement(1)
    file = next(scalar.file for scalar in catalog.scalars if scalar.name == "optimizer_step")
    detail = f"is the state of optimizer step {max(_counts(catalog)):g}, the checkpoint's step is {catalog.step}"
    at = Location(catalog.step, file, detail=detail)
    # An engine can be told to leave the optimizer's state, and then goes on counting its own steps.
    severity = None if any(scalar.name == _TRAINERS for scalar in catalog.scalars) else Severity.WARNING
    name = catalog.within(file)
    return Judgement(violations=(Violation(name, (at,), f"{name} {detail}", severity=severity),))


_RESUMED = LikelyCause("a resume did not find this file, or could not load it, and began anew",
                       "deepspeedai/DeepSpeed#5289; huggingface/transformers#35782")  # fmt: skip

INVARIANTS = (
    Invariant(
        "AUX002", "schedule-out-of-step", Severity.ERROR,
        statement="A schedule that the trainer steps with the optimizer has been stepped as often as the optimizer, "
                  "give or take one.",
        rationale="The learning rate is that of another time: decayed too early, or warming up anew.",
        source="THUDM/slime#1547; transformers trainer.py steps it after every optimizer step that was not skipped, "
               "DeepSpeed runtime/engine.py (_take_model_step) likewise",
        example="checkpoint-1000/scheduler.pt has its schedule at step 2000, the optimizer's state is of step 1000",
        misses="Schedules of scripts, whose pace is theirs; accelerate's own, stepped once a rank; those that follow a "
               "metric.",
        hint="Set the schedule's count right before resuming, and look at the learning rates that were logged since.",
        judge_step=schedule_fits_the_step,
        likely_causes=(LikelyCause("it is stepped by the trainer and once more by the script", "THUDM/slime#1547"),
                       _RESUMED),
    ),
    Invariant(
        "AUX003", "optimizer-out-of-step", Severity.ERROR,
        statement="Where every step of the trainer or the engine is one step of its optimizer, the optimizer has taken "
                  "as many, an engine's no fewer. With a loss scale it may have skipped some. A warning where an "
                  "engine alone counts.",
        rationale="Moments and bias correction are those of another time than the weights.",
        source="deepspeedai/DeepSpeed#5289; transformers trainer.py: one optimizer step is one global_step; DeepSpeed "
               "runtime/engine.py (_take_model_step)",
        example="checkpoint-1000/optimizer.pt is the state of optimizer step 500, the checkpoint's step is 1000",
        misses="State that was exchanged for another of the same step; of an engine, state of a later one.",
        hint="If the run was resumed from weights alone, this is what that costs; else restore the file.",
        judge_step=optimizer_fits_the_step, likely_causes=(_RESUMED,),
    ),
)  # fmt: skip
