"""NUM002, NUM003: weights that collapsed, or are out of scale with their siblings in other layers."""

import math

import numpy as np
import pytest

from auditor.invariants.related import by_role, layer, seen_replicas, siblings
from auditor.model.catalog import Role
from auditor.model.dtype import BFLOAT16, FLOAT32
from auditor.model.finding import Outcome, Severity
from auditor.model.mesh import EVERYWHERE
from auditor.model.observation import Read
from auditor.model.region import whole
from tests.invariants.measured import ADAM, MASTER, PARAMETER, Step, bits_of

SHAPE = (16, 8)


def weight(seed=0, scale=0.02):
    return (np.random.default_rng(seed).normal(size=SHAPE) * scale).astype(np.float32)


def model(odd=None, *, num=8, name="mlp.weight", role=PARAMETER, dtype=FLOAT32, at=5, **more):
    """So many layers, of which one holds ``odd``."""
    step = Step(group=None)
    for number in range(num):
        values = odd if odd is not None and number == at else weight(number)
        step.add(f"layers.{number}.{name}", role, values, dtype=dtype, **more)
    return step


def only(judgement):
    (violation,) = judgement.violations
    return violation


@pytest.mark.parametrize("identifier", ["NUM002", "NUM003"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_healthy_model_holds(identifier, dtype):
    judged = model(dtype=dtype).judge(identifier)
    assert (judged.outcome, judged.num_holds) == (Outcome.HOLDS, 8)


@pytest.mark.parametrize("identifier", ["NUM002", "NUM003"])
def test_what_was_not_read_or_is_not_finite_is_not_known(identifier):
    assert model(read=Read.LOST).judge(identifier).outcome is Outcome.UNDETERMINED
    broken = weight()
    broken[0, 0] = math.nan
    judged = model(broken).judge(identifier)
    assert judged.undetermined == {"it holds numbers that are not finite": ("layers.5.mlp.weight",)}
    assert judged.num_holds == 7


# NUM002


@pytest.mark.parametrize("role", [PARAMETER, MASTER])
@pytest.mark.parametrize(("value", "words"), [(0.0, "all elements are 0,"), (0.5, "all elements are 0.5,")])
def test_one_matrix_of_one_value(role, value, words):
    found = only(model(np.full(SHAPE, value), role=role).judge("NUM002"))
    assert found.subject == "layers.5.mlp.weight"
    assert words in found.message
    assert "7 siblings" in found.message


def test_a_matrix_of_denormals_needs_no_siblings():
    step = Step(group=None)
    step.add("output_layer.weight", PARAMETER, np.full(SHAPE, 1e-42) * np.arange(1, 9))
    assert "no number is beyond 8e-42" in only(step.judge("NUM002")).message


@pytest.mark.parametrize(
    "step",
    [
        model(np.zeros(SHAPE), num=1, at=0),
        model(np.zeros(SHAPE), num=3, at=0, name="attn.lora_B.weight"),
        model(np.zeros(SHAPE), at=5, name="attn.lora_B.weight"),
        model(weight(3, scale=1e-25)),
    ],
    ids=["no siblings", "few siblings", "fresh low-rank factor", "tiny but not denormal"],
)
def test_zeros_that_say_nothing(step):
    assert not step.judge("NUM002").violations


@pytest.mark.parametrize("shape", [(4, 4), (128,), (1, 128)])
def test_vectors_and_small_matrices_are_not_judged(shape):
    step = Step(group=None)
    for number in range(8):
        values = np.zeros(shape) if number == 5 else np.arange(float(math.prod(shape))).reshape(shape)
        step.add(f"layers.{number}.w", PARAMETER, values)
    for identifier in ("NUM002", "NUM003"):
        assert step.judge(identifier).outcome is Outcome.NOT_APPLICABLE


def test_half_of_the_layers_being_zero_is_no_collapse_of_one():
    step = model(num=4)
    for number in range(4, 8):
        step.add(f"layers.{number}.mlp.weight", PARAMETER, np.zeros(SHAPE))
    judged = step.judge("NUM002")
    assert not judged.violations
    assert judged.num_holds == 4


def test_a_low_rank_factor_of_one_value_that_is_not_zero():
    assert only(model(np.full(SHAPE, 0.5), name="attn.lora_A.weight").judge("NUM002"))


def test_projections_that_all_begin_at_zero():
    step = Step(group=None)
    for number in range(8):
        step.add(f"layers.{number}.mlp.down_proj.weight", PARAMETER, np.zeros(SHAPE))
        step.add(f"layers.{number}.mlp.up_proj.weight", PARAMETER, weight(number))
    judged = step.judge("NUM002")
    assert not judged.violations
    assert judged.num_holds == 8


def deepened(zero_in_new_layers):
    """Twelve layers; 4 and 9 were put between trained ones."""
    names = ["self_attn.o_proj.weight", "self_attn.q_proj.weight", "mlp.down_proj.weight", "mlp.up_proj.weight"]
    step = Step(group=None)
    for number in range(12):
        for name in names:
            zero = number in (4, 9) and name in zero_in_new_layers
            step.add(f"layers.{number}.{name}", PARAMETER, np.zeros(SHAPE) if zero else weight(number))
    return step


def test_layers_that_add_nothing_were_put_in_on_purpose():
    judged = deepened(["self_attn.o_proj.weight", "mlp.down_proj.weight"]).judge("NUM002")
    assert not judged.violations
    assert judged.not_applicable == {
        "a block that adds nothing: its two projections into the stream are zero": 4,
    }


@pytest.mark.parametrize(
    "zero",
    [
        ["self_attn.o_proj.weight"],
        ["self_attn.q_proj.weight"],
        ["self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.up_proj.weight"],
    ],
)
def test_other_zeros_in_a_layer_were_not(zero):
    assert len(deepened(zero).judge("NUM002").violations) == 2 * len(zero)


@pytest.mark.parametrize("name", ["attn.proj.weight", "mlp.fc2.weight", "self_attn.o_proj.weight"])
def test_a_block_may_begin_by_adding_nothing(name):
    """A note while the optimizer need not have moved it; a warning once it must have."""
    assert only(model(np.zeros(SHAPE), name=name).judge("NUM002")).severity is Severity.NOTE
    assert only(model(np.full(SHAPE, 0.5), name=name).judge("NUM002")).severity is None
    for steps_taken, moment, severity in ((1, 1e-3, Severity.NOTE), (100, 0.0, Severity.NOTE), (100, 1e-3, None)):
        step = Step(steps_taken=steps_taken)
        for number in range(8):
            step.add(f"layers.{number}.{name}", PARAMETER, weight(number) if number != 5 else np.zeros(SHAPE))
            step.moments(f"layers.{number}.{name}", np.full(SHAPE, moment), np.full(SHAPE, moment**2))
        assert only(step.judge("NUM002")).severity is severity


# NUM001


MASK = np.where(np.tri(8) > 0, 0.0, -math.inf)
OVERFLOWN = np.where(np.eye(8) > 0, math.inf, 0.5)


@pytest.mark.parametrize(
    ("values", "role", "group", "severity"),
    [
        (MASK, Role.BUFFER, None, Severity.NOTE),
        (MASK, PARAMETER, None, Severity.NOTE),
        (np.array(math.inf), PARAMETER, None, Severity.NOTE),
        (np.full(8, -math.inf), PARAMETER, None, Severity.NOTE),
        (OVERFLOWN, PARAMETER, ("other",), Severity.NOTE),
        (OVERFLOWN, PARAMETER, ("odd",), None),
        (MASK, PARAMETER, ("odd",), None),
        (OVERFLOWN, PARAMETER, None, None),
        (np.full((8, 8), math.inf), PARAMETER, None, None),
        (OVERFLOWN, MASTER, ("other",), None),
        (np.where(np.eye(8) > 0, math.nan, MASK), Role.BUFFER, None, None),
        (np.array(math.nan), PARAMETER, ("other",), None),
        (np.array(math.inf), Role.OBJECT, ("other",), Severity.NOTE),
        (MASK, Role.OBJECT, ("other",), Severity.NOTE),
        (OVERFLOWN, Role.OBJECT, ("other",), Severity.WARNING),
        (np.array(math.nan), Role.OBJECT, ("other",), Severity.WARNING),
    ],
)
def test_infinity_on_purpose_is_a_note(values, role, group, severity):
    step = Step(group=None)
    if group:
        step.group(ADAM, group)
    step.add("odd", role, values)
    step.add("other", PARAMETER, weight())
    assert only(step.judge("NUM001")).severity is severity


def test_numbers_that_are_not_finite_are_counted_per_replica():
    bad = weight()
    bad[0, 0] = math.nan
    messages = []
    for replicas in ([bad], [bad, bad], [weight(), bad], [weight(), bad, bad]):
        step = Step()
        step.add("odd", PARAMETER, *replicas)
        messages.append(only(step.judge("NUM001")).message)
    says = "odd (parameter) holds 1 number that is not finite"
    assert messages == [says, says, f"{says} on tp=1", f"{says} on tp=1 (2 of 3 replicas)"]


# NUM003


def test_a_matrix_out_of_scale():
    found = only(model(weight(5) * 10_000).judge("NUM003"))
    assert found.subject == "layers.5.mlp.weight"
    assert "root mean square 182, the median" in found.message


def test_one_flipped_high_exponent_bit():
    values = weight(5)
    values[0, 0] = 0.02
    values.view(np.uint32)[0, 0] ^= 1 << 30
    assert values[0, 0] > 1e30
    assert only(model(values).judge("NUM003"))


@pytest.mark.parametrize("factor", [30, 1 / 30, 1e-6, 1000])
def test_siblings_that_differ_as_healthy_ones_do(factor):
    """Depth-scaled initialisation, layers that began at zero; 1000 times 0.02 is within the threshold of 1024."""
    assert model(weight(5) * factor).judge("NUM003").outcome is Outcome.HOLDS


def test_weights_that_began_at_zero_may_be_far_apart_while_they_are_small():
    step = Step(group=None)
    for number in range(8):
        step.add(f"layers.{number}.w.lora_B", PARAMETER, weight(number, scale=1e-8 if number < 6 else 1e-2))
    assert step.judge("NUM003").outcome is Outcome.HOLDS


def test_few_siblings_say_nothing():
    judged = model(weight(5) * 1e9, num=4, at=2).judge("NUM003")
    assert judged.outcome is Outcome.NOT_APPLICABLE
    assert only(model(weight(5) * 1e9, num=5, at=2).judge("NUM003"))


def test_most_siblings_being_zero_says_nothing():
    step = model(weight(scale=100), num=1, at=0)
    for number in range(1, 8):
        step.add(f"layers.{number}.mlp.weight", PARAMETER, np.zeros(SHAPE))
    assert not step.judge("NUM003").violations


# Who is whose sibling


def family(*names):
    step = Step(group=None)
    for name in names:
        step.add(name, PARAMETER, weight())
    catalog = step.evidence().catalog
    return [[catalog.tensors[number].name for number in members] for members in siblings(catalog, [Role.PARAMETER])]


@pytest.mark.parametrize(
    "names",
    [
        ("h.0.mlp.c_fc.weight", "h.11.mlp.c_fc.weight"),
        ("3.mlp.dense_h_to_4h.weight", "40.mlp.dense_h_to_4h.weight"),
        ("decoder/layers_3/mlp/wi", "decoder/layers_12/mlp/wi"),
        ("layers.0.experts.1.w1", "layers.2.experts.7.w1"),
    ],
)
def test_the_same_tensor_of_other_layers(names):
    assert family(*names) == [list(names)]


@pytest.mark.parametrize(
    "names", [("layers.0.fc1.weight", "layers.0.fc2.weight"), ("dense_h_to_4h", "dense_4h_to_h"), ("w1", "w3")]
)
def test_numbers_inside_words_tell_tensors_apart(names):
    assert family(*names) == [[name] for name in names]


def test_the_layer_is_the_first_number():
    assert layer("model.layers.12.experts.3.w1") == "12"
    assert layer("lm_head.weight") == "lm_head.weight"


def test_a_name_that_one_role_has_twice_is_in_none():
    step = Step(group=None)
    step.add("w", PARAMETER, weight())
    step.add("w", PARAMETER, weight()[:4])
    step.add("w", MASTER, weight())
    roles = by_role(step.evidence().catalog)
    assert (roles[PARAMETER], roles[MASTER]) == ({}, {"w": 2})


def test_a_tensor_with_a_hole_was_not_read_whole():
    step = Step(group=None)
    number = step.builder.tensor("w", PARAMETER, FLOAT32, SHAPE, 0)
    step.builder.piece(number, 0, 0, whole((8, 8)), EVERYWHERE)
    step.contents.append((bits_of(weight()[:8], FLOAT32), FLOAT32, Read.DONE))
    evidence = step.evidence()
    assert seen_replicas(evidence.catalog, evidence.observations) == {}


def test_a_tensor_is_known_by_any_replica_that_was_read_whole():
    step = Step(group=None)
    step.add("weight", PARAMETER, weight(1), weight(2))
    step.contents[0] = (*step.contents[0][:2], Read.LOST)
    evidence = step.evidence()
    (seen,) = seen_replicas(evidence.catalog, evidence.observations)[0]
    assert seen.root_mean_square == pytest.approx(float(np.sqrt(np.mean(np.square(weight(2), dtype=float)))))
    assert (seen.num_elements, seen.num_nonzero) == (128, 128)
