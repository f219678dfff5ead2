"""MOT: between two saves what is trained moves, all of it, and what is frozen doesn't."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from auditor.invariants import stillness
from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.motion_older import parts_of_older_saves
from auditor.invariants.neighbours import Key, Neighbours
from auditor.invariants.optimizer_lost import MOVES_BY_ITSELF
from auditor.invariants.optimizer_state import plain
from auditor.invariants.related import Collected, of_row, of_tensor
from auditor.invariants.stillness import Part, Stillness, file_name
from auditor.model.catalog import Role
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation

_NO_OPTIMIZER = "no optimizer state is stored, which would tell what is trained"
_OF_MORE = "no parameter of its group moved either: MOT003 judges files that are old as a whole, MOT004 whole steps"


def _save(neighbours: Neighbours) -> str:
    return f"step {neighbours.before.catalog.step}"


# MOT001: a trained tensor that stands still alone


def trained_tensors_move(neighbours: Neighbours) -> Judgement:
    """No weight has the bits of the save before where its own moments say that it moved."""
    found, seen = Collected(), stillness.of(neighbours)
    by_file = {part.key[1] for part in seen.weights if part.file in seen.stale_files}
    must = {part.key[1] for part in seen.weights}
    for name, key in seen.carriers.items():
        if name not in seen.whole_still:
            found.unknown(neighbours.why_unseen(name), name)
        elif not seen.whole_still[name] or name in by_file:
            found.num_holds += 1
        elif neighbours.kept.state and plain(name) not in neighbours.kept.state:
            found.not_applicable["it rests, and the optimizer keeps nothing for it: it is frozen"] += 1
        elif name in must:
            found.violations.append(_unmoved(neighbours, key))
        else:
            found.unknown(seen.why_unmoved(name) or _OF_MORE, name)
    for reason, names in neighbours.kept.nameless.items():
        found.undetermined.setdefault(reason, []).extend(dict.fromkeys(names))
    if not seen.carriers and not found.undetermined:
        found.not_applicable[_NO_OPTIMIZER] += 1
    return found.judgement()


def _unmoved(neighbours: Neighbours, key: Key) -> Violation:
    number = neighbours.shared[key][1]
    tensor = neighbours.after.catalog.tensors[number]
    detail = f"has the bits of {_save(neighbours)}, its first moment doesn't"
    location = of_tensor(neighbours.after, number, tensor.num_elements, detail)
    message = f"{tensor.name} ({key[0].value}) did not move since {_save(neighbours)}, though its moments did"
    return Violation(tensor.name, (location,), message)


# MOT002: what is frozen doesn't move

_SEEN_STILL = 2
"""So many times at rest, and never moved, make a tensor frozen."""
_ADAPTER = re.compile(r"lora_[AB]|lora_embedding|ia3_|adapter", re.IGNORECASE)


def frozen_tensors_rest(neighbours: Neighbours) -> Judgement:
    """A parameter that the optimizer doesn't have, and that never moved, does not move now."""
    found = Collected()
    if not neighbours.kept.trained and not neighbours.kept.state:
        return Judgement(not_applicable={_NO_OPTIMIZER: 1})
    only_adapters = bool(neighbours.kept.trained) and all(map(_ADAPTER.search, neighbours.kept.trained))
    tied = {plain(name) for tie in neighbours.after.catalog.ties for name in tie.names}
    for (role, name), (_, number) in neighbours.shared.items():
        tensor = neighbours.after.catalog.tensors[number]
        if role is not Role.PARAMETER or plain(name) in neighbours.trained:
            continue
        if tensor.dtype.kind is not Kind.FLOAT or plain(name) in tied or MOVES_BY_ITSELF.search(name):
            found.not_applicable["tied, or an average or statistic by its name"] += 1
        elif (role, name) not in neighbours.seen:
            found.unknown(neighbours.why_unseen(name), name)
        elif neighbours.kept.nameless:
            found.unknown(next(iter(neighbours.kept.nameless)), name)
        else:
            _judge_frozen(neighbours, found, (role, name), only_adapters)
    return found.judgement()


