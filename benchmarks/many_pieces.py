"""What small pieces cost: a million pieces of 64 bytes end to end, and columns of 256 bytes against whole stretches."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from timing import BUFFER_BYTES, Taken, interleaved, median, ratio, take

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.invariants.registry import invariants
from auditor.model.catalog import Catalog, File, Role
from auditor.model.dtype import BFLOAT16, FLOAT32
from auditor.model.mesh import Coordinate, Mesh
from auditor.model.observation import Read
from auditor.model.region import Box
from auditor.model.run import StepEvidence
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.storage.local import LocalStore

PIECE = 16
"""Elements of float32: 64 bytes."""


def random_file(store: LocalStore, folder: Path, name: str, num_bytes: int) -> File:
    """Numbers of usual size, as float32."""
    draw = np.random.default_rng(0)
    with (folder / name).open("wb") as out:
        for done in range(0, num_bytes, BUFFER_BYTES):
            count = min(BUFFER_BYTES, num_bytes - done)
            out.write(draw.standard_normal(count // 4, np.float32).tobytes())
    with store.open(name) as handle:
        return File(name, num_bytes, handle.entry.identity)


def catalog_of(builder: CatalogBuilder, axis: str, extent: int) -> Catalog:
    return builder.build(1, "", "synthetic", Mesh(((axis, extent),)), {}, ())


def many(store: LocalStore, file: File, num_pieces: int, num_tensors: int) -> Catalog:
    """Every tensor cut along its one dim into pieces of 64 bytes, one file for all."""
    each = num_pieces // num_tensors
    builder = CatalogBuilder()
    number, places = builder.file(file), [Coordinate.of(dp=rank) for rank in range(8)]
    for at in range(num_tensors):
        tensor = builder.tensor(f"layers.{at}.weight", Role.PARAMETER, FLOAT32, (each * PIECE,), at)
        for piece in range(each):
            first, offset = piece * PIECE, (at * each + piece) * PIECE * 4
            builder.piece(tensor, number, offset, Box((first,), (first + PIECE,)), places[piece % 8])
    return catalog_of(builder, "dp", 8)


def pieces(folder: Path, options: argparse.Namespace) -> None:
    store = LocalStore(folder)
    file = random_file(store, folder, "pieces", options.pieces * PIECE * 4)
    made: list[Catalog] = []
    build = take(lambda: made.append(many(store, file, options.pieces, options.tensors)))
    (catalog,) = made
    taken: dict[str, list[Taken]] = {}
    for kernels in options.kernels:
        end_to_end(store, catalog, kernels, options.threads)
        for _ in range(options.repetitions):
            for name, one in end_to_end(store, catalog, kernels, options.threads).items():
                taken.setdefault(f"{name} {kernels}", []).append(one)
    print(f"\n{options.pieces:,} pieces of 64 B over {options.tensors:,} tensors, {options.threads} thread(s)")
    print(f"the Catalog took {build.cpu:.1f} cpu s, which is not in what follows")
    print(f"{'us a piece':24} {'wall':>8} {'cpu':>8}  wall of single repetitions")
    for name in taken:
        wall, cpu = (1e6 * median(taken, name, what) / options.pieces for what in ("wall", "cpu"))
        single = sorted(1e6 * one.wall / options.pieces for one in taken[name])
        if wall >= 0.01:
            print(f"{name:24} {wall:8.2f} {cpu:8.2f}  {single[0]:.2f} … {single[-1]:.2f}")
    if options.profile:
        profiled(lambda: end_to_end(store, catalog, options.kernels[-1], options.threads))


def end_to_end(store: LocalStore, catalog: Catalog, kernels: str, threads: int) -> dict[str, Taken]:
    """Seconds of the pass, of every invariant, and of all of it."""
    # What a Catalog computes once for all is paid in every repetition.
    catalog.__dict__.pop("rows_by_tensor", None)
    seen = []

    def measure() -> None:
        with ThreadPoolExecutor(threads) as pool:
            pairings = [p for item in invariants() if item.pairings for p in item.pairings(catalog)]
            rows = wanted_rows(catalog)
            seen.append(observe(store, catalog, rows, Everything(pool), pairings=pairings, kernels=kernels))

    found = {"observe": take(measure)}
    assert (seen[0].pieces["read"] == Read.DONE).all()
    evidence = StepEvidence(catalog, seen[0])
    for item in invariants():
        if item.judge_step:
            judgements = []
            found[item.id] = take(lambda item=item, out=judgements: out.append(item.judge_step(evidence)))
            assert not judgements[0].violations, judgements[0].violations[0].message
    total = Taken(sum(one.wall for one in found.values()), sum(one.cpu for one in found.values()))
    return {**found, "end to end": total}


def profiled(action) -> None:
    """Where the time goes, in this thread."""
    profile = cProfile.Profile()
    profile.runcall(action)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(25)


def cut(file: File, shape: tuple[int, int], width: int) -> Catalog:
    """One bf16 tensor: in columns of ``width`` elements, each rank's part stored without gaps, or as it is."""
    rows, columns = shape
    builder = CatalogBuilder()
    number = builder.file(file)
    tensor = builder.tensor("layers.0.weight", Role.PARAMETER, BFLOAT16, shape, 0)
    for rank in range(columns // width):
        box = Box((0, rank * width), (rows, (rank + 1) * width))
        builder.piece(tensor, number, rank * rows * width * 2, box, Coordinate.of(tp=rank))
    return catalog_of(builder, "tp", columns // width)


def columns(folder: Path, options: argparse.Namespace) -> None:
    """TP cuts the second dim of a row-parallel weight: a rank's rows are short and lie far apart in the tensor."""
    store, num_bytes = LocalStore(folder), options.mib << 20
    file = random_file(store, folder, "columns", num_bytes)
    shape = (num_bytes // 2 // 1024, 1024)
    cases = {"contiguous": cut(file, shape, 1024), "columns of 128": cut(file, shape, 128)}

    def action(catalog: Catalog, kernels: str):
        def run() -> None:
            with ThreadPoolExecutor(options.threads) as pool:
                seen = observe(store, catalog, wanted_rows(catalog), Everything(pool), kernels=kernels)
            assert (seen.pieces["read"] == Read.DONE).all()
            assert seen.num_bytes_read == num_bytes

        return run

    print(f"\nbf16 {shape}, {options.threads} thread(s), medians of {options.repetitions} interleaved repetitions")
    print(f"{'':24} {'GB/s':>8} {'rate / contiguous':>18} {'of cpu':>7}")
    for kernels in options.kernels:
        acts = {name: action(catalog, kernels) for name, catalog in cases.items()}
        for act in acts.values():
            act()
        times = interleaved(acts, options.repetitions)
        for name in cases:
            speed = num_bytes / median(times, name) / 1e9
            found = [ratio(times, "contiguous", name, what) for what in ("wall", "cpu")]
            print(f"{f'{name} {kernels}':24} {speed:8.2f} {found[0]:18.2f} {found[1]:7.2f}")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=1_000)
    parser.add_argument("--mib", type=int, default=512, help="size of the tensor that is cut in columns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=["numpy", "numba"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="show where the time of the small pieces goes")
    options = parser.parse_args()
    for part in (pieces, columns):
        with scratch_folder() as folder:
            part(folder, options)


if __name__ == "__main__":
    main()
