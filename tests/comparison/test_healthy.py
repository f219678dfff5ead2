"""What healthy runs show and no fault is: moments that stay equal, one element, zeros, signs that rounding flips."""

import numpy as np
import pytest

from auditor.comparison.calibration import at_least
from auditor.comparison.outcome import Standing
from auditor.comparison.rounding import Threshold
from tests.comparison.test_exact import compared
from tests.comparison.test_stored import stateful
from tests.comparison.tree import bfloat16, write_step

GENERATOR = np.random.default_rng(5)


@pytest.mark.parametrize(
    ("changed", "standing"),
    [({"first_moment": 1 + 1e-3}, Standing.ROUNDING), ({"parameter": 1 + 3e-7}, None), ({"parameter": 1.001}, None)],
)
def test_equal_moments_of_first_steps_say_nothing_of_what_rounding_explains(tmp_path, changed, standing):
    """Computed in bfloat16, healthy runs keep most moments for some steps; a weight follows from its own anyway."""
    sides = stateful(5)(tmp_path / "one"), stateful(5, **changed)(tmp_path / "two")
    (row,) = [row for row in compared(*sides, compute="bfloat16").steps[0].rows if row.amount]
    if standing is not None:
        assert row.standing is standing
    else:
        assert (row.standing is Standing.BEYOND) is (changed["parameter"] > 1.0001)


def trained(folder, tensors, step=1, form=np.float32):
    """A save of one layer with optimizer state; ``tensors``: name to weight, and both moments."""
    group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": step, "parameters": [*tensors],
             "hyperparameters": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}}  # fmt: skip
    roles = ("parameter", "first_moment", "second_moment")
    found = {(role, name): form(v) for name, own in tensors.items() for role, v in zip(roles, own, strict=True)}
    return write_step(folder, step, found, groups=[group])


def layer(**more):
    """A weight of one layer with usual moments, and ``more``."""
    drawn = np.random.default_rng(6)
    w, g = drawn.normal(0, 0.1, (48, 48)), drawn.normal(0, 1e-2, (48, 48))
    return {"layers.0.up.weight": (w, 0.1 * g, 1e-3 * g**2), **{f"layers.0.{name}": v for name, v in more.items()}}


def standing_of(found, name, role="parameter"):
    rows = found.steps[-1].rows
    return next(row.standing for row in rows if (row.pair.name, row.pair.role.value) == (f"layers.0.{name}", role))


@pytest.mark.parametrize(("value", "standing"), [(0.0316001, Standing.UNDETERMINED), (-0.05, Standing.BEYOND)])
def test_one_element_has_no_spread_to_be_unrelated_by(tmp_path, value, standing):
    moments = np.full(1, 1e-9), np.full(1, 1e-18)
    sides = [
        trained(tmp_path / str(b), layer(bias=(np.full(1, b), *(m * (1 + b) for m in moments))), step=20)
        for b in (0.0316, value)
    ]
    assert standing_of(compared(*sides), "bias") is standing


@pytest.mark.parametrize("own", [0.0, 1e-12])
def test_zero_is_no_number_that_was_rounded_on_its_way(tmp_path, own):
    """Gradients of which one side has nothing and the other a part of its layer's rounding."""
    drawn = GENERATOR.normal(0, 1, 48)
    sides = [
        trained(tmp_path / str(size), layer(bias=(0.1 + 1e5 * size * drawn, size * drawn, size**2 * drawn**2)))
        for size in (own, 1e-12 - own)
    ]
    for role in ("first_moment", "parameter"):
        assert standing_of(compared(*sides), "bias", role) is Standing.UNDETERMINED
    large = trained(tmp_path / "large", layer(bias=(np.full(48, 0.1), 1e-3 * drawn, 1e-6 * drawn**2)))
    assert standing_of(compared(sides[0], large), "bias", "first_moment") is Standing.BEYOND


@pytest.mark.parametrize(("how", "standing"), [("two signs", Standing.UNDETERMINED), ("rolled", Standing.REORDERED)])
def test_signs_that_rounding_flipped_are_no_other_order(tmp_path, how, standing):
    drawn = GENERATOR.normal(0, 1, 48)
    own = 1e-3 * np.sign(drawn) if how == "two signs" else drawn
    other = np.roll(own, 5)
    if how == "two signs":
        other = own.copy()
        other[[np.argmax(own), np.argmin(own)]] *= -1
    sides = [
        trained(tmp_path / str(at), layer(bias=(w, 1e-9 * (drawn + at), 1e-18 * (drawn + at) ** 2)), form=bfloat16)
        for at, w in enumerate((own, other))
    ]
    assert standing_of(compared(*sides), "bias") is standing


