"""CST: weights are their masters rounded, and float32 is used. Each fault by its name, each with a healthy twin."""

import math
from dataclasses import replace

import numpy as np
import pytest

from auditor.invariants.recorded import lacking
from auditor.invariants.registry import find
from auditor.model.catalog import Role, Tensor
from auditor.model.dtype import BFLOAT16, DTYPES, FLOAT16, FLOAT32
from auditor.model.finding import Outcome, Severity
from auditor.model.mesh import EVERYWHERE
from auditor.model.observation import Read
from auditor.timeline.findings import findings
from tests.invariants.measured import ADAM, FIRST, MASTER, PARAMETER, SECOND, Step, from_bfloat16, to_bfloat16

SHAPE = (64, 96)
NAME = "layers.3.mlp.weight"


def masters(seed=0, shape=SHAPE):
    return (np.random.default_rng(seed).normal(size=shape) * 0.02).astype(np.float32)


def judged(weight, *master, dtype=BFLOAT16, **more):
    step = Step()
    step.add(NAME, PARAMETER, weight, dtype=dtype)
    step.add(NAME, MASTER, *(master or [masters()]), **more)
    return step.judge("CST001")


def only(judgement):
    (violation,) = judgement.violations
    return violation


# CST001: healthy


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_weight_that_is_its_master_rounded(dtype):
    assert judged(masters(), dtype=dtype).outcome is Outcome.HOLDS


def test_torch_rounds_so():
    torch = pytest.importorskip("torch")
    master = torch.from_numpy(masters())
    for dtype, stored in ((torch.bfloat16, BFLOAT16), (torch.float16, FLOAT16)):
        bits = master.to(dtype).view(torch.uint16).numpy()
        assert judged(bits, dtype=stored).outcome is Outcome.HOLDS


def test_a_float32_weight_that_is_its_master():
    assert judged(masters(), dtype=FLOAT32).outcome is Outcome.HOLDS


def test_a_norm_that_has_not_moved_in_bfloat16_for_hundreds_of_steps():
    master = (1 + np.random.default_rng(0).normal(size=4096) * 1e-3).astype(np.float32)
    step = Step(steps_taken=500)
    step.add("norm.weight", PARAMETER, master, dtype=BFLOAT16)
    step.add("norm.weight", MASTER, master)
    step.moments("norm.weight", master * 1e-3, np.square(master) * 1e-6)
    for identifier in ("CST001", "CST002"):
        assert step.judge(identifier).outcome is Outcome.HOLDS


def test_masters_alone_and_weights_alone_are_not_judged():
    step = Step()
    step.add("norm.weight@pp=1", MASTER, masters())
    assert step.judge("CST001").not_applicable == {"no weight is stored beside the master": 1}
    step = Step()
    step.add(NAME, PARAMETER, masters())
    assert step.judge("CST001").not_applicable == {"no masters are stored": 1}


def test_a_weight_stored_once_fits_the_master_of_its_own_stage():
    """Two stages hold a master of one tensor and drifted apart; the weight is the first stage's."""
    mine, other = masters(), masters() + np.float32(0.01)
    assert judged(mine, mine, other).outcome is Outcome.HOLDS


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_quantised_weights_are_not_known(dtype):
    step = Step()
    step.add(NAME, MASTER, masters())
    evidence = step.evidence()
    weight = Tensor(NAME, PARAMETER, DTYPES[dtype], SHAPE, 0)
    catalog = replace(
        evidence.catalog,
        tensors=(*evidence.catalog.tensors, weight),
        replicas=(*evidence.catalog.replicas, (EVERYWHERE,)),
    )
    assert find("CST001").pairings(catalog) == []
    judged = find("CST001").judge_step(replace(evidence, catalog=catalog))
    assert judged.undetermined == {"the weight is quantised, and its scales are not known": (NAME,)}


