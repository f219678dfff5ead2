"""REF: what was made from a checkpoint holds what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.related import Collected, by_role, of_pair, why_unread
from auditor.model.catalog import Catalog, Role
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, LikelyCause, Severity, Violation
from auditor.model.optimizer import Export
from auditor.model.pairing import Pairing, PairKind, PairResult
from auditor.model.run import StepEvidence


def _compared(catalog: Catalog) -> Iterator[tuple[Export, Pairing | None, str]]:
    """Every copy with what it is held against: the weight where that has its dtype, else the master, rounded."""
    roles = by_role(catalog)
    for export in catalog.exports:
        copy = roles[Role.PARAMETER].get(export.tensor)
        sources = [roles[role][export.source] for role in (Role.PARAMETER, Role.MASTER) if export.source in roles[role]]
        if copy is None:
            continue
        if not sources:
            yield export, None, "what it was made from is not stored"
            continue
        what, stored = catalog.tensors[copy], [catalog.tensors[number] for number in sources]
        alike = [
            n for n, one in zip(sources, stored, strict=True) if (one.dtype, one.shape) == (what.dtype, what.shape)
        ]
        wider = [
            n for n, one in zip(sources, stored, strict=True)
            if one.shape == what.shape and one.dtype.kind is Kind.FLOAT and one.dtype.bits > what.dtype.bits
        ]  # fmt: skip
        if alike:
            # An export in full precision is one of the masters, where both have its dtype.
            yield export, Pairing(PairKind.EQUAL, copy, alike[-1]), ""
        elif wider and what.dtype.kind is Kind.FLOAT and what.dtype.bits >= 16:
            yield export, Pairing(PairKind.CAST, copy, wider[-1]), ""
        elif all(one.shape != what.shape for one in stored):
            yield export, None, "it has another shape than what it was made from: MET003 judges that"
        else:
            yield export, None, "its dtype can't be held against that of what it was made from"


def export_pairings(catalog: Catalog) -> list[Pairing]:
    """Copies and what they were made from."""
    return [pairing for _, pairing, _ in _compared(catalog) if pairing is not None]


def exports_are_their_source(evidence: StepEvidence) -> Judgement:
    """Every copy of a parameter in an export holds the parameter's numbers, rounded to its dtype."""
    found = Collected()
    for export, pairing, reason in _compared(evidence.catalog):
        results = evidence.observations.pairs.get(pairing, ()) if pairing else ()
        wrong = [result for result in results if result.num_beyond]
        if pairing is None:
            found.unknown(reason, export.source)
        elif results and len(wrong) == len(results):
            found.violations.append(_violation(evidence, export, pairing, wrong))
        elif not results or not all(result.complete for result in results):
            found.unknown(why_unread(evidence), export.source)
        else:
            found.num_holds += 1
    if not evidence.catalog.exports:
        found.not_applicable["no export lies beside the step's own files"] += 1
    return found.judgement()


def _violation(evidence: StepEvidence, export: Export, pairing: Pairing, wrong: list[PairResult]) -> Violation:
    worst = max(wrong, key=lambda result: result.num_beyond)
    share = f"{worst.num_beyond} of {worst.num_compared} elements"
    against = evidence.catalog.tensors[pairing.right].role.value
    file = evidence.catalog.within(export.file)
    detail = f"{share} are not those of the {against} that {file} was made from"
    location = of_pair(evidence, pairing, worst, detail)
    return Violation(export.source, (location,), f"{file} holds another {export.source}: {share} differ")


INVARIANTS = (
    Invariant(
        "REF001", "export-differs", Severity.ERROR,
        statement="An export that lies beside a step's own files (the 16-bit weights in a Trainer's folder) holds the "
                  "step's weights; where those have another dtype, its masters rounded to nearest, ties to even.",
        rationale="People load the export, training resumes from the rest: the two are not one model.",
        source="deepspeedai/DeepSpeed#1165; huggingface/transformers#28630",
        example="checkpoint-4/model.safetensors holds another model.layers.0.mlp.up_proj.weight: 384 of 384 elements "
                "differ",
        misses="Exports elsewhere; tensors that are wrong in both.",
        hint="Make the export anew from the step's own files.",
        needs=Needs.WEIGHTS, judge_step=exports_are_their_source, pairings=export_pairings, one_fault=True,
        likely_causes=(
            LikelyCause("flat buffers were cut by another order of parameters, or by another order of ranks, than they "
                        "were put together", "deepspeedai/DeepSpeed#1165; deepspeedai/DeepSpeed#5342"),
            LikelyCause("the export is of another step", "deepspeedai/DeepSpeed#1317"),
        ),
    ),
)  # fmt: skip
