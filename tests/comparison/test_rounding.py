"""Runs that agree up to round-off, and the same with one planted bug each, found after its first step."""

import math
import shutil

import pytest

pytest.importorskip("torch")

import auditor
from auditor.comparison.outcome import DIFFERENT, PROVED, Course, Standing
from auditor.model.catalog import Role
from tests.comparison.gpt import FAULTS, LAYERS, Training, faulty, trusted
from tests.comparison.test_exact import code, compared


def run_compare(reference, candidate, **choices):
    """A comparison, without its reports."""
    return auditor.compare(str(reference), str(candidate), **choices)


NARROW = {"compute": "bfloat16"}
PART = ["embed.*", "layers.1.*"]
"""Of the tensors, where a part tells as much."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of a training, each made once."""
    made = {}

    def run(training):
        if training not in made:
            made[training] = training.run(tmp_path_factory.mktemp("run"))
        return made[training]

    return run


def marked(found, *standings):
    return {row.pair.name for row in found.steps[-1].rows if row.standing in standings}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_healthy_layouts_agree_with_one_device(runs, dtype):
    reference = runs(Training(dtype=dtype))
    for layout in ({"tp": 2}, {"dp": 2}) if dtype == "bfloat16" else ({"tp": 4},):
        found = run_compare(reference, runs(Training(dtype=dtype, **layout)), compute=dtype)
        assert not marked(found, *DIFFERENT, Standing.SUSPICIOUS)
        assert not found.steps[-1].causes
        assert (code(found), found.last_equal) == (0, 0)
        moments = [row for row in found.steps[-1].rows if row.pair.role is Role.FIRST_MOMENT]
        assert sum(row.standing is Standing.ROUNDING for row in moments) > 20


