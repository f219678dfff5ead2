"""Flax's msgpack checkpoints: by real writers, real training; named damage, each with its healthy twin."""

import hashlib
import io
import json

import numpy as np
import pytest

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.flax_msgpack import FlaxMsgpack
from auditor.adapters.npz import Npz
from auditor.audit import audit
from auditor.discovery import discover
from auditor.errors import NothingToAuditError
from auditor.model.catalog import Role
from auditor.model.finding import Severity
from auditor.model.region import whole
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.view.assemble import read_box
from tests.flax_files import leaves, pack, unpack
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "flax"
RESTORED = json.loads((FIXTURES / "restored.json").read_text())
VARIANTS = sorted(
    path.name
    for path in FIXTURES.iterdir()
    if path.is_dir() and path.name not in ("narrow", "same_weights", "same_weights_apart")
)
KERNEL = "layers_1.up.kernel"


def objects_of(variant):
    folder = FIXTURES / variant
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def audited(objects, level=Level.VALUES):
    (run,) = audit(MemoryStore(objects), Settings(level=level), now=1e9).runs
    return run


def findings(objects):
    return [(finding.id, {(at.tensor, at.role and at.role.value, at.step) for at in finding.locations})
            for finding in audited(objects).findings]  # fmt: skip


def edited(variant, name, change):
    """The run with one file's tree changed."""
    objects = objects_of(variant)
    tree = unpack(objects[name])
    change(tree)
    return {**objects, name: pack(tree)}


def at(tree, *path):
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]], name = tree[path[-1]].copy(), getattr(tree[path[-1]], "name", "")
    if name:
        tree[path[-1]].name = name
    return tree[path[-1]]


MU = ("opt_state", "1", "0", "mu", "layers_1", "up", "kernel")
NU = ("opt_state", "1", "0", "nu", "layers_1", "up", "kernel")
INJECTED = ("opt_state", "inner_state", "0")


class TestContract(AdapterContract):
    adapter = FlaxMsgpack()
    read_ahead = 64 << 10
    checkpoints = (FIXTURES / "masters/step_4", FIXTURES / "nnx_pure/step_4", FIXTURES / "dtypes")

    def framework_arrays(self, path):
        if path.name == "dtypes":
            tree = unpack((path / "state.msgpack").read_bytes())
            return {("parameter", name): array.tobytes() for name, array in tree["params"].items()
                    if array.dtype.kind == "f" and array.dtype.itemsize > 1}  # fmt: skip
        if path.parent.name == "nnx_pure":
            model, optimizer = (unpack((path / f"{name}.msgpack").read_bytes()) for name in ("model", "optimizer"))
            found = {("first_moment", ".".join(p)): a for p, a in leaves(optimizer["opt_state"]["0"]["mu"])}
            found |= {("parameter" if ("first_moment", ".".join(p)) in found else "buffer", ".".join(p)): a
                      for p, a in leaves(model)}  # fmt: skip
            return {key: array.tobytes() for key, array in found.items()}
        tree = unpack((path / "state.msgpack").read_bytes())
        trees = {
            "parameter": tree["params"], "master": tree["master_params"], "ema": tree["ema_params"],
            "first_moment": tree["opt_state"]["0"]["mu"], "second_moment": tree["opt_state"]["0"]["nu"],
        }  # fmt: skip
        return {(role, ".".join(p)): a.tobytes() for role, tree in trees.items() for p, a in leaves(tree)}


class TestNpzContract(AdapterContract):
    adapter = Npz()
    read_ahead = 256
    checkpoints = (FIXTURES / "npz/step_4", FIXTURES / "npz/step_6")

    def framework_arrays(self, path):
        roles = {"params": "parameter", "mu": "first_moment", "nu": "second_moment"}
        with np.load(path / "state.npz") as arrays:
            found = {}
            for name, array in arrays.items():
                head = next((part for part in name.split("/") if part in roles), None)
                if head:
                    found[roles[head], name.partition(f"{head}/")[2].replace("/", ".")] = array.tobytes()
        return found


