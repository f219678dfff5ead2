"""SEC: pickles that would run something are findings, and nothing of them runs."""

import importlib
import os
import shutil

import pytest

from auditor.audit import audit
from auditor.invariants.security import dangerous
from auditor.storage.local import LocalStore
from tests.paths import HEALTHY, TP2_PP2, TP4

torch = pytest.importorskip("torch")


class Calls:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.fixture
def run(tmp_path):
    shutil.copytree(TP4, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("function", "arguments"), [(os.system, ("touch {}",)), (importlib.import_module, ("this",)), (eval, ("1",))]
)
def test_a_dangerous_call_is_a_finding_and_does_not_run(run, tmp_path, function, arguments):
    mark = tmp_path / "ran"
    path = run / "global_step6" / "layer_03-model_02-model_states.pt"
    content = torch.load(path)
    content["hook"] = Calls(function, *(argument.format(mark) for argument in arguments))
    torch.save(content, path)
    report = audit(LocalStore(run))
    (finding,) = report.runs[0].findings
    assert finding.id == "SEC001"
    assert finding.locations[0].file == "global_step6/layer_03-model_02-model_states.pt"
    assert function.__name__ in finding.message
    assert not mark.exists()
    assert report.runs[0].last_good.step == 3


def test_it_is_no_consequence_of_other_trouble_with_the_file(run):
    path = run / "global_step6" / "mp_rank_01_model_states.pt"
    torch.save({"param_shapes": [], "global_steps": 6, "x": Calls(os.system, "true")}, path)
    assert {finding.id for finding in audit(LocalStore(run)).runs[0].findings} == {"MET001", "SEC001"}


@pytest.mark.parametrize("folder", [HEALTHY, TP2_PP2], ids=lambda folder: folder.name)
def test_unknown_but_harmless_classes_are_counted_in_silence(folder):
    (run,) = audit(LocalStore(folder)).runs
    assert run.findings == []
    assert run.steps[0].opaque["argparse.Namespace"] >= 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("posix.system", True), ("os.path.join", True), ("builtins.eval", True), ("__builtin__.getattr", True),
        ("importlib.import_module", True), ("subprocess.Popen", True), ("torch.hub.load", True),
        ("torch._utils._rebuild_tensor_v2", False), ("argparse.Namespace", False), ("collections.OrderedDict", False),
        ("megatron.enums.AttnMaskType", False), ("pathlib.PosixPath", False), ("builtins.set", False),
        ("numpy.dtype", False), ("deepspeed.runtime.fp16.loss_scaler.LossScaler", False),
    ],
)  # fmt: skip
def test_what_is_dangerous(name, expected):
    assert dangerous(name) is expected
