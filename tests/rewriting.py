"""Named damage through torch: committed checkpoints loaded, changed and saved again; small trainings."""

import enum
import shutil
import sys
import types

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.paths import ROOT

DDP = ROOT / "tests" / "fixtures" / "torch_per_rank" / "healthy"
MEGATRON = ROOT / "tests" / "fixtures" / "megatron_legacy"
HEAD_WEIGHT, HEAD_BIAS, HIDDEN_WEIGHT = 5, 6, 3
"""Numbers of parameters in the optimizer of the DDP fixture."""


@pytest.fixture
def ddp(tmp_path):
    """A copy of the DDP run."""
    shutil.copytree(DDP, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def megatron(tmp_path):
    """A copy of the Megatron run."""
    shutil.copytree(MEGATRON / "tp2", tmp_path / "run")
    return tmp_path / "run"


DEEPSPEED = {
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
}
"""Modules of DeepSpeed's to the classes that its files name."""


@pytest.fixture
def deepspeed(monkeypatch):
    """Those classes, so that torch can load and save the files."""
    stand_in_for_deepspeed(monkeypatch)


def stand_in_for_deepspeed(monkeypatch):
    """Modules with classes of those names."""
    for module, names in DEEPSPEED.items():
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or types.ModuleType(path))
        for name in names:
            setattr(sys.modules[module], name, type(name, (), {"__module__": module}))
    config = types.ModuleType("deepspeed.runtime.zero.config")
    config.ZeroStageEnum = enum.IntEnum(
        "ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}, module=config.__name__
    )
    for name in ("deepspeed.runtime.zero", config.__name__):
        monkeypatch.setitem(sys.modules, name, config if name == config.__name__ else types.ModuleType(name))


def change(files, by):
    """Load each file, let ``by`` change what it holds, save it again."""
    torch = pytest.importorskip("torch")
    files = sorted(files)
    assert files
    for path in files:
        content = torch.load(path, weights_only=False)
        by(content)
        torch.save(content, path)


def ranks(run, step=6, rank="*"):
    return run.glob(f"step_{step}/rank_{rank}.pt")


def audited(run, level=Level.HEADERS, **settings):
    (found,) = audit(LocalStore(run), Settings(level=level, **settings)).runs
    return found


def only(run, **settings):
    (finding,) = audited(run, **settings).findings
    return finding


def ids(run, **settings):
    return [finding.id for finding in audited(run, **settings).findings]


def places(finding):
    return {(location.step, location.tensor, location.role, location.file) for location in finding.locations}


def trained(folder, make, steps=3, save=lambda step: True, before=lambda step, model: None, **more):
    """Train a small model by ``make(model)`` and save each step as two data-parallel ranks would."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = make(model)
    for step in range(1, steps + 1):
        before(step, model)
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
        if save(step):
            store(folder, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more})
    return folder


def store(folder, step, content, count=2):
    torch = pytest.importorskip("torch")
    (folder / f"step_{step}").mkdir(parents=True, exist_ok=True)
    for rank in range(count):
        torch.save({**content, "step": step, "rank": rank, "world_size": count}, folder / f"step_{step}/rank_{rank}.pt")
