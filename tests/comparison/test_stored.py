"""Weights of which nothing else is known: when they may be called rounding, and when nothing is known of them."""

import numpy as np
import pytest

from auditor.comparison.outcome import Standing
from tests.comparison.test_exact import code, compared
from tests.comparison.tree import bfloat16, write_step

GENERATOR = np.random.default_rng(5)
SHAPES = {f"layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in
          {"up": (48, 16), "down": (16, 48), "norm": (16,)}.items()}  # fmt: skip


def drawn():
    """Weights of a model; norms lie near one."""
    return {
        name: GENERATOR.normal(1, 0.01, shape) if "norm" in name else GENERATOR.normal(0, 0.2, shape)
        for name, shape in SHAPES.items()
    }


def nearby(weights, how_far):
    """Weights that were trained on from there, each element by about so much."""
    return {name: values + GENERATOR.normal(0, how_far, values.shape) for name, values in weights.items()}


def saved(folder, weights, step=2000, form=bfloat16):
    return write_step(folder, step, {name: form(values) for name, values in weights.items()})


def told(found):
    return {row.pair.name: row.standing for row in found.steps[-1].rows}


WEIGHTS = drawn()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("reference"), WEIGHTS)


def test_unrelated_weights_never_agree_however_many_steps_were_made(reference, tmp_path):
    found = compared(reference, saved(tmp_path, drawn()))
    assert {told(found)[name] for name in SHAPES if "norm" not in name} == {Standing.BEYOND}
    assert code(found) == 1


@pytest.mark.parametrize("how_far", [1e-2, 1e-3])
def test_weights_that_may_have_been_trained_apart_are_undetermined(reference, tmp_path, how_far):
    found = compared(reference, saved(tmp_path, nearby(WEIGHTS, how_far)))
    assert Standing.ROUNDING not in told(found).values()
    assert told(found)["layers.1.up.weight"] is Standing.UNDETERMINED
    assert code(found) == 3


def test_one_set_stored_twice_may_be_rounded_and_nothing_else(reference, tmp_path):
    same = dict(WEIGHTS)
    found = compared(saved(tmp_path / "wide", same, form=np.float32), reference)
    assert set(told(found).values()) == {Standing.CAST}
    same["layers.1.up.weight"] = same["layers.1.up.weight"] * (1 + 2**-9)
    found = compared(saved(tmp_path / "near", same, form=np.float32), reference)
    # All other tensors are what is nearest to the wider numbers; this one lies below, in every element that differs.
    assert told(found)["layers.1.up.weight"] is Standing.BEYOND
    assert code(found) == 1
    # A norm's elements differ from each other by little more than that: it may as well be another layer's.
    same = {**WEIGHTS, "layers.1.norm.weight": WEIGHTS["layers.1.norm.weight"] + 0.004}
    assert told(compared(reference, saved(tmp_path / "norm", same)))["layers.1.norm.weight"] is Standing.SUSPICIOUS


@pytest.mark.parametrize(("change", "standing"), [("noise", "beyond rounding"), ("float16", "suspicious")])
def test_of_an_export_that_rounds_to_nearest_a_tensor_that_does_not(tmp_path, change, standing):
    """A thousandth of noise is less than a number of bfloat16 is off, and no rounding, nor two, moves so many."""
    drawn = np.random.default_rng(12)
    weights = {f"layers.{number}.up.weight": drawn.normal(0, 0.1, (64, 64)).astype("f4") for number in range(4)}
    name = "layers.2.up.weight"
    changed = {"noise": weights[name] * (1 + drawn.normal(0, 1e-3, (64, 64))), "float16": np.float16(weights[name])}
    narrow = {**weights, name: changed[change]}
    found = compared(saved(tmp_path / "one", weights, form=np.float32), saved(tmp_path / "two", narrow))
    assert {name: row.value for name, row in told(found).items() if row is not Standing.CAST} == {name: standing}


