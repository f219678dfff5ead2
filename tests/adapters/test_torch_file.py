"""Runs whose steps are single files, on what torch and Lightning wrote; faults, and what must raise no alarm."""

import io
import shutil
from datetime import UTC, datetime

import numpy as np
import pytest

from auditor.adapters.adapter import Declined, Folder, Options
from auditor.adapters.step_names import step_name
from auditor.adapters.torch_file import TorchFiles
from auditor.audit import audit
from auditor.discovery import discover, one_run
from auditor.errors import NothingToAuditError
from auditor.ledger.folder import open_ledger
from auditor.report.open_questions import open_lines
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.verdict import ExitCode, exit_code
from tests.faults import float32_bits, poke, rewrite
from tests.paths import HEALTHY as DEEPSPEED
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "torch_file"
NUMBERED, FOLDERS, LIGHTNING = FIXTURES / "numbered", FIXTURES / "folders", FIXTURES / "lightning"
LATER = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
SAVES = ("model_2.pt", "model_4.pt", "model_6.pt")
ROLES = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "counter"}


class TestContract(AdapterContract):
    adapter = TorchFiles()
    checkpoints = (FOLDERS / "step_6",)
    # A store in memory has no name that could tell a step: there, the file is looked at by itself.
    foreign = (DEEPSPEED / "global_step10", ROOT / "tests/fixtures/hugging_face/gpt2_torch", NUMBERED)

    def catalog(self, store, path=""):
        return super().catalog(store, path) if isinstance(store, LocalStore) else self.harmless(store)

    def harmless(self, store):
        (entry,) = store.list("")
        match = self.adapter.recognise(store, Folder.of_file(entry))
        if isinstance(match, Declined):
            assert match.reason
            return None
        catalog = self.adapter.read(store, Folder.of_file(entry), match, Options())
        assert catalog.path == entry.name
        return catalog

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        file = torch.load(path / "checkpoint.pt")
        arrays = {("parameter", name): tensor for name, tensor in file["model"].items()}
        names = list(file["model"])
        for number, state in file["optimizer"]["state"].items():
            arrays |= {(ROLES[key], names[number]): tensor for key, tensor in state.items()}
        return {key: tensor.numpy().tobytes() for key, tensor in arrays.items()}


def audited(path, **choices):
    store = MemoryStore(path) if isinstance(path, dict) else LocalStore(path)
    return audit(store, Settings(**choices), now=LATER)


def found(report):
    return [finding.id for run in report.runs for finding in run.findings]


def steps(run):
    return [step.state.step for step in run.steps]


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(NUMBERED, tmp_path / "run")


@pytest.fixture
def folders(tmp_path):
    """The same saves in folders of their own."""
    for name in SAVES:
        target = tmp_path / "run" / name.removesuffix(".pt").replace("model", "step")
        target.mkdir(parents=True)
        shutil.copy(NUMBERED / name, target / "checkpoint.pt")
    return tmp_path / "run"


# Healthy runs


@pytest.mark.parametrize("level", Level)
def test_files_of_one_folder_are_the_steps_and_what_holds_no_model_is_none(level):
    """Data beside them holds NaN, and one of its files is numbered."""
    report = audited(NUMBERED, level=level)
    (run,) = report.runs
    assert (run.path, steps(run), found(report), exit_code(report)) == ("", [2, 4, 6], [], ExitCode.HOLDS)
    assert level is Level.NAMES or run.last_good.path == "model_6.pt"
    assert {step.state.format for step in run.steps} == {"torch-file"}
    if level >= Level.VALUES:
        assert not run.undetermined()
        assert {"MOT001", "MOT009", "MOT010", "OPT011"} <= {
            key for step in run.steps for key, judged in step.judgements.items() if judged.num_holds
        }


def test_a_folder_a_step(folders):
    report = audited(folders)
    (run,) = report.runs
    assert (steps(run), found(report), run.last_good.path) == ([2, 4, 6], [], "step_6")
    assert not run.undetermined()


def test_a_folder_a_step_of_one_ranks_file(folders):
    for file in folders.rglob("checkpoint.pt"):
        file.rename(file.parent / "rank_0.pt")
    (run,) = audited(folders).runs
    assert (steps(run), run.findings, run.last_good.step) == ([2, 4, 6], [], 6)
    assert run.steps[0].state.format == "torch-per-rank"


