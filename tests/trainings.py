"""Short real trainings with torch, saved as files of one or several ranks, for faults between saves and their twins."""

from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


class Model(nn.Module):
    """An embedding, two residual blocks of one form, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen matrix and a low-rank adapter, whose second factor begins at zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 12)
        self.lora_A, self.lora_B = nn.Linear(16, 2, bias=False), nn.Linear(2, 12, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.base.requires_grad_(False)

    def forward(self, tokens):
        x = nn.functional.one_hot(tokens, 16).float().mean(1)
        return self.base(x) + self.lora_B(self.lora_A(x))


@dataclass
class Training:
    """What is trained, how, and when it is saved. Every value is the usual one unless a test says otherwise."""

    seed: int = 0
    steps: int = 12
    every: int = 2
    make: Any = Model
    optimizer: Any = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
    schedule: Any = None
    """Of the optimizer, stepped after it."""
    clip: float = 0.0
    dtype: Any = torch.float32
    before: Any = lambda step, model: None
    """Called before each step."""
    skip: frozenset = field(default_factory=frozenset)
    """Steps that are skipped, as after an overflow."""
    ranks: int = 2
    whole_optimizer: bool = True

    def run(self, folder):
        """Train and save into ``folder``, which is returned."""
        torch.manual_seed(self.seed)
        model = self.make().to(self.dtype)
        # With their names, which torch records since 2.6.
        optimizer = self.optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        schedule = self.schedule(optimizer) if self.schedule else None
        generator = torch.Generator().manual_seed(self.seed + 1)
        for step in range(1, self.steps + 1):
            self.before(step, model)
            tokens = torch.randint(0, 16, (32, 6), generator=generator)
            optimizer.zero_grad()
            found = model(tokens).float()
            wanted = nn.functional.one_hot(tokens[:, 0] % found.shape[1], found.shape[1]).float()
            (found - wanted).square().mean().backward()
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            if step not in self.skip:
                optimizer.step()
            if schedule:
                schedule.step()
            if step % self.every == 0:
                self.save(folder, step, model, optimizer, schedule)
        return folder

    def save(self, folder, step, model, optimizer, schedule=None):
        target = folder / f"step_{step}"
        target.mkdir(parents=True, exist_ok=True)
        for rank in range(self.ranks):
            content = {"model": model.state_dict(), "step": step, "rank": rank, "world_size": self.ranks}
            if self.whole_optimizer:
                content["optimizer"] = optimizer.state_dict()
            if hasattr(schedule, "state_dict"):
                content["scheduler"] = schedule.state_dict()
            torch.save(content, target / f"rank_{rank}.pt")