@pytest.mark.parametrize(
    ("change", "standing"),
    [("bit", Standing.SUSPICIOUS), ("either way", Standing.SUSPICIOUS), ("row", Standing.BEYOND),
     ("factor", Standing.BEYOND), ("cut off", Standing.BEYOND)],
)  # fmt: skip
def test_a_copy_in_one_dtype_rounds_nothing(reference, tmp_path, change, standing):
    """Elements that differ by one distance between numbers: by chance a warning, all in one direction no rounding."""
    near = {name: bfloat16(values) for name, values in WEIGHTS.items()}
    changed = near["layers.1.up.weight"]
    if change == "cut off":
        near = {name: (np.float32(values).view(np.uint32) >> 16).astype(np.uint16) for name, values in WEIGHTS.items()}
    elif change == "factor":
        near = {name: values + np.uint16(1) for name, values in near.items()}
    elif change == "either way":
        changed += np.resize(np.array([1, 0, 0xFFFF], np.uint16), changed.shape)
    else:
        changed[7, slice(None) if change == "row" else 3] += 1
    found = compared(reference, write_step(tmp_path, 2000, near))
    assert told(found)["layers.1.up.weight"] is standing
    assert code(found) == (1 if standing is Standing.BEYOND else 0)


@pytest.mark.parametrize("change", ["one element", "a factor"])
def test_what_a_conversion_changed_is_found_where_the_rest_is_equal(reference, tmp_path, change):
    values = WEIGHTS["layers.1.up.weight"].copy()
    if change == "one element":
        values[3, 4] = -values[3, 4] * 1.05
    else:
        values *= 1.03
    found = compared(reference, saved(tmp_path, {**WEIGHTS, "layers.1.up.weight": values}), power=True)
    (row,) = found.steps[0].of(Standing.BEYOND)
    assert row.pair.name == "layers.1.up.weight"
    assert code(found) == 1
    # One explanation, that of all which leaves least open.
    expected = "one element alone" if change == "one element" else "(+0.0299 of it): scaled on its way"
    assert expected in row.cause.text
    assert found.steps[0].recorded == found.steps[0].causes == ()
    assert row.power.factor == 2**-7


def test_what_was_rounded_on_its_way(reference, tmp_path):
    """Cut off in place of rounded is suspicious; through a narrower dtype into the same is a loss that is named."""
    wide = saved(tmp_path / "wide", WEIGHTS, form=np.float32)

    def cut_off(values):
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    found = compared(wide, saved(tmp_path / "cut", WEIGHTS, form=cut_off))
    assert (told(found)["layers.1.up.weight"], code(found)) == (Standing.SUSPICIOUS, 0)
    wrong = {**WEIGHTS, "layers.1.up.weight": WEIGHTS["layers.1.up.weight"] * 1.02}
    found = compared(wide, saved(tmp_path / "wrong", wrong, form=cut_off))
    assert (told(found)["layers.1.up.weight"], code(found)) == (Standing.BEYOND, 1)
    found = compared(wide, saved(tmp_path / "through", WEIGHTS, form=lambda v: np.float32(np.float16(v))))
    assert {row.detail for row in found.steps[0].of(Standing.BEYOND)} == {
        "the reference's numbers, rounded to float16 on their way"
    }


def stateful(step, **changed):
    """A save with optimizer state; ``changed``: of one tensor, role to factors."""
    tensors = {("parameter", name): np.float32(values) for name, values in WEIGHTS.items()}
    drawn = np.random.default_rng(3)
    for role in ("first_moment", "second_moment"):
        tensors |= {(role, name): np.float32(abs(drawn.normal(0, 1e-3, v.shape))) for name, v in WEIGHTS.items()}
    for role, factors in changed.items():
        tensors[role, "layers.1.up.weight"] = np.float32(tensors[role, "layers.1.up.weight"] * factors)
    numbers = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
    group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": step, "hyperparameters": numbers,
             "parameters": list(WEIGHTS)}  # fmt: skip
    return lambda folder: write_step(folder, step, tensors, groups=[group])


@pytest.mark.parametrize("changed", ["parameter", "first_moment"])
def test_equal_moments_say_that_nothing_was_trained_apart(tmp_path, changed):
    """After 2,000 steps rounding may lead far apart; a conversion of one save leaves all else equal."""
    sides = stateful(2000)(tmp_path / "one"), stateful(2000, **{changed: 1.001})(tmp_path / "two")
    found = compared(*sides, compute="bfloat16")
    assert [row.pair.role.value for row in found.steps[0].of(Standing.BEYOND)] == [changed]
    assert code(found) == 1


@pytest.mark.parametrize(("wrong", "standing"), [("", Standing.UNDETERMINED), ("base", Standing.BEYOND),
                                                 ("one adapter", Standing.BEYOND)])  # fmt: skip
