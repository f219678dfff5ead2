"""Two ranks that save by DeepSpeed through the hook: ``python -m tests.hooks.deepspeed_job FOLDER STAGE RANK PORT``."""

import importlib
import os
import sys

_, folder, stage, rank, port = sys.argv
os.environ.update(
    WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank, LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
)  # fmt: skip

import deepspeed
import torch

from auditor.hooks.after_commit import AfterCommit
from auditor.hooks.deepspeed_hook import around_save_checkpoint
from auditor.hooks.torch_hook import TorchHook

# Its operation for shared memory would be compiled first, for a minute; gloo does without.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Linear(10, 3))
config = {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": int(stage)},
    "zero_allow_untested_optimizer": True,
}  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
hook = TorchHook(AfterCommit("wait", "raise"), raising=True)
save_checkpoint = around_save_checkpoint(engine, hook)
for _ in range(2):
    loss = engine(torch.randn(2, 6, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    save_checkpoint(folder)
