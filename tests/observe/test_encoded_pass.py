"""The pass over compressed chunks measures what it measures over plain ones, also where chunks take several reads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.zarr_tree.adapter import ZarrTree
from auditor.model.pairing import Pairing, PairKind
from auditor.observe import plan as planning
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.storage.local import LocalStore


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """One step, plain and compressed, in chunks of rows and of columns that take several reads."""
    draw = np.random.default_rng(0)
    values = {
        ("parameter", "w"): draw.standard_normal((2048, 1024)).astype(np.float32),
        ("second_moment", "w"): draw.random((2048, 1024)).astype(np.float32),
        ("first_moment", "w"): draw.standard_normal((2048, 1024)).astype(np.float32),
        ("parameter", "b"): draw.standard_normal(100).astype(np.float32),
    }
    found = {}
    for name, compressor in (("plain", None), ("packed", zarr.codecs.ZstdCodec(level=1))):
        root = tmp_path_factory.mktemp(name)
        for (role, tensor), array in values.items():
            chunks = (2048, 600) if role == "first_moment" else (1500, 1024) if array.ndim == 2 else (64,)
            zarr.create_array(
                root, name=f"steps/1/tensors/{role}/{tensor}", data=array, chunks=chunks, compressors=compressor
            )
        found[name] = root
    return found


def measured(root, kernels, monkeypatch):
    store, adapter = LocalStore(root), ZarrTree()
    folder = Folder.read(store, "steps/1")
    catalog = adapter.read(store, folder, adapter.recognise(store, folder), Options())
    numbers = {(tensor.role.value, tensor.name): number for number, tensor in enumerate(catalog.tensors)}
    pairing = Pairing(PairKind.BOUND, numbers["first_moment", "w"], numbers["second_moment", "w"], 7.0)
    monkeypatch.setattr(planning, "UNIT_BYTES", 1 << 20)
    with ThreadPoolExecutor(2) as pool:
        return observe(store, catalog, wanted_rows(catalog), Everything(pool), pairings=[pairing], kernels=kernels)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_the_same_is_measured(trees, kernels, monkeypatch):
    plain, packed = (measured(trees[name], kernels, monkeypatch) for name in ("plain", "packed"))
    assert plain.pieces.dtype == packed.pieces.dtype
    for name in plain.pieces.dtype.names:
        if name == "sum_squares":
            np.testing.assert_allclose(plain.pieces[name], packed.pieces[name], rtol=1e-9)
        else:
            np.testing.assert_array_equal(plain.pieces[name], packed.pieces[name])
    assert plain.pairs == packed.pairs
    assert not packed.failures
    assert not packed.broken
