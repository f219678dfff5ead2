"""The hook in the trainers of others: each with the real package, where it is installed."""

import warnings

import pytest

from auditor.audit import audit
from auditor.hooks.after_commit import AfterCommit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.witnesses import read_witness, witness_folder
from tests.faults import poke

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def told():
    """What the audits after commits said: numbers by step."""
    return {}


@pytest.fixture
def hook(told):
    from auditor.hooks.torch_hook import TorchHook

    return TorchHook(AfterCommit("wait", log=lambda found, step: told.setdefault(step, {}).update(found)), raising=True)


def judged(run, step, identifier="INT014"):
    (found,) = audit(LocalStore(run), Settings(level=Level.VALUES)).runs
    return next(item for item in found.steps if item.state.step == step).judgements[identifier]


def test_hugging_face_trainer(tmp_path, hook, told):
    transformers = pytest.importorskip("transformers")
    from auditor.hooks.transformers_callback import AuditorCallback

    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    rows = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[AuditorCallback(hook)]).train()
    assert [told[step]["auditor/errors"] for step in (1, 2)] == [0, 0]
    number = len({parameter.data_ptr() for parameter in model.parameters()})
    # Every parameter, its counter and both of its moments.
    for step in (1, 2):
        assert judged(tmp_path / "run", step).num_holds == 4 * number
    poke(tmp_path / "run", 2, "model.norm.weight", flip=1)
    poke(tmp_path / "run", 1, "model.norm.weight", "second_moment", flip=1)
    for step, role in ((2, "parameter"), (1, "second_moment")):
        (violation,) = judged(tmp_path / "run", step).violations
        assert [(x.tensor, x.role.value) for x in violation.locations] == [("model.norm.weight", role)]


def test_accelerate(tmp_path, hook, told):
    accelerate = pytest.importorskip("accelerate")
    from auditor.hooks.accelerate_hook import around_save_state

    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    save_state = around_save_state(accelerator, hook)
    for step in (1, 2):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        save_state(step, tmp_path / "run" / f"step-{step}")
    witness = read_witness(LocalStore(tmp_path / "run"), witness_folder("step-2"), 2)
    assert witness.lacks == ""
    assert {tensor.name for tensor in witness.tensors} > {*model.state_dict(), "state.3.exp_avg_sq"}
    assert judged(tmp_path / "run", 2).num_holds == 4 * 4
    assert told[2]["auditor/errors"] == 0


def test_lightning(tmp_path, hook):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning.pytorch")
    from auditor.hooks.lightning_callback import AuditorCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, number):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    saving = lightning.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "run", every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", callbacks=[saving, AuditorCallback(hook)], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    witness = read_witness(LocalStore(tmp_path / "run"), witness_folder("step=2.ckpt"), 2)
    stored = torch.load(tmp_path / "run" / "step=2.ckpt", weights_only=False)
    names = {tensor.name for tensor in witness.tensors}
    assert {f"state_dict.{key}" for key in stored["state_dict"]} < names
    assert any(name.endswith("exp_avg_sq") for name in names)
