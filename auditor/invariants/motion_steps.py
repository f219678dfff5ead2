"""MOT: what Adam's own arithmetic says of two saves, element by element. Derivations: docs/motion-bound.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from auditor.invariants import stillness
from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.motion_joints import Asked, asked_of, joints
from auditor.invariants.motion_rates import DOES_NOT_APPLY
from auditor.invariants.neighbours import DOUBTED, Neighbours
from auditor.invariants.related import Collected, of_row
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.joint import JointKind, JointResult
from auditor.model.region import num_between

_FOREIGN = 0.1
"""Share of elements beyond from which a part is of another step or run, and not damaged in places."""
_FEWEST = 64
"""Elements of a part of which a share says something."""
_FEW = 4
THE_STEP = "the step"
_GOES_ON = "it goes on from where it had jumped to in the save before"


_Measured = list[tuple[Asked, Sequence[JointResult]]]


def _measured(neighbours: Neighbours, kind: JointKind, found: Collected, jumps: Iterable[str] = ()) -> _Measured:
    """Of every parameter the joint that fits best, with its results; what has none is noted.

    ``jumps``: ids of invariants; what violates one of them in the save before is measured although it is doubted.
    """
    best: dict[str, tuple[Asked, Sequence[JointResult]]] = {}
    for asked in asked_of(neighbours, kind):
        results = neighbours.joints.get(asked.joint) if asked.joint else None
        jumped = results and any((identifier, asked.name) in neighbours.jumped for identifier in jumps)
        if asked.name in neighbours.doubted and not jumped:
            found.unknown(DOUBTED, asked.name)
        elif asked.reason in DOES_NOT_APPLY:
            found.not_applicable[asked.reason] += 1
        elif asked.joint is None:
            found.unknown(asked.reason, asked.name)
        elif results is None:
            found.unknown(neighbours.why_not_joined or "it could not be read in both saves", asked.name)
        elif asked.name not in best or _num_beyond(results) < _num_beyond(best[asked.name][1]):
            best[asked.name] = asked, results
    if not asked_of(neighbours, kind):
        found.not_applicable["no moments are in both saves"] += 1
    return list(best.values())


def _after_jumps(neighbours: Neighbours, found: Collected, measured: _Measured, identifier: str) -> _Measured:
    """What is left to judge without what jumped in the save before: that came back, or goes on from where it is.

    It came back if about as many elements are beyond the bound once more: few of them in the same place, or so many
    that the part was another's.
    """
    left: _Measured = []
    for asked, results in measured:
        jumped = neighbours.jumped.get((identifier, asked.name), ())
        then = [location for location in jumped if location.role is asked.role]
        doubted = asked.name in neighbours.doubted
        if then and _came_back(neighbours, asked, results, then, doubted=doubted):
            found.undone(asked.name)
        elif doubted:
            found.unknown(_GOES_ON if then else DOUBTED, asked.name)
        else:
            left.append((asked, results))
    return left


def _came_back(
    neighbours: Neighbours, asked: Asked, results: Sequence[JointResult], then: Sequence[Location], *, doubted: bool
) -> bool:  # fmt: skip
    before, now = sum(location.num_elements for location in then), _num_beyond(results)
    if not now or not before <= 2 * now <= 4 * before:
        return False
    if now < _FEWEST:
        places = {_index(neighbours, asked, result.first) for result in results if result.num_beyond}
        return bool(places & {location.first_index for location in then})
    # Where most parameters are far beyond, rates may be larger than is known: a second time is no way back.
    return doubted and _share(results) >= _FOREIGN


def _index(neighbours: Neighbours, asked: Asked, place: int) -> tuple[int, ...]:
    shape = neighbours.after.catalog.tensors[asked.number].shape
    return tuple(int(at) for at in np.unravel_index(place, shape))


def _num_beyond(results: Iterable[JointResult]) -> int:
    return sum(result.num_beyond for result in results)


def _share(results: Sequence[JointResult]) -> float:
    return _num_beyond(results) / max(sum(result.num_compared for result in results), 1)


def _judge(neighbours: Neighbours, kind: JointKind, what: str, identifier: str = "") -> Judgement:
    """A violation for every parameter with elements beyond; a warning where most parameters have many.

    ``identifier``: of an invariant whose violations last.
    """
    found = Collected()
    measured = _measured(neighbours, kind, found, [identifier])
    measured = _after_jumps(neighbours, found, measured, identifier)
    beyond = [(asked, results) for asked, results in measured if _num_beyond(results)]
    other = sum(_share(results) >= _FOREIGN for _, results in beyond)
    doubtful = len(measured) >= _FEW and 2 * other > len(measured)
    found.num_holds += len(measured) - len(beyond)
    for asked, results in beyond:
        violation = _violation(neighbours, asked, results, what)
        mild = doubtful or bool(asked.assumed)
        found.violations.append(replace(violation, severity=Severity.WARNING) if mild else violation)
    return found.judgement()


def _violation(neighbours: Neighbours, asked: Asked, results: Sequence[JointResult], what: str) -> Violation:
    bad = [result for result in results if result.num_beyond]
    worst = max(bad, key=lambda result: result.largest)
    share = f"{_num_beyond(bad)} of {sum(result.num_compared for result in results)} elements"
    times = f", up to {worst.largest:.3g} times what is possible" if np.isfinite(worst.largest) else ""
    since = f"since step {neighbours.before.catalog.step}"
    where = f" in {len(bad)} of its {len(results)} parts" if len(results) > 1 else ""
    message = (
        f"{asked.name} ({asked.role.value.replace('_', ' ')}) {what} {since}: {share}{where}{times}{asked.assumed}"
    )
    return Violation(asked.name, tuple(_location(neighbours, asked, result) for result in bad), message)


def _location(neighbours: Neighbours, asked: Asked, result: JointResult) -> Location:
    shape = neighbours.after.catalog.tensors[asked.number].shape
    first, last = (tuple(int(at) for at in np.unravel_index(place, shape)) for place in (result.first, result.last))
    detail = f"{result.num_beyond} of {result.num_compared} elements, from {list(first)} to {list(last)}"
    at = of_row(neighbours.after, asked.number, result.row, result.num_beyond, detail)
    return replace(at, num_elements_compared=result.num_compared, first_index=first)


def second_moments_decay(neighbours: Neighbours) -> Judgement:
    """No second moment is smaller than its decay since the save before leaves of it."""
    return _judge(neighbours, JointKind.DECAY, "fell by more than it can decay")


def weights_move_within_bounds(neighbours: Neighbours) -> Judgement:
    """No weight moved by more than rates, moments and the number of steps allow."""
    return _judge(neighbours, JointKind.STRIDE, "moved by more than the optimizer can have moved it", "MOT010")


# MOT011: one step apart, all is an equation


def one_step_replays(neighbours: Neighbours) -> Judgement:
    """One step apart, moments and weight are what the one gradient makes of them.

    Another optimizer than its hyperparameters tell fits nowhere: where most parameters don't, nothing is said.
    """
    found = Collected()
    for kind, what in ((JointKind.VARIANCE, "is not what its gradient makes of it"),
                       (JointKind.UPDATE, "is not where its moments lead to")):  # fmt: skip
        measured = _after_jumps(neighbours, found, _measured(neighbours, kind, found, ["MOT011"]), "MOT011")
        strange = [asked for asked, results in measured if _share(results) >= 0.5]
        if measured and 2 * len(strange) > len(measured):
            for asked, _ in measured:
                found.unknown("the step is not that of AdamW by the recorded hyperparameters", asked.name)
            continue
        for asked, results in measured:
            if _num_beyond(results):
                found.violations.append(_violation(neighbours, asked, results, what))
            else:
                found.num_holds += 1
    return found.judgement()


# MOT012: no stretch of a first moment is the save before's

_STRETCH = 16
_DENSE = 0.9


def no_stretch_is_stale(neighbours: Neighbours) -> Judgement:
    """No stretch of a first moment has the bits of the save before while the rest of its part moved on."""
    found, still = Collected(), stillness.of(neighbours).still_rows
    for asked, results in _measured(neighbours, JointKind.REST, found):
        # A part that rests as a whole may have zeros beside: nothing in it moved on.
        moved = [result for result in results if result.row not in still]
        bad = [result for result in moved if _is_stretch(neighbours, asked, result)]
        if bad:
            found.violations.append(_mixed(neighbours, asked, bad))
        else:
            found.num_holds += 1
    return found.judgement()


def _is_stretch(neighbours: Neighbours, asked: Asked, result: JointResult) -> bool:
    """Whether what rests is no whole part, and most of the part from its first to its last element.

    Of the part's own elements: those of a part of every row lie scattered in the tensor.
    """
    if not _STRETCH <= result.num_beyond < result.num_compared:
        return False
    catalog = neighbours.after.catalog
    region, shape = catalog.pieces.region(result.row), catalog.tensors[asked.number].shape
    return result.num_beyond >= _DENSE * num_between(region, shape, result.first, result.last)


def _mixed(neighbours: Neighbours, asked: Asked, bad: Sequence[JointResult]) -> Violation:
    step = neighbours.before.catalog.step
    which = f"{_num_beyond(bad)} elements in one stretch are those of step {step}, the others moved on"
    message = f"{asked.name} ({asked.role.value}) holds values of two steps: {which}"
    return Violation(asked.name, tuple(_location(neighbours, asked, result) for result in bad), message)


# MOT013: what is saved descends from the save before


def files_descend(neighbours: Neighbours) -> Judgement:
    """No file holds second moments or weights that can't have come from those of the save before, all through."""
    found = Collected()
    foreign: dict[int, list[bool]] = defaultdict(list)
    catalog = neighbours.after.catalog
    for kind in (JointKind.DECAY, JointKind.STRIDE):
        for asked, results in _measured(neighbours, kind, found, ("MOT009", "MOT010")):
            for result in results:
                if result.num_compared >= _FEWEST and not asked.assumed:
                    beyond = result.num_beyond >= _FOREIGN * result.num_compared
                    foreign[int(catalog.pieces.file[result.row])].append(beyond)
    bad = {file for file, parts in foreign.items() if len(parts) > 1 and _mostly(parts)}
    before = {subject for identifier, subject in neighbours.jumped if identifier == "MOT013"}
    for file in sorted(foreign):
        again = before & {THE_STEP, catalog.within(catalog.files[file].name)}
        if again and file in bad:
            found.undone(*again)
        elif again:
            found.unknown(_GOES_ON, *again)
        elif file in bad:
            found.violations.append(_foreign(neighbours, file, len(bad) == len(foreign)))
        else:
            found.num_holds += 1
    return found.judgement()


