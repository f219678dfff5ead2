"""A run by optax, which records neither betas nor rates: what moments and count tell, and what the user states."""

import shutil

import numpy as np
import pytest

from auditor.adapters.adapter import Options
from auditor.audit import audit
from auditor.configuration import make_settings
from auditor.errors import UsageError
from auditor.invariants.recorded import lacking
from auditor.model.finding import Outcome
from auditor.settings import Settings
from auditor.stated_optimizer import stated_optimizer
from auditor.storage.local import LocalStore
from tests.faults import rewrite
from tests.paths import ROOT

RUN = ROOT / "tests/fixtures/optax_run"
STATED = {"class": "adamw", "betas": [0.9, 0.999], "max_lr": 3e-3, "weight_decay": 0.01, "eps": 1e-8}
BLOCK = "block.kernel"


def audited(run, stated=None):
    options = Options(optimizer=stated_optimizer({"optimizer": stated} if stated else {}))
    (found,) = audit(LocalStore(run), Settings(options=options)).runs
    return found


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(RUN, tmp_path / "run", ignore=shutil.ignore_patterns("*.py", "*.md"))


def change(run, role, by):
    as_float = lambda bits: by(bits.view(np.float32)).astype(np.float32).view(np.uint32)  # noqa: E731
    rewrite(run, 8, BLOCK, role, as_float)


def test_without_a_word_of_the_user_betas_are_not_known():
    found = audited(RUN)
    assert found.findings == []
    assert found.counts("MOT012")[Outcome.HOLDS] == found.counts("MOT003")[Outcome.HOLDS] * 4 == 20
    for identifier in ("MOT009", "MOT010", "MOT013", "OPT011"):
        assert found.counts(identifier)[Outcome.HOLDS] == 0
        assert {why for name, why in found.reasons("undetermined") if name == identifier} == {lacking(())}


def test_what_is_stated_is_judged_by():
    found = audited(RUN, STATED)
    assert found.findings == []
    assert [found.counts(name)[Outcome.HOLDS] for name in ("MOT009", "MOT010", "MOT013", "OPT011")] == [20, 20, 5, 24]


@pytest.mark.parametrize(("lacks", "reason"), [
    ("weight_decay", "weight_decay is not recorded; auditor.toml can state under [optimizer]: weight_decay = …"),
    ("class", "neither the optimizer's class is recorded"),
    ("max_lr", "lr is not recorded; auditor.toml can state under [optimizer]: lr = … (or max_lr"),
])  # fmt: skip
def test_what_is_not_stated_is_named(lacks, reason):
    found = audited(RUN, {key: value for key, value in STATED.items() if key != lacks})
    assert found.counts("MOT009")[Outcome.HOLDS] == 20
    (told,) = {why for name, why in found.reasons("undetermined") if name == "MOT010"}
    assert told.startswith(reason)


@pytest.mark.parametrize(("role", "by", "identifier"), [
    ("second_moment", lambda x: x * 0.5, "MOT009"),
    ("parameter", lambda x: np.where(np.arange(x.size) == 7, x + 0.5, x), "MOT010"),
])  # fmt: skip
def test_faults_between_saves(run, role, by, identifier):
    change(run, role, by)
    assert audited(run).findings == []
    (finding,) = audited(run, STATED).findings
    # So early, moments that were halved are beyond their own bound as well.
    assert identifier in (finding.id, *finding.consequences)
    assert [(i.last_good, i.first_bad) for i in finding.intervals] == [(6, 8)]
    assert {location.tensor for location in finding.locations} == {BLOCK}


def test_values_of_two_steps_need_no_settings(run):
    kept = []
    rewrite(run, 6, BLOCK, "first_moment", lambda bits: kept.append(bits) or bits)
    rewrite(run, 8, BLOCK, "first_moment", lambda bits: np.where(np.arange(len(bits)) < 70, bits, kept[0]))
    assert [finding.id for finding in audited(run).findings] == ["MOT012"]


@pytest.mark.parametrize("table", [
    {"beta": 0.9}, {"betas": [0.9]}, {"betas": [0.9, 1.0]}, {"lr": "fast"}, {"lr": -1.0}, {"eps": True}, [1],
])  # fmt: skip
def test_what_can_not_be_stated(table):
    with pytest.raises(UsageError, match="optimizer"):
        stated_optimizer({"optimizer": table})


def test_it_is_stated_in_the_configuration(tmp_path):
    (tmp_path / "auditor.toml").write_text('[optimizer]\nclass = "adamw"\nbetas = [0.9, 0.95]\nlr = 1e-3\n')
    stated = make_settings({}, tmp_path / "auditor.toml").options.optimizer
    assert (stated.optimizer, stated.hyperparameters) == ("adamw", {"betas": (0.9, 0.95), "lr": 1e-3})
