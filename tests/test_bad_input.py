"""Broken, foreign and hostile checkpoints, end to end: the right finding, the right exit code, never a traceback."""

import json
import os
import shutil
import time
from fnmatch import fnmatch

import pytest

from auditor.audit import audit
from auditor.containers.zip_directory import read_directory
from auditor.settings import DEFAULTS
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.store import TransientReadError
from auditor.verdict import exit_code, verdict
from tests.command import run as command
from tests.paths import HEALTHY, TP2_PP2, TP4

LAYER, MODEL = "layer_03-model_01-model_states.pt", "mp_rank_01_model_states.pt"
ZERO = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
DAY = 86_400
HOLDS, VIOLATED, USAGE, INCOMPLETE, NOTHING, CHANGED = 0, 1, 2, 3, 4, 6


@pytest.fixture
def run(tmp_path):
    """A healthy run of two steps, 3 and 6, that may be spoilt; saved a day ago."""
    folder = shutil.copytree(TP4, tmp_path / "run")
    for step in folder.glob("global_step*"):
        age(step, DAY)
    return folder


def check(path, *options):
    """What the command line says: exit code, standard output, standard error."""
    done = command(["check", path, *options])
    assert b"Traceback" not in done.stderr
    assert b"internal error" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def report_on(path, *options) -> dict:
    """The machine report, with every promise about exit code and streams held."""
    code, output, errors = check(path, "--format", "json", *options)
    report = json.loads(output)
    assert report["exit_code"] == code
    assert errors == b""
    return report


def ids(report) -> list[str]:
    return [finding["id"] for finding in report["findings"]]


def the(identifier: str, report) -> dict:
    (finding,) = [finding for finding in report["findings"] if finding["id"] == identifier]
    return finding


def result(store, **options):
    """Exit code, verdict and findings of an audit through any store."""
    report = audit(store, DEFAULTS, now=time.time(), **options)
    (run,) = report.runs
    return int(exit_code(report)), verdict(run, report.settings), run