def test_a_frozen_base_says_nothing_of_adapters_that_were_trained_apart(tmp_path, wrong, standing):
    """Without optimizer state: adapters that all differ were trained; one that alone differs was not."""
    adapters = {f"layers.{layer}.up.lora_{part}.default.weight": GENERATOR.normal(0, 0.1, (4, 16))
                for layer in range(2) for part in "AB"}  # fmt: skip
    first = next(iter(adapters))
    apart = nearby(adapters, 1e-2)
    changed = {**adapters, first: apart[first]} if wrong == "one adapter" else apart
    base = dict(WEIGHTS)
    if wrong == "base":
        base["layers.1.up.weight"] = base["layers.1.up.weight"] * 1.03
    sides = saved(tmp_path / "one", {**WEIGHTS, **adapters}), saved(tmp_path / "two", {**base, **changed})
    found = compared(*sides)
    assert told(found)[first if wrong != "base" else "layers.1.up.weight"] is standing
    assert told(found)[first] is (Standing.UNDETERMINED if wrong != "one adapter" else Standing.BEYOND)
    assert code(found) == (1 if wrong else 3)


def test_one_kernel_that_adds_up_in_no_order_is_rounding_after_one_step(tmp_path):
    noise = 1 + GENERATOR.normal(0, 3e-7, SHAPES["layers.1.up.weight"])
    sides = stateful(1)(tmp_path / "one"), stateful(1, first_moment=noise)(tmp_path / "two")
    found = compared(*sides)
    assert len(found.steps[0].of(Standing.ROUNDING)) == 1
    assert code(found) == 0


def test_moments_in_bfloat16_round_as_they_are_stored(tmp_path):
    """Gradients that agree to float32's rounding fall on either side where they are stored in fewer bits."""
    gradient = GENERATOR.normal(0, 1e-3, (64, 64))
    sides = [
        write_step(tmp_path / str(number), 1, {
            "w": np.ones((64, 64), np.float32),
            **{(role, "w"): bfloat16(found) for role, found in (("first_moment", g), ("second_moment", g**2))},
        })
        for number, g in enumerate((gradient, gradient * (1 + GENERATOR.normal(0, 1e-5, (64, 64)))))
    ]  # fmt: skip
    found = compared(*sides, compute="float32")
    assert (len(found.steps[0].of(Standing.ROUNDING)), code(found)) == (2, 0)


def test_no_rounding_explains_what_a_step_before_was_equal(reference, tmp_path):
    """In bfloat16 a step may be smaller than the distance between numbers: a lost one is not called rounding."""
    moved = {name: values * (1 + 2**-8) for name, values in WEIGHTS.items()}
    for folder, last in (("reference", moved), ("candidate", nearby(moved, 1e-4))):
        saved(tmp_path / folder, WEIGHTS, 0)
        saved(tmp_path / folder, last, 1)
    found = compared(tmp_path / "reference", tmp_path / "candidate")
    assert found.last_equal == 0
    assert Standing.ROUNDING not in told(found).values()
    assert code(found) == 3


def integers(width):
    top = 2**53 if width == "int64" else 100
    return {"table": np.array([[top, 1, 2], [3, 4, 5]], width)}, {
        "table": np.array([[top + 1, 1, 2], [3, 4, 5]], width)
    }


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        integers("int64"),
        integers("int8"),
        ({"mask": np.array([True, False, True])}, {"mask": np.array([True, True, True])}),
    ],
    ids=["int64", "int8", "bool"],
)
def test_integers_and_bools_are_equal_or_others(tmp_path, own, theirs):
    found = compared(write_step(tmp_path / "one", 1, own), write_step(tmp_path / "two", 1, theirs))
    assert set(told(found).values()) == {Standing.BEYOND}
    assert code(found) == 1
    assert code(compared(tmp_path / "one", tmp_path / "one")) == 0


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e308, 5e-324])
def test_squares_that_are_no_doubles(tmp_path, size):
    own = GENERATOR.uniform(0.5, 1.5, (8, 8)) * size if size > 1e-300 else np.full((8, 8), size)
    other = own.copy()
    other[:4] = -other[:4]
    both = [
        write_step(tmp_path / name, 3, {"w": values, ("first_moment", "w"): values})
        for name, values in (("one", own), ("two", other))
    ]
    found = compared(*both, power=True)
    rows = found.steps[0].rows
    assert {row.standing for row in rows} == {Standing.BEYOND}
    assert all(1 < row.amount.relative < 2 for row in rows)
    assert all("zero" not in row.detail for row in rows)