def _judge_frozen(neighbours: Neighbours, found: Collected, key: Key, only_adapters: bool) -> None:
    (old, new), past = neighbours.seen[key], neighbours.history.of(*key)
    if old.lanes == new.lanes:
        found.num_holds += 1
    elif past.num_moved or not (only_adapters or past.num_still >= _SEEN_STILL):
        found.unknown("the optimizer doesn't have it, but nothing tells that it is frozen", key[1])
    else:
        why = "only adapters are trained" if only_adapters else f"it rested in the {past.num_still + 1} saves before"
        location = of_tensor(neighbours.after, neighbours.shared[key][1], new.num_elements, f"moved, though {why}")
        message = f"{key[1]} moved since {_save(neighbours)}, though the optimizer doesn't have it and {why}"
        found.violations.append(Violation(key[1], (location,), message))


# MOT003: no part of the step is the save before's


def no_part_is_stale(neighbours: Neighbours) -> Judgement:
    """No file, and no part of a first moment, has the bits of the save before while the rest moved on."""
    found, seen = Collected(), stillness.of(neighbours)
    if seen.moments and all(part.still for part in seen.moments) and not any(not part.still for part in seen.weights):
        return Judgement(undetermined={"nothing moved at all: MOT004 speaks of it": ("the step",)})
    for file, (num_parts, num_others) in seen.stale_files.items():
        found.violations.append(_stale_file(neighbours, file, num_parts, num_others))
    parts = [part for part in seen.moments if part.still and part.file not in seen.stale_files]
    by_key: dict[Key, list[Part]] = {}
    for part in parts:
        by_key.setdefault(part.key, []).append(part)
    found.violations += [_stale_parts(neighbours, key, members, seen) for key, members in by_key.items()]
    found.violations += parts_of_older_saves(neighbours)
    files = {part.file for part in (*seen.moments, *seen.weights)}
    found.num_holds += len({file for file in files if file not in seen.stale_files})
    if not files:
        reason = neighbours.why_unseen() if neighbours.trained else _NO_OPTIMIZER
        if neighbours.trained:
            found.unknown(reason if not neighbours.seen else "nothing in it must have moved", "the step")
        else:
            found.not_applicable[reason] += 1
    return found.judgement()


def _stale_file(neighbours: Neighbours, file: int, num_parts: int, num_others: int) -> Violation:
    catalog = neighbours.after.catalog
    name = file_name(catalog, file)
    parts = "what is trained" if num_parts == 1 else f"all {num_parts} trained parts"
    detail = f"{parts} in it ha{'s' if num_parts == 1 else 've'} the bits of {_save(neighbours)}"
    others = "1 other file" if num_others == 1 else f"{num_others} other files"
    stored = catalog.files[file]
    location = Location(catalog.step, stored.name, coordinate=stored.coordinate, detail=detail)
    return Violation(name, (location,), f"{name} is of the save before: {detail}, what is in {others} moved on")


def _stale_parts(neighbours: Neighbours, key: Key, parts: Sequence[Part], seen: Stillness) -> Violation:
    number = neighbours.shared[key][1]
    sizes = neighbours.after.catalog.pieces.num_elements()
    all_parts = [part for part in seen.moments if part.key == key]
    what = "all of it" if len(parts) == len(all_parts) else f"{len(parts)} of its {len(all_parts)} parts"
    detail = f"{what} has the bits of {_save(neighbours)}" if what == "all of it" else (
        f"{what} have the bits of {_save(neighbours)}, the others moved on")  # fmt: skip
    locations = tuple(of_row(neighbours.after, number, part.row, int(sizes[part.row]), detail) for part in parts)
    return Violation(key[1], locations, f"{key[1]} ({key[0].value}) is stale: {detail}")


# MOT004: a step is not the save before under a new number


_USUALLY = 2
"""Times that weights moved before make their rest remarkable where no optimizer step is counted."""


