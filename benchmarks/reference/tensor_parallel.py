"""The tiny GPT under tensor and sequence parallelism, gloo processes: `… DEGREE FOLDER RUN…`.

Matrices are cut by torch's `parallelize_module` (DTensor); norms, embeddings and their sums over ranks are those of
sequence parallelism, written out as Megatron does. A run is `NAME:SEED:DTYPE:FAULT`. Each is trained for one step,
healthy where no fault is named, and saved before it and after it by torch.distributed.checkpoint into FOLDER/NAME.
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.reference.fsdp2 import optimizer_of, save, weights_of
from tests.comparison.gpt import CLIP, HEADS, HIDDEN, INNER, LAYERS, LENGTH, VOCABULARY, make_batch

functional, nn = torch.nn.functional, torch.nn
FAULTS = {
    "norms' gradients not summed over tp": "layernorm gradients not summed",
    "replicated weights' gradients averaged, not summed": "gradient over tp",
    "gradients of row-parallel weights times tp": "gradient times tp",
    "clipped on rank 0 alone": "clipped on one rank",
    "attention dropout of rank 0 on all ranks": "dropout shared",
    "hidden dropout of rank 0 on all ranks": "dropout shared",
    "tied embedding gradient not summed": "tied embedding",
    "weights of one layer stale": "stale weights",
    "attention scaled by hidden size": "attention scale",
    "loss averaged over padding": "loss averaged over padding",
    "gradients summed over tp in bfloat16": "bf16 accumulation",
    "gate and up exchanged": "gate/up",
    "epsilon of the optimizer": "optimizer epsilon",
    "decay on norms": "decay on norms",
}
"""Planted bug to what it stands for."""


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x, masks, width):
        """``x``: this rank's part of the sequence; ``masks``: what is dropped of its own heads."""
        own = masks.shape[1]
        q, k, v = (part(x).unflatten(-1, (own, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(width or q.shape[-1])
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
        weights = scores.softmax(-1).to(v.dtype) * masks.to(v.dtype)
        return self.o((weights @ v).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(HIDDEN), Attention(), nn.LayerNorm(HIDDEN), Mlp()


class Gpt(nn.Module):
    """Between blocks each rank holds its part of the sequence."""

    def __init__(self, weights):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)
        self.load_state_dict(weights)

    def forward(self, batch, rank, degree, fault):
        """Sum of the cross entropy over this rank's tokens that count."""

        def part(values, dim, at=rank):
            return values.chunk(degree, dim)[at]

        shared = {f"{kind} dropout of rank 0 on all ranks": kind for kind in ("attention", "hidden")}.get(fault)
        heads, places = (0 if shared == kind else rank for kind in ("attention", "hidden"))
        hidden = self.embed(part(batch.tokens, 1)) + part(self.pos.weight, 0)
        for number, block in enumerate(self.layers):
            masks = part(batch.attention[:, number], 1, heads)
            width = HIDDEN if fault == "attention scaled by hidden size" else 0
            mixed = block.attn(block.norm1(hidden), masks, width)
            hidden = hidden + mixed * part(batch.hidden[:, number], 1, places).to(mixed.dtype)
            hidden = hidden + block.mlp(block.norm2(hidden))
        head = self.embed.weight
        if fault == "tied embedding gradient not summed":
            head = head.detach()
        logits = functional.linear(self.norm(hidden), head).float()
        targets, valid = (part(values, 1).flatten() for values in (batch.targets, batch.valid))
        return (functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none") * valid).sum()


def parallel(model, mesh):
    """Matrices as Megatron cuts them: what goes in is gathered over the sequence, what comes out is scattered."""
    columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    for number in range(LAYERS):
        plan = {f"layers.{number}.attn.{name}": columns for name in "qkv"} | {f"layers.{number}.attn.o": rows}
        plan |= {f"layers.{number}.mlp.{name}": columns for name in ("gate", "up")}
        parallelize_module(model, mesh, plan | {f"layers.{number}.mlp.down": rows})
    return model


def is_cut(parameter):
    return hasattr(parameter, "to_local")


def add_up(model, degree, fault):
    """Gradients of what every rank holds whole: each has them for its part of the sequence."""
    for name, parameter in model.named_parameters():
        if is_cut(parameter):
            if fault == "gradients of row-parallel weights times tp" and name.endswith((".o.weight", ".down.weight")):
                parameter.grad.mul_(degree)
            continue
        if fault == "norms' gradients not summed over tp" and "norm" in name:
            continue
        if fault == "gradients summed over tp in bfloat16":
            coarse = parameter.grad.bfloat16()
            dist.all_reduce(coarse)
            parameter.grad.copy_(coarse)
        else:
            dist.all_reduce(parameter.grad)
        if fault == "replicated weights' gradients averaged, not summed":
            parameter.grad.div_(degree)


def clip(model, rank, fault):
    """By the norm of all gradients, each once; or on one rank alone, of what it holds a part of."""
    cut, whole = torch.zeros(()), 0.0
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if is_cut(parameter) else parameter.grad
        square = float(gradient.double().square().sum())
        sharded = is_cut(parameter) and any(isinstance(how, Shard) for how in parameter.grad.placements)
        cut, whole = (cut + square, whole) if sharded else (cut, whole + square)
    dist.all_reduce(cut)
    factor = min(1.0, CLIP / (math.sqrt(float(cut) + whole) + 1e-6))
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if is_cut(parameter) else parameter.grad
        if rank == 0 or not is_cut(parameter) or fault != "clipped on rank 0 alone":
            gradient.mul_(factor)


def train(rank, degree, folder, seed, dtype, fault):
    mesh = dist.device_mesh.init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
    model = parallel(Gpt(weights_of(seed, fault)), mesh)
    optimizer = optimizer_of(model, fault)
    save(folder / "step-0", model, None)
    batch = make_batch(seed, 1)
    valid = batch.valid.numel() if fault == "loss averaged over padding" else batch.valid.sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = model(batch, rank, degree, fault)
    (loss / valid).backward()
    add_up(model, degree, fault)
    if fault == "clipped on rank 0 alone":
        clip(model, rank, fault)
    stale = model.layers[1].mlp.down.weight.to_local()
    kept = stale.detach().clone()
    optimizer.step()
    if fault == "weights of one layer stale":
        stale.detach().copy_(kept)
    save(folder / "step-1", model, optimizer)


def work(rank, degree, folder, port, runs):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=degree)
    torch.set_num_threads(1)
    for run in runs:
        name, seed, dtype, fault = run.split(":")
        train(rank, degree, Path(folder) / name, int(seed), dtype, fault)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert HEADS % int(sys.argv[1]) == 0
    processes.spawn(work, (int(sys.argv[1]), sys.argv[2], 29512, sys.argv[3:]), int(sys.argv[1]))
