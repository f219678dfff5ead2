"""Trains a small model in JAX on eight CPU devices (data 2 x model 4) and saves it by Orbax's CheckpointManager.

    python samples/jax_replica_drift/train.py FOLDER faulty|healthy     writes FOLDER, and FOLDER.json beside it

Parameters are replicated over `data`. After every step the script limits the norm's scale on the host, device by
device, by a limit that hosts read from their own settings; in `faulty`, from step 25 on, the second one's is lower. JAX
takes the buffers back as one replicated array without looking, and Orbax saves it without complaint: half of the
elements from each replica. What is true is compared by numpy alone, buffer by buffer, and written into FOLDER.json.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from auditor.hooks.jax_hook import JaxHook

SEED, STEPS, SAVE_EVERY, FAULT_FROM, WIDTH = 20261130, 50, 10, 25, 16
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
SPECS = {"up": (None, "model"), "down": ("model", None), "scale": ()}


def initial():
    draw = np.random.default_rng(SEED)
    made = {"up": draw.standard_normal((WIDTH, 2 * WIDTH)) / 4, "down": draw.standard_normal((2 * WIDTH, WIDTH)) / 4,
            "scale": np.ones(WIDTH)}  # fmt: skip
    return {
        name: jax.device_put(value.astype(np.float32), NamedSharding(MESH, PartitionSpec(*SPECS[name])))
        for name, value in made.items()
    }


@jax.jit
def step_of(params, momentum, inputs):
    def loss(params):
        normed = params["scale"] * inputs / jnp.sqrt(jnp.square(inputs).mean(-1, keepdims=True))
        return jnp.square(jnp.tanh(normed @ params["up"]) @ params["down"] - 2 * inputs).mean()

    gradients = jax.grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.05 * m, params, momentum), momentum


def limited(array, limits):
    """The same array, every buffer limited on the host of its device."""
    parts = []
    for shard in array.addressable_shards:
        host = int(np.argwhere(MESH.devices == shard.device)[0][0])
        parts.append(jax.device_put(np.minimum(np.array(shard.data), limits[host]), shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def apart(tree):
    """Key of every array whose buffers for one region differ, to the largest difference; by numpy alone."""
    found = {}
    for name, own in tree.items():
        for key, array in own.items():
            buffers = {}
            for shard in array.addressable_shards:
                buffers.setdefault(str(shard.index), []).append(np.asarray(shard.data))
            gap = max(float(np.abs(other - of[0]).max()) for of in buffers.values() for other in of)
            if gap > 0:
                found[f"{name}.{key}"] = gap
    return found


def main(folder, faulty):
    params = initial()
    momentum = jax.tree.map(jnp.zeros_like, params)
    draw, truth, hook = np.random.default_rng(SEED + 1), {}, JaxHook()
    everywhere = NamedSharding(MESH, PartitionSpec())
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=None)) as manager:
        for step in range(1, (STEPS if faulty else STEPS // 2) + 1):
            inputs = jax.device_put(draw.standard_normal((8, WIDTH)).astype(np.float32), everywhere)
            params, momentum = step_of(params, momentum, inputs)
            limits = (1.05, 1.02) if faulty and step >= FAULT_FROM else (1.05, 1.05)
            params["scale"] = limited(params["scale"], np.float32(limits))
            if step % SAVE_EVERY == 0:
                tree = {"params": params, "momentum": momentum}
                truth[step] = apart(tree)
                hook.save(manager, step, args=ocp.args.StandardSave(tree))
        hook.close(manager)
    folder.with_suffix(".json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2] == "faulty")