def content_of(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def age(folder, seconds: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def test_the_run_to_be_spoilt_is_healthy(run):
    report = report_on(run)
    assert (report["verdict"], report["exit_code"], report["last_good_step"]) == ("holds", HOLDS, 6)
    assert report["findings"] == []


# Files missing


@pytest.mark.parametrize("name", [LAYER, MODEL, ZERO, "mp_rank_00_model_states.pt"])
def test_missing_file_is_named(run, name):
    (run / "global_step6" / name).unlink()
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    finding = the("INT001", report)
    assert name in finding["message"]
    assert [place["file"] for place in finding["locations"]] == [f"global_step6/{name}"]
    assert finding["intervals"][0]["first_bad"] == 6
    assert report["last_good_step"] == 3
    assert ids(report) == ["INT001"], "what follows from the missing file is no finding of its own"


@pytest.mark.parametrize("kind", ["layer_03-*", "layer_06-*", "mp_rank_*", "bf16_zero_*"])
def test_all_files_of_a_kind_missing(run, kind):
    gone = [path for path in (run / "global_step6").glob(kind) if path.unlink() is None]
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert {place["file"].split("/")[1] for place in the("INT001", report)["locations"]} == {path.name for path in gone}


def test_all_files_of_the_tied_embedding_missing(run):
    for path in (run / "global_step6").glob("layer_01-*"):
        path.unlink()
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert "tied_modules.embed.word_embeddings" in the("COV001", report)["message"]
    assert report["last_good_step"] == 3


def test_only_one_step_of_several_lacks_a_file(run):
    (run / "global_step3" / LAYER).unlink()
    report = report_on(run)
    interval = the("INT001", report)["intervals"][0]
    assert (interval["first_bad"], interval["last_bad"], interval["healed"]) == (3, 3, 6)
    assert report["last_good_step"] == 6


# Files that are other files


def test_optimizer_file_of_another_step(run):
    shutil.copy(run / "global_step3" / ZERO, run / "global_step6" / ZERO)
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    finding = the("INT005", report)
    assert ZERO in finding["message"]
    assert "step 3" in finding["message"]
    assert "6" in finding["message"]


def test_model_file_of_another_step(run):
    shutil.copy(run / "global_step3" / MODEL, run / "global_step6" / MODEL)
    report = report_on(run)
    assert MODEL in the("INT005", report)["message"]


def test_layer_file_of_another_rank(run):
    shutil.copy(run / "global_step6" / LAYER.replace("model_01", "model_00"), run / "global_step6" / LAYER)
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    finding = the("INT006", report)
    assert LAYER in finding["message"]
    assert "layer_03-model_00" in finding["message"]


def test_swapped_layer_files(run):
    one, other = run / "global_step6" / LAYER, run / "global_step6" / LAYER.replace("model_01", "model_02")
    content = one.read_bytes(), other.read_bytes()
    other.write_bytes(content[0])
    one.write_bytes(content[1])
    assert len(the("INT006", report_on(run))["locations"]) == 2


def test_layer_file_of_another_step_on_one_rank(run):
    shutil.copy(run / "global_step3" / LAYER, run / "global_step6" / LAYER)
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    # A file of another save explains that it differs from the other ranks' and doesn't fit its masters.
    finding = the("MOT003", report)
    assert {"REP001", "CST001"} <= set(finding["consequences"])
    assert {location["coordinate"]["tp"] for location in finding["locations"]} == {1}
    assert finding["intervals"][0]["first_bad"] == 6


def test_layer_file_of_another_step_on_one_rank_of_two(tmp_path):
    for step in ("global_step110", "global_step120"):
        shutil.copytree(HEALTHY / step, tmp_path / step)
    shutil.copy(tmp_path / "global_step110" / LAYER, tmp_path / "global_step120" / LAYER)
    report = report_on(tmp_path)
    assert report["exit_code"] == VIOLATED
    assert ids(report) == ["MOT003"]
    assert report["last_good_step"] == 110


# Files that are damaged


@pytest.mark.parametrize("name", [LAYER, MODEL, ZERO])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_cut_file(run, name, share):
    path = run / "global_step6" / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    finding = the("INT002", report)
    assert name in finding["message"]
    assert ("empty" if share == 0 else "cut short") in finding["message"]
    assert ids(report) == ["INT002"]


def test_every_file_empty(run):
    for path in (run / "global_step6").iterdir():
        path.write_bytes(b"")
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert len(the("INT002", report)["locations"]) == 24
    assert report["last_good_step"] == 3


@pytest.mark.parametrize("content", [b"garbage " * 500, bytes(5000), b"PK\3\4" + bytes(5000), b"\x80\x02}q\0."])
def test_file_of_something_else(run, content):
    (run / "global_step6" / LAYER).write_bytes(content)
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert LAYER in the("INT002", report)["message"]


def test_no_cut_of_a_file_is_missed(run):
    """In process, for the sake of time: at and around every border between the members of a layer file."""
    objects = content_of(run)
    objects = {name: content for name, content in objects.items() if name.startswith("global_step6/")}
    name = f"global_step6/{LAYER}"
    with MemoryStore(objects).open(name) as handle:
        members = read_directory(handle).values()
    borders = {at for member in members for at in (member.header, member.offset, member.offset + member.num_bytes)}
    for length in sorted(borders | {len(objects[name]) - 1}):
        code, _, run_report = result(MemoryStore({**objects, name: objects[name][:length]}))
        assert code == VIOLATED, length
        assert [finding.id for finding in run_report.findings] == ["INT002"], length


# Storage that fails


@pytest.mark.parametrize("name", [LAYER, MODEL, ZERO])
def test_unreadable_file_is_no_finding(run, name):
    code, word, report = result(FaultyStore(LocalStore(run), Faults(denied=f"*step6/{name}")))
    assert (code, word) == (INCOMPLETE, "incomplete")
    assert report.findings == []
    assert any(name in failure and "permission denied" in failure for failure in report.steps[1].failures)
    assert report.last_good.step == 3


@pytest.mark.parametrize("kind", ["layer_*", "bf16_zero_*", "layer_01-*"])
def test_unreadable_files_of_a_whole_kind_are_no_finding(run, kind):
    code, word, report = result(FaultyStore(LocalStore(run), Faults(denied=f"*/{kind}")))
    assert (code, word, report.findings) == (INCOMPLETE, "incomplete", [])
    assert report.last_good is None


@pytest.mark.parametrize(("source", "kind"), [(TP4, "mp_rank_*"), (TP2_PP2, "mp_rank_0[23]_*")])
def test_unreadable_model_files_are_no_finding(source, kind):
    code, _, report = result(FaultyStore(LocalStore(source), Faults(denied=f"*/{kind}")))
    assert [finding.id for finding in report.findings] == []
    assert code == INCOMPLETE


def test_everything_unreadable_is_no_finding(run):
    code, word, report = result(FaultyStore(LocalStore(run), Faults(denied="*")))
    assert (code, word, report.findings, report.last_good) == (INCOMPLETE, "incomplete", [], None)


def summary(report) -> tuple:
    return [step.judgements for step in report.steps], report.findings, report.last_good, report.coverage


def test_transient_errors_that_stop_leave_no_trace(run, monkeypatch):
    monkeypatch.setattr("auditor.storage.retrying.time.sleep", lambda seconds: None)
    store = FaultyStore(LocalStore(run), Faults(transient="*", num_transient=3))
    code, word, report = result(store)
    healthy_code, healthy_word, healthy = result(LocalStore(run))
    assert (code, word) == (healthy_code, healthy_word) == (HOLDS, "holds")
    assert summary(report) == summary(healthy)
    assert min(store.faults.reads.values()) > 3


@pytest.mark.parametrize("name", [LAYER, MODEL, ZERO])
def test_transient_errors_that_do_not_stop_are_no_finding(run, monkeypatch, name):
    monkeypatch.setattr("auditor.storage.retrying.time.sleep", lambda seconds: None)
    faults = Faults(transient=f"*step6/{name}", num_transient=1 << 60)
    code, word, report = result(FaultyStore(LocalStore(run), faults))
    assert (code, word, report.findings) == (INCOMPLETE, "incomplete", [])
    assert any(name in failure for failure in report.steps[1].failures)
    assert any(identifier == "INT002" for identifier, _ in report.undetermined())


class Later(FaultyStore):
    """Faults that begin when a file was read a number of times."""

    def __init__(self, inner, pattern: str, num_reads: int, fault) -> None:
        super().__init__(inner, Faults())
        self.pattern, self.num_reads, self.fault = pattern, num_reads, fault

    def spoil(self, handle, offset, buffer) -> None:
        if fnmatch(handle.entry.name, self.pattern) and self.faults.reads[handle.entry.name] >= self.num_reads:
            self.fault(self.faults)
        super().spoil(handle, offset, buffer)


def fail(faults) -> None:
    raise TransientReadError("the server went away")


@pytest.mark.parametrize("name", [LAYER, ZERO])
def test_reads_that_begin_to_fail_are_no_finding_whenever_they_do(run, monkeypatch, name):
    monkeypatch.setattr("auditor.storage.retrying.time.sleep", lambda seconds: None)
    objects = {key: value for key, value in content_of(run).items() if key.startswith("global_step6/")}
    sound = FaultyStore(MemoryStore(objects), Faults())
    assert result(sound)[0] == HOLDS
    num_reads = sound.faults.reads[f"global_step6/{name}"]
    assert num_reads > 10
    for after in range(num_reads):
        code, _, report = result(Later(MemoryStore(objects), f"*/{name}", after, fail))
        assert (code, report.findings) == (INCOMPLETE, []), after
        assert report.steps[0].failures, after


def shrink(name: str):
    def fault(faults) -> None:
        faults.shrinking, faults.num_bytes_left = name, 1000

    return fault


def test_file_that_shrinks_while_its_weights_are_read(run):
    name = f"global_step6/{LAYER}"
    sound = FaultyStore(LocalStore(run), Faults())
    result(sound)
    store = Later(LocalStore(run), name, sound.faults.reads[name] - 1, shrink(name))
    code, word, report = result(store)
    assert (code, word, report.findings) == (CHANGED, "incomplete", [])
    assert report.steps[1].changed == (name,)
    assert report.last_good.step == 3


@pytest.mark.parametrize("num_reads", [0, 10])
def test_file_that_shrinks_while_its_directory_is_read(run, num_reads):
    name = f"global_step6/{LAYER}"
    code, _, report = result(Later(LocalStore(run), name, num_reads, shrink(name)))
    assert (code, report.findings) == (CHANGED, [])


# Nothing to audit


def test_empty_folder(tmp_path):
    code, output, errors = check(tmp_path)
    assert (code, output) == (NOTHING, b"")
    assert b"no checkpoint found" in errors


def test_path_that_is_not_there(tmp_path):
    code, output, errors = check(tmp_path / "nowhere")
    assert (code, output) == (USAGE, b"")
    assert b"nowhere: no such file" in errors.lower()


def test_single_file_of_a_layout_says_what_stays_open(run):
    code, output, _ = check(run / "global_step6" / LAYER)
    assert code == 0
    assert b"undetermined" in output
    assert LAYER.encode() in output


def test_folder_of_random_files_is_told_what_was_looked_for(tmp_path):
    for name, content in {"a.bin": bytes([155] * 100), "b/c.pt": b"", "b/notes.txt": b"hello", "latest": b"a"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    code, output, errors = check(tmp_path)
    assert (code, output) == (NOTHING, b"")
    assert b"Looked for" in errors
    assert b"layer_*-model_states.pt" in errors
    assert b"mp_rank_*_model_states.pt" in errors


def test_a_pipeline_without_any_of_its_layer_files_is_a_pipeline_still(run):
    for path in run.glob("*/layer_*"):
        path.unlink()
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert any(location["file"].endswith(LAYER) for location in the("INT001", report)["locations"])


def test_folder_with_half_of_a_format_is_told_what_came_nearest(run):
    for path in (*run.glob("*/layer_*"), *run.glob("*/mp_rank_*")):
        path.unlink()
    code, _, errors = check(run)
    assert code == NOTHING
    assert b"nearest: " in errors
    assert b"global_step3/bf16_zero_pp_rank" in errors


def test_files_of_the_right_names_and_nothing_in_them(tmp_path):
    for name in (LAYER, MODEL, ZERO):
        (tmp_path / "global_step5").mkdir(exist_ok=True)
        (tmp_path / "global_step5" / name).write_bytes(b"")
    report = report_on(tmp_path)
    assert (report["exit_code"], report["steps"][0]["commit"]) == (NOTHING, "in progress")
    assert report["last_good_step"] is None
    age(tmp_path / "global_step5", DAY)
    report = report_on(tmp_path)
    assert report["exit_code"] == VIOLATED
    assert ids(report) == ["INT004", "INT002"]


def test_step_asked_for_that_is_not_there(run):
    code, output, errors = check(run, "--steps", "4")
    assert (code, output) == (NOTHING, b"")
    assert b"no saved step is among --steps 4" in errors


# Names that attack the terminal

EVIL = "evil\x1b[31m\x07\u202e[bold]"


def with_key(path, key: str) -> None:
    """Save a layer file anew with one more tensor."""
    torch = pytest.importorskip("torch")
    tree = torch.load(path, weights_only=True)
    tree[key] = torch.ones(3)
    torch.save(tree, path)


def test_escapes_in_tensor_names_never_reach_the_terminal(run):
    with_key(run / "global_step6" / LAYER, EVIL)
    for options in ([], ["--format", "json"]):
        code, output, errors = check(run, *options)
        assert code == VIOLATED
        assert b"evil" in output
        assert not any(code in output + errors for code in (b"\x1b", b"\x07", "\u202e".encode()))
    assert b"evil\\x1b[31m\\x07\\u202e[bold]" in check(run)[1]


def test_markup_in_tensor_names_is_text(run):
    with_key(run / "global_step6" / LAYER, "[red]name[/red] [/] \\")
    code, output, _ = check(run)
    assert code == VIOLATED
    assert b"[red]name[/red] [/] \\" in output


def test_colons_in_tensor_names_are_text(run):
    with_key(run / "global_step6" / LAYER, "a:bug:b")
    assert b"a:bug:b" in check(run)[1]


def test_escapes_in_file_and_folder_names_never_reach_the_terminal(run):
    (run / "global_step\x1b[31m9").mkdir()
    (run / "global_step6" / "layer_07-model_00-model_states.pt\x1b[31m").write_bytes(b"")
    moved = run.rename(run.with_name("run\x1b[31m"))
    for options in ([], ["--format", "json"]):
        _, output, errors = check(moved, *options)
        assert b"\x1b" not in output + errors
    (moved / "global_step6" / LAYER).unlink()
    _, output, errors = check(moved)
    assert b"\x1b" not in output + errors
    _, output, errors = check(moved / "nowhere")
    assert b"\x1b" not in output + errors


def test_escapes_in_a_pointer_never_reach_the_terminal(run):
    (run / "latest").write_bytes(b"global\x1b[31m\xff\n\x9b")
    report = report_on(run)
    assert ids(report) == ["INT003"]
    code, output, errors = check(run)
    assert code == VIOLATED
    assert b"\x1b" not in output + errors
    assert b"\x9b" not in output + errors


# Pointers and commits


def test_pointer_to_a_step_that_is_not_there(run):
    (run / "latest").write_text("global_step9")
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert ids(report) == ["INT003"]
    assert "global_step9, which is not there" in the("INT003", report)["message"]


@pytest.mark.parametrize(
    "target", ["../..", "..", ".", "", "/", "../other/global_step6", "a\\b", "global_step6/../global_step6"]
)
def test_pointer_that_leads_out_of_the_run_is_not_followed(run, target):
    shutil.copytree(run, run.parent / "other")
    (run / "latest").write_text(target)
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert ids(report) == ["INT003"]
    assert [step["path"] for step in report["steps"]] == ["global_step3", "global_step6"]
    assert all("other" not in place["file"] for place in the("INT003", report)["locations"])


def test_huge_pointer_file(run):
    (run / "latest").write_bytes(b"x" * 10_000_000)
    report = report_on(run)
    assert ids(report) == ["INT003"]
    assert len(the("INT003", report)["message"]) < 5000


def test_pointer_to_a_step_that_lacks_a_file_is_a_consequence(run):
    (run / "global_step6" / LAYER).unlink()
    report = report_on(run)
    assert ids(report) == ["INT001"]
    assert "INT003" in the("INT001", report)["consequences"]


def tear(run, age_seconds: float) -> None:
    for name in (LAYER, ZERO):
        (run / "global_step6" / name).unlink()
    (run / "latest").write_text("global_step3")
    age(run / "global_step6", age_seconds)


def test_torn_newest_step(run):
    tear(run, DAY)
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert ids(report) == ["INT004"]
    finding = the("INT004", report)
    assert "INT001" in finding["consequences"]
    assert {place["file"] for place in finding["locations"]} == {f"global_step6/{LAYER}", f"global_step6/{ZERO}"}
    assert report["last_good_step"] == 3
    assert [step["commit"] for step in report["steps"]] == ["committed", "uncommitted"]


def test_newest_step_that_is_being_written(run):
    tear(run, 0)
    report = report_on(run)
    assert report["exit_code"] == HOLDS
    assert report["findings"] == []
    assert [step["commit"] for step in report["steps"]] == ["committed", "in progress"]
    assert report["steps"][1]["verdict"] == "in progress"
    assert report["last_good_step"] == 3
    assert b"step 6 is being written" in check(run)[1]


def test_fresh_torn_step_is_uncommitted_when_nothing_may_settle(run):
    tear(run, 5)
    assert ids(report_on(run, "--settle", "1s")) == ["INT004"]


def test_torn_step_before_a_whole_one_is_no_step_in_progress(run):
    (run / "global_step3" / LAYER).unlink()
    age(run / "global_step3", 0)
    report = report_on(run)
    assert ids(report) == ["INT001"]
    assert report["exit_code"] == VIOLATED


def test_pointer_set_back_is_a_note(run):
    (run / "latest").write_text("global_step3")
    report = report_on(run)
    assert report["exit_code"] == HOLDS
    assert ids(report) == ["INT008"]
    assert the("INT008", report)["severity"] == "note"
    assert report_on(run, "--fail-on", "note")["exit_code"] == VIOLATED


def test_two_folders_with_one_step(run):
    """A copy beside it is a note; where the second was saved otherwise, nobody knows which of the two counts."""
    old = shutil.copytree(run / "global_step6", run / "global_step6_old")
    report = report_on(run)
    assert (report["exit_code"], report["last_good_step"], the("INT007", report)["severity"]) == (HOLDS, 6, "note")
    shutil.copy(run / "global_step3" / LAYER, old / LAYER)
    report = report_on(run)
    assert report["exit_code"] == VIOLATED
    assert the("INT007", report)["severity"] == "error"
    assert "global_step6 and global_step6_old" in the("INT007", report)["message"]
    assert report["last_good_step"] == 3


def test_of_two_folders_with_one_step_the_first_may_be_broken(run):
    shutil.copytree(run / "global_step6", run / "global_step6_old")
    (run / "global_step6" / LAYER).unlink()
    report = report_on(run)
    assert {"INT001", "INT007"} <= set(ids(report))
    assert [place["file"] for place in the("INT001", report)["locations"]] == [f"global_step6/{LAYER}"]


def test_of_two_folders_with_one_step_the_second_may_be_broken(run):
    shutil.copytree(run / "global_step6", run / "global_step6_old")
    (run / "global_step6_old" / LAYER).unlink()
    report = report_on(run)
    assert ids(report) == ["INT004", "INT007"]
    assert [place["file"] for place in the("INT004", report)["locations"]] == [f"global_step6_old/{LAYER}"]


# Odd things in the folder


def test_odd_things_beside_the_files_do_not_matter(run):
    step = run / "global_step6"
    (step / "notes.txt").write_bytes(bytes(range(245, 255)))
    (step / "folder").mkdir()
    (step / "loop").symlink_to("..")
    (step / "dangling").symlink_to("nowhere")
    os.mkfifo(step / "pipe")
    assert report_on(run)["exit_code"] == HOLDS


@pytest.mark.parametrize("kind", ["folder", "dangling link", "pipe"])
def test_odd_thing_in_place_of_a_file_is_never_a_good_step(run, kind):
    path = run / "global_step6" / LAYER
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    else:
        os.mkfifo(path)
    report = report_on(run)
    assert report["exit_code"] == (INCOMPLETE if kind == "pipe" else VIOLATED)
    assert ids(report) == ([] if kind == "pipe" else ["INT001"])
    assert report["last_good_step"] == 3


def test_step_folder_that_is_empty_is_a_step_that_lost_its_files(run):
    (run / "global_step9").mkdir()
    young = report_on(run)
    assert (young["exit_code"], young["steps"][-1]["commit"]) == (0, "in progress")
    os.utime(run / "global_step9", (1e9, 1e9))
    report = report_on(run)
    (finding,) = report["findings"]
    assert (report["exit_code"], finding["id"], finding["consequences"]) == (VIOLATED, "INT004", ["INT001"])
    (run / "global_step9").rmdir()
    (run / "global_step4").mkdir()
    report = report_on(run)
    assert (ids(report), report["last_good_step"], report["unrecognised"]) == (["INT001"], 6, [])
