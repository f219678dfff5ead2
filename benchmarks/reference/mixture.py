"""How far tokens that change their expert lead gradients apart: `python -m benchmarks.reference.mixture`.

A tiny mixture of experts (two layers, eight experts, the best two of them) in bfloat16, its weights in float32: on one
device, and with matrices that are summed over two tensor-parallel ranks, each rank's part by itself. The constants of
`Model.jump` in `auditor/comparison/rounding.py` are held against what comes of it.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import auditor
from auditor.comparison.outcome import DIFFERENT, Standing
from auditor.model.catalog import Role
from benchmarks.reference.measure import header, row
from tests.comparison.tree import write_step

nn, functional = torch.nn, torch.nn.functional
HIDDEN, INNER, HEADS, EXPERTS, CHOSEN, LAYERS, VOCABULARY, STEPS = 32, 32, 4, 8, 2, 2, 48, 3
RATE, BETAS = 1e-3, (0.9, 0.95)
SIZES = ((8, 16), (16, 64))
"""Batch and length."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"w1": nn.Linear(HIDDEN, INNER, bias=False), "w2": nn.Linear(INNER, HIDDEN, bias=False)})
            for _ in range(EXPERTS)
        )

    def forward(self, x, tp, routes):
        own = self.norm1(x)
        q, k, v = (part(own).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + over_ranks(mixed, self.o.weight, tp)
        own = self.norm2(x).flatten(0, 1)
        best, at = self.router(own).float().softmax(-1).topk(CHOSEN, -1)
        routes.append(at.sort(-1)[0])
        weights, total = (best / best.sum(-1, keepdim=True)).to(own.dtype), torch.zeros_like(own)
        for number, expert in enumerate(self.experts):
            token, place = (at == number).nonzero(as_tuple=True)
            found = over_ranks(functional.silu(expert["w1"](own[token])), expert["w2"].weight, tp)
            total = total.index_add(0, token, found * weights[token, place, None])
        return x + total.view_as(x)


def over_ranks(x, weight, tp):
    """A product whose sum is cut over ranks, added up in their order."""
    parts = [a @ b.T for a, b in zip(x.chunk(tp, -1), weight.chunk(tp, 1), strict=True)]
    return sum(parts[1:], parts[0])


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, HIDDEN), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens, tp, routes):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, tp, routes)
        return self.head(self.norm(x))


def train(folder, seed, batch, length, tp):
    """Save every step into ``folder``; returns the experts of every token."""
    torch.manual_seed(seed)
    model, narrow, routes = Mixture(), Mixture().bfloat16(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    save(folder, 0, model, optimizer)
    for step in range(1, STEPS + 1):
        stream = torch.randint(0, VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(step))
        narrow.load_state_dict(model.state_dict())
        narrow.zero_grad()
        found = narrow(stream[:, :-1], tp, routes).float().flatten(0, 1)
        functional.cross_entropy(found, stream[:, 1:].flatten()).backward()
        for own, other in zip(model.parameters(), narrow.parameters(), strict=True):
            own.grad = other.grad.float()
        optimizer.step()
        save(folder, step, model, optimizer)
    return routes


def save(folder, step, model, optimizer):
    tensors, names = {}, [name for name, _ in model.named_parameters()]
    for order, (name, parameter) in enumerate(model.named_parameters()):
        state = optimizer.state.get(parameter, {})
        roles = {"parameter": parameter.detach()}
        roles |= {"first_moment": state["exp_avg"], "second_moment": state["exp_avg_sq"]} if state else {}
        tensors |= {(role, name): (values.numpy().copy(), {"order": order}) for role, values in roles.items()}
    group = {"number": 0, "file": "zarr.json", "optimizer": "adamw", "step": step, "parameters": names,
             "hyperparameters": {"lr": RATE, "betas": list(BETAS), "eps": 1e-8, "weight_decay": 0.0}}  # fmt: skip
    write_step(folder, step, tensors, groups=[group] if step else [])


def measured(batch, length, seeds):
    changed = total = alarms = suspicious = 0
    worst = {"experts, routers": (0.0, 0.0), "other": (0.0, 0.0)}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            one, two = (train(Path(name) / str(tp), seed, batch, length, tp) for tp in (1, 2))
            found = auditor.compare(f"{name}/1", f"{name}/2", compute="bfloat16")
        changed += sum(int((a != b).any(-1).sum()) for a, b in zip(one, two, strict=True))
        total += sum(len(a) for a in one)
        for step in found.steps[1:]:
            alarms += bool(step.of(*DIFFERENT))
            suspicious += bool(step.of(Standing.SUSPICIOUS))
            for each in step.rows:
                if each.pair.role is Role.FIRST_MOMENT and each.amount and each.threshold:
                    kind = "experts, routers" if "expert" in each.pair.name or "router" in each.pair.name else "other"
                    own = each.amount.relative, each.margin
                    worst[kind] = tuple(map(max, zip(worst[kind], own, strict=True)))
    largest = (f"{relative:.2f} ({margin:.2f})" for relative, margin in worst.values())
    row(batch * length, f"{changed / total:.2%}", seeds * STEPS, alarms, suspicious, *largest)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    header("tokens", "of them change an expert", "steps", "alarms", "suspicious", "experts, routers: largest (margin)",
           "other: largest (margin)")  # fmt: skip
    for batch, length in SIZES:
        measured(batch, length, wanted.seeds)


if __name__ == "__main__":
    main()