def the_step_is_new(neighbours: Neighbours) -> Judgement:
    """Not everything that is trained has the bits of the save before, if the optimizer took steps since."""
    before, after = neighbours.before.catalog, neighbours.after.catalog
    names = _weights(neighbours)
    if not names:
        unread = any(key[0] in (Role.PARAMETER, Role.MASTER) for key in neighbours.shared)
        reason = "no weights are in both saves under one name"
        return Judgement(undetermined={neighbours.why_unseen(): ("the step",)}) if unread else Judgement(
            not_applicable={reason: 1})  # fmt: skip
    if any(neighbours.seen[key][0].lanes != neighbours.seen[key][1].lanes for key in names):
        return Judgement(1)
    usual = neighbours.counted.usual
    moments = [key for key in neighbours.seen if decays_alive(neighbours, key)]
    moments_rest = bool(moments) and all(_rests(neighbours, moments))
    if usual is not None and usual[1] <= usual[0]:
        return Judgement(not_applicable={"no optimizer step was counted since the save before": 1})
    must = _must_have_moved(neighbours)
    reason = "" if moments_rest else _why_at_rest(neighbours)
    severity = Severity.ERROR if (moments_rest and usual is not None) or (must and not reason) else Severity.WARNING
    trained = must or any(neighbours.history.of(*key).num_moved >= _USUALLY for key in names)
    if severity < Severity.ERROR and not trained:
        reason = reason or "all weights rest, and neither counters nor earlier saves tell that they are trained"
    if reason:
        return Judgement(undetermined={reason: ("the step",)})
    counted = f", though {usual[1] - usual[0]:g} optimizer steps were counted since" if usual else ""
    message = f"step {after.step} holds the weights of step {before.step} bit by bit{counted}"
    location = Location(after.step, after.path, detail=message)
    return Judgement(violations=(Violation("the step", (location,), message, severity=severity),))


def decays_alive(neighbours: Neighbours, key: Key) -> bool:
    """Whether a tensor is a first moment in which enough isn't zero."""
    return stillness.decays(*key) and neighbours.seen[key][1].num_nonzero >= stillness.FEWEST


def _rests(neighbours: Neighbours, keys: Iterable[Key]) -> Iterable[bool]:
    return (neighbours.seen[key][0].lanes == neighbours.seen[key][1].lanes for key in keys)


def _weights(neighbours: Neighbours) -> list[Key]:
    """Masters and parameters that were read in both saves and aren't constant."""
    return [
        key for key, (_, new) in neighbours.seen.items()
        if key[0] in (Role.MASTER, Role.PARAMETER) and new.num_telling >= stillness.FEWEST
        and new.minimum != new.maximum
    ]  # fmt: skip


def _must_have_moved(neighbours: Neighbours) -> bool:
    """Whether moments tell of some weight that a step at the recorded rate moves it."""
    seen = stillness.of(neighbours)
    sure = [name for name in seen.whole_still if not MOVES_BY_ITSELF.search(name)]
    return any(not seen.why_unmoved(name) for name in sure)


def _why_at_rest(neighbours: Neighbours) -> str:
    """Why all weights may rest although steps were taken."""
    seen = stillness.of(neighbours)
    wide = [
        key for key in _weights(neighbours)
        if neighbours.after.catalog.tensors[neighbours.shared[key][1]].dtype.mantissa_bits >= 23
    ]  # fmt: skip
    if not wide:
        return "weights of so few bits may all have moved by less than they resolve"
    if neighbours.trained and seen.carriers:
        reasons = [seen.why_unmoved(name) for name in seen.whole_still]
        return "" if reasons and not all(reasons) else (reasons[0] if reasons else neighbours.why_unseen())
    return ""