def test_arrays_that_are_no_state_are_no_run():
    files = {f"data/part_{number}.npz": (FIXTURES / "npz/step_4/state.npz").read_bytes() for number in range(2)}
    data = io.BytesIO()
    np.savez(data, images=np.ones((4, 4), np.float32))
    assert audit(MemoryStore(files), Settings(), now=1e9).runs
    with pytest.raises(NothingToAuditError, match="nothing tells that they are a model's"):
        audit(MemoryStore(dict.fromkeys(files, data.getvalue())), Settings(), now=1e9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_healthy_runs_have_no_findings(variant):
    run = audited(objects_of(variant), Level.FULL)
    assert not run.findings
    assert not run.unrecognised
    assert run.last_good.step == run.steps[-1].state.step
    assert run.coverage.num_bytes_read > 0


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "npz"])
def test_arrays_are_those_that_flax_restores(variant):
    """Every array of one step by its digest, as Flax itself read it when the fixture was made."""
    store = LocalStore(FIXTURES / variant)
    (run,) = discover(store)
    source = next(source for source in run.steps if source.match.step in (3, 6))
    catalog = source.adapter.read(store, source.folder, source.match, Options())
    found = {}
    for number, tensor in enumerate(catalog.tensors):
        piece = catalog.pieces[int(catalog.rows_of(number, 0)[0])]
        content = read_box(store, catalog, number, 0, whole(tensor.shape)).tobytes()
        found[catalog.files[piece.file].name, piece.key] = hashlib.sha256(content).hexdigest()[:16]
    expected = {}
    for file, digests in RESTORED.items():
        name = file.removeprefix(f"{variant}/")
        own = {(name, path): digest for path, digest in digests.items()}
        parts = (f"{name.split('/')[-1].removesuffix('.msgpack')}.",) if variant == "nnx_pure" else ("",)
        expected |= {(name, parts[0] + path): digest for (name, path), digest in own.items() if name != file}
    assert len(expected) > 20
    assert found == expected


def test_a_run_is_files_beside_one_another():
    (run,) = discover(LocalStore(FIXTURES / "adamw"))
    assert [source.match.step for source in run.steps] == [2, 4, 6]
    assert [source.folder.path for source in run.steps] == ["checkpoint_2", "checkpoint_4", "checkpoint_6"]
    run = audited(objects_of("adamw"))
    assert {step.state.path for step in run.steps} == {"checkpoint_2", "checkpoint_4", "checkpoint_6"}


def test_two_series_are_two_runs():
    objects = objects_of("adamw") | objects_of("inject")
    report = audit(MemoryStore(objects), Settings(level=Level.HEADERS), now=1e9)
    assert [(run.path, [step.state.step for step in run.steps]) for run in report.runs] == [
        ("checkpoint_#", [2, 4, 6]), ("state_#.msgpack", [2, 4, 6])
    ]  # fmt: skip


def test_a_file_by_itself():
    store = MemoryStore({"checkpoint_6": objects_of("adamw")["checkpoint_6"]})
    folder = Folder.of_file(store.stat("checkpoint_6"))
    assert FlaxMsgpack().recognise(store, folder) == Match(
        6, "a msgpack map with arrays; it records step 6", numbered=6
    )


def test_other_files_with_numbers_are_none():
    run = audited(
        objects_of("adamw") | {"events.out.1700000000": b"\x18\0\0\0", "log_3": b"\x80\x04K\x01.", "n_7": b""}
    )
    assert [step.state.step for step in run.steps] == [2, 4, 6]
    assert not run.unrecognised


def test_weights_of_another_format_beside_them_are_not_ours():
    store = MemoryStore({"flax_model.msgpack": objects_of("adamw")["checkpoint_6"], "model.safetensors": b""})
    assert isinstance(FlaxMsgpack().recognise(store, Folder.read(store, "")), Declined)


def test_elements_of_four_bits_are_read():
    run = audited(objects_of("narrow"))
    assert not run.findings
    assert not run.steps[-1].judgements["NUM001"].undetermined
    assert run.steps[-1].judgements["NUM001"].num_holds == 4


# Named damage


def test_a_file_cut_short_is_named():
    objects = objects_of("adamw")
    (finding,) = audited({**objects, "checkpoint_6": objects["checkpoint_6"][:20_000]}).findings
    assert (finding.id, finding.severity) == ("INT002", Severity.ERROR)
    assert {at.file for at in finding.locations} == {"checkpoint_6"}
    assert "needs" in finding.message


def test_an_empty_file_is_named():
    (finding,) = audited({**objects_of("adamw"), "checkpoint_4": b""}).findings
    assert (finding.id, {at.file for at in finding.locations}) == ("INT002", {"checkpoint_4"})


def test_a_moment_that_is_not_there():
    def change(tree):
        tree["opt_state"]["1"]["0"]["nu"]["layers_1"]["up"].pop("kernel")

    assert findings(edited("adamw", "checkpoint_6", change)) == [("OPT001", {(KERNEL, "second_moment", 6)})]


def test_a_moment_of_another_parameters_shape():
    def change(tree):
        tree["opt_state"]["1"]["0"]["nu"]["layers_1"]["up"]["kernel"] = np.ones((3, 3), np.float32)

    assert ("OPT001", {(KERNEL, "second_moment", 6)}) in findings(edited("adamw", "checkpoint_6", change))


