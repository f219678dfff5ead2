"""One step of the tiny GPT in JAX, on eight host devices (dp 4, tp 2), saved by Orbax.

`--write FILE` (where torch is) writes the weights and the batch; `--read FILE FOLDER` (where jax is) trains and saves.
"""

import sys
from pathlib import Path

import numpy as np

BETAS, EPSILON, RATE, DECAY, HEADS, LAYERS = (0.9, 0.95), 1e-8, 1e-3, 0.1, 4, 2


def write(target):
    from tests.comparison.gpt import begin, make_batch

    batch = make_batch(0, 1)
    arrays = {
        f"batch/{name}": getattr(batch, name).numpy() for name in ("tokens", "targets", "valid", "attention", "hidden")
    }
    np.savez(target, **arrays, **{name: weight.numpy() for name, weight in begin(0).items()})


def loss(w, batch):
    import jax
    import jax.numpy as jnp

    def norm(at, x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{at}.weight"] + w[f"{at}.bias"]

    hidden = w["embed.weight"][batch["tokens"]] + w["pos.weight"]
    length = hidden.shape[1]
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        x = norm(f"{at}.norm1", hidden)
        q, k, v = (
            (x @ w[f"{at}.attn.{n}.weight"].T + w[f"{at}.attn.{n}.bias"])
            .reshape(*x.shape[:2], HEADS, -1)
            .swapaxes(1, 2)
            for n in "qkv"
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = jnp.where(np.triu(np.ones((length, length), bool), 1), -jnp.inf, scores)
        weights = jax.nn.softmax(scores, -1) * batch["attention"][:, layer]
        mixed = (weights @ v).swapaxes(1, 2).reshape(x.shape) @ w[f"{at}.attn.o.weight"].T + w[f"{at}.attn.o.bias"]
        hidden = hidden + mixed * batch["hidden"][:, layer]
        x = norm(f"{at}.norm2", hidden)
        gate, up = x @ w[f"{at}.mlp.gate.weight"].T, x @ w[f"{at}.mlp.up.weight"].T
        hidden = hidden + (jax.nn.silu(gate) * up) @ w[f"{at}.mlp.down.weight"].T
    logits = norm("norm", hidden) @ w["embed.weight"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
    return -(chosen * batch["valid"]).sum() / batch["valid"].sum()


def nested(flat):
    tree = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def flat_of(tree, path=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat_of(value, f"{path}{name}.")
        else:
            yield path + name, value


def placed(weights):
    """Weights as Megatron cuts them, on a mesh of dp 4 and tp 2."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "tp"))
    found = {}
    for name, weight in weights.items():
        columns = name.split(".")[-2] in ("q", "k", "v", "gate", "up")
        rows = name.endswith((".o.weight", ".down.weight"))
        spec = PartitionSpec("tp") if columns else PartitionSpec(None, "tp") if rows else PartitionSpec()
        found[name] = jax.device_put(weight, NamedSharding(mesh, spec))
    return mesh, found


def train(source, folder):
    import jax
    import optax
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    content = dict(np.load(source))
    batch = {name.removeprefix("batch/"): content.pop(name) for name in list(content) if name.startswith("batch/")}
    mesh, weights = placed(content)
    batch = {name: jax.device_put(value, NamedSharding(mesh, PartitionSpec("dp"))) for name, value in batch.items()}
    tree = nested(weights)
    optimizer = optax.adamw(
        RATE, *BETAS, eps=EPSILON, weight_decay=DECAY, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    )

    @jax.jit
    def step(tree, state):
        gradients = jax.grad(lambda tree: loss(dict(flat_of(tree)), batch))(tree)
        updates, state = optimizer.update(gradients, state, tree)
        return optax.apply_updates(tree, updates), state

    tree, state = step(tree, optimizer.init(tree))
    with ocp.CheckpointManager(Path(folder).absolute()) as manager:
        manager.save(1, args=ocp.args.StandardSave({"params": tree, "opt_state": state, "step": 1}))


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(sys.argv[2])
    else:
        train(sys.argv[2], sys.argv[3])
