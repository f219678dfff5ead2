"""Two tensor-parallel ranks that save by megatron-core through the hook: ``python -m tests.hooks.megatron_job FOLDER``.

Step 2 is saved at once, step 4 asynchronously, after a replicated norm drifted on rank 1.
"""

import importlib.util
import sys
from pathlib import Path

import torch

from auditor.hooks.after_commit import AfterCommit
from auditor.hooks.megatron_hook import around_save
from auditor.hooks.torch_hook import TorchHook
from tests.paths import ROOT

_SPEC = importlib.util.spec_from_file_location("make", ROOT / "tests/fixtures/megatron_dist/make.py")
make = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make)

CHOICES = {"preprocess_common_before_consistancy_check": make.without_ranks, "validate_access_integrity": False}


def step(args, model, optimizer, iteration, root, save, drifts=False, **choices):
    make.train(args, model, optimizer, (iteration - 1, iteration))
    if drifts:
        with torch.no_grad():
            dict(model.named_parameters())["decoder.layers.1.input_layernorm.weight"][0] += 1
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = make.state_of(args, iteration, model, optimizer, {})
    return save(iteration, state, folder, ("torch_dist", 1), **CHOICES, **choices)


def work(rank, root, port):
    args, model = make.build(rank, 2, 1, make.LLAMA, port)
    optimizer = make.simple_optimizer(args, model)
    found = []
    hook = TorchHook(AfterCommit("thread", "callback", callback=found.append), raising=True)
    save = around_save(hook)
    assert step(args, model, optimizer, 2, root, save) is None
    request = step(args, model, optimizer, 4, root, save, drifts=rank == 1, async_sharded_save=True)
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    calls = AsyncCallsQueue()
    calls.schedule_async_request(request)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    hook.close()
    if rank == 0:
        (root / make.TRACKER).write_text("4")
        assert [report["findings"][0]["id"] for report in found] == ["REP001"], found
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    make.spawn(work, 2, Path(sys.argv[1]).absolute())
