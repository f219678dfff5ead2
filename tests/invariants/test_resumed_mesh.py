"""A run that tensor-parallel ranks of another number resumed: four saved step 2, eight loaded it and saved step 3."""

import shutil

import numpy as np
import pytest

from auditor.audit import audit
from auditor.model.finding import Outcome
from auditor.settings import Settings
from auditor.storage.local import LocalStore
from tests.faults import rewrite
from tests.paths import ROOT

RUN = ROOT / "tests/fixtures/dcp/resumed_tp4_tp8"
COLUMNS, ROWS = "blocks.0.down.weight", "blocks.0.up.weight"
"""Of the first each rank has a part of every row; of the second, whole rows."""


def audited(run):
    (found,) = audit(LocalStore(run), Settings()).runs
    return found


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(RUN, tmp_path / "run")


def pieces(run, step, name, role):
    """The bits of every rank's part."""
    found = []
    rewrite(run, step, name, role, lambda bits: found.append(bits) or bits)
    return found


def test_what_four_left_is_what_eight_went_on_from():
    found = audited(RUN)
    assert found.findings == []
    assert [step.mesh.num_ranks for step in found.steps] == [4, 8]
    assert [len(pieces(RUN, step, COLUMNS, "first_moment")) for step in (2, 3)] == [4, 8]
    # Every parameter is held against what the other mesh saved, element by element; one step apart, it replays.
    for identifier, count in (("MOT009", 17), ("MOT010", 17), ("MOT011", 34), ("MOT012", 17), ("MOT001", 17)):
        assert found.counts(identifier)[Outcome.HOLDS] == count
        assert found.counts(identifier)[Outcome.UNDETERMINED] == 0


@pytest.mark.parametrize("name", [COLUMNS, ROWS])
def test_a_rank_that_loaded_its_moment_wrong(run, name):
    """The second moment of one of the eight ranks is a tenth of what it was."""
    turn = iter(range(8))

    def fall(bits):
        return (bits.view(np.float32) * np.float32(0.1)).view(np.uint32) if next(turn) == 5 else bits

    rewrite(run, 3, name, "second_moment", fall)
    (finding,) = audited(run).findings
    assert {"MOT009", "MOT011"} <= {finding.id, *finding.consequences}
    assert [(i.last_good, i.first_bad) for i in finding.intervals] == [(2, 3)]
    assert {location.tensor for location in finding.locations} == {name}
    assert {str(location.coordinate) for location in finding.locations} == {"rank=5"}


@pytest.mark.parametrize("name", [COLUMNS, ROWS])
def test_a_part_that_is_not_the_step_of_eight(run, name):
    """All of one rank's part is what the four had saved, in the cut of the eight."""
    old = pieces(run, 2, name, "first_moment")
    shape, axis = ((6, -1), 1) if name == COLUMNS else ((-1, 6), 0)
    whole = np.concatenate([part.reshape(shape) for part in old], axis)
    parts = iter(np.split(whole, 8, axis))
    turn = iter(range(8))
    rewrite(run, 3, name, "first_moment", lambda bits: [bits, next(parts).reshape(-1)][next(turn) == 5])
    found = audited(run).findings
    assert [finding.id for finding in found] == ["MOT011"]
    assert {location.tensor for finding in found for location in finding.locations} == {name}
