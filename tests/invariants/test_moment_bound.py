"""The bound on a first moment by its second: by exact arithmetic, by simulation, and on torch's own optimizers."""

import math
from fractions import Fraction

import numpy as np
import pytest

from auditor.invariants.moment_bound import MOST_SLACK, Bound, moment_bound
from auditor.invariants.recorded import Betas, betas, num_steps
from auditor.model.dtype import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64
from auditor.model.optimizer import ParameterGroup
from tests.invariants.measured import Step

USUAL = Betas(0.9, 0.9, 0.999)
RATES = [(0.9, 0.999), (0.9, 0.95), (0.95, 0.98), (0.8, 0.99), (0.5, 0.9), (0.0, 0.99), (0.9, 0.9999), (0.99, 0.999)]


def fixed(beta1, beta2):
    return Betas(beta1, beta1, beta2)


def worst_gradients(first_rates, second_rates):
    """Gradients for which m is as large as v allows: proportional to weight in m over weight in v (Cauchy-Schwarz)."""
    weights = np.array([_weights(first_rates), _weights(second_rates)])
    return weights[0] / weights[1]


def _weights(rates):
    """What each step's input counts for in an average at the end."""
    kept = np.concatenate([np.cumprod(rates[::-1])[::-1][1:], [1.0]])
    return (1 - np.asarray(rates)) * kept


# In exact arithmetic


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("num", [1, 2, 7, 40])
def test_the_worst_gradients_reach_the_exact_bound_and_others_do_not(rates, num):
    first, second = (Fraction(str(rate)) for rate in rates)
    kept = [((1 - first) * first**k, (1 - second) * second**k) for k in range(num)]
    bound = moment_bound(fixed(*rates), FLOAT64, FLOAT64, num)
    for bend in (0, Fraction(1, 3)):
        gradients = [a / b + bend * (-1) ** k for k, (a, b) in enumerate(kept)] if second and first else [1] * num
        m = sum(a * g for (a, _), g in zip(kept, gradients, strict=True))
        v = sum(b * g * g for (_, b), g in zip(kept, gradients, strict=True))
        ratio = float(abs(m)) / math.sqrt(v)
        assert ratio <= bound.exact * (1 + 1e-12)
        if not bend and first:
            assert ratio == pytest.approx(bound.exact, rel=1e-9)


def test_known_limits():
    assert moment_bound(USUAL, FLOAT32, FLOAT32, None).exact == pytest.approx(7.2703, abs=1e-4)
    closed = 0.1 / math.sqrt(0.001 * (1 - 0.81 / 0.999))
    assert moment_bound(USUAL, FLOAT32, FLOAT32, None).exact == pytest.approx(closed, rel=1e-12)
    assert moment_bound(USUAL, FLOAT32, FLOAT32, 1).exact == pytest.approx(0.1 / math.sqrt(0.001))


def test_the_bound_grows_with_the_steps_towards_its_limit():
    limits = [moment_bound(USUAL, FLOAT32, FLOAT32, n).limit for n in (1, 2, 5, 20, 100, 10_000, 1e9, None)]
    assert limits == sorted(limits)
    assert limits[-3:] == pytest.approx([limits[-1]] * 3, rel=1e-9)


def test_a_range_of_rates_is_judged_by_its_worst_order():
    ranged = moment_bound(Betas(0.85, 0.95, 0.999), FLOAT32, FLOAT32, None)
    ends = [moment_bound(fixed(rate, 0.999), FLOAT32, FLOAT32, None).exact for rate in (0.85, 0.95)]
    assert ranged.exact == pytest.approx(max(ends), rel=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(50):
        first = rng.choice([0.85, 0.9, 0.95], 120)
        gradients = worst_gradients(first, np.full(120, 0.999))
        ratio = np.dot(_weights(first), gradients) / math.sqrt(np.dot(_weights(np.full(120, 0.999)), gradients**2))
        assert ratio <= ranged.exact


@pytest.mark.parametrize(
    ("rates", "dtype", "reason"),
    [
        (fixed(0.9, 0.81), FLOAT32, "beta1"),
        (fixed(0.95, 0.9), FLOAT32, "beta1"),
        (Betas(0.8, 0.96, 0.9), FLOAT32, "beta1"),
        (fixed(0.99, 0.999), BFLOAT16, "rounding"),
        (fixed(0.95, 0.95), BFLOAT16, "rounding"),
        (USUAL, DTYPES["float8_e4m3fn"], "quantised"),
        (USUAL, DTYPES["uint8"], "quantised"),
    ],
)
def test_where_there_is_no_bound_it_says_why(rates, dtype, reason):
    assert reason in moment_bound(rates, dtype, dtype, None)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, BFLOAT16, FLOAT16])
