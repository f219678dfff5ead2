"""The sample's README says what the auditor says; TP 4 against TP 8 is proved, not sampled."""

import re

import pytest

from auditor.comparison.outcome import DIFFERENT, PROVED
from tests import command
from tests.comparison.test_exact import code, compared
from tests.paths import ROOT

SAMPLE = ROOT / "samples" / "resharded_gate_up"


def test_the_readme_tells_what_comes_of_it():
    text = " ".join((SAMPLE / "README.md").read_text().split())
    commands = re.findall(r"auditor (compare \S+ \S+)", text)
    assert len(commands) == 2
    for arguments, ending in zip(commands, re.findall(r"ends with (\d)", text), strict=True):
        done = command.run([ROOT / word if "/" in word else word for word in arguments.split()])
        assert done.returncode == int(ending)
        shown = " ".join(done.stdout.decode().split())
        if done.returncode:
            (said,) = re.findall(r"`(other order: [^`]+)`", text)
            assert shown.count(said.removeprefix("other order: ")) == 2
            assert "17 equal" in shown
        else:
            assert "19 equal" in shown


@pytest.mark.parametrize("turned", [False, True], ids=["4 to 8", "8 to 4"])
def test_four_ranks_against_eight(turned):
    sides = [SAMPLE / "tp4", SAMPLE / "tp8"][:: -1 if turned else 1]
    found = compared(*sides, exact=True)
    assert {row.standing for row in found.steps[0].rows} <= {*PROVED}
    assert (len(found.steps[0].rows), code(found)) == (19, 0)
    naive = compared(SAMPLE / "tp8_naive", SAMPLE / "tp4")
    assert [row.pair.name for row in naive.steps[0].of(*DIFFERENT)] == [
        f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(2)
    ]
