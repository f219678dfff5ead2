"""REP: of tensors of which each replica wrote one stripe, the stripes of all replicas look alike.

Where a writer cuts what is replicated into stripes and lets each replica write one (Orbax does by default), no element
is stored twice and replicas can't be compared. What is left is statistics: if replica 3 has been scaling its gradients
differently, its stripes of the second moments are larger than the others', in every tensor.

The sizes of rows differ for honest reasons too, and alike in many tensors: an outlier feature of the residual stream
makes the same rows large in every layer. So tensors are no independent witnesses. Those are taken together whose
stripes lie along one *index range*: dims of one extent that tensors outside the layers have as well (hidden features,
the vocabulary) are one range in all layers, others are one in each layer. Each range ranks the replicas; the ranks must
agree in far more ranges than chance allows: p is the share of random relabellings of replicas, each range by itself,
that agree as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import factorial

import numpy as np
from numpy.typing import NDArray

from auditor.invariants.invariant import Invariant, Needs
from auditor.invariants.related import layer
from auditor.model.catalog import Catalog, Role, Tensor
from auditor.model.finding import Judgement, LikelyCause, Location, Severity, Violation
from auditor.model.mesh import Coordinate
from auditor.model.observation import Observations, Read
from auditor.model.region import FlatRange
from auditor.model.run import StepEvidence

ALPHA = 1e-4
"""p of a violation, for all axes of a step together. Thousands of steps of a run look alike, so few of them are tests
of their own."""
FACTOR = 1.1
"""Smaller ratios of root mean squares are no sign of anything, however consistent."""
_SEED = 9_2
"""Relabellings are drawn from a generator with it, so that a report is the same every time."""
_ENOUGH = 10
"""So many relabellings that agree as well settle that chance does it; no more are drawn then."""
_BATCH = 1 << 20
"""Scores that are relabelled at once."""
_MAX_SCORES = 1 << 15
"""Of replicas times index ranges; of more ranges as many are taken, evenly spread."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Log root mean square of what each replica wrote, in one index range, its mean taken off."""

    tensors: tuple[int, ...]
    logs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Tested:
    """One axis of the mesh."""

    axis: str
    p: float
    odd: int
    """The replica that stands out most."""
    factor: float
    """By which its root mean square differs from the others', the median over ranges."""
    ranges: Sequence[_Range]


