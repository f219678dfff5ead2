"""OPT010-OPT014: values of moments. Each fault by its name, each with the healthy step that looks most like it."""

import math

import numpy as np
import pytest

from auditor.invariants.moment_bound import moment_bound
from auditor.invariants.recorded import Betas, lacking
from auditor.invariants.registry import find
from auditor.model.catalog import Role
from auditor.model.dtype import BFLOAT16, FLOAT16, FLOAT32
from auditor.model.finding import Outcome, Severity
from auditor.model.observation import Read
from auditor.timeline.findings import findings
from tests.invariants.measured import ADAM, FIRST, MASTER, PARAMETER, SECOND, Step, from_bfloat16, to_bfloat16

SHAPE = (16, 24)


def trained(seed=0, shape=SHAPE, num_steps=60, scale=1.0, rates=(0.9, 0.999)):
    """Moments as Adam makes them in float32 of random gradients."""
    rng = np.random.default_rng(seed)
    m, v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    one, two = np.float32(rates[0]), np.float32(rates[1])
    for _ in range(num_steps):
        gradient = (rng.normal(size=shape) * scale).astype(np.float32)
        m = one * m + (1 - one) * gradient
        v = two * v + (1 - two) * gradient * gradient
    return m, v


def weights(seed=0, shape=SHAPE):
    return (np.random.default_rng(seed + 1000).normal(size=shape) * 0.02).astype(np.float32)


def layers(num=6, **more):
    """A step of so many layers, each with a weight, a master and moments."""
    step = Step(steps_taken=60, **more)
    for layer in range(num):
        name = f"layers.{layer}.mlp.weight"
        step.add(name, PARAMETER, weights(layer), dtype=BFLOAT16)
        step.add(name, MASTER, weights(layer))
        step.moments(name, *trained(layer))
    return step


def only(judgement):
    (violation,) = judgement.violations
    return violation


def reasons(judgement):
    return {reason: len(names) for reason, names in judgement.undetermined.items()}


@pytest.mark.parametrize("identifier", ["OPT010", "OPT011", "OPT012", "OPT013", "OPT014"])
def test_a_trained_step_holds(identifier):
    judged = layers().judge(identifier)
    assert judged.outcome is Outcome.HOLDS
    assert judged.num_holds >= 6


@pytest.mark.parametrize("identifier", ["OPT010", "OPT011", "OPT012", "OPT013", "OPT014"])
def test_what_was_not_read_is_not_known(identifier):
    judged = layers().judge(identifier, unread="only names were asked for")
    assert not judged.violations
    assert not judged.num_holds
    assert set(judged.undetermined) == {"only names were asked for"}


@pytest.mark.parametrize("identifier", ["OPT010", "OPT011", "OPT012", "OPT013", "OPT014"])
def test_a_checkpoint_without_moments_is_not_judged(identifier):
    step = Step(group=None)
    step.add("weight", PARAMETER, weights())
    judged = step.judge(identifier)
    assert judged.outcome is Outcome.NOT_APPLICABLE
    assert judged.not_applicable


# OPT010


def test_a_negative_second_moment():
    step, (m, v) = layers(), trained(9)
    v[3, 4] = -1e-30
    step.moments("layers.9.mlp.weight", m, v)
    found = only(step.judge("OPT010"))
    assert found.subject == "layers.9.mlp.weight"
    assert found.locations[0].role is SECOND
    assert "-1e-30" in found.message


def test_zeros_of_either_sign_in_a_second_moment_are_healthy():
    step, (m, v) = layers(), trained(9)
    v[0, :2], m[0, :2] = [-0.0, 0.0], 0
    step.moments("layers.9.mlp.weight", m, v)
    assert step.judge("OPT010").outcome is Outcome.HOLDS


def test_a_nan_in_a_second_moment_is_not_called_negative():
    step, (m, v) = layers(), trained(9)
    v[0, 0] = math.nan
    step.moments("layers.9.mlp.weight", m, v)
    assert not step.judge("OPT010").violations


def test_the_replica_that_is_negative_is_named():
    m, v = trained()
    wrong = v.copy()
    wrong[0, 0] = -1
    step = Step()
    step.add("weight", FIRST, m, m)
    step.add("weight", SECOND, v, wrong)
    assert str(only(step.judge("OPT010")).locations[0].coordinate) == "tp=1"


# OPT011: faults


