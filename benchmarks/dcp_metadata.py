"""What an index of a million chunks costs: time and memory of its Catalog, and of the levels that go by it alone.

    python benchmarks/dcp_metadata.py [CHUNKS …]        default: 10000 100000 1000000

Writes, with torch's own classes and pickler, the ``.metadata`` of a model that 1,024 ranks cut into that many chunks,
and data files whose items are real, written by ``torch.save``: 1.3 GB for a million. ``catalog`` is what the Catalog
and COV001 over all of it take; ``check`` is the command, from its start to the report, in a process of its own.
"""

import io
import json
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 1024
ROLES = ("model.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq")


def write(folder, num_chunks):
    """A checkpoint of about ``num_chunks`` chunks."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    width = 4
    described, stored, planner = {}, {}, {}
    ends, files = [0] * RANKS, [f"__{rank}_0.distcp" for rank in range(RANKS)]
    content = item(torch, width)
    length = len(content)
    for number in range(max(1, num_chunks // (len(ROLES) * RANKS))):
        for role in ROLES:
            name = role.format(f"layers.{number}.weight")
            chunks = [ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, width])) for rank in range(RANKS)]
            size = torch.Size([RANKS, width])
            described[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, chunks)
            planner[name] = tuple(name.split(".", 1))
            for rank in range(RANKS):
                place = _StorageInfo(files[rank], ends[rank], length)
                # Every rank reports by itself: its names are strings of their own, as those of its files are.
                stored[MetadataIndex("".join([*name]), torch.Size([rank, 0]), rank)] = place
                ends[rank] += length
    metadata = Metadata(described, planner, stored, StorageMeta("/home", "0"), "1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.write(content * (end // length))
    return len(stored)


def item(torch, width):
    buffer = io.BytesIO()
    torch.save(torch.ones(1, width), buffer)
    return buffer.getvalue()


MEASURED = """
import json, resource, sys, time
from auditor.adapters.adapter import Folder, Match, Options
from auditor.adapters.dcp.adapter import TorchDcp
from auditor.invariants.coverage import pieces_tile_tensors
from auditor.model.observation import unobserved
from auditor.model.run import StepEvidence
from auditor.storage.local import LocalStore
store = LocalStore(sys.argv[1])
adapter, folder, begun = TorchDcp(), Folder.read(store, ""), time.process_time()
catalog = adapter.read(store, folder, Match(1, ""), Options(names_only=sys.argv[2] == "names"))
read = time.process_time()
judged = pieces_tile_tensors(StepEvidence(catalog, unobserved(catalog)))
print(json.dumps({
    "pieces": len(catalog.pieces), "tiled": judged.num_holds, "untiled": len(judged.violations),
    "catalog_cpu_s": round(read - begun, 1), "tiling_cpu_s": round(time.process_time() - read, 1),
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
}))
"""


CHECKED = """
import json, os, resource, subprocess, sys, time
begun = time.time()
command = ["auditor", "check", sys.argv[1], "--level", sys.argv[2], "--format", "json"]
command[0] = os.path.join(os.path.dirname(sys.executable), command[0])
done = subprocess.run(command, capture_output=True, text=True)
report, used = json.loads(done.stdout), resource.getrusage(resource.RUSAGE_CHILDREN)
(run,) = report.get("runs", [report])
print(json.dumps({
    "exit_code": done.returncode, "findings": [found["id"] for found in run["findings"]],
    "pieces": run["coverage"]["num_pieces"], "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    "wall_s": round(time.time() - begun, 1), "peak_mib": used.ru_maxrss >> 10,
}))
"""


def measure(script, folder, level):
    done = subprocess.run([sys.executable, "-c", script, str(folder), level], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr[-2000:]}


def main():
    for count in map(int, sys.argv[1:] or (10_000, 100_000, 1_000_000)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            begun = time.time()
            write_apart(folder, count)
            size = (folder / ".metadata").stat().st_size
            print(f"{count} chunks: .metadata of {size} bytes, written in {time.time() - begun:.0f} s", flush=True)
            for level in ("names", "headers"):
                print("catalog", level, measure(MEASURED, folder, level), flush=True)
                print("check", level, measure(CHECKED, folder, level), flush=True)


def write_apart(folder, count):
    """In a process of its own: what torch takes must not be counted."""
    subprocess.run([sys.executable, __file__, "--write", str(folder), str(count)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
