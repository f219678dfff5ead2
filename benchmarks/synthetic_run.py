"""Writes a run of any size in the layout of `deepspeed-pipeline`, by torch.save, with values that mean nothing.

Names, shapes, flat partitions and file names are those of Megatron-DeepSpeed; replicas are equal. For measuring speed
and memory only: DeepSpeed itself would have to train a model of that size first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

TP, DP, VOCAB = 2, 2, 8192


def local_shapes(hidden: int, layers: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Decayed and plain group: name to shape on one tensor-parallel rank."""
    decayed: dict[str, tuple[int, ...]] = {"tied_modules.embed.word_embeddings.weight": (VOCAB // TP, hidden)}
    plain: dict[str, tuple[int, ...]] = {}
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


def value(name: str, shape: tuple[int, ...], step: int, tp: int) -> torch.Tensor:
    """fp32 values; the same on all ranks where Megatron replicates the name."""
    replicated = "norm" in name or name.endswith(("dense.bias", "4h_to_h.bias")) or name.count(".") == 1
    seed = hash((name, step, 0 if replicated else tp + 1)) & 0xFFFFFFFF
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def write_step(folder: Path, step: int, hidden: int, layers: int) -> None:
    folder.mkdir(parents=True)
    groups = local_shapes(hidden, layers)
    sizes = argparse.Namespace(
        hidden_size=hidden, ffn_hidden_size=4 * hidden, padded_vocab_size=VOCAB, tensor_model_parallel_size=TP
    )
    for tp in range(TP):
        values = {name: value(name, shape, step, tp) for group in groups for name, shape in group.items()}
        write_layers(folder, tp, values)
        torch.save({
            "module": None, "optimizer": None, "global_steps": step, "skipped_steps": 0, "dp_world_size": DP,
            "mp_world_size": TP, "args": sizes,
            "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in groups],
        }, folder / f"mp_rank_{tp:02d}_model_states.pt")  # fmt: skip
        write_partitions(folder, tp, step, groups, values)


def write_layers(folder: Path, tp: int, values: dict[str, torch.Tensor]) -> None:
    files: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in values.items():
        layer, key = (
            (1, name.split(".", 2)[2])
            if name.startswith("tied")
            else (int(name.split(".", 1)[0]), name.split(".", 1)[1])
        )
        files.setdefault(layer, {})[key] = tensor.bfloat16()
    for layer, tensors in files.items():
        torch.save(tensors, folder / f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")


def write_partitions(folder: Path, tp: int, step: int, groups, values) -> None:
    masters = []
    for group in groups:
        flat = torch.cat([values[name].flatten() for name in group])
        flat = torch.cat([flat, torch.zeros(-len(flat) % (2 * DP))])
        masters.append(flat.chunk(DP))
    for dp in range(DP):
        parts = [master[dp].clone() for master in masters]
        state = {
            g: {"step": torch.tensor(float(step)), "exp_avg": part * 0.01, "exp_avg_sq": part.square() * 1e-4}
            for g, part in enumerate(parts)
        }
        torch.save(
            {"optimizer_state_dict": {
                "single_partition_of_fp32_groups": parts,
                "base_optimizer_state": {"state": state, "param_groups": [{} for _ in parts]},
            }},
            folder / f"bf16_zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt",
        )  # fmt: skip


def write_run(folder: Path, num_bytes: int, steps: int = 4, hidden: int = 1024) -> None:
    """Write ``steps`` steps of about ``num_bytes`` in all, 14 bytes a parameter."""
    per_layer, fixed = 12 * hidden * hidden * 14, VOCAB * hidden * 14
    layers = max(1, round((num_bytes / steps - fixed) / per_layer))
    for step in range(100, 100 * steps + 1, 100):
        write_step(folder / f"global_step{step}", step, hidden, layers)
    (folder / "latest").write_text(f"global_step{100 * steps}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    options = parser.parse_args()
    write_run(options.folder, int(options.gib * 2**30))
