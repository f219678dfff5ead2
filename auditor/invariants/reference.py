"""REF: what was made from a checkpoint holds what the checkpoint holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.related import Collected, by_role, of_pair, why_unread
from auditor.model.catalog import Catalog, Role
from auditor.model.dtype import Kind
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.optimizer import Export
from auditor.model.pairing import Pairing, PairKind, PairResult
from auditor.model.run import StepEvidence

_ROLES = (Role.PARAMETER, Role.MASTER, Role.FIRST_MOMENT, Role.SECOND_MOMENT)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A copy with what it is held against: a tensor of its dtype, else the master, rounded."""

    export: Export
    pairing: Pairing | None = None
    reason: str = ""
    """Why it is held against nothing."""


def _compared(catalog: Catalog) -> Iterator[_Compared]:
    roles = by_role(catalog)
    for export in catalog.exports:
        if not export.tensor:
            yield _Compared(export)
            continue
        for role in _ROLES:
            copy = roles[role].get(export.tensor)
            others = (role, Role.MASTER) if role is Role.PARAMETER else (role,)
            sources = [roles[other][export.source] for other in others if export.source in roles[other]]
            if copy is not None and sources:
                yield _held_against(catalog, export, copy, sources)
            elif copy is not None and role is Role.PARAMETER:
                yield _Compared(export, None, "what it was made from is not stored")


def _held_against(catalog: Catalog, export: Export, copy: int, sources: list[int]) -> _Compared:
    what = catalog.tensors[copy]
    fitting = {n: one.dtype for n in sources if (one := catalog.tensors[n]).shape == what.shape}
    alike = [number for number, dtype in fitting.items() if dtype == what.dtype]
    wider = [n for n, dtype in fitting.items() if dtype.kind is Kind.FLOAT and dtype.bits > what.dtype.bits]
    if alike:
        # An export in full precision is one of the masters, where both have its dtype.
        return _Compared(export, Pairing(PairKind.EQUAL, copy, alike[-1]))
    if wider and what.dtype.kind is Kind.FLOAT and what.dtype.bits >= 16:
        return _Compared(export, Pairing(PairKind.CAST, copy, wider[-1]))
    if not fitting:
        return _Compared(export, None, "it has another shape than what it was made from")
    return _Compared(export, None, "its dtype can't be held against that of what it was made from")


def export_pairings(catalog: Catalog) -> list[Pairing]:
    """Copies and what they were made from."""
    return [one.pairing for one in _compared(catalog) if one.pairing is not None]


def exports_are_their_source(evidence: StepEvidence) -> Judgement:
    """Every copy of a parameter in an export holds the parameter's numbers, rounded to its dtype."""
    found = Collected()
    by_file: dict[str, list[_Compared]] = defaultdict(list)
    for one in _compared(evidence.catalog):
        by_file[one.export.file].append(one)
    for of_file in by_file.values():
        wrong = {at: results for at, one in enumerate(of_file) if (results := _wrong(evidence, one))}
        compared = [one for one in of_file if one.pairing in evidence.observations.pairs]
        foreign = of_file[0].export.doubtful and 2 * len(wrong) > len(compared)
        for at, one in enumerate(of_file):
            _judge(evidence, found, one, wrong.get(at, ()), foreign=foreign)
    if not by_file:
        found.not_applicable["no export lies beside the step's own files"] += 1
    return found.judgement()


def _wrong(evidence: StepEvidence, one: _Compared) -> Sequence[PairResult]:
    """Results of a copy that is equal to no replica of its source."""
    results = evidence.observations.pairs.get(one.pairing, ()) if one.pairing else ()
    return results if results and all(result.num_beyond for result in results) else ()


def _judge(
    evidence: StepEvidence, found: Collected, one: _Compared, wrong: Sequence[PairResult], *, foreign: bool
) -> None:
    name, file = one.export.source, evidence.catalog.within(one.export.file)
    results = evidence.observations.pairs.get(one.pairing, ()) if one.pairing else ()
    if foreign:
        found.unknown("most of the export holds other numbers: it is of another step, it seems", name)
    elif not one.export.tensor:
        tensor = next((one for one in evidence.catalog.tensors if one.name == name), None)
        at = Location(evidence.catalog.step, one.export.file, name, order=tensor.order if tensor else -1,
                      detail="the export lacks it")  # fmt: skip
        found.violations.append(Violation(name, (at,), f"{file} lacks {name}"))
    elif one.pairing is None:
        found.unknown(one.reason, name)
    elif wrong:
        found.violations.append(_violation(evidence, one.export, one.pairing, wrong))
    elif not results or not all(result.complete for result in results):
        found.unknown(why_unread(evidence), name)
    else:
        found.num_holds += 1


def _violation(evidence: StepEvidence, export: Export, pairing: Pairing, wrong: Sequence[PairResult]) -> Violation:
    worst = max(wrong, key=lambda result: result.num_beyond)
    share = f"{worst.num_beyond} of {worst.num_compared} elements"
    source, copy = evidence.catalog.tensors[pairing.right], evidence.catalog.tensors[pairing.left]
    file = evidence.catalog.within(export.file)
    detail = f"{share} are not those of the {source.role.value.replace('_', ' ')} that it was made from"
    location = of_pair(evidence, pairing, worst, detail)
    what = "" if copy.role is Role.PARAMETER else f" ({copy.role.value.replace('_', ' ')})"
    return Violation(
        export.source, (location,), f"{file} holds another {copy.name.partition('@')[0]}{what}: {share} differ"
    )


INVARIANTS = (
    Invariant(
        "REF001", "export-differs", Severity.ERROR,
        statement="An export beside a step's own files (the 16-bit weights in a Trainer's folder, zero_to_fp32's in "
                  "the run's, a universal checkpoint; the ranks' parts beside the tensors that DCP's Hugging Face "
                  "writer put together of them) holds the step's weights; where those have another dtype, its "
                  "masters rounded to nearest, ties to even; and it lacks none.",
        rationale="People load the export, training resumes from the rest: the two are not one model.",
        source="deepspeedai/DeepSpeed#1165; huggingface/transformers#28630",
        example="checkpoint-4/model.safetensors holds another model.layers.0.mlp.up_proj.weight: 384 of 384 elements "
                "differ",
        misses="Exports elsewhere; tensors that are wrong in both. An export in the run's folder says nothing of its "
               "step: it is held against the one that the pointer names, and is undetermined where most differs.",
        hint="Make the export anew from the step's own files.",
        needs=Needs.WEIGHTS, judge_step=exports_are_their_source, pairings=export_pairings, one_fault=True,
        likely_causes=(
            LikelyCause("flat buffers were cut by another order of parameters, or by another order of ranks, than they "
                        "were put together", "deepspeedai/DeepSpeed#1165; deepspeedai/DeepSpeed#5342"),
            LikelyCause("the export is of another step", "deepspeedai/DeepSpeed#1317"),
        ),
    ),
)  # fmt: skip