def test_complex_numbers_are_compared_part_by_part(tmp_path):
    own = GENERATOR.normal(0, 1, (8, 4)) + 1j
    other = own.copy()
    other[3] *= 2
    tensors = ({"w": values.astype(np.complex64), "v": own} for values in (own, other))
    found = compared(*(write_step(tmp_path / str(n), 1, each) for n, each in enumerate(tensors)))
    assert told(found) == {"w": Standing.BEYOND, "v": Standing.EQUAL}
    many = (1,) * 62 + (8, 4)
    both = [write_step(tmp_path / f"{n}m", 1, {"w": x.reshape(many)}) for n, x in enumerate((own, other))]
    found = compared(*both)
    assert (told(found), code(found)) == ({"w": Standing.UNDETERMINED}, 3)


def test_what_is_equal_but_for_the_dtype_decides_nothing_of_the_rest(reference, tmp_path):
    apart = {**nearby(WEIGHTS, 1e-3), **{name: WEIGHTS[name] for name in SHAPES if "norm" in name}}
    found = compared(saved(tmp_path, apart, form=np.float32), reference)
    assert {Standing.CAST, Standing.UNDETERMINED} <= set(told(found).values())
    assert code(found) == 3


@pytest.mark.parametrize(
    ("choices", "to_narrow", "to_wide"), [({}, 0, 0), ({"exact": True}, 1, 0), ({"resume": True}, 1, 1)]
)
def test_another_dtype_is_no_resumed_state_and_a_narrower_one_is_not_exact(
    reference, tmp_path, choices, to_narrow, to_wide
):
    wide = saved(tmp_path, WEIGHTS, form=np.float32)
    assert code(compared(wide, reference, **choices)) == to_narrow
    assert code(compared(reference, wide, **choices)) == to_wide


def one_step_of_adam(folder, noise, epsilon=1e-8, **recorded):
    """Two saves around a first step, whose gradients are nearly zero in one tensor (the bias of attention's keys)."""
    drawn, names = np.random.default_rng(7), [f"layers.{layer}.{name}" for layer in range(4) for name in ("up", "key")]
    group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "hyperparameters": {"lr": 1e-3, **recorded},
             "parameters": names}  # fmt: skip
    begun, after = {}, {}
    for name in names:
        w, g = drawn.normal(0, 0.1, (16, 16)), drawn.normal(0, 1e-9 if "key" in name else 1e-2, (16, 16))
        g = g * (1 + GENERATOR.normal(0, noise, g.shape)) + (GENERATOR.normal(0, 1e-9, g.shape) if noise else 0)
        moments = {"first_moment": 0.1 * g, "second_moment": 0.05 * g**2}
        begun |= {("parameter", name): w, **{(role, name): 0 * value for role, value in moments.items()}}  # -0.0 is 0.0
        moved = {"parameter": w - 1e-3 * g / (abs(g) + epsilon), **moments}
        after |= {(role, name): value for role, value in moved.items()}
    for step, tensors in enumerate((begun, after)):
        write_step(folder, step, {key: np.float32(v) for key, v in tensors.items()}, groups=[{**group, "step": step}])
    return folder


def test_a_step_is_replayed_only_with_numbers_that_are_known(tmp_path, monkeypatch):
    """Optax records no betas: where gradients are as small as epsilon, moments alone don't say where they lead."""

    def key(one, two):
        rows = compared(one, two).steps[1].rows
        return next(r.standing for r in rows if (r.pair.name, r.pair.role.value) == ("layers.1.key", "parameter"))

    one, two = one_step_of_adam(tmp_path / "one", 0), one_step_of_adam(tmp_path / "two", 1e-7)
    wrong = one_step_of_adam(tmp_path / "wrong", 1e-7, epsilon=1e-6)
    assert {key(one, two), key(one, wrong)} == {Standing.UNDETERMINED}
    assert key(one_step_of_adam(tmp_path / "recorded", 0, betas=[0.9, 0.95], eps=1e-8), wrong) is Standing.BEYOND
    (tmp_path / "auditor.toml").write_text("[optimizer]\nbetas = [0.9, 0.95]\neps = 1e-8\n")
    monkeypatch.chdir(tmp_path)
    assert (key(one, two), key(one, wrong)) == (Standing.ROUNDING, Standing.BEYOND)


