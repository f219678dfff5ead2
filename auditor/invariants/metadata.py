"""MET: what files say about names, shapes, dtypes and sizes agrees."""

from __future__ import annotations

from auditor.invariants.invariant import Invariant
from auditor.model.catalog import LOST, WITHHELD, FileState, ProblemKind, Role, Tensor
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.run import StepEvidence


def _judge(evidence: StepEvidence, *kinds: ProblemKind) -> Judgement:
    catalog = evidence.catalog
    lost = frozenset(file.name for file in catalog.files if file.state in LOST)
    withheld = any(file.state in WITHHELD for file in catalog.files)
    undetermined = []
    # Of a parameter and its moments, which share a name, the parameter.
    by_name: dict[str, Tensor] = {}
    for tensor in catalog.tensors:
        if tensor.role is Role.PARAMETER or tensor.name not in by_name:
            by_name[tensor.name] = tensor
    violations = []
    for problem in catalog.problems:
        if problem.kind not in kinds:
            continue
        if problem.kind is ProblemKind.UNPLACED and withheld:
            # What would place it may be in the file that storage did not give.
            undetermined.append(catalog.within(problem.file))
            continue
        about = by_name.get(problem.tensor)
        location = Location(
            catalog.step, problem.file, problem.tensor, about.role if about else None,
            about.order if about else problem.order, problem.coordinate, detail=problem.message,
        )  # fmt: skip
        explained = lost if problem.kind is ProblemKind.UNPLACED else frozenset()
        subject = f"{catalog.within(problem.file)} {problem.tensor}".strip()
        message = f"{catalog.within(problem.file)} {problem.message}"
        severity = Severity.WARNING if problem.ignored else None
        violations.append(Violation(subject, (location,), message, severity=severity, explained_by=explained))
    bad = {violation.locations[0].file for violation in violations}
    present = [file for file in catalog.files if file.state is FileState.PRESENT and file.name not in bad]
    reason = "storage did not let the file be read that would tell"
    return Judgement(len(present), tuple(violations), {reason: tuple(undetermined)} if undetermined else {})


def ranks_agree(evidence: StepEvidence) -> Judgement:
    """Names, shapes and dtypes are the same on all ranks that must agree on them."""
    return _judge(evidence, ProblemKind.RANKS_DISAGREE)


def metadata_is_consistent(evidence: StepEvidence) -> Judgement:
    """What a file records about sizes, order and mesh fits what it and the others hold.

    A record that loaders don't look at is a warning.
    """
    return _judge(evidence, ProblemKind.METADATA, ProblemKind.UNPLACED)


def shapes_follow_the_configuration(evidence: StepEvidence) -> Judgement:
    """Every stored tensor has the shape that the recorded configuration implies for its name."""
    catalog = evidence.catalog
    if catalog.not_implied is None:
        return Judgement(not_applicable={"the format's own records tell every shape": 1})
    if catalog.not_implied:
        return Judgement(undetermined={catalog.not_implied: ("the model's tensors",)})
    judged = _judge(evidence, ProblemKind.SHAPE)
    num_tensors = sum(tensor.role is Role.PARAMETER for tensor in catalog.tensors)
    return Judgement(num_tensors - len(judged.violations), judged.violations)


INVARIANTS = (
    Invariant(
        "MET001", "ranks-disagree", Severity.ERROR,
        statement="Ranks that hold parts or copies of one model agree on the names of its tensors, their dtypes and "
                  "the shapes of the parts.",
        rationale="One rank ran other code or another configuration, or its file is of another run.",
        source="NVIDIA/Megatron-LM#4378",
        example="layer_03-model_01-model_states.pt holds layernorm.bias as bfloat16[32], expected is bfloat16[64]",
        misses="Disagreement that leaves names, dtypes and shapes equal.",
        hint="Compare the ranks' configuration; restore the odd file if it is of another run.",
        judge_step=ranks_agree,
    ),
    Invariant(
        "MET002", "metadata-contradicts", Severity.ERROR,
        statement="Recorded sizes, orders and meshes fit each other and the stored arrays. A wrong record that no "
                  "loader looks at (total_size in a Hugging Face index) is a warning.",
        rationale="Loaders cut flat buffers by what is recorded; a wrong record moves every later parameter.",
        source="deepspeedai/DeepSpeed#1165",
        example="mp_rank_01_model_states.pt records dp_world_size 4, others 2",
        misses="Records that are wrong in all files alike and fit the stored sizes.",
        hint="Don't convert or resume from this step before the contradiction is understood.",
        judge_step=metadata_is_consistent,
    ),
    Invariant(
        "MET003", "shape-differs-from-config", Severity.ERROR,
        statement="Every stored tensor has the shape that the recorded configuration implies for its name.",
        rationale="Loaders refuse it at best; told to ignore sizes, they put random numbers in its place.",
        source="huggingface/accelerate#2155; huggingface/transformers#27293",
        example="model.safetensors holds model.norm.weight as [2560], config.json implies [5120]",
        misses="Architectures that are not known, quantised weights: undetermined. A configuration that is as wrong.",
        hint="If the shape is a fraction of what is implied, one rank's part was saved: make the export anew.",
        judge_step=shapes_follow_the_configuration,
    ),
)  # fmt: skip