INVARIANTS = (
    Invariant(
        "MOT001", "weight-stands-still", Severity.ERROR,
        statement="A trained weight (its fp32 master where it has one) does not have the bits of the save before "
                  "where its first moment changed, others of its group moved, and the last step at the recorded "
                  "learning rate, |m| / sqrt(v), is 16 times above its rounding. Else undetermined, with the reason.",
        rationale="The optimizer's updates don't reach this weight: what is saved, or trained on, is another tensor.",
        source="pytorch/pytorch#43706; NVIDIA/Megatron-LM#1570; deepspeedai/DeepSpeed#762",
        example="3.mlp.dense_4h_to_h.weight (master) did not move since step 200, though its moments did",
        misses="Weights without moments; what was frozen with its moments (legal); steps below rounding, as norms at "
               "1.0 in bfloat16; a weight that moves too little.",
        hint="See whether this tensor was frozen without taking it from the optimizer, or saved from a buffer that "
             "is not the one that is trained. Moments tell that gradients came.",
        needs=Needs.WEIGHTS, judge_motion=trained_tensors_move, one_fault=True,
        likely_causes=(
            LikelyCause("the weight that is saved is a copy, made before training", "NVIDIA/Megatron-LM#1570"),
            LikelyCause("the optimizer holds another tensor than the model", "deepspeedai/DeepSpeed#762"),
        ),
    ),
    Invariant(
        "MOT002", "frozen-tensor-moved", Severity.WARNING,
        statement="A parameter that the optimizer doesn't have, and that rested over three saves or more, does not "
                  "move; where only adapters are trained, no other parameter moves at all. Averages, targets and "
                  "statistics, told by their names, are left out.",
        rationale="Frozen weights that move were overwritten: adapters were merged into them, another model was "
                  "loaded, or a saved buffer was reused.",
        source="arXiv 2106.09685: low-rank adapters leave the base as it is; pytorch/pytorch#115607",
        example="base.layers.3.weight moved since step 200, though the optimizer doesn't have it and it rested in "
                "the 4 saves before",
        misses="What moves in the first saves; runs that store no optimizer; tensors that were never frozen.",
        hint="Compare the tensor with the base model that training began from. If adapters were merged, they are "
             "applied twice at the next load.",
        needs=Needs.WEIGHTS, judge_motion=frozen_tensors_rest, one_fault=True, lasting=True,
        likely_causes=(LikelyCause("adapters were merged into the base and saved", "arXiv 2106.09685"),),
    ),
    Invariant(
        "MOT003", "stale-part", Severity.ERROR,
        statement="No file has the bits of the save before in everything that must have moved while other files "
                  "moved on, and no part of a first moment has while its step was counted or its other parts moved "
                  "on. A moment of 8 or more numbers that aren't zero changes in every step. Nor has a trained weight "
                  "of float32, or a first moment, the bits of one of the last 16 saves while it moved in between and "
                  "most others don't come back.",
        rationale="Values of two steps in one save: a file was left over, or an asynchronous writer copied a buffer "
                  "too early or too late. Every file fits every other, and no checksum tells.",
        source="pytorch/pytorch#144657; NVIDIA-NeMo/Speech#7952; KempnerForge#102",
        example="__1_0.distcp is of the save before: all 34 trained parts in it have the bits of step 200, what is "
                "in 3 other files moved on",
        misses="Parts of tensors that are of older saves, and saves that a ledger alone knows (MOT009, MOT010 may "
               "tell); stale weights in "
               "bfloat16 without masters; files of tensors that are not trained.",
        hint="Don't resume from this step. Restore the file from this step's save if there is another copy.",
        needs=Needs.WEIGHTS, judge_motion=no_part_is_stale, ranks_as="COV", one_fault=True,
        likely_causes=(
            LikelyCause("an asynchronous save copied buffers while they changed", "pytorch/pytorch#144657"),
            LikelyCause("a file of the last save was left in place or restored", "KempnerForge#102"),
        ),
    ),
    Invariant(
        "MOT004", "step-repeats", Severity.ERROR,
        statement="Not all weights have the bits of the save before under a new step. An error where the optimizer "
                  "counted steps since and its moments rest as well, and where its moments moved on and the recorded "
                  "learning rate must have moved a weight; a warning where nothing counts them and weights moved in "
                  "two saves before. Undetermined where the learning rate is zero or not known, or all "
                  "weights have few bits.",
        rationale="The step was saved from a state that is not the trained one: resuming repeats what was trained "
                  "since, and nobody notices.",
        source="hiyouga/LlamaFactory#655; huggingface/transformers#35782",
        example="step 300 holds the weights of step 200 bit by bit, though 100 optimizer steps were counted since",
        misses="A step that repeats one before the last save, or its optimizer state as well (MOT015).",
        hint="Its weights are those of the save before: resume from that one. See whether training went on between the "
             "two; then find the copy that the writer saved.",
        needs=Needs.WEIGHTS, judge_motion=the_step_is_new, goes_first=True,
        likely_causes=(LikelyCause("the writer saved a copy that was made once", "hiyouga/LlamaFactory#655"),),
    ),
)  # fmt: skip