def test_slack_is_small_in_float32_and_never_beyond_what_is_said(rates, dtype):
    bound = moment_bound(fixed(*rates), dtype, dtype, None)
    if isinstance(bound, Bound):
        slack = bound.limit / bound.exact - 1
        assert 0 < slack <= (4e-4 if dtype.bits >= 32 else MOST_SLACK)
    else:
        assert dtype == BFLOAT16


def test_the_coarser_of_two_dtypes_counts():
    mixed = moment_bound(USUAL, BFLOAT16, FLOAT32, None)
    assert mixed == moment_bound(USUAL, FLOAT32, BFLOAT16, None) == moment_bound(USUAL, BFLOAT16, BFLOAT16, None)
    assert moment_bound(USUAL, FLOAT16, FLOAT32, None).floor == 2 * 2.0**-14 / (1 - 0.999)


# Rounding and underflow, simulated with the worst rounding of each operation


@pytest.mark.parametrize("rates", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.99), (0.5, 0.9), (0.0, 0.99)])
@pytest.mark.parametrize("mantissa", [23, 10, 7])
def test_no_direction_of_rounding_leads_beyond_the_bound(rates, mantissa):
    """Every operation of v is rounded down and of m up, by a whole unit in the last place."""
    dtype = {23: FLOAT32, 10: FLOAT16, 7: BFLOAT16}[mantissa]
    bound = moment_bound(fixed(*rates), dtype, dtype, None)
    unit = 2.0**-mantissa if mantissa < 23 else 2.0**-24
    up, down = 1 + unit, 1 - unit
    # The worst gradients for the rounded averages, so that the bound is tried where it is tight.
    length = 400
    first, second = rates[0] * up**2, rates[1] * down**2
    ages = np.arange(length)[::-1]
    gradients = ((1 - rates[0]) * first**ages + 1e-300) / ((1 - rates[1]) * second**ages)
    m = v = 0.0
    for gradient in gradients / gradients.max():
        m = (rates[0] * m * up + (1 - rates[0]) * gradient * up) * up
        v = (rates[1] * v * down + (1 - rates[1]) * gradient * down * gradient * down) * down
    assert m / math.sqrt(v) <= bound.limit
    assert m / math.sqrt(v) >= bound.exact * 0.999


def flushing(values):
    return np.where(np.abs(values) < 2.0**-126, 0, values)


def test_gradients_that_underflow_in_the_second_moment_stay_below_the_floor():
    """float32 with flush to zero: v loses what is small, m survives."""
    bound = moment_bound(USUAL, FLOAT32, FLOAT32, None)
    rng = np.random.default_rng(1)
    one, two = np.float32(0.1), np.float32(0.001)
    for scale in (1e-23, 1e-21, 3e-19, 1.08e-17, 1.1e-17, 1e-16, 1e-12):
        m, v = np.zeros(64, np.float32), np.zeros(64, np.float32)
        for step in range(1500):
            sign = rng.choice([-1, 1], 64) if step % 2 else 1
            gradient = (scale * sign * rng.choice([0.1, 0.9, 1.0], 64)).astype(np.float32)
            m = flushing(m + flushing(one * (gradient - m)))
            v = flushing(flushing(np.float32(0.999) * v) + flushing(two * gradient * gradient))
            ratio = np.abs(m.astype(float)) / np.sqrt(v.astype(float) + bound.floor)
            assert ratio.max() <= bound.limit
    assert moment_bound(USUAL, FLOAT32, FLOAT32, None).limit * math.sqrt(bound.floor) < 1e-16


def test_without_the_floor_tiny_gradients_would_be_a_false_alarm():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight])
    for _ in range(50):
        weight.grad = torch.full((4,), 1e-23)
        optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg"].min() > 0
    assert state["exp_avg_sq"].max() == 0
    bound = moment_bound(USUAL, FLOAT32, FLOAT32, 50)
    assert float(state["exp_avg"].max()) < bound.limit * math.sqrt(bound.floor)


# Torch's optimizers


