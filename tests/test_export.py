"""`auditor export`: a run as a Zarr store that says the same of itself as the run does; killed anywhere, it goes on."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zarr
from safetensors.numpy import save_file

import auditor
from auditor.adapters.adapter import Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.audit import audit
from auditor.discovery import discover
from auditor.errors import LockedError, NothingToAuditError, UsageError
from auditor.exporting import export
from auditor.model.catalog import File, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import DTYPES, FLOAT32
from auditor.model.mesh import NO_MESH, Coordinate
from auditor.model.optimizer import ParameterGroup, Tie
from auditor.model.region import Box, whole
from auditor.settings import Settings, StepChoice
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.local import LocalStore
from auditor.storage.writer import Draft, FolderWriter, WriteError
from auditor.verdict import ExitCode, exit_code
from auditor.view.export import StepExport, begin
from auditor.view.export_tensor import NotVerifiedError, OccupiedError
from auditor.view.tree import StepNode
from tests.paths import HEALTHY, ROOT, RUN, TP2_PP2, TP4

FIXTURES = ROOT / "tests" / "fixtures"
SAME = ("REP", "COV", "NUM", "OPT", "CST", "TIE")
"""Families of which the outcomes of an export are those of its source, subject by subject."""
LAYER = "layer_03-model_01-model_states.pt"


def steps(text="", **choices):
    return Settings(steps=StepChoice(text), **choices)


def runs_in(folder):
    (run,) = audit(LocalStore(folder), Settings(settle_seconds=0.0)).runs
    return run


def catalogs(folder):
    store = LocalStore(folder)
    (run,) = discover(store)
    return [source.adapter.read(store, source.folder, source.match, Options()) for source in run.steps]


def files_in(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def stamps(folder):
    return {f: (f.stat().st_ino, f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()}


def cli(*arguments, **choices):
    return subprocess.run(
        [sys.executable, "-m", "auditor.cli", *map(str, arguments)], capture_output=True, text=True, check=False,
        **choices,
    )  # fmt: skip


@pytest.fixture(scope="module")
def drifted(tmp_path_factory):
    """Steps 40 to 60 of the sample: sound, drifted, drifted."""
    target = tmp_path_factory.mktemp("drifted") / "out.zarr"
    export(LocalStore(RUN), str(target), steps("40:60"))
    return target


@pytest.fixture
def source(tmp_path):
    """Two steps of the healthy sample, of the size of a test."""
    for step in (10, 20):
        shutil.copytree(HEALTHY / f"global_step{step}", tmp_path / f"source/global_step{step}")
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out.zarr"


# The same outcomes


def test_drift_is_the_same_in_the_export(drifted):
    (wanted,) = audit(LocalStore(RUN), steps("40:60")).runs
    found = runs_in(drifted)
    (one,), (other,) = wanted.findings, found.findings
    assert (one.id, one.message, one.difference_class) == (other.id, other.message, other.difference_class)
    assert one.intervals == other.intervals

    def places(finding):
        return [
            (x.step, x.tensor, x.role, x.order, x.coordinate, x.reference, x.num_elements_differ,
             x.num_elements_compared, x.max_abs_difference, x.max_ulps, x.first_index)
            for x in finding.locations
        ]  # fmt: skip

    assert places(one) == places(other)
    assert len(one.locations) > 100
    assert found.last_good.step == wanted.last_good.step == 40
    assert found.mesh == wanted.mesh


@pytest.mark.parametrize(
    "folder",
    [RUN, TP2_PP2, TP4, *(FIXTURES / "megatron_legacy" / name for name in ("tp2_drift", "tp2_pp2")),
     *(FIXTURES / "torch_per_rank" / name for name in ("healthy", "faulty", "own_buffers")),
     *(FIXTURES / "hugging_face" / name for name in ("llama_sharded", "mistral_tied", "trainer"))],
    ids=lambda folder: f"{folder.parent.name}-{folder.name}",
)  # fmt: skip
def test_every_format_says_the_same_of_itself_when_it_is_exported(folder, target):
    chosen = "50,60" if folder == RUN else ""
    assert not export(LocalStore(folder), str(target), steps(chosen)).incomplete
    (wanted,), found = audit(LocalStore(folder), steps(chosen)).runs, runs_in(target)
    for one, other in zip(wanted.steps, found.steps, strict=True):
        for name in sorted({*one.judgements, *other.judgements}):
            if name.startswith(SAME):
                assert outcomes(one.judgements[name]) == outcomes(other.judgements[name]), name
            elif name.startswith("MET"):
                assert len(one.judgements[name].violations) == len(other.judgements[name].violations), name
    known = {catalog.step: catalog for catalog in catalogs(folder)}
    for other in catalogs(target):
        same_catalog(known[other.step], other)


def outcomes(judged):
    undetermined = {reason: len(names) for reason, names in judged.undetermined.items()}
    return judged.num_holds, [v.subject for v in judged.violations], undetermined, judged.not_applicable


def same_catalog(one, other):
    assert other.tensors == one.tensors
    assert other.replicas == one.replicas
    assert (other.mesh, other.not_implied, other.ties) == (one.mesh, one.not_implied, one.ties)
    own = [scalar for scalar in other.scalars if scalar.file != f"{other.path}/zarr.json"]
    for name, left, right in (("scalars", one.scalars, own), ("groups", one.groups, other.groups)):
        assert [shown(one, item) for item in left] == [shown(other, item) for item in right], name
    assert [shown(one, item) for item in one.problems] == [shown(other, item) for item in other.problems]


def shown(catalog, item):
    """Every field of a record, its file called as within the step."""
    fields = {name: getattr(item, name) for name in item.__dataclass_fields__}
    return {**fields, "file": catalog.within(item.file)}


def test_values_are_those_of_the_view(drifted):
    view, stored = auditor.open_zarr(str(RUN))["steps/50"], zarr.open_group(drifted, mode="r")["steps/50"]
    checked = 0
    for role, arrays in stored["tensors"].groups():
        for name, array in arrays.arrays():
            shown = view[f"tensors/{role}/{name}"]
            assert array[...].tobytes() == shown[...].tobytes()
            ours, theirs = array.attrs["auditor"], dict(shown.attrs["auditor"])
            assert {key: ours[key] for key in theirs} == theirs
            checked += 1
    assert checked == 116
    for _, place in stored["replicas"].groups():
        for role, arrays in place.groups():
            for name, array in arrays.arrays():
                shown = view[f"{place.path.removeprefix('steps/50/')}/{role}/{name}"]
                assert array[...].tobytes() == shown[...].tobytes()
                checked += 1
    assert checked == 180
    np.testing.assert_array_equal(stored["catalog/offset"][...], view["catalog/offset"][...])
    assert set(stored["replicas"].group_keys()) == {"tp=1"}


def test_healthy_twin_is_silent(source, target):
    done = cli("export", source, target)
    assert (done.returncode, done.stdout) == (0, "")
    assert "steps/10: 180 arrays" in done.stderr
    assert "whole, verified by digest" in done.stderr
    report = audit(LocalStore(target))
    assert exit_code(report) is ExitCode.HOLDS
    assert report.runs[0].findings == []
    assert report.runs[0].last_good.step == 20


def test_everything_that_a_catalog_holds_besides_pieces_comes_back(tmp_path, target):
    """A field that is added to these records and not to the export fails here."""
    builder = CatalogBuilder()
    place = Coordinate.of(dp=1)
    builder.file(File("run/a.bin", 64))
    builder.file(File("run/b.bin", 0, "", FileState.MISSING, place, "it is not there"))
    number = builder.tensor("w", Role.PARAMETER, FLOAT32, (4,), 7, stored_once=("dp",), undetermined="no word on it")
    other = builder.tensor("v", Role.PARAMETER, FLOAT32, (4,), 8)
    for tensor in (number, other):
        builder.piece(tensor, 0, 0, whole((4,)), place)
    builder.scalars += [
        Scalar("optimizer_step", 5.0, "run/a.bin", place, "w", FLOAT32, "adam"),
        Scalar("loss", float("nan"), "run/a.bin"),
    ]  # fmt: skip
    builder.problems.append(Problem(ProblemKind.SHAPE, "run/a.bin", "differs", place, "w", 3, True))
    values = {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False, "x": None, "name": "adam", "max": float("inf")}
    builder.groups.append(ParameterGroup(2, "run/a.bin", place, "adamw", values, ("w", "v"), 5.0, True, "G"))
    builder.groups.append(ParameterGroup(3, "run/a.bin"))
    builder.ties.append(Tie(("w", "v"), "config.json"))
    catalog = builder.build(4, "run", "any", NO_MESH, {}, ())
    for record in (*catalog.scalars[:1], *catalog.problems, *catalog.groups[:1], *catalog.ties):
        for name, spec in record.__dataclass_fields__.items():
            assert getattr(record, name) != spec.default, f"{type(record).__name__}.{name} is not put to the test"
    (tmp_path / "source/run").mkdir(parents=True)
    (tmp_path / "source/run/a.bin").write_bytes(bytes(64))
    written(LocalStore(tmp_path / "source"), target, catalog)
    (found,) = catalogs(target)
    assert repr(found.scalars[1:]) == repr(tuple(moved(item) for item in catalog.scalars))
    assert found.problems == tuple(moved(item) for item in catalog.problems)
    assert found.groups == tuple(moved(item) for item in catalog.groups)
    assert found.ties == catalog.ties
    (lost,) = [file for file in found.files if file.state is not FileState.PRESENT]
    assert (lost.name, lost.state, lost.coordinate) == ("steps/4/b.bin", FileState.MISSING, place)


def moved(item):
    return replace(item, file=item.file.replace("run/", "steps/4/"))


def written(store, target, catalog):
    """Export one Catalog made by hand."""
    writer = FolderWriter(target)
    with writer.locked():
        begin(writer)
        return StepExport(store, writer, StepNode(str(catalog.step), lambda: catalog)).run(1)


# Kinds of arrays

NAMES = ["a/b", "..", "__x", "c", "zarr.json", "é", "a b", "%41"]


def test_dtypes_shapes_and_names(tmp_path, target, monkeypatch):
    monkeypatch.setattr("auditor.view.nodes.CHUNK_BYTES", 256)
    rng = np.random.default_rng(1)
    tensors = {name: rng.standard_normal(3).astype("float32") for name in NAMES}
    for kind in ("float64", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool"):
        tensors[kind] = rng.integers(0, 2, (5, 3)).astype(kind)
    tensors["ragged"] = rng.standard_normal((67, 5)).astype("float32")
    tensors["wide"] = rng.standard_normal((3, 300)).astype("float32")
    tensors["scalar"], tensors["empty"] = np.array(2.5, "float32"), np.zeros((0, 4), "float32")
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source/model.safetensors")
    result = export(LocalStore(tmp_path / "source"), str(target))
    assert not result.incomplete
    arrays = zarr.open_group(target, mode="r")["steps/0/tensors/parameter"]
    assert arrays["ragged"].chunks == (12, 5)
    (catalog,) = catalogs(target)
    assert {tensor.name for tensor in catalog.tensors} == tensors.keys()
    for _, array in arrays.arrays():
        expected = tensors[array.attrs["auditor"]["name"]]
        np.testing.assert_array_equal(array[...], expected)
        assert array.dtype == expected.dtype
    assert exit_code(audit(LocalStore(target))) is ExitCode.HOLDS


def test_complex_numbers(tmp_path, target):
    builder = CatalogBuilder()
    content = np.arange(24, dtype="complex64").reshape(4, 6) * (1 + 2j)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.bin").write_bytes(content.tobytes())
    builder.file(File("a.bin", content.nbytes))
    number = builder.tensor("w", Role.PARAMETER, DTYPES["complex64"], (6, 4), 0)
    builder.piece(number, 0, 0, whole((6, 4)), Coordinate(), strides=(1, 6))
    written(LocalStore(tmp_path / "source"), target, builder.build(1, "", "any", NO_MESH, {}, ()))
    np.testing.assert_array_equal(zarr.open_group(target)["steps/1/tensors/parameter/w"][...], content.T)
    assert exit_code(audit(LocalStore(target))) is ExitCode.HOLDS


def by_hand(tmp_path, dtype, shape, boxes):
    builder = CatalogBuilder()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.bin").write_bytes(bytes(64))
    builder.file(File("a.bin", 64))
    number = builder.tensor("w", Role.PARAMETER, dtype, shape, 0)
    for box in boxes:
        builder.piece(number, 0, 0, box, Coordinate())
    return LocalStore(tmp_path / "source"), builder.build(1, "", "any", NO_MESH, {}, ())


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([Box((0,), (3,)), Box((2,), (4,))], "overlap"), ([Box((0,), (5,))], "leave it"),
        ([Box((0,), (3,))], "no piece holds 1 elements"),
    ],
)  # fmt: skip
def test_what_the_pieces_do_not_tell_is_not_made_up(tmp_path, target, boxes, reason):
    store, catalog = by_hand(tmp_path, FLOAT32, (4,), boxes)
    result = written(store, target, catalog)
    assert [reason in told for told in result.lost] == [True]
    found = runs_in(target)
    assert {"COV001"} <= {name for f in found.findings for name in (f.id, *f.consequences)}


def test_elements_that_share_bytes_are_undetermined(tmp_path, target):
    store, catalog = by_hand(tmp_path, DTYPES["int4"], (4,), [whole((4,))])
    assert written(store, target, catalog).lost
    report = audit(LocalStore(target))
    assert exit_code(report) is ExitCode.INCOMPLETE
    assert report.runs[0].findings == []


def test_tensors_of_one_name_that_differ_in_shape_are_both_there(tmp_path, target):
    builder = CatalogBuilder()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.bin").write_bytes(np.arange(7, dtype="float32").tobytes())
    builder.file(File("a.bin", 28))
    for shape, offset in (((4,), 0), ((3,), 16)):
        number = builder.tensor("w", Role.PARAMETER, FLOAT32, shape, 0)
        builder.piece(number, 0, offset, whole(shape), Coordinate())
    catalog = builder.build(1, "", "any", NO_MESH, {}, ())
    written(LocalStore(tmp_path / "source"), target, catalog)
    (found,) = catalogs(target)
    assert found.tensors == catalog.tensors
    assert not found.problems


# Killed anywhere


class Killed(BaseException):
    pass


class DyingWriter(FolderWriter):
    """Gives up at the n-th file: before it gets its name, leaving the draft as a killed process does."""

    left = 0

    @contextmanager
    def draft(self, name):
        with super().draft(name) as draft:
            publish = draft.publish

            def dying():
                DyingWriter.left -= 1
                if DyingWriter.left < 0:
                    draft.done = True
                    raise Killed
                publish()

            draft.publish = dying
            yield draft


def test_killed_at_any_file_it_goes_on(source, tmp_path, target, monkeypatch):
    export(LocalStore(source), str(tmp_path / "whole.zarr"), threads=1)
    wanted = files_in(tmp_path / "whole.zarr")
    monkeypatch.setattr("auditor.exporting.FolderWriter", DyingWriter)
    for death, left in enumerate((0, 1, 2, 3, 40, 151, 1, 17, 97, 200, 5)):
        DyingWriter.left = left
        before = stamps(target) if target.exists() else {}
        with pytest.raises(Killed):
            export(LocalStore(source), str(target), threads=1)
        if death == 5:
            assert not list(target.glob("steps/*/zarr.json"))
            assert audit(LocalStore(target)).runs[0].steps[-1].state.commit.name == "IN_PROGRESS"
        unchanged(before, stamps(target))
    DyingWriter.left = 1 << 30
    before = stamps(target)
    export(LocalStore(source), str(target), threads=1)
    unchanged(before, stamps(target))
    assert files_in(target) == wanted


def unchanged(before, after):
    """Nothing that has its name was written again, but columns of the catalog in a step that was not finished."""
    for file, stamp in before.items():
        if not file.name.endswith(".partial") and "catalog" not in file.parts:
            assert after[file] == stamp, file


def test_a_real_kill(source, target):
    for step in (30, 40):
        shutil.copytree(HEALTHY / f"global_step{step}", source / f"global_step{step}")
    process = subprocess.Popen([sys.executable, "-m", "auditor.cli", "export", source, target], stderr=subprocess.PIPE)
    while process.poll() is None and len([*target.rglob("*")]) < 10:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = stamps(target)
    assert before
    done = cli("export", source, target)
    assert done.returncode == 0, done.stderr
    unchanged(before, stamps(target))
    assert not [name for name in files_in(target) if name.endswith(".partial")]
    assert exit_code(audit(LocalStore(target))) is ExitCode.HOLDS


def test_run_again_it_writes_nothing(source, target):
    export(LocalStore(source), str(target))
    before = stamps(target)
    result = export(LocalStore(source), str(target))
    assert all(step.num_kept == step.num_arrays == 180 and step.num_bytes == 0 for step in result.steps.values())
    after = stamps(target)
    assert {f: s for f, s in after.items() if "catalog" not in f.parts} == {
        f: s for f, s in before.items() if "catalog" not in f.parts
    }


def test_a_chunk_lost_in_the_target_is_written_again(source, target):
    export(LocalStore(source), str(target))
    chunk = target / "steps/10/tensors/parameter/3.input_layernorm.weight/c/0"
    content = chunk.read_bytes()
    chunk.unlink()
    assert export(LocalStore(source), str(target)).steps["steps/10"].num_kept == 179
    assert chunk.read_bytes() == content


def test_other_steps_and_tensors_are_added(source, target):
    export(LocalStore(source), str(target), steps("10", tensors="*layernorm*"))
    assert audit(LocalStore(target)).runs[0].findings == []
    assert len(catalogs(target)[0].tensors) == 32
    before = stamps(target)
    export(LocalStore(source), str(target), steps("10", tensors="*dense*"))
    marks = {target / "steps/10/zarr.json"}
    changed = {f for f, stamp in stamps(target).items() if f in before and before[f] != stamp}
    assert {f for f in changed if "catalog" not in f.parts} == marks
    said = json.loads((target / "steps/10/zarr.json").read_text())["attributes"]["auditor"]
    assert said["tensors"] == ["*dense*", "*layernorm*"]
    export(LocalStore(source), str(target), steps("20"))
    assert [step.step for step in catalogs(target)] == [10, 20]
    assert exit_code(audit(LocalStore(target))) is ExitCode.HOLDS
    shutil.rmtree(target / "steps/10/tensors/master/3.mlp.dense_h_to_4h.weight")
    assert {f.id for f in runs_in(target).findings} >= {"INT001"}


# Sources


def test_a_missing_source_file_is_named_and_shows_in_the_check(source, target):
    lost = source / "global_step10" / LAYER
    content = lost.read_bytes()
    lost.unlink()
    done = cli("export", source, target)
    assert done.returncode == 3
    assert f"global_step10/{LAYER} is missing" in done.stderr
    assert "incomplete" in done.stderr
    found = runs_in(target)
    assert {name for f in found.findings for name in (f.id, *f.consequences)} == {"INT001", "COV001"}
    missing = [location.file for f in found.findings for location in f.locations if f.id == "INT001"]
    assert "steps/10/replicas/tp=1/parameter/3.input_layernorm.weight/c/0" in missing
    assert f"steps/10/{LAYER}" in missing
    assert found.last_good.step == 20
    details = [location.detail for f in found.findings for location in f.locations]
    assert any(f"it was not exported: global_step10/{LAYER} is missing" in detail for detail in details)
    said = zarr.open_group(target)["steps/10/tensors/parameter/3.mlp.dense_h_to_4h.weight"].attrs["auditor"]
    assert said["num_chunks_lost"] == 1
    lost.write_bytes(content)
    done = cli("export", source, target)
    assert done.returncode == 0, done.stderr
    assert runs_in(target).findings == []


def test_a_cut_source_file(source, target):
    cut = source / "global_step20" / LAYER
    cut.write_bytes(cut.read_bytes()[:3000])
    result = export(LocalStore(source), str(target))
    assert result.incomplete
    assert any(LAYER in reason for reason in result.steps["steps/20"].lost)
    assert not result.steps["steps/10"].lost


def test_a_source_that_changes_meanwhile_leaves_the_step_unfinished(source, target):
    store = FaultyStore(LocalStore(source), Faults(shrinking=f"*step10/{LAYER}", num_bytes_left=1 << 20))
    result = export(store, str(target))
    assert result.changed == [f"global_step10/{LAYER}"]
    assert not (target / "steps/10/zarr.json").exists()
    assert (target / "steps/20/zarr.json").exists()
    assert not export(LocalStore(source), str(target)).changed
    assert (target / "steps/10/zarr.json").exists()


def test_a_source_that_was_changing_when_it_was_listed(tmp_path, target):
    store, catalog = by_hand(tmp_path, FLOAT32, (4,), [whole((4,))])
    changing = replace(catalog, files=(replace(catalog.files[0], state=FileState.CHANGED),))
    assert written(store, target, changing).changed == ("a.bin",)
    assert not (target / "steps/1/zarr.json").exists()
    assert not written(store, target, catalog).lost
    assert (target / "steps/1/zarr.json").exists()


def test_a_step_that_was_saved_anew_is_not_written_over(source, target):
    export(LocalStore(source), str(target))
    file = source / "global_step10" / LAYER
    os.utime(file)
    before = files_in(target)
    assert export(LocalStore(source), str(target)).steps["steps/10"].num_bytes == 0
    assert {n: c for n, c in files_in(target).items() if "/c/" in n} == {n: c for n, c in before.items() if "/c/" in n}
    shutil.copy(RUN / "global_step50" / LAYER, file)
    with pytest.raises(OccupiedError, match="was exported with other values"):
        export(LocalStore(source), str(target))


def test_another_run_is_in_the_way(source, target):
    export(LocalStore(source), str(target), steps("10"))
    path = target / "steps/10/tensors/parameter/3.input_layernorm.weight/zarr.json"
    path.write_text(path.read_text().replace('"shape": [16]', '"shape": [8]'))
    with pytest.raises(OccupiedError, match="another array is there"):
        export(LocalStore(source), str(target))


# Targets


def test_places_that_would_touch_the_source_are_refused(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "away").mkdir()
    shutil.move(source / "global_step20", tmp_path / "away/global_step20")
    (source / "global_step20").symlink_to(tmp_path / "away/global_step20")
    inside = [source, source / "out", source / "global_step10/out", tmp_path / "link/out", source / "../source/x"]
    before = {**files_in(source), **files_in(tmp_path / "away")}
    for target in (*inside, tmp_path / "away/global_step20/out", tmp_path, tmp_path / "away"):
        with pytest.raises(UsageError, match="lies inside"):
            export(LocalStore(source), str(target))
    assert cli("export", source, source / "out").returncode == 2
    assert {**files_in(source), **files_in(tmp_path / "away")} == before


def test_something_else_is_not_written_over(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(UsageError, match="no export"):
        export(LocalStore(source), str(other))
    assert [file.name for file in other.iterdir()] == ["zarr.json"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="file"):
        export(LocalStore(source), str(tmp_path / "file"))
    done = cli("export", source, tmp_path / "file/x")
    assert done.returncode == 3
    assert str(tmp_path / "file/x") in done.stderr


def test_links_inside_the_target_are_not_followed(source, target, tmp_path):
    export(LocalStore(source), str(target), steps("10"))
    (tmp_path / "elsewhere").mkdir()
    (target / "steps/20").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteError, match="steps/20"):
        export(LocalStore(source), str(target))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_exports_at_once(source, target):
    target.mkdir()
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="another process of the auditor"):
            export(LocalStore(source), str(target))
        assert cli("export", source, target).returncode == 11
    finally:
        os.close(descriptor)
    assert cli("export", source, target, "--steps", "10").returncode == 0


def test_a_full_disk_names_the_file_and_the_export_goes_on_later(source, target):
    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    done = cli("export", source, target, preexec_fn=small)
    assert done.returncode == 3
    assert "out.zarr/steps/10/" in done.stderr
    assert "File too large" in done.stderr
    assert not [name for name in files_in(target) if name.endswith(".partial")]
    assert cli("export", source, target).returncode == 0


def test_a_target_that_spoils_what_is_written_is_caught(source, target, monkeypatch):
    append = Draft.append

    def spoil(self, content):
        raw = bytearray(content)
        if "tp=1/parameter/4.mlp" in self._path and len(raw) and "/c/" in self._path:
            raw[len(raw) // 2] ^= 1
        append(self, memoryview(raw))

    monkeypatch.setattr(Draft, "append", spoil)
    with pytest.raises(NotVerifiedError, match=r"4\.mlp\.dense_4h_to_h\.bias \(parameter\)"):
        export(LocalStore(source), str(target))
    assert not (target / "steps/10/replicas/tp=1/parameter/4.mlp.dense_4h_to_h.bias/c/0").exists()


def test_nothing_that_was_asked_for(source, target):
    with pytest.raises(NothingToAuditError, match="--steps 99"):
        export(LocalStore(source), str(target), steps("99"))
    with pytest.raises(NothingToAuditError, match="nonsense"):
        export(LocalStore(source), str(target), steps(tensors="nonsense"))
    assert cli("export", target.parent / "nowhere", target).returncode == 2


def test_from_python(source, target):
    result = auditor.export(str(source), str(target), steps="10")
    assert list(result.steps) == ["steps/10"]
    assert auditor.check(str(target)).runs[0].steps[0].state.step == 10


def test_an_export_can_be_exported(source, tmp_path, target):
    export(LocalStore(source), str(target), steps("10"))
    export(LocalStore(target), str(tmp_path / "again.zarr"))
    (one,), (other,) = catalogs(target), catalogs(tmp_path / "again.zarr")
    assert (one.tensors, one.replicas, one.mesh) == (other.tensors, other.replicas, other.mesh)
    assert exit_code(audit(LocalStore(tmp_path / "again.zarr"))) is ExitCode.HOLDS
