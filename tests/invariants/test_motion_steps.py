"""MOT009-MOT013: what Adam's arithmetic says of two saves, with faults in real trainings and their healthy twins."""

import shutil

import numpy as np
import pytest

from auditor.audit import audit
from auditor.invariants.learning_rates import largest_between
from auditor.model.finding import Outcome, Severity
from auditor.model.waiver import places
from auditor.report.text_report import text_lines
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.faults import catalog_of
from tests.invariants.test_motion import BLOCK, audited, brackets, change, content_of, ids, number_of, only
from tests.trainings import Adapted, Training, torch


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=12)


def warm_restarts(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)


def cyclic(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-3, step_size_up=3, cycle_momentum=False)


def adamw(**more):
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 3e-3, **more})


HEALTHY = {
    "AdamW": Training(),
    "one step apart": Training(every=1),
    "many steps apart": Training(steps=90, every=30),
    "fused": Training(every=1, optimizer=adamw(fused=True)),
    "a loop": Training(every=1, optimizer=adamw(foreach=False)),
    "Adam with decay": Training(every=1, optimizer=lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1)),
    "strong decay": Training(every=1, optimizer=adamw(weight_decay=1.0)),
    "maximize": Training(every=1, optimizer=adamw(maximize=True)),
    "other betas": Training(every=1, optimizer=adamw(betas=(0.8, 0.95))),
    "amsgrad": Training(every=1, optimizer=adamw(amsgrad=True)),
    "clipping": Training(every=1, clip=0.01),
    "OneCycleLR": Training(every=1, schedule=one_cycle),
    "warm restarts": Training(schedule=warm_restarts),
    "warm restarts, one step apart": Training(every=1, schedule=warm_restarts),
    "CyclicLR": Training(every=6, schedule=cyclic),
    "skipped steps": Training(every=1, skip=frozenset({4, 5})),
    "bfloat16": Training(dtype=torch.bfloat16),
    "adapters": Training(make=Adapted),
    "RAdam": Training(every=1, optimizer=lambda p: torch.optim.RAdam(p, lr=3e-3)),
    "NAdam": Training(every=1, optimizer=lambda p: torch.optim.NAdam(p, lr=3e-3)),
    "Adamax": Training(every=1, optimizer=lambda p: torch.optim.Adamax(p, lr=3e-3)),
    "SGD": Training(every=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_are_silent(tmp_path, name):
    assert ids(HEALTHY[name].run(tmp_path)) == []


@pytest.mark.parametrize("name", ["one step apart", "fused", "a loop", "Adam with decay", "strong decay", "maximize",
                                  "other betas", "clipping"])  # fmt: skip
def test_one_step_apart_everything_replays(tmp_path, name):
    counts = audited(HEALTHY[name].run(tmp_path)).counts("MOT011")
    # Moments and weight of 11 parameters, between 12 saves.
    assert counts[Outcome.HOLDS] == 2 * 11 * 11
    assert not counts[Outcome.UNDETERMINED]


@pytest.mark.parametrize("name", ["AdamW", "many steps apart", "OneCycleLR", "warm restarts", "CyclicLR", "clipping"])
def test_what_is_recorded_is_judged(tmp_path, name):
    run = audited(HEALTHY[name].run(tmp_path))
    assert run.counts("MOT009")[Outcome.HOLDS] == run.counts("MOT010")[Outcome.HOLDS] > 0


def reasons(run, identifier):
    found = audited(run)
    return {reason for kind in ("undetermined", "not_applicable") for name, reason in found.reasons(kind)
            if name == identifier}  # fmt: skip


@pytest.mark.parametrize(("name", "identifier", "reason"), [
    ("RAdam", "MOT010", "neither the optimizer's class is recorded nor does its group have all of Adam's settings"),
    ("NAdam", "MOT010", "neither the optimizer's class is recorded nor does its group have all of Adam's settings"),
    ("amsgrad", "MOT011", "amsgrad divides by its own maximum"),
    ("OneCycleLR", "MOT011", "its decay rates follow a schedule"),
    ("bfloat16", "MOT011", "the saves are not one optimizer step apart"),
    ("skipped steps", "MOT009", "no optimizer step was counted for it since the save before"),
])  # fmt: skip
def test_what_can_not_be_judged_says_why(tmp_path, name, identifier, reason):
    assert any(told.startswith(reason) for told in reasons(HEALTHY[name].run(tmp_path), identifier))


def test_weights_of_few_bits_are_not_replayed(tmp_path):
    run = Training(every=1, dtype=torch.bfloat16).run(tmp_path)
    assert ids(run) == []
    assert "its moments are stored in too few bits to be replayed" in reasons(run, "MOT011")


# Faults


def state(run, step, name, by):
    number = number_of(run, name)
    change(run, step, lambda content: by(content["optimizer"]["state"][number]))


def test_a_second_moment_that_fell(tmp_path):
    run = Training().run(tmp_path)
    state(run, 8, BLOCK, lambda kept: kept["exp_avg_sq"][2, 3:7].mul_(0.9))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT009", Severity.ERROR)
    # Those that gradients have raised by more than they were lowered don't show.
    assert {(location.tensor, location.first_index[0]) for location in finding.locations} == {(BLOCK, 2)}
    assert [(i.last_good, i.first_bad) for i in finding.intervals] == [(6, 8)]


def test_one_element_of_a_weight_that_jumped(tmp_path):
    run = Training(schedule=one_cycle).run(tmp_path)
    change(run, 8, lambda content: content["model"][BLOCK][1, 1].add_(0.5))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT010", Severity.ERROR)
    assert {location.first_index for location in finding.locations} == {(1, 1)}
    # The file alone was wrong: the next save is where it would have been.
    assert (brackets(finding), audited(run).last_good.step) == ([(6, 8, 8, 10)], 12)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)


