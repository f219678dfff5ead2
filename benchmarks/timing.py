"""How the benchmarks measure: interleaved repetitions, ratios inside one repetition, a plain read, an emptied cache."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run of one action took."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds of all threads of this process, in user and system mode."""


Times = Mapping[str, Sequence[Taken]]


def take(action: Callable[[], object]) -> Taken:
    """Run it once."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def interleaved(
    actions: Mapping[str, Callable[[], object]], repetitions: int, before: Callable[[], object] = lambda: None
) -> Times:
    """All actions one after the other, ``repetitions`` times: what disturbs the machine disturbs them alike.

    ``before``: done ahead of every action, and not measured.
    """
    times: dict[str, list[Taken]] = {name: [] for name in actions}
    for _ in range(repetitions):
        for name, action in actions.items():
            before()
            times[name].append(take(action))
    return times


def median(times: Times, name: str, what: str = "wall") -> float:
    """Median over the repetitions, seconds."""
    return statistics.median(getattr(taken, what) for taken in times[name])


def ratio(times: Times, base: str, name: str, what: str = "wall") -> float:
    """How many times what ``name`` took did ``base`` take: the median of the ratios inside one repetition each."""
    return statistics.median(ratios(times, base, name, what))


def ratios(times: Times, base: str, name: str, what: str = "wall") -> list[float]:
    """Those of the single repetitions."""
    pairs = zip(times[base], times[name], strict=True)
    return [getattr(one, what) / max(getattr(other, what), 1e-9) for one, other in pairs]


def files_below(folder: Path) -> list[Path]:
    """All files, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in files_below(folder))


def plain_read(folder: Path, threads: int) -> None:
    """Every byte of every file once, into one reused buffer a thread: what any reader needs at least."""
    paths = files_below(folder)

    def read(own: Sequence[Path]) -> None:
        buffer = bytearray(BUFFER_BYTES)
        for path in own:
            descriptor, at = os.open(path, os.O_RDONLY), 0
            while count := os.preadv(descriptor, [buffer], at):
                at += count
            os.close(descriptor)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [paths[number::threads] for number in range(threads)]))


def evict(folder: Path) -> None:
    """Take all files out of the page cache."""
    os.sync()
    for path in files_below(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_from_disk() -> int:
    """What this process has read from storage and not from the page cache so far."""
    with Path("/proc/self/io").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def peak_mib(folder: Path, level: str, kernels: str, threads: int) -> float:
    """Peak resident memory of a check in a process of its own. Not ru_maxrss: it would count this process as well."""
    words = ["auditor", "check", str(folder), "--level", level, "--kernels", kernels, "--threads", str(threads)]
    code = (
        "import sys\n"
        "from auditor.cli import main\n"
        f"sys.argv = {words!r}\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code, done.code\n"
        "lines = dict(line.split(':') for line in open('/proc/self/status'))\n"
        "print(lines['VmHWM'].split()[0], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1]) / 1024
