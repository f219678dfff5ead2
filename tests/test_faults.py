"""Faults in values, each with its one finding: where, since when, how much, and what it must not hide or invent."""

import json
import shutil

import pytest

from auditor.audit import audit
from auditor.report.json_report import to_json
from auditor.settings import Level, Settings, StepChoice
from auditor.storage.local import LocalStore
from auditor.verdict import ExitCode, exit_code
from tests.faults import float32_bits, poke
from tests.paths import HEALTHY, TP2_PP2, TP4

NORM = "3.input_layernorm.weight"


def copy(source, target, *steps):
    for step in steps:
        shutil.copytree(source / f"global_step{step}", target / f"global_step{step}")
    (target / "latest").write_text(f"global_step{steps[-1]}")
    return target


@pytest.fixture
def run(tmp_path):
    return copy(HEALTHY, tmp_path, 10, 20, 30, 40)


def audited(folder, **choices):
    report = audit(LocalStore(folder), Settings(**choices))
    return report, report.runs[0]


def test_single_bit(run):
    file = poke(run, 30, NORM, place="tp=1", element=5, flip=1 << 3)
    _, found = audited(run)
    (finding,) = found.findings
    assert (finding.id, finding.difference_class.value, finding.severity.name) == ("REP001", "single bit", "ERROR")
    (location,) = finding.locations
    assert (location.step, location.tensor, location.num_elements_differ) == (30, NORM, 1)
    assert (location.first_index, location.file) == ((5,), file)
    (interval,) = finding.intervals
    assert (interval.last_good, interval.first_bad, interval.last_bad, interval.healed) == (20, 30, 30, 40)
    assert found.last_good.step == 40


@pytest.mark.parametrize("role", ["master", "first_moment", "second_moment"])
def test_drift_that_only_the_optimizer_state_shows(run, role):
    poke(run, 40, NORM, role, "tp=1", value=float32_bits(0.25))
    _, found = audited(run)
    (finding,) = found.findings
    assert finding.intervals[0].onset_by_role == {role: 40}
    assert found.last_good.step == 30


def test_nan_in_one_replica_is_told_as_what_it_is(run):
    poke(run, 40, NORM, "master", "tp=1", value=0x7FC00000)
    (finding,) = audited(run)[1].findings
    assert (finding.id, finding.consequences) == ("NUM001", ("CST001", "REP001"))
    assert {str(place.coordinate) for place in finding.locations} == {"pp=0,dp=0,tp=1"}


def test_nan_with_another_sign_on_each_side_is_not_hidden_behind_a_note(run):
    poke(run, 40, NORM, place="tp=0", value=0x7FC0)
    poke(run, 40, NORM, place="tp=1", value=0xFFC0)
    report, found = audited(run)
    (finding,) = found.findings
    assert (finding.id, finding.consequences) == ("NUM001", ("CST001", "REP001"))
    assert exit_code(report) is ExitCode.VIOLATED
    assert found.last_good.step == 30


def test_infinity_beside_small_noise_is_no_noise(run):
    for step in (20, 30):
        poke(run, step, NORM, "master", "tp=1", flip=1)
    poke(run, 40, NORM, "master", "tp=1", value=0x7F800000)
    report, found = audited(run)
    assert exit_code(report) is ExitCode.VIOLATED
    assert {finding.id: finding.intervals[0].first_bad for finding in found.findings} == {"NUM001": 40, "REP001": 20}


def test_isolated_ulps_are_a_warning(run):
    poke(run, 40, NORM, "master", "tp=1", flip=1)
    poke(run, 40, NORM, "master", "tp=1", element=1, flip=1)
    report, found = audited(run)
    (finding,) = found.findings
    assert (finding.difference_class.value, finding.severity.name) == ("isolated ulps", "WARNING")
    assert exit_code(report) is ExitCode.HOLDS
    report, _ = audited(run, fail_on=finding.severity)
    assert exit_code(report) is ExitCode.VIOLATED


