"""What a check of one ZeRO-3 step of many ranks costs: seconds, CPU seconds, peak memory, by level.

    python benchmarks/many_ranks.py [--ranks 256] [--layers 24] [--hidden 256] [--keep FOLDER]

The files are written by torch.save in DeepSpeed's structure (two a rank; sub-groups, placeholders, padding), with few
and meaningless values: the number of files and pieces is what is measured. ``plain read`` reads every byte once.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

STEP = 1000
Shapes = dict[str, tuple[int, ...]]


def groups(hidden: int, layers: int) -> list[Shapes]:
    """Decayed and plain parameters of a decoder, name to shape."""
    decayed: Shapes = {"model.embed_tokens.weight": (8192, hidden)}
    plain: Shapes = {"model.norm.weight": (hidden,)}
    for layer in range(layers):
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (hidden // 4, hidden)),
            ("self_attn.v_proj", (hidden // 4, hidden)), ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (3 * hidden - 5, hidden)), ("mlp.up_proj", (3 * hidden - 5, hidden)),
            ("mlp.down_proj", (hidden, 3 * hidden - 5)),
        ):  # fmt: skip
            decayed[f"model.layers.{layer}.{name}.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            plain[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    return [decayed, plain]


def write(folder: Path, ranks: int, hidden: int, layers: int) -> None:
    """One step of a healthy run."""
    folder.mkdir(parents=True)
    shapes = groups(hidden, layers)
    empty = {name: torch.empty(0, dtype=torch.bfloat16) for group in shapes for name in group}
    model = {
        "module": empty, "buffer_names": [], "optimizer": None, "frozen_param_shapes": {}, "shared_params": {},
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in shapes],
        "frozen_param_fragments": {}, "skipped_steps": 0, "global_steps": STEP, "dp_world_size": ranks,
        "mp_world_size": 1, "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    }  # fmt: skip
    lengths = [sum(-(-math.prod(shape) // ranks) for shape in group.values()) for group in shapes]
    generator = torch.Generator().manual_seed(0)
    for rank in range(ranks):
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        masters, state = [], {}
        for number, length in enumerate(lengths):
            gradients = torch.randn(length, generator=generator) * 1e-3
            masters.append(torch.randn(length, generator=generator) * 0.02)
            moments = {"exp_avg": gradients, "exp_avg_sq": gradients.square()}
            state[number] = {"step": torch.tensor(float(STEP)), **moments}
        settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        inner = {"state": state, "param_groups": [{**settings, "params": [0]}, {**settings, "params": [1]}]}
        content = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": masters,
        }
        path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": content}, path)
    (folder.parent / "latest").write_text(folder.name)


def plain_read(folder: Path) -> None:
    """Every byte once."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


def measured(run: Path) -> Iterator[tuple[str, float, float, float]]:
    """What was done, wall seconds, CPU seconds, peak resident MiB."""
    plain_read(run)
    begun, used = time.perf_counter(), time.process_time()
    plain_read(run)
    yield "plain read", time.perf_counter() - begun, time.process_time() - used, 0.0
    for level in ("names", "headers", "values"):
        # The kernel's own peak: what getrusage tells of a child includes the parent from which it was forked.
        code = (
            "import sys; from auditor.cli import main; sys.argv[0] = 'auditor'\n"
            "try: main()\nexcept SystemExit as stop: code = stop.code\n"
            "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
            "print(int(peak) / 1024, file=sys.stderr); sys.exit(code)"
        )
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        arguments = [sys.executable, "-c", code, "check", str(run), "--level", level, "--threads", "2"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begun
        assert done.returncode == 0, done.stdout + done.stderr
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        yield f"check --level {level}", wall, cpu, float(done.stderr.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--keep", type=Path, help="write the run here and leave it there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = options.keep or Path(temporary) / "run"
        if not run.exists():
            write(run / f"global_step{STEP}", options.ranks, options.hidden, options.layers)
        sizes = [path.stat().st_size for path in run.rglob("*") if path.is_file()]
        sys.stdout.write(f"{options.ranks} ranks, {len(sizes)} files, {sum(sizes) / 1e6:.0f} MB\n\n")
        sys.stdout.write("| | seconds | CPU seconds | peak MiB |\n|---|---|---|---|\n")
        for what, wall, cpu, peak in measured(run):
            sys.stdout.write(f"| {what} | {wall:.2f} | {cpu:.2f} | {peak:.0f} |\n")


if __name__ == "__main__":
    main()
