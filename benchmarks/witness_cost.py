"""What a witness costs against the save that it goes before, on the CPU.

    python benchmarks/witness_cost.py FOLDER [--bytes 1G] [--ranks 1] [--repeats 3]

Each rank holds parameters (bf16), masters and both moments (fp32) of a transformer's shapes. Printed are wall and CPU
seconds of the witness and of ``torch.distributed.checkpoint.save`` into FOLDER, their ratio, and bytes a piece. The
first witness also loads the compiled kernels and is printed apart.
"""

import argparse
import os
import shutil
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes

from auditor.configuration import parse_bytes
from auditor.hooks.torch_hook import TorchHook

WIDTH = 2048


def state_of(num_bytes, rank):
    random = torch.Generator().manual_seed(rank)
    state, total, layer = {"model": {}, "optimizer": {}}, 0, 0
    while total < num_bytes:
        for name, shape in (("up", (4 * WIDTH, WIDTH)), ("norm", (WIDTH,))):
            value = torch.randn(shape, generator=random)
            key = f"rank{rank}.layers.{layer}.{name}.weight"
            state["model"][key] = value.bfloat16()
            state["optimizer"][key] = {"master": value, "exp_avg": value * 0.01, "exp_avg_sq": value * value}
            total += value.numel() * 14
        layer += 1
    return state, total


def clocks():
    return time.perf_counter(), time.process_time()


def work(rank, options, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    torch.set_num_threads(1)
    state, total = state_of(options.bytes, rank)
    hook, folder = TorchHook(raising=True, threads=options.threads), Path(options.folder)
    rows = []
    for repeat in range(options.repeats + 1):
        target = folder / f"step-{repeat}"
        dist.barrier()
        before = clocks()
        left = hook.witness(repeat, state, target)
        between = clocks()
        dist.barrier()
        saving = clocks()
        dcp.save(state, checkpoint_id=target)
        after = clocks()
        rows.append(
            [
                *(b - a for a, b in zip(before, between, strict=True)),
                *(b - a for a, b in zip(saving, after, strict=True)),
            ]
        )
        if rank == 0:
            shutil.rmtree(target)
        dist.barrier()
    if rank == 0:
        print(
            f"{total / 2**30:.2f} GiB a rank, {options.ranks} ranks, {left.num_pieces} pieces, "
            f"{left.num_bytes / left.num_pieces:.0f} B a piece"
        )
        print(f"first witness, with loading: {rows[0][0]:.2f} s")
        for name, column in (("wall", 0), ("CPU", 1)):
            witness, save = (sorted(row[at] for row in rows[1:])[options.repeats // 2] for at in (column, column + 2))
            print(f"{name:5} witness {witness:.2f} s, save {save:.2f} s: {100 * witness / save:.0f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--bytes", type=parse_bytes, default=2**30)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    arguments = parser.parse_args()
    processes.start_processes(work, (arguments, port), nprocs=arguments.ranks, start_method="fork")
