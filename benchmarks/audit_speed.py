"""How fast and how small is `auditor check`, against a plain read of the same files? See README.md here."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pass_parts import PARTS, actions
from synthetic_run import write_run
from timing import (
    Times,
    bytes_from_disk,
    evict,
    interleaved,
    median,
    peak_mib,
    plain_read,
    ratio,
    ratios,
    size_of,
    take,
)

from auditor.audit import audit
from auditor.cli import TURN_SECONDS
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore

LEVELS = {"replicas": Level.REPLICAS, "values": Level.VALUES, "beside": Level.VALUES}
"""``values``: every byte once, as for saves of more than 2 GiB; ``beside``: each save also with the one before it."""
ELEMENTWISE = ("MOT009", "MOT010", "MOT011", "MOT012", "MOT013")
"""What is judged element by element over two saves."""
DETERMINED = ("CST001", "OPT011", "REP001", "NUM001")
"""What a run without damage must hold in every step: what is not judged is cheap."""
PLAIN = "plain read"


class Checks:
    """Audits of one run, and how many bytes each level read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_bytes = size_of(folder)
        self.num_bytes_read = {PLAIN: self.num_bytes}

    def action(self, level: str, kernels: str, threads: int) -> Callable[[], None]:
        def check() -> None:
            ignore = () if level == "beside" else ELEMENTWISE
            settings = Settings(level=LEVELS[level], threads=threads, kernels=kernels, ignore=ignore)
            run = audit(LocalStore(self.folder), settings).runs[0]
            assert not run.findings, run.findings[0].message
            if LEVELS[level] is Level.VALUES:
                for step in run.steps:
                    lacking = [name for name in DETERMINED if not step.judgements[name].num_holds]
                    assert not lacking, f"step {step.state.step}: {lacking} is not determined"
            self.num_bytes_read[f"{level} {kernels}"] = run.coverage.num_bytes_read

        return check

    def rate(self, times: Times, name: str, what: str = "wall") -> float:
        """Bytes read in a second, against the plain read's: median of the ratios inside one repetition."""
        return ratio(times, PLAIN, name, what) * self.num_bytes_read[name] / self.num_bytes


def warm(checks: Checks, kernels: list[str], threads: int, repetitions: int) -> None:
    """Everything in the page cache, kernels compiled."""
    acts = {PLAIN: lambda: plain_read(checks.folder, threads)}
    acts |= {f"{level} {name}": checks.action(level, name, threads) for name in kernels for level in LEVELS}
    for act in acts.values():
        act()
    times = interleaved(acts, repetitions)
    print(f"\nwarm, {threads} thread(s), medians of {repetitions} interleaved repetitions")
    print(f"{'':16} {'wall s':>8} {'cpu s':>8} {'GB/s':>8} {'rate / plain read':>18} {'of cpu':>7}  single repetitions")
    for name in acts:
        seen = checks.num_bytes_read[name]
        single = sorted(one * seen / checks.num_bytes for one in ratios(times, PLAIN, name))
        print(
            f"{name:16} {median(times, name):8.2f} {median(times, name, 'cpu'):8.2f} "
            f"{seen / median(times, name) / 1e9:8.2f} {checks.rate(times, name):18.2f} "
            f"{checks.rate(times, name, 'cpu'):7.2f}  {single[0]:.2f} … {single[-1]:.2f}"
        )
    for level in LEVELS:
        seen = checks.num_bytes_read[f"{level} {kernels[0]}"]
        print(f"{level}: {seen:,} of {checks.num_bytes:,} bytes read ({seen / checks.num_bytes:.2%})")


