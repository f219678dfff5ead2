"""`auditor ledger show|verify|compact|export`, and ledgers that were damaged."""

import hashlib
import json
import shutil
import subprocess

import pytest
import zarr

from auditor.settings import Level, StepChoice
from tests import command
from tests.ledger.test_recall import read, report, said
from tests.paths import RUN, TP4

NEWEST = StepChoice("latest")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A ledger of one step, read whole."""
    ledger = tmp_path_factory.mktemp("kept") / "ledger"
    report(TP4, ledger, level=Level.FULL, steps=NEWEST)
    return ledger


@pytest.fixture
def ledger(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "ledger")


def commits(ledger):
    return sorted(ledger.rglob("commit"))


def auditor(*arguments):
    done = command.run(["ledger", *arguments])
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_show_lists_every_record(ledger):
    code, output, _ = auditor("show", ledger)
    assert code == 0
    assert output.splitlines()[0] == "tp4"
    assert "deepspeed-pipeline · level full" in output
    assert "nothing violated" in output


def test_verify_names_what_is_damaged(ledger):
    assert auditor("verify", ledger) == (0, f"{len(commits(ledger))} records are what was written\n", "")
    chunk = next(iter(ledger.rglob("lanes/c/0/0")))
    content = bytearray(chunk.read_bytes())
    content[20] ^= 1
    chunk.write_bytes(content)
    code, output, _ = auditor("verify", ledger)
    assert code == 1
    assert "lanes/c/0/0 is not what was committed" in output


def test_export_is_what_sha256sum_checks(ledger):
    code, output, _ = auditor("export", ledger)
    assert code == 0
    lines = [line.split("  ") for line in output.splitlines()]
    assert lines
    for digest, path in lines:
        assert hashlib.sha256((TP4 / path).read_bytes()).hexdigest() == digest
    done = subprocess.run(["sha256sum", "-c", "--quiet", "-"], input=output.encode(), cwd=TP4, check=False)
    assert done.returncode == 0


def test_export_of_what_was_not_digested_is_a_comment(tmp_path):
    report(TP4, tmp_path / "ledger", level=Level.HEADERS)
    code, output, _ = auditor("export", tmp_path / "ledger")
    assert code == 0
    assert all(line.startswith("# ") for line in output.splitlines())


def test_compact_removes_what_others_say_as_well(tmp_path):
    ledger = tmp_path / "ledger"
    report(RUN, ledger, select=("REP",))
    before = len(commits(ledger))
    report(RUN, ledger)
    assert len(commits(ledger)) == 2 * before
    code, output, _ = auditor("compact", ledger)
    assert (code, len(commits(ledger))) == (0, before)
    assert output.splitlines()[-1].startswith(f"{before} records")
    again = report(RUN, ledger)
    assert read(again) == 0
    assert said(again) == said(report(RUN, None))
    assert auditor("compact", ledger)[1].startswith("0 records")


def test_no_ledger(tmp_path):
    (tmp_path / "x").write_text("")
    assert auditor("show", tmp_path)[0] == 2
    assert auditor("show", tmp_path / "nowhere")[0] == 4
    assert auditor("burn", tmp_path / "nowhere")[0] == 2


def test_zarr_opens_it(ledger):
    root = zarr.open_group(ledger, mode="r")
    assert root.attrs["auditor"]["writer"] == "auditor ledger"
    (step,) = root["runs/tp4/steps"].groups()
    (record,) = [group for _, group in step[1].groups()]
    account = json.loads(bytes(record["account"][:]))
    assert account["step"] == int(step[0])
    assert record["sketches"].shape == (account["num_sketches"], 64)
    assert record["lanes"].shape == (2, account["num_pieces"])


def damaged(ledger, change):
    (commit,) = commits(ledger)
    change(commit.parent)
    return report(TP4, ledger, level=Level.FULL, steps=NEWEST)


def rewrite_account(folder, change):
    """Put another account into a record, with digests that fit: what a stranger can do."""
    import gzip

    raw = json.loads(gzip.decompress((folder / "account/c/0").read_bytes()))
    change(raw)
    content = gzip.compress(json.dumps(raw).encode(), mtime=0)
    (folder / "account/c/0").write_bytes(content)
    commit = json.loads((folder / "commit").read_bytes())
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    commit["objects"]["account/c/0"] = [len(content), digest]
    text = json.dumps(commit, separators=(",", ":")).encode()
    (folder / "commit").write_bytes(text)
    identity = folder.name.split("-")[0]
    folder.rename(folder.parent / f"{identity}-{hashlib.blake2b(text, digest_size=16).hexdigest()}")


def setter(*path, value):
    def change(raw):
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


DAMAGE = {
    "commit empty": lambda folder: (folder / "commit").write_bytes(b""),
    "commit other": lambda folder: (folder / "commit").write_bytes(b'{"objects": {"../../x": [1, "a"]}}'),
    "account gone": lambda folder: (folder / "account/c/0").unlink(),
    "account short": lambda folder: (folder / "account/c/0").write_bytes(b"\x1f\x8b"),
    "many pieces": lambda folder: rewrite_account(folder, setter("num_pieces", value=1 << 40)),
    "negative": lambda folder: rewrite_account(folder, setter("num_contents", value=-1)),
    "no tensors": lambda folder: rewrite_account(folder, setter("tensors", value=[])),
    "another version": lambda folder: rewrite_account(folder, setter("schema_version", value=9)),
    "a list": lambda folder: rewrite_account(folder, setter("said", value=[])),
    "no state": lambda folder: rewrite_account(folder, setter("said", "state", value={"step": "x"})),
}  # fmt: skip


COLUMNS = {
    "column gone": lambda file: file.unlink(),
    "column longer": lambda file: file.write_bytes(b"\0" * (1 << 20)),
    "column other": lambda file: file.write_bytes(bytes(len(file.read_bytes()))),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_damaged_measurements_are_noticed_where_they_are_needed(name, ledger):
    (commit,) = commits(ledger)
    COLUMNS[name](commit.parent / "lanes/c/0/0")
    # What was said of an unchanged step is intact: nothing else of the record is read.
    assert read(report(TP4, ledger, level=Level.FULL, steps=NEWEST)) == 0
    found = report(TP4, ledger, level=Level.VALUES, steps=NEWEST)
    assert read(found) > 0
    assert len(found.runs[0].ledger_notes) == 1


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_ledger_is_not_used_and_said(name, ledger):
    without = said(report(TP4, None, level=Level.FULL, steps=NEWEST))
    found = damaged(ledger, DAMAGE[name])
    assert read(found) > 0
    assert said(found)["findings"] == without["findings"] == []
    assert found.runs[0].ledger_notes
    # What was written in its place, or repaired, is good.
    assert read(report(TP4, ledger, level=Level.FULL, steps=NEWEST)) == 0


def test_paths_in_accounts_do_not_lead_out_of_the_report(ledger):
    """Names in a ledger are only ever printed: nothing is opened by them."""
    (commit,) = commits(ledger)
    rewrite_account(commit.parent, lambda raw: raw["files"].append({"name": "../../../etc/passwd", "identity": "x"}))
    found = report(TP4, ledger, level=Level.FULL, steps=NEWEST)
    assert read(found) > 0
    assert said(found)["findings"][0]["id"] == "INT017"


def test_a_ledger_that_takes_nothing_does_not_cost_the_report(ledger):
    (commit,) = commits(ledger)
    (commit.parent / "account/c/0").unlink()
    document = commit.parent / "sketches/zarr.json"
    document.unlink()
    document.mkdir()
    done = command.run(["check", TP4, "--ledger", ledger, "--level", "full", "--steps", "latest"])
    assert done.returncode == 3
    assert b"not written" in done.stdout
    assert b"last good step" in done.stdout


def test_an_unreadable_ledger_folder_is_named(tmp_path):
    (tmp_path / "ledger").write_text("a file")
    done = command.run(["check", TP4, "--ledger", tmp_path / "ledger"])
    assert done.returncode in (2, 3)
    assert b"ledger" in done.stderr