@pytest.mark.parametrize("moved", [1.0, 50.0])
def test_a_bias_that_normalisation_takes_out_again(tmp_path, moved):
    """Its gradient is rounding, its mean follows it; a mean that went farther than its bias is wrong."""
    sides = []
    for side in ("one", "two"):
        noise, tensors = np.random.default_rng(len(sides) + 11), {}
        drawn = np.random.default_rng(9)
        for name, shape, size in (("conv.weight", (16, 3, 3, 3), 1e-2), ("conv.bias", (16,), 0.0)):
            g, w = drawn.normal(0, size, shape) + noise.normal(0, 1e-9, shape), drawn.normal(0, 0.1, shape)
            step = 1e-3 * np.sign(g)
            tensors |= {("parameter", name): w - step, ("first_moment", name): g, ("second_moment", name): g**2}
        tensors["buffer", "norm.running_mean"] = drawn.normal(0, 0.1, 16) - (moved if side == "two" else 1) * step / 10
        group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": 1, "hyperparameters": {"lr": 1e-3},
                 "parameters": ["conv.weight", "conv.bias"]}  # fmt: skip
        sides.append(write_step(tmp_path / side, 1, {k: np.float32(v) for k, v in tensors.items()}, groups=[group]))
    rows = compared(*sides, tokens=4096).steps[0].rows
    standings = {(row.pair.name, row.pair.role.value): row.standing for row in rows}
    assert {standings["conv.bias", role] for role in ("parameter", "first_moment")} == {Standing.UNDETERMINED}
    expected = Standing.UNDETERMINED if moved == 1 else Standing.BEYOND
    assert standings["norm.running_mean", "buffer"] is expected


@pytest.mark.parametrize(
    ("name", "rerun", "standing"),
    [("experts.3.up", False, Standing.SUSPICIOUS), ("experts.3.up", True, Standing.SUSPICIOUS),
     ("mlp.up", False, Standing.BEYOND), ("mlp.up", True, Standing.BEYOND)],
)  # fmt: skip
def test_a_token_that_changes_its_expert_is_no_bug(tmp_path, name, rerun, standing):
    """One of 32 tokens of an expert is a third of its gradient; a rerun in which none changed is no bound on that."""
    sides = {}
    for side, apart in (("one", 0.0), ("two", 0.3), ("rerun", 0.005)):
        drawn, noise = np.random.default_rng(4), np.random.default_rng(len(side))
        group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": 1, "parameters": [f"layers.0.{name}"],
                 "hyperparameters": {"lr": 1e-3}}  # fmt: skip
        w, g = drawn.normal(0, 0.1, (32, 32)), drawn.normal(0, 1e-2, (32, 32))
        g = g + noise.normal(0, 1e-2 * apart, g.shape)
        tensors = {(role, f"layers.0.{name}"): np.float32(v) for role, v in
                   {"parameter": w, "first_moment": 0.1 * g, "second_moment": 0.05 * g**2}.items()}  # fmt: skip
        sides[side] = write_step(tmp_path / side, 1, tensors, groups=[group])
    choices = {"calibrate": [str(sides["rerun"])]} if rerun else {}
    for narrow, expected in (({"compute": "bfloat16"}, standing), ({"tokens": 128}, Standing.BEYOND)):
        rows = compared(sides["one"], sides["two"], **narrow, **choices).steps[0].rows
        (row,) = [row for row in rows if row.pair.role.value == "first_moment"]
        # In float32, of 128 tokens none is expected to change.
        assert row.standing is expected, (narrow, row)


def test_what_an_earlier_step_allowed_stays_allowed(tmp_path):
    """A gradient as small as its rounding led apart in step 1; in step 2 it is large, and the weights still differ."""
    group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "hyperparameters": {"lr": 1e-3},
             "parameters": ["layers.0.up"]}  # fmt: skip
    for side in ("one", "two"):
        drawn, own = np.random.default_rng(3), np.random.default_rng(len(side + side[0]) + ord(side[0]))
        weights, gradient = drawn.normal(0, 0.1, (16, 16)), drawn.normal(0, 1e-2, (16, 16))
        for step in range(3):
            found = gradient * (1 + own.normal(0, 1e-7, gradient.shape))
            if step == 1:
                found[:, :4] = 1e-9
                weights = weights - 1e-3 * np.sign(gradient)
                weights[:4, :4] += 5e-4 if side == "two" else 0.0
            moments = {"first_moment": 0.1 * found, "second_moment": 0.05 * found**2} if step else {}
            tensors = {(role, "layers.0.up"): np.float32(v) for role, v in {"parameter": weights, **moments}.items()}
            write_step(tmp_path / side, step, tensors, groups=[{**group, "step": step}])

    def standing(**chosen):
        rows = compared(tmp_path / "one", tmp_path / "two", **chosen).steps[-1].rows
        return next(row.standing for row in rows if row.pair.role.value == "parameter")

    assert standing() in (Standing.ROUNDING, Standing.UNDETERMINED)
    assert standing(steps="0,2") is Standing.BEYOND


