"""MOT001-MOT008, MOT014: what stands still, what moves that shouldn't, what one save records after another."""

import shutil

import numpy as np
import pytest

from auditor.audit import audit
from auditor.model.finding import Outcome, Severity
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.faults import poke, rewrite
from tests.paths import ROOT
from tests.trainings import Adapted, Training, torch

FIXTURES = ROOT / "tests" / "fixtures"
BLOCK = "blocks.1.weight"


def audited(run, **settings):
    (found,) = audit(LocalStore(run), Settings(**settings)).runs
    return found


def ids(run, **settings):
    return [finding.id for finding in audited(run, **settings).findings]


def only(run, **settings):
    (finding,) = audited(run, **settings).findings
    return finding


def reasons(run, identifier):
    return {reason for (name, reason) in audited(run).reasons("undetermined") if name == identifier}


def change(run, step, by):
    """Load one step's files, let ``by`` change what they hold, save them again."""
    for path in (run / f"step_{step}").glob("*.pt"):
        content = torch.load(path, weights_only=False)
        by(content)
        torch.save(content, path)


def content_of(run, step):
    return torch.load(run / f"step_{step}/rank_0.pt", weights_only=False)


def number_of(run, name):
    """The optimizer's number of a parameter."""
    return list(content_of(run, 2)["model"]).index(name)


def brackets(finding):
    return [(i.last_good, i.first_bad, i.last_bad, i.healed) for i in finding.intervals]


def stop(run, name, steps):
    """A weight keeps the values of the save before the first of ``steps``; its moments go on."""
    old = content_of(run, steps[0] - 2)["model"][name]
    for step in steps:
        change(run, step, lambda content: content["model"].update({name: old}))


# MOT001


def test_a_weight_that_stopped_at_a_step(tmp_path):
    run = Training().run(tmp_path)
    stop(run, BLOCK, (8, 10, 12))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT001", Severity.ERROR)
    assert {location.tensor for location in finding.locations} == {BLOCK}
    # What is wrong with a save says nothing of the next: it is held against one that isn't doubted.
    assert [(i.last_good, i.first_bad) for i in finding.intervals] == [(6, 8)]


@pytest.mark.parametrize("every", [1, 4])
def test_what_is_trained_moves_in_each_save(tmp_path, every):
    run = Training(every=every).run(tmp_path)
    assert ids(run) == []
    counts = audited(run).counts("MOT001")
    assert counts[Outcome.HOLDS] == 11 * (12 // every - 1)
    assert counts[Outcome.UNDETERMINED] == 0


def test_parameters_frozen_on_the_way_are_undetermined(tmp_path):
    def freeze(step, model):
        model.blocks[1].requires_grad_(step <= 6)

    run = Training(before=freeze).run(tmp_path)
    assert not [name for name in ids(run) if name.startswith("MOT")]
    assert any("frozen" in reason for reason in reasons(run, "MOT001"))


def test_steps_at_a_rate_of_zero_are_undetermined(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 6))

    run = Training(schedule=schedule).run(tmp_path)
    assert ids(run) == []
    assert "its learning rate is zero" in reasons(run, "MOT001") | reasons(run, "MOT004")


def test_bfloat16_without_masters_may_stand_still(tmp_path):
    run = Training(dtype=torch.bfloat16, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-5)).run(tmp_path)
    assert ids(run) == []
    assert "its steps may have been below rounding" in reasons(run, "MOT001")


# MOT002


def test_a_frozen_base_that_moved(tmp_path):
    run = Training(make=Adapted).run(tmp_path)
    assert ids(run) == []
    assert audited(run).counts("MOT002")[Outcome.HOLDS] == 10
    change(run, 8, lambda content: content["model"]["base.weight"].add_(0.01))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT002", Severity.WARNING)
    assert {location.tensor for location in finding.locations} == {"base.weight"}


