"""Of one tensor the explanation that leaves least open, once for all that share it; what is recorded comes first."""

import numpy as np
import pytest

from auditor.comparison.outcome import Standing
from tests.comparison.test_exact import code, compared
from tests.comparison.tree import write_step

NUMBERS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
NAMES = [f"layers.{layer}.{name}.weight" for layer in range(3) for name in ("up", "down")]


def saved(
    folder, change=lambda name, gradient: gradient, *, axis="tp", step=1, moved=1e-3, number=1, scalars=(), **numbers
):
    """A first step of Adam from weights that are saved before it, cut over two; ``change``: of gradients."""
    drawn = np.random.default_rng(3)
    group = {"file": "optimizer.pt", "optimizer": "adamw"}
    groups = [
        {**group, "number": at, "parameters": NAMES[at::2], "hyperparameters": {**NUMBERS, **numbers}} for at in (0, 1)
    ]
    said = {"mesh": {axis: 2}, "placement": {axis: "shard:0"}}
    for at in (0, step):
        tensors = {}
        for name in NAMES:
            w, g = np.random.default_rng(len(tensors)).normal(0, 0.1, (16, 16)), drawn.normal(0, 1e-2, (16, 16))
            g = change(name, g)
            roles = {"parameter": w - (moved * np.sign(g) if at else 0)}
            if at:
                roles |= {"first_moment": 0.1 * g, "second_moment": 0.05 * g**2}
            tensors |= {(role, name): (np.float32(values), said) for role, values in roles.items()}
        of_step = [{**one, "step": number * (at > 0)} for one in groups]
        write_step(folder, at, tensors, mesh={axis: 2}, groups=of_step if at else (), scalars=scalars if at else ())
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("reference"))


def rows_of(first, second=slice(None), factor=2.0):
    def change(name, gradient):
        if name in NAMES[:4]:
            gradient[first, second] *= factor
        return gradient

    return change


def test_of_all_that_fits_what_leaves_least_open_is_offered_once(reference, tmp_path):
    found = compared(reference, saved(tmp_path, rows_of(slice(8, 16))))
    step = found.steps[-1]
    moments = [row for row in step.of(Standing.BEYOND) if row.pair.role.value == "first_moment"]
    assert len(moments) == 4
    for row in moments:
        assert row.cause.held_by == "tp rank 1 of 2"
        assert "about 2 times the reference" in row.cause.text
    assert {row.cause for row in moments} <= step.gathered
    (cause,) = step.causes
    assert "4 of 4 gradients that differ do so in what tp rank 1 of 2 holds alone" in cause.text
    assert cause.text.endswith("(layers.0.up.weight, layers.0.down.weight, layers.1.up.weight and 1 more)")


def test_several_tensors_with_one_factor_are_told_together(reference, tmp_path):
    found = compared(reference, saved(tmp_path, rows_of(slice(None), factor=0.5)))
    (cause,) = found.steps[-1].causes
    assert "gradients of 4 tensors are 0.5 times the reference's, one over the 2 ranks of tp" in cause.text
    # Second moments are its square, and weights follow: neither is a cause of its own.
    factors = [row.cause.factor for row in found.steps[-1].rows if row.cause]
    assert factors == pytest.approx([0.5] * 8, rel=1e-6)


def test_one_of_two_only_where_both_explain_it_equally_well(reference, tmp_path):
    """A quarter that lies in one half of the rows and in one half of the columns."""
    found = compared(reference, saved(tmp_path, rows_of(slice(8, 16), slice(0, 8), -1.0)), only=[NAMES[0]])
    causes = {row.pair.role.value: row.cause for row in found.steps[-1].rows if row.cause}
    text = causes["first_moment"].text
    assert text.startswith("one of: along dim 0 all of it is in what tp rank 1 of 2 holds")
    assert "; or along dim 1 all of it is in what part 0 of 2 equal parts holds" in text


