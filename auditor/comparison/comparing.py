"""The one orchestration of a comparison: both sides step by step, matched, judged, joined over steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from auditor.comparison.beside import Beside, beside
from auditor.comparison.calibration import Reruns
from auditor.comparison.causes import Setting, explanation_of
from auditor.comparison.command import Choices
from auditor.comparison.growing import growing
from auditor.comparison.holding import Holding, Key
from auditor.comparison.judging import Allowed, Bench, Contents
from auditor.comparison.lockstep import Distance
from auditor.comparison.matching import Matching, match, tied_to
from auditor.comparison.one_set import WEIGHTS, is_adapter, one_sets, with_statistics
from auditor.comparison.outcome import PROVED, SUSPECT, Compared, Comparison, Standing, StepComparison
from auditor.comparison.precision import told_of_coarse
from auditor.comparison.proposal import Proposed, propose
from auditor.comparison.records import Recorded, explaining, recorded, recorded_beside, recorded_causes
from auditor.comparison.rounding import counted_steps, model_of
from auditor.comparison.seeing import Views, views_of
from auditor.comparison.shared_causes import ARITHMETIC, shared_causes
from auditor.comparison.siblings import rejoined
from auditor.comparison.side import Progress, Side, open_side
from auditor.comparison.together import CommonFactor, common_factor, following, not_led, with_factor
from auditor.errors import NothingToAuditError
from auditor.model.catalog import Role
from auditor.model.finding import LikelyCause
from auditor.settings import Settings


def compare(
    reference: str, candidate: str, settings: Settings, choices: Choices, *,
    progress: Progress = lambda path, num_bytes: None,
) -> Comparison:  # fmt: skip
    """Hold two runs, steps or ledgers against each other.

    Two single steps are compared whatever their numbers; of runs, the steps that both have.

    Raises:
        NothingToAuditError: a side has no checkpoint, or both have no step in common.
        UsageError: a side has several runs; what was chosen can't be.
        StorageError: a side can't be read.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        sides = [open_side(path, settings, stack, progress) for path in (reference, candidate)]
        steps = steps_of(sides[0], sides[1], settings)
        views = views_of(sides[0], sides[1], steps[0], choices)
        reruns = tuple(open_side(path, settings, stack, progress) for path in choices.calibrate)
        found = Comparison(
            sides[0].location, sides[1].location, exact=choices.exact, resumed=choices.resume, maps=views.notes,
            reruns=tuple(rerun.location for rerun in reruns),
            unrecognised={**sides[0].unrecognised, **sides[1].unrecognised},
            from_ledgers=all(side.is_ledger for side in sides),
            steps_alone=_alone(sides[0], sides[1], settings) if len(steps) > 1 else ((), ()),
        )  # fmt: skip
        calibrated = Reruns(reruns, views.seeing_reference, choices.chosen, stated=bool(choices.compute))
        under_way = _UnderWay(sides[0], sides[1], views, choices, calibrated)
        found.steps = [under_way.step(*at) for at in steps]
    found.refused, found.uncalibrated = calibrated.refused, calibrated.none_left
    found.growing = growing(found.steps)
    found.seconds = time.monotonic() - begun
    return found


def proposals(
    reference: str, candidate: str, settings: Settings, choices: Choices, *,
    progress: Progress = lambda path, num_bytes: None,
) -> list[Proposed]:  # fmt: skip
    """Name rules for what has no counterpart in the first step that is compared.

    Raises:
        NothingToAuditError, UsageError, StorageError: as :func:`compare`.
    """
    with ExitStack() as stack:
        sides = [open_side(path, settings, stack, progress) for path in (reference, candidate)]
        own, theirs = steps_of(sides[0], sides[1], settings)[0]
        views = views_of(sides[0], sides[1], (own, theirs), choices)
        left = views.reference(sides[0].steps[own], False)
        right = views.candidate(sides[1].steps[theirs], False)
        return propose(left, right, match(left, right, choices.chosen))


def steps_of(reference: Side, candidate: Side, settings: Settings) -> list[tuple[int, int]]:
    """Which step of the reference is held against which of the candidate.

    Raises:
        NothingToAuditError: none is.
    """
    own, theirs = _chosen(reference, settings), _chosen(candidate, settings)
    # An export has one step, and often no number: what is asked for is asked of the other side.
    if not own and theirs and len(reference.steps) == 1:
        own = [*reference.steps]
    if not theirs and own and len(candidate.steps) == 1:
        theirs = [*candidate.steps]
    if len(own) == len(theirs) == 1:
        return [(own[0], theirs[0])]
    common = sorted(set(own) & set(theirs))
    if not common:
        raise NothingToAuditError(
            f"{reference.location} and {candidate.location} have no step in common: {_few(own)} against {_few(theirs)}"
        )
    return [(step, step) for step in common]


def _chosen(side: Side, settings: Settings) -> list[int]:
    steps = sorted(side.steps)
    return sorted(settings.steps.choose(steps))


