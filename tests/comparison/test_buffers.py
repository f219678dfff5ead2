"""Buffers and other numbers that no optimizer moves: what differs there is decided, or said to be open."""

import numpy as np
import pytest

from auditor.comparison.outcome import Course, Standing
from tests.comparison.test_exact import code, compared
from tests.comparison.tree import write_step

DRAWN = np.random.default_rng(4)
WEIGHTS = {"conv.weight": DRAWN.normal(0, 0.1, (8, 4, 3, 3)), "norm.weight": DRAWN.normal(1, 0.1, 8)}
MEAN, VARIANCE = DRAWN.normal(0, 0.2, 8), DRAWN.uniform(0.5, 2, 8)


def saved(folder, *, mean=MEAN, variance=VARIANCE, weights=WEIGHTS, step=5, count=()):
    """A step of a convolution with normalisation over batches."""
    statistics = {("buffer", "norm.running_mean"): mean, ("buffer", "norm.running_var"): variance}
    found = {**{("parameter", name): values for name, values in weights.items()}, **statistics}
    counted = {("buffer", "norm.count"): np.int64(count)} if count else {}
    return write_step(folder, step, {key: np.float32(values) for key, values in found.items()} | counted)


def standing(found, name):
    return next(row.standing for row in found.steps[-1].rows if row.pair.name == name)


@pytest.mark.parametrize(
    ("mean", "variance", "wrong", "ending"),
    [
        (MEAN * (1 + 1e-7), VARIANCE * (1 + 1e-7), Standing.UNDETERMINED, 3),
        (0 * MEAN, VARIANCE, Standing.BEYOND, 1),
        (MEAN / 2, VARIANCE, Standing.BEYOND, 1),
        (np.roll(MEAN, 3), VARIANCE, Standing.REORDERED, 1),
    ],
    ids=["rounding", "reset", "another momentum", "permuted"],
)
def test_averages_of_activations_where_all_that_was_trained_is_equal(tmp_path, mean, variance, wrong, ending):
    reference = saved(tmp_path / "one")
    found = compared(reference, saved(tmp_path / "two", mean=mean, variance=variance))
    assert (standing(found, "norm.running_mean"), code(found)) == (wrong, ending)
    assert code(compared(reference, saved(tmp_path / "three"))) == 0


def test_buffers_of_which_nothing_is_known_are_no_agreement(tmp_path):
    """Where weights were trained apart and hold, averages that differ by more than rounding are open."""
    for side, factor in (("one", 1), ("two", 1.3)):
        for step in (0, 1):
            saved(tmp_path / side, mean=MEAN * factor**step, step=step,
                  weights={"conv.weight": WEIGHTS["conv.weight"], "norm.weight": WEIGHTS["norm.weight"] * (1 + step * (
                      factor > 1) * 2**-23)})  # fmt: skip
    found = compared(tmp_path / "one", tmp_path / "two")
    assert standing(found, "norm.running_mean") is Standing.UNDETERMINED
    assert code(found) == 3
    (course,) = [one.course for one in found.growing if one.role.value == "buffer"]
    assert course is Course.OPEN


def test_whole_numbers_that_no_double_tells_apart(tmp_path):
    """2^62 and the number after it are one double: by their bits they are two, and whole numbers have no rounding."""
    found = compared(saved(tmp_path / "one", count=[2**62]), saved(tmp_path / "two", count=[2**62 + 1]))
    assert (standing(found, "norm.count"), code(found)) == (Standing.BEYOND, 1)


def test_of_two_files_that_record_one_step_the_other_is_named(tmp_path):
    torch = pytest.importorskip("torch")
    for side in ("one", "two"):
        (tmp_path / side).mkdir()
        for number in (100, 200):
            wrong = (side, number) == ("two", 200)
            torch.save(
                {"model": {"w": torch.ones(4) * (1 + wrong)}, "step": 100}, tmp_path / side / f"step_{number}.pt"
            )
    found = compared(tmp_path / "one", tmp_path / "two")
    assert code(found) == 3
    assert "records step 100, as step_100.pt does" in found.unrecognised["step_200.pt"]


def test_complex_numbers_against_real_ones_are_others(tmp_path):
    torch = pytest.importorskip("torch")
    for side, values in (("one", torch.ones(4, 2)), ("two", torch.ones(4, 2, dtype=torch.complex64))):
        (tmp_path / side).mkdir()
        torch.save({"model": {"w": values, "v": torch.ones(2)}}, tmp_path / side / "model_1.pt")
    found = compared(tmp_path / "one", tmp_path / "two")
    assert (standing(found, "w"), code(found)) == (Standing.BEYOND, 1)
    assert "float32 against complex64" in found.steps[0].of(Standing.BEYOND)[0].detail