@pytest.mark.parametrize(
    ("changes", "first"),
    [({"lr": 2e-3}, "lr 0.001 against 0.002, in optimizer.pt"), ({"eps": 1e-6}, "eps 1e-08 against 1e-06"),
     ({"number": 2}, "optimizer steps 1 against 2, in optimizer.pt"),
     ({"scalars": ("seed", 7.0)}, "seed 3.0 against 7.0, in common.pt"),
     ({"scalars": ("consumed_train_samples", 64.0)}, "consumed_train_samples 3.0 against 64.0")],
    ids=["rate", "epsilon", "count", "seed", "samples"],
)  # fmt: skip
def test_what_is_recorded_otherwise_comes_first(tmp_path, changes, first):
    name, value = changes.pop("scalars", ("seed", 3.0))
    own, theirs = ([{"name": name, "value": each, "file": "common.pt"}] for each in (3.0, value))
    one = saved(tmp_path / "one", scalars=own)
    other = saved(tmp_path / "two", moved=2e-3, scalars=theirs, **changes)
    found = compared(one, other)
    step = found.steps[-1]
    assert code(found) == 1
    assert step.causes[0].text.startswith("recorded otherwise: ")
    assert first in step.causes[0].text
    assert first in "\n".join(step.recorded)
    # It says what the optimizer did otherwise; that something did is not said again.
    assert not any("moments agree" in cause.text for cause in step.causes)


def test_no_rate_explains_a_gradient_of_a_first_step(reference, tmp_path):
    found = compared(reference, saved(tmp_path, rows_of(slice(8, 16)), lr=2e-3))
    texts = [cause.text for cause in found.steps[-1].causes]
    assert ["tp rank 1 of 2" in texts[0], "recorded otherwise" in texts[-1]] == [True, True]
    # One side's files keep float32 numbers.
    single = compared(
        reference, saved(tmp_path / "single", lr=float(np.float32(1e-3)), betas=[float(np.float32(0.9)), 0.95])
    )
    assert (code(single), single.steps[-1].recorded) == (0, ())
    betas = compared(reference, saved(tmp_path / "betas", rows_of(slice(None), factor=5.0), betas=[0.5, 0.95]))
    assert betas.steps[-1].causes[0].text.startswith("recorded otherwise: betas (0.9, 0.95) against (0.5, 0.95)")


def test_a_setting_is_held_against_that_of_the_same_parameters(reference, tmp_path):
    """Decay that moved from one group to the other is in no set of values."""
    for folder, decays in (("one", (0.1, 0.0)), ("two", (0.0, 0.1))):
        saved(tmp_path / folder)
        at = tmp_path / folder / "steps" / "1" / "catalog" / "zarr.json"
        text = at.read_text()
        for decay in decays:
            text = text.replace('"weight_decay": 0.0}', f'"weight_decay": {decay} }}', 1)
        at.write_text(text)
    found = compared(tmp_path / "one", tmp_path / "two")
    recorded = found.steps[-1].recorded
    assert recorded[0] == f"weight_decay 0.1 against 0.0 (for {NAMES[0]}, {NAMES[2]} and 1 more), in optimizer.pt"
    assert len(recorded) == 2
    # Where all agrees it is said and no cause of anything.
    assert (code(found), found.steps[-1].causes) == (0, ())


@pytest.mark.parametrize("reduced", [True, False])
def test_sums_over_ranks_that_are_made_of_bfloat16_numbers_are_noted(tmp_path, reduced):
    """On one device a computation in bfloat16 gives such gradients; a sum in float32 of several of them does not."""

    def coarse(name, gradient):
        return (np.float32(gradient).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def summed(name, gradient):
        found = coarse(name, gradient * 0.99) + coarse(name, gradient * 1.01)
        return coarse(name, found / 2) if reduced else found / 2

    found = compared(saved(tmp_path / "one", coarse), saved(tmp_path / "two", summed, axis="dp"), compute="bfloat16")
    said = "gradients of 6 tensors are made of bfloat16 numbers, though they are sums over 2 ranks"
    assert any(said in note for note in found.steps[-1].notes) is reduced
    assert code(found) == 0


@pytest.mark.parametrize(("noise", "refused"), [(1e-3, False), (0.3, True)], ids=["TF32", "other data"])
def test_reruns_in_coarse_products_are_reruns(reference, tmp_path, noise, refused):
    """No file tells TF32's products from float32's: a rerun is one where they explain it."""

    def noisy(name, gradient):
        return gradient * (1 + np.random.default_rng(len(name)).normal(0, noise, gradient.shape))

    rerun = saved(tmp_path / "rerun", noisy)
    found = compared(reference, saved(tmp_path / "two"), calibrate=[str(rerun)], compute="float32")
    assert bool(found.refused) is refused
    assert code(found) == (3 if refused else 0)
