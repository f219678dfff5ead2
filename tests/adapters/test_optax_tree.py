"""What optimizers of optax keep is told by the structure of their state; the trees are those of real states."""

import json
from collections import Counter

import pytest

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.optax.record import numbers, record, recorded_step
from auditor.adapters.optax.tree import Leaf, OptaxTree
from auditor.model.catalog import Role
from auditor.model.dtype import DTYPES
from tests.paths import ROOT

TREES = json.loads((ROOT / "tests/fixtures/optax_trees/trees.json").read_text())
PARAMETERS = {"embed.embedding", "layers_0.mlp.kernel", "layers_0.mlp.bias", "layers_0.norm.scale", "head.kernel"}
FIRST, SECOND, MOMENT = Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.MOMENT


def leaves(name):
    return [Leaf(tuple(path), DTYPES[dtype], tuple(shape), is_key) for path, dtype, shape, is_key in TREES[name]]


def tree(name):
    return OptaxTree(leaves(name))


def names(of, role):
    return {meaning.name for meaning in of.meanings if meaning.role is role}


def recorded(of, value=lambda path: 7.0):
    builder = CatalogBuilder()
    record(builder, of, {at: value(of.paths[at]) for at in numbers(of)}, "state")
    return builder


def counts(builder):
    return {scalar.tensor: scalar.value for scalar in builder.scalars if scalar.name == "optimizer_step"}


@pytest.mark.parametrize("name", sorted(TREES.keys() - {"two-models", "nnx", "one-array", "optimizer-alone"}))
def test_parameters_are_named_below_their_tree(name):
    of = tree(name)
    assert names(of, Role.PARAMETER) == PARAMETERS
    orders = {meaning.name: meaning.order for meaning in of.meanings if meaning.role is Role.PARAMETER}
    assert sorted(orders.values()) == list(range(5))
    for leaf, meaning in zip(of.leaves, of.meanings, strict=True):
        if meaning.role in (FIRST, SECOND) and meaning.order >= 0:
            assert meaning.order == orders[meaning.name], leaf


@pytest.mark.parametrize("name", TREES)
def test_no_two_arrays_are_one_tensor(name):
    found = Counter((meaning.role, meaning.name) for meaning in tree(name).meanings)
    assert found.most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    "name",
    ["adam", "adamw-clip-schedule", "adamw-bf16-mu", "adamw-masked-decay", "inject", "multi-steps", "apply-if-finite",
     "linen-variables", "tuple", "average", "optimizer-alone"],
)  # fmt: skip
def test_both_moments_of_adam(name):
    of = tree(name)
    assert names(of, FIRST) == names(of, SECOND) == PARAMETERS
    assert not names(of, Role.OBJECT) - {
        "dropout_rng", "opt_state.last_finite", *(n for n in names(of, Role.OBJECT) if "hyperparams" in n)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        ("amsgrad", MOMENT, {f"{name}.max_exp_avg_sq" for name in PARAMETERS}),
        ("sgd-momentum", MOMENT, PARAMETERS),
        ("lion", FIRST, PARAMETERS),
        ("rmsprop", MOMENT, PARAMETERS),
        ("adagrad", MOMENT, {f"{name}.sum_of_squares" for name in PARAMETERS}),
        ("novograd", MOMENT, {f"{name}.nu" for name in PARAMETERS}),
        ("adam-ema", MOMENT, {f"{name}.ema" for name in PARAMETERS}),
        ("multi-steps", MOMENT, {f"{name}.acc_grads" for name in PARAMETERS}),
        ("schedule-free", MOMENT, {f"{name}.z" for name in PARAMETERS}),
        ("sgd", FIRST, set()),
        ("sm3", MOMENT, {f"{name}.nu" for name in PARAMETERS}),
        ("adan", MOMENT, {f"{name}.{field}" for name in PARAMETERS for field in "mvng"}),
        ("adan", SECOND, set()),
        ("mechanize", SECOND, PARAMETERS),
        ("mechanize", MOMENT, {f"{name}.x0" for name in PARAMETERS}),
        ("average", Role.EMA, PARAMETERS),
        ("average", Role.MASTER, PARAMETERS),
        ("average", Role.BUFFER, {"batch_stats.norm.mean", "batch_stats.norm.var"}),
        ("average", Role.OBJECT, {"dropout_rng"}),
        ("noisy", Role.OBJECT, {"opt_state.0.rng_key"}),
        ("nnx", Role.BUFFER, {"norm.mean", "norm.var"}),
        ("one-array", SECOND, {"params"}),
    ],
)
def test_what_other_optimizers_keep(name, role, expected):
    assert names(tree(name), role) == expected


def test_adafactor_keeps_a_second_moment_or_its_factors():
    of = tree("adafactor")
    matrices = {"embed.embedding", "layers_0.mlp.kernel", "head.kernel"}
    factors = {f"{name}.{field}" for name in matrices for field in ("v_row", "v_col")}
    assert names(of, SECOND) == PARAMETERS - matrices
    assert names(of, MOMENT) == factors | {f"{name}.ema" for name in PARAMETERS}
    # What it keeps one zero for is no moment.
    assert all(leaf.shape == (1,) for leaf, m in zip(of.leaves, of.meanings, strict=True) if m.role is Role.PADDING)
    assert len(names(of, Role.PADDING)) == 7