def judged_with(m, v, **more):
    step = layers(**more)
    step.moments("layers.9.mlp.weight", m, v)
    return step.judge("OPT011")


def test_moments_of_parameters_with_other_gradients():
    """The first moment of a parameter whose gradients are 100 times as large."""
    found = only(judged_with(trained(3, scale=100.0)[0], trained(9)[1]))
    assert found.locations[0].num_elements > 0.8 * math.prod(SHAPE)
    assert (found.locations[0].role, found.severity) == (FIRST, None)


def test_one_first_moment_with_a_flipped_exponent_bit():
    m, v = trained(9)
    bits = m.view(np.uint32)
    m[5, 6] = 0.01
    bits[5, 6] ^= 1 << 30
    assert m[5, 6] > 1e30
    location = only(judged_with(m, v)).locations[0]
    assert (location.num_elements, location.first_index) == (1, (5, 6))
    assert location.num_elements_compared == math.prod(SHAPE)


@pytest.mark.parametrize("part", [1.0, 0.25])
def test_a_second_moment_that_is_zeroed_or_partly_so(part):
    m, v = trained(9)
    v[: int(part * len(v))] = 0
    found = only(judged_with(m, v))
    assert found.locations[0].num_elements == m[: int(part * len(m))].size
    # A second moment that is zero is named by OPT012: the same place must explain both.
    assert found.locations[0].role is (SECOND if part == 1 else FIRST)


def test_a_first_moment_scaled_by_a_thousand():
    m, v = trained(9)
    assert only(judged_with(m * 1000, v)).subject == "layers.9.mlp.weight"


def test_torn_moments_of_two_steps():
    """The first moment of a step after gradients grew, the second from before: as a stale file gives."""
    before, after = trained(9, num_steps=50), trained(9, num_steps=50, scale=30.0)
    assert only(judged_with(after[0], before[1])).locations[0].num_elements > 100
    assert not judged_with(*after).violations


def test_moments_that_were_exchanged():
    m, v = trained(9)
    assert judged_with(v, np.abs(m)).violations == ()
    small = trained(9, scale=1e-3)
    assert only(judged_with(np.abs(small[0]), small[1] ** 2)).subject


# OPT011: healthy


def test_the_worst_gradients_hold_with_the_margin_that_is_stated():
    """Gradients that reach the bound: 0.004 % of slack is all there is in float32, and it is enough."""
    num = 120
    ages = np.arange(num)[::-1]
    gradients = (0.1 * 0.9**ages) / (0.001 * 0.999**ages)
    m = v = np.zeros(SHAPE, np.float32)
    for gradient in (gradients / gradients.max()).astype(np.float32):
        m = np.float32(0.9) * m + np.float32(0.1) * gradient
        v = np.float32(0.999) * v + np.float32(0.001) * gradient * gradient
    assert judged_with(m, v).outcome is Outcome.HOLDS
    assert judged_with(m * np.float32(1.0005), v).outcome is Outcome.VIOLATED


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_first_steps_have_a_tighter_bound(num_steps):
    def judged(factor):
        step, (m, v) = Step(step=num_steps, steps_taken=num_steps), trained(1, num_steps=num_steps)
        step.moments("weight", m * np.float32(factor), v)
        return step.judge("OPT011")

    assert judged(1).outcome is Outcome.HOLDS
    if num_steps == 1:
        # After one step all ratios are equal: the bound is reached by every gradient.
        assert judged(1.001).outcome is Outcome.VIOLATED


def test_tiny_gradients_whose_squares_underflow_are_healthy():
    m, v = np.full(SHAPE, 1e-23, np.float32), np.zeros(SHAPE, np.float32)
    judged = judged_with(m, v)
    assert not judged.violations
    assert reasons(judged) == {"the second moment is below what its dtype resolves": 1}


def test_parameters_that_never_had_a_gradient_hold():
    zero = np.zeros(SHAPE, np.float32)
    assert judged_with(zero, zero).outcome is Outcome.HOLDS


def test_a_reset_counter_does_not_tighten_the_bound():
    step = Step(step=5000, steps_taken=1)
    step.moments("weight", *trained(1, num_steps=300))
    _, v = trained(1)
    step.moments("other", (np.sqrt(v) * 6).astype(np.float32), v)
    assert step.judge("OPT011").outcome is Outcome.HOLDS


