"""Trains a tiny GPT in healthy and faulty ways and compares them: `python -m benchmarks.reference.measure`.

Prints the tables of README.md: planted bugs by (found, step, tensor, margin), healthy pairs by their largest margin,
calibrated against derived thresholds, and what an exact comparison of two ledgers reads and takes. `--fsdp2` adds a
real FSDP2 run of two gloo processes; `--jax PYTHON` a run in JAX on eight host devices (an interpreter with jax, optax
and orbax-checkpoint). All other layouts are computed in one process, each rank's part by itself, see
tests/comparison/gpt.py.
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
from tests.comparison.gpt import FAULTS, Training, faulty, trusted

DTYPES = ("float32", "bfloat16")
LAYOUTS = ({"tp": 2}, {"tp": 4}, {"dp": 2}, {"dp": 4}, {"micro": 4}, {"tp": 2, "dp": 2})
HERE = Path(__file__).parent


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
                reference = folder / f"one-{dtype}-{seed}"
                if not reference.exists():
                    Training(seed=seed, dtype=dtype).run(reference)
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
    print(
        "| bug | dtype | found | step | worst tensor | margin | tensors | offered |\n|---|---|---|---|---|---|---|---|"
    )
    for fault in FAULTS:
        for dtype in DTYPES:
            name = fault.replace(" ", "-")
            reference = trusted(fault, dtype=dtype).run(folder / f"trusted-{name}-{dtype}")
            candidate = faulty(fault, dtype=dtype).run(folder / f"faulty-{name}-{dtype}")
            found = compared(reference, candidate, compute=dtype)
            step = found.first_beyond
            word = "yes"
            rows = step.of(*DIFFERENT) if step else []
            if step is None:
                step = found.steps[-1]
                rows, word = step.of(Standing.SUSPICIOUS), "as suspicious"
            worst = max(rows, key=margin)
            offered = "; ".join(cause.text for cause in step.causes)[:160]
            count = len({one.pair.name for one in rows})
            size = "" if math.isnan(worst.margin) else f"{worst.margin:,.3g}"
            print(
                f"| {fault} | {dtype} | {word} | {step.step} | {worst.pair.name} | {size} | {count} | {offered} |",
                flush=True,
            )


def calibrated(folder, counts=(1, 2, 4)):
    header("dtype", "reruns", "calibrated / derived, median (5 %, 95 %)", "healthy tp 2: largest margin")
    for dtype in DTYPES:
        reference, candidate = folder / f"one-{dtype}-0", folder / f"tp2-{dtype}-0"
        before = thresholds(compared(reference, candidate, compute=dtype))
        reruns = [
            Training(dtype=dtype, perturbed=seed).run(folder / f"perturbed-{dtype}-{seed}")
            for seed in range(1, max(counts) + 1)
        ]
        for count in counts:
            found = compared(reference, candidate, compute=dtype, calibrate=[str(rerun) for rerun in reruns[:count]])
            after = thresholds(found)
            ratios = sorted(after[key] / before[key] for key in after if key in before and key[1] is Role.FIRST_MOMENT)
            low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
            spread = f"{statistics.median(ratios):.2f} ({low:.2f}, {high:.2f})"
            worst = max(map(margin, found.steps[-1].rows))
            row(dtype, count, spread, f"{worst:.2f}")


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


def real(folder, command, name):
    """A run by real ranks, of the same weights and batches, held against one device."""
    reference, candidate = folder / "one-float32-0", folder / name
    done = subprocess.run([*command, str(candidate)], capture_output=True, text=True, cwd=HERE.parent.parent)
    if done.returncode:
        print(f"{name}: not run: {done.stderr.strip().splitlines()[-1:]}")
        return
    found = compared(reference, candidate, steps="1", learning_rate=1e-3)
    step = found.steps[-1]
    worst = max(step.rows, key=margin)
    print(
        f"| {name} | {step.formats[1]} | {dict(step.counts())} | {margin(worst):.2f} | {worst.pair.name} |", flush=True
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--parts", default="healthy,planted,calibrated,ledgers")
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--jax", default="")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = wanted.parts.split(",")
        for dtype in DTYPES:
            Training(dtype=dtype).run(folder / f"one-{dtype}-0")
        if "healthy" in parts:
            healthy(folder, wanted.seeds)
        if "planted" in parts:
            planted(folder)
        if "calibrated" in parts:
            for dtype in DTYPES:
                if not (folder / f"tp2-{dtype}-0").exists():
                    Training(dtype=dtype, tp=2).run(folder / f"tp2-{dtype}-0")
            calibrated(folder)
        if "ledgers" in parts:
            runs = {
                "one": Training(steps=8).run(folder / "long"),
                "two": Training(steps=8, tp=2).run(folder / "long-tp2"),
            }
            ledgers(folder, runs)
        if wanted.fsdp2 or wanted.jax:
            header("run", "format", "standings", "largest margin", "of")
        if wanted.fsdp2:
            real(folder, [sys.executable, "-m", "benchmarks.reference.fsdp2"], "fsdp2")
        if wanted.jax:
            batch = folder / "batch.npz"
            subprocess.run([sys.executable, "-m", "benchmarks.reference.jax_run", "--write", str(batch)], check=True)
            script = str(HERE / "jax_run.py")
            os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
            real(folder, [wanted.jax, script, "--read", str(batch)], "jax")


if __name__ == "__main__":
    main()