def test_a_mask_leaves_out_whom_it_masks():
    of = tree("multi-transform")
    assert names(of, FIRST) == {"layers_0.mlp.kernel", "head.kernel"}
    assert names(of, MOMENT) == {"layers_0.mlp.bias", "layers_0.norm.scale"}
    groups = recorded(of).groups
    assert [set(group.parameters) for group in groups] == [names(of, FIRST), names(of, MOMENT)]
    assert all(group.from_state for group in groups)


def test_injected_hyperparameters_have_torchs_names():
    of = tree("inject")
    values = {"learning_rate": 5e-4, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "eps_root": 0.0, "weight_decay": 1e-4}
    (group,) = recorded(of, lambda path: values.get(path[-1], 7.0)).groups
    assert group.hyperparameters == {
        "lr": 5e-4, "betas": (0.9, 0.99), "eps": 1e-8, "eps_root": 0.0, "weight_decay": 1e-4, "initial_lr": None,
    }  # fmt: skip


def test_states_of_a_chain_count_by_themselves():
    of = tree("adamw-clip-schedule")
    found = counts(recorded(of, lambda path: 5.0 if path[-2:-1] == ("2",) else 4.0))
    assert found == dict.fromkeys(PARAMETERS, 4.0) | {"opt_state.1.2.count": 5.0}
    assert recorded_step(of, dict.fromkeys(numbers(of), 9.0)) == 9


def test_counts_of_calls_that_take_no_step_are_no_counts_of_steps():
    assert counts(recorded(tree("multi-steps"))).keys() == PARAMETERS
    assert counts(recorded(tree("plateau"))).keys() == PARAMETERS
    finite = recorded(tree("apply-if-finite"))
    assert counts(finite).keys() == PARAMETERS
    assert [scalar.value for scalar in finite.scalars if scalar.name == "skipped_steps"] == [7.0]


def test_two_models_of_one_structure_keep_their_own_state():
    of = tree("two-models")
    expected = {f"{model}.params.{name}" for model in ("generator", "critic") for name in PARAMETERS}
    assert names(of, Role.PARAMETER) == names(of, FIRST) == names(of, SECOND) == expected
    scalars = recorded(of).scalars
    assert {scalar.optimizer for scalar in scalars} == {"generator.opt_state", "critic.opt_state"}


def test_nnx_wraps_every_array():
    of = tree("nnx")
    assert "blocks.1.kernel" in names(of, FIRST) == names(of, Role.PARAMETER)
    assert names(of, Role.OBJECT) == {"0.dropout.rngs.key", "dropout.rngs.count"}


def test_state_without_parameters_says_so():
    of = tree("optimizer-alone")
    assert {meaning.undetermined for meaning in of.meanings if meaning.role is FIRST} == {
        "no parameters are stored beside the optimizer's state"
    }


def test_keys_with_dots_are_told_from_paths():
    dtype = DTYPES["float32"]
    of = OptaxTree([Leaf(("a.b",), dtype, (2,)), Leaf(("a", "b"), dtype, (2,)), Leaf(("c.d",), dtype, (2,))])
    assert [meaning.name for meaning in of.meanings] == ["'a.b'", "a.b", "'c.d'"]
    assert OptaxTree([Leaf(("c.d",), dtype, (2,))]).meanings[0].name == "c.d"


def test_a_moment_of_another_parameters_shape_stays_its_moment():
    odd = [
        Leaf(leaf.path, leaf.dtype, (3,) if leaf.path[-4:] == ("nu", "layers_0", "norm", "scale") else leaf.shape)
        for leaf in leaves("adam")
    ]
    assert names(OptaxTree(odd), SECOND) == PARAMETERS


def test_a_module_may_be_called_opt():
    dtype = DTYPES["float32"]
    of = OptaxTree([Leaf(("params", "opt", "mu", "kernel"), dtype, (2, 2)), Leaf(("params", "mu", "nu"), dtype, (2,))])
    assert names(of, Role.PARAMETER) == {"opt.mu.kernel", "mu.nu"}


def test_a_head_beside_a_trunk_called_model_is_a_parameter():
    """`FlaxLlamaForCausalLM.save_pretrained` keeps it so."""
    dtype = DTYPES["float32"]
    trunk = [Leaf(("model", *path), dtype, (2,)) for path in (("norm", "weight"), ("embed_tokens", "embedding"))]
    head = Leaf(("lm_head", "kernel"), dtype, (2, 2))
    expected = {"model.norm.weight", "model.embed_tokens.embedding", "lm_head.kernel"}
    assert names(OptaxTree([*trunk, head]), Role.PARAMETER) == expected
    # An average, statistics, a step beside what a trainer calls its model are none.
    others = [
        Leaf(("ema", "norm", "weight"), dtype, (2,)),
        Leaf(("batch_stats", "mean"), dtype, (2,)),
        Leaf(("step",), dtype, ()),
    ]
    assert names(OptaxTree([*trunk, *others]), Role.PARAMETER) == {"norm.weight", "embed_tokens.embedding"}


def test_many_leaves_take_no_time():
    """A state of 30,000 arrays: nothing in it is compared pair by pair."""
    dtype = DTYPES["float32"]
    paths = [("params", f"layers_{at}", "kernel") for at in range(10_000)]
    found = [Leaf(path, dtype, (2,)) for path in paths]
    found += [Leaf(("opt_state", "0", field, *path[1:]), dtype, (2,)) for field in ("mu", "nu") for path in paths]
    of = OptaxTree(found)
    assert len(names(of, SECOND)) == 10_000