@pytest.mark.parametrize(("schedule", "most"), [(cosine, 2.1e-4), (warm_restarts, 3e-3), (one_cycle, 4e-4)])
def test_the_schedule_tells_the_largest_rate_between_saves(tmp_path, schedule, most):
    run = Training(schedule=schedule).run(tmp_path)
    assert ids(run) == []
    assert audited(run).counts("MOT010")[Outcome.HOLDS]
    catalogs = [catalog_of(run, step) for step in (10, 12)]
    (before, *_), (after, *_) = (catalog.groups for catalog in catalogs)
    assert 0 < largest_between(before, after) <= most
    # Ten times the largest there ever was would allow it.
    change(run, 12, lambda content: content["model"][BLOCK][1, 1].add_(0.1))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT010", Severity.ERROR)


def test_what_jumped_and_stayed_is_not_over(tmp_path):
    run = Training(schedule=one_cycle).run(tmp_path)
    for step in (8, 10, 12):
        change(run, step, lambda content: content["model"][BLOCK][1, 1].add_(0.5))
    finding = only(run)
    assert (finding.id, brackets(finding)) == ("MOT010", [(6, 8, 12, None)])
    assert {location.step for location in finding.locations} == {8}
    assert audited(run).last_good.step == 6
    assert any("not undone by 12" in line for line in text_lines(audit(LocalStore(run))))
    # Who accepts it goes on from the newest.
    known = frozenset(places(finding.id, location) for location in finding.locations)
    assert audited(run, baseline=known).last_good.step == 12


@pytest.mark.parametrize(("last", "bracket"), [(12, (6, 8, 12, None)), (8, (6, 8, 8, 10))])
def test_where_no_largest_rate_is_recorded_it_is_a_warning(tmp_path, last, bracket):
    run = Training().run(tmp_path)
    for step in range(8, last + 1, 2):
        change(run, step, lambda content: content["model"][BLOCK][1, 1].add_(5))
    finding = next(finding for finding in audited(run).findings if finding.id == "MOT010")
    assert (finding.severity, brackets(finding)) == (Severity.WARNING, [bracket])
    assert "if the learning rate was never above 0.003" in finding.message


@pytest.mark.parametrize("optimizer", [adamw(), adamw(fused=True)])
def test_a_stripe_of_a_replica_that_had_drifted(tmp_path, optimizer):
    """Half of a weight was written by a replica whose values had drifted apart by little."""
    run = Training(every=1, optimizer=optimizer).run(tmp_path)
    change(run, 8, lambda content: content["model"][BLOCK][6:].mul_(1.001))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT011", Severity.ERROR)
    (location, *_) = finding.locations
    assert (location.tensor, location.first_index, location.num_elements) == (BLOCK, (6, 0), 72)