@pytest.mark.parametrize("recorded", [{"ns_steps": 5}, {}])
def test_updates_of_whole_matrices_are_not_derived(tmp_path, recorded):
    """Muon's update of one element is made of all others: after a first step no bound on gradients holds."""
    group = {"number": 0, "file": "zarr.json", "optimizer": "", "step": 5, "parameters": list(SHAPES),
             "hyperparameters": {"lr": 1e-2, "momentum": 0.95, **recorded}}  # fmt: skip
    moments = {name: GENERATOR.normal(0, 1e-3, shape) for name, shape in SHAPES.items()}
    sides = [
        write_step(tmp_path / str(number), 5, {
            **{("parameter", name): np.float32(values) for name, values in found.items()},
            **{("moment", name): np.float32(values) for name, values in nearby(moments, number * 1e-6).items()},
        }, groups=[group])
        for number, found in enumerate((WEIGHTS, nearby(WEIGHTS, 1e-4)))
    ]  # fmt: skip
    standings = {row.standing for row in compared(*sides, tokens=64).steps[0].rows if row.pair.role.value == "moment"}
    assert standings == {Standing.UNDETERMINED if recorded else Standing.BEYOND}


def test_a_tied_head_stands_as_the_embedding_does(tmp_path):
    """Stored under both names on both sides, it has no optimizer state of its own."""
    for side, noise in (("one", 0.0), ("two", 1e-7)):
        drawn = np.random.default_rng(8)
        w, g = drawn.normal(0, 0.1, (16, 16)), drawn.normal(0, 1e-2, (16, 16))
        w, g = w + noise * drawn.normal(0, 0.1, w.shape), g * (1 + noise * drawn.normal(0, 1, g.shape))
        tensors = {("parameter", "embed.weight"): w, ("parameter", "lm_head.weight"): w,
                   ("first_moment", "embed.weight"): 0.1 * g, ("second_moment", "embed.weight"): g**2}  # fmt: skip
        group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": 1, "hyperparameters": {"lr": 1e-3},
                 "parameters": ["embed.weight"]}  # fmt: skip
        for step in range(2):
            kept = {key: 0 * v + 0.5 if step == 0 else v for key, v in tensors.items() if step or key[0] == "parameter"}
            write_step(tmp_path / side, step, {k: np.float32(v) for k, v in kept.items()}, groups=[group])
    rows = {row.pair.name: row for row in compared(tmp_path / "one", tmp_path / "two").steps[-1].rows
            if row.pair.role.value == "parameter"}  # fmt: skip
    assert {row.standing for row in rows.values()} == {Standing.ROUNDING}
    assert rows["lm_head.weight"].detail == "tied: as embed.weight"


@pytest.mark.parametrize(("tokens", "standing"), [(0, Standing.UNDETERMINED), (4096, Standing.ROUNDING)])
def test_sums_over_pixels_show_in_no_shape(tmp_path, tokens, standing):
    values = GENERATOR.normal(0, 0.1, (8, 4, 3, 3))
    noisy = values * (1 + GENERATOR.normal(0, 1e-7, values.shape))
    sides = []
    for name, moment in (("one", values), ("other", noisy)):
        of_role = {("parameter", "conv.weight"): values, ("first_moment", "conv.weight"): moment}
        sides.append(write_step(tmp_path / name, 1, {key: np.float32(found) for key, found in of_role.items()}))
    (row,) = [row for row in compared(*sides, tokens=tokens).steps[0].rows if row.pair.role.value == "first_moment"]
    assert row.standing is standing, row
    assert ("--tokens" in row.detail) is (standing is Standing.UNDETERMINED)
