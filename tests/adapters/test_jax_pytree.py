"""JAX's pytree_serialization: on what JAX wrote."""

import base64
import hashlib
import json
import struct
from contextlib import suppress

import pytest

from auditor.adapters.jax_pytree import DEFINITION, JaxPytree
from auditor.audit import audit
from auditor.containers import jax_treedef
from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.jax_treedef import leaves_of
from auditor.model.catalog import Role
from auditor.model.region import whole
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.view.assemble import read_box
from tests.paths import ROOT

FIXTURE = ROOT / "tests/fixtures/jax_pytree"
RUN = FIXTURE / "run"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
TREE = base64.b64decode(json.loads((RUN / "step_4" / DEFINITION).read_text())["__jax_pytreedef_repr"])


def objects():
    return {path.relative_to(RUN).as_posix(): path.read_bytes() for path in RUN.rglob("*") if path.is_file()}


def audited(files):
    (run,) = audit(MemoryStore(files), Settings(level=Level.VALUES), now=1e9).runs
    return run


class TestContract(AdapterContract):
    adapter = JaxPytree()
    checkpoints = (RUN / "step_4",)
    foreign = (ROOT / "tests/fixtures/orbax/manager/3",)

    def comparable(self, elements):
        return hashlib.sha256(elements).digest()

    def framework_arrays(self, path):
        catalog = self.catalog(LocalStore(path))
        named = {piece.key: catalog.tensors[piece.tensor] for piece in catalog.pieces}
        wanted = {key.rpartition("/")[2]: told for key, told in EXPECTED.items() if key.startswith(path.name)}
        assert {*wanted} == {*named}
        return {(named[key].role.value, named[key].name): bytes.fromhex(told) for key, told in wanted.items()}


def test_a_healthy_run_has_no_findings():
    run = audited(objects())
    assert not run.findings
    assert [(step.state.step, step.state.format) for step in run.steps] == [(2, "jax-pytree"), (4, "jax-pytree")]
    assert run.last_good.step == 4
    assert not any(step.failures for step in run.steps)


def test_what_arrays_are():
    catalog = TestContract().catalog(LocalStore(RUN / "step_4"))
    names = {role: {tensor.name for tensor in catalog.tensors if tensor.role is role} for role in Role}
    blocks = {f"blocks.{block}.{name}" for block in (0, 1) for name in ("norm", "up", "down")}
    assert names[Role.PARAMETER] == {"embed", *blocks}
    assert names[Role.FIRST_MOMENT] == names[Role.SECOND_MOMENT] == names[Role.PARAMETER]
    assert {one.value for one in catalog.scalars if one.name == "optimizer_step"} == {4.0}
    assert next(t for t in catalog.tensors if t.name == "embed").undetermined.endswith("is recorded nowhere")


def test_chunks_of_zeros_are_left_out_and_are_zeros():
    """JAX's writer stores no chunk that equals the fill value; the index, under checksums, says that there is none."""
    catalog = TestContract().catalog(LocalStore(RUN / "step_4"))
    (number,) = (n for n, tensor in enumerate(catalog.tensors) if tensor.dtype.name == "int4")
    assert not read_box(LocalStore(RUN / "step_4"), catalog, number, 0, whole((4, 16))).any()


# Faults


def changed(change):
    files = objects()
    document = json.loads(files[f"step_4/{DEFINITION}"])
    change(document)
    return {**files, f"step_4/{DEFINITION}": json.dumps(document).encode()}


def test_an_array_that_is_listed_and_not_stored():
    def change(document):
        document["__jax_leaf_ids"][2] = "Array(float32[4])"

    (finding,) = audited(changed(change)).findings
    assert finding.id == "COV003"
    assert "nothing as array 2" in finding.message


def test_an_array_of_another_shape_than_the_definition_says():
    def change(document):
        document["__jax_leaf_ids"][4] = "Array(float32[16, 32])"

    (finding,) = audited(changed(change)).findings
    assert finding.id == "MET002"
    assert "Array(float32[16, 32])" in finding.message


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{" * 5000, b'{"__jax_pytreedef_repr": "AAAA", "__jax_leaf_ids": []}',
                b'{"__jax_pytreedef_repr": "!", "__jax_leaf_ids": []}'],
)  # fmt: skip
def test_a_definition_that_is_none_is_a_damaged_file(content):
    run = audited({**objects(), f"step_4/{DEFINITION}": content})
    (finding,) = run.findings
    assert (finding.id, {at.file for at in finding.locations}) == ("INT002", {f"step_4/{DEFINITION}"})
    assert run.last_good.step == 2


def test_a_lost_manifest_and_a_cut_data_file_are_named():
    """The newest save without its manifest is one that was not finished: nothing marks those that were."""
    files = objects()
    for step, wanted in ((2, "INT001"), (4, "INT004")):
        manifest = f"step_{step}/array_store/manifest.ocdbt"
        (finding,) = audited({name: raw for name, raw in files.items() if name != manifest}).findings
        assert (finding.id, {at.file for at in finding.locations}) == (wanted, {manifest})
    largest = max((name for name in files if name.startswith("step_4/")), key=lambda name: len(files[name]))
    (finding,) = audited({**files, largest: files[largest][: len(files[largest]) // 3]}).findings
    assert (finding.id, {at.file for at in finding.locations}) == ("INT002", {largest})


# The tree's own reader


def test_the_tree_that_jax_wrote():
    paths = list(leaves_of(TREE))
    assert ("opt_state", "0", "mu", "blocks", "1", "up") in paths
    assert paths[:3] == [("narrow", "0"), ("narrow", "1"), ("nothing",)]


def test_children_that_share_a_node_are_bounded(monkeypatch):
    """Forty tuples, each twice the child of the one before: 2^40 paths in a thousand bytes."""
    node = struct.pack("<4H", 8, 12, 4, 8) + struct.pack("<ib3xI", 8, 2, 4) + struct.pack("<III", 2, 16, 12)
    leaf = struct.pack("<4H", 8, 12, 4, 0) + struct.pack("<ib3xI", 8, 0, 0)
    assert len(list(leaves_of(struct.pack("<I", 12) + 3 * node + leaf))) == 8
    monkeypatch.setattr(jax_treedef, "MAX_NODES", 1000)
    with pytest.raises(LimitError):
        list(leaves_of(struct.pack("<I", 12) + 40 * node + leaf))


@pytest.mark.parametrize("cut", range(0, 700, 37))
def test_a_tree_cut_anywhere_is_damaged_or_smaller(cut):
    with suppress(DamagedError):
        assert len(list(leaves_of(TREE[:cut]))) <= 28


def test_bytes_changed_anywhere_never_raise_anything_else():
    for at in range(0, len(TREE), 5):
        for value in (0, 0x7F, 0xFF):
            raw = bytearray(TREE)
            raw[at] = value
            try:
                list(leaves_of(bytes(raw)))
            except DamagedError:
                continue