def test_zeros_of_another_sign_are_a_note(run):
    for place, bits in (("tp=0", 0), ("tp=1", 0x80000000)):
        poke(run, 40, NORM, "first_moment", place, value=bits)
    report, found = audited(run)
    (finding,) = found.findings
    assert (finding.difference_class.value, finding.severity.name) == ("equal as numbers", "NOTE")
    assert exit_code(report) is ExitCode.HOLDS


def test_nan_in_a_weight_alone_is_no_rounding_of_its_master(run):
    poke(run, 40, "4.mlp.dense_h_to_4h.weight", element=7, value=0x7FC0, part=1)
    (finding,) = audited(run)[1].findings
    assert (finding.id, finding.consequences) == ("NUM001", ("CST001",))


def test_nan_in_a_sharded_moment(run):
    file = poke(run, 40, "4.mlp.dense_h_to_4h.weight", "first_moment", element=7, value=0x7FC00000, part=1)
    _, found = audited(run)
    (finding,) = found.findings
    assert finding.id == "NUM001"
    assert (finding.locations[0].file, finding.locations[0].num_elements) == (file, 1)
    assert str(finding.locations[0].coordinate) == "pp=0,dp=1,tp=1"
    _, found = audited(run, level=Level.REPLICAS)
    assert found.findings == []


def test_padding_may_hold_anything(tmp_path):
    run = copy(TP4, tmp_path, 6)
    from tests.faults import catalog_of

    catalog = catalog_of(run, 6)
    padding = [t.name for t in catalog.tensors if t.role.value == "padding"]
    for name in padding:
        poke(run, 6, name, "padding", value=0x7FC00000)
    assert audited(run)[1].findings == []


def test_ranks_are_those_that_hold_the_tensor(tmp_path):
    run = copy(TP2_PP2, tmp_path, 3, 6)
    for name, ranks in ((NORM, [1]), ("4.input_layernorm.weight", [3])):
        poke(run, 6, name, place="tp=1", flip=3)
        _, found = audited(run)
        document = json.loads(to_json(audited(run)[0]))
        locations = [x for x in document["findings"][0]["locations"] if x["tensor"] == name]
        assert document["findings"][0]["id"] == "REP001"
        assert [x["global_ranks"] for x in locations] == [ranks]
    assert found.findings


def test_file_and_rank_are_those_of_the_partition_that_differs(run):
    name = "4.post_attention_layernorm.weight"
    file = poke(run, 40, name, "master", "tp=1", flip=0xFF)
    assert "pp_rank_1_mp_rank_01" in file
    document = json.loads(to_json(audited(run)[0]))
    (location,) = document["findings"][0]["locations"]
    assert location["file"] == file
    assert location["global_ranks"] == [3]


def test_faults_of_different_ranks_are_different_findings(tmp_path):
    run = copy(TP4, tmp_path, 3, 6)
    poke(run, 3, NORM, place="tp=1", flip=0x70)
    poke(run, 6, NORM, place="tp=2", flip=0x70)
    _, found = audited(run)
    assert [(f.intervals[0].first_bad, str(f.minority[0])) for f in found.findings] == [(3, "tp=1"), (6, "tp=2")]
    assert found.last_good is None


def test_minority_where_a_majority_agrees(tmp_path):
    run = copy(TP4, tmp_path, 3, 6)
    poke(run, 6, NORM, place="tp=3", flip=0x70)
    _, found = audited(run)
    (finding,) = found.findings
    assert [str(place) for place in finding.minority] == ["tp=3"]
    assert {str(x.reference) for x in finding.locations} == {"tp=0"}


def test_tied_weight_that_differs_between_stages(tmp_path):
    run = copy(TP2_PP2, tmp_path, 3, 6)
    poke(run, 6, "tied_modules.embed.word_embeddings.weight", "master", "pp=1", flip=0x700)
    _, found = audited(run)
    (finding,) = found.findings
    assert [str(x.coordinate) for x in finding.locations] == ["pp=1"]


