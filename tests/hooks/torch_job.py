"""Four ranks (CPU, gloo) save in several ways through the hook: ``python -m tests.hooks.torch_job FOLDER``.

What is true is known beforehand: replicas that are changed here by hand are the ones that the audit must name.
"""

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from auditor.hooks.torch_hook import TorchHook

RANKS = 4


def some(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape))).to(dtype)


def laid(mesh, *placements):
    """The same tensors on a mesh."""
    lay = {"up.weight": some(8, 6), "norm.weight": some(8), "low": some(12, 4, dtype=torch.bfloat16)}
    return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in lay.items()}


def changed(value):
    """The same with one element of this rank's part changed."""
    local = value.to_local() if hasattr(value, "to_local") else value
    local.view(-1)[0] += 1
    return value


def hsdp(rank, hook, run):
    """Sharded over two, replicated over two; at step 2 a replica drifts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    state = {"model": laid(mesh, Replicate(), Shard(0)), "step": 1}
    hook.save(1, state, run / "step-1")
    if rank == 2:
        changed(state["model"]["norm.weight"])
    hook.save(2, {**state, "step": 2}, run / "step-2")


def two_dims(rank, hook, run):
    """Cut along both dims: parts are boxes that are no flat range."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensors = {"up.weight": distribute_tensor(some(8, 6), mesh, (Shard(0), Shard(1))),
               "down.weight": distribute_tensor(some(6, 8), mesh, (Replicate(), Shard(1)))}  # fmt: skip
    hook.save(1, {"model": tensors}, run / "step-1")
    if rank == 3:
        changed(tensors["down.weight"])
    hook.save(2, {"model": tensors}, run / "step-2")


def ddp(rank, hook, run):
    """Whole on every rank, saved by DCP; then by torch.save, a file a rank."""
    state = {"model": {"up.weight": some(8, 6), "norm.weight": some(8), "seen": torch.full((3,), float(rank))}}
    hook.witness(1, state, run / "step-1", buffers=["seen"])
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=run / "step-1")
    if rank == 1:
        changed(state["model"]["up.weight"])
    hook.witness(2, state, run / "step-2", buffers=["seen"])
    dcp.save(state, checkpoint_id=run / "step-2")


def plain(rank, hook, run):
    """torch.save, a file a rank: every replica is on disk, and is what was in memory."""
    for step in (1, 2):
        state = {"model": {"up.weight": some(8, 6), "norm.weight": some(8)}, "step": step}
        target = run / f"step_{step}"
        hook.witness(step, state, target)
        target.mkdir(parents=True, exist_ok=True)
        if step == 2 and rank == 1:
            changed(state["model"]["norm.weight"])
        dist.barrier()
        torch.save(state, target / f"rank_{rank}.pt")


def asynchronous(rank, hook, run):
    """async_save; at step 2 weights change behind its back, as when nothing is staged."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    state = {"model": laid(mesh, Shard(0))}
    hook.async_save(1, state, run / "step-1").result()
    dist.barrier()
    hook.witness(2, state, run / "step-2")
    changed(state["model"]["up.weight"])
    import torch.distributed.checkpoint as dcp

    dcp.async_save(state, checkpoint_id=run / "step-2").result()


def odd(rank, hook, run):
    """What must not stop a job: meta tensors, nothing of a tensor, NaN everywhere, objects; a rank leaves none."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    tensors = {"short": distribute_tensor(some(2, 3), mesh, (Shard(0),)),
               "nan": distribute_tensor(torch.full((8,), torch.nan), mesh, (Replicate(),)),
               "scalar": torch.tensor(3.0), "none": torch.zeros(0, 4), "flag": torch.tensor([True, False])}  # fmt: skip
    state = {"model": tensors, "note": "text", "lr": 0.1}
    hook.save(1, state, run / "step-1")
    hook.witness(2, {**state, "meta": torch.empty(3, device="meta")}, run / "step-2")
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=run / "step-2")
    if rank != 3:
        hook.witness(3, state, run / "step-3")
    dcp.save(state, checkpoint_id=run / "step-3")


def resharded(rank, hook, run):
    """The mesh changes between two steps."""
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    hook.save(1, {"model": laid(first, Replicate(), Shard(0))}, run / "step-1")
    second = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    hook.save(2, {"model": laid(second, Shard(0))}, run / "step-2")


SCENES = (hsdp, two_dims, ddp, plain, asynchronous, odd, resharded)


def work(rank, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("cpu:gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    hook = TorchHook(raising=True)
    for scene in SCENES:
        scene(rank, hook, folder / scene.__name__)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    # Forked, so that torch is imported once.
    processes.start_processes(work, (Path(sys.argv[1]), port), nprocs=RANKS, start_method="fork")
