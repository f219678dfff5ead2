"""A factor that gradients share: of which tensors it is said; and that what fails is shown first."""

import numpy as np
import pytest

from auditor.comparison.outcome import DIFFERENT, Standing
from auditor.configuration import make_settings
from auditor.report.compare_text import compare_lines
from tests.comparison.test_exact import code, compared
from tests.comparison.tree import bfloat16, write_step

NAMES = [f"layers.{number}.up.weight" for number in range(14)] + ["embed.weight", "head.weight"]


def gradients(folder, factor, only="", noise=0.0, form=np.float32, seed=1, steps=1):
    """One step of a model, whose moments are ``factor`` times what they should be in tensors that are called so."""
    drawn, own = np.random.default_rng(6), np.random.default_rng(seed)
    group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": steps, "parameters": NAMES,
             "hyperparameters": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8}}  # fmt: skip
    found = {}
    for name in NAMES:
        w, g = drawn.normal(0, 0.1, (16, 16)), drawn.normal(0, 1e-2, (16, 16))
        g = g * (1 + own.normal(0, noise, g.shape)) * (factor if only in name else 1)
        found |= {("parameter", name): form(w), ("first_moment", name): np.float32(g / 10),
                  ("second_moment", name): np.float32(g**2 / 100)}  # fmt: skip
    return write_step(folder, steps, found, groups=[group])


def wrong(found):
    return {row.pair.name for row in found.steps[0].of(*DIFFERENT) if row.pair.role.value == "first_moment"}


def test_what_does_not_share_the_factor_of_most_is_not_blamed(tmp_path):
    reference = gradients(tmp_path / "one", 1)
    found = compared(reference, gradients(tmp_path / "two", 2, only="layers", noise=1e-8, seed=2))
    assert wrong(found) == {name for name in NAMES if "layers" in name}
    assert ["gradients of 14 tensors are 2 times" in cause.text for cause in found.steps[0].causes] == [True]


@pytest.mark.parametrize("factor", [1, 2])
def test_a_common_factor_is_told_where_rounding_may_be_as_large_as_each_alone(tmp_path, factor):
    sides = [gradients(tmp_path / side, own, noise=1e-3, form=bfloat16, seed=own, steps=200)
             for side, own in (("one", 1), ("two", factor))]  # fmt: skip
    found = compared(*sides, compute="bfloat16")
    expected = {1: set(), 2: set(NAMES)}[factor]
    assert wrong(found) == expected


def test_a_branch_that_is_scaled_by_a_small_vector_is_judged_by_itself(tmp_path):
    """LayerScale: all gradients of a branch are a millionth of those around it, and as sure as they."""
    drawn, names = np.random.default_rng(3), ["scale", "up.weight", "down.weight"]
    group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": 1, "hyperparameters": {"lr": 1e-3},
             "parameters": [f"layers.0.{name}" for name in names]}  # fmt: skip
    sides = []
    for side, sign in (("one", 1), ("two", -1)):
        tensors = {}
        for name in names:
            g = np.random.default_rng(names.index(name)).normal(0, 1, (16, 16) if "." in name else 16)
            g = g * (1e-6 if "." in name else 1) * (1 + drawn.normal(0, 1e-8, g.shape))
            g = g * (sign if name == "up.weight" else 1)
            tensors |= {("parameter", f"layers.0.{name}"): 0 * g + 1, ("first_moment", f"layers.0.{name}"): g,
                        ("second_moment", f"layers.0.{name}"): g**2}  # fmt: skip
        found = {key: np.float32(values) for key, values in tensors.items()}
        sides.append(write_step(tmp_path / side, 1, found, groups=[group]))
    found = compared(*sides)
    assert wrong(found) == {"layers.0.up.weight"}
    assert code(found) == 1


def test_what_fails_is_shown_first(tmp_path):
    """Of many modules of which nothing is known only some are shown: the one that is wrong is among them."""
    drawn = np.random.default_rng(8)
    one = {f"layers.{number}.up.weight": drawn.normal(0, 0.1, (16, 16)) for number in range(30)}
    two = {name: values + drawn.normal(0, 1e-3, values.shape) for name, values in one.items()}
    two["layers.29.up.weight"] = drawn.normal(0, 0.1, (16, 16))
    sides = [write_step(tmp_path / side, 1, {name: np.float32(values) for name, values in found.items()})
             for side, found in (("one", one), ("two", two))]  # fmt: skip
    found = compared(*sides)
    assert [row.pair.name for row in found.steps[0].of(Standing.BEYOND)] == ["layers.29.up.weight"]
    lines = list(compare_lines(found, make_settings({})))
    first = next(line for line in lines if "layers." in line)
    assert "layers.29" in first
    assert code(found) == 1
