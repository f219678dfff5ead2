"""How near does a check over an object store come to a plain concurrent download? See README.md here."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from timing import files_below, interleaved, median, ratio, ratios, size_of

RANGE_BYTES = 8 << 20
HERE = Path(__file__).parent


@contextlib.contextmanager
def served(folder: Path, latency: float, rate: float = 0.0, keys: int = 0) -> Iterator[str]:
    """The server's address; this process's surroundings name it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(HERE / "object_server.py"), str(folder), "--port", str(port)]
    process = subprocess.Popen([*command, f"--latency={latency}", f"--rate={rate}", f"--keys={keys}"])
    address = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                stats(address)
                break
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def stats(address: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{address}/stats") as answer:
        return json.load(answer)


def download(connections: int) -> None:
    """Every object, in absolute ranges, so many at once; nothing is done with the bytes."""
    import obstore
    from obstore.store import S3Store

    store = S3Store("bucket", client_options={"allow_http": True})
    ranges = [
        (meta["path"], first, min(first + RANGE_BYTES, meta["size"]))
        for page in obstore.list(store)
        for meta in page
        for first in range(0, meta["size"], RANGE_BYTES)
    ]
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(lambda part: len(obstore.get_range(store, part[0], start=part[1], end=part[2])), ranges))


def check(level: str, kernels: str, threads: int) -> dict[str, int]:
    from auditor import check as audit

    run = audit("s3://bucket", level=level, kernels=kernels, **({"threads": threads} if threads else {})).runs[0]
    assert not run.findings, run.findings[0].message
    return {"read": run.coverage.num_bytes_read, "total": run.coverage.num_bytes_total}


def compare(folder: Path, options: argparse.Namespace, latency: float, rate: float) -> None:
    size = size_of(folder)
    with served(folder, latency, rate) as address:
        acts = {f"download {n}": lambda n=n: download(n) for n in options.connections}
        acts |= {
            f"{level} {threads or 'default'}": lambda level=level, threads=threads: check(level, "auto", threads)
            for level in ("values",)
            for threads in options.threads
        }
        costs = {}
        for name, act in acts.items():
            before = stats(address)
            act()
            after = stats(address)
            costs[name] = {key: after[key] - before.get(key, 0) for key in after}
        times = interleaved(acts, options.repetitions)
    best = min((name for name in acts if name.startswith("download")), key=lambda name: median(times, name))
    limit = f"{rate / 1e6:.0f} MB/s" if rate else "no limit"
    print(f"\nlatency {latency * 1000:.0f} ms, {limit}, {size / 2**30:.2f} GiB, medians of {options.repetitions}")
    print(f"{'':16} {'wall s':>8} {'cpu s':>8} {'GB/s':>7} {'rate / best':>12} {'requests / GiB':>15} {'bytes':>8}")
    for name in acts:
        requests = sum(costs[name].get(kind, 0) for kind in ("get", "head", "list")) / (size / 2**30)
        share = costs[name]["bytes"] / size
        single = sorted(ratios(times, best, name))
        print(
            f"{name:16} {median(times, name):8.2f} {median(times, name, 'cpu'):8.2f} "
            f"{size * share / median(times, name) / 1e9:7.2f} {ratio(times, best, name):12.2f} {requests:15.0f} "
            f"{share:8.2%}  {single[0]:.2f} … {single[-1]:.2f}"
        )


def rounds(steps: int, hidden: int) -> None:
    """What two rounds of a patrol at level replicas read of a run of many steps; nothing changes between them."""
    from synthetic_run import write_run

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text) / "bucket"
        # Of this width one layer and the embedding.
        write_run(folder / "run", 1, steps, hidden)
        size = size_of(folder)
        print(f"\nlevel replicas, {steps} steps, {size / 2**30:.1f} GiB in {len(files_below(folder))} objects")
        with served(folder, 0.0) as address:
            before = stats(address)
            for number in (1, 2):
                command = ["auditor", "patrol", "s3://bucket", "--ledger", f"{text}/ledger", "--level", "replicas"]
                taken = time.perf_counter()
                done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
                taken = time.perf_counter() - taken
                said, after = json.loads(done.stdout), stats(address)
                counts = {key: after[key] - before.get(key, 0) for key in after}
                print(
                    f"round {number}: exit code {done.returncode}, {said['num_bytes_read']:,} bytes of weights, "
                    f"{counts.get('bytes', 0):,} bytes from the service ({counts.get('bytes', 0) / size:.3%}), "
                    f"{counts.get('get', 0)} GET, {counts.get('list', 0)} LIST, {taken:.1f} s"
                )
                before = after


def listing(keys: int) -> None:
    """How fast many keys are gone through, and in how much memory."""
    script = (
        "import sys, time; from auditor.storage.roots import store_at; t = time.time(); "
        "print(sum(1 for _ in store_at('s3://many').walk(sys.argv[1])), time.time() - t); "
        "print(dict(line.split(':') for line in open('/proc/self/status'))['VmHWM'].split()[0])"
    )
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), 0.0, keys=keys):
        for after in (f"run{keys // 1000 - 2:07d}/step/999", ""):
            done = subprocess.run([sys.executable, "-c", script, after], capture_output=True, text=True, check=True)
            count, seconds, peak = done.stdout.split()
            each = f"{int(count) / float(seconds):,.0f} a second, peak memory {int(peak) / 1024:.0f} MiB"
            print(f"listing: {int(count):,} keys in {float(seconds):.1f} s, {each}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--settings", default="0,0.02,0.02@400e6", help="seconds before every answer, @ bytes a second")
    parser.add_argument("--connections", default="8,32")
    parser.add_argument("--threads", default="0", help="of the check; 0: its default")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100, help="of the part `rounds`")
    parser.add_argument("--hidden", type=int, default=512, help="of the part `rounds`: about 100 MB a step")
    parser.add_argument("--parts", default="speed,rounds,listing")
    options = parser.parse_args()
    options.connections = [int(text) for text in options.connections.split(",")]
    options.threads = [int(text) for text in options.threads.split(",")]
    if "speed" in options.parts:
        from synthetic_run import write_run

        with tempfile.TemporaryDirectory() as folder:
            write_run(Path(folder) / "run", int(options.gib * 2**30))
            for setting in options.settings.split(","):
                latency, _, rate = setting.partition("@")
                compare(Path(folder) / "run", options, float(latency), float(rate or 0))
    if "rounds" in options.parts:
        rounds(options.steps, options.hidden)
    if "listing" in options.parts:
        listing(options.keys)
