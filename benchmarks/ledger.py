"""What a ledger and a bisection save, on a real run of 40 saves with a planted onset; how far off are sketches?"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from timing import take
from torch import nn

from auditor.audit import audit
from auditor.ledger.folder import open_ledger
from auditor.ledger.tree import Ledger
from auditor.observe.sketch import BLOCK, sketch_rows
from auditor.report.ledger_report import distance
from auditor.reports import Report
from auditor.settings import Settings
from auditor.storage.local import LocalStore
from auditor.storage.store import Store
from auditor.storage.watched import WatchedStore

TABLES = {"numbers", "lanes", "extrema", "sum_squares"}
"""Of a record, what grows with the number of pieces."""
SAVES, EVERY, ONSET, SEED = 40, 10, 265, 20240611
"""From update 265 on one rank does not clip its gradients: the save of step 270 is the first to show it."""


def train(root: Path, width: int) -> None:
    """Two ranks that average their gradients as DistributedDataParallel does, each with a file of its own."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    ranks = [nn.Sequential(nn.Embedding(256, width), nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                           nn.Linear(2 * width, 256)) for _ in range(2)]  # fmt: skip
    ranks[1].load_state_dict(ranks[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in ranks]
    for update in range(1, SAVES * EVERY + 1):
        for model in ranks:
            tokens, noise = torch.randint(256, (32,)), torch.randint(16, (32,))
            model.zero_grad()
            nn.functional.cross_entropy(model(tokens), (tokens * 7 + noise) % 256).backward()
        for pair in zip(*(model.parameters() for model in ranks), strict=True):
            mean = sum(parameter.grad for parameter in pair) / 2
            for parameter in pair:
                parameter.grad = mean.clone()
        for rank, (model, optimizer) in enumerate(zip(ranks, optimizers, strict=True)):
            if rank == 0 or update < ONSET:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        if update % EVERY == 0:
            folder = root / f"step_{update}"
            folder.mkdir(parents=True)
            for rank, (model, optimizer) in enumerate(zip(ranks, optimizers, strict=True)):
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": update,
                           "world_size": 2}  # fmt: skip
                torch.save(content, folder / f"rank_{rank}.pt")


def told(name: str, report: Report, files: int, seconds: float, cpu: float) -> None:
    (run,) = report.runs
    (drift,) = [finding for finding in run.findings if finding.id == "REP001"]
    interval = drift.intervals[-1]
    assert (interval.last_good, interval.first_bad) == (260, 270), interval
    law = f"{interval.law.law} {interval.law.rate:.3g}" if interval.law else "none"
    looked = sum(not step.recalled for step in run.steps)
    onset = f"onset ({interval.last_good}, {interval.first_bad}]"
    seen = f"{looked:>3} steps read  {run.coverage.num_bytes_read / 1e6:9.2f} MB"
    print(
        f"{name:<22} {seen} of weights  {files:>3} files opened  {seconds:6.2f} s  {cpu:6.2f} cpu-s  {onset}  law {law}"
    )


def measure(root: Path, ledger: Path) -> None:
    last = root / f"step_{SAVES * EVERY}"
    away = last.rename(root.parent / last.name)

    def back(store: Store) -> Report:
        away.rename(last)
        return audit(store, Settings(), ledger=open_ledger(str(ledger)))

    cases = {
        "scan of all but one": lambda store: audit(store, Settings()),
        "ledger written": lambda store: audit(store, Settings(), ledger=open_ledger(str(ledger))),
        "nothing changed": lambda store: audit(store, Settings(), ledger=open_ledger(str(ledger))),
        "one save more": back,
        "scan": lambda store: audit(store, Settings()),
        "bisect": lambda store: audit(store, Settings(bisect=True)),
    }
    audit(LocalStore(root), Settings())
    for name, case in cases.items():
        found: list[Report] = []
        store = WatchedStore(LocalStore(root))
        taken = take(lambda case=case, found=found, store=store: found.append(case(store)))
        files = sum((root / seen).is_file() for seen in store.seen)
        told(name, found[0], files, taken.wall, taken.cpu)


def sizes(root: Path, ledger: Path) -> None:
    files = [path for path in ledger.rglob("*") if path.is_file()]
    known = Ledger(LocalStore(ledger))
    (run,) = known.runs()
    names = known.names(run)
    accounts = [known.account(name) for name in names]
    num_pieces, num_contents = (sum(getattr(one, key) for one in accounts) for key in ("num_pieces", "num_contents"))
    distinct = sum(one.num_sketches for one in accounts)
    of_pieces = sum(path.stat().st_size for path in files if not TABLES.isdisjoint(path.parts))
    of_sketches = sum(path.stat().st_size for path in files if "sketches" in path.parts)
    total = sum(path.stat().st_size for path in files)
    run_bytes = sum(path.stat().st_size for path in root.rglob("*.pt"))
    print(f"ledger {total / 1e6:.2f} MB in {len(files)} objects, of {run_bytes / 1e6:.1f} MB of checkpoints: "
          f"{num_pieces} pieces, {num_contents} contents of which {distinct} distinct")  # fmt: skip
    sketch, rest = of_sketches / max(1, distinct), (total - of_pieces) / max(1, distinct)
    each = f"sketches {sketch:.0f} B, all but pieces {rest:.0f} B"
    described = sum(path.stat().st_size for path in files if path.name == "zarr.json" and TABLES & {*path.parts})
    data = (of_pieces - described) / num_pieces
    print(
        f"  measured of pieces {data:.1f} B each, and {described / len(names):.0f} B a step; {each} a distinct content"
    )
    first, last = (known.record(names[at]) for at in (0, -1))
    true = true_distance(root / "step_10/rank_0.pt", root / f"step_{SAVES * EVERY}/rank_0.pt")
    print(f"  weights of the first and the last save: {distance(first, last):.4f} by sketches, {true:.4f} truly")


def true_distance(one: Path, other: Path) -> float:
    left, right = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    apart = sum(float(((left[name] - right[name]).double() ** 2).sum()) for name in left)
    return (apart / sum(float((left[name].double() ** 2).sum()) for name in left)) ** 0.5


def errors(tries: int) -> None:
    """Relative errors of lengths, over other hashes: a difference moved along by whole blocks meets others."""
    random = np.random.default_rng(SEED)
    print("sketch error of |difference|, in percent: root mean square, largest of", tries)
    for width in (64, 1000, 2048, 4096):
        rows = (1 << 18) // width
        kinds = {
            "iid": random.normal(size=(rows, width)),
            "rank one": np.outer(random.normal(size=rows), random.normal(size=width)),
            "one column": np.where(np.arange(width) == width // 3, 1.0, 0.0) * np.ones((rows, 1)),
            "one row": np.where(np.arange(rows) == rows // 3, 1.0, 0.0)[:, None] * np.ones(width),
            "constant": np.ones((rows, width)),
        }
        for name, difference in kinds.items():
            length = np.linalg.norm(difference)
            found = np.array([np.linalg.norm(sketch_rows(difference.reshape(1, -1), np.array([k * BLOCK * 4096])))
                              for k in range(tries)]) / length - 1  # fmt: skip
            usual, most = 100 * np.sqrt(np.mean(found**2)), 100 * np.abs(found).max()
            print(f"  rows of {width:<5} {name:<11} {usual:5.1f}  {most:5.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=160, help="of the model; 160 gives 80 files of 1.6 MB")
    parser.add_argument("--tries", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, ledger = Path(folder) / "run", Path(folder) / "ledger"
        train(root, options.width)
        measure(root, ledger)
        sizes(root, ledger)
    errors(options.tries)


if __name__ == "__main__":
    main()
