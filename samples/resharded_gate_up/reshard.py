"""Cuts a Megatron-LM checkpoint of four tensor-parallel ranks anew for eight: `python reshard.py FOUR EIGHT [--naive]`.

A row- or column-parallel weight is put together along its cut dim and cut again. The fused gate and up of a gated MLP
can't be: each rank holds its own rows of the gate and, below them, its own rows of up, so joined the two alternate.
`--naive` does that all the same, which is the bug of this sample.
"""

import argparse
from pathlib import Path

import torch

RANKS = 8
COLUMNS = ("word_embeddings.weight", "linear_qkv.weight", "output_layer.weight")
ROWS = ("linear_proj.weight", "linear_fc2.weight")
GATED = "linear_fc1.weight"
NAME = "model_optim_rng.pt"


def resharded(name, parts, *, naive):
    """One tensor's parts for the new ranks."""
    if name.endswith(GATED) and not naive:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return [torch.cat(both) for both in zip(*(torch.cat(half).chunk(RANKS) for half in halves), strict=True)]
    if name.endswith((*COLUMNS, GATED)):
        return torch.cat(parts).chunk(RANKS)
    if name.endswith(ROWS):
        return torch.cat(parts, 1).chunk(RANKS, 1)
    return [parts[0]] * RANKS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("four", type=Path)
    parser.add_argument("eight", type=Path)
    parser.add_argument("--naive", action="store_true")
    wanted = parser.parse_args()
    (step,) = wanted.four.glob("iter_*")
    old = [torch.load(path, weights_only=False) for path in sorted(step.glob(f"mp_rank_*/{NAME}"))]
    models = [{} for _ in range(RANKS)]
    for name, value in old[0]["model"].items():
        parts = [value] * RANKS
        if isinstance(value, torch.Tensor):
            parts = resharded(name, [one["model"][name] for one in old], naive=wanted.naive)
        for model, part in zip(models, parts, strict=True):
            model[name] = part.clone() if isinstance(part, torch.Tensor) else part
    for rank, model in enumerate(models):
        args = old[0]["args"]
        args.tensor_model_parallel_size, args.world_size, args.rank, args.local_rank = RANKS, RANKS, rank, rank
        target = wanted.eight / step.name / f"mp_rank_{rank:02d}" / NAME
        target.parent.mkdir(parents=True)
        torch.save({**old[0], "args": args, "model": model}, target)
    (wanted.eight / "latest_checkpointed_iteration.txt").write_text(str(old[0]["iteration"]))


if __name__ == "__main__":
    main()
