"""Older layouts: an aggregate msgpack file beside a folder an array.

By hand, after the sources: no t5x and no old Orbax ran. msgpack wrote the aggregate files; TensorStore (in Orbax's
fixtures) and zarr-python the arrays.
"""

import msgpack
import numpy as np
import pytest
import zarr
from numcodecs import GZip

from auditor.audit import audit
from auditor.model.catalog import Role
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from tests.adapters.test_orbax import FIXTURES, catalog_of
from tests.adapters.test_orbax_faults import objects_of
from tests.flax_files import pack


def audited(objects):
    (run,) = audit(MemoryStore(objects), Settings(level=Level.VALUES, settle_seconds=0.0)).runs
    return run


# Orbax before it wrote _METADATA


def old_orbax():
    """The arrays of a real save, described as older versions did; the bias lies in the aggregate file itself."""
    kept = {name: raw for name, raw in objects_of(FIXTURES / "files_zarr2").items()
            if "/params." in name or "/opt_state." in name}  # fmt: skip
    tree = {
        "opt_state": {"0": {
            "count": "PLACEHOLDER://opt_state.0.count",
            **{moment: {name: f"PLACEHOLDER://opt_state.0.{moment}.{name}" for name in ("bias", "kernel")}
               for moment in ("mu", "nu")},
        }, "1": None},
        "params": {"bias": np.full(8, 0.5, np.float32), "kernel": "PLACEHOLDER://params.kernel"},
        "step": 3,
    }  # fmt: skip
    kept = {name: raw for name, raw in kept.items() if "params.bias" not in name}
    return {**kept, "checkpoint_3/checkpoint": pack(tree)}


def test_what_the_aggregate_file_names_and_holds():
    run = audited(old_orbax())
    assert not run.findings
    assert [step.state.step for step in run.steps] == [3]
    assert not run.steps[0].failures
    held = run.steps[0].judgements["NUM001"]
    assert (held.num_holds, held.undetermined) == (7, {})


def test_an_array_that_the_aggregate_file_names_and_that_is_lost():
    objects = {name: raw for name, raw in old_orbax().items() if "nu.kernel/" not in name}
    told = {finding.id: finding.message for finding in audited(objects).findings}
    assert "lists opt_state.0.nu.kernel, which is not stored" in told["COV003"]


@pytest.mark.parametrize("content", [b"", b"\x80", b"\xc1" * 9, b"\xdf\xff\xff\xff\xff", b"\x81\xa1a" * 90])
def test_an_aggregate_file_that_is_none(content):
    run = audited({**old_orbax(), "checkpoint_3/checkpoint": content})
    assert content == b"\x80" or any(
        finding.id == "INT002" and {at.file for at in finding.locations} == {"checkpoint_3/checkpoint"}
        for finding in run.findings
    )


# t5x


def spec(name):
    """What t5x puts in the place of an array that it stored apart."""
    return {"driver": "zarr", "dtype": "float32", "kvstore": {"driver": "file", "path": f"{name}/"}}


@pytest.fixture(scope="module")
def t5x(tmp_path_factory):
    """checkpoint_1000 of an Adafactor run: version 3, parameters apart under gzip, small states in the file."""
    root = tmp_path_factory.mktemp("t5x")
    draw = np.random.default_rng(0)
    weights = {"encoder.layers_0.mlp.wi.kernel": (16, 32), "encoder.layers_0.mlp.wo.kernel": (32, 16)}
    target, states = {}, {}
    for name, shape in weights.items():
        array = zarr.create_array(
            root / f"checkpoint_1000/target.{name}", shape=shape, chunks=(8, shape[1]), dtype="f4", zarr_format=2,
            compressors=GZip(level=1), fill_value=None,
        )  # fmt: skip
        array[...] = draw.standard_normal(shape).astype(np.float32)
        kept = {"v_row": draw.random(shape[0]), "v_col": draw.random(shape[1]), "v": np.zeros(1), "m": np.zeros(1)}
        put(target, name, spec(f"target.{name}"))
        put(states, name, {key: value.astype(np.float32) for key, value in kept.items()})
    tree = {"version": 3, "optimizer": {"target": target, "state": {"step": np.int32(1000), "param_states": states}}}
    tree["optimizer"]["state"]["step"] = 1000
    (root / "checkpoint_1000/checkpoint").write_bytes(pack(tree))
    (root / "checkpoint_1000/train_ds-000-of-001").write_bytes(b"data")
    return objects_of(root)


def put(tree, name, value):
    *above, last = name.split(".")
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value


def test_a_healthy_run_of_t5x_has_no_findings(t5x):
    run = audited(t5x)
    assert not run.findings
    assert [step.state.step for step in run.steps] == [1000]
    assert run.last_good.step == 1000
    assert not run.steps[0].failures


def test_what_arrays_of_t5x_are(t5x, tmp_path):
    for name, raw in t5x.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    catalog = catalog_of(tmp_path, "checkpoint_1000")
    names = {role: {tensor.name for tensor in catalog.tensors if tensor.role is role} for role in Role}
    assert names[Role.PARAMETER] == {f"encoder.layers_0.mlp.{name}.kernel" for name in ("wi", "wo")}
    assert any(name.endswith("wi.kernel.v_row") for name in names[Role.MOMENT])


def test_what_t5x_was_writing_when_it_died_is_unfinished(t5x):
    earlier = {name.replace("checkpoint_1000", "checkpoint_500"): raw for name, raw in t5x.items()}
    torn = {name.replace("checkpoint_1000", "checkpoint_1000.tmp-1700000000"): raw for name, raw in t5x.items()}
    run = audited({**earlier, **torn})
    assert "INT004" in {finding.id for finding in run.findings}
    assert run.last_good.step == 500


def test_a_spec_may_name_anything(t5x):
    """Only the last part of a path counts, and only a folder of the step that is listed can be meant."""
    for path in ("../../etc/passwd", "/", "", "\0", "a" * 5000, 7):
        tree = {"version": 3, "optimizer": {"target": {"w": {**spec("w"), "kvstore": {"path": path}}}}}
        run = audited({**t5x, "checkpoint_1000/checkpoint": msgpack.packb(tree)})
        assert run.steps