def moments_apart(folder, apart, role="first_moment", name="layers.0.up.bias", form=np.float32):
    """Two saves after one step of which one moment differs by so much of itself."""
    drawn, sides = np.random.default_rng(6), []
    w, g = drawn.normal(0, 0.1, (32, 32)), drawn.normal(0, 1e-2, (32, 32))
    noise = drawn.normal(0, apart, 32)
    for at in range(2):
        tensors = {("parameter", "layers.0.up.weight"): w, ("first_moment", "layers.0.up.weight"): g}
        tensors |= {("parameter", "layers.0.up.bias"): w[0], (role, name): 1e-2 * (1 + at * noise)}
        sides.append(write_step(folder / str(at), 1, {key: form(v) for key, v in tensors.items()}))
    return sides


def of_role(found, role):
    return next(row for row in found.steps[0].rows if row.pair.role.value == role and row.amount)


@pytest.mark.parametrize(
    ("apart", "tokens", "standing"),
    [(1e-5, 0, Standing.UNDETERMINED), (1e-5, 16384, Standing.ROUNDING), (1e-3, 0, Standing.BEYOND)],
)
def test_how_many_tokens_a_bias_sums_over_shows_in_no_shape(tmp_path, apart, tokens, standing):
    row = of_role(compared(*moments_apart(tmp_path, apart), tokens=tokens), "first_moment")
    assert row.standing is standing
    assert ("--tokens" in row.detail) is (standing is Standing.UNDETERMINED)


@pytest.mark.parametrize(("tokens", "standing"), [(1536, Standing.UNDETERMINED), (0, Standing.UNDETERMINED)])
def test_biases_are_summed_in_the_dtype_of_their_gradients(tmp_path, tokens, standing):
    """In pure bfloat16; where weights are of float32, or have masters, gradients are summed in float32."""
    sides = moments_apart(tmp_path / "narrow", 0.2, form=bfloat16)
    assert of_role(compared(*sides, tokens=tokens), "first_moment").standing is standing
    sides = moments_apart(tmp_path / "wide", 0.2)
    assert of_role(compared(*sides, tokens=tokens, compute="bfloat16"), "first_moment").standing is Standing.BEYOND


@pytest.mark.parametrize("buffer", ["running_var", "running_mean"])
def test_batch_statistics_behind_convolutions_are_not_derived(tmp_path, buffer):
    drawn, sides = np.random.default_rng(6), []
    w = drawn.normal(0, 0.1, (8, 4, 3, 3))
    for at in range(2):
        moment = w * (1 + at * drawn.normal(0, 1e-3, w.shape))
        tensors = {("parameter", "conv.weight"): w, ("first_moment", "conv.weight"): moment}
        tensors["buffer", f"norm.{buffer}"] = np.full(8, 1 + 0.1 * at)
        sides.append(write_step(tmp_path / str(at), 1, {key: np.float32(v) for key, v in tensors.items()}))
    found = compared(*sides, tokens=4096)
    kinked = buffer == "running_var"
    assert of_role(found, "first_moment").standing is (Standing.UNDETERMINED if kinked else Standing.BEYOND)
    assert of_role(found, "buffer").standing is Standing.BEYOND


@pytest.mark.parametrize("state", ["step_size", "square_avg"])
def test_state_that_is_no_average_of_gradients_has_no_bound(tmp_path, state):
    """Rprop's step sizes double or halve where a gradient that is rounding changes its sign."""
    sides = moments_apart(tmp_path, 0.3, role="moment", name=f"layers.0.up.bias.{state}")
    standing = of_role(compared(*sides), "moment").standing
    assert standing is (Standing.UNDETERMINED if state == "step_size" else Standing.BEYOND)


@pytest.mark.parametrize("reruns", [1e-4, 1e-2])
def test_reruns_that_differ_by_less_refute_no_bound(reruns):
    found = at_least(Threshold(reruns, "reruns", "calibrated", 2), Threshold(1e-3, "derived", "derived"))
    assert (found.kind, found.num_runs, found.relative) == ("calibrated", 2, max(reruns, 1e-3))