OPTIMIZER = {"epsilon of the optimizer", "no bias correction"}
EXPECTED = {
    "layernorm gradients not summed over tp": ("norm", "norms alone"),
    "gradient times dp": ("", "times the reference"),
    "gradient of row-parallel weights over tp": ("weight", "one over the 2 ranks of tp"),
    "clipped on tp rank 0 alone": ("layers", "do so in what tp rank 1 of 2 holds alone"),
    "dropout of tp rank 0 on every rank": ("layers.0", "nearly all gradients differ"),
    "tied embedding gradient not summed": ("embed.weight", "tied head"),
    "weights of one layer stale": ("layers.1.mlp.down.weight", "of a save before"),
    "attention scaled by hidden size": (".attn.", "nearly all gradients differ"),
    "loss averaged over padding": ("", "times the reference"),
    "microbatches summed in bfloat16": ("", "summed, or kept, in bfloat16"),
    "gate and up exchanged": (".mlp.", ""),
    "epsilon of the optimizer": ("", "the optimizer's arithmetic"),
    "no bias correction": ("", "the optimizer's arithmetic"),
    "decay on norms": ("", "the optimizer's arithmetic"),
}
"""Planted bug to a part of the name of the worst tensor, and of a cause that is offered."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_bug_is_found_after_its_first_step_at_its_module(runs, fault):
    for dtype in ("bfloat16",):
        found = run_compare(runs(trusted(fault, dtype=dtype)), runs(faulty(fault, dtype=dtype)), compute=dtype)
        step = found.steps[0 if fault == "gate and up exchanged" else 1]
        bad = step.of(*DIFFERENT)
        if (fault, dtype) == ("microbatches summed in bfloat16", "bfloat16"):
            # Of the size of the computation's own rounding, and told by the bits that are in use, of which it may have
            # as few by itself.
            assert "made of bfloat16 numbers, most of the reference's are not" in step.notes[-1]
            assert (code(found), bad, step.of(Standing.SUSPICIOUS)) == (0, [], [])
            continue
        assert bad
        worst = max(bad, key=lambda row: -1 if math.isnan(row.margin) else row.margin)
        part, cause = EXPECTED[fault]
        assert part in worst.pair.name
        assert cause in "\n".join(one.text for one in step.causes)
        if fault == "tied embedding gradient not summed":
            assert marked(found, Standing.BEYOND) == {"embed.weight"}
        if fault == "clipped on tp rank 0 alone":
            causes = {row.cause for row in bad if row.pair.role is Role.FIRST_MOMENT}
            assert any("along dim 0 all of it is in what tp rank 1 of 2 holds, about" in one.text for one in causes)
            # Said once for all of them, and of their weights nothing besides.
            assert causes <= step.gathered
            assert not [row for row in bad if row.pair.role is Role.PARAMETER and row.cause]
        if fault in OPTIMIZER:
            assert not [row for row in bad if row.pair.role is Role.FIRST_MOMENT]


def test_exchanged_weights_are_told_from_the_first_save_on(runs):
    fault = "gate and up exchanged"
    found = compared(runs(trusted(fault)), runs(faulty(fault)), steps="0")
    details = {row.pair.name: row.detail for row in found.steps[0].rows if row.standing not in PROVED}
    assert len(details) == 2 * LAYERS
    assert details["layers.1.mlp.up.weight"] == "holds the reference's layers.1.mlp.gate.weight"
    assert code(found) == 1


def test_reruns_of_the_reference_tell_its_noise(runs):
    reference = runs(Training(dtype="bfloat16"))
    reruns = [str(runs(Training(dtype="bfloat16", perturbed=seed))) for seed in (1, 2)]
    derived = run_compare(reference, runs(Training(dtype="bfloat16", tp=2)), **NARROW, only=PART)
    found = compared(reference, runs(Training(dtype="bfloat16", tp=2)), calibrate=reruns, **NARROW, only=PART)
    assert not marked(found, *DIFFERENT)
    rows = {(row.pair.name, row.pair.role): row for row in found.steps[-1].rows if row.threshold}
    own = [row for row in rows.values() if row.pair.role is Role.FIRST_MOMENT]
    assert {(row.threshold.kind, row.threshold.num_runs) for row in own} == {("calibrated", 2)}
    # What is measured and what is derived are of one size.
    before = {(row.pair.name, row.pair.role): row.threshold.relative for row in derived.steps[-1].rows if row.threshold}
    ratios = sorted(row.threshold.relative / before[key] for key, row in rows.items() if key in before)
    assert 0.1 < ratios[len(ratios) // 2] < 3
    # A weight of which few elements went far, and none of them in the rerun, is no alarm.
    plain, rerun = runs(Training()), str(runs(Training(perturbed=1, micro=2)))
    found = run_compare(plain, runs(Training(tp=2)), calibrate=[rerun], only=["layers.0.attn.k.*"])
    assert not marked(found, *DIFFERENT, Standing.SUSPICIOUS)
    same = run_compare(
        reference, runs(Training(dtype="bfloat16", tp=2)), calibrate=[str(reference)], **NARROW, only=PART
    )
    assert any("equal the reference in every bit" in note for note in same.steps[-1].notes)


NO_RERUNS = {
    "another seed": ({"seed": 1}, "no more in common with the reference's than unrelated"),
    "other data": ({"data": 1}, "one step from equal weights, its gradients differ by"),
    "the candidate": ({"tp": 2}, "the candidate itself"),
    "another rate": ({"perturbed": 1}, "lr 0.001 against 0.002, in zarr.json"),
}


@pytest.mark.parametrize("case", NO_RERUNS)
def test_what_is_no_rerun_is_named_and_not_used(runs, tmp_path, case):
    changes, why = NO_RERUNS[case]
    reference, candidate = runs(Training(dtype="bfloat16")), runs(Training(dtype="bfloat16", tp=2))
    rerun = runs(Training(dtype="bfloat16", **changes))
    if case == "another rate":
        rerun = shutil.copytree(rerun, tmp_path / "rerun")
        catalog = rerun / "steps" / "1" / "catalog" / "zarr.json"
        catalog.write_text(catalog.read_text().replace('"lr": 0.001', '"lr": 0.002'))
    real = str(runs(Training(dtype="bfloat16", perturbed=2)))
    for others, kind, ending in (([], "derived", 3), ([real], "calibrated", 0)):
        found = compared(reference, candidate, **NARROW, only=PART, calibrate=[str(rerun), *others])
        assert why in found.refused[str(rerun)], found.refused
        assert [*found.refused] == [str(rerun)]
        moments = [row for row in found.steps[-1].rows if row.pair.role is Role.FIRST_MOMENT and row.amount]
        assert {row.threshold.kind for row in moments} == {kind}
        assert code(found) == ending


def test_power_is_told_of_the_numbers_that_were_compared(runs):
    found = compared(runs(Training()), runs(Training(tp=2)), power=True)
    rows = [row for row in found.steps[-1].rows if row.power and row.pair.role is Role.FIRST_MOMENT]
    assert len(rows) > 30
    weak = [row.pair.name for row in rows if not (row.power.detects_roll and row.power.smallest_part > 2)]
    # Attention's weights don't depend on the bias of keys: its gradient is rounding.
    assert weak == [f"layers.{layer}.attn.k.bias" for layer in range(LAYERS)]
    # What is said would be found is found.
    (row,) = [row for row in rows if row.pair.name == "layers.1.mlp.down.weight"]
    assert row.power.factor == pytest.approx(row.threshold.beyond)
    assert row.power.factor < 1e-3


def test_save_load_save(runs, tmp_path):
    run = runs(Training())
    shutil.copytree(run, tmp_path / "run")
    assert code(run_compare(run, tmp_path / "run", resume=True, steps="1")) == 0
    catalog = tmp_path / "run" / "steps" / "1" / "catalog" / "zarr.json"
    catalog.write_text(catalog.read_text().replace('"lr": 0.001', '"lr": 0.002'))
    found = compared(run, tmp_path / "run", resume=True, steps="1")
    assert (code(found), found.steps[0].recorded) == (1, ("lr 0.001 against 0.002, in zarr.json",))
    assert code(run_compare(run, tmp_path / "run", exact=True, steps="1")) == 0


def test_noise_that_grows_is_told_from_a_jump(runs):
    reference = runs(Training(dtype="bfloat16", steps=2))
    noise = run_compare(reference, runs(Training(dtype="bfloat16", steps=2, tp=2)), **NARROW, only=PART)
    # Of bfloat16 weights that hold little more than two steps nothing is determined.
    assert {one.role: one.course for one in noise.growing}[Role.FIRST_MOMENT] is Course.AGREES
    assert {one.course for one in noise.growing} <= {Course.AGREES, Course.OPEN}
    faulty_run = runs(faulty("tied embedding gradient not summed", dtype="bfloat16", steps=2))
    bug = run_compare(reference, faulty_run, **NARROW, only=PART)
    courses = {one.role: (one.course, one.jump) for one in bug.growing}
    assert courses[Role.FIRST_MOMENT] in ((Course.JUMP, 1), (Course.STEADY, 1))