def streams(num_steps, first_rates, second_rates):
    """Columns of gradients: the worst ones, and what training does to hurt."""
    rng = np.random.default_rng(7)
    worst = worst_gradients(first_rates, second_rates)
    worst = worst / worst.max()
    spike = np.where(np.arange(num_steps) == num_steps // 2, 1e4, 0.0)
    late = np.where(np.arange(num_steps) == num_steps - 1, 1e4, 1e-4)
    columns = [
        worst, -worst, worst * 1e-15, worst * 1e6, spike, late, np.ones(num_steps), (-1.0) ** np.arange(num_steps),
        np.full(num_steps, 1e-23), np.full(num_steps, 1e-21) * rng.normal(size=num_steps), np.zeros(num_steps),
        *rng.normal(size=(20, num_steps)), *(rng.normal(size=(20, num_steps)) * (rng.random((20, num_steps)) < 0.05)),
        *(rng.normal(size=(10, num_steps)) * 10 ** rng.uniform(-12, 2, (10, num_steps))),
    ]  # fmt: skip
    return np.array(columns).T


def largest_ratio(state, floor):
    first, second = state["exp_avg"].double(), state["exp_avg_sq"].double()
    return float((first.abs() / (second + floor).sqrt()).max())


def optimizers():
    import torch

    plain = torch.optim.Adam
    return {
        "adam": (plain, {}), "adamw": (torch.optim.AdamW, {}), "amsgrad": (plain, {"amsgrad": True}),
        "maximize": (plain, {"maximize": True}), "decay": (plain, {"weight_decay": 0.1}),
        "foreach": (plain, {"foreach": True}), "loop": (plain, {"foreach": False}), "fused": (plain, {"fused": True}),
        "nadam": (torch.optim.NAdam, {}), "radam": (torch.optim.RAdam, {}),
        "rates 0.9, 0.95": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
        "rates 0.8, 0.99": (torch.optim.AdamW, {"betas": (0.8, 0.99)}),
    }  # fmt: skip


NAMES = ["adam", "adamw", "amsgrad", "maximize", "decay", "foreach", "loop", "fused", "nadam", "radam",
         "rates 0.9, 0.95", "rates 0.8, 0.99"]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_torch_optimizers_never_go_beyond_it_and_come_close(name, dtype):
    """Margins: the worst gradients come within 0.1 % of the limit in float32, within its slack in bfloat16."""
    torch = pytest.importorskip("torch")
    kind, choices = optimizers()[name]
    num = 300
    rates = choices.get("betas", (0.9, 0.999))
    gradients = streams(num, np.full(num, rates[0]), np.full(num, rates[1]))
    weight = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=getattr(torch, dtype)))
    optimizer = kind([weight], lr=0.0, **choices)
    stored = DTYPES[dtype]
    for step, row in enumerate(gradients, 1):
        weight.grad = torch.tensor(row).to(weight.dtype)
        optimizer.step()
        bound = moment_bound(fixed(*rates), stored, stored, step)
        assert largest_ratio(optimizer.state[weight], bound.floor) <= bound.limit
    reached = largest_ratio(optimizer.state[weight], bound.floor)
    assert reached >= bound.exact * (0.999 if dtype == "float32" else 0.9)
    if choices.get("amsgrad"):
        assert (optimizer.state[weight]["max_exp_avg_sq"] >= optimizer.state[weight]["exp_avg_sq"]).all()


def test_a_cycle_of_momentum_is_bounded_by_its_recorded_range():
    """OneCycleLR: at its end the group shows beta1 = 0.95, whose own bound is 5.09; the run got beyond it."""
    torch = pytest.importorskip("torch")
    num = 40
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=num + 1, pct_start=0.5)
    group = optimizer.param_groups[0]
    rates = []
    for _ in range(num):
        rates.append(group["betas"][0])
        weight.grad = torch.zeros(1)
        optimizer.step()
        schedule.step()
    highest = 0.0
    for stop in range(20, num):
        gradients = worst_gradients(rates[:stop], np.full(stop, 0.999))
        m = v = 0.0
        for rate, gradient in zip(rates, gradients, strict=False):
            m, v = rate * m + (1 - rate) * gradient, 0.999 * v + 0.001 * gradient**2
        recorded = betas(ParameterGroup(0, "f", hyperparameters={**group, "betas": (rates[stop], 0.999)}))
        assert recorded == Betas(0.85, 0.95, 0.999)
        assert m / math.sqrt(v) <= moment_bound(recorded, FLOAT32, FLOAT32, stop).limit
        alone = moment_bound(fixed(rates[stop], 0.999), FLOAT32, FLOAT32, stop)
        highest = max(highest, m / math.sqrt(v) / alone.limit)
    assert 1.2 < highest < 1.5


# What is recorded


def test_rates_that_are_no_rates_are_none():
    for pair in (None, (0.9,), (0.9, 0.99, 0.999), (1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), 0.9, "0.9, 0.999"):
        assert betas(ParameterGroup(0, "f", hyperparameters={"betas": pair})) is None
    assert betas(ParameterGroup(0, "f")) is None


def test_steps_are_the_largest_of_all_counters_so_that_one_set_back_does_no_harm():
    def catalog(**more):
        return Step(**more).evidence().catalog

    assert num_steps(catalog(step=7)) is None
    assert num_steps(catalog(step=7, steps_taken=0)) is None
    assert num_steps(catalog(step=7, steps_taken=5)) == 7
    assert num_steps(catalog(step=3, steps_taken=5000)) == 5000