def stripes_look_alike(evidence: StepEvidence) -> Judgement:
    """No replica's stripes of the second moments are of another size than the others'."""
    catalog, observations = evidence.catalog, evidence.observations
    striped = list(_striped(catalog))
    if not striped:
        return Judgement(not_applicable={"no second moment is cut into stripes of several replicas": 1})
    if evidence.unread:
        return Judgement(undetermined={evidence.unread: tuple(catalog.tensors[n].name for n, _, _ in striped)})
    violations, num_holds = [], 0
    undetermined: dict[str, tuple[str, ...]] = {}
    axes = sorted({axis for _, along, _ in striped for axis in along})
    for axis in axes:
        ranges = list(_ranges(catalog, observations, axis, striped))
        num_replicas = catalog.mesh.degree(axis)
        ranges = ranges[:: max(1, len(ranges) * num_replicas // _MAX_SCORES)]
        if _smallest_p(len(ranges), num_replicas) > ALPHA / len(axes) / 2:
            told = "1 index range" if len(ranges) == 1 else f"{len(ranges)} index ranges"
            reason = f"{told} along which {num_replicas} replicas wrote stripes: too few to tell anything"
            undetermined[reason] = (*undetermined.get(reason, ()), f"replicas along {axis}")
            continue
        tested = _test(axis, ranges, ALPHA / len(axes))
        if tested.p <= ALPHA / len(axes) and max(tested.factor, 1 / tested.factor) >= FACTOR:
            violations.append(_violation(catalog, tested))
        else:
            num_holds += 1
    return Judgement(num_holds, tuple(violations), undetermined)


def _striped(catalog: Catalog) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Second moments whose stored-once axes several pieces share: number, those axes, and the dim that is cut so."""
    for number, tensor in enumerate(catalog.tensors):
        if tensor.role is not Role.SECOND_MOMENT or not tensor.stored_once or len(catalog.replicas[number]) > 1:
            continue
        rows = catalog.rows_by_tensor.get(number, np.zeros(0, np.int64))
        places = {catalog.pieces.coordinates[at] for at in np.unique(catalog.pieces.coordinate[rows]).tolist()}
        along = tuple(
            axis for axis in tensor.stored_once if len({place.as_dict().get(axis) for place in places} - {None}) > 1
        )
        if along and (dim := _dim_of_stripes(catalog, tensor, rows)) is not None:
            yield number, along, dim


def _dim_of_stripes(catalog: Catalog, tensor: Tensor, rows: NDArray[np.int64]) -> int | None:
    """The dim along which pieces that differ in stored-once axes alone lie behind each other."""
    first: dict[Coordinate, tuple[Coordinate, tuple[int, ...]]] = {}
    sharded = [axis for axis, _ in catalog.mesh.axes if axis not in tensor.stored_once]
    for row in rows.tolist():
        region = catalog.pieces.region(row)
        if isinstance(region, FlatRange):
            return None
        place = catalog.pieces.coordinates[catalog.pieces.coordinate[row]]
        shard, start = place.along(sharded), region.start
        known, begins = first.setdefault(shard, (place, start))
        apart = [dim for dim, (a, b) in enumerate(zip(begins, start, strict=True)) if a != b]
        if known != place and len(apart) == 1:
            return apart[0]
    return None


def _ranges(
    catalog: Catalog, observations: Observations, axis: str, striped: Sequence[tuple[int, tuple[str, ...], int]]
) -> Iterator[_Range]:
    """The index ranges along which all replicas of ``axis`` wrote something that is not zero."""
    shared = {extent for tensor in catalog.tensors for extent in tensor.shape if layer(tensor.name) == tensor.name}
    members: dict[tuple[object, ...], list[tuple[int, NDArray[np.float64]]]] = defaultdict(list)
    for number, along, dim in striped:
        if axis not in along:
            continue
        tensor = catalog.tensors[number]
        extent = tensor.shape[dim]
        logs = _logs(catalog, observations, number, axis)
        if logs is not None:
            own = "" if extent in shared else layer(tensor.name)
            members[extent, own].append((number, logs))
    for found in members.values():
        logs = np.mean([values for _, values in found], axis=0)
        yield _Range(tuple(number for number, _ in found), logs - logs.mean())


def _logs(catalog: Catalog, observations: Observations, number: int, axis: str) -> NDArray[np.float64] | None:
    """Per replica, the mean over shards of the log root mean square of its stripes; None where one has none to show."""
    rows = catalog.rows_by_tensor[number]
    seen = observations.pieces[rows]
    if not (seen["read"] == Read.DONE).all() or (seen["num_nan"] + seen["num_infinite"]).any():
        return None
    sizes = catalog.pieces.num_elements()[rows]
    places = [place.as_dict() for place in catalog.pieces.coordinates]
    index = np.array([places[at].get(axis, -1) for at in catalog.pieces.coordinate[rows].tolist()])
    degree = catalog.mesh.degree(axis)
    squares, counts = np.zeros(degree), np.zeros(degree)
    inside = (index >= 0) & (index < degree)
    np.add.at(squares, index[inside], seen["sum_squares"][inside])
    np.add.at(counts, index[inside], sizes[inside])
    if not (squares > 0).all():
        return None
    logs: NDArray[np.float64] = 0.5 * np.log(squares / counts)
    logs -= logs.mean()
    return logs


def _smallest_p(num_ranges: int, num_replicas: int) -> float:
    """P if all ranges rank the replicas alike; relabelling all ranges alike changes nothing."""
    if num_ranges < 2 or num_replicas < 2:
        return 1.0
    return float(factorial(min(num_replicas, 20))) ** -(num_ranges - 1)


def _test(axis: str, ranges: Sequence[_Range], alpha: float) -> _Tested:
    """The permutation test over the ranges; each counts alike, however much its replicas differ."""
    logs = np.stack([found.logs for found in ranges])
    scale = logs.std(axis=1, keepdims=True)
    scores = np.divide(logs, scale, out=np.zeros_like(logs), where=scale > 0)
    sums = scores.sum(axis=0)
    reached = float((sums**2).sum())
    # Of two nothing says which is wrong: the larger is named.
    odd = int(np.abs(sums).argmax() if len(sums) > 2 else sums.argmax())
    others = np.delete(logs, odd, axis=1).mean(axis=1)
    factor = float(np.exp(np.median(logs[:, odd] - others)))
    beyond = num_draws = 0
    for drawn in _relabelled(scores, int(2 / alpha)):
        beyond += int((drawn >= reached * (1 - 1e-12)).sum())
        num_draws += len(drawn)
        if beyond >= _ENOUGH:
            break
    return _Tested(axis, (1 + beyond) / (1 + num_draws), odd, factor, ranges)


def _relabelled(scores: NDArray[np.float64], num_draws: int) -> Iterator[NDArray[np.float64]]:
    """The statistic under random relabellings of the replicas in every range but the first, batch by batch."""
    draw = np.random.default_rng(_SEED)
    batch = max(1, _BATCH // scores.size)
    for done in range(0, num_draws, batch):
        count = min(batch, num_draws - done)
        sums = np.broadcast_to(scores[0], (count, scores.shape[1])).copy()
        for own in scores[1:]:
            sums += draw.permuted(np.broadcast_to(own, sums.shape), axis=1)
        yield (sums**2).sum(axis=1)


def _violation(catalog: Catalog, tested: _Tested) -> Violation:
    place = Coordinate.of(**{tested.axis: tested.odd})
    numbers = sorted({number for found in tested.ranges for number in found.tensors})
    locations = tuple(
        Location(
            catalog.step, _file_of(catalog, number, tested), catalog.tensors[number].name, Role.SECOND_MOMENT,
            catalog.tensors[number].order, place, detail="its stripes",
        )
        for number in numbers
    )  # fmt: skip
    message = (
        f"the stripes of second moments that {place} wrote are {tested.factor:.2f} times as large as the others' "
        f"(median over {len(tested.ranges)} index ranges; permutation test, p = {tested.p:.1g})"
    )
    majority = catalog.mesh.degree(tested.axis) > 2
    return Violation(f"replicas along {tested.axis}", locations, message, minority=(place,) if majority else ())


def _file_of(catalog: Catalog, number: int, tested: _Tested) -> str:
    """The file in which the odd replica's stripe lies."""
    for row in catalog.rows_by_tensor[number].tolist():
        if catalog.pieces[row].coordinate.as_dict().get(tested.axis) == tested.odd:
            return catalog.file_of(row).name
    return ""


INVARIANTS = (
    Invariant(
        "REP002", "replica-stripes-differ", Severity.WARNING,
        statement="Where each replica wrote one stripe of what is replicated, no replica's stripes of the second "
                  f"moments are of another size than the others': a permutation test over index ranges, p > {ALPHA:g}, "
                  f"or a factor below {FACTOR:g}.",
        rationale="Replicas that are not kept alike train apart, and a checkpoint pieced together from their stripes "
                  "equals none of them. No element is stored twice, so this is the only trace in a single save.",
        source="docs/mosaics.md; Orbax's use_replica_parallel; BLOOM-176B (clipping skipped on some ranks)",
        example="the stripes of second moments that data=3 wrote are 2.91 times as large as the others'",
        misses="Replicas whose weights drifted while their gradients are of the same size; few replicas along few "
               "index ranges (undetermined then). The hook sees every replica before the save.",
        hint="Compare digests of all live replicas before the next save (the hook does); resume from a step before.",
        judge_step=stripes_look_alike, needs=Needs.WEIGHTS, one_fault=True,
        likely_causes=(
            LikelyCause("gradients are not reduced, clipped or scaled alike on all replicas", "BLOOM-176B chronicles"),
        ),
    ),
)  # fmt: skip
