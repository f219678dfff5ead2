"""Moving averages outside of rank files, in the layouts of the Trainer's scripts, of diffusers and of Lightning.

Made by hand after their sources, from what transformers wrote; torch and safetensors write the files.
"""

import shutil

import pytest

from auditor.adapters.adapter import Folder, Match, Options
from auditor.adapters.hugging_face.adapter import HuggingFace
from auditor.audit import audit
from auditor.discovery import discover
from auditor.model.catalog import FileState, Role
from auditor.model.finding import Outcome
from auditor.settings import Settings
from auditor.storage.local import LocalStore
from tests.paths import ROOT

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

FIXTURES = ROOT / "tests" / "fixtures" / "hugging_face"


def run_of(path):
    (run,) = audit(LocalStore(path), Settings(settle_seconds=0)).runs
    return run


def catalog_of(path):
    store = LocalStore(path)
    folder = Folder.read(store, "")
    match = HuggingFace().recognise(store, folder)
    assert isinstance(match, Match), match
    return HuggingFace().read(store, folder, match, Options())


def averages(path):
    return {tensor.name: tensor for tensor in catalog_of(path).tensors if tensor.role is Role.EMA}


# Beside the weights of one model


@pytest.fixture
def model(tmp_path):
    """A folder whose torch file keeps the model's order, and its weights."""
    shutil.copytree(FIXTURES / "accelerate_bin" / "step_4", tmp_path / "step_4")
    weights = torch.load(tmp_path / "step_4" / "pytorch_model.bin")
    return tmp_path / "step_4", {name: tensor * 0.9 for name, tensor in weights.items()}


FORMS = {
    "a state dict": lambda weights: weights,
    "under a key, wrapped": lambda weights: {"ema": {f"module.{name}": value for name, value in weights.items()}},
}


@pytest.mark.parametrize("form", FORMS)
def test_averages_are_held_to_parameters_by_name(model, form):
    path, weights = model
    torch.save(FORMS[form](weights), path / "ema.pt")
    found = averages(path)
    assert found.keys() == weights.keys()
    assert not any(tensor.undetermined for tensor in found.values())
    assert not run_of(path).findings


def test_a_bare_list_is_held_to_parameters_by_their_order(model):
    path, weights = model
    # `parameters()` of a model has a tied one once.
    trained = [value for name, value in weights.items() if name != "lm_head.weight"]
    torch.save({"decay": 0.9, "shadow_params": trained}, path / "ema_model.pt")
    found = averages(path)
    assert len(found) == len(trained)
    assert found.keys() < weights.keys()
    # As accelerate saves one that the script registered; other objects are none.
    (path / "ema_model.pt").rename(path / "custom_checkpoint_0.pkl")
    torch.save({"sampler": 3}, path / "custom_checkpoint_1.pkl")
    assert averages(path).keys() == found.keys()
    (path / "custom_checkpoint_0.pkl").unlink()
    torch.save({"decay": 0.9, "shadow_params": trained[1:]}, path / "ema_model.pt")
    assert all("which parameter" in tensor.undetermined for tensor in averages(path).values())
    assert not run_of(path).findings


def test_nan_in_the_average_alone(model):
    """ultralytics#24307: the average was poisoned, the model was not."""
    path, weights = model
    name = next(iter(weights))
    weights[name][0, 0] = float("nan")
    torch.save(weights, path / "ema.pt")
    (finding,) = run_of(path).findings
    assert finding.id == "NUM001"
    assert {(place.tensor, place.role, place.file) for place in finding.locations} == {(name, Role.EMA, "ema.pt")}


# Components of diffusers


