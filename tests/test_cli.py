"""The command line as a user meets it: commands, options, exit codes, what goes to which stream."""

import json
import shutil
import subprocess

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.command import run
from tests.paths import FIXTURES, HEALTHY, ROOT, RUN, TP2_PP2, TP4


def auditor(*arguments, cwd=None, **environment):
    done = run(arguments, cwd, environment)
    return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def schema():
    return json.loads((ROOT / "auditor/report/report.schema.json").read_text())


def test_check_prints_the_pinpointed_drift_and_exits_1():
    done = auditor("check", RUN)
    assert done.returncode == 1
    assert "REP001 replicas-differ  error · growing" in done.stdout
    assert "since step 50 (last good 40), healed at 90" in done.stdout
    assert "since step 110 (last good 100), still so at 120" in done.stdout
    assert "16 replicated tensors" in done.stdout
    assert "9 of 16 elements, max |Δ| 0.0078 (2 ulp)" in done.stdout
    assert "Go back to step 100; it descends from the drift of steps 50 to 80 (the last step before that is 40)." in (
        done.stdout
    )
    assert "(tp=0: ranks 0, 2; tp=1: ranks 1, 3)" in done.stdout
    assert done.stderr == ""


def test_check_of_a_healthy_run_exits_0_and_says_what_is_undetermined():
    done = auditor("check", HEALTHY)
    assert done.returncode == 0
    assert "stored once along dp" in done.stdout
    assert "holds · last good step 120" in done.stdout


@pytest.mark.parametrize("arguments", [[RUN], [HEALTHY], [FIXTURES], [RUN, "--level", "headers"]])
def test_json_keeps_its_promise(schema, arguments):
    done = auditor("check", *arguments, "--format", "json")
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema)
    assert document["exit_code"] == done.returncode


def test_schema_refuses_what_is_not_promised(schema):
    document = json.loads(auditor("check", HEALTHY, "--format", "json", "--steps", "10").stdout)
    jsonschema.validate(document, schema)
    for broken in ({**document, "verdict": "fine"}, {**document, "surprise": 1}, {**document, "findings": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_json_finding_has_what_design_promises():
    document = json.loads(auditor("check", RUN, "--format", "json").stdout)
    assert document["verdict"] == "violated"
    assert document["last_good_step"] == 100
    (finding,) = document["findings"]
    assert (finding["id"], finding["severity"], finding["class"]) == ("REP001", "error", "growing")
    first = finding["locations"][0]
    assert first["step"] == 50
    assert first["coordinate"] == {"tp": 1}
    assert first["reference"] == {"tp": 0}
    assert first["global_ranks"] == [1, 3]
    assert first["first_index"] == [0]
    assert first["num_elements_differ"] == 9
    verdicts = {step["step"]: step["verdict"] for step in document["steps"]}
    assert [step for step, verdict in verdicts.items() if verdict == "violated"] == [50, 60, 70, 80, 110, 120]


def test_several_runs_are_wrapped():
    document = json.loads(auditor("check", FIXTURES, "--format", "json").stdout)
    assert [run["run"].rpartition("/")[2] for run in document["runs"]] == ["tp2_pp2", "tp4"]
    assert "2 runs: holds 2\n" in auditor("check", FIXTURES, "--level", "names").stdout


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("50", [50]), ("40:60", [40, 50, 60]), ("latest", [120]), ("10,latest", [10, 120]), ("100:", [100, 110, 120])],
)
def test_steps(chosen, expected):
    document = json.loads(auditor("check", RUN, "--steps", chosen, "--format", "json").stdout)
    assert [step["step"] for step in document["steps"]] == expected


def test_first_saved_step_bad_has_no_last_good():
    document = json.loads(auditor("check", RUN, "--steps", "50:60", "--format", "json").stdout)
    assert document["findings"][0]["intervals"][0]["last_good"] is None
    assert document["last_good_step"] is None


def test_one_step_may_be_named():
    assert auditor("check", RUN / "global_step50").returncode == 1
    assert auditor("check", RUN / "global_step40").returncode == 0


def test_select_and_ignore():
    assert auditor("check", RUN, "--ignore", "REP").returncode == 0
    assert auditor("check", RUN, "--select", "NUM").returncode == 0
    assert auditor("check", RUN, "--select", "rep001").returncode == 1
    done = auditor("check", RUN, "--select", "XYZ")
    assert done.returncode == 2
    assert "XYZ" in done.stderr