def test_nan_and_infinity_are_left_to_others():
    m, v = trained(9)
    m[0, 0], v[1, 1] = math.nan, math.nan
    assert not judged_with(m, v).violations


# OPT011: what is recorded


def with_group(group, optimizer="", m_scale=1.0, num=1):
    step = Step(steps_taken=60, group=group, optimizer=optimizer)
    for layer in range(num):
        m, v = trained(layer)
        step.moments(f"layers.{layer}.weight", m * np.float32(m_scale), v)
    return step.judge("OPT011")


@pytest.mark.parametrize(
    ("group", "optimizer", "reason"),
    [
        (None, "", lacking(())),
        ({"max_lr": 1e-3, "weight_decay": 0.0}, "", 'class, betas and eps are not recorded; auditor.toml can state '
         'under [optimizer]: class = "adamw", betas = [β1, β2], eps = …'),
        ({"betas": (0.9, 0.99, 0.999)}, "", "its betas are not one for each of two moments"),
        ({"betas": (0.95, 0.9)}, "", "beta1² is not below beta2, so no bound follows"),
        (ADAM, "mystery", "how its optimizer keeps moments is not known"),
        ({**ADAM, "d": 1e-6}, "", "its hyperparameters are not those of plain Adam"),
    ],
)  # fmt: skip
def test_what_leaves_it_undetermined(group, optimizer, reason):
    for scale in (1, 1000):
        judged = with_group(group, optimizer, scale)
        assert reasons(judged) == {reason: 1}
        assert not judged.violations


@pytest.mark.parametrize(
    "optimizer", ["adabelief", "torch_optimizer.AdaBelief", "OnebitAdam", "adopt", "lion", "adamax"]
)
def test_optimizers_that_keep_other_averages_are_not_judged(optimizer):
    judged = with_group(ADAM, optimizer, 1000)
    assert judged.outcome is Outcome.NOT_APPLICABLE
    assert judged.not_applicable == {"its optimizer does not keep two plain moving averages": 1}


@pytest.mark.parametrize("optimizer", ["", "adam", "AdamW", "FusedAdam", "torch.optim.adamw.AdamW", "lamb", "NAdam",
                                       "RAdam", "adamw_torch_fused", "DeepSpeedCPUAdam"])  # fmt: skip
def test_optimizers_that_keep_adams_averages_are(optimizer):
    assert with_group(ADAM, optimizer).outcome is Outcome.HOLDS
    assert with_group(ADAM, optimizer, 1000).outcome is Outcome.VIOLATED


def test_without_a_class_moments_that_all_break_it_may_be_another_optimizers():
    assert {x.severity for x in with_group(ADAM, "", 1000, num=6).violations} == {Severity.WARNING}
    assert {x.severity for x in with_group(ADAM, "adamw", 1000, num=6).violations} == {None}
    assert {x.severity for x in with_group(ADAM, "", 1000, num=3).violations} == {None}
    step = layers(6)
    for number in range(10, 15):
        m, v = trained(number)
        step.moments(f"layers.{number}.mlp.weight", m * 1000, v)
    assert {x.severity for x in step.judge("OPT011").violations} == {None}


def test_groups_of_other_parameters_do_not_count():
    step = Step(group=None)
    step.group({**ADAM, "betas": (0.5, 0.6)}, ("other",))
    step.group(ADAM, ("weight",), number=1)
    step.moments("weight", *trained())
    (pairing,) = find("OPT011").pairings(step.evidence().catalog)
    assert pairing.limit == moment_bound(Betas(0.9, 0.9, 0.999), FLOAT32, FLOAT32, None).limit


def test_ranks_that_disagree_on_betas_leave_it_undetermined():
    step = Step()
    step.group({**ADAM, "betas": (0.9, 0.95)})
    step.moments("weight", *trained())
    assert reasons(step.judge("OPT011")) == {"the parameter groups that may hold it disagree on betas": 1}


def test_the_same_groups_on_all_ranks_are_one():
    step = Step()
    for number in range(4):
        step.group(dict(ADAM), number=number)
    step.moments("weight", *trained())
    assert step.judge("OPT011").outcome is Outcome.HOLDS


def test_a_cycle_of_momentum_widens_the_bound():
    cycle = {**ADAM, "betas": (0.95, 0.999), "base_momentum": 0.85, "max_momentum": 0.95}
    (_, v) = trained()
    for group, outcome in ((cycle, Outcome.HOLDS), ({**ADAM, "betas": (0.95, 0.999)}, Outcome.VIOLATED)):
        step = Step(group=group)
        step.moments("weight", (np.sqrt(v) * 7).astype(np.float32), v)
        assert step.judge("OPT011").outcome is outcome


