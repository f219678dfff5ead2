"""By how much another layout rounds more than reruns of the reference do: `python -m benchmarks.reference.scale`.

The factors of `auditor/comparison/calibration.py` come from here: three models that are none of those on which
`measure.py` tests them, a gated MLP (also split over tp 2), a convolutional network with group norms, and a recurrent
one. Of each, gradients on one device, in reruns whose input is perturbed by one distance between numbers (and whose
batch is split in two: `split`), and in other layouts. A ratio is a layout's relative difference over what the
calibration takes for noise: the largest of R reruns, at least the median over tensors.
"""

import argparse
import itertools
import statistics

import torch

from benchmarks.reference.measure import header, row

functional = torch.nn.functional
BATCH, COUNTS = 16, (1, 2, 4)
LAYOUTS = {"dp 4": 4, "dp 8": 8}


class Gated(torch.nn.Module):
    """A gated MLP with norms; ``tp`` ranks' parts are summed in their order."""

    def __init__(self, tp=1):
        super().__init__()
        self.tp = tp
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(48) for _ in range(4))
        self.gates, self.ups, self.downs = (
            torch.nn.ModuleList(torch.nn.Linear(*sizes, bias=False) for _ in range(4))
            for sizes in ((48, 96), (48, 96), (96, 48))
        )

    def forward(self, x):
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            own, total = norm(x), 0
            for rank in range(self.tp):
                g, u = (layer.weight.chunk(self.tp)[rank] for layer in (gate, up))
                total = total + (functional.silu(own @ g.T) * (own @ u.T)) @ down.weight.chunk(self.tp, 1)[rank].T
            x = x + total
        return x


class Convolutions(torch.nn.Module):
    """Residual convolutions over 12 × 12 pixels."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(4, 16) for _ in range(5))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + functional.gelu(norm(layer(x)))
        return x.mean((2, 3))


class Recurrent(torch.nn.Module):
    """Two gated recurrent layers over 20 steps, written out."""

    def __init__(self):
        super().__init__()
        self.cells = torch.nn.ModuleList(torch.nn.GRUCell(24, 24) for _ in range(2))

    def forward(self, x):
        states = [torch.zeros_like(x[:, 0]) for _ in self.cells]
        for at in range(x.shape[1]):
            own = x[:, at]
            for number, cell in enumerate(self.cells):
                states[number] = own = cell(own, states[number])
        return own


MODELS = {"gated MLP": (Gated, (48,)), "convolutions": (Convolutions, (16, 12, 12)), "recurrent": (Recurrent, (20, 24))}


def gradients(model, x, y, parts):
    """Summed over equal parts of the batch, one after the other, as data-parallel ranks or microbatches do."""
    total = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in model.named_parameters()}
    for own, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
        model.zero_grad()
        found = model(own).float()
        (((found - target) ** 2).sum() / y.numel()).backward()
        for name, value in model.named_parameters():
            total[name] += value.grad.float()
    return total


def apart(one, other):
    """Relative difference, tensor by tensor."""
    return {name: float((other[name] - value).norm() / value.norm()) for name, value in one.items()}


def perturbed(x, seed):
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x * (1 + signs * torch.finfo(x.dtype).eps).to(x.dtype)


def ratios(name, dtype, seed, split):
    """Number of reruns to the ratios of all tensors in all layouts."""
    make, shape = MODELS[name]
    torch.manual_seed(seed)
    model = make().to(dtype)
    x = torch.randn(BATCH, *shape).to(dtype)
    y = torch.randn(model(x).shape)
    own = gradients(model, x, y, 1)
    reruns = [apart(own, gradients(model, perturbed(x, at + 1), y, 1 + split)) for at in range(max(COUNTS))]
    layouts = [apart(own, gradients(model, x, y, parts)) for parts in LAYOUTS.values()]
    if make is Gated:
        cut = make(tp=2).to(dtype)
        cut.load_state_dict(model.state_dict())
        layouts.append(apart(own, gradients(cut, x, y, 1)))
    found = {}
    for count in COUNTS:
        noise = {key: max(rerun[key] for rerun in reruns[:count]) for key in own}
        usual = statistics.median(noise.values())
        found[count] = [layout[key] / max(noise[key], usual) for layout in layouts for key in own]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    header("model", "dtype", "kind", "reruns", "tensors × layouts × seeds", "median", "99 %", "largest")
    for name in MODELS:
        for dtype, split in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            every = [ratios(name, dtype, seed, split) for seed in range(wanted.seeds)]
            for count in COUNTS:
                own = sorted(ratio for found in every for ratio in found[count])
                told = [statistics.median(own), own[int(0.99 * len(own))], own[-1]]
                kind = "perturbed, split" if split else "perturbed"
                row(name, str(dtype).removeprefix("torch."), kind, count, len(own), *(f"{ratio:.2f}" for ratio in told))


if __name__ == "__main__":
    main()