def test_a_negative_second_moment():
    def change(tree):
        at(tree, *NU)[3, 3] = -1

    assert findings(edited("adamw", "checkpoint_6", change)) == [("OPT010", {(KERNEL, "second_moment", 6)})]


def test_a_nan():
    def change(tree):
        at(tree, "params", "head", "kernel")[0, 0] = np.nan

    assert findings(edited("adamw", "checkpoint_6", change)) == [("NUM001", {("head.kernel", "parameter", 6)})]


def test_a_second_moment_that_is_too_small_for_the_first():
    def change(tree):
        at(tree, *INJECTED, "nu", "layers_1", "up", "kernel")[:] *= 1e-6

    ((code, places),) = findings(edited("inject", "state_6.msgpack", change))
    assert (code, {place[0] for place in places}) == ("OPT011", {KERNEL})


def test_a_learning_rate_that_is_nan():
    def change(tree):
        at(tree, "opt_state", "hyperparams", "learning_rate")[...] = np.nan

    assert {code for code, _ in findings(edited("inject", "state_6.msgpack", change))} == {"OPT008", "NUM001"}


def test_a_counter_that_lags():
    def change(tree):
        at(tree, "opt_state", "1", "2", "count")[...] = 3

    ((code, places),) = findings(edited("adamw", "checkpoint_6", change))
    assert (code, places) == ("OPT007", {("opt_state.1.2.count", "counter", 6)})


def test_counters_at_zero_beside_moments_that_are_not():
    def change(tree):
        at(tree, "opt_state", "0", "count")[...] = 0

    found = findings(edited("masters", "step_6/state.msgpack", change))
    assert [code for code, _ in found] == ["OPT009", "MOT006"]


def test_weights_that_are_not_their_masters():
    def change(tree):
        at(tree, "params", "layers_1", "up", "kernel")[:4] += 8

    assert findings(edited("masters", "step_6/state.msgpack", change)) == [("CST001", {(KERNEL, "parameter", 6)})]


def test_a_step_saved_with_the_optimizer_of_an_earlier_one():
    def change(tree):
        tree["opt_state"] = unpack(objects_of("adamw")["checkpoint_4"])["opt_state"]

    assert [code for code, _ in findings(edited("adamw", "checkpoint_6", change))] == ["INT011"]


def test_roles_of_what_was_trained_in_parts():
    (run,) = discover(LocalStore(FIXTURES / "multi_transform"))
    source = run.steps[-1]
    catalog = source.adapter.read(LocalStore(FIXTURES / "multi_transform"), source.folder, source.match, Options())
    frozen = {"embed.embedding"}
    first = {tensor.name for tensor in catalog.tensors if tensor.role is Role.FIRST_MOMENT}
    moment = {tensor.name for tensor in catalog.tensors if tensor.role is Role.MOMENT}
    parameters = {tensor.name for tensor in catalog.tensors if tensor.role is Role.PARAMETER}
    assert first | moment | frozen == parameters
    assert not first & moment


@pytest.mark.parametrize(
    ("variant", "suffix", "stray"),
    [("npz", ".npz", "best.npz"), ("masters", ".msgpack", "final.msgpack"), ("masters", "", "checkpoint_best")],
)
def test_a_file_without_a_number_does_not_hide_the_steps_beside_it(variant, suffix, stray):
    (name,) = {path.name for path in (FIXTURES / variant).glob("step_4/*")}
    steps = {f"checkpoint_{n}{suffix}": (FIXTURES / variant / f"step_{n}/{name}").read_bytes() for n in (4, 6)}
    objects = {**steps, stray: (FIXTURES / variant / f"step_2/{name}").read_bytes()}
    main, beside = audit(MemoryStore(objects), Settings(), now=1e9).runs
    assert ([step.state.step for step in main.steps], main.findings, main.nested) == ([4, 6], [], False)
    assert (beside.path, beside.findings, beside.nested) == (stray, [], True)
    objects[f"checkpoint_6{suffix}"] = steps[f"checkpoint_6{suffix}"][:900]
    main, _ = audit(MemoryStore(objects), Settings(), now=1e9).runs
    assert [(finding.id, finding.intervals[0].first_bad) for finding in main.findings] == [("INT002", 6)]


def test_the_digit_of_a_root_s_name_is_no_step():
    store = MemoryStore({"state.npz": (FIXTURES / "npz/step_4/state.npz").read_bytes()}, "/runs/try3")
    ((step,),) = (run.steps for run in discover(store))
    assert step.match.step != 3