# OPT011: dtypes


def test_moments_in_bfloat16_are_judged_by_its_round_off():
    _, v = trained()
    for factor, outcome in ((9.0, Outcome.HOLDS), (10.0, Outcome.VIOLATED)):
        step = Step()
        step.moments("weight", np.sqrt(from_bfloat16(to_bfloat16(v))) * factor, v, dtype=BFLOAT16)
        assert step.judge("OPT011").outcome is outcome


def test_moments_in_float32_that_were_kept_in_bfloat16_are_judged_by_that():
    _, v = trained()
    kept = from_bfloat16(to_bfloat16(v))
    for factor, outcome in ((8.0, Outcome.UNDETERMINED), (12.0, Outcome.VIOLATED)):
        step = Step()
        step.moments("weight", from_bfloat16(to_bfloat16(np.sqrt(kept) * factor)), kept)
        assert step.judge("OPT011").outcome is outcome


def test_float16_moments_below_their_floor_are_not_called_good():
    step = Step()
    step.moments("weight", np.full(SHAPE, 0.01), np.full(SHAPE, 1e-4), dtype=FLOAT16)
    assert reasons(step.judge("OPT011")) == {"the second moment is below what its dtype resolves": 1}


def test_a_first_moment_without_a_second_is_not_judged():
    step = Step(optimizer="sgd")
    step.add("weight", FIRST, trained()[0])
    assert step.judge("OPT011").not_applicable == {"it has no second moment": 1}


def test_an_unread_replica_leaves_it_undetermined():
    step, (m, v) = Step(), trained()
    step.add("weight", FIRST, m)
    step.add("weight", SECOND, v, read=Read.LOST)
    assert step.judge("OPT011").outcome is Outcome.UNDETERMINED


# OPT012


def test_a_second_moment_of_zeros_beside_a_first_that_is_not():
    step = layers()
    step.moments("layers.9.mlp.weight", trained()[0], np.zeros(SHAPE))
    found = only(step.judge("OPT012"))
    assert (found.severity, found.locations[0].role) == (Severity.ERROR, SECOND)


@pytest.mark.parametrize(("size", "dtype"), [(1e-23, FLOAT32), (1e-13, BFLOAT16), (0.01, FLOAT16)])
def test_a_second_moment_that_underflowed_is_healthy(size, dtype):
    step = layers()
    step.moments("layers.9.mlp.weight", np.full(SHAPE, size), np.zeros(SHAPE), dtype=dtype)
    judged = step.judge("OPT012")
    assert not judged.violations
    assert "the second moment may have underflowed to zero" in judged.undetermined


def test_moments_of_zeros_where_the_siblings_have_some():
    step = layers()
    step.moments("layers.9.mlp.weight", np.zeros(SHAPE), np.zeros(SHAPE))
    found = only(step.judge("OPT012"))
    assert [location.role for location in found.locations] == [FIRST, SECOND]
    assert found.severity is None
    assert find("OPT012").severity is Severity.NOTE
    assert "6 siblings" in found.message


@pytest.mark.parametrize(
    "names",
    [
        [f"layers.{layer}.mlp.experts.9.w1.weight" for layer in range(1)],
        ["layers.9.attn.lora_B.weight"],
        ["wpe.weight"],
        [f"layers.{layer}.gate.weight" for layer in range(8)],
        ["3.norm.weight@pp=1"],
    ],
    ids=["unrouted expert", "fresh factor", "no siblings", "all of them", "module that a stage does not use"],
)
def test_zero_moments_that_healthy_runs_have(names):
    step = layers()
    for layer in range(6):
        for name in ("mlp.experts.9.w1.weight", "attn.lora_B.weight"):
            step.moments(f"layers.{layer}0.{name}", *trained(layer + 50))
    for name in names:
        step.moments(name, np.zeros(SHAPE), np.zeros(SHAPE))
    assert not step.judge("OPT012").violations


def test_half_frozen_layers_are_not_named():
    step = layers(3)
    for layer in range(3, 6):
        step.moments(f"layers.{layer}.mlp.weight", np.zeros(SHAPE), np.zeros(SHAPE))
    judged = step.judge("OPT012")
    assert not judged.violations
    assert sum(reasons(judged).values()) == 3


