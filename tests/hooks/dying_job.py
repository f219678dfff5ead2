"""Four ranks (CPU, gloo) of which some die or come late: ``python -m tests.hooks.dying_job FOLDER``.

Every rank has a disk of its own besides the shared one, and hands its parts to rank 0 through the job's store. Rank 0
saves. Step 1: all is well. Step 2: rank 2 comes late, after the commit. Step 3: rank 3 is killed while it writes its
part, and rank 1 before it begins.
"""

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes

from auditor.hooks.torch_exchange import torch_exchange
from auditor.hooks.torch_hook import TorchHook
from auditor.storage.writer import Draft

RANKS = 4
SECONDS = 1.0


def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def work(rank, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("cpu:gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    shared = TorchHook(raising=True)
    apart = TorchHook(raising=True, exchange=torch_exchange(seconds=SECONDS))
    state = {"weight": torch.arange(12.0).reshape(3, 4)}
    dist.barrier()
    for step in (1, 2, 3):
        paths = [folder / "shared" / f"step-{step}", folder / f"disk{rank}" / f"step-{step}"]
        if step == 2 and rank == 2:
            store_wait(f"committed-{step}")
        if step == 3 and rank == 1:
            killed()
        if step == 3 and rank == 3:
            Draft.publish = killed
        for hook, path in zip((shared, apart), paths, strict=True):
            hook.witness(step, state, path)
        if rank == 0:
            for hook, path in zip((shared, apart), paths, strict=True):
                dcp.save(state, checkpoint_id=path, no_dist=True)
                hook.committed(step, path)
            dist.distributed_c10d._get_default_store().set(f"committed-{step}", b"1")
        store_wait(f"committed-{step}")
    if rank == 0:
        # The store is in this process: the others need it to the end.
        time.sleep(0.5)
    os._exit(0)


def store_wait(key):
    dist.distributed_c10d._get_default_store().wait([key], timedelta(seconds=60))


if __name__ == "__main__":
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    # Forked, so that torch is imported once.
    context = processes.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, Path(sys.argv[1]), port)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    json.dump([one.exitcode for one in ranks], sys.stdout)
