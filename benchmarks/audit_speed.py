"""How fast and how small is `auditor check`, against a plain warm read of the same files? See README.md here."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from synthetic_run import write_run

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore

CASES = {"replicas": Level.REPLICAS, "values": Level.VALUES}


def plain_read(folder: Path, threads: int) -> None:
    """Every byte of every file once, into one reused buffer a thread."""

    def read(path: Path) -> None:
        buffer = bytearray(1 << 20)
        descriptor = os.open(path, os.O_RDONLY)
        at = 0
        while count := os.preadv(descriptor, [buffer], at):
            at += count
        os.close(descriptor)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, sorted(path for path in folder.rglob("*") if path.is_file())))


def seconds(action) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_mib(folder: Path, level: str, threads: int) -> float:
    """Peak resident memory of a check in a process of its own. Not ru_maxrss: it would count this process as well."""
    code = (
        "import sys\n"
        "from auditor.cli import main\n"
        f"sys.argv = ['auditor', 'check', {str(folder)!r}, '--level', {level!r}, '--threads', '{threads}']\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code, done.code\n"
        "lines = dict(line.split(':') for line in open('/proc/self/status'))\n"
        "print(lines['VmHWM'].split()[0], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1]) / 1024


def measure(folder: Path, threads: int, repetitions: int) -> None:
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {total / 2**30:.2f} GiB, {threads} thread(s), median of {repetitions} interleaved")
    actions = {"plain read": lambda: plain_read(folder, threads)}
    coverage = {}
    for name, level in CASES.items():

        def check(name=name, level=level) -> None:
            report = audit(LocalStore(folder), Settings(level=level, threads=threads))
            assert not report.runs[0].findings
            coverage[name] = report.runs[0].coverage

        actions[f"check {name}"] = check
    times = {name: [] for name in actions}
    plain_read(folder, threads)
    for _ in range(repetitions):
        for name, action in actions.items():
            times[name].append(seconds(action))
    base = statistics.median(wall for wall, _ in times["plain read"])
    print(f"{'':16} {'wall s':>8} {'cpu s':>8} {'GB/s of weights read':>21} {'rate / plain read':>18}")
    for name, taken in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
        seen = coverage[name.split()[1]].num_bytes_read if name.startswith("check") else total
        ratio = (seen / wall) / (total / base)
        print(f"{name:16} {wall:8.2f} {cpu:8.2f} {seen / wall / 1e9:21.2f} {ratio:18.2f}")
    for name in CASES:
        seen = coverage[name]
        share = seen.num_bytes_read / seen.num_bytes_total
        print(
            f"{name}: {seen.num_bytes_read:,} of {seen.num_bytes_total:,} bytes read ({share:.2%}), "
            f"peak RSS {peak_mib(folder, name, threads):.0f} MiB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--run", type=Path, help="an existing run, instead of a synthetic one")
    options = parser.parse_args()
    if options.run:
        measure(options.run, options.threads, options.repetitions)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            write_run(Path(scratch) / "run", int(options.gib * 2**30))
            measure(Path(scratch) / "run", options.threads, options.repetitions)