def test_a_family_selected_in_vain_is_incomplete():
    done = auditor("check", HEALTHY, "--select", "REP", "--level", "headers")
    assert done.returncode == 3
    # A single save has none before it.
    assert auditor("check", HEALTHY, "--steps", "10", "--select", "MOT").returncode == 3


def test_tensors_by_glob():
    document = json.loads(auditor("check", RUN, "--tensors", "4.*norm*", "--format", "json").stdout)
    names = {location["tensor"] for location in document["findings"][0]["locations"]}
    assert len(names) == 4
    assert all(name.startswith("4.") for name in names)
    assert auditor("check", RUN, "--tensors", "*query_key_value*").returncode == 0


def test_strict_fails_on_undetermined():
    assert auditor("check", HEALTHY, "--strict").returncode == 1
    assert auditor("check", TP4, "--strict").returncode == 0


def test_last_good_prints_one_path():
    done = auditor("last-good", RUN)
    assert done.returncode == 0
    assert done.stdout == f"{RUN}/global_step100\n"
    assert "steps 50 to 80, healed at 90" in done.stderr
    assert "not step 120: REP001 replicas-differ" in done.stderr
    assert "undetermined: REP001: stored once along dp" in done.stderr
    assert auditor("last-good", HEALTHY).stdout == f"{HEALTHY}/global_step120\n"


def test_last_good_without_a_good_step():
    done = auditor("last-good", RUN, "--steps", "50:80")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no step is good" in done.stderr


def test_last_good_knows_wholeness_whatever_is_selected(tmp_path):
    shutil.copytree(HEALTHY, tmp_path / "run")
    (tmp_path / "run/global_step120/layer_03-model_01-model_states.pt").unlink()
    done = auditor("last-good", tmp_path / "run", "--select", "NUM")
    assert done.stdout == f"{tmp_path}/run/global_step110\n"


def test_inspect_shows_the_step_without_reading_weights():
    done = auditor("inspect", TP2_PP2)
    assert done.returncode == 0
    for words in ("pp 2 · dp 1 · tp 2 (4 ranks)", "3.input_layernorm.weight", "2 replicas over tp", "48×16", "step 6"):
        assert words in done.stdout
    assert "bfloat16 parameter; float32 master, first_moment, second_moment" in done.stdout
    document = json.loads(auditor("inspect", TP2_PP2, "--format", "json").stdout)
    assert len(document["steps"][0]["tensors"]) == 122
    assert document["steps"][0]["opaque"]["argparse.Namespace"] == 4


def test_inspect_is_bounded_and_leaves_out_what_lies_beside_checkpoints_everywhere(tmp_path):
    tensors = {f"layers.{layer}.weight": np.zeros(1, np.float32) for layer in range(120)}
    save_file(tensors, tmp_path / "model.safetensors")
    for number in range(30):
        (tmp_path / f"part_{number}.bin").write_bytes(b"x")
    for name in ("README.md", "generation_config.json", "tokenizer.json", ".gitattributes"):
        (tmp_path / name).write_text("{}")
    few, whole = auditor("inspect", tmp_path).stdout, auditor("inspect", tmp_path, "--all").stdout
    assert [few.count("weight "), whole.count("weight ")] == [100, 120]
    assert [few.count("not read by any loader"), whole.count("not read by any loader")] == [20, 30]
    assert "… and 20 more (--all shows them)" in few
    assert "… and 10 more (--all shows them)" in few
    assert "README.md" not in whole
    assert "4 beside them without weights" in whole


def test_many_steps_are_inspected_in_part(tmp_path):
    for number in range(9):
        shutil.copytree(TP4, tmp_path / f"run_{number}")
    done = auditor("inspect", tmp_path)
    assert done.stdout.count("  format  ") == 8
    assert "… and 1 more step (--all shows it)" in done.stdout


def test_invariants_and_explain():
    listed = auditor("invariants").stdout.splitlines()
    assert len(listed) >= 15
    for line in listed:
        page = auditor("explain", line[:6]).stdout
        assert page.startswith(f"# {line[:6]} ")
        assert "## What it misses" in page
    assert auditor("explain", "replicas-differ").stdout == auditor("explain", "rep001").stdout
    assert auditor("explain", "ABC999").returncode == 2
    assert "rep is a family: explain one of REP001, REP002" in auditor("explain", "rep").stderr