def _few(steps: Sequence[int]) -> str:
    return f"steps {', '.join(map(str, steps[:4]))}{', …' if len(steps) > 4 else ''}" if steps else "no step"


def _alone(reference: Side, candidate: Side, settings: Settings) -> tuple[Sequence[int], Sequence[int]]:
    own, theirs = (set(_chosen(side, settings)) for side in (reference, candidate))
    return sorted(own - theirs), sorted(theirs - own)


@dataclass
class _UnderWay:
    """A comparison under way: what of earlier steps is still wanted."""

    reference: Side
    candidate: Side
    views: Views
    choices: Choices
    reruns: Reruns
    anchor: tuple[int, float] | None = None
    """The newest step in which all weights were equal, and the optimizer steps counted by then."""
    before: Contents = field(default_factory=dict)
    """What the reference held in the step before."""
    allowed: Mapping[Key, Allowed] = field(default_factory=dict)
    """What rounding was allowed of weights by then."""
    otherwise: tuple[int, Sequence[Recorded]] | None = None
    """The first step of which something is recorded otherwise, and what."""

    def step(self, own: int, theirs: int) -> StepComparison:
        sketched = self.reference.is_ledger or self.candidate.is_ledger
        left = self.views.reference(self.reference.steps[own], sketched)
        right = self.views.candidate(self.candidate.steps[theirs], sketched)
        pairing = match(left, right, self.choices.chosen, every_role=self.choices.resume)
        bench, told = self._bench(own, left, right, pairing)
        rows, factor = self._judged(bench, pairing)
        held = beside(left.source, right.source) if self.choices.resume else Beside()
        differing = recorded_beside(recorded(left, right, alone=self.choices.resume), held.differing)
        shared = shared_causes(rows, factor, Setting((left.mesh, right.mesh)))
        causes = self._with_recorded(own, shared.causes, bench, differing, rows)
        self._keep(own, bench, rows)
        rows = self.views.doubted(rows)
        return StepComparison(
            own, theirs, (left.path, right.path), (left.format, right.format), tuple(rows), bench.model.num_steps,
            (*_notes(pairing), *told, *_coarsely(bench, rows)), (*left.failures, *right.failures),
            (*left.changed, *right.changed), causes, shared.gathered, tuple(one.place for one in differing),
            left.num_bytes_read + right.num_bytes_read, tuple(held.unread),
        )  # fmt: skip

    def _bench(self, step: int, left: Holding, right: Holding, pairing: Matching) -> tuple[Bench, tuple[str, ...]]:
        """Both sides with what they are judged by, and what is to be said of reruns."""
        model = model_of(
            left, right, pairing.pairs, self._num_steps(left), compute=self.choices.compute,
            num_terms=self.choices.num_terms, learning_rate=self.choices.learning_rate, trained=self.anchor is not None,
        )  # fmt: skip
        noise, told = self.reruns.thresholds(step, left, right, model)
        return Bench(left, right, model, noise, {**self.before, **self._contents(left)}, self.allowed), told

    def _keep(self, step: int, bench: Bench, rows: Sequence[Compared]) -> None:
        """What later steps want of this one."""
        left = bench.reference
        self.before = {key: f"{text} of step {step}" for key, text in self._contents(left).items()}
        weights = [row for row in rows if row.pair.role in (Role.PARAMETER, Role.MASTER)]
        equal = bool(weights) and all(row.standing in PROVED for row in weights)
        if equal:
            self.anchor = step, counted_steps(left) or float(step)
        self.allowed = {} if equal else {**self.allowed, **bench.allowed}

    def _with_recorded(
        self, step: int, causes: Sequence[LikelyCause], bench: Bench, differing: Sequence[Recorded],
        rows: Sequence[Compared],
    ) -> tuple[LikelyCause, ...]:  # fmt: skip
        """The causes, with what is recorded otherwise, here or first, before what it explains, and after the rest."""
        if differing and self.otherwise is None:
            self.otherwise = step, differing
        if not any(row.standing in SUSPECT for row in rows) or self.otherwise is None:
            return tuple(causes)
        first_step = self.anchor is not None and bench.model.num_steps == 1
        before, after = list[LikelyCause](), list[LikelyCause]()
        for since, found in dict([self.otherwise, (step, differing)]).items():
            sure = explaining(found, rows, first_step=first_step)
            where = "" if since == step else f" in step {since}"
            before += recorded_causes(sure, where)
            after += recorded_causes([one for one in found if one not in sure], where)
        return (*before, *(cause for cause in causes if not (before and cause.text == ARITHMETIC)), *after)

    def _judged(self, bench: Bench, pairing: Matching) -> tuple[list[Compared], CommonFactor | None]:
        """Every pair as it stands, with what it may be; and the factor that all gradients share."""
        left, right = bench.reference, bench.candidate
        setting = Setting((left.mesh, right.mesh))
        rows, measures = list[Compared](), dict[int, tuple[Compared, Distance]]()
        both = [(p.reference, p.candidate) for p in pairing.pairs if None not in (p.reference, p.candidate)]
        matched = {own for own, _ in both}, {theirs for _, theirs in both}
        for pair in pairing.pairs:
            row, apart = bench.judge(pair)
            if apart is not None and row.standing is not Standing.ROUNDING and not row.holds:
                tensors = left.tensors[pair.reference or 0], right.tensors[pair.candidate or 0]
                row = replace(row, cause=explanation_of(pair, tensors, apart, row.threshold, setting))
            if apart is not None:
                measures[len(rows)] = row, replace(apart, profiles=[])
            if self.anchor is not None:
                row = bench.coarse(bench.replayed(row))
            rows.append(_tied(row, left, right, matched))
        factor = common_factor([*measures.values()])
        apart_by_row = {at: apart for at, (_, apart) in measures.items()}
        rows = following(with_factor(_like_twins(rows, left, right), factor, apart_by_row))
        return self._settled(bench, rows, apart_by_row), factor

    def _settled(self, bench: Bench, rows: list[Compared], measures: Mapping[int, Distance]) -> list[Compared]:
        """The rows, as all together let them stand, and with what would have been found where that is asked."""
        same = one_sets(rows, bench.reference, bench.model)
        rows = not_led(rows, bench.narrower, bench.model.num_steps)
        rows = [
            own.settled(row, bench.narrower(row.pair), one_dtype=bench.one_dtype(row.pair))
            if row.amount and (own := same[is_adapter(row)]) else row for row in rows
        ]  # fmt: skip
        rows = with_statistics(rejoined(rows, bench.reference, bench.candidate))
        if self.choices.power:
            rows = [bench.powered(row, measures.get(at), same[is_adapter(row)]) for at, row in enumerate(rows)]
        wrong = {row.pair.name for row in rows if row.pair.role is Role.FIRST_MOMENT and row.standing in SUSPECT}
        # What a gradient did wrong its weight did after it.
        return [
            row if row.standing in SUSPECT and not (row.pair.role in WEIGHTS and row.pair.name in wrong)
            else replace(row, cause=None) for row in rows
        ]  # fmt: skip

    def _num_steps(self, left: Holding) -> float:
        counted = counted_steps(left) or float(left.step)
        if self.anchor is None:
            return max(1.0, counted)
        return max(1.0, counted - self.anchor[1])

    @staticmethod
    def _contents(left: Holding) -> Contents:
        """By content, the tensors of the reference: where one is found elsewhere, it was put in the wrong place."""
        found: Contents = {}
        for number, rows in left.rows.items():
            what = left.tensors[number]
            if what.num_elements > 1 and left.size(number):
                found.setdefault((what.role, what.dtype.name, what.shape, left.lanes(rows[0])), what.name)
        return found


