"""The tiny GPT under FSDP2, two gloo processes, saved by torch.distributed.checkpoint: `… FOLDER RUN…`.

A run is `NAME:SEED:DTYPE:FAULT`. Each is trained for one step, healthy where no fault is named, and saved before it and
after it into FOLDER/NAME. Faults are planted where people plant them: around FSDP2, never in what it computes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.comparison.gpt import BATCH, BETAS, CLIP, DECAY, EPSILON, LAYERS, RATE, Training, begin, make_batch

RANKS = 2
FAULTS = {
    "norms left out of FSDP, their gradients not averaged": "layernorm gradients not summed",
    "gradients summed, not averaged": "gradient times dp",
    "each rank averages its loss over its own tokens": "loss averaged over padding",
    "clipped on rank 0 alone": "clipped on one rank",
    "dropout of rank 0 on both ranks": "dropout shared",
    "tied embedding gradient not summed": "tied embedding",
    "weights of one layer stale": "stale weights",
    "attention scaled by hidden size": "attention scale",
    "gradients reduced in bfloat16": "bf16 accumulation",
    "gate and up exchanged": "gate/up",
    "epsilon of the optimizer": "optimizer epsilon",
    "decay on norms": "decay on norms",
}
"""Planted bug to what it stands for."""


class Gpt(torch.nn.Module):
    """The functional model with its weights as parameters; a dot in a name is no name of an attribute."""

    def __init__(self, weights, fault):
        super().__init__()
        self.fault = fault
        for name, weight in weights.items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(weight))

    def forward(self, batch):
        weights = {name.replace("/", "."): parameter for name, parameter in self.named_parameters()}
        return Training(fault=self.fault).loss(weights, batch)


def weights_of(seed, fault):
    weights = begin(seed)
    if fault == "gate and up exchanged":
        for layer in range(LAYERS):
            gate, up = (f"layers.{layer}.mlp.{name}.weight" for name in ("gate", "up"))
            weights[gate], weights[up] = weights[up], weights[gate]
    return weights


def sharded(seed, dtype, fault):
    model = Gpt(weights_of(seed, fault), fault)
    lost = {p for name, p in model.named_parameters() if "norm" in name} if fault.startswith("norms left out") else None
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype == "bfloat16" else None,
        reduce_dtype=torch.bfloat16 if fault == "gradients reduced in bfloat16" else torch.float32,
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    return fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=lost)


def optimizer_of(model, fault):
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY},
         {"params": vectors, "weight_decay": DECAY if fault == "decay on norms" else 0.0}],
        lr=RATE, betas=BETAS, eps=1e-5 if fault == "epsilon of the optimizer" else EPSILON,
    )  # fmt: skip


def own_part(batch, rank, fault):
    own = batch.take(torch.arange(BATCH).chunk(RANKS)[rank])
    if fault == "dropout of rank 0 on both ranks":
        first = batch.take(torch.arange(BATCH).chunk(RANKS)[0])
        own.attention.copy_(first.attention)
        own.hidden.copy_(first.hidden)
    return own


def clip(model, rank, fault):
    """By the norm of all ranks, as clip_grad_norm_ does; or on one rank alone."""
    local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    square = torch.tensor(sum(float(g.double().square().sum()) for g in local))
    dist.all_reduce(square)
    if rank == 0 or fault != "clipped on rank 0 alone":
        for gradient in local:
            gradient.mul_(min(1.0, CLIP / (float(square.sqrt()) + 1e-6)))


def train(rank, folder, seed, dtype, fault):
    model = sharded(seed, dtype, fault)
    optimizer = optimizer_of(model, fault)
    save(folder / "step-0", model, None)
    batch = make_batch(seed, 1)
    own = own_part(batch, rank, fault)
    valid = own.valid.sum() if fault.startswith("each rank averages") else batch.valid.sum() / RANKS
    if fault == "gradients summed, not averaged":
        valid = valid / RANKS
    # FSDP2 averages over ranks, the loss is a sum over tokens of all.
    (model(own) / valid).backward()
    if fault == "clipped on rank 0 alone":
        clip(model, rank, fault)
    stale = dict(model.named_parameters())["layers/1/mlp/down/weight"]
    kept = stale.detach().clone()
    optimizer.step()
    if fault == "weights of one layer stale":
        stale.detach().copy_(kept)
    save(folder / "step-1", model, optimizer)


def save(folder, model, optimizer):
    state = {"model": {name.replace("/", "."): value for name, value in get_model_state_dict(model).items()}}
    if optimizer is not None:
        found = get_optimizer_state_dict(model, optimizer)
        state["optim"] = {
            "state": {name.replace("/", "."): value for name, value in found["state"].items()},
            "param_groups": [
                {**group, "params": [name.replace("/", ".") for name in group["params"]]}
                for group in found["param_groups"]
            ],
        }
    dcp.save(state, checkpoint_id=folder)


def work(rank, folder, port, runs):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    for run in runs:
        name, seed, dtype, fault = run.split(":")
        train(rank, Path(folder) / name, int(seed), dtype, fault)
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.spawn(work, (sys.argv[1], 29511, sys.argv[2:]), RANKS)