def test_usage_errors_exit_2(tmp_path):
    for arguments in (
        ["check"], ["check", tmp_path / "nothing"], ["check", RUN, "--level", "deep"], ["check", RUN, "--steps", "x"],
        ["check", RUN, "--fail-on", "never"], ["check", RUN, "--format", "xml"], ["check", RUN, "--settle", "soon"],
        ["check", RUN, "--config", tmp_path / "none.toml"], ["nonsense"],
    ):  # fmt: skip
        done = auditor(*arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr


def test_nothing_to_audit_exits_4_and_says_what_came_nearest(tmp_path):
    assert auditor("check", tmp_path).returncode == 4
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"x")
    done = auditor("check", tmp_path)
    assert done.returncode == 4
    assert "deepspeed-pipeline: layer_" in done.stderr
    assert "nearest: . as deepspeed: " in done.stderr
    assert auditor("check", RUN, "--steps", "999").returncode == 4


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "says"),
    [
        (["check", "EMPTY", "--format", "json"], 4, "nothing", "no checkpoint found"),
        (["check", RUN, "--format=json", "--level", "all"], 2, "usage", "--level all"),
        (["check", RUN, "--format", "json", "--no-such-flag"], 2, "usage", "No such option"),
        (["check", RUN, "--format", "json", "--shards", "EMPTY/none"], 2, "usage", "there is no such folder"),
        (["check", RUN, "--format", "json", "--config", "EMPTY/none"], 2, "usage", "the configuration can't be read"),
        (["check", RUN, "--format", "json", "--baseline", "EMPTY/none"], 2, "usage", "it can't be read"),
        (["compare", RUN, "EMPTY", "--format", "json"], 4, "nothing", "no checkpoint found"),
    ],
)
def test_who_asks_for_json_gets_a_document_also_without_a_report(tmp_path, schema, arguments, code, kind, says):
    done = auditor(*(str(argument).replace("EMPTY", str(tmp_path)) for argument in arguments))
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema)
    jsonschema.validate(document, json.loads((ROOT / "auditor/report/compare.schema.json").read_text()))
    assert (done.returncode, document["exit_code"], document["error"]["kind"]) == (code, code, kind)
    assert says in document["error"]["message"]
    assert "Errno" not in done.stdout + done.stderr


def test_a_folder_that_is_no_ledger_is_called_so():
    done = auditor("ledger", "show", HEALTHY)
    assert (done.returncode, "is no ledger" in done.stderr) == (2, True)


def test_order_of_flag_environment_and_file(tmp_path):
    (tmp_path / "auditor.toml").write_text('ignore = ["REP"]\n')
    assert auditor("check", RUN, cwd=tmp_path).returncode == 0
    assert auditor("check", RUN, cwd=tmp_path, AUDITOR_IGNORE="NUM").returncode == 1
    assert auditor("check", RUN, "--ignore", "REP001", cwd=tmp_path, AUDITOR_IGNORE="NUM").returncode == 0
    (tmp_path / "auditor.toml").unlink()
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\nignore = ["REP"]\n')
    assert auditor("check", RUN, cwd=tmp_path).returncode == 0


