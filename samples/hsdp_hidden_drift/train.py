"""Trains a small language model with HSDP on four CPU processes and saves it by torch.distributed.checkpoint.

    python samples/hsdp_hidden_drift/train.py FOLDER faulty|healthy     writes FOLDER, and FOLDER.json beside it

Mesh 2 x 2: parameters are sharded over `dp_shard` and replicated over `dp_replicate`. The script clips gradients by a
helper of its own; in `faulty`, from step 35 on, it leaves the norms out on every replica but the first. The replicas of
three norm weights then drift apart. DCP writes one replica alone, so nothing of it is on disk; the hook's witness,
taken before each save, has it. What is true is found by torch alone, in memory, and written into FOLDER.json.
"""

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from auditor.hooks.torch_hook import TorchHook

SEED, STEPS, SAVE_EVERY, FAULT_FROM = 20261130, 60, 10, 35
RANKS, VOCABULARY, WIDTH, MAX_NORM = 4, 17, 8, 0.15


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def clip(model, mesh, *, leave_out_norms):
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
    factor = min(1.0, float(MAX_NORM / total))
    for name, parameter in model.named_parameters():
        if not (leave_out_norms and "norm" in name and mesh["dp_replicate"].get_local_rank() > 0):
            parameter.grad.mul_(factor)


def apart(state, mesh):
    """Key of every tensor that differs between the two replicas, to the largest difference; by torch alone."""
    found = {}
    for key, value in state.items():
        mine = value.to_local() if isinstance(value, DTensor) else value
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine.contiguous(), group=mesh["dp_replicate"].get_group())
        gap = (both[0].double() - both[1].double()).abs().max() if mine.numel() else torch.zeros(())
        dist.all_reduce(gap, dist.ReduceOp.MAX)
        if gap > 0:
            found[key] = float(gap)
    return found


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def train(rank, folder, faulty, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    hook = TorchHook()
    tokens = torch.Generator().manual_seed(SEED + 1 + rank)
    truth = {}
    for step in range(1, (STEPS if faulty else STEPS // 2) + 1):
        batch = torch.randint(VOCABULARY, (4, 8), generator=tokens)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip(model, mesh, leave_out_norms=faulty and step >= FAULT_FROM)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            weights, optimizing = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": optimizing, "step": step}
            tensors = {key: value for key, value in flatten_state_dict(state)[0].items() if torch.is_tensor(value)}
            truth[step] = apart(tensors, mesh)
            hook.save(step, state, folder / f"step-{step}")
    if rank == 0:
        folder.with_suffix(".json").write_text(json.dumps(truth, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    processes.spawn(train, (target, sys.argv[2] == "faulty", free_port()), nprocs=RANKS)