def test_a_moment_of_another_gradient(tmp_path):
    run = Training(every=1).run(tmp_path)
    state(run, 8, BLOCK, lambda kept: kept["exp_avg"][0].mul_(1.01))
    found = audited(run).findings
    assert [finding.id for finding in found] == ["MOT011"]
    assert {location.tensor for location in found[0].locations} == {BLOCK}


def test_values_of_two_steps_in_one_moment(tmp_path):
    run = Training().run(tmp_path)
    number = number_of(run, BLOCK)
    old = content_of(run, 6)["optimizer"]["state"][number]["exp_avg"]
    state(run, 8, BLOCK, lambda kept: kept["exp_avg"][5:].copy_(old[5:]))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT012", Severity.ERROR)
    assert "84 elements in one stretch are those of step 6" in finding.message


def test_a_step_of_another_run(tmp_path):
    run = Training(schedule=one_cycle).run(tmp_path / "run")
    other = Training(schedule=one_cycle, seed=7).run(tmp_path / "other")
    shutil.rmtree(run / "step_8")
    shutil.copytree(other / "step_8", run / "step_8")
    found = audited(run).findings
    assert [(finding.id, finding.severity) for finding in found] == [("MOT013", Severity.ERROR)]
    assert "the step is of another run or branch" in found[0].message
    assert {location.step for location in found[0].locations} == {8}
    assert brackets(found[0]) == [(6, 8, 8, 10)]


def test_a_run_that_went_on_from_another(tmp_path):
    run = Training(schedule=one_cycle).run(tmp_path / "run")
    other = Training(schedule=one_cycle, seed=7).run(tmp_path / "other")
    for step in (8, 10, 12):
        shutil.rmtree(run / f"step_{step}")
        shutil.copytree(other / f"step_{step}", run / f"step_{step}")
    (finding,) = audited(run).findings
    assert (finding.id, brackets(finding)) == ("MOT013", [(6, 8, 12, None)])


def test_the_reason_where_saves_are_not_compared(tmp_path):
    run = Training(steps=4).run(tmp_path)
    (found,) = audit(LocalStore(run), Settings(level=Level.REPLICAS)).runs
    assert {reason for name, reason in found.reasons("undetermined") if name == "MOT009"} == {
        "not all weights are read at level replicas"
    }


def test_seeds_one_and_many_steps_apart_give_no_alarm(tmp_path):
    for seed in range(2):
        for every in (1, 3):
            run = Training(seed=seed, every=every, steps=9).run(tmp_path / f"{seed} {every}")
            assert ids(run) == []


def test_numbers_that_are_not_finite_are_left_to_others(tmp_path):
    run = Training().run(tmp_path)
    change(run, 8, lambda content: content["model"][BLOCK][0, 0].fill_(np.nan))
    assert ids(run) == ["NUM001"]


class OtherBetas:
    """A schedule that lets second moments forget faster from the fifth step on: what they were is too large for it."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        if self.count == 8:
            self.optimizer.param_groups[0]["betas"] = (0.95, 0.9025)


class Quantised(torch.nn.Module):
    """Vectors are moved to the nearest of 16 codes; of those that nothing is near to, some are drawn anew."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)
        self.codebook = torch.nn.Embedding(16, 8)

    def forward(self, tokens):
        vectors = self.encoder(torch.nn.functional.one_hot(tokens, 16).float().mean(1))
        codes = self.codebook(torch.cdist(vectors, self.codebook.weight).argmin(1))
        return self.decoder(vectors + codes)


def draw_anew(step, model):
    if step in (6, 9):
        with torch.no_grad():
            model.codebook.weight[step] = torch.randn(8) * 3


def test_codes_that_are_drawn_anew_are_no_fault(tmp_path):
    run = Training(make=Quantised, every=1, before=draw_anew).run(tmp_path)
    assert ids(run) == []
    assert "by its name a codebook, whose unused codes are set anew" in reasons(run, "MOT010")


def test_betas_that_were_changed_are_no_fault(tmp_path):
    run = Training(schedule=OtherBetas).run(tmp_path)
    assert ids(run) == []
    # The same save by itself: nothing tells that betas were others before.
    changed = "its betas were changed since an earlier save"
    assert changed in reasons(run, "OPT011") or "OPT011" not in ids(run / "step_10")
    assert "the saves record different betas" in reasons(run, "MOT009")
