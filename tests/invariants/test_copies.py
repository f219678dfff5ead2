"""MOT015 and INT007: steps that are others once more, and healthy runs that look like it."""

import shutil

import numpy as np
import pytest

from auditor.audit import audit
from auditor.invariants.integrity_runs import steps_are_saved_once
from auditor.invariants.motion_copies import steps_are_no_copies
from auditor.model.finding import Severity
from auditor.model.observation import Content
from auditor.model.run import RunState, StepState
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.flax_files import pack
from tests.paths import ROOT
from tests.rewriting import audited

FIXTURES = ROOT / "tests/fixtures"
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def state(step, held, count=None, drawn="", path="", sizes="s", **more):
    """A save: a letter for its weights and one for its moments."""
    one, *moments = [(Content(what, letter),) for what, letter in zip(("w", "m"), held, strict=False)]
    return StepState(
        step, path or f"step_{step}", "f", whole=True, parameters=one, moments=moments[0] if moments else (),
        everything=more.pop("everything", (Content("all", held),)), drawn=drawn, sizes=sizes,
        optimizer_step=None if count is None else float(count), **more,
    )  # fmt: skip


def copied(*states):
    judged = steps_are_no_copies(RunState(states))
    found = {step: [one.severity for one in judgement.violations] for step, judgement in judged.items()}
    return {step: severities[0] for step, severities in found.items() if severities}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # An old step after newer ones.
        ([state(2, "aa", 2), state(4, "bb", 4), state(6, "aa", 2)], {6: ERROR}),
        ([state(2, "aa"), state(4, "bb"), state(6, "aa"), state(8, "aa")], {6: ERROR, 8: ERROR}),
        ([state(2, "a"), state(4, "b"), state(6, "a")], {6: WARNING}),
        # The save before, once more.
        ([state(2, "aa", 2), state(4, "bb", 4), state(40, "bb", 4)], {40: ERROR}),
        ([state(3, "cc", 3, "y"), state(4, "cc", 3, "y")], {4: ERROR}),
        ([state(3, "c", drawn="y"), state(4, "c", drawn="y")], {4: ERROR}),
        # Saved anew: an early stop that restored all; gradients that a script skipped.
        ([state(2, "aa", 2, "x"), state(4, "bb", 4, "y"), state(6, "aa", 2, "z")], {6: WARNING}),
        ([state(2, "aa", 2, "x"), state(4, "bb", 4, "y"), state(40, "bb", 4, "z")], {40: WARNING}),
        # A writer that draws once for all saves proves nothing, neither way.
        ([state(2, "aa", 2, "x"), state(4, "bb", 4, "x"), state(6, "bb", 4, "x")], {}),
        ([state(2, "aa", 2, "x"), state(4, "bb", 4, "x"), state(6, "aa", 2, "x")], {6: ERROR}),
        # Weights alone, under an optimizer that went on; under a new one; the files themselves.
        ([state(2, "aa", 2), state(4, "bb", 4), state(6, "ac", 6), state(8, "dd", 8)], {6: ERROR}),
        ([state(2, "aa", 2, "x"), state(4, "bb", 4, "y"), state(6, "ac", 6, "z"), state(8, "dd", 8, "w")], {6: ERROR}),
        ([state(2, "aa", 2), state(4, "bb", 4), state(6, "ac", 6)], {6: ERROR}),
        ([state(2, "aa", 2), state(4, "bb", 4), state(6, "aa", 6), state(8, "dd", 8)], {6: ERROR}),
        ([state(2, "aa"), state(4, "bb"), state(6, "ac")], {6: ERROR}),
        ([state(2, "aa", 2), state(4, "bb", 4), state(6, "ac", 1), state(8, "dd", 3)], {6: WARNING}),
        ([state(2, "aa", 2), state(4, "ab", 4), state(6, "ac", 6), state(8, "bd", 8)], {}),
        ([state(2, "aa", 2, "x"), state(4, "bb", 4, "y"), state(6, "bc", 6, "y"), state(8, "dd", 8, "z")], {6: ERROR}),
        # Averages saved in turns with the weights, of which one did not move in time.
        ([state(at, held, at) for at, held in zip(range(2, 16, 2), ("aa", "sb", "cc", "sd", "ee", "sf", "gg"),
                                                  strict=True)], {8: WARNING, 12: WARNING}),
        # Healthy: skipped steps; gradients of three batches accumulated; nothing known of the pace; names of their own.
        ([state(1, "aa", 1), state(2, "bb", 2), state(3, "cc", 3), state(5, "cc", 3)], {}),
        ([state(1, "aa", 1), state(2, "aa", 1), state(3, "aa", 1), state(4, "bb", 2), state(5, "bb", 2),
          state(6, "bb", 2), state(7, "cc", 3), state(8, "cc", 3), state(9, "cc", 3)], {}),
        ([state(10, "aa", 0), state(64, "bb", 1), state(128, "cc", 2), state(190, "cc", 2)], {}),
        ([state(2, "aa", 2), state(400, "aa", 2)], {}),
        ([state(2, "bb", 2, "x"), state(3, "cc", 3, "y"), state(4, "cc", 3, "z")], {}),
        # Many skipped steps, as the file records.
        ([state(2, "aa", 2), state(4, "bb", 4), state(48, "bb", 4, num_skipped=44.0)], {}),
        ([state(2, "aa", 2), state(4, "bb", 4, loss_scale=8.0), state(49, "bb", 4, loss_scale=1.0)], {}),
        # All frozen; no learning rate while moments move.
        ([state(step, "a") for step in (2, 4, 6, 8)], {}),
        ([state(2, "aa", 2), state(4, "ab", 4), state(6, "ac", 6)], {}),
        # Resumed, and saved at one number twice; step 0 is also what tells no step.
        ([state(2, "aa", 2), state(4, "bb", 4), state(4, "bb", 4, path="again"), state(6, "cc", 6)], {}),
        ([state(0, "b"), state(2, "a"), state(4, "b")], {}),
        # Other formats beside, an export of the same weights for one.
        ([state(2, "a"), state(4, "b"), StepState(6, "export", "g", whole=True, parameters=(Content("w", "a"),))], {}),
    ],
)  # fmt: skip
def test_a_copy_and_what_looks_like_one(states, expected):
    assert copied(*states) == expected


