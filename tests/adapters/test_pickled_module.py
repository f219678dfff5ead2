"""Whole modules that torch pickled: read as the state dict that they would give, without their classes."""

import pytest

import auditor
from auditor.adapters.pickled_module import with_state_dicts
from auditor.audit import audit
from auditor.containers.damage import LimitError
from auditor.containers.pickle_machine import Global, Opaque
from auditor.errors import NothingToAuditError
from auditor.settings import Settings
from auditor.storage.local import LocalStore
from auditor.storage.single import SingleFileStore

torch = pytest.importorskip("torch")
LATER = 2e9
FORMS = {
    "the module alone": lambda model, optimizer: model,
    "under a key": lambda model, optimizer: {"model": model, "optimizer": optimizer.state_dict(), "ema": None},
    "its average alone": lambda model, optimizer: {"model": None, "ema": model},
    "wrapped": lambda model, optimizer: torch.nn.DataParallel(model),
}
"""What scripts save; ultralytics the second while it trains and the third at the end."""


def trained(folder, form="the module alone", zipped=True, fault=lambda model, step: None):
    """Three saves of a module with a norm's buffers, a tied weight and a buffer that is in no state dict."""
    torch.manual_seed(5)
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    model = torch.nn.Sequential(*layers)
    model[2][0].weight = model[0].weight
    model.register_buffer("mask", torch.full((4,), torch.nan), persistent=False)
    model.register_buffer("scale", None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (1, 2, 3):
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fault(model, step)
        saved = FORMS[form](model, optimizer)
        torch.save(saved, folder / f"epoch{step}.pt", _use_new_zipfile_serialization=zipped)
    return model


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_of_whole_modules(tmp_path, form, zipped):
    model = trained(tmp_path, form, zipped)
    report = audit(LocalStore(tmp_path), Settings(), now=LATER)
    (run,) = report.runs
    assert ([step.state.step for step in run.steps], run.findings, run.last_good.step) == ([1, 2, 3], [], 3)
    held = auditor.open_zarr(str(tmp_path))["steps/3/tensors"]
    found = {name: array[...].tobytes() for role in ("parameter", "buffer") for name, array in held[role].arrays()}
    assert found == {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def test_a_fault_in_one_is_named_as_in_a_state_dict(tmp_path):
    def fault(model, step):
        if step == 3:
            model[2][0].bias.data[1] = torch.nan

    trained(tmp_path, fault=fault)
    report = audit(LocalStore(tmp_path), Settings(), now=LATER)
    (finding,) = [found for found in report.runs[0].findings if found.id == "NUM001"]
    (interval,) = finding.intervals
    assert (interval.first_bad, {place.tensor for place in finding.locations}) == (3, {"2.0.bias"})


def module(**inside):
    return Opaque(Global("m", "M"), state={"_parameters": {"w": 1}, "_buffers": {}, "_modules": inside})


def test_what_is_no_module_is_left_as_it_is():
    saved = {"model": {"w": 1}, "step": 3, "other": Opaque(Global("m", "M"), state={"_modules": {}})}
    assert with_state_dicts(saved) is saved
    assert with_state_dicts(saved | {"model": module(a=module(), b=None, c=3)})["model"] == {"w": 1, "a.w": 1}


def test_modules_without_end_are_given_up():
    shared = module()
    for _ in range(40):
        shared = module(a=shared, b=shared)
    circle = module()
    circle.state["_modules"]["self"] = circle
    huge = module(**{"n" * (1 << 16): module(), "m" * (1 << 16): module()})
    for _ in range(20):
        huge = module(a=huge, b=huge)
    for endless in (shared, circle, huge, {"model": circle}):
        with pytest.raises(LimitError, match="without end"):
            with_state_dicts(endless)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_program_beside_a_run_is_no_damaged_checkpoint(tmp_path):
    model = trained(tmp_path)
    torch.jit.save(torch.jit.trace(model.eval(), torch.ones(2, 4)), tmp_path / "model_script.pt")
    report = audit(LocalStore(tmp_path), Settings(), now=LATER)
    assert ([run.path for run in report.runs], report.runs[0].findings) == ([""], [])
    with pytest.raises(NothingToAuditError, match="is a TorchScript program"):
        audit(SingleFileStore(LocalStore(tmp_path), "model_script.pt", "x"), Settings(), now=LATER)
