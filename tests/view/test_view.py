"""The Zarr view: what zarr-python reads == what lies at plain file offsets == what torch.load gives, byte for byte."""

import shutil

import numpy as np
import pytest
import zarr

import auditor
from auditor.adapters.adapter import Options
from auditor.adapters.deepspeed.pipeline import DeepSpeedPipeline
from auditor.containers.zarr_names import escape, unescape
from auditor.discovery import discover
from auditor.storage.local import LocalStore
from auditor.view.assemble import SourceLostError
from tests.paths import HEALTHY, RUN, TP2_PP2, TP4, load_expect

STEPS = [(RUN, 50), (TP2_PP2, 6), (TP4, 6)]
IDS = ["tp2_dp2", "tp2_pp2", "tp4"]


def catalog_of(folder, step):
    store = LocalStore(folder)
    (run,) = discover(store)
    (source,) = [s for s in run.steps if s.match.step == step]
    return store, source.adapter.read(store, source.folder, source.match, Options())


def by_plain_offsets(folder, catalog, number, replica):
    """The tensor put together from file offsets with nothing but numpy, and no code of the view."""
    tensor = catalog.tensors[number]
    flat = np.zeros(int(np.prod(tensor.shape, dtype=np.int64)), tensor.dtype.carrier)
    index = np.arange(flat.size).reshape(tensor.shape)
    for row in catalog.rows_of(number, replica):
        piece = catalog.pieces[int(row)]
        raw = (folder / catalog.files[piece.file].name).read_bytes()
        count = int(np.prod(piece.shape, dtype=np.int64))
        part = np.frombuffer(raw, tensor.dtype.carrier, count, piece.offset)
        if hasattr(piece.region, "shape"):
            where = index[
                tuple(slice(a, b) for a, b in zip(piece.region.start, piece.region.stop, strict=True))
            ].reshape(-1)
        else:
            where = np.arange(piece.region.start, piece.region.stop)
        flat[where] = part
    return flat.reshape(tensor.shape)


def place_name(place):
    return str(place) if place.indices else "all"


@pytest.mark.parametrize(("folder", "step"), STEPS, ids=IDS)
def test_view_equals_direct_read_for_all_tensors(folder, step):
    group = auditor.open_zarr(str(folder))[f"steps/{step}"]
    _, catalog = catalog_of(folder, step)
    assert len(catalog.tensors) >= 116
    for number, tensor in enumerate(catalog.tensors):
        node = f"{tensor.role.value}/{escape(tensor.name)}"
        for replica, place in enumerate(catalog.replicas[number]):
            direct = by_plain_offsets(folder, catalog, number, replica)
            shown = group[f"replicas/{place_name(place)}/{node}"][...]
            assert shown.tobytes() == direct.tobytes(), (tensor, place)
            if replica == 0:
                assert group[f"tensors/{node}"][...].tobytes() == direct.tobytes()


@pytest.mark.parametrize(("folder", "step"), STEPS, ids=IDS)
def test_view_equals_torch_for_all_tensors(folder, step):
    torch = pytest.importorskip("torch")
    expect = load_expect()
    path = folder / f"global_step{step}"
    group = auditor.open_zarr(str(folder))[f"steps/{step}"]
    _, catalog = catalog_of(folder, step)
    degrees = dict(catalog.mesh.axes)
    layers = {name: expect.load(path / name) for name in (p.name for p in path.glob("layer_*"))}
    checked = 0
    for number, row in ((n, r) for n, rows in catalog.rows_by_tensor.items() for r in rows):
        piece, tensor = catalog.pieces[int(row)], catalog.tensors[number]
        name = catalog.files[piece.file].name.rpartition("/")[2]
        if name in layers:
            stored = layers[name][piece.key].contiguous().view(torch.uint16).numpy()
            assert group[f"pieces/{int(row)}"][...].tobytes() == stored.tobytes(), tensor
            checked += 1
    assert checked >= 29 * degrees["tp"]
    if degrees["pp"] == 1:
        for tp in range(degrees["tp"]):
            for role, tensors in expect.flat_states(path, tp).items():
                for name, stored in tensors.items():
                    shown = part_of(group, catalog, role, name, tp, stored.shape)
                    assert shown.tobytes() == stored.detach().numpy().tobytes(), (role, name, tp)


def part_of(group, catalog, role, name, tp, local):
    """What one tensor-parallel rank holds, cut out of the view's whole tensor by shapes alone."""
    (number,) = [n for n, t in enumerate(catalog.tensors) if t.name == name and t.role.value == role]
    tensor, places = catalog.tensors[number], catalog.replicas[number]
    place = f"tp={tp}" if len(places) > 1 else "all"
    whole = group[f"replicas/{place}/{role}/{escape(name)}"][...]
    cut = tuple(
        slice(tp * n, (tp + 1) * n) if full != n else slice(None) for full, n in zip(tensor.shape, local, strict=True)
    )
    return np.ascontiguousarray(whole[cut])


