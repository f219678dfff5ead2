"""Levanter's layout, from its sources: TensorStore wrote the arrays, no Levanter ran."""

import pytest

from auditor.adapters.levanter import Levanter
from auditor.audit import audit
from auditor.model.catalog import Role
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from tests.faults import catalog_of
from tests.paths import ROOT

RUN = ROOT / "tests/fixtures/levanter/run"
NU = "step-4/opt_state/0/nu/transformer/layers/up/weight"


def objects():
    return {path.relative_to(RUN).as_posix(): path.read_bytes() for path in RUN.rglob("*") if path.is_file()}


def audited(files):
    (run,) = audit(MemoryStore(files), Settings(level=Level.VALUES), now=1e9).runs
    return run


def test_a_healthy_run_has_no_findings():
    run = audited(objects())
    assert not run.findings
    assert {step.state.format for step in run.steps} == {Levanter.name}
    assert [step.state.step for step in run.steps] == [2, 4]
    assert run.last_good.step == 4


def test_what_arrays_are():
    catalog = catalog_of(RUN, 4)
    parameters = {tensor.name for tensor in catalog.tensors if tensor.role is Role.PARAMETER}
    layers = {f"transformer.layers.{n}.up.{name}" for n in (0, 1) for name in ("weight", "bias")}
    assert parameters == {"embeddings.weight", *layers}
    for role in (Role.FIRST_MOMENT, Role.SECOND_MOMENT):
        assert {tensor.name for tensor in catalog.tensors if tensor.role is role} == parameters
    assert {s.value for s in catalog.scalars if s.name == "optimizer_step"} == {4.0}


def test_a_lost_chunk_is_never_filled():
    files = objects()
    lost = next(name for name in files if name.startswith(f"{NU}/1"))
    (finding,) = audited({name: content for name, content in files.items() if name != lost}).findings
    assert {location.file for location in finding.locations} == {lost}
    assert finding.id.startswith(("INT", "COV"))


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b'{"zarr_format": 2, "shape": [4], "chunks": [0]}'])
def test_a_document_that_is_none_is_a_damaged_file(content):
    run = audited({**objects(), f"{NU}/.zarray": content})
    assert ("INT002", NU) in {(finding.id, at.file) for finding in run.findings for at in finding.locations}


def test_a_chunk_cut_short_is_named():
    files = objects()
    name = next(name for name in files if name.startswith(f"{NU}/1"))
    (finding,) = audited({**files, name: files[name][:-5]}).findings
    assert {location.file for location in finding.locations} == {name}


def test_a_save_without_its_last_file_was_not_finished():
    files = {name: content for name, content in objects().items() if name != "step-4/metadata.json"}
    run = audited(files)
    (finding,) = run.findings
    assert (finding.id, {location.step for location in finding.locations}) == ("INT004", {4})
    assert run.last_good.step == 2


@pytest.mark.parametrize("content", [b"", b"[]", b'{"step": "four"}', b'{"step": -1, "is_temporary": false}'])
def test_metadata_may_be_nonsense(content):
    run = audited({**objects(), "step-4/metadata.json": content})
    assert [step.state.step for step in run.steps] == [2, 4]
