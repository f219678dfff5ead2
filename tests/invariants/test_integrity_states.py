"""INT020: a save without optimizer state among others that hold it."""

import io

import pytest
import torch

from auditor.audit import audit
from auditor.invariants.integrity_states import saves_hold_optimizer_state
from auditor.model.finding import Severity
from auditor.model.run import Commit, RunState, StepState
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore

HELD = {"w": ("optimizer.pt",), "x": (), "?": None}


def judged(saves, **fields):
    """One letter a step: w a warning, u undetermined, . silent."""
    states = tuple(
        StepState(at, f"step_{at}", "made-up", True, state_files=HELD[save], **fields) for at, save in enumerate(saves)
    )
    found = saves_hold_optimizer_state(RunState(states))
    letters = ""
    for at in range(len(saves)):
        one = found.get(at)
        letters += "w" if one and one.violations else "u" if one and one.undetermined else "."
    return letters


@pytest.mark.parametrize(("saves", "expected"), [
    ("wwxw", "..w."), ("wwwx", "...u"), ("wwwwwxx", ".....uu"), ("xwwxw", "...w."), ("ww?xw", "...w."),
    ("www?", "...."), ("xxxx", "...."), ("xxww", "...."), ("wxwxw", "....."), ("wwxwwxwwx", "........."),
    ("wwx", "..."), ("wwwxxx", "......"), ("x", "."), ("w", "."),
])  # fmt: skip
def test_saves_without_state_among_others(saves, expected):
    assert judged(saves) == expected
    assert judged(saves, commit=Commit.IN_PROGRESS) == "." * len(saves)


def test_exports_of_another_format_do_not_count():
    states = [StepState(at, f"step_{at}", "made-up", True, state_files=("optimizer.pt",)) for at in range(4)]
    export = StepState(2, "export", "another", True, state_files=())
    found = saves_hold_optimizer_state(RunState((*states[:2], export, *states[2:])))
    assert not [one for one in found.values() if one.violations or one.undetermined]


def run_of(lacking):
    """Four saves by torch.save of a model that trains, one of them without its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    objects = {}
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "step": step}
        if step != lacking:
            state["optimizer"] = optimizer.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        objects[f"model_{step}.pt"] = file.getvalue()
    return objects


@pytest.mark.parametrize(("lacking", "warnings", "good"), [(0, [], 4), (3, ["INT020"], 4), (4, [], 3)])
def test_a_save_that_lost_its_optimizer(lacking, warnings, good):
    store = MemoryStore(run_of(lacking))
    (run,) = audit(store, now=1e9).runs
    assert [finding.id for finding in run.findings] == warnings
    assert all(finding.severity is Severity.WARNING for finding in run.findings)
    assert run.last_good.step == good
    assert any(identifier == "INT020" for identifier, _ in run.undetermined()) == (lacking == 4)
    (by_name,) = audit(store, Settings(level=Level.NAMES), now=1e9).runs
    assert not by_name.findings