def test_lightning_and_its_last():
    report = audited(LIGHTNING)
    run, last = report.runs
    assert (steps(run), steps(last), last.path, found(report)) == ([2, 4, 6], [6], "last.ckpt", [])
    assert not run.undetermined()
    assert report.asked_for == [run]
    assert one_run(LocalStore(LIGHTNING)).path == ""


def test_a_ledger_keeps_what_lies_beside_a_run_apart_from_it(tmp_path):
    for _ in range(2):
        report = audit(LocalStore(LIGHTNING), now=LATER, ledger=open_ledger(str(tmp_path / "ledger")))
        assert [steps(run) for run in report.runs] == [[2, 4, 6], [6]]
        assert found(report) == []
    assert all(step.recalled for run in report.runs for step in run.steps)


def test_links_and_copies_beside_the_steps(run):
    (run / "last.pt").symlink_to("model_6.pt")
    (run / "model_latest.pt").hardlink_to(run / "model_6.pt")
    shutil.copy(run / "model_4.pt", run / "model_best.pt")
    report = audited(run)
    assert ([one.path for one in report.runs], found(report)) == (["", "model_best.pt"], [])
    assert [one.path for one in report.asked_for] == [""]


def test_files_by_themselves_are_runs(run):
    for name in SAVES[:2]:
        (run / name).unlink()
    (run / SAVES[2]).rename(run / "last.ckpt")
    report = audited(run)
    (only,) = report.runs
    assert (only.path, only.last_good.path, found(report)) == ("", "last.ckpt", [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model_10.pt", ("model_#.pt", 10)), ("ckpt_0010.pth", ("ckpt_#.pth", 10)), ("10.pt", ("#.pt", 10)),
        ("epoch=1-step=100.ckpt", ("epoch=#-step=#.ckpt", 100)), ("model_epoch_3.pt", ("model_epoch_#.pt", 3)),
        ("epoch=2-val_loss=0.25.ckpt", ("epoch=#-val_loss=#.ckpt", 2)), ("gpt2-500.pt", ("gpt2-#.pt", 500)),
        ("checkpoint-10.pth.tar", ("checkpoint-#.pth.tar", 10)), ("model10.pt", ("model#.pt", 10)),
        ("checkpoint_1_1000.pt", ("checkpoint_#_#.pt", 1000)), ("fold0_epoch5.pt", ("fold0_epoch#.pt", 5)),
        ("seed1_step_7.safetensors", ("seed1_step_#.safetensors", 7)), ("resnet50.pt", None), ("model_v2.pt", None),
        ("rank_0.pt", None), ("layer_03-model_00-model_states.pt", None), ("consolidated.00.pth", None),
        ("model-00001-of-00003.safetensors", None), ("last.ckpt", None), ("model_" + "9" * 20 + ".pt", None),
    ],
)  # fmt: skip
def test_names(name, expected):
    told = step_name(name)
    assert (told and (told.series, told.number)) == expected


# Numbers in names and in files


def saved(content):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def states(names, record=lambda at: {}):
    """A file a name, with weights that are others in each."""
    torch = pytest.importorskip("torch")
    made = {}
    for at, name in enumerate(names):
        torch.manual_seed(at)
        made[name] = saved({"model": torch.nn.Linear(4, 3).state_dict(), **record(at)})
    return made


@pytest.mark.parametrize(
    ("pattern", "record", "expected"),
    [
        ("model_{}.pt", lambda at: {}, [10, 20, 30]),
        ("model_{}.pt", lambda at: {"step": 10 * at + 10}, [10, 20, 30]),
        ("model_{}.pt", lambda at: {"iter_num": 10 * at + 9}, [9, 19, 29]),
        ("epoch_{}.pt", lambda at: {"global_step": 500 * at + 500}, [500, 1000, 1500]),
        ("epoch_{}.pt", lambda at: {"epoch": 10 * at + 10}, [10, 20, 30]),
    ],
)
def test_a_step_is_what_is_recorded_unless_most_names_tell_it(pattern, record, expected):
    objects = states([pattern.format(10 * at + 10) for at in range(3)], record)
    report = audited(objects)
    assert (steps(report.runs[0]), found(report)) == (expected, [])