# OPT013


@pytest.mark.parametrize("role", [FIRST, SECOND])
def test_moments_of_another_parameter(role):
    step = layers()
    step.add("layers.9.mlp.weight", MASTER, weights(9))
    step.add("layers.9.mlp.weight", role, trained(2)[role is SECOND])
    found = only(step.judge("OPT013"))
    assert found.severity is Severity.ERROR
    assert [location.tensor for location in found.locations] == ["layers.2.mlp.weight", "layers.9.mlp.weight"]
    assert {location.role for location in found.locations} == {role}
    assert "their weights are not" in found.message


@pytest.mark.parametrize(
    ("names", "severity"),
    [
        (("branches.left.weight", "branches.right.weight"), Severity.WARNING),
        (("block.left.proj.weight", "block.right.proj.weight"), Severity.WARNING),
        (("branches.0.weight", "branches.1.weight"), Severity.WARNING),
        (("a.branches.0.weight", "b.branches.1.weight"), Severity.ERROR),
        (("left.down.weight", "right.up.weight"), Severity.ERROR),
        (("left.weight", "block.left.weight"), Severity.ERROR),
    ],
)
def test_terms_of_one_sum_have_equal_moments(names, severity):
    """left(x) + right(x): both get the same gradients, always."""
    step = layers()
    for number, name in enumerate(names):
        step.add(name, MASTER, weights(20 + number))
        step.moments(name, *trained(9))
    assert {violation.severity for violation in step.judge("OPT013").violations} == {severity}


def test_numbered_modules_of_several_matrices_are_no_terms_of_a_sum():
    """A converter that wrote one layer in two places: what its state is equal in is not all that the layers have."""
    step = layers()
    names = "branches.0.up.weight", "branches.1.up.weight", "branches.1.down.weight"
    for number, (name, seed) in enumerate(zip(names, (9, 9, 7), strict=True)):
        step.add(name, MASTER, weights(20 + number))
        step.moments(name, *trained(seed))
    assert {violation.severity for violation in step.judge("OPT013").violations} == {Severity.ERROR}


def test_the_master_of_another_parameter():
    step = layers()
    step.add("layers.9.mlp.weight", MASTER, weights(2))
    step.moments("layers.9.mlp.weight", *trained(9))
    found = only(step.judge("OPT013"))
    assert (found.severity, found.locations[0].role) == (Severity.ERROR, MASTER)


def test_a_layer_that_is_there_twice_may_be_one_parameter_under_two_names():
    step = layers()
    step.add("layers.9.mlp.weight", MASTER, weights(2))
    step.moments("layers.9.mlp.weight", *trained(2))
    assert {violation.severity for violation in step.judge("OPT013").violations} == {Severity.WARNING}
    assert len(step.judge("OPT013").violations) == 3


def test_tied_parameters_share_their_state():
    step = layers()
    step.add("lm_head.weight", MASTER, weights(2))
    step.moments("lm_head.weight", *trained(2))
    step.tie("layers.2.mlp.weight", "lm_head.weight")
    assert step.judge("OPT013").outcome is Outcome.HOLDS


def test_one_parameter_in_two_places_is_no_pair():
    step = layers()
    step.moments("layers.2.mlp.weight@pp=1", *trained(2))
    assert not step.judge("OPT013").violations


def test_biases_of_one_sum_have_equal_moments():
    """bias_ih and bias_hh of an LSTM get the same gradients, always."""
    step, (m, v) = layers(), trained(1, shape=(4096,))
    for name in ("rnn.bias_ih_l0", "rnn.bias_hh_l0"):
        step.moments(name, m, v)
    judged = step.judge("OPT013")
    assert not judged.violations
    assert judged.not_applicable["a vector: two biases of one sum get the same gradients"] == 4


def test_a_recurrent_network_of_torch_has_equal_moments_of_biases_and_no_others():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    network = torch.nn.LSTM(8, 8)
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(3):
        network(torch.randn(5, 2, 8))[0].square().sum().backward()
        optimizer.step()
    step = Step(steps_taken=3)
    for name, parameter in network.named_parameters():
        state = optimizer.state[parameter]
        step.add(name, PARAMETER, parameter.detach().numpy())
        step.moments(name, state["exp_avg"].numpy(), state["exp_avg_sq"].numpy())
    assert torch.equal(optimizer.state[network.bias_ih_l0]["exp_avg"], optimizer.state[network.bias_hh_l0]["exp_avg"])
    for identifier in ("OPT010", "OPT011", "OPT012", "OPT013"):
        assert step.judge(identifier).outcome is Outcome.HOLDS, identifier


