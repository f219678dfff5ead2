"""Stacks of a scan over layers are taken apart where the dim of layers is certain. MaxText's names; no MaxText ran."""

import io

import numpy as np
import pytest

from auditor.adapters.adapter import Options
from auditor.audit import audit
from auditor.discovery import discover
from auditor.model.catalog import Role
from auditor.model.name_map import NameRule, mapped
from auditor.model.region import whole
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from auditor.view.assemble import read_box
from tests.flax_files import pack

LAYERS, EMB, MLP = 5, 8, 12
DRAW = np.random.default_rng(3)


def normal(*shape):
    return DRAW.standard_normal(shape).astype(np.float32)


def maxtext():
    """``param_scan_axis`` is 1 by default."""
    layers = {
        "mlp": {"wi": {"kernel": normal(EMB, LAYERS, MLP)}, "wo": {"kernel": normal(MLP, LAYERS, EMB)}},
        "pre_self_attention_layer_norm": {"scale": normal(EMB, LAYERS)},
    }
    return {"decoder": {"decoder_norm": {"scale": normal(EMB)}, "layers": layers},
            "token_embedder": {"embedding": normal(20, EMB)}}  # fmt: skip


def state(params):
    def like(tree, of):
        return {key: like(value, of) if isinstance(value, dict) else of(value) for key, value in tree.items()}

    adam = {"count": np.int32(7), "mu": {"params": like(params, lambda w: w * np.float32(1e-3))},
            "nu": {"params": like(params, lambda w: w * w + 1)}}  # fmt: skip
    adam["count"] = 7
    return {"step": 7, "params": {"params": params}, "opt_state": {"0": adam}}


def store_of(tree):
    return MemoryStore({"run_7/state.msgpack": pack(tree)})


def catalog_of(store):
    (run,) = discover(store)
    source = run.steps[-1]
    return source.adapter.read(store, source.folder, source.match, Options())


def names(catalog, role=Role.PARAMETER):
    return [t.name for t in sorted(catalog.tensors, key=lambda t: t.order) if t.role is role]


def test_layers_are_tensors_of_their_own_in_the_order_of_the_model():
    store = store_of(state(maxtext()))
    catalog = catalog_of(store)
    layer = ("mlp.wi.kernel", "mlp.wo.kernel", "pre_self_attention_layer_norm.scale")
    expected = ["decoder.decoder_norm.scale", *(f"decoder.layers.{n}.{one}" for n in range(LAYERS) for one in layer),
                "token_embedder.embedding"]  # fmt: skip
    for role in (Role.PARAMETER, Role.FIRST_MOMENT, Role.SECOND_MOMENT):
        assert names(catalog, role) == expected
    assert {one.tensor for one in catalog.scalars if one.name == "optimizer_step"} == {*expected}
    assert sorted(name for group in catalog.groups for name in group.parameters) == sorted(expected)


def test_each_layer_has_its_values():
    tree = maxtext()
    store = store_of(state(tree))
    catalog = catalog_of(store)
    for number, tensor in enumerate(catalog.tensors):
        if tensor.role is Role.PARAMETER and ".mlp.wo" in tensor.name:
            at = int(tensor.name.split(".")[2])
            found = read_box(store, catalog, number, 0, whole(tensor.shape))
            np.testing.assert_array_equal(found, tree["decoder"]["layers"]["mlp"]["wo"]["kernel"][:, at])


def test_a_finding_names_the_layer():
    tree = maxtext()
    assert not audited(tree).findings
    tree["decoder"]["layers"]["mlp"]["wi"]["kernel"][3, 2, 5] = np.nan
    found = audited(tree).findings
    assert {(f.id, at.tensor) for f in found for at in f.locations if at.role is Role.PARAMETER} == {
        ("NUM001", "decoder.layers.2.mlp.wi.kernel")
    }


def audited(tree):
    (run,) = audit(store_of(state(tree)), Settings(level=Level.VALUES, settle_seconds=0.0)).runs
    return run


@pytest.mark.parametrize(
    "layers",
    [
        # One layer alone, called so: its vectors are vectors.
        {"wi": normal(EMB, MLP), "wo": normal(MLP, EMB), "scale": normal(EMB)},
        # Two dims may count the layers.
        {"wi": normal(EMB, EMB, MLP), "bias": normal(EMB, EMB)},
        # No dim is common to all.
        {"wi": normal(4, EMB, MLP), "wo": normal(5, MLP, EMB), "bias": normal(4, MLP)},
        # Numbered already.
        {"0": {"wi": normal(4, EMB, MLP), "bias": normal(4, MLP)}},
    ],
)  # fmt: skip
def test_what_is_not_certain_stays(layers):
    catalog = catalog_of(store_of(state({"layers": layers, "head": normal(EMB, 3)})))
    flat = {f"layers.0.{name}" for name in layers["0"]} if "0" in layers else {f"layers.{name}" for name in layers}
    assert {*names(catalog)} == {*flat, "head"}


def test_layers_among_each_other_in_large_compressed_chunks_stay():
    """Each of them would have the whole chunk decoded."""
    file = io.BytesIO()
    np.savez_compressed(file, **{"params/layers/w": np.ones((600, 4, 600), "f4"), "params/layers/b": np.ones((9, 4))})
    catalog = catalog_of(MemoryStore({"run_7/state.npz": file.getvalue()}))
    assert names(catalog) == ["layers.w", "layers.b"]
    rule = NameRule("layers.{what}", ("layers.{n}.{what}",), unstack=1)
    assert not rule.flaw()
    assert len(names(mapped(catalog, [rule]))) == 8


def test_thousands_of_stacks_are_no_model():
    """So many rules, each tried on each tensor, would take minutes."""
    one = {"w": np.zeros((2, 1, 3), np.float32), "b": np.zeros((2, 1), np.float32)}
    many = {f"m{number}": {"layers": one} for number in range(600)}
    assert len(names(catalog_of(store_of({"params": many})))) == 1200


@pytest.mark.parametrize(
    "rule", [NameRule("a.{n}", ("b.{n}",), unstack=0), NameRule("a", ("b",), unstack=0),
             NameRule("a", ("b.{n}", "c"), unstack=0), NameRule("a", ("b.{n}",), unstack=0, stack=0)],
)  # fmt: skip
def test_rules_that_cannot_be_followed(rule):
    assert rule.flaw()