def test_a_stale_file_is_told_by_the_step_that_it_records(run):
    shutil.copy(run / "model_4.pt", run / "model_6.pt")
    report = audited(run)
    (finding,) = report.runs[0].findings
    assert (finding.id, finding.message) == (
        "INT005", "its file records step 4, the checkpoint's is 6",
    )  # fmt: skip
    assert (finding.intervals[0].last_good, report.runs[0].last_good.step) == (4, 4)


def test_members_of_an_ensemble_are_no_steps():
    report = audited(states([f"model_{n}.pt" for n in range(3)], lambda at: {"step": 1000}))
    assert (sorted(run.path for run in report.runs), found(report)) == ([f"model_{n}.pt" for n in range(3)], [])


def test_seeds_are_runs_of_their_own():
    names = [f"seed{seed}_step_{step}.pt" for seed in (1, 2) for step in (10, 20)]
    assert [steps(run) for run in audited(states(names)).runs] == [[10, 20], [10, 20]]


# Faults


def frozen(run):
    """A trained weight that stands still although its moments went on."""
    kept = []
    rewrite(run, 4, "0.weight", "parameter", lambda bits: kept.append(bits) or bits)
    rewrite(run, 6, "0.weight", "parameter", lambda bits: kept[0])


def optimizer_began_anew(run):
    """A resume that loaded the weights alone: two steps of AdamW from moments of zero."""
    torch = pytest.importorskip("torch")
    content = torch.load(run / "model_4.pt")
    content["step"] = 6
    for weight, state in zip(content["model"].values(), content["optimizer"]["state"].values(), strict=True):
        first, second = state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        for step in (1, 2):
            gradient = torch.randn_like(weight)
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            update = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
            weight.mul_(1 - 1e-2 * 1e-2).sub_(1e-2 * update)
        state["step"].fill_(2)
    torch.save(content, run / "model_6.pt")