def test_zeros_constants_and_fresh_copies_are_no_evidence():
    step = Step(steps_taken=1)
    for layer in range(4):
        step.add(f"experts.{layer}.weight", MASTER, weights(1))
        step.moments(f"experts.{layer}.weight", np.zeros(SHAPE), np.full(SHAPE, 1e-8))
    judged = step.judge("OPT013")
    assert judged.outcome is Outcome.NOT_APPLICABLE
    assert judged.not_applicable["all zero, not finite, one constant, or nearly so"] == 8


def test_a_few_elements_may_be_equal_by_chance():
    """Embeddings of which one row was met, by one token that both tables share."""
    m, v = (np.where(np.arange(SHAPE[0])[:, None] == 3, 1, 0) * values for values in trained(1))
    m[:, 8:] = v[:, 8:] = 0
    step = layers()
    for name in ("a.weight", "b.weight"):
        step.moments(name, m, v)
    assert not step.judge("OPT013").violations


def test_experts_that_were_copied_and_never_routed_are_no_evidence():
    step = Step(steps_taken=100)
    for layer in range(2):
        step.add(f"experts.{layer}.weight", MASTER, weights(1))
        step.moments(f"experts.{layer}.weight", np.zeros(SHAPE), np.zeros(SHAPE))
    assert step.judge("OPT013").outcome is Outcome.NOT_APPLICABLE


# One fault, one finding


def test_one_fault_is_one_finding():
    """A second moment that is zero breaks the bound too; a negative one as well."""
    chosen = [find(name) for name in ("OPT010", "OPT011", "OPT012", "OPT013", "NUM001")]
    m, v = trained(9)
    negative = v.copy()
    negative[0, 0] = -1
    # A flipped sign of a large one leaves |m| beyond the root of nothing.
    cases = {"OPT012": (m, np.zeros(SHAPE)), "OPT010": (m, np.where(np.arange(SHAPE[1]) == 3, 0, negative))}
    for primary, (first, second) in cases.items():
        step = layers()
        step.moments("layers.9.mlp.weight", first, second)
        (found,) = findings({100: {item.id: step.judge(item.id) for item in chosen}}, chosen)
        assert (found.id, found.consequences) == (primary, ("OPT011",))


def test_drift_of_one_moment_is_not_told_twice():
    """Replicas of the second moment differ, the first's don't: REP001 speaks of the second."""
    m, v = trained()
    step = Step()
    step.add("weight", FIRST, m, m)
    step.add("weight", SECOND, v, v * np.float32(1e-6))
    chosen = [find("REP001"), find("OPT011")]
    (found,) = findings({100: {item.id: step.judge(item.id) for item in chosen}}, chosen)
    assert (found.id, found.consequences) == ("REP001", ("OPT011",))
    assert Role.SECOND_MOMENT in {location.role for location in found.locations}


# OPT014


def test_a_first_moment_that_is_the_second():
    step = layers()
    moment = trained(9)[1]
    step.moments("layers.9.mlp.weight", moment, moment)
    found = only(step.judge("OPT014"))
    assert [(place.tensor, place.role) for place in found.locations] == [("layers.9.mlp.weight", FIRST)]


def test_moments_that_are_no_numbers_are_no_fault_of_their_own():
    """NUM001 speaks of them: NaN is equal to NaN bit by bit."""
    step = layers()
    nan = np.full(SHAPE, np.nan, np.float32)
    for name in ("layers.8.mlp.weight", "layers.9.mlp.weight"):
        step.moments(name, nan, nan)
    assert not step.judge("OPT014").violations
    assert not step.judge("OPT013").violations
    assert step.judge("NUM001").violations


def test_moments_of_nothing_and_of_one_number_may_be_equal():
    step = layers()
    for name, moment in (("layers.8.mlp.weight", np.zeros(SHAPE)), ("layers.9.mlp.weight", np.ones(SHAPE))):
        step.moments(name, moment.astype(np.float32), moment.astype(np.float32))
    judged = step.judge("OPT014")
    assert not judged.violations
    assert sum(judged.not_applicable.values()) == 2
