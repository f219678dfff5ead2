"""Every named fault on a real run gives one finding with its own id; what else it violates is a consequence.

``python -m tests.test_fault_matrix`` prints the matrix.
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.faults import float32_bits, poke, rewrite
from tests.paths import HEALTHY

STEPS = (20, 30, 40)
ROWS = "3.mlp.dense_h_to_4h.weight"
NORM, WEIGHT, OTHER = "3.input_layernorm.weight", "3.mlp.dense_4h_to_h.weight", "4.mlp.dense_4h_to_h.weight"
LAYER, ZERO = "layer_04-model_01-model_states.pt", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"


def step_folder(run, step=40):
    return run / f"global_step{step}"


def as_float(change):
    return lambda bits: change(bits.view(np.float32)).astype(np.float32).view(np.uint32)


def moments_of_another(run):
    """Both moments of one weight are put on its sibling, as a state keyed by position is after a renaming."""
    for role in ("first_moment", "second_moment"):
        kept = []
        rewrite(run, 40, ROWS, role, lambda bits, kept=kept: kept.append(bits) or bits)
        left = [np.concatenate(kept)]
        rewrite(run, 40, ROWS.replace("3.", "4.", 1), role, lambda bits, left=left: taken(left, len(bits)))


def taken(left, count):
    """The next ``count`` elements of what is left."""
    found, left[0] = np.split(left[0], [count])
    return found


def cut(file, keep):
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])


def of_another_step(run, name, step=30):
    shutil.copy(step_folder(run, step) / name, step_folder(run) / name)


def of_the_save_before(run, *roles):
    """State of one weight that a writer copied before the others."""
    for role in roles:
        kept = []
        rewrite(run, 30, WEIGHT, role, lambda bits, kept=kept: kept.append(bits) or bits)
        left = [np.concatenate(kept)]
        rewrite(run, 40, WEIGHT, role, lambda bits, left=left: taken(left, len(bits)))


def overwritten(run):
    """One element holds what no optimizer makes of it between two saves, alike in all that is stored of it."""
    for role, bits in (("master", float32_bits(1.5)), ("parameter", float32_bits(1.5) >> 16)):
        poke(run, 40, WEIGHT, role, value=bits)


def half_of_the_save_before(run, name):
    """Each rank's part of a moment ends as it was in the save before."""
    kept = []
    rewrite(run, 30, name, "first_moment", lambda bits: kept.append(bits) or bits)
    rewrite(run, 40, name, "first_moment", lambda bits: np.where(np.arange(len(bits)) < 64, bits, kept.pop(0)))


def of_another_rank(run):
    name = LAYER.replace("_01-model_states", "_00-model_states")
    shutil.copy(step_folder(run) / name, step_folder(run) / LAYER)


def trained_every_step(target, seed=0):
    """A short training by torch, saved after every step: of the sample's saves ten lie in between."""
    training = pytest.importorskip("tests.trainings")
    return training.Training(every=1, steps=9, seed=seed).run(target)


def trained_by_schedule(target, seed=0):
    """One whose largest learning rate is recorded."""
    pytest.importorskip("tests.trainings")
    from tests.invariants.test_motion_steps import HEALTHY as TRAININGS

    return replace(TRAININGS["OneCycleLR"], every=2, seed=seed).run(target)


def moment_of_another_gradient(run):
    rewrite(run, 8, "blocks.1.weight", "first_moment", as_float(lambda x: x * np.float32(1.01)))


def step_of_another_seed(run):
    other = trained_by_schedule(run.parent / f"{run.name} of seed 7", seed=7)
    shutil.rmtree(run / "step_8")
    shutil.move(other / "step_8", run / "step_8")