FAULTS = {
    "NaN in a weight": ("NUM001", lambda run: poke(run, 6, "0.weight", value=0x7FC00000)),
    "a frozen tensor": ("MOT001", frozen),
    "a file cut short": ("INT002", lambda run: (run / "model_6.pt").write_bytes(b"PK\x03\x04" + b"\0" * 900)),
    "an empty file": ("INT002", lambda run: (run / "model_6.pt").write_bytes(b"")),
    "a negative second moment": ("OPT010", lambda run: poke(run, 6, "0.bias", "second_moment", value=0xB58637BD)),
    "weights far off": (
        "MOT010",
        lambda run: rewrite(run, 6, "0.weight", "parameter", lambda bits: (bits.view(np.float32) * 3).view(np.uint32)),
    ),
    "the optimizer's state lost": ("MOT006", optimizer_began_anew),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_its_finding_at_its_step(run, fault):
    expected, damage = FAULTS[fault]
    damage(run)
    report = audited(run)
    (finding,) = report.runs[0].findings
    assert finding.id == expected
    assert [(one.last_good, one.first_bad) for one in finding.intervals] == [(4, 6)]
    assert {location.file for location in finding.locations} == {"model_6.pt"}


def test_a_fault_in_a_folder_of_its_own(folders):
    poke(folders, 4, "0.weight", value=float32_bits(np.nan))
    (finding,) = audited(folders).runs[0].findings
    assert (finding.id, finding.locations[0].file) == ("NUM001", "step_4/checkpoint.pt")
    assert finding.intervals[0].healed == 6


def test_a_damaged_last_is_found_beside_a_sound_run(tmp_path):
    run = shutil.copytree(LIGHTNING, tmp_path / "run")
    (run / "last.ckpt").write_bytes((run / "last.ckpt").read_bytes()[:4000])
    (run / "dataset.pt").write_bytes(b"PK\x03\x04 cut")
    report = audited(run)
    assert [(one.path, [finding.id for finding in one.findings]) for one in report.runs] == [
        ("", []), ("last.ckpt", ["INT002"]),
    ]  # fmt: skip
    assert report.asked_for[0].last_good.step == 6


def test_a_ranks_part_is_no_whole_step():
    """FSDP2's parts under a name without a rank: what the other ranks hold is not there to be judged."""
    content = (ROOT / "tests/fixtures/torch_per_rank/fsdp2_3/step_2/rank_0.pt").read_bytes()
    report = audited({"model_2.pt": content})
    (run,) = report.runs
    assert (found(report), run.last_good) == ([], None)
    assert ("INT001", "it holds one rank's part of its tensors: where the other ranks' are is not known") in (
        run.undetermined()
    )


# Other containers


def test_numbered_safetensors(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    for step in (10, 20, 30):
        weights = {"a.weight": np.full((3, 4), step, np.float32), "a.bias": np.arange(3, dtype=np.float32) + step}
        numpy.save_file(weights, tmp_path / f"model_{step}.safetensors")
    numpy.save_file({"images": np.full(5, np.nan, np.float32)}, tmp_path / "data_1.safetensors")
    (run,) = audited(tmp_path).runs
    assert (steps(run), run.findings, run.last_good.path) == ([10, 20, 30], [], "model_30.safetensors")
    weights["a.bias"][1] = np.nan
    numpy.save_file(weights, tmp_path / "model_30.safetensors")
    (finding,) = audited(tmp_path).runs[0].findings
    assert (finding.id, finding.intervals[0].last_good) == ("NUM001", 20)


def test_a_folder_of_data_is_no_run(run):
    for name in SAVES:
        (run / name).unlink()
    with pytest.raises(NothingToAuditError):
        discover(LocalStore(run))


# Beside a run


def test_checkpoint_folders_that_nobody_recognises_are_named_and_others_are_not(run):
    for folder in ("logs", "code", "data", "half/step_8", "half/step_9"):
        (run / folder).mkdir(parents=True)
    (run / "logs" / "train.log").write_text("step 1")
    (run / "data" / "train.bin").write_bytes(b"\0\1" * 64)
    shutil.copy(run / "dataset.pt", run / "data" / "dataset.pt")
    report = audited(run)
    assert (found(report), exit_code(report)) == ([], ExitCode.HOLDS)
    nothing_known = saved([pytest.importorskip("torch").ones(2, 2)])
    for step in (8, 9):
        (run / f"half/step_{step}" / "model.pt").write_bytes(nothing_known)
    report = audited(run)
    assert (found(report), exit_code(report)) == ([], ExitCode.INCOMPLETE)
    assert report.runs[0].unrecognised == {
        "half/step_8": "no format recognises its files, model.pt for example (and so in 1 more)"
    }


def test_a_run_in_the_folder_of_another_is_audited_and_not_the_one_that_is_asked_for(run):
    shutil.copytree(FOLDERS, run / "old")
    poke(run / "old", 6, "0.weight", value=0x7FC00000)
    report = audited(run)
    assert [(one.path, [item.id for item in one.findings]) for one in report.runs] == [("", []), ("old", ["NUM001"])]
    assert [one.last_good.path for one in report.asked_for] == ["model_6.pt"]
    assert one_run(LocalStore(run)).path == ""


def test_what_a_lost_file_leaves_open_is_one_line(run):
    dcp = shutil.copytree(ROOT / "tests/fixtures/dcp/fsdp2_2", run / "dcp")
    (dcp / "step-4" / "__1_0.distcp").unlink()
    (only,) = audited(dcp).runs
    stored_once, lost = open_lines(only)
    assert stored_once.startswith("REP001")
    assert lost.startswith("21 invariants (CST002, MOT001, MOT002, MOT004 and 17 more) of up to 69 tensors · ")
    assert "__1_0.distcp of step 4: missing or damaged" in lost
    assert len([*open_lines(only, folded=False)]) > 4
    # A step alone, of which all is touched: what else is unknown of it is not laid to the file.
    shutil.rmtree(dcp / "step-2")
    (only,) = audited(dcp).runs
    *others, lost = open_lines(only)
    assert lost.startswith("9 invariants (CST002, NUM001, NUM002, NUM003 and 5 more) of up to ")
    assert any(line.startswith("REP001 replicas-differ: ") for line in others)
    assert len([*open_lines(only, folded=False)]) > len(others)
