"""A single file as PATH: judged by itself; its neighbours are not read, and what they would tell is said to be open."""

import json
import shutil
import subprocess
import sys

import pytest

from auditor.audit import audit
from auditor.discovery import discover
from auditor.errors import NothingToAuditError
from auditor.model.finding import Outcome
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.single import SingleFileStore
from auditor.storage.store import ObjectMissingError
from auditor.verdict import ExitCode, exit_code
from tests.paths import HEALTHY, ROOT

FIXTURES = ROOT / "tests" / "fixtures"
HUGGING_FACE = FIXTURES / "hugging_face"
PART = HUGGING_FACE / "llama_sharded" / "model-00002-of-00003.safetensors"
WHOLE = HUGGING_FACE / "bert" / "model.safetensors"
TORCH_PART = HUGGING_FACE / "gpt2_torch_sharded" / "pytorch_model-00001-of-00003.bin"
RANK = FIXTURES / "torch_per_rank" / "healthy" / "step_6" / "rank_0.pt"
LAYER = HEALTHY / "global_step10" / "layer_03-model_00-model_states.pt"


def store_of(path):
    return SingleFileStore(LocalStore(path.parent), path.name, str(path))


def audited(path, **choices):
    report = audit(store_of(path), Settings(**choices))
    return report, report.runs[0]


def undetermined(run, identifier):
    return [reason for (found, reason) in run.undetermined() if found == identifier]


def auditor(command, *arguments):
    line = [sys.executable, "-m", "auditor.cli", command, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("path", "name", "open_question"),
    [
        (PART, "hugging-face", "one file of 3 was named: whether the others are there was not looked at"),
        (TORCH_PART, "hugging-face", "one file of 3 was named: whether the others are there was not looked at"),
        (WHOLE, "hugging-face", None),
        (RANK, "torch-per-rank", "one rank's file was named: the other ranks' were not looked at"),
        (LAYER, "torch-file", "a single file was named: what belongs to it is not known"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_healthy_file_is_silent_and_says_what_is_open(path, name, open_question):
    report, run = audited(path)
    assert run.findings == []
    assert exit_code(report) is ExitCode.HOLDS
    assert (run.path, run.steps[0].state.format, run.steps[0].state.path) == ("", name, "")
    assert undetermined(run, "INT001") == ([open_question] if open_question else [])
    # What may lack files is no step to go back to.
    assert (run.last_good is None) is bool(open_question)
    assert run.coverage.num_bytes_total == path.stat().st_size


def test_a_ranks_replicas_are_elsewhere_and_never_said_to_be_equal():
    _, run = audited(RANK)
    assert run.counts("REP001")[Outcome.HOLDS] == 0
    assert undetermined(run, "REP001") == ["one rank's file was named: the other ranks' were not looked at"]


def test_neighbours_are_not_read(tmp_path):
    """Neither a damaged neighbour nor a configuration beside it matters."""
    folder = shutil.copytree(PART.parent, tmp_path / "model")
    (folder / "config.json").write_text("{")
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
    assert audited(folder / PART.name)[1].findings == []
    report = audit(LocalStore(folder))
    assert exit_code(report) is ExitCode.VIOLATED


@pytest.mark.parametrize(("path", "keep"), [(PART, 4000), (RANK, 4000), (WHOLE, 100), (RANK, 0), (WHOLE, 0)])
def test_a_file_cut_short_is_a_finding(tmp_path, path, keep):
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[:keep])
    for age, found, code in ((5.0, [], ExitCode.NOTHING), (5000.0, ["INT002"], ExitCode.VIOLATED)):
        report = audit(store_of(cut), now=cut.stat().st_mtime + age)
        assert ([finding.id for finding in report.runs[0].findings], exit_code(report)) == (found, code)


def test_a_nan_in_it_is_found(tmp_path):
    content = bytearray(WHOLE.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"
    path = tmp_path / "renamed.safetensors"
    path.write_bytes(content)
    _, run = audited(path)
    assert [finding.id for finding in run.findings] == ["NUM001"]
    assert not undetermined(run, "INT001")
    assert run.last_good is None


@pytest.mark.parametrize(
    ("path", "what", "why"),
    [
        (ROOT / "README.md", "text", ""),
        (HUGGING_FACE / "bert" / "config.json", "JSON", ""),
        (HUGGING_FACE / "trainer" / "checkpoint-3" / "optimizer.pt", "a zip file", "holds no model's state dict"),
        (HEALTHY / "global_step10" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "a zip file", "DeepSpeed's"),
    ],
)
def test_an_unfit_file_is_nothing_to_audit_and_says_what_it_looks_like(path, what, why):
    with pytest.raises(NothingToAuditError) as raised:
        discover(store_of(path))
    text = str(raised.value)
    assert text.startswith(f"{path}: {what}")
    assert "Name the folder that it is part of" in text
    assert why in text


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "an empty file"), (b"\x93NUMPY\x01", "a numpy array"), (bytes(range(128, 160)), "a pickle"),
     (b"\xff\xfe\x00\x01" * 4, "nothing that is known"), (b"\n", "text"), (b"\x80", "a pickle")],
)  # fmt: skip
def test_made_up_files(content, what):
    store = SingleFileStore(MemoryStore({"x": content}), "x", "x")
    with pytest.raises(NothingToAuditError, match=f"x: {what};"):
        discover(store)


def test_the_command_line(tmp_path):
    done = auditor("check", PART, "--format", "json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["run"]) == (0, str(PART))
    assert auditor("check", PART, "--strict").returncode == 1
    assert f"{PART}  step 0" in auditor("inspect", PART).stdout.replace("\n", " ")
    assert auditor("last-good", WHOLE).stdout.strip() == str(WHOLE)
    assert auditor("last-good", PART).returncode == 1
    assert auditor("check", ROOT / "README.md").returncode == 4
    done = auditor("check", WHOLE, HEALTHY)
    assert (done.returncode, "several paths must be roots of one run" in done.stderr) == (2, True)


def test_the_store_holds_this_file_alone():
    inner = MemoryStore({"a": b"12", "b": b"3"})
    for store in (SingleFileStore(inner, "a", "x/a"), RetryingStore(SingleFileStore(inner, "a", "x/a"))):
        assert store.location == "x/a"
        assert [entry.name for entry in store.list("")] == ["a"]
        assert (store.stat("").is_folder, store.stat("a").num_bytes) == (False, 2)
        for wrong in ("b", "a/a"):
            with pytest.raises(ObjectMissingError):
                store.stat(wrong)
            with pytest.raises(ObjectMissingError), store.open(wrong):
                pass
        with pytest.raises(ObjectMissingError):
            list(store.list("a"))


@pytest.mark.parametrize("level", Level)
def test_every_level(level):
    for path in (PART, RANK):
        assert audited(path, level=level)[1].findings == []
