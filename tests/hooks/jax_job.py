"""Eight CPU devices whose replicas are made unequal, saved by Orbax.

    python -m tests.hooks.jax_job FOLDER [PROCESS PORT]

With a process's number there are two of them, of four devices each, one for each data-parallel half.
"""

import os
import sys
from pathlib import Path

TOGETHER = len(sys.argv) > 2
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={4 if TOGETHER else 8}")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from auditor.hooks.after_commit import AfterCommit
from auditor.hooks.jax_hook import JaxHook

if TOGETHER:
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", num_processes=2, process_id=int(sys.argv[2]))
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def put(values, *spec):
    return jax.device_put(values, NamedSharding(MESH, PartitionSpec(*spec)))


def drifted(array, data, change):
    """The same array, but what the devices of one data-parallel index hold is changed: JAX does not look."""
    parts = []
    for shard in array.addressable_shards:
        where = np.argwhere(MESH.devices == shard.device)[0]
        values = np.array(shard.data)
        parts.append(jax.device_put(change(values) if where[0] == data else values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def tree(step):
    draw = np.random.default_rng(5)
    made = {
        "step": step,
        "params": {
            "up": put(draw.standard_normal((16, 8)).astype(np.float32) + step, None, "model"),
            "scale": put(draw.standard_normal(16).astype(np.float32) + step),
            "odd": put(draw.standard_normal(7).astype(np.float32)),
        },
    }
    if step >= 2:
        made["params"]["scale"] = drifted(made["params"]["scale"], 1, lambda values: values + np.float32(0.25))
    return made


def main(folder):
    found = []
    after = AfterCommit("thread", "callback", callback=found.append)
    hook = JaxHook(after, raising=True)
    with ocp.CheckpointManager(folder / "run", options=ocp.CheckpointManagerOptions(max_to_keep=None)) as manager:
        for step in (1, 2, 3):
            assert hook.save(manager, step, args=ocp.args.StandardSave(tree(step)))
        hook.close(manager)
    # Of two processes the other's part may come after the audit.
    assert TOGETHER or [report["findings"][0]["id"] for report in found] == ["REP001", "REP001"], found


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