def _mostly(parts: Sequence[bool]) -> bool:
    return sum(parts) >= 0.75 * len(parts)


def _foreign(neighbours: Neighbours, file: int, every: bool) -> Violation:
    catalog, step = neighbours.after.catalog, neighbours.before.catalog.step
    stored = catalog.files[file]
    detail = f"does not descend from step {step}: its moments or weights can't have come from those"
    whole = ", nor does any other file: the step is of another run or branch" if every else ", those in other files do"
    location = Location(catalog.step, stored.name, coordinate=stored.coordinate, detail=detail)
    name = catalog.within(stored.name)
    return Violation(THE_STEP if every else name, (location,), f"{name} {detail}{whole}")


_ADAM = "Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101"
INVARIANTS = (
    Invariant(
        "MOT009", "second-moment-fell", Severity.ERROR,
        statement="In every element v₂ ≥ b2ⁿ·v₁, less rounding and underflow, for n optimizer steps between the "
                  "saves (docs/motion-bound.md). Undetermined where steps or betas are not recorded or the optimizer "
                  "may have begun anew, and where b2ⁿ is below 10⁻⁶.",
        rationale="Squares only add. A second moment below its own decay is of another step, run or parameter, or "
                  "was damaged, and the next update is too large.",
        source=_ADAM,
        example="3.mlp.dense_4h_to_h.weight (second moment) fell by more than it can decay since step 200: 1 of 1024 "
                "elements, up to 64 times what is possible",
        misses="Moments that are too large (MOT008); after thousands of steps, everything.",
        hint="Don't resume from this step. See whether this tensor's state was exchanged, zeroed or reset; if "
             "most are named, whether [optimizer] in auditor.toml states the betas that were used.",
        needs=Needs.WEIGHTS, judge_motion=second_moments_decay, joints=joints, one_fault=True,
        likely_causes=(LikelyCause("state, keyed by position, was put on another parameter",
                                   "facebookresearch/fairscale#380"),),
    ),
    Invariant(
        "MOT010", "weight-moved-too-far", Severity.ERROR,
        statement="No element of a weight (its master where it has one) moved by more than the recorded learning "
                  "rates, betas, both saves' moments and the number of steps allow, for Adam and AdamW "
                  "(docs/motion-bound.md). A warning where the largest rate in between is not recorded, by the form "
                  "of the schedule or as its largest: then that of both saves is taken where logged rates only fell or "
                  "there is no schedule, else ten times it.",
        rationale="Each step of Adam is short whatever the gradient is. What moved further was overwritten: by "
                  "another step or run, by an edit, or by a flipped bit.",
        source=_ADAM,
        example="3.mlp.dense_4h_to_h.weight (master) moved by more than the optimizer can have moved it since step "
                "200: 3 of 1024 elements, up to 2.1e+07 times what is possible",
        misses="Motion within the bound, which is wide after many steps; other optimizers, and LAMB, RAdam, NAdam; "
               "codebooks, by their names: codes that are not used are set anew.",
        hint="If weights were set by hand, or clipped to a range, waive this. Else take the tensor from another save.",
        needs=Needs.WEIGHTS, judge_motion=weights_move_within_bounds, joints=joints, one_fault=True, lasting=True,
        likely_causes=(LikelyCause("a bit flipped in memory or storage", "pytorch/torchtitan#4324"),),
    ),
    Invariant(
        "MOT011", "step-does-not-replay", Severity.ERROR,
        statement="Where two saves are one optimizer step apart, first moments tell the gradient, and second moments "
                  "and weights are what AdamW makes of it, within rounding (docs/motion-bound.md). Undetermined "
                  "where most parameters don't fit: then it is another optimizer.",
        rationale="The optimizer's arithmetic is a checksum of weight and state. Where a replica wrote its part of a "
                  "tensor and had drifted, that part is the one that doesn't fit.",
        source=_ADAM,
        example="3.mlp.dense_4h_to_h.weight (master) is not where its moments lead to since step 200: 512 of 1024 "
                "elements in 1 of its 2 parts, up to 88 times what is possible",
        misses="Saves that are more than one step apart; gradients that are wrong; a replica that drifts by the "
               "optimizer's own arithmetic; moments of few bits.",
        hint="The named parts, by their ranks, are where to look: compare them with their replicas by the hook.",
        needs=Needs.WEIGHTS, judge_motion=one_step_replays, joints=joints, one_fault=True, lasting=True,
        likely_causes=(LikelyCause("replicas drifted, and each wrote a part", "deepspeedai/DeepSpeed#1801"),),
    ),
    Invariant(
        "MOT012", "steps-mixed", Severity.ERROR,
        statement="No stretch of 16 or more elements of a first moment has the bits of the save before while the "
                  "rest of the same stored part changed.",
        rationale="A buffer was copied while it was written: the save holds values of two steps.",
        source="pytorch/pytorch#144657; Lightning-AI/pytorch-lightning#20953",
        example="3.mlp.dense_4h_to_h.weight (first_moment) holds values of two steps: 512 elements in one stretch "
                "are those of step 200, the others moved on",
        misses="Values of a step between the saves; stretches of less than nine tenths; runs without first moments.",
        hint="Don't resume from this step. Make the save wait for the copy, or the step for the save.",
        needs=Needs.WEIGHTS, judge_motion=no_stretch_is_stale, joints=joints, one_fault=True,
        likely_causes=(LikelyCause("an asynchronous save copied a buffer while it changed", "pytorch/pytorch#144657"),),
    ),
    Invariant(
        "MOT013", "not-a-descendant", Severity.ERROR,
        statement="No file holds moments and weights of which three quarters or more of the parts break MOT009 or "
                  "MOT010 in a tenth or more of their elements.",
        rationale="The file is of another run, or another branch of this one: the same names and shapes, and other "
                  "values.",
        source="hiyouga/LlamaFactory#655; " + _ADAM,
        example="rank_1.pt does not descend from step 200: its moments or weights can't have come from those, those "
                "in other files do",
        misses="Files of a run that was seeded alike and differs little; saves far apart, as MOT009 and MOT010.",
        hint="Find where the file is from: a folder that two runs wrote to, or a restore from the wrong one.",
        needs=Needs.WEIGHTS, judge_motion=files_descend, joints=joints, ranks_as="COV", one_fault=True,
        lasting=True,
        likely_causes=(LikelyCause("two runs wrote to one folder", "hiyouga/LlamaFactory#655"),),
    ),
)  # fmt: skip