def test_averages_move_without_an_optimizer(tmp_path):
    run = Training().run(tmp_path)
    for number, step in enumerate(range(2, 14, 2)):
        # A target network: rests, and is replaced now and then.
        value = torch.full((8, 8), float(number // 3))
        change(run, step, lambda content, value=value: content["model"].update({"target.weight": value}))
    assert not [name for name in ids(run) if name == "MOT002"]


# MOT003


@pytest.mark.parametrize(("folder", "old", "new", "file"), [
    ("dcp/fsdp2_2", "step-2", "step-4", "__1_0.distcp"),
    ("megatron_dist/tp2", "iter_0000002", "iter_0000004", "__0_1.distcp"),
    ("megatron_legacy/tp2", "iter_0000002", "iter_0000004", "mp_rank_01/model_optim_rng.pt"),
])  # fmt: skip
def test_a_file_of_the_save_before(tmp_path, folder, old, new, file):
    shutil.copytree(FIXTURES / folder, tmp_path / "run")
    assert ids(tmp_path / "run") == []
    shutil.copy(tmp_path / "run" / old / file, tmp_path / "run" / new / file)
    finding = only(tmp_path / "run")
    # Where the file records its step, that says it first.
    assert "MOT003" in (finding.id, *finding.consequences)
    assert {location.file for location in finding.locations} == {f"{new}/{file}"}


def test_a_moment_of_the_save_before(tmp_path):
    run = Training().run(tmp_path)
    number = number_of(run, BLOCK)
    old = content_of(run, 6)["optimizer"]["state"][number]["exp_avg"]
    change(run, 8, lambda content: content["optimizer"]["state"][number].update(exp_avg=old))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT003", Severity.ERROR)
    assert {(location.tensor, location.role.value) for location in finding.locations} == {(BLOCK, "first_moment")}
    assert "all of it has the bits of step 6" in finding.message


@pytest.mark.parametrize("kept", ["model", "optimizer"])
def test_a_tensor_of_an_older_save(tmp_path, kept):
    """Not of the last one: it moved since, and every other tensor moved on."""
    run = Training().run(tmp_path)
    number, old = number_of(run, BLOCK), content_of(run, 4)

    def put_back(content):
        if kept == "model":
            content["model"][BLOCK] = old["model"][BLOCK]
        else:
            content["optimizer"]["state"][number]["exp_avg"] = old["optimizer"]["state"][number]["exp_avg"]

    change(run, 10, put_back)
    finding = next(finding for finding in audited(run).findings if "MOT003" in (finding.id, *finding.consequences))
    assert {(location.step, location.tensor) for location in finding.locations} == {(10, BLOCK)}
    assert "has the bits of step 4, in between it moved" in finding.message


# MOT004


def test_a_save_of_the_save_before(tmp_path):
    run = Training().run(tmp_path)
    old = content_of(run, 6)

    def put(content):
        counts = {number: state["step"] for number, state in content["optimizer"]["state"].items()}
        content.update(model=old["model"], optimizer=old["optimizer"])
        for number, count in counts.items():
            content["optimizer"]["state"][number]["step"] = count

    change(run, 8, put)
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT004", Severity.ERROR)
    assert {location.step for location in finding.locations} == {8}


def test_weights_alone_of_the_save_before(tmp_path):
    run = Training(whole_optimizer=False).run(tmp_path)
    assert ids(run) == []
    old = content_of(run, 6)
    change(run, 8, lambda content: content.update(model=old["model"]))
    assert [(f.id, f.severity) for f in audited(run).findings] == [("MOT004", Severity.WARNING)]


def test_weights_alone_of_the_save_before_under_moments_that_moved_on(tmp_path):
    """The recorded rate is no zero, so that the optimizer must have moved them."""
    run = Training().run(tmp_path)
    old = content_of(run, 10)
    change(run, 12, lambda content: content.update(model=old["model"]))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT004", Severity.ERROR)
    assert audited(run).last_good.step == 10
    assert any("MOT004 whole steps" in reason for reason in reasons(run, "MOT001"))


def test_saves_between_which_all_steps_were_skipped(tmp_path):
    assert ids(Training(skip=frozenset({7, 8})).run(tmp_path)) == []


# MOT005, MOT006


def set_counters(value):
    def by(content):
        for state in content["optimizer"]["state"].values():
            state["step"] = torch.tensor(float(value))

    return by


def test_counters_ahead_of_their_steps(tmp_path):
    run = Training().run(tmp_path)
    for step in (8, 10, 12):
        change(run, step, set_counters(step + 5))
    finding = only(run, level=Level.HEADERS)
    assert (finding.id, finding.severity) == ("MOT005", Severity.WARNING)
    assert [(i.last_good, i.first_bad) for i in finding.intervals] == [(6, 8)]


def test_counters_that_never_were_the_step(tmp_path):
    run = Training().run(tmp_path)
    for step in range(2, 14, 2):
        change(run, step, set_counters(3 * step))
    assert ids(run, level=Level.HEADERS) == []


def test_an_optimizer_that_began_anew(tmp_path):
    run = Training().run(tmp_path)
    for step in (8, 10, 12):
        change(run, step, set_counters(step - 6))
    finding = only(run, level=Level.HEADERS)
    assert (finding.id, finding.severity) == ("MOT006", Severity.WARNING)
    assert "it counts 2 steps, 6 in step 6" in finding.message


# MOT007


def test_a_tensor_that_is_lost(tmp_path):
    run = Training(whole_optimizer=False).run(tmp_path)
    for step in (8, 10, 12):
        change(run, step, lambda content: content["model"].pop("blocks.2.bias"))
    finding = only(run, level=Level.HEADERS)
    assert (finding.id, finding.severity) == ("MOT007", Severity.WARNING)
    assert {(location.step, location.tensor) for location in finding.locations} == {(8, "blocks.2.bias")}
    assert brackets(finding) == [(6, 8, 12, None)]
    assert audited(run, level=Level.HEADERS, fail_on=Severity.WARNING).last_good.step == 6


def test_a_tensor_that_one_save_lacks(tmp_path):
    run = Training(whole_optimizer=False).run(tmp_path)
    change(run, 8, lambda content: content["model"].pop("blocks.2.bias"))
    finding = only(run)
    assert (finding.id, brackets(finding)) == ("MOT007", [(6, 8, 8, 10)])


def test_an_adapter_that_is_added_is_a_note(tmp_path):
    run = Training(whole_optimizer=False).run(tmp_path)
    factor = torch.randn(2, 12)
    for step in (8, 10, 12):
        change(run, step, lambda content: content["model"].update({"blocks.2.lora_A": factor}))
    assert [(f.id, f.severity) for f in audited(run).findings] == [("MOT007", Severity.NOTE)]


@pytest.mark.parametrize(("make", "said"), [
    (lambda tensor: tensor[:8].clone(), "has shape [8, 12], [16, 12] in step 6"),
    (lambda tensor: tensor.double(), "has dtype float64, float32 in step 6"),
])  # fmt: skip
def test_another_shape_or_dtype(tmp_path, make, said):
    run = Training(whole_optimizer=False, steps=8).run(tmp_path)
    name = "embedding.weight"
    change(run, 8, lambda content: content["model"].update({name: make(content["model"][name])}))
    finding = only(run, level=Level.HEADERS)
    assert finding.id == "MOT007"
    assert said in finding.message


def test_saves_without_optimizer_between_whole_ones(tmp_path):
    run = Training().run(tmp_path)
    change(run, 8, lambda content: content.pop("optimizer"))
    assert ids(run) == ["INT020"], "no motion is blamed"


# MOT008


@pytest.mark.parametrize(("role", "bit"), [("parameter", 28), ("second_moment", 29)])
def test_a_flipped_bit_of_an_exponent(tmp_path, role, bit):
    run = Training(steps=14).run(tmp_path)
    assert ids(run) == []
    assert audited(run).counts("MOT008")[Outcome.HOLDS]
    # Numbers below 2: the bit is not set in their exponents.
    rewrite(run, 14, BLOCK, role, lambda bits: np.where(np.arange(bits.size) == 5, bits | (1 << bit) | (1 << 30), bits))
    finding = next(finding for finding in audited(run).findings if "MOT008" in (finding.id, *finding.consequences))
    assert {location.tensor for location in finding.locations} == {BLOCK}
    assert {location.step for location in finding.locations} == {14}


@pytest.mark.parametrize(("last", "bracket"), [(16, (10, 12, 16, None)), (12, (10, 12, 12, 14))])
def test_a_weight_that_became_large_is_over_where_it_came_back(tmp_path, last, bracket):
    run = Training(steps=16, whole_optimizer=False).run(tmp_path)
    for step in range(12, last + 1, 2):
        change(run, step, lambda content: content["model"][BLOCK].mul_(1000))
    finding = only(run)
    assert (finding.id, brackets(finding)) == ("MOT008", [bracket])


def test_a_second_moment_that_is_too_large(tmp_path):
    run = Training(steps=14).run(tmp_path)
    for place in ("dp=0", "dp=1"):
        poke(run, 14, BLOCK, "second_moment", place, 3, value=int(np.float32(1e9).view(np.uint32)))
    finding = only(run)
    assert (finding.id, finding.severity) == ("MOT008", Severity.WARNING)
    assert "jumped" in finding.message


# MOT014


def test_a_rate_above_the_schedules_largest(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=12)

    run = Training(schedule=schedule).run(tmp_path)
    assert ids(run) == []
    # Of two files, below the largest and what the schedule has.
    assert audited(run).counts("MOT014")[Outcome.HOLDS] == 2 * 2 * 5
    change(run, 12, lambda content: content["optimizer"]["param_groups"][0].update(lr=6e-3))
    finding = only(run, level=Level.HEADERS)
    assert (finding.id, finding.severity) == ("MOT014", Severity.WARNING)
    assert "is 0.006, the schedule's largest is 0.003" in finding.message


RATES = torch.optim.lr_scheduler
SCHEDULES = {
    "cosine": lambda o: RATES.CosineAnnealingLR(o, T_max=5, eta_min=1e-5),
    "warm restarts": lambda o: RATES.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "linear": lambda o: RATES.LinearLR(o, start_factor=0.1, total_iters=7),
    "constant": lambda o: RATES.ConstantLR(o, factor=0.5, total_iters=7),
    "polynomial": lambda o: RATES.PolynomialLR(o, total_iters=20, power=2.0),
    "steps": lambda o: RATES.StepLR(o, step_size=5, gamma=0.3),
    "exponential": lambda o: RATES.ExponentialLR(o, gamma=0.8),
    "one cycle": lambda o: RATES.OneCycleLR(o, max_lr=3e-3, total_steps=12),
    "one straight cycle": lambda o: RATES.OneCycleLR(o, max_lr=3e-3, total_steps=12, anneal_strategy="linear"),
}
UNRECORDED = {
    "a function": lambda o: RATES.LambdaLR(o, lambda step: 1 / (1 + step)),
    "several": lambda o: RATES.SequentialLR(o, [RATES.ConstantLR(o), RATES.ExponentialLR(o, 0.9)], [4]),
    "three phases": lambda o: RATES.OneCycleLR(o, max_lr=3e-3, total_steps=12, three_phase=True),
    "milestones": lambda o: RATES.MultiStepLR(o, [4, 8]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_of_a_recorded_schedule(name, tmp_path):
    run = Training(schedule=SCHEDULES[name], ranks=1, steps=12).run(tmp_path)
    found = audited(run, level=Level.HEADERS)
    assert (found.findings, found.counts("MOT014")[Outcome.HOLDS] >= 5) == ([], True)
    change(
        run, 10, lambda content: [group.update(lr=group["lr"] * 0.9) for group in content["optimizer"]["param_groups"]]
    )
    finding = only(run, level=Level.HEADERS)
    assert (finding.id, finding.severity) == ("MOT014", Severity.WARNING)
    assert "in step 8 they agreed" in finding.message
    assert [(i.last_good, i.first_bad, i.healed) for i in finding.intervals] == [(8, 10, 12)]


@pytest.mark.parametrize("name", UNRECORDED)
def test_schedules_whose_form_is_not_recorded(name, tmp_path):
    run = Training(schedule=UNRECORDED[name], ranks=1, steps=8).run(tmp_path)
    change(run, 6, lambda content: content["optimizer"]["param_groups"][0].update(lr=1e-9))
    assert "MOT014" not in ids(run, level=Level.HEADERS)


def test_a_rate_that_something_else_sets_too(tmp_path):
    """A warm-up that dampens what the schedule sets."""
    run = Training(schedule=SCHEDULES["cosine"], ranks=1).run(tmp_path)
    for step in (2, 4, 6, 8, 10, 12):
        change(run, step, lambda content: content["optimizer"]["param_groups"][0].update(lr=1e-9))
    assert "MOT014" not in ids(run, level=Level.HEADERS)
    assert "its rate was not that of its schedule before: something else sets it, too" in reasons(run, "MOT014")


# What is judged, and what isn't


def test_a_single_step_has_none_before_it(tmp_path):
    run = Training(steps=2).run(tmp_path)
    judged = audited(run)
    assert all(judged.counts(item.id)[Outcome.HOLDS] == 0 for item in judged.chosen if item.family == "MOT")


@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.SGD(p, lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True), lambda p: torch.optim.RAdam(p, lr=3e-3),
    lambda p: torch.optim.NAdam(p, lr=3e-3), lambda p: torch.optim.Adagrad(p, lr=3e-2),
])  # fmt: skip
def test_other_optimizers_are_healthy(tmp_path, optimizer):
    assert ids(Training(optimizer=optimizer).run(tmp_path)) == []


def test_a_tensor_that_is_renamed_is_lost_and_added(tmp_path):
    run = Training(whole_optimizer=False).run(tmp_path)

    def rename(content):
        content["model"]["blocks.2.offset"] = content["model"].pop("blocks.2.bias")

    for step in (8, 10, 12):
        change(run, step, rename)
    found = audited(run)
    assert {finding.id for finding in found.findings} == {"MOT007"}
    said = {location.tensor: location.step for finding in found.findings for location in finding.locations}
    assert said == {"blocks.2.bias": 8, "blocks.2.offset": 8}
    assert all((i.last_good, i.first_bad) == (6, 8) for finding in found.findings for i in finding.intervals)
