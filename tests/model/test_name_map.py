"""Name maps: the same weights saved by torch and by JAX have one digest a tensor under a map."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from auditor.adapters.adapter import Options
from auditor.configuration import name_map
from auditor.discovery import discover
from auditor.errors import UsageError
from auditor.invariants.related import seen_whole
from auditor.model.catalog import Role
from auditor.model.name_map import NameRule, collisions, mapped
from auditor.model.pieces_builder import PiecesBuilder
from auditor.model.region import Box, coverage, whole
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.report.inspection import inspect_object
from auditor.settings import Settings, StepChoice
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.view.assemble import read_box
from tests.flax_files import pack
from tests.paths import ROOT

SAME, JAX = ROOT / "tests/fixtures/dcp/same_state", ROOT / "tests/fixtures/flax/same_weights"
APART = ROOT / "tests/fixtures/flax/same_weights_apart"
MAP = {
    "map": [
        {"from": "embed.weight", "to": ["embed.low", "embed.high"], "split": 0, "sizes": [3, 4]},
        {"from": "{layer}.weight", "to": "{layer}.kernel", "transpose": True},
    ]
}


def catalog_of(store):
    (run,) = discover(store)
    source = run.steps[-1]
    return source.adapter.read(store, source.folder, source.match, Options())


def digests(store, catalog):
    with ThreadPoolExecutor(1) as pool:
        observations = observe(store, catalog, wanted_rows(catalog), Everything(pool))
    seen = seen_whole(catalog, observations)
    return {
        tensor.name: (tensor.dtype.name, tensor.shape, seen[number].lanes)
        for number, tensor in enumerate(catalog.tensors)
        if tensor.role is Role.PARAMETER
    }


TORCH = sorted(path.name for path in SAME.iterdir() if path.is_dir())
OTHERS = [*(JAX / name for name in ("msgpack", "chunked", "npz", "orbax")), *sorted(APART.iterdir())]


@pytest.fixture(scope="module")
def expected():
    store = LocalStore(JAX / "msgpack")
    return digests(store, catalog_of(store))


def test_one_digest_a_tensor_in_twenty_layouts():
    assert len(TORCH) + len(OTHERS) == 20


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_one_digest_a_tensor_in_jax(path, expected):
    assert digests(LocalStore(path), catalog_of(LocalStore(path))) == expected


@pytest.mark.parametrize("layout", TORCH)
def test_one_digest_a_tensor_in_torch_under_a_map(layout, expected):
    ours = LocalStore(SAME / layout)
    seen = mapped(catalog_of(ours), name_map(MAP))
    # What is stored in parts beside the whole is a tensor of its own.
    found = {name: held for name, held in digests(ours, seen).items() if not name.endswith("@sharded")}
    assert found == expected
    assert len(found) == 6
    assert not collisions(seen)
    # Without the map only what is called and lies alike is equal.
    plain = digests(ours, catalog_of(ours))
    assert {name for name in plain if plain[name] == expected.get(name)} == {"up.bias", "scale"}


@pytest.mark.parametrize("layout", TORCH)
def test_every_tensor_under_a_map_is_tiled(layout):
    catalog = mapped(catalog_of(LocalStore(SAME / layout)), name_map(MAP))
    for number, tensor in enumerate(catalog.tensors):
        for replica in range(len(catalog.replicas[number])):
            regions = [catalog.pieces.region(int(row)) for row in catalog.rows_of(number, replica)]
            assert coverage(regions, tensor.shape).exact, tensor


def test_inspect_shows_both_alike():
    def shown(path, rules):
        step = StepChoice("latest")
        (found,) = inspect_object(LocalStore(path), Settings(steps=step, name_map=rules))["steps"]
        return {(t["name"], t["dtype"], tuple(t["shape"])) for t in found["tensors"] if t["role"] == "parameter"}

    assert shown(SAME / "fsdp2_2", name_map(MAP)) == shown(JAX / "msgpack", ())


def state(**tensors):
    store = MemoryStore({"run_1/state.msgpack": pack({"params": tensors})})
    return store, catalog_of(store)


def values(store, catalog, name):
    (number,) = [n for n, tensor in enumerate(catalog.tensors) if tensor.name == name]
    shape = catalog.tensors[number].shape
    return read_box(store, catalog, number, 0, whole(shape)).view(np.float32).reshape(shape)


LAYERS = {f"layers_{at}": {"up": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * at}} for at in range(3)}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_layers_are_stacked(dim):
    store, catalog = state(**LAYERS)
    rule = {"from": "layers_{n}.up.kernel", "to": "layers.up", "stack": dim, "transpose": True}
    seen = mapped(catalog, name_map({"map": [rule]}))
    assert [tensor.name for tensor in seen.tensors] == ["layers.up"]
    expected = np.stack([layer["up"]["kernel"].T for layer in LAYERS.values()], dim)
    np.testing.assert_array_equal(values(store, seen, "layers.up"), expected)


def test_a_stack_that_lacks_a_layer_stays_in_parts():
    _, catalog = state(**{name: layer for name, layer in LAYERS.items() if name != "layers_1"})
    seen = mapped(catalog, name_map({"map": [{"from": "layers_{n}.up.kernel", "to": "layers.up", "stack": 0}]}))
    assert [tensor.name for tensor in seen.tensors] == ["layers_0.up.kernel", "layers_2.up.kernel"]


def test_a_fused_tensor_is_cut_and_any_order_of_dims_taken():
    store, catalog = state(w=np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    rule = {"from": "w", "to": ["q", "k", "v"], "transpose": [1, 2, 0], "split": 0}
    seen = mapped(catalog, name_map({"map": [rule]}))
    whole_array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(1, 2, 0)
    for at, name in enumerate("qkv"):
        np.testing.assert_array_equal(values(store, seen, name), whole_array[at : at + 1])


@pytest.mark.parametrize("cuts", [(), (5, 6), (1, 2, 7)], ids=str)
def test_rows_of_every_head_are_taken_apart_inside_of_it(cuts):
    """Pairs of neighbours as halves, head by head, also where a head is stored in parts."""
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    store, catalog = state(w=rows)
    (piece,) = (catalog.pieces[row] for row in range(len(catalog.pieces)))
    pieces = PiecesBuilder()
    for start, stop in pairwise((0, *cuts, 12)):
        pieces.add(0, piece.file, piece.offset + start * 8, Box((start, 0), (stop, 2)), piece.coordinate)
    rule = {"from": "w", "to": ["w", "w"], "within": 2, "groups": 3}
    seen = mapped(replace(catalog, pieces=pieces.build()), name_map({"map": [rule]}))
    expected = rows.reshape(2, 3, 2, 2).swapaxes(1, 2).reshape(12, 2)
    np.testing.assert_array_equal(values(store, seen, "w"), expected)
    if not cuts:
        assert len(seen.pieces) == 4


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stack_of_fused_tensors_is_taken_apart(dim):
    stack = np.arange(36, dtype=np.float32).reshape(2, 6, 3)
    store, catalog = state(experts=np.ascontiguousarray(np.moveaxis(stack, 0, dim)))
    rule = {"from": "experts", "to": ["e.{n}.gate", "e.{n}.up"], "unstack": dim, "split": 0}
    seen = mapped(catalog, name_map({"map": [rule]}))
    assert len(seen.tensors) == 4
    for at, one in enumerate(stack):
        np.testing.assert_array_equal(values(store, seen, f"e.{at}.gate"), one[:3])
        np.testing.assert_array_equal(values(store, seen, f"e.{at}.up"), one[3:])
    odd = {**rule, "to": ["e.{n}.gate", "e.{n}.up", "e.{n}.up", "e.{n}.up"]}
    assert [tensor.name for tensor in mapped(catalog, name_map({"map": [odd]})).tensors] == ["experts"]


def test_the_first_rule_counts_whether_it_is_for_one_name_or_for_many():
    _, catalog = state(a=np.ones(2, np.float32), b=np.ones(2, np.float32))
    rules = [("b", "x"), ("{w}", "any_{w}"), ("a", "y"), ("b", "z")]
    seen = mapped(catalog, name_map({"map": [{"from": one, "to": other} for one, other in rules]}))
    assert [tensor.name for tensor in seen.tensors] == ["any_a", "x"]


def test_braces_in_another_checkpoints_names_are_no_words():
    _, catalog = state(a=np.ones(2, np.float32))
    assert [tensor.name for tensor in mapped(catalog, [NameRule("a", ("{b}.a",))]).tensors] == ["{b}.a"]
    assert NameRule("a", ("{b}.a",)).renamed("a") == "{b}.a"


def test_moments_go_with_their_parameters():
    catalog = mapped(catalog_of(LocalStore(SAME / "fsdp2_2")), name_map(MAP))
    shapes = {(t.role.value, t.name): t.shape for t in catalog.tensors}
    assert shapes["first_moment", "up.kernel"] == shapes["parameter", "up.kernel"] == (2, 3)
    assert {scalar.tensor for scalar in catalog.scalars if scalar.tensor} >= {"up.kernel", "embed.low"}


def test_rules_that_lead_two_tensors_to_one_name_are_told():
    _, catalog = state(a=np.ones(2, np.float32), b=np.ones(2, np.float32))
    assert collisions(mapped(catalog, name_map({"map": [{"from": "{x}", "to": "{x}"}]}))) == []
    one = {"map": [{"from": "a", "to": "c"}, {"from": "b", "to": "c"}]}
    assert collisions(mapped(catalog, name_map(one))) == ["c"]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"to": "b"}, "needs from and to"),
        ({"from": "a"}, "needs from and to"),
        ({"from": "{n}.a", "to": "b"}, "same .words."),
        ({"from": "a", "to": "{n}"}, "same .words."),
        ({"from": "{n}.{n}", "to": "{n}"}, "each .word. once"),
        ({"from": "{n}.a", "to": "{n}.b", "stack": 0}, "to stack"),
        ({"from": "a", "to": "b", "stack": 0}, "to stack"),
        ({"from": "a", "to": "b", "transpose": [0, 0]}, "order of dims"),
        ({"from": "a", "to": ["b", "c"], "sizes": [1]}, "one extent for each"),
        ({"from": "a", "to": "b", "within": 2}, "within is a number of stretches"),
        ({"from": "a", "to": ["{n}.b", "c"], "unstack": 0}, "to unstack"),
        ({"from": "a", "to": "b", "split": -1}, "whole numbers"),
        ({"from": "a", "to": "b", "turn": 1}, "unknown key turn"),
    ],
)  # fmt: skip
def test_rules_that_can_not_be_followed_are_refused(rule, says):
    with pytest.raises(UsageError, match=says):
        name_map({"map": [rule]})
