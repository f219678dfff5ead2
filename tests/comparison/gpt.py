"""A tiny GPT, trained on one device or with the sums of tensor, sequence and data parallelism; or with one bug.

All ranks are computed in one process: each rank's part by itself, then added up in the order of ranks, as an all-reduce
does. So rounding differs as it does between real ranks, and a missing or doubled sum is one that is left out here.
"""

import math
from dataclasses import dataclass, replace

import pytest

from tests.comparison.tree import write_step

torch = pytest.importorskip("torch")
functional = torch.nn.functional

VOCABULARY, HIDDEN, HEADS, LAYERS, LENGTH, BATCH, INNER = 48, 32, 4, 2, 12, 8, 64
BETAS, EPSILON, RATE, DECAY, CLIP, DROPPED = (0.9, 0.95), 1e-8, 1e-3, 0.1, 0.25, 0.1
PADDED = 3
"""Of the last samples, so many tokens are padding."""

FAULTS = {
    "layernorm gradients not summed over tp": {"tp": 2},
    "gradient times dp": {"dp": 2},
    "gradient of row-parallel weights over tp": {"tp": 2},
    "clipped on tp rank 0 alone": {"tp": 2, "clip": CLIP},
    "dropout of tp rank 0 on every rank": {"tp": 2},
    "tied embedding gradient not summed": {"tp": 2},
    "weights of one layer stale": {"dp": 2},
    "attention scaled by hidden size": {"tp": 2},
    "loss averaged over padding": {"dp": 2},
    "microbatches summed in bfloat16": {"micro": 4},
    "gate and up exchanged": {"tp": 2},
    "epsilon of the optimizer": {"tp": 2},
    "no bias correction": {"dp": 2},
    "decay on norms": {"tp": 2},
}
"""Planted bug to the layout in which it happens."""


@dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    seed: int = 0
    tp: int = 1
    dp: int = 1
    micro: int = 1
    dtype: str = "float32"
    steps: int = 1
    fault: str = ""
    perturbed: int = 0
    """Not 0: what goes into the first layer is changed by one distance between numbers, up or down by this seed."""
    every: int = 1
    clip: float = math.inf
    data: int = 0
    """Not 0: the batches of another seed."""

    def run(self, folder):
        """Train, and save step 0 and every so many into ``folder``, which is returned."""
        weights = begin(self.seed)
        if self.fault == "gate and up exchanged":
            for layer in range(LAYERS):
                gate, up = (f"layers.{layer}.mlp.{name}.weight" for name in ("gate", "up"))
                weights[gate], weights[up] = weights[up], weights[gate]
        state = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in weights.items()}
        save(folder, 0, weights, state, self.tp)
        for step in range(1, self.steps + 1):
            gradients = self.clipped(self.gradients(weights, step))
            self.update(weights, state, gradients, step)
            if step % self.every == 0:
                save(folder, step, weights, state, self.tp)
        return folder

    def gradients(self, weights, step):
        """Summed over microbatches and data-parallel ranks, averaged over tokens that aren't padding."""
        batch = make_batch(self.seed + self.data, step)
        parts = self.dp * self.micro
        total = {name: torch.zeros_like(w) for name, w in weights.items()}
        if self.fault == "microbatches summed in bfloat16":
            total = {name: w.bfloat16() for name, w in total.items()}
        valid = batch.tokens.numel() if self.fault == "loss averaged over padding" else int(batch.valid.sum())
        for part in range(parts):
            own = batch.take(torch.arange(BATCH).chunk(parts)[part])
            for name, gradient in self.backward(weights, own, valid).items():
                total[name] += gradient.to(total[name].dtype)
        factor = self.dp if self.fault == "gradient times dp" else 1
        return {name: factor * gradient.float() for name, gradient in total.items()}

    def backward(self, weights, batch, valid):
        leaves = {name: w.to(getattr(torch, self.dtype)).detach().requires_grad_() for name, w in weights.items()}
        (self.loss(leaves, batch) / valid).backward()
        found = {name: leaf.grad.float() for name, leaf in leaves.items()}
        if self.fault == "gradient of row-parallel weights over tp":
            found |= {n: g / self.tp for n, g in found.items() if n.endswith((".o.weight", ".down.weight"))}
        return found

    def loss(self, w, batch):
        """Sum of the cross entropy over tokens that count."""
        hidden = w["embed.weight"][batch.tokens] + w["pos.weight"]
        if self.perturbed:
            signs = torch.randint(0, 2, hidden.shape, generator=torch.Generator().manual_seed(self.perturbed)) * 2 - 1
            hidden = hidden * (1 + signs * torch.finfo(hidden.dtype).eps).to(hidden.dtype)
        for layer in range(LAYERS):
            hidden = self.block(w, layer, hidden, batch)
        hidden = self.norm(w, "norm", hidden)
        head = w["embed.weight"]
        if self.fault == "tied embedding gradient not summed":
            head = head.detach()
        logits = torch.cat([hidden @ part.T for part in head.chunk(self.tp)], -1).float()
        each = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return (each * batch.valid.flatten()).sum()

    def block(self, w, layer, hidden, batch):
        at = f"layers.{layer}"
        inner = self.norm(w, f"{at}.norm1", hidden)
        sums = [self.attention(w, at, inner, batch.attention[:, layer], rank) for rank in range(self.tp)]
        hidden = hidden + (summed(sums) + w[f"{at}.attn.o.bias"]) * batch.hidden[:, layer].to(hidden.dtype)
        inner = self.norm(w, f"{at}.norm2", hidden)
        sums = [self.mlp(w, at, inner, rank) for rank in range(self.tp)]
        return hidden + summed(sums)

    def attention(self, w, at, x, masks, rank):
        own = HEADS // self.tp
        q, k, v = (self.columns(w, f"{at}.attn.{name}", x, rank).unflatten(-1, (own, -1)).transpose(1, 2)
                   for name in "qkv")  # fmt: skip
        wide = self.fault == "attention scaled by hidden size"
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(HIDDEN if wide else q.shape[-1])
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
        first = 0 if self.fault == "dropout of tp rank 0 on every rank" else rank
        weights = scores.softmax(-1).to(x.dtype) * masks[:, first * own : (first + 1) * own].to(x.dtype)
        return (weights @ v).transpose(1, 2).flatten(-2) @ w[f"{at}.attn.o.weight"].chunk(self.tp, 1)[rank].T

    def mlp(self, w, at, x, rank):
        gate, up = (x @ w[f"{at}.mlp.{name}.weight"].chunk(self.tp)[rank].T for name in ("gate", "up"))
        return (functional.silu(gate) * up) @ w[f"{at}.mlp.down.weight"].chunk(self.tp, 1)[rank].T

    def columns(self, w, name, x, rank):
        weight, bias = (w[f"{name}.{part}"].chunk(self.tp)[rank] for part in ("weight", "bias"))
        return x @ weight.T + bias

    def norm(self, w, name, x):
        """Each tensor-parallel rank normalises a part of the sequence, and has a gradient for that part alone."""
        found = []
        for rank, part in enumerate(x.chunk(self.tp, 1)):
            lost = rank and self.fault == "layernorm gradients not summed over tp"
            weight, bias = (w[f"{name}.{p}"].detach() if lost else w[f"{name}.{p}"] for p in ("weight", "bias"))
            found.append(functional.layer_norm(part, (HIDDEN,), weight, bias))
        return torch.cat(found, 1)

    def clipped(self, gradients):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        factor = min(1.0, self.clip / (norm + 1e-6))
        found = {name: g * factor for name, g in gradients.items()}
        if self.fault == "clipped on tp rank 0 alone":
            for name, dim in cut_dims().items():
                parts = [found[name].chunk(self.tp, dim)[0], *gradients[name].chunk(self.tp, dim)[1:]]
                found[name] = torch.cat(parts, dim)
        return found

    def update(self, weights, state, gradients, step):
        """AdamW, decoupled decay on matrices alone."""
        epsilon = 1e-5 if self.fault == "epsilon of the optimizer" else EPSILON
        for name, weight in weights.items():
            m, v = state[name]
            m.mul_(BETAS[0]).add_(gradients[name], alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(gradients[name], gradients[name], value=1 - BETAS[1])
            if self.fault == "weights of one layer stale" and name.startswith("layers.1.mlp.down"):
                continue
            first, second = (1 - beta**step for beta in BETAS)
            if self.fault == "no bias correction":
                first = second = 1.0
            if weight.ndim > 1 or self.fault == "decay on norms":
                weight.mul_(1 - RATE * DECAY)
            weight.sub_(RATE * (m / first) / ((v / second).sqrt() + epsilon))


def summed(parts):
    """An all-reduce: the parts, added up in the order of ranks and in their own dtype."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def cut_dims():
    """Names of the tensors that are cut over tensor-parallel ranks, to the dim."""
    found = {}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        found |= {f"{at}.attn.{name}.{part}": 0 for name in "qkv" for part in ("weight", "bias")}
        found |= {f"{at}.mlp.gate.weight": 0, f"{at}.mlp.up.weight": 0}
        found |= {f"{at}.attn.o.weight": 1, f"{at}.mlp.down.weight": 1}
    return found


def begin(seed):
    """The weights before the first step."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (VOCABULARY, HIDDEN), "pos.weight": (LENGTH, HIDDEN)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        shapes |= {f"{at}.norm1.weight": (HIDDEN,), f"{at}.norm1.bias": (HIDDEN,)}
        for name in "qkvo":
            shapes |= {f"{at}.attn.{name}.weight": (HIDDEN, HIDDEN), f"{at}.attn.{name}.bias": (HIDDEN,)}
        shapes |= {f"{at}.norm2.weight": (HIDDEN,), f"{at}.norm2.bias": (HIDDEN,)}
        shapes |= {f"{at}.mlp.gate.weight": (INNER, HIDDEN), f"{at}.mlp.up.weight": (INNER, HIDDEN)}
        shapes |= {f"{at}.mlp.down.weight": (HIDDEN, INNER)}
    shapes |= {"norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,)}
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    norms = {name for name in shapes if "norm" in name and name.endswith("weight")}
    return {n: 1 + 0.1 * x if n in norms else 0.1 * x if x.ndim == 1 else x / math.sqrt(x.shape[1])
            for n, x in noise.items()}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """One batch, with what is dropped: made for the whole, so that no layout draws otherwise."""

    tokens: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor
    attention: torch.Tensor
    hidden: torch.Tensor

    def take(self, samples):
        """Some of the samples."""
        return Batch(*(getattr(self, name)[samples] for name in ("tokens", "targets", "valid", "attention", "hidden")))


def make_batch(seed, step):
    """The batch of one step."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    stream = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    valid = torch.ones(BATCH, LENGTH)
    valid[-2:, -PADDED:] = 0

    def kept(*shape):
        return (torch.rand(shape, generator=generator) >= DROPPED).float() / (1 - DROPPED)

    return Batch(stream[:, :-1], stream[:, 1:], valid, kept(BATCH, LAYERS, HEADS, LENGTH, LENGTH),
                 kept(BATCH, LAYERS, LENGTH, HIDDEN))  # fmt: skip


def save(folder, step, weights, state, tp=1):
    """As docs/zarr-layout.md has it: weights, and after a step AdamW's moments, with its groups."""
    tensors = {}
    for order, (name, weight) in enumerate(weights.items()):
        how = {"tp": f"shard:{cut_dims()[name]}" if name in cut_dims() else "replicate"}
        said = {"order": order, "mesh": {"tp": tp}, "placement": how if tp > 1 else {}}
        roles = {"parameter": weight}
        if step:
            roles |= dict(zip(("first_moment", "second_moment"), state[name], strict=True))
        tensors |= {(role, name): (values.numpy(), said) for role, values in roles.items()}
    common = {"lr": RATE, "betas": list(BETAS), "eps": EPSILON}
    groups = [
        {"number": number, "file": "zarr.json", "optimizer": "adamw", "step": step,
         "hyperparameters": {**common, "weight_decay": decay},
         "parameters": [name for name, w in weights.items() if (w.ndim > 1) == bool(decay)]}
        for number, decay in enumerate((DECAY, 0.0))
    ]  # fmt: skip
    write_step(folder, step, tensors, mesh={"tp": tp}, groups=groups if step else [])


def faulty(fault, **changes):
    """The training with a planted bug."""
    return replace(Training(fault=fault, **FAULTS[fault]), **changes)


def trusted(fault, **changes):
    """The reference of a planted bug: one device, the same batches."""
    own = {name: value for name, value in FAULTS[fault].items() if name in ("clip", "micro")}
    return replace(Training(**own), **changes)
