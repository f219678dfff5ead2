"""The tiny GPT in JAX, on eight host devices, saved by Orbax: `--read FILE FOLDER RUN…`, `--write FILE SEED…` before.

`--write` (where torch is) writes weights and batches; `--read` (where jax is) trains one step and saves before it and
after it. A run is `NAME:SEED:LAYOUT:FAULT`: layout `gspmd` cuts weights and batch over dp 4 and tp 2 and lets XLA add
up; `shard_map` runs eight data-parallel devices that add up by hand, where a sum can be left out.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np

BETAS, EPSILON, RATE, DECAY, HEADS, LAYERS, CLIP = (0.9, 0.95), 1e-8, 1e-3, 0.1, 4, 2, 0.25
RANKS = 8
FAULTS = {
    "norms' gradients without psum": ("shard_map", "layernorm gradients not summed"),
    "psum where pmean was meant": ("shard_map", "gradient times dp"),
    "each device averages its loss over its own tokens": ("shard_map", "loss averaged over padding"),
    "clipped by each device's own norm": ("shard_map", "clipped on one rank"),
    "dropout of device 0 on all": ("shard_map", "dropout shared"),
    "psum in bfloat16": ("shard_map", "bf16 accumulation"),
    "tied embedding gradient not summed": ("gspmd", "tied embedding"),
    "weights of one layer stale": ("gspmd", "stale weights"),
    "attention scaled by hidden size": ("gspmd", "attention scale"),
    "loss averaged over padding": ("gspmd", "loss averaged over padding"),
    "gate and up exchanged": ("gspmd", "gate/up"),
    "epsilon of the optimizer": ("gspmd", "optimizer epsilon"),
    "decay on norms": ("gspmd", "decay on norms"),
}
"""Planted bug to the layout in which it is planted, and what it stands for."""


def write(target, seeds):
    from tests.comparison.gpt import begin, make_batch

    arrays = {}
    for seed in seeds:
        batch = make_batch(int(seed), 1)
        for name in ("tokens", "targets", "valid", "attention", "hidden"):
            arrays[f"{seed}/batch/{name}"] = getattr(batch, name).numpy()
        arrays |= {f"{seed}/{name}": weight.numpy() for name, weight in begin(int(seed)).items()}
    np.savez(target, **arrays)


def total_loss(w, batch, fault):
    """Sum of the cross entropy over tokens that count."""
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
        width = x.shape[-1] if fault == "attention scaled by hidden size" else q.shape[-1]
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(width)
        scores = jnp.where(np.triu(np.ones((length, length), bool), 1), -jnp.inf, scores)
        weights = jax.nn.softmax(scores, -1) * batch["attention"][:, layer]
        mixed = (weights @ v).swapaxes(1, 2).reshape(x.shape) @ w[f"{at}.attn.o.weight"].T + w[f"{at}.attn.o.bias"]
        hidden = hidden + mixed * batch["hidden"][:, layer]
        x = norm(f"{at}.norm2", hidden)
        gate, up = x @ w[f"{at}.mlp.gate.weight"].T, x @ w[f"{at}.mlp.up.weight"].T
        hidden = hidden + (jax.nn.silu(gate) * up) @ w[f"{at}.mlp.down.weight"].T
    head = w["embed.weight"]
    if fault == "tied embedding gradient not summed":
        head = jax.lax.stop_gradient(head)
    logits = norm("norm", hidden) @ head.T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
    return -(chosen * batch["valid"]).sum()


def mean_gradients(w, batch, fault):
    """What XLA adds up itself."""
    import jax

    count = batch["valid"].size if fault == "loss averaged over padding" else batch["valid"].sum()
    return jax.grad(lambda w: total_loss(w, batch, fault) / count)(w)


def device_gradients(fault, w, batch):
    """One device's part, added up by hand."""
    import jax
    import jax.numpy as jnp

    count = batch["valid"].sum()
    if fault != "each device averages its loss over its own tokens":
        count = jax.lax.psum(count, "dp") / RANKS
    found = jax.grad(lambda w: total_loss(w, batch, fault) / count)(w)
    add = jax.lax.psum if fault == "psum where pmean was meant" else jax.lax.pmean
    if fault == "psum in bfloat16":
        found = jax.tree.map(lambda g: add(g.astype(jnp.bfloat16), "dp").astype(jnp.float32), found)
    else:
        lost = fault == "norms' gradients without psum"
        found = {name: g if lost and "norm" in name else add(g, "dp") for name, g in found.items()}
    if fault == "clipped by each device's own norm":
        # The norm of what this device would hold of every gradient, an eighth of each, in place of the whole one's.
        first = jax.lax.axis_index("dp")
        parts = [jnp.array_split(g.ravel(), RANKS) for g in found.values()]
        squares = jnp.stack([sum((part[rank] ** 2).sum() for part in parts) for rank in range(RANKS)])
        factor = jnp.minimum(1.0, CLIP / (jnp.sqrt(squares[first]) + 1e-6))
        found = jax.tree.map(lambda g: g * factor, found)
    return found


