"""Trains a tiny GPT in healthy and faulty ways and compares them: `python -m benchmarks.reference.measure`.

Prints the tables of README.md: planted bugs by (found, step, tensor, margin), healthy pairs by their largest margin,
calibrated against derived thresholds, and what an exact comparison of two ledgers reads and takes. Real ranks are added
by `--fsdp2` (two gloo processes), `--tp` (tensor and sequence parallelism, two and four), `--jax PYTHON` (eight host
devices; an interpreter with jax, optax and orbax-checkpoint), healthy and with bugs. All other layouts are computed in
one process, each rank's part by itself, see tests/comparison/gpt.py.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import auditor
from auditor.comparison.outcome import DIFFERENT, PROVED, Standing
from auditor.model.catalog import Role
from benchmarks.reference import fsdp2 as fsdp2_runs
from benchmarks.reference import jax_run, tensor_parallel
from tests.comparison.gpt import CLIP, FAULTS, RATE, Training, faulty, trusted

DTYPES = ("float32", "bfloat16")
LAYOUTS = ({"tp": 2}, {"tp": 4}, {"dp": 2}, {"dp": 4}, {"micro": 4}, {"tp": 2, "dp": 2})
HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def compared(reference, candidate, **choices):
    return auditor.compare(str(reference), str(candidate), **choices)


def margin(found):
    return -1.0 if math.isnan(found.margin) else found.margin


def header(*names):
    row(*names)
    row(*("---" for _ in names))


def row(*values):
    print(f"| {' | '.join(map(str, values))} |", flush=True)


def healthy(folder, seeds):
    header("dtype", "layout", "pairs", "alarms", "suspicious", "largest margin", "of")
    for dtype in DTYPES:
        for layout in LAYOUTS:
            alarms = suspicious = 0
            worst = (-1.0, "")
            for seed in range(seeds):
                reference = trained(folder, seed=seed, dtype=dtype)
                name = "-".join(f"{key}{value}" for key, value in layout.items())
                candidate = Training(seed=seed, dtype=dtype, **layout).run(folder / f"{name}-{dtype}-{seed}")
                step = compared(reference, candidate, compute=dtype).steps[-1]
                alarms += bool(step.of(*DIFFERENT))
                suspicious += bool(step.of(Standing.SUSPICIOUS))
                told = [one for one in step.rows if not (one.threshold and one.threshold.vague)]
                worst = max([worst, *((margin(one), f"{one.pair.name} ({one.pair.role.value})") for one in told)])
            print(
                f"| {dtype} | {layout} | {seeds} | {alarms} | {suspicious} | {worst[0]:.2f} | {worst[1]} |", flush=True
            )


def planted(folder):
    header("bug", "dtype", "found", "step", "worst tensor", "margin", "tensors", "offered")
    for fault in FAULTS:
        for dtype in DTYPES:
            name = fault.replace(" ", "-")
            reference = trusted(fault, dtype=dtype).run(folder / f"trusted-{name}-{dtype}")
            planted_row(fault, dtype, reference, faulty(fault, dtype=dtype).run(folder / f"faulty-{name}-{dtype}"))


def calibrated(folder, seeds, counts=(1, 2, 4)):
    """First moments' thresholds against derived ones, and all tensors of healthy layouts against both."""
    header("dtype", "reruns", "calibrated / derived, median (5 %, 95 %)", "pairs", "alarms", "suspicious",
           "largest margin", "of")  # fmt: skip
    for dtype in DTYPES:
        reruns = {
            seed: [
                Training(seed=seed, dtype=dtype, perturbed=at, micro=2).run(folder / f"rerun-{dtype}-{seed}-{at}")
                for at in range(1, max(counts) + 1)
            ]
            for seed in range(seeds)
        }
        pairs = [
            (seed, trained(folder, seed=seed, dtype=dtype),
             Training(seed=seed, dtype=dtype, **layout).run(folder / f"layout-{dtype}-{seed}-{number}"))
            for seed in range(seeds) for number, layout in enumerate(({"tp": 2}, {"dp": 4}))
        ]  # fmt: skip
        for count in counts:
            calibrated_row(dtype, count, [(one, other, reruns[seed][:count]) for seed, one, other in pairs])


