"""Which saves are steps of one run, in which order: by what they record, else by names; others stand by themselves."""

import pytest

from auditor.adapters.step_names import last_number, step_name
from auditor.audit import audit
from auditor.report.text_report import text_lines
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
DCP, OLD_DCP, ORBAX = FIXTURES / "dcp/fsdp2_2", FIXTURES / "dcp/torch_2_1", FIXTURES / "orbax/manager"
ACCELERATE, TRAINER, FLAX = (
    FIXTURES / "hugging_face/accelerate_bin",
    FIXTURES / "hugging_face/trainer",
    FIXTURES / "flax",
)


def called(folder, **names):
    """The saves of a run under other names: names here to names there."""
    found = {}
    for new, old in names.items():
        source = folder / old
        files = [file for file in source.rglob("*") if file.is_file()] if source.is_dir() else [source]
        for file in files:
            inside = file.relative_to(source).as_posix()
            found[new if inside == "." else f"{new}/{inside}"] = file.read_bytes()
    return found


def runs(objects):
    store = MemoryStore(objects) if isinstance(objects, dict) else LocalStore(objects)
    report = audit(store, Settings(level=Level.VALUES), now=1.9e9)
    return [
        (run.path, [step.state.step for step in run.steps], [item.id for item in run.findings], run.order, run.nested)
        for run in report.runs
    ], report


BY_NAMES, ALONE = "by the numbers in their names", "nothing tells its step: it is compared with no other"


@pytest.mark.parametrize(("objects", "steps", "order"), [
    # DCP records the step of the script.
    (called(DCP, epoch_0="step-2", epoch_1="step-4"), [2, 4], ""),
    (called(OLD_DCP, **{"epoch_1_step_100": "step-2", "epoch_2_step_200": "step-4"}), [100, 200], ""),
    (called(OLD_DCP, epoch_0="step-2", epoch_1="step-4"), [0, 1], BY_NAMES),
    (called(ACCELERATE, epoch_0="step_2", epoch_1="step_4"), [0, 1], ""),
    (called(ACCELERATE, **{"epoch=3-step=400": "step_2", "epoch=4-step=500": "step_4"}), [400, 500], ""),
    # Orbax puts a prefix of any name before the step.
    (called(ORBAX, epoch_1="1", epoch_2="2"), [1, 2], ""),
    (called(ORBAX, sweep_10="1", sweep_20="2"), [10, 20], ""),
], ids=lambda value: min(value) if isinstance(value, dict) else None)  # fmt: skip
def test_folders_by_epochs(objects, steps, order):
    assert runs(objects)[0] == [("", steps, [], order, False)]


@pytest.mark.parametrize(("folder", "names"), [
    (ACCELERATE, ("step_2", "step_4")), (ORBAX, ("1", "2")), (OLD_DCP, ("step-2", "step-4")),
], ids=["hugging-face", "orbax", "dcp"])  # fmt: skip
def test_folders_without_a_number_are_judged_alone(folder, names):
    """A copy of the newest, an older one's, beside the run; and two of them with nothing else."""
    first, second = names
    strays = {"best": first, "final": second}
    found, report = runs(called(folder, **{name: name for name in names}, **strays))
    assert [item[:1] + item[2:] for item in found] == [
        ("", [], "", False), ("best", [], ALONE, True), ("final", [], ALONE, True),
    ]  # fmt: skip
    assert any(f"step 0, {ALONE}" in line for line in text_lines(report))
    assert [(path, order) for path, _, _, order, _ in runs(called(folder, **strays))[0]] == [
        ("best", ALONE), ("final", ALONE),
    ]  # fmt: skip


def test_saves_below_numbered_folders_are_said_to_look_like_one_run():
    inside = {f"step_{number}/hf": name for number, name in ((5, "step_2"), (10, "step_4"))}
    found, report = runs(called(ACCELERATE, **inside))
    assert [item[3] for item in found] == [ALONE, ALONE]
    (line,) = [line for line in text_lines(report) if "If they are steps" in line]
    assert line.startswith("step_5/hf … step_10/hf: 2 runs whose folders are numbered above (step_#/hf).")
    # Linked as the line says they are compared; what no number tells apart is no such set.
    assert runs(called(ACCELERATE, step_5="step_2", step_10="step_4"))[0][0][1] == [5, 10]
    _, report = runs(called(ACCELERATE, **{"a/hf": "step_2", "b/hf": "step_4", "step_5/hf": "step_4"}))
    assert not any("If they are steps" in line for line in text_lines(report))


def test_a_copy_that_records_its_step_is_told_to_be_one():
    """The Trainer records the step in a folder of any name."""
    names = {"checkpoint-3": "checkpoint-3", "checkpoint-6": "checkpoint-6", "last": "checkpoint-6"}
    ((path, steps, _, order, _),), report = runs(called(TRAINER, **names))
    assert (path, steps, order) == ("", [3, 6, 6], "")
    (finding,) = report.runs[0].findings
    assert (finding.id, finding.severity.name) == ("INT007", "NOTE")
    assert report.runs[0].last_good.path == "checkpoint-6"


def test_formats_in_names_are_no_steps():
    found, _ = runs(FIXTURES / "flax/same_weights_apart")
    assert {(order, tuple(ids)) for _, _, ids, order, _ in found} == {(ALONE, ())}
    assert len(found) == len([*(FIXTURES / "flax/same_weights_apart").iterdir()])


@pytest.mark.parametrize("suffix", ["", ".npz"])
def test_names_with_fractions_are_one_run_by_the_steps_that_files_record(suffix):
    saves = {"checkpoint_0.2": 2, "checkpoint_0.4": 4, "checkpoint_1.0": 6}
    folder, pattern = (FLAX / "npz", "step_{}/state.npz") if suffix else (FLAX / "adamw", "checkpoint_{}")
    objects = called(folder, **{f"{name}{suffix}": pattern.format(step) for name, step in saves.items()})
    assert runs(objects)[0] == [("", [2, 4, 6], [], "", False)]


def test_names_of_epochs_beside_recorded_steps_in_states():
    objects = called(FLAX / "npz", **{f"params_epoch{n}.npz": f"step_{2 * n}/state.npz" for n in (1, 2, 3)})
    assert runs(objects)[0] == [("", [2, 4, 6], [], "", False)]


def test_files_of_layers_are_no_steps():
    objects = called(FLAX / "npz", **{f"layer_{n}.npz": f"step_{2 * n}/state.npz" for n in (1, 2, 3)})
    objects |= called(FLAX / "npz", **{"state_6.npz": "step_6/state.npz"})
    assert sorted(steps for _, steps, *_ in runs(objects)[0]) == [[2], [4], [6], [6]]


@pytest.mark.parametrize(("name", "number"), [
    ("10", 10), ("ckpt_00000002", 2), ("run7", 7), ("zarr3", None), ("orbax_v1", None), ("bf16", None), ("v_3", 3),
    ("2.5", None), ("10.bak", None), ("9" * 30, None), ("best", None),
])  # fmt: skip
def test_numbers_at_the_end_of_a_name(name, number):
    assert last_number(name) == number


@pytest.mark.parametrize(("name", "expected"), [
    ("checkpoint_0.4", ("checkpoint_#", None)), ("checkpoint_4.0", ("checkpoint_#", 4)), ("model-1.5B.pt", None),
    ("model_v1.5.pt", None), ("state_epoch0.5.npz", ("state_epoch#.npz", None)),
    ("checkpoint_" + "9" * 20, ("checkpoint_#", None)),
])  # fmt: skip
def test_fractions_in_names(name, expected):
    told = step_name(name)
    assert (told and (told.series, told.number)) == expected