def _tied(row: Compared, left: Holding, right: Holding, matched: tuple[Set[int | None], Set[int | None]]) -> Compared:
    """A tensor that one side lacks, and the other holds under another name as well, is a tied one."""
    own, theirs = row.pair.reference, row.pair.candidate
    if row.standing is Standing.LACKING and own is not None:
        same = tied_to(left, own, matched[0])
    elif row.standing is Standing.EXTRA and theirs is not None:
        same = tied_to(right, theirs, matched[1])
    else:
        return row
    if same is None:
        return row
    return replace(row, standing=Standing.EQUAL, detail=f"tied: the same numbers as {same.name}, stored there alone")


def _like_twins(rows: list[Compared], left: Holding, right: Holding) -> list[Compared]:
    """The rows, with what is stored under two names on both sides judged by the one that has optimizer state."""
    known = {
        row.pair.reference: row
        for row in rows
        if row.amount and row.standing is not Standing.UNDETERMINED and row.pair.role is Role.PARAMETER
    }
    named = {row.pair.name: row for row in known.values()}
    found = []
    for row in rows:
        own, theirs = row.pair.reference, row.pair.candidate
        if row.amount and row.standing is Standing.UNDETERMINED and own is not None and theirs is not None:
            same = tied_to(left, own, known.keys())
            other = named.get(same.name) if same is not None else None
            alike = other is not None and other.pair.candidate is not None
            if alike and other and tied_to(right, theirs, {other.pair.candidate}) is not None:
                detail = f"tied: as {other.pair.name}"
                row = replace(row, standing=other.standing, threshold=other.threshold, detail=detail)
        found.append(row)
    return found


def _coarsely(bench: Bench, rows: Sequence[Compared]) -> tuple[str, ...]:
    count = sum(row.pair.role is Role.FIRST_MOMENT and row.amount is not None for row in rows)
    text = told_of_coarse(bench.candidate, bench.coarse_ones, count)
    return (text,) if text else ()


def _notes(pairing: Matching) -> tuple[str, ...]:
    found = []
    for side, roles in (("reference", pairing.roles_of_reference), ("candidate", pairing.roles_of_candidate)):
        if roles:
            named = ", ".join(role.value.replace("_", " ") for role in roles)
            found.append(f"stored by the {side} alone, not compared: {named}")
    return tuple(found)