def nested(flat):
    tree = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def placed(weights, batch, layout):
    """Weights and batch on their devices: as Megatron cuts them on a mesh of dp 4 and tp 2, or copies on dp 8."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    degrees = (4, 2) if layout == "gspmd" else (RANKS, 1)
    mesh = Mesh(np.array(jax.devices()).reshape(degrees), ("dp", "tp"))
    found = {}
    for name, weight in weights.items():
        columns = name.split(".")[-2] in ("q", "k", "v", "gate", "up")
        rows = name.endswith((".o.weight", ".down.weight"))
        spec = PartitionSpec("tp") if columns else PartitionSpec(None, "tp") if rows else PartitionSpec()
        found[name] = jax.device_put(weight, NamedSharding(mesh, spec))
    cut = NamedSharding(mesh, PartitionSpec("dp"))
    return mesh, found, {name: jax.device_put(value, cut) for name, value in batch.items()}


def gradients_of(mesh, layout, fault):
    import jax
    from jax.sharding import PartitionSpec

    if layout == "gspmd":
        return partial(mean_gradients, fault=fault)
    return jax.shard_map(
        partial(device_gradients, fault), mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("dp")),
        out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip


def changed(weights, batch, fault):
    """Weights and batch with what is wrong before training."""
    if fault == "gate and up exchanged":
        swap = {"gate": "up", "up": "gate"}
        parts = {name: name.split(".") for name in weights}
        weights = {
            name: weights[".".join([*p[:-2], swap.get(p[-2], p[-2]), p[-1]]) if len(p) > 2 else name]
            for name, p in parts.items()
        }
    if fault == "dropout of device 0 on all":
        each = len(batch["tokens"]) // RANKS
        batch = {n: np.concatenate([x[:each]] * RANKS) if n in ("attention", "hidden") else x for n, x in batch.items()}
    return weights, batch


def train(content, folder, seed, layout, fault):
    import jax
    import optax
    import orbax.checkpoint as ocp

    own = {name.removeprefix(f"{seed}/"): value for name, value in content.items() if name.startswith(f"{seed}/")}
    batch = {name.removeprefix("batch/"): own.pop(name) for name in list(own) if name.startswith("batch/")}
    mesh, weights, batch = placed(*changed(own, batch, fault), layout)
    decayed = {name: fault == "decay on norms" or weight.ndim > 1 for name, weight in weights.items()}
    optimizer = optax.adamw(
        RATE, *BETAS, eps=1e-5 if fault == "epsilon of the optimizer" else EPSILON, weight_decay=DECAY, mask=decayed
    )
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state, batch):
        gradients = gradients_of(mesh, layout, fault)(weights, batch)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    after, state = step(weights, state, batch)
    if fault == "weights of one layer stale":
        after["layers.1.mlp.down.weight"] = weights["layers.1.mlp.down.weight"]
    with ocp.CheckpointManager(folder.absolute()) as manager:
        manager.save(0, args=ocp.args.StandardSave({"params": nested(weights), "step": 0}))
        tree = {"params": nested(after), "opt_state": named(state), "step": 1}
        manager.save(1, args=ocp.args.StandardSave(tree))


def named(state):
    """The optimizer's state with its moments as trees of the model's form."""
    import jax

    return jax.tree.map(
        lambda part: nested(part) if isinstance(part, dict) else part, state, is_leaf=lambda x: isinstance(x, dict)
    )


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(sys.argv[2], sys.argv[3:])
    else:
        held = dict(np.load(sys.argv[2]))
        for run in sys.argv[4:]:
            name, *rest = run.split(":")
            train(held, Path(sys.argv[3]) / name, *rest)
