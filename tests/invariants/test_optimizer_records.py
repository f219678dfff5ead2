"""OPT008, OPT009: settings that are no numbers, counters that never began; and OPT005 of bias correction."""

import math
import shutil

import numpy as np
import pytest

from auditor.model.finding import Outcome, Severity
from auditor.settings import Level
from tests.invariants.measured import ADAM, Step
from tests.rewriting import DDP, HEAD_WEIGHT, change, only, ranks

torch = pytest.importorskip("torch")


@pytest.fixture
def ddp(tmp_path):
    shutil.copytree(DDP, tmp_path / "run")
    return tmp_path / "run"


# OPT008


@pytest.mark.parametrize("wrong", [{"lr": math.nan}, {"betas": (0.9, math.nan)}, {"eps": math.inf}])
def test_a_setting_that_is_no_number(ddp, wrong):
    change(ranks(ddp), lambda content: content["optimizer"]["param_groups"][0].update(wrong))
    finding = only(ddp)
    assert (finding.id, finding.severity) == ("OPT008", Severity.ERROR)
    assert f"has {next(iter(wrong))} " in finding.message


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": math.inf}, {"lr": 0.0}, {"foreach": None, "name": "nan"}])
def test_settings_that_healthy_runs_have(more):
    assert Step(group={**ADAM, **more}).judge("OPT008").outcome is Outcome.HOLDS


def test_no_settings_are_not_judged():
    assert Step(group=None).judge("OPT008").outcome is Outcome.NOT_APPLICABLE


# OPT009


def set_counter(value):
    return lambda content: content["optimizer"]["state"][HEAD_WEIGHT].update(step=torch.tensor(value))


def test_a_counter_that_never_began(ddp):
    change(ranks(ddp), set_counter(0.0))
    finding = only(ddp, level=Level.FULL)
    assert (finding.id, finding.severity, finding.consequences) == ("OPT009", Severity.ERROR, ("MOT006", "OPT007"))
    assert {location.tensor for location in finding.locations} == {"head.weight"}


def test_a_counter_of_zero_beside_moments_of_zero_is_healthy(ddp):
    """State that was made and not used yet, as some loaders make it."""

    def begin(content):
        state = content["optimizer"]["state"][HEAD_WEIGHT]
        state.update(step=torch.tensor(0.0), exp_avg=state["exp_avg"] * 0, exp_avg_sq=state["exp_avg_sq"] * 0)

    change(ranks(ddp), begin)
    assert only(ddp, level=Level.FULL).severity is Severity.NOTE


def test_counts_of_whole_groups_may_stay_at_zero():
    step = Step(steps_taken=0)
    step.moments("weight", np.ones(8), np.ones(8))
    assert step.judge("OPT009").outcome is Outcome.NOT_APPLICABLE


# OPT005


def test_one_rank_does_not_correct_the_bias(ddp):
    change(ranks(ddp), lambda content: content["optimizer"]["param_groups"][0].update(bias_correction=True))
    change(ranks(ddp, rank=1), lambda content: content["optimizer"]["param_groups"][0].update(bias_correction=False))
    assert only(ddp).id == "OPT005"
