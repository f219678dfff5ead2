import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.adapters.adapter import Options
from auditor.adapters.megatron_names import RULES, Placed, Sizes, place, rule_for, sizes_from
from auditor.model.mesh import Replicate, Shard

BLOOM = Sizes(hidden=14336, ffn=57344, vocab=250_880)
NORM, H_TO_4H_BIAS = "input_layernorm.weight", "mlp.dense_h_to_4h.bias"


def placed(name, local, degree=4, sizes=BLOOM, stated=None):
    return place(name, local, degree, sizes, stated)


# The parts that each of BLOOM-176B's four tensor-parallel ranks stores.
BLOOM_PARTS = {
    "word_embeddings.weight": ((62_720, 14336), Shard(0)),
    "word_embeddings.norm.weight": ((14336,), Replicate()),
    "input_layernorm.weight": ((14336,), Replicate()),
    "input_layernorm.bias": ((14336,), Replicate()),
    "self_attention.query_key_value.weight": ((10_752, 14336), Shard(0)),
    "self_attention.query_key_value.bias": ((10_752,), Shard(0)),
    "self_attention.dense.weight": ((14336, 3584), Shard(1)),
    "self_attention.dense.bias": ((14336,), Replicate()),
    "post_attention_layernorm.weight": ((14336,), Replicate()),
    "mlp.dense_h_to_4h.weight": ((14336, 14336), Shard(0)),
    "mlp.dense_h_to_4h.bias": ((14336,), Shard(0)),
    "mlp.dense_4h_to_h.weight": ((14336, 14336), Shard(1)),
    "mlp.dense_4h_to_h.bias": ((14336,), Replicate()),
    "final_layernorm.bias": ((14336,), Replicate()),
    "weight": ((14336,), Replicate()),
}


@pytest.mark.parametrize("name", BLOOM_PARTS)
def test_bloom_on_four_ranks(name):
    local, how = BLOOM_PARTS[name]
    assert placed(name, local) == Placed(how)
    if name != "weight":
        assert placed(f"3.{name}", local) == Placed(how)


def test_equal_shapes_do_not_make_a_sharded_bias_a_replica():
    """At four ranks a rank's part of the bias is exactly as long as a norm, and two matrices look alike as well."""
    assert BLOOM_PARTS[H_TO_4H_BIAS][0] == BLOOM_PARTS[NORM][0]
    assert placed(H_TO_4H_BIAS, (14336,)) != placed(NORM, (14336,))
    square = [placed(f"mlp.{name}.weight", (14336, 14336)).how for name in ("dense_h_to_4h", "dense_4h_to_h")]
    assert square == [Shard(0), Shard(1)]


def test_a_bias_stored_whole_is_not_guessed_to_be_replicated():
    assert placed(H_TO_4H_BIAS, (57344,)).how is None


@given(st.sampled_from(RULES), st.integers(2, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 9))
def test_every_rule_accepts_exactly_its_own_part(rule, degree, heads, ratio, rows):
    sizes = Sizes(hidden=degree * heads, ffn=degree * heads * ratio, vocab=degree * rows)
    local = [sizes.of(term) for term in rule.shape]
    if isinstance(rule.placement, Shard):
        local[rule.placement.dim] //= degree
    assert placed(rule.suffix, tuple(local), degree, sizes) == Placed(rule.placement)
    for dim in range(len(local)):
        wrong = tuple(n + 1 if d == dim else n for d, n in enumerate(local))
        found = placed(rule.suffix, wrong, degree, sizes)
        assert found.how is None
        assert f"dim {dim}" in found.reason


@pytest.mark.parametrize("local", [(14336, 1), ()])
def test_another_number_of_dims_is_undetermined(local):
    found = placed(NORM, local)
    assert found.how is None
    assert "dims" in found.reason


@pytest.mark.parametrize("name", ["mlp.router.scale", "input_layernorm.scale", "input_layernorm", "weight_norm",
                                  "my_input_layernorm.weight", "dense.weight", ""])  # fmt: skip
def test_unknown_names_are_undetermined_and_say_what_to_do(name):
    assert rule_for(name) is None
    found = placed(name, (14336,))
    assert found.how is None
    assert "auditor.toml" in found.reason


