"""Writes a run of any size in the layout of `deepspeed-pipeline`, by torch.save, with values that mean nothing.

Names, shapes, flat partitions and file names are those of Megatron-DeepSpeed. Replicas are equal, weights are their
masters rounded, moments fit each other, and every step lies within reach of the one before: a healthy run. For
measuring speed and memory only: DeepSpeed itself would have to train a model of that size first.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

TP, DP, VOCAB = 2, 2, 8192
RATE = 1e-4
BETAS = (0.9, 0.999)
Shapes = dict[str, tuple[int, ...]]


def local_shapes(hidden: int, layers: int) -> tuple[Shapes, Shapes]:
    """Decayed and plain group: name to shape on one tensor-parallel rank."""
    decayed: Shapes = {"tied_modules.embed.word_embeddings.weight": (VOCAB // TP, hidden)}
    plain: Shapes = {}
    for layer in range(3, 3 + layers):
        decayed[f"{layer}.self_attention.query_key_value.weight"] = (3 * hidden // TP, hidden)
        decayed[f"{layer}.self_attention.dense.weight"] = (hidden, hidden // TP)
        decayed[f"{layer}.mlp.dense_h_to_4h.weight"] = (4 * hidden // TP, hidden)
        decayed[f"{layer}.mlp.dense_4h_to_h.weight"] = (hidden, 4 * hidden // TP)
        plain[f"{layer}.self_attention.query_key_value.bias"] = (3 * hidden // TP,)
        plain[f"{layer}.mlp.dense_h_to_4h.bias"] = (4 * hidden // TP,)
        for name in ("self_attention.dense.bias", "mlp.dense_4h_to_h.bias"):
            plain[f"{layer}.{name}"] = (hidden,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"{layer}.{norm}.weight"] = plain[f"{layer}.{norm}.bias"] = (hidden,)
    plain[f"{4 + layers}.weight"] = plain[f"{4 + layers}.bias"] = (hidden,)
    return decayed, plain


class Values:
    """Numbers of every tensor: stretches of one pool, since drawing them all anew would take longer than writing."""

    def __init__(self, largest: int) -> None:
        self.pool = torch.randn(largest + (1 << 20), generator=torch.Generator().manual_seed(0)) * 0.02

    def of(self, name: str, shape: tuple[int, ...], step: int, tp: int) -> torch.Tensor:
        """fp32 values; the same on all ranks where Megatron replicates the name. They shrink a little every step."""
        replicated = "norm" in name or name.endswith(("dense.bias", "4h_to_h.bias")) or name.count(".") == 1
        first = zlib.crc32(f"{name} {0 if replicated else tp + 1}".encode()) & ((1 << 20) - 1)
        size = torch.Size(shape).numel()
        return (self.pool[first : first + size] * (1 - RATE * step / 20)).view(shape)


def write_step(folder: Path, step: int, hidden: int, layers: int, values: Values) -> None:
    """One step's files; what is held at once is little more than the largest of them."""
    folder.mkdir(parents=True)
    groups = local_shapes(hidden, layers)
    sizes = argparse.Namespace(
        hidden_size=hidden, ffn_hidden_size=4 * hidden, padded_vocab_size=VOCAB, tensor_model_parallel_size=TP,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=1e-8,
    )  # fmt: skip
    for tp in range(TP):
        for layer, tensors in _layers(groups):
            state = {key: values.of(name, shape, step, tp).bfloat16() for key, name, shape in tensors}
            torch.save(state, folder / f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
        torch.save({
            "module": None, "optimizer": None, "global_steps": step, "skipped_steps": 0, "dp_world_size": DP,
            "mp_world_size": TP, "args": sizes,
            "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in groups],
        }, folder / f"mp_rank_{tp:02d}_model_states.pt")  # fmt: skip
        for dp in range(DP):
            _write_partition(folder, tp, dp, step, groups, values)


def _layers(groups: tuple[Shapes, Shapes]) -> Iterator[tuple[int, list[tuple[str, str, tuple[int, ...]]]]]:
    """Layer files: number, and of every tensor its key, its name and its shape."""
    files: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name, shape in (entry for group in groups for entry in group.items()):
        tied = name.startswith("tied")
        layer, key = (1, name.split(".", 2)[2]) if tied else (int(name.split(".")[0]), name.split(".", 1)[1])
        files.setdefault(layer, []).append((key, name, shape))
    yield from sorted(files.items())


def _write_partition(
    folder: Path, tp: int, dp: int, step: int, groups: tuple[Shapes, Shapes], values: Values
) -> None:  # fmt: skip
    parts = [_partition(group, tp, dp, step, values) for group in groups]
    state = {
        g: {"step": torch.tensor(float(step)), "exp_avg": part * 0.01, "exp_avg_sq": part.square() * 1e-4}
        for g, part in enumerate(parts)
    }
    settings = {"lr": RATE, "initial_lr": RATE, "betas": BETAS, "eps": 1e-8, "amsgrad": False}
    param_groups = [{**settings, "weight_decay": decay, "params": [g]} for g, decay in enumerate((0.1, 0.0))]
    torch.save(
        {"optimizer_state_dict": {
            "single_partition_of_fp32_groups": parts,
            "base_optimizer_state": {"state": state, "param_groups": param_groups},
        }},
        folder / f"bf16_zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt",
    )  # fmt: skip


def _partition(group: Shapes, tp: int, dp: int, step: int, values: Values) -> torch.Tensor:
    """Rank ``dp``'s part of the group's flat buffer, whose end is padded."""
    total = sum(torch.Size(shape).numel() for shape in group.values())
    length = -(-total // (2 * DP)) * 2
    flat, low = torch.zeros(length), dp * length
    at = 0
    for name, shape in group.items():
        size = torch.Size(shape).numel()
        first, last = max(at, low), min(at + size, low + length)
        if first < last:
            flat[first - low : last - low] = values.of(name, shape, step, tp).flatten()[first - at : last - at]
        at += size
    return flat


def write_run(folder: Path, num_bytes: int, steps: int = 4, hidden: int = 1024) -> None:
    """Write ``steps`` steps of about ``num_bytes`` in all, 14 bytes a parameter."""
    per_layer, fixed = 12 * hidden * hidden * 14, VOCAB * hidden * 14
    layers = max(1, round((num_bytes / steps - fixed) / per_layer))
    values = Values(
        max(torch.Size(shape).numel() for group in local_shapes(hidden, layers) for shape in group.values())
    )
    for step in range(100, 100 * steps + 1, 100):
        write_step(folder / f"global_step{step}", step, hidden, layers, values)
    (folder / "latest").write_text(f"global_step{100 * steps}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    options = parser.parse_args()
    write_run(options.folder, int(options.gib * 2**30))