def test_replicas_that_differ_are_marked():
    tensors = auditor.open_zarr(str(RUN))["steps/50/tensors/parameter"]
    assert tensors["3.input_layernorm.weight"].attrs["auditor"]["replicas_agree"] is False
    assert "replicas_agree" not in tensors["3.mlp.dense_h_to_4h.weight"].attrs["auditor"]
    healthy = auditor.open_zarr(str(RUN))["steps/40/tensors/parameter"]
    assert healthy["3.input_layernorm.weight"].attrs["auditor"]["replicas_agree"] is True


def test_attributes_say_what_zarr_has_no_word_for():
    array = auditor.open_zarr(str(RUN))["steps/50/tensors/parameter/3.mlp.dense_4h_to_h.weight"]
    said = array.attrs["auditor"]
    assert array.dtype == np.uint16
    assert (said["source_dtype"], said["role"], said["step"]) == ("bfloat16", "parameter", 50)
    assert said["placement"] == {"tp": "shard:1"}
    assert said["mesh"] == {"pp": 1, "dp": 2, "tp": 2}
    assert len(said["source"]) == 2


def test_tree_can_be_walked():
    group = auditor.open_zarr(str(RUN))
    assert sorted(map(int, group["steps"].group_keys())) == list(range(10, 121, 10))
    step = group["steps/10"]
    assert set(step.group_keys()) == {"tensors", "replicas", "pieces", "catalog"}
    assert set(step["tensors"].group_keys()) == {"parameter", "master", "first_moment", "second_moment"}
    assert len(list(step["tensors/parameter"].array_keys())) == 29
    assert set(step["replicas"].group_keys()) == {"all", "tp=0", "tp=1"}
    assert len(list(step["pieces"].array_keys())) == 238
    _, catalog = catalog_of(RUN, 10)
    np.testing.assert_array_equal(step["catalog/offset"][...], catalog.pieces.offset)


def test_dimension_names_are_unique_over_a_role():
    arrays = dict(auditor.open_zarr(str(RUN))["steps/10/tensors/parameter"].arrays())
    names = [name for array in arrays.values() for name in array.metadata.dimension_names]
    assert len(names) == len(set(names)) > 29


@pytest.fixture
def damaged(tmp_path):
    shutil.copytree(HEALTHY / "global_step10", tmp_path / "global_step10")
    return tmp_path


def test_deleted_source_raises_and_never_fills(damaged):
    group = auditor.open_zarr(str(damaged))
    lost = "steps/10/replicas/tp=1/parameter/3.input_layernorm.weight"
    assert group[lost][...].shape == (16,)
    (damaged / "global_step10/layer_03-model_01-model_states.pt").unlink()
    with pytest.raises(SourceLostError, match="layer_03-model_01"):
        group[lost][...]
    with pytest.raises(SourceLostError, match="layer_03-model_01"):
        auditor.open_zarr(str(damaged))[lost][...]


def test_short_source_raises_and_never_fills(damaged):
    group = auditor.open_zarr(str(damaged))
    array = group["steps/10/tensors/parameter/4.mlp.dense_h_to_4h.weight"]
    path = damaged / "global_step10/layer_04-model_01-model_states.pt"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(SourceLostError, match="layer_04-model_01"):
        array[...]


def test_view_refuses_writing():
    group = auditor.open_zarr(str(HEALTHY))
    with pytest.raises(ValueError, match="read-only"):
        group["steps/10/tensors/parameter/3.input_layernorm.weight"][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        group.create_group("new")


def test_large_arrays_are_cut_along_dim_0():
    from auditor.view.nodes import CHUNK_BYTES, Array

    values = np.arange(3 * CHUNK_BYTES // 4, dtype="<u4").reshape(-1, 1024)
    array = Array(values.shape, values.dtype, lambda box: values[box.start[0] : box.stop[0]], ("a", "b"))
    rows = CHUNK_BYTES // 4096
    assert array.chunk_shape == (rows, 1024)
    assert list(array.chunk_keys()) == ["c/0/0", "c/1/0", "c/2/0"]
    assert array.chunk("c/2/0") == values[2 * rows :].tobytes()
    assert array.chunk("c/3/0") is None
    assert array.chunk("c/0/1") is None


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".", "__x", "", "%", "zarr.json", "c", "3.w@pp=1", "é", "a b", "\x1b[31m"]
)
def test_node_names_are_legal_and_reversible(name):
    node = escape(name)
    assert unescape(node) == name
    assert node
    assert "/" not in node
    assert node.strip(".")
    assert not node.startswith("__")


def test_adapter_says_why_it_recognises():
    (run,) = discover(LocalStore(HEALTHY))
    assert isinstance(run.steps[0].adapter, DeepSpeedPipeline)
    assert "global_steps=10" in run.steps[0].match.reason


def test_view_is_a_plain_zarr_group():
    assert isinstance(auditor.open_zarr(str(HEALTHY)), zarr.Group)