def test_names_count_from_a_dot_on():
    assert rule_for("4.input_layernorm.weight") is rule_for(NORM)
    assert rule_for("self_attention.dense.weight").placement == Shard(1)
    assert rule_for("weight").placement == rule_for("bias").placement == Replicate()


def test_only_the_tied_embedding_is_kept_equal_over_stages():
    assert [rule.suffix for rule in RULES if rule.synchronised_over_stages] == ["word_embeddings.weight"]


@pytest.mark.parametrize("name", ["mlp.router.scale", NORM, H_TO_4H_BIAS])
def test_one_rank_holds_the_whole_of_everything(name):
    assert placed(name, (7, 9), degree=1) == Placed(Replicate())


@pytest.mark.parametrize(("local", "how"), [((2048, 14336), Replicate()), ((2048, 3584), None), ((14336,), None)])
def test_position_tables_are_replicated_if_they_are_as_wide_as_the_model(local, how):
    assert placed("position_embeddings.weight", local).how == how
    assert placed("embedding.position_embeddings.weight", local).how == how


# Sizes that are not recorded


def test_nothing_is_called_replicated_without_a_size_to_hold_it_against():
    found = placed(NORM, (14336,), sizes=Sizes())
    assert found.how is None
    assert "no size is recorded" in found.reason


def test_a_cut_dim_needs_no_size_but_the_others_do():
    only_hidden = Sizes(hidden=14336)
    assert placed("word_embeddings.weight", (62_720, 14336), sizes=only_hidden) == Placed(Shard(0))
    assert placed("mlp.dense_4h_to_h.weight", (14336, 14336), sizes=only_hidden) == Placed(Shard(1))
    assert placed("word_embeddings.weight", (62_720, 14336), sizes=Sizes(vocab=250_880)).how is None


def test_sizes_are_those_that_megatron_recorded():
    args = {"hidden_size": 14336, "ffn_hidden_size": 57344, "padded_vocab_size": 250_880, "num_layers": 70}
    assert sizes_from(args, {}) == BLOOM


@pytest.mark.parametrize("nonsense", [None, "14336", 0, -1, 1.5, True])
def test_sizes_that_are_no_counts_are_not_believed(nonsense):
    args = {"hidden_size": nonsense, "ffn_hidden_size": nonsense, "padded_vocab_size": nonsense}
    assert sizes_from(args, {}) == Sizes()


@pytest.mark.parametrize(
    "name", ["self_attention.query_key_value.weight", "mlp.dense_h_to_4h.weight", "word_embeddings.weight"]
)
def test_the_hidden_size_also_follows_from_a_weight_that_is_never_cut_along_it(name):
    shapes = {"3.input_layernorm.weight": (99,), f"3.{name}": (10_752, 14336)}
    assert sizes_from({}, shapes) == Sizes(hidden=14336)
    assert sizes_from({"hidden_size": 8}, shapes) == Sizes(hidden=8)


def test_the_hidden_size_does_not_follow_from_weights_that_are_cut_along_it():
    assert sizes_from({}, {"mlp.dense_4h_to_h.weight": (14336, 3584), NORM: (14336,)}) == Sizes()


def test_terms_of_formulas():
    assert (BLOOM.of("hidden"), BLOOM.of("3 hidden"), BLOOM.of("ffn")) == (14336, 43_008, 57_344)
    assert Sizes().of("3 hidden") is None


# What the user states


def test_the_users_word_wins_over_names_and_sizes():
    assert placed(NORM, (3584,), stated=Shard(0)) == Placed(Shard(0))
    assert placed("mlp.router.scale", (8, 14336), stated=Replicate()) == Placed(Replicate())
    assert placed(H_TO_4H_BIAS, (1, 2, 3), stated=Replicate()) == Placed(Replicate())


def test_a_stated_dim_that_is_not_there_is_undetermined():
    found = placed(NORM, (14336,), stated=Shard(1))
    assert found.how is None
    assert "dim 1" in found.reason


def test_the_first_glob_that_fits_is_the_users_word():
    options = Options({"tp": [("*.router.weight", Replicate()), ("*.experts.*", Shard(0)), ("*", Shard(1))]})
    assert options.stated("tp", "3.mlp.router.weight") == Replicate()
    assert options.stated("tp", "3.mlp.experts.0.weight") == Shard(0)
    assert options.stated("tp", "other") == Shard(1)
    assert options.stated("pp", "other") is None
    assert Options().stated("tp", "other") is None