def test_other_shapes_and_wider_weights_are_not_known():
    assert judged(masters(shape=(8, 8))).undetermined == {"weight and master have different shapes": (NAME,)}
    step = Step()
    step.add(NAME, PARAMETER, masters())
    step.add(NAME, MASTER, masters(), dtype=BFLOAT16)
    assert step.judge("CST001").undetermined == {"the weight is not stored in fewer bits than its master": (NAME,)}


def test_what_was_not_read_is_not_known():
    step = Step()
    step.add(NAME, PARAMETER, masters(), dtype=BFLOAT16)
    step.add(NAME, MASTER, masters(), read=Read.LOST)
    assert step.judge("CST001").outcome is Outcome.UNDETERMINED
    assert step.judge("CST001", unread="headers only").undetermined == {"headers only": (NAME,)}


# CST001: faults


def bumped(num, by=1):
    bits = to_bfloat16(masters())
    bits.reshape(-1)[:: bits.size // num][:num] += np.uint16(by)
    return bits


@pytest.mark.parametrize(
    ("num", "by", "severity", "words"),
    [
        (3, 1, Severity.WARNING, "each off by one ulp: another way of rounding"),
        (6, 1, Severity.WARNING, "each off by one ulp: another way of rounding"),
        (7, 1, Severity.ERROR, "rounded otherwise, or one of the two is of a step nearby"),
        (1, 2, Severity.ERROR, "1 by more than one ulp"),
        (3, 1 << 9, Severity.ERROR, "3 by more than one ulp"),
    ],
)
def test_elements_that_are_off(num, by, severity, words):
    found = only(judged(bumped(num, by)))
    assert found.severity is severity
    assert words in found.message
    location = found.locations[0]
    assert (location.num_elements, location.num_elements_compared) == (num, math.prod(SHAPE))
    assert (location.first_index, location.role, location.reference_file) == ((0, 0), PARAMETER, "model.pt")


def test_a_weight_that_was_truncated_instead_of_rounded():
    found = only(judged((masters().view(np.uint32) >> 16).astype(np.uint16)))
    assert found.severity is Severity.ERROR
    assert "rounded otherwise" in found.message


def test_masters_that_were_made_anew_after_weights_were_loaded():
    found = only(judged(masters(1), masters(2)))
    assert found.severity is Severity.ERROR
    assert "as if the two were of different steps or tensors" in found.message


def test_stale_weights_of_the_step_before():
    moved = masters() + (np.random.default_rng(5).normal(size=SHAPE) * 2e-4).astype(np.float32)
    found = only(judged(masters(), moved))
    assert found.severity is Severity.ERROR
    assert found.locations[0].num_elements > 0.3 * math.prod(SHAPE)


def test_a_float32_weight_that_is_another_number_by_one_ulp():
    weight = masters()
    weight.view(np.uint32)[7, 8] ^= 1
    found = only(judged(weight, dtype=FLOAT32))
    assert (found.severity, found.locations[0].first_index) == (Severity.ERROR, (7, 8))
    assert "is not equal to its master" in found.message


def test_a_nan_in_a_weight_whose_master_is_finite():
    bits = to_bfloat16(masters())
    bits[1, 2] = 0x7FC0
    assert only(judged(bits)).locations[0].first_index == (1, 2)


def test_a_weight_that_fits_no_replica_of_its_master():
    found = only(judged(bumped(20), masters(), masters() + np.float32(0.01)))
    assert found.locations[0].num_elements == 20


# CST001: one fault, one finding

CHOSEN = ("REP001", "CST001", "NUM001")


def found_in(step):
    chosen = [find(name) for name in CHOSEN]
    return [(x.id, x.consequences) for x in findings({1: {x.id: step.judge(x.id) for x in chosen}}, chosen)]


def replicated(weight, other_weight, master, other_master):
    step = Step()
    step.add("norm.weight", PARAMETER, weight, other_weight, dtype=BFLOAT16)
    step.add("norm.weight", MASTER, master, other_master)
    return step


def test_the_master_that_fits_best_counts():
    """Where several masters were compared with one weight, those that differ are REP's."""
    step = Step()
    step.add(NAME, PARAMETER, masters(), dtype=BFLOAT16)
    step.add(NAME, MASTER, masters())
    evidence = step.evidence("CST001")
    ((pairing, (good,)),) = evidence.observations.pairs.items()
    bad = replace(good, num_beyond=9, first=0)
    for results, num_violations in (((bad, good), 0), ((good, bad), 0), ((bad, bad), 1)):
        seen = replace(evidence.observations, pairs={pairing: results})
        judged = find("CST001").judge_step(replace(evidence, observations=seen))
        assert len(judged.violations) == num_violations


def test_drift_of_a_weight_with_its_master_is_no_fault_of_the_cast():
    one, other = masters(1, (64,)), masters(2, (64,))
    assert found_in(replicated(one, other, one, other)) == [("REP001", ())]


@pytest.mark.parametrize("side", ["weight", "master"])
def test_drift_of_one_of_the_two_is_told_once(side):
    one, other = masters(1, (64,)), masters(2, (64,))
    step = replicated(one, other, one, one) if side == "weight" else replicated(one, one, one, other)
    assert found_in(step) == [("REP001", ("CST001",))]


def test_a_nan_in_one_weight_is_one_finding():
    bits = to_bfloat16(masters())
    bits[1, 2] = 0x7FC0
    step = Step()
    step.add(NAME, PARAMETER, bits, dtype=BFLOAT16)
    step.add(NAME, MASTER, masters())
    assert found_in(step) == [("NUM001", ("CST001",))]


# CST002


def rounded(values, dtype=BFLOAT16):
    if dtype == FLOAT16:
        return values.astype(np.float16).astype(np.float32)
    return from_bfloat16(to_bfloat16(values))


def optimizer(master, *, steps=100, group=ADAM, m=None, v=None, role=MASTER, step_number=100):
    gradient = np.random.default_rng(3).normal(size=master.shape).astype(np.float32)
    step = Step(step=step_number, steps_taken=steps, group=group)
    step.add(NAME, role, master)
    step.add(NAME, FIRST, gradient * np.float32(0.1) if m is None else m)
    step.add(NAME, SECOND, np.square(gradient) * np.float32(0.3) if v is None else v)
    return step.judge("CST002")


def test_masters_that_use_their_bits():
    assert optimizer(masters()).outcome is Outcome.HOLDS


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("role", [MASTER, PARAMETER])
def test_masters_that_are_secretly_of_low_precision(dtype, role):
    """Also a float32 weight that has moments and no master is its own master."""
    found = only(optimizer(rounded(masters(), dtype), role=role))
    assert found.message == f"{NAME} ({role.value}) is stored as float32, but every number is one of {dtype.name}"
    assert find("CST002").severity is Severity.WARNING


def test_infinity_in_a_low_precision_master_does_not_make_it_hold():
    master = rounded(masters())
    master[0, 0] = math.inf
    assert optimizer(master).undetermined == {"its steps may have been below rounding": (NAME,)}


def test_a_second_moment_that_is_secretly_of_low_precision():
    v = rounded(np.square(masters(4)))
    assert only(optimizer(masters(), v=v)).locations[0].role is SECOND


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": 7}, "fewer than 8 optimizer steps were taken"),
        ({"steps": None, "step_number": 1}, "fewer than 8 optimizer steps were taken"),
        ({"group": {**ADAM, "initial_lr": 1e-3}},
         "the learning rate follows a schedule, which may have begun with steps at zero"),
        ({"group": {**ADAM, "lr": 0.0}}, "its learning rate is zero"),
        ({"group": {**ADAM, "lr": 1e-12}}, "its steps may have been below rounding"),
        ({"group": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}},
         "lr is not recorded; auditor.toml can state under [optimizer]: lr = … (or max_lr, a schedule's largest)"),
        ({"group": None}, lacking(())),
        ({"m": np.full(SHAPE, 1e-18, np.float32), "v": np.full(SHAPE, 1e-36, np.float32)},
         "its steps may have been below rounding"),
    ],
    ids=["first steps", "no counter", "scheduled", "rate 0", "tiny rate", "no rate", "no group", "dead gradients"],
)  # fmt: skip
def test_masters_that_may_be_what_they_were_made_of(change, reason):
    found = optimizer(rounded(masters()), **change)
    assert not found.violations
    assert set(found.undetermined) == {reason}