def test_what_tells_nothing_is_undetermined():
    judged = steps_are_no_copies(RunState((state(2, "aa", 2), state(4, "aa", 2))))
    assert [sum(map(len, judged[step].undetermined.values())) for step in (2, 4)] == [0, 1]


def test_norms_that_alone_were_read_may_come_to_old_bits_again():
    held = [(Content("w", letter), Content("w", letter)) for letter in "aba"]
    states = [StepState(at, f"s{at}", "f", whole=True, parameters=one) for at, one in zip((2, 4, 6), held, strict=True)]
    assert copied(*states) == {}


COPIES = [
    ("jax_pytree/run", "step_4", "step_6", "step 4 bit by bit, in files that bear the names"),
    ("orbax/manager", "1", "4", "step 1 bit by bit, in files that bear the names"),
    ("flax/adamw", "checkpoint_2", "checkpoint_8", "step 2 bit by bit, though step 6 between them"),
    ("dcp/fsdp2_2", "step-4", "step-5", "step 4 bit by bit, in files that bear the names or the number"),
    ("dcp/torch_2_1", "step-4", "step-40", "step 4 bit by bit, though about 36 updates"),
    ("orbax/composite", "ckpt_00000002/params", "ckpt_00000004/params", "step 2 bit by bit, in files that bear"),
]


@pytest.mark.parametrize(("run", "old", "new", "told"), COPIES, ids=lambda value: value.replace("/", "-"))
def test_a_folder_that_was_copied(tmp_path, run, old, new, told):
    """One finding, whatever else the step then violates: it records another step, or counts fewer."""
    shutil.copytree(FIXTURES / run, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / new, ignore_errors=True)
    if (tmp_path / old).is_dir():
        shutil.copytree(tmp_path / old, tmp_path / new)
    else:
        shutil.copy(tmp_path / old, tmp_path / new)
    found = audited(tmp_path, Level.VALUES)
    (finding,) = [finding for finding in found.findings if finding.severity >= WARNING]
    assert (finding.id, finding.severity, told in finding.message) == ("MOT015", ERROR, True)
    assert found.last_good.step < max(step.state.step for step in found.steps)


@pytest.mark.parametrize("between", [True, False])
def test_weights_alone(tmp_path, between):
    """As an export of each step: the old one is a warning after another, and MOT004's where it is the last."""
    for step, seed in ((2, 2), (4, 4), (6, 6), (8, 4 if between else 6)):
        weight = np.random.default_rng(seed).standard_normal((8, 8), "f4")
        (tmp_path / f"checkpoint_{step}").write_bytes(pack({"params": {"dense": {"kernel": weight}}}))
    found = [(item.id, item.severity) for item in audited(tmp_path, Level.VALUES).findings]
    assert found == [("MOT015" if between else "MOT004", WARNING)]


# INT007


def test_a_copy_beside_is_a_note_and_another_state_of_the_step_an_error(tmp_path):
    shutil.copytree(FIXTURES / "hugging_face/trainer", tmp_path, dirs_exist_ok=True)
    for name, severity in (("checkpoint-last", NOTE), ("checkpoint-9", ERROR)):
        shutil.copytree(tmp_path / "checkpoint-6", tmp_path / name)
        (run,) = audit(LocalStore(tmp_path), Settings(level=Level.VALUES, settle_seconds=0.0)).runs
        (finding,) = [finding for finding in run.findings if finding.id == "INT007"]
        assert finding.severity is severity
        shutil.rmtree(tmp_path / name)


def test_one_that_the_writer_saved_beside_is_a_note(tmp_path):
    """Its index is longer: it holds the folder's own path."""
    shutil.copytree(FIXTURES / "dcp/fsdp2_2/step-4", tmp_path / "step-4")
    shutil.copytree(tmp_path / "step-4", tmp_path / "last")
    index = tmp_path / "last/.metadata"
    content = index.read_bytes()
    begin = content.index(b"\x8c$", content.index(b"save_id")) + 2
    longer = content[:begin] + b"f" + content[begin + 1 :]
    index.write_bytes(longer.replace(b"\x8c\x07fsdp2_2\x94", b"\x8c\x08in_a_row\x94", 1))
    run = audited(tmp_path, Level.VALUES)
    (finding,) = [finding for finding in run.findings if finding.id == "INT007"]
    assert (finding.severity, run.last_good.path) == (NOTE, "step-4")


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, NOTE), ({"held": "ab"}, None), ({"sizes": "o"}, None), ({"everything": ()}, None),
        ({"path": "step_5"}, None), ({"path": "step_004.bak"}, NOTE),
    ],
)  # fmt: skip
def test_two_folders_of_one_step(changes, severity):
    second = {"held": "aa", "path": "last"} | changes
    judged = steps_are_saved_once(RunState((state(4, "aa"), state(4, **second))))
    (violation,) = judged[4].violations
    assert violation.severity is severity