def calibrated_row(dtype, count, pairs):
    ratios, alarms, suspicious, worst = [], 0, 0, (-1.0, "")
    for reference, candidate, reruns in pairs:
        before = thresholds(compared(reference, candidate, compute=dtype))
        found = compared(reference, candidate, compute=dtype, calibrate=[str(rerun) for rerun in reruns])
        after, step = thresholds(found), found.steps[-1]
        ratios += [after[key] / before[key] for key in after if key in before and key[1] is Role.FIRST_MOMENT]
        alarms += bool(step.of(*DIFFERENT))
        suspicious += bool(step.of(Standing.SUSPICIOUS))
        told = [one for one in step.rows if not (one.threshold and one.threshold.vague)]
        worst = max([worst, *((margin(one), f"{one.pair.name} ({one.pair.role.value})") for one in told)])
    ratios.sort()
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    spread = f"{statistics.median(ratios):.2f} ({low:.2f}, {high:.2f})"
    row(dtype, count, spread, len(pairs), alarms, suspicious, f"{worst[0]:.2f}", worst[1])


def thresholds(found):
    rows = found.steps[-1].rows
    return {(one.pair.name, one.pair.role): one.threshold.relative for one in rows if one.threshold}


def ledgers(folder, runs):
    for name, run in runs.items():
        auditor.check(str(run), ledger=str(folder / f"ledger-{name}"), level="values")
    size = sum(file.stat().st_size for file in (folder / "ledger-one").rglob("*") if file.is_file())
    header("exact comparison", "weights read, bytes", "ledgers, bytes", "CPU seconds")
    for word, sides in (("two runs", runs.values()), ("two ledgers", [folder / f"ledger-{name}" for name in runs])):
        begun = time.process_time()
        found = compared(*sides)
        seconds = time.process_time() - begun
        read = sum(step.num_bytes_read for step in found.steps)
        kept = 2 * size if word == "two ledgers" else 0
        assert all(one.standing in PROVED for one in found.steps[0].rows)
        row(f"{word} of {len(found.steps)} steps", f"{read:,}", f"{kept:,}", f"{seconds:.2f}")


def planted_row(name, dtype, reference, candidate):
    """One line of the table of planted bugs."""
    found = compared(reference, candidate, compute=dtype, learning_rate=RATE)
    step, word = found.first_beyond, "yes"
    rows = step.of(*DIFFERENT) if step else []
    if step is None:
        step = found.steps[-1]
        rows, word = step.of(Standing.SUSPICIOUS), "as suspicious"
    if not rows:
        note = next((note for note in step.notes if "bfloat16" in note), "")
        return row(name, dtype, "as a note" if note else "no", step.step if note else "", "", "", "", note[:110])
    worst = max(rows, key=margin)
    offered = "; ".join(cause.text for cause in step.causes) or worst.detail
    size = "" if math.isnan(worst.margin) else f"{worst.margin:,.3g}"
    return row(name, dtype, word, step.step, worst.pair.name, size, len({one.pair.name for one in rows}), offered[:110])