def test_placement_may_be_stated(tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text('[placement.tp]\n"*.dense_h_to_4h.bias" = "replicate"\n')
    document = json.loads(auditor("check", HEALTHY, "--config", config, "--format", "json").stdout)
    assert document["findings"][0]["id"] == "REP001"
    assert {x["tensor"] for x in document["findings"][0]["locations"]} == {
        "3.mlp.dense_h_to_4h.bias", "4.mlp.dense_h_to_4h.bias",
    }  # fmt: skip
    config.write_text('[placement.tp]\n"*" = "sideways"\n')
    assert auditor("check", HEALTHY, "--config", config).returncode == 2


def test_version_and_help():
    assert auditor("--version").stdout.startswith("auditor ")
    for command in ("check", "compare", "last-good", "inspect", "export", "patrol", "ledger", "invariants", "explain"):
        done = auditor(command, "--help")
        assert (done.returncode, f"Example: `auditor {command}" in done.stdout) == (0, True)
    assert "130 interrupted" in auditor("--help").stdout


def test_output_without_terminal_has_no_colour_and_no_progress():
    done = auditor("check", RUN)
    assert "\x1b" not in done.stdout + done.stderr


def test_fresh_file_times_do_not_make_the_sample_look_in_progress(tmp_path):
    shutil.copytree(HEALTHY, tmp_path / "run", copy_function=shutil.copy)
    document = json.loads(auditor("check", tmp_path / "run", "--format", "json").stdout)
    assert {step["commit"] for step in document["steps"]} == {"committed"}


def test_empty_and_remote_paths_are_usage_errors():
    for path in ("", "ftp://host/run", "s3://"):
        done = auditor("check", path)
        assert done.returncode == 2, path
        assert done.stderr


@pytest.mark.parametrize("steps", ["40:10", "-5", "a", "1:2:3"])
def test_steps_that_mean_nothing_are_usage_errors(steps):
    assert auditor("check", RUN, f"--steps={steps}").returncode == 2


@pytest.mark.parametrize(
    "text", ["lvel = 'names'", "strict = 'maybe'", "threads = 0", "[placement.zz]", "[[waive]]\nid = 'REP001'", "x ="]
)
def test_wrong_configuration_is_a_usage_error(tmp_path, text):
    (tmp_path / "auditor.toml").write_text(text)
    done = auditor("check", HEALTHY, cwd=tmp_path)
    assert done.returncode == 2
    assert "auditor.toml" in done.stderr or "waive" in done.stderr or "placement" in done.stderr


def test_wrong_environment_is_a_usage_error():
    assert auditor("check", HEALTHY, AUDITOR_THREADS="x").returncode == 2
    assert auditor("check", HEALTHY, AUDITOR_STRICT="maybe").returncode == 2


def test_format_and_configuration_may_come_from_the_environment(tmp_path):
    (tmp_path / "c.toml").write_text('ignore = ["REP"]\n')
    done = auditor("check", RUN, AUDITOR_FORMAT="json", AUDITOR_CONFIG=str(tmp_path / "c.toml"))
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "holds"


def test_what_was_ignored_and_where_that_was_said_is_shown(tmp_path):
    (tmp_path / "auditor.toml").write_text('ignore = ["REP"]\n')
    done = auditor("check", RUN, cwd=tmp_path)
    assert "ignored         REP001" in done.stdout
    assert "not having judged REP001" in done.stdout
    assert "settings: ignore from auditor.toml" in done.stdout


def test_no_tensor_matches_and_nothing_is_left_to_judge():
    assert auditor("check", RUN, "--tensors", "*nomatch*").returncode == 4
    assert auditor("check", RUN, "--select", "REP001", "--ignore", "REP001").returncode == 2


def test_waivers_accept_what_they_cover_until_they_expire(tmp_path):
    config = tmp_path / "w.toml"
    config.write_text('[[waive]]\nid = "REP001"\nreason = "known, resynchronised later"\n')
    done = auditor("check", RUN, "--config", config)
    assert done.returncode == 0
    assert "REP001 replicas-differ  error · growing · waived" in done.stdout
    assert "  holds, 1 waived finding · last good step 120" in done.stdout
    config.write_text('[[waive]]\nid = "replicas-differ"\nreason = "known, under its name"\n')
    assert auditor("check", RUN, "--config", config).returncode == 0
    config.write_text('[[waive]]\nid = "REP001"\nreason = "known"\nsteps = "50:80"\n')
    assert auditor("check", RUN, "--config", config).returncode == 1
    assert auditor("check", RUN, "--config", config, "--steps", ":100").returncode == 0
    config.write_text('[[waive]]\nid = "REP001"\nreason = "known"\nuntil = 2020-01-01\n')
    done = auditor("check", RUN, "--config", config)
    assert done.returncode == 1
    assert "AUX001 waiver-expired  warning\n  the waiver of REP001 ran out on 2020-01-01;" in done.stdout
    done = auditor("check", HEALTHY, "--steps", "10", "--config", config)
    assert (done.returncode, "  holds, 1 warning · last good step 10" in done.stdout) == (0, True)


def test_baseline_fails_only_on_what_is_new(tmp_path):
    report = tmp_path / "report.json"
    report.write_text(auditor("check", RUN, "--steps", ":100", "--format", "json").stdout)
    assert auditor("check", RUN, "--steps", ":100", "--baseline", report).returncode == 0
    done = auditor("check", RUN, "--baseline", report)
    assert done.returncode == 1
    report.write_text(auditor("check", RUN, "--format", "json").stdout)
    done = auditor("check", RUN, "--baseline", report)
    assert done.returncode == 0
    assert "in the baseline" in done.stdout
    assert "  holds, 1 finding that the baseline knows · last good step 120" in done.stdout
    document = json.loads(auditor("check", RUN, "--baseline", report, "--format", "json").stdout)
    counts = {"error": 0, "warning": 0, "note": 0, "waived": 0, "in_baseline": 1}
    assert (document["verdict"], document["num_findings"]) == ("holds", counts)
    report.write_text("{}")
    assert auditor("check", RUN, "--baseline", report).returncode == 2


@pytest.fixture
def two_roots(tmp_path):
    """Node-local saves: each node holds the files of its own tensor-parallel rank, and a pointer."""
    for node in (0, 1):
        for step in (10, 20, 30):
            folder = tmp_path / f"node{node}" / f"global_step{step}"
            folder.mkdir(parents=True)
            for path in (HEALTHY / f"global_step{step}").iterdir():
                if f"model_0{node}-" in path.name or f"mp_rank_0{node}_" in path.name:
                    shutil.copy(path, folder)
        (tmp_path / f"node{node}" / "latest").write_text("global_step30")
    return tmp_path


def test_several_roots_are_one_run(two_roots):
    nodes = two_roots / "node0", two_roots / "node1"
    done = auditor("check", *nodes, "--format", "json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["last_good_step"] == 30
    assert document["coverage"]["by_invariant"]["REP001"]["holds"] == 3 * 64
    assert document["coverage"]["by_invariant"]["INT003"]["holds"] == 2


def test_newest_step_that_is_complete_on_all_roots(two_roots):
    nodes = two_roots / "node0", two_roots / "node1"
    shutil.rmtree(nodes[1] / "global_step30")
    (nodes[1] / "latest").write_text("global_step20")
    done = auditor("check", *nodes, "--format", "json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["last_good_step"] == 20
    finding, pointers = document["findings"]
    assert (finding["id"], pointers["id"]) == ("INT001", "INT016")
    assert "INT003" in finding["consequences"]
    assert auditor("last-good", *nodes).stdout == f"{nodes[0]}/global_step20\n"


def test_a_file_that_two_roots_hold_makes_the_audit_incomplete(two_roots):
    nodes = two_roots / "node0", two_roots / "node1"
    shutil.copy(nodes[0] / "global_step10/layer_03-model_00-model_states.pt", nodes[1] / "global_step10")
    assert auditor("check", *nodes).returncode == 3


def test_calls_from_python():
    import auditor as package

    for _ in (1, 2):
        assert package.check(str(HEALTHY), steps="10", level="headers", select=["INT"]).runs[0].findings == []
    with pytest.raises(ValueError, match="levle"):
        package.check(str(HEALTHY), levle="headers")


def test_limits_of_reading_and_kernels_are_checked():
    assert auditor("check", HEALTHY, "--steps", "10", "--max-bytes-per-second", "1GiB").returncode == 0
    for option, value in (("--max-bytes-per-second", "fast"), ("--max-bytes-per-second", "-1"), ("--kernels", "c")):
        done = auditor("check", HEALTHY, option, value)
        assert done.returncode == 2
        assert value in done.stderr


def test_a_share_is_measured_and_joined(tmp_path):
    for number in (1, 2):
        done = auditor("check", RUN, "--steps", "50", "--shard-of", f"{number}/2", "--shards", tmp_path)
        assert (done.returncode, "nothing judged yet" in done.stdout) == (0, True)
    joined = auditor("check", RUN, "--steps", "50", "--shards", tmp_path)
    assert (joined.returncode, "REP001" in joined.stdout) == (1, True)
    for wrong in ("0/2", "3/2", "1", "x/2", "1/0"):
        assert auditor("check", RUN, "--shard-of", wrong, "--shards", tmp_path).returncode == 2
    assert auditor("check", RUN, "--shard-of", "1/2").returncode == 2


def test_verbose_lists_what_holds():
    assert "REP001 64" not in auditor("check", HEALTHY, "--steps", "10").stdout
    assert "REP001 64" in auditor("check", HEALTHY, "--steps", "10", "-v").stdout