def test_a_schedule_has_moved_a_master_in_the_end():
    assert only(optimizer(rounded(masters()), steps=1000, group={**ADAM, "initial_lr": 1e-3}))


def test_the_largest_second_moment_of_amsgrad_counts():
    """After one step of huge gradients the others move nothing."""
    gradient = np.random.default_rng(3).normal(size=SHAPE).astype(np.float32) * np.float32(1e-4)
    for with_largest in (True, False):
        step = Step(steps_taken=100, group={**ADAM, "amsgrad": True})
        step.add(NAME, MASTER, rounded(masters()))
        step.moments(NAME, gradient * np.float32(0.1), np.square(gradient))
        if with_largest:
            step.add(f"{NAME}.max_exp_avg_sq", Role.MOMENT, np.square(gradient * np.float32(1e8)))
        assert bool(step.judge("CST002").violations) is not with_largest


def test_rectified_adam_does_not_move_masters_by_tiny_gradients_at_first():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.from_numpy(rounded(masters())))
    optimizer_ = torch.optim.RAdam([weight], lr=1e-5)
    for taken in range(1, 10):
        weight.grad = torch.randn(SHAPE) * 1e-8
        optimizer_.step()
        step = Step(step=taken, steps_taken=taken, group={**ADAM, "lr": 1e-5})
        step.add(NAME, PARAMETER, weight.detach().numpy().copy())
        step.moments(NAME, *(optimizer_.state[weight][key].numpy() for key in ("exp_avg", "exp_avg_sq")))
        assert not step.judge("CST002").violations, taken