def component(folder, factor=1.0, *, poison=False):
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weights = {f"down.{at}.weight": torch.randn(4, 3, generator=generator) * factor for at in range(2)}
    if poison:
        weights["down.1.weight"][2, 2] = float("inf")
    (folder / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")


@pytest.fixture
def diffusers(tmp_path):
    """Two steps of a training script with an average, saved by accelerate's `save_state` and its hooks."""
    for step in (500, 1000):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        for part in ("unet", "unet_ema"):
            component(folder / part, step / 500 * (0.9 if part == "unet_ema" else 1.0))
        shutil.copy(FIXTURES / "accelerate_bin" / "step_4" / "random_states_0.pkl", folder)
        torch.save({"last_epoch": step}, folder / "scheduler.bin")
    return tmp_path / "run"


def test_a_step_of_components_is_one_step(diffusers):
    (run,) = discover(LocalStore(diffusers))
    assert [source.match.step for source in run.steps] == [500, 1000]
    assert {source.adapter.name for source in run.steps} == {"hugging-face"}
    catalog = catalog_of(diffusers / "checkpoint-500")
    assert {(tensor.role, tensor.name) for tensor in catalog.tensors} == {
        (role, f"unet.down.{at}.weight") for role in (Role.PARAMETER, Role.EMA) for at in range(2)
    }  # fmt: skip
    assert not run_of(diffusers).findings


def test_infinity_in_the_average_of_a_component(diffusers):
    shutil.rmtree(diffusers / "checkpoint-1000" / "unet_ema")
    component(diffusers / "checkpoint-1000" / "unet_ema", 1.8, poison=True)
    run = run_of(diffusers)
    (finding,) = run.findings
    assert finding.id == "NUM001"
    assert {(place.tensor, place.role, place.file) for place in finding.locations} == {
        ("unet.down.1.weight", Role.EMA, "checkpoint-1000/unet_ema/diffusion_pytorch_model.safetensors")
    }  # fmt: skip
    assert run.last_good.step == 500


def test_a_components_missing_file_is_known_by_its_index(diffusers):
    part = diffusers / "checkpoint-1000" / "unet"
    (part / "diffusion_pytorch_model.safetensors").rename(part / "diffusion_pytorch_model-00001-of-00002.safetensors")
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"down.0.weight": "diffusion_pytorch_model-00001-of-00002.safetensors", '
        '"down.1.weight": "diffusion_pytorch_model-00001-of-00002.safetensors", '
        '"down.2.weight": "diffusion_pytorch_model-00002-of-00002.safetensors"}}'
    )
    catalog = catalog_of(diffusers / "checkpoint-1000")
    missing = [file.name for file in catalog.files if file.state is FileState.MISSING]
    assert missing == ["unet/diffusion_pytorch_model-00002-of-00002.safetensors"]


# Lightning


def test_lightnings_average_is_one_and_the_live_weights_are_the_model(tmp_path):
    """Its callback puts the average in the place of the weights, and those elsewhere."""
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0, 1]}
    for step in (7, 14):
        live = {"layer.weight": torch.ones(3, 2) + step, "layer.bias": torch.ones(3) - step}
        state = {
            at: {"step": torch.tensor(float(step)), "exp_avg": value * 1e-4, "exp_avg_sq": value.square()}
            for at, value in enumerate(live.values())
        }
        torch.save({
            "state_dict": {name: value * 0.5 for name, value in live.items()}, "current_model_state": live,
            "averaging_state": {"n_averaged": torch.tensor(3)}, "global_step": step,
            "optimizer_states": [{"state": state, "param_groups": [group]}],
        }, tmp_path / f"epoch=1-step={step}.ckpt")  # fmt: skip
    run = run_of(tmp_path)
    assert [step.state.step for step in run.steps] == [7, 14]
    assert run.counts("OPT001")[Outcome.HOLDS] == 4
    (source, _) = next(iter(discover(LocalStore(tmp_path)))).steps
    catalog = source.adapter.read(LocalStore(tmp_path), source.folder, source.match, Options())
    keys = {(catalog.tensors[piece.tensor].role, piece.key) for piece in catalog.pieces}
    assert (Role.PARAMETER, "current_model_state.layer.weight") in keys
    assert (Role.EMA, "state_dict.layer.weight") in keys