def test_a_step_torn_in_the_middle_stays_torn_in_a_subset(run):
    (run / "global_step30" / "layer_03-model_01-model_states.pt").unlink()
    for chosen in ("30", "20:30"):
        report, found = audited(run, steps=StepChoice(chosen))
        assert exit_code(report) is ExitCode.VIOLATED
        assert [finding.id for finding in found.findings] == ["INT001"]


def test_last_good_looks_at_all_tensors_whatever_was_chosen(run):
    torch = pytest.importorskip("torch")
    path = run / "global_step40" / "layer_03-model_01-model_states.pt"
    content = torch.load(path)
    del content["mlp.dense_4h_to_h.weight"]
    torch.save(content, path)
    _, found = audited(run, tensors="4.*")
    assert found.findings == []
    assert found.last_good.step == 30
    assert audited(run)[1].findings[0].id == "COV001"


def test_stale_zero_file_explains_what_it_changes(run):
    name = "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
    shutil.copy(run / "global_step20" / name, run / "global_step40" / name)
    _, found = audited(run)
    (finding,) = found.findings
    assert finding.id == "INT005"
    assert finding.locations[0].file == f"global_step40/{name}"
    assert "REP001" in finding.consequences
    assert found.last_good.step == 30


def test_all_zero_files_of_an_earlier_step(run):
    for path in (run / "global_step20").glob("bf16_zero_*"):
        shutil.copy(path, run / "global_step40")
    _, found = audited(run)
    # An optimizer that began anew would count as little, but have other moments.
    (finding,) = found.findings
    assert (finding.id, finding.severity.name) == ("INT011", "ERROR")
    assert finding.consequences == ("AUX003", "CST001", "MOT006")
    assert found.last_good.step == 30


def test_all_zero_files_of_an_earlier_step_explain_what_does_not_fit_them(run):
    for path in (run / "global_step20").glob("bf16_zero_*"):
        shutil.copy(path, run / "global_step30")
    (finding,) = audited(run)[1].findings
    assert (finding.id, finding.consequences) == ("INT011", ("AUX003", "CST001"))
    assert {location.file for location in finding.locations} == {
        f"global_step30/{path.name}" for path in (run / "global_step20").glob("bf16_zero_*")
    }


def test_counter_that_runs_apart_from_the_engine_is_legal(run):
    """DeepSpeed's BF16_Optimizer of BLOOM's time took one optimizer step at start."""
    import numpy as np

    from tests.faults import catalog_of

    for step in (10, 20, 30, 40):
        catalog = catalog_of(run, step)
        for scalar in {s.file for s in catalog.scalars if s.name == "optimizer_step"}:
            path = run / scalar
            old, new = np.float32(step).tobytes(), np.float32(step + 1).tobytes()
            content = path.read_bytes()
            assert content.count(old) >= 2
            path.write_bytes(content.replace(old, new))
    _, found = audited(run, level=Level.HEADERS)
    assert found.findings == []
    assert found.last_good.step == 40


def test_link_to_a_step_is_that_step(run):
    (run / "best").symlink_to("global_step20")
    report, found = audited(run)
    assert found.findings == []
    assert exit_code(report) is ExitCode.HOLDS


def test_files_that_were_renamed_after_writing_are_their_own(run):
    torch = pytest.importorskip("torch")
    path = run / "global_step40" / "layer_03-model_01-model_states.pt"
    torch.save(torch.load(path), f"{path}.tmp")
    shutil.move(f"{path}.tmp", path)
    assert audited(run)[1].findings == []


def test_flipped_bit_shows_by_the_containers_own_checksum_at_level_full(run):
    # A moment whose last bit is another breaks no arithmetic.
    file = poke(run, 40, "4.mlp.dense_h_to_4h.weight", "first_moment", element=7, flip=1)
    assert audited(run)[1].findings == []
    _, found = audited(run, level=Level.FULL)
    (finding,) = found.findings
    assert (finding.id, finding.locations[0].file) == ("INT010", file)
