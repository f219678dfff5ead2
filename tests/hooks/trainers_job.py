"""Two ranks (CPU, gloo) train by a trainer of others.

    torchrun --nproc-per-node 2 -m tests.hooks.trainers_job trainer|accelerate|lightning FOLDER

DistributedDataParallel: after the first save a weight of rank 1 is changed, and nobody sends it the right one again.
"""

import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch

from auditor.hooks.after_commit import AfterCommit
from auditor.hooks.torch_hook import TorchHook


def change(model):
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 0.5


def hook_of():
    return TorchHook(AfterCommit("thread"), raising=True)


def trainer(folder):
    import transformers

    from auditor.hooks.transformers_callback import AuditorCallback

    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    rows = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(8)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", ddp_backend="gloo",
    )  # fmt: skip

    class Drift(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1 and args.process_index == 1:
                change(model)

    made = transformers.Trainer(transformers.Qwen2ForCausalLM(config), arguments, train_dataset=rows)
    made.add_callback(Drift())
    made.add_callback(AuditorCallback(hook_of()))
    made.train()


def accelerate(folder):
    import accelerate as package

    from auditor.hooks.accelerate_hook import around_save_state

    accelerator = package.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    hook = hook_of()
    save_state = around_save_state(accelerator, hook)
    for step in (1, 2):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        save_state(step, folder / f"step-{step}")
        if accelerator.process_index == 1:
            change(model)
    hook.close()


def lightning(folder):
    import lightning.pytorch as package

    from auditor.hooks.lightning_callback import AuditorCallback

    class Model(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, number):
            return self.layer(batch).sum()

        def on_train_batch_start(self, batch, number):
            if number == 1 and self.global_rank == 1:
                change(self.layer)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    saving = package.callbacks.ModelCheckpoint(
        dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )  # fmt: skip
    made = package.Trainer(
        max_steps=2, accelerator="cpu", strategy="ddp", devices=2, callbacks=[saving, AuditorCallback(hook_of())],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    made.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainer": trainer, "accelerate": accelerate, "lightning": lightning}[sys.argv[1]](Path(sys.argv[2]))
    torch.distributed.destroy_process_group()