def split(checks: Checks, kernels: str, threads: int, repetitions: int) -> None:
    """Where the time of a check at level `values` goes."""
    acts = {PLAIN: lambda: plain_read(checks.folder, threads)}
    acts |= actions(LocalStore(checks.folder), kernels, threads)
    acts["whole check"] = checks.action("values", kernels, threads)
    for act in acts.values():
        act()
    times = interleaved(acts, repetitions)
    plain = median(times, PLAIN), median(times, PLAIN, "cpu")
    print(f"\nparts of `values`, {kernels} kernels, {threads} thread(s), medians of the differences, warm")
    print(f"{'':24} {'wall s':>8} {'cpu s':>8} {'wall / plain read':>18}")
    print(f"{PLAIN:24} {plain[0]:8.2f} {plain[1]:8.2f} {1:18.2f}")
    # The pass plans by itself: what `plan` took is in `read`.
    for part, before in zip((*PARTS, "whole check"), (None, "plan", *PARTS[1:]), strict=True):
        wall, cpu = (_difference(times, part, before, what) for what in ("wall", "cpu"))
        label = "headers, judging, report" if part == "whole check" else part
        print(f"{label:24} {wall:8.2f} {cpu:8.2f} {wall / plain[0]:18.2f}")


def _difference(times: Times, part: str, before: str | None, what: str) -> float:
    own = [getattr(taken, what) for taken in times[part]]
    less = [getattr(taken, what) for taken in times[before]] if before else [0.0] * len(own)
    return statistics.median(a - b for a, b in zip(own, less, strict=True))


def cold(checks: Checks, kernels: str, threads: int, repetitions: int) -> None:
    """Nothing in the page cache."""
    name = f"values {kernels}"
    acts = {PLAIN: lambda: plain_read(checks.folder, threads), name: checks.action("values", kernels, threads)}
    acts[name]()
    evict(checks.folder)
    before = bytes_from_disk()
    take(acts[PLAIN])
    share = (bytes_from_disk() - before) / checks.num_bytes
    print(f"\ncold, {threads} thread(s), medians of {repetitions} interleaved; {share:.0%} comes from storage")
    if share < 0.9:
        print("the cache was not emptied: what follows is no cold read")
    times = interleaved(acts, repetitions, before=lambda: evict(checks.folder))
    print(f"{'':16} {'wall s':>8} {'cpu s':>8} {'cores':>8} {'rate / plain read':>18}")
    for act in acts:
        wall, cpu = median(times, act), median(times, act, "cpu")
        print(f"{act:16} {wall:8.2f} {cpu:8.2f} {cpu / wall:8.2f} {checks.rate(times, act):18.2f}")


def peaks(folder: Path, kernels: list[str], threads: int) -> None:
    """Peak memory of processes that check a run."""
    size = size_of(folder) / 2**30
    for level in ("replicas", "values"):
        for name in kernels:
            peak = peak_mib(folder, level, name, threads)
            print(f"{size:6.2f} GiB, {threads} thread(s)  {level:10} {name:6} peak RSS {peak:6.0f} MiB")


def speeds(folder: Path, options: argparse.Namespace) -> None:
    checks = Checks(folder)
    print(f"{checks.num_bytes / 2**30:.2f} GiB in {options.run or 'a synthetic run'}")
    for threads in options.threads:
        if "warm" in options.parts:
            warm(checks, options.kernels, threads, options.repetitions)
        for kernels in options.kernels:
            if "split" in options.parts:
                split(checks, kernels, threads, options.repetitions)
            if "cold" in options.parts:
                cold(checks, kernels, threads, options.repetitions)


def main() -> None:
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--threads", type=lambda text: [int(word) for word in words(text)], default=[1, 2])
    parser.add_argument("--kernels", type=words, default=["numpy", "numba"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--run", type=Path, help="an existing run, instead of a synthetic one")
    parser.add_argument(
        "--parts", type=words, default=["warm", "split", "cold"], help="of warm,split,cold; '' for none"
    )
    parser.add_argument("--rss", type=words, default=[], help="peak memory for runs of so many GiB, as in 1,4,16")
    options = parser.parse_args()
    # As the command does.
    sys.setswitchinterval(TURN_SECONDS)
    if options.run:
        speeds(options.run, options)
    elif options.parts != [""]:
        with tempfile.TemporaryDirectory() as scratch:
            write_run(Path(scratch) / "run", int(options.gib * 2**30))
            speeds(Path(scratch) / "run", options)
    for gib in options.rss:
        with tempfile.TemporaryDirectory() as scratch:
            write_run(Path(scratch) / "run", int(float(gib) * 2**30))
            peaks(Path(scratch) / "run", options.kernels, max(options.threads))


if __name__ == "__main__":
    main()