def real(folder, name, faults, runs, train):
    """Runs by real ranks, of the same weights and batches, held against one device; ``train``: trains all of them."""
    healthy = {f"{name}-{layout}-{seed}-{dtype}": (layout, seed, dtype) for layout, seed, dtype in runs}
    dtypes = dict.fromkeys(dtype for _, _, dtype in runs)
    planted = {f"{name}-{at}-{dtype}": (fault, dtype) for dtype in dtypes for at, fault in enumerate(faults)}
    train({**healthy, **{key: (faults[fault][0], 0, dtype, fault) for key, (fault, dtype) in planted.items()}})
    header(f"healthy {name}", "dtype", "seed", "standings of step 1", "largest margin", "of")
    for key, (layout, seed, dtype) in healthy.items():
        found = compared(trained(folder, seed=seed, dtype=dtype), folder / key, compute=dtype, learning_rate=RATE)
        step = found.steps[-1]
        worst = max((one for one in step.rows if not (one.threshold and one.threshold.vague)), key=margin)
        counts = ", ".join(f"{count} {standing.value}" for standing, count in step.counts().items())
        row(layout, dtype, seed, counts, f"{margin(worst):.2f}", f"{worst.pair.name} ({worst.pair.role.value})")
    header(f"bug in {name}", "dtype", "found", "step", "worst tensor", "margin", "tensors", "offered")
    for key, (fault, dtype) in planted.items():
        clip = CLIP if fault.startswith("clipped") else math.inf
        planted_row(fault, dtype, trained(folder, dtype=dtype, clip=clip), folder / key)


def trained(folder, **changes):
    """The reference: one device."""
    training = Training(**changes)
    at = folder / f"one-{training.dtype}-{training.seed}-{training.clip}"
    return at if at.exists() else training.run(at)


def fsdp2(folder, seeds):
    def train(runs):
        named = [f"{name}:{seed}:{dtype}:{''.join(fault)}" for name, (_, seed, dtype, *fault) in runs.items()]
        subprocess.run([sys.executable, "-m", "benchmarks.reference.fsdp2", str(folder), *named], check=True, cwd=ROOT)

    runs = [("dp 2", seed, dtype) for dtype in DTYPES for seed in range(seeds)]
    real(folder, "FSDP2", {fault: ("dp 2", what) for fault, what in fsdp2_runs.FAULTS.items()}, runs, train)


def tp(folder, seeds):
    def train(runs):
        for degree in dict.fromkeys(layout for layout, *_ in runs.values()):
            named = [f"{name}:{seed}:{dtype}:{''.join(fault)}"
                     for name, (layout, seed, dtype, *fault) in runs.items() if layout == degree]  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.reference.tensor_parallel", degree.removeprefix("tp ")]
            subprocess.run([*command, str(folder), *named], check=True, cwd=ROOT)

    runs = [(layout, seed, dtype) for dtype in DTYPES for layout in ("tp 2", "tp 4") for seed in range(seeds)]
    real(folder, "TP", {fault: ("tp 2", what) for fault, what in tensor_parallel.FAULTS.items()}, runs, train)


def jax(folder, seeds, python):
    batches = folder / "batches.npz"
    jax_run.write(batches, range(seeds))

    def train(runs):
        named = [f"{name}:{seed}:{layout}:{''.join(fault)}" for name, (layout, seed, _, *fault) in runs.items()]
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        script = str(HERE / "jax_run.py")
        subprocess.run([python, script, "--read", str(batches), str(folder), *named], check=True, env=environment)

    runs = [(layout, seed, "float32") for layout in ("gspmd", "shard_map") for seed in range(seeds)]
    real(folder, "JAX", jax_run.FAULTS, runs, train)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--parts", default="healthy,planted,calibrated,ledgers")
    parser.add_argument("--real-seeds", type=int, default=3)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--tp", action="store_true")
    parser.add_argument("--jax", default="")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = wanted.parts.split(",")
        if "healthy" in parts:
            healthy(folder, wanted.seeds)
        if "planted" in parts:
            planted(folder)
        if "calibrated" in parts:
            calibrated(folder, wanted.seeds)
        if "ledgers" in parts:
            runs = {
                "one": Training(steps=8).run(folder / "long"),
                "two": Training(steps=8, tp=2).run(folder / "long-tp2"),
            }
            ledgers(folder, runs)
        if wanted.fsdp2:
            fsdp2(folder, wanted.real_seeds)
        if wanted.tp:
            tp(folder, wanted.real_seeds)
        if wanted.jax:
            jax(folder, wanted.real_seeds, wanted.jax)


if __name__ == "__main__":
    main()