def test_a_first_step_at_a_rate_of_zero_by_torch_is_silent():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.from_numpy(rounded(masters())))
    optimizer_ = torch.optim.AdamW([weight], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer_, lambda step: min(step / 10, 1))
    judged_after = {}
    for taken in (1, 2, 3):
        weight.grad = torch.randn(SHAPE)
        optimizer_.step()
        schedule.step()
        state, group = optimizer_.state[weight], optimizer_.param_groups[0]
        step = Step(step=taken, steps_taken=taken, group={**ADAM, "lr": group["lr"], "betas": group["betas"]})
        step.add(NAME, PARAMETER, weight.detach().numpy().copy())
        step.moments(NAME, state["exp_avg"].numpy(), state["exp_avg_sq"].numpy())
        judged_after[taken] = step.judge("CST002").outcome
    assert judged_after == {1: Outcome.UNDETERMINED, 2: Outcome.HOLDS, 3: Outcome.HOLDS}


def test_small_tensors_and_constants_say_nothing():
    for master in (rounded(masters(shape=(20, 20))), np.ones(SHAPE, np.float32), np.zeros(SHAPE, np.float32)):
        found = optimizer(master)
        assert not found.violations
        assert sum(found.not_applicable.values()) == (2 if master.size < 1024 else 1)


def test_weights_without_moments_are_not_judged():
    step = Step()
    step.add(NAME, PARAMETER, rounded(masters()))
    assert step.judge("CST002").outcome is Outcome.NOT_APPLICABLE


def test_masters_in_bfloat16_say_so_themselves():
    step = Step()
    step.add(NAME, MASTER, masters(), dtype=BFLOAT16)
    step.moments(NAME, masters(1), np.square(masters(1)), dtype=BFLOAT16)
    assert step.judge("CST002").violations == ()