FAULTS = {
    "one bit of one replica": ("REP001", lambda run: poke(run, 40, NORM, place="tp=1", flip=8)),
    "one replica scaled": (
        "REP001",
        lambda run: rewrite(run, 40, NORM, "master", as_float(lambda x: x * 1.01), "tp=1"),
    ),
    "NaN in a weight": ("NUM001", lambda run: poke(run, 40, WEIGHT, value=0x7FC0)),
    "infinity in a moment": ("NUM001", lambda run: poke(run, 40, WEIGHT, "first_moment", value=0x7F800000)),
    "weights all zero": ("CST001", lambda run: rewrite(run, 40, WEIGHT, "parameter", np.zeros_like)),
    "one weight off by two ulps": ("CST001", lambda run: poke(run, 40, WEIGHT, flip=2)),
    "masters of another step": (
        "CST001",
        lambda run: rewrite(run, 40, WEIGHT, "master", as_float(lambda x: x * np.float32(1.02))),
    ),
    "masters kept in bfloat16": (
        "CST002",
        lambda run: [
            rewrite(run, 40, name, "master", lambda bits: (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)
            for name in (WEIGHT, OTHER)
        ],
    ),
    "a negative second moment": (
        "OPT010",
        lambda run: poke(run, 40, WEIGHT, "second_moment", value=float32_bits(-1e-6)),
    ),
    "first moment of other gradients": (
        "OPT011",
        lambda run: rewrite(run, 40, WEIGHT, "first_moment", as_float(lambda x: x * 1000)),
    ),
    "second moment lost": ("OPT012", lambda run: rewrite(run, 40, WEIGHT, "second_moment", np.zeros_like)),
    "moments of another parameter": ("OPT013", moments_of_another),
    "a layer file missing": ("INT001", lambda run: (step_folder(run) / LAYER).unlink()),
    "a partition missing": ("INT001", lambda run: (step_folder(run) / ZERO).unlink()),
    "a layer file cut": ("INT002", lambda run: cut(step_folder(run) / LAYER, 0.6)),
    "a partition cut": ("INT002", lambda run: cut(step_folder(run) / ZERO, 0.9)),
    "a partition of another step": ("INT005", lambda run: of_another_step(run, ZERO)),
    "a layer file of the save before": ("MOT003", lambda run: of_another_step(run, LAYER)),
    # Two statements about different tensors of the file: the replicated ones, and those of one rank alone.
    "a layer file of another step": ("REP001, CST001", lambda run: of_another_step(run, LAYER, 20)),
    "a weight's moments of the save before": ("MOT003", lambda run: of_the_save_before(run, "first_moment")),
    "second moments of an earlier time": (
        "MOT009",
        lambda run: rewrite(run, 40, WEIGHT, "second_moment", as_float(lambda x: x * np.float32(0.7))),
    ),
    "a weight and its master overwritten": ("MOT010", overwritten),
    "half of a moment of the save before": ("MOT012", lambda run: half_of_the_save_before(run, ROWS)),
    "half of every column's moment of the save before": (
        "MOT012",
        lambda run: half_of_the_save_before(run, WEIGHT),
    ),
    "a moment of another gradient, one step apart": ("MOT011", moment_of_another_gradient, trained_every_step),
    "a step of another run": ("MOT013", step_of_another_seed, trained_by_schedule),
    "a layer file of another rank": ("INT006", of_another_rank),
    "a pointer to nothing": ("INT003", lambda run: (run / "latest").write_text("global_step50")),
}


def copy(target):
    for step in STEPS:
        shutil.copytree(step_folder(HEALTHY, step), step_folder(target, step))
    (target / "latest").write_text(f"global_step{STEPS[-1]}")
    return target


def findings(run, **choices):
    return audit(LocalStore(run), Settings(**choices)).runs[0].findings


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_finding(tmp_path, name):
    expected, damage, *made = FAULTS[name]
    run = (made or [copy])[0](tmp_path / "run")
    damage(run)
    assert ", ".join(finding.id for finding in findings(run)) == expected


@pytest.mark.parametrize("level", list(Level))
def test_the_healthy_twin_is_silent(tmp_path, level):
    assert findings(copy(tmp_path), level=level) == []


@pytest.mark.parametrize("made", [trained_every_step, trained_by_schedule])
def test_the_healthy_trainings_are_silent(tmp_path, made):
    assert findings(made(tmp_path)) == []


def table():
    """Markdown rows: fault, expected id, what was found, consequences."""
    yield "| fault | primary id | found | consequences |"
    yield "|---|---|---|---|"
    for name, (expected, damage, *made) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = (made or [copy])[0](Path(folder) / "run")
            damage(run)
            found = findings(run)
        ids = ", ".join(finding.id for finding in found)
        yield f"| {name} | {expected} | {ids} | {', '.join(i for f in found for i in f.consequences)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
