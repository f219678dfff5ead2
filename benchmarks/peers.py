"""The same job by `auditor` and by scripts of the kind that people write with torch, DCP and safetensors.

Content: weights of two tensor-parallel ranks in bf16, masters and both moments in fp32, with norms that both ranks
hold, written once in each format. Job: nothing is NaN or infinite; minimum, maximum, zeros and norm of every tensor;
replicas are equal; weights are their masters rounded; moments fit each other. `auditor` digests every byte besides.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from synthetic_run import BETAS, TP, Values, local_shapes, write_run
from timing import interleaved, median, plain_read, ratio, size_of

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore

ROLES = ("weight", "master", "exp_avg", "exp_avg_sq")
BOUND = 7.27
"""What |m| / sqrt(v) can reach with betas of 0.9 and 0.999; see docs/optimizer-bound.md."""
TINY = 2.0**-116
HIDDEN, STEP = 1024, 100


# The content


def tensors_of(tp: int, layers: int, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
    """One rank's tensors by role and name, as in the run that `auditor` reads."""
    for group in local_shapes(HIDDEN, layers):
        for name, shape in group.items():
            master = values.of(name, shape, STEP, tp)
            yield f"weight/{name}", master.bfloat16()
            yield f"master/{name}", master
            yield f"exp_avg/{name}", master * 0.01
            yield f"exp_avg_sq/{name}", master.square() * 1e-4


def write_all(folder: Path, num_bytes: int) -> int:
    """The content in all formats; the number of layers."""
    write_run(folder / "run", num_bytes, steps=1, hidden=HIDDEN)
    layers = len(list((folder / "run").glob("*/layer_*-model_00-*"))) - 2
    shapes = [torch.Size(shape).numel() for group in local_shapes(HIDDEN, layers) for shape in group.values()]
    values = Values(max(shapes))
    for kind in ("torch", "safetensors", "dcp"):
        (folder / kind).mkdir()
    for tp in range(TP):
        state = dict(tensors_of(tp, layers, values))
        torch.save(state, folder / "torch" / f"rank{tp}.pt")
        safetensors.torch.save_file(state, folder / "safetensors" / f"rank{tp}.safetensors")
        dcp.save(
            state, storage_writer=dcp.FileSystemWriter(folder / "dcp" / f"rank{tp}", sync_files=False), no_dist=True
        )
    return layers


def replicated(name: str) -> bool:
    """Whether both ranks hold the whole tensor: norms, biases of row-parallel layers."""
    return "norm" in name or name.endswith(("dense.bias", "4h_to_h.bias")) or name.count(".") == 1


# The scripts


@dataclass(slots=True)
class Found:
    """What a script has to say."""

    wrong: list[str] = field(default_factory=list)
    statistics: dict[str, tuple[float, float, int, float]] = field(default_factory=dict)


def with_torch(ranks: list[dict[str, torch.Tensor]]) -> Found:
    """All checks over loaded state."""
    found = Found()
    for tp, state in enumerate(ranks):
        for key, tensor in state.items():
            if not torch.isfinite(tensor).all():
                found.wrong.append(f"{key} is not finite")
            numbers = tensor.float()
            least, most = (value.item() for value in torch.aminmax(numbers))
            zeros = tensor.numel() - int(torch.count_nonzero(tensor))
            found.statistics[f"{tp}/{key}"] = least, most, zeros, torch.linalg.vector_norm(numbers).item()
            role, name = key.split("/", 1)
            if tp and replicated(name) and not torch.equal(tensor, ranks[0][key]):
                found.wrong.append(f"{key} differs between the ranks")
            if role == "weight" and not torch.equal(tensor, state[f"master/{name}"].to(torch.bfloat16)):
                found.wrong.append(f"{name} is not its master rounded")
            if role == "exp_avg":
                limit = BOUND * (state[f"exp_avg_sq/{name}"] + TINY).sqrt()
                if (tensor.abs() > limit).any():
                    found.wrong.append(f"the moments of {name} contradict each other")
    return found


def torch_load(folder: Path, mmap: bool) -> Found:
    """`torch.load`."""
    return with_torch([torch.load(folder / "torch" / f"rank{tp}.pt", mmap=mmap) for tp in range(TP)])


def dcp_load(folder: Path) -> Found:
    """`torch.distributed.checkpoint.load`, into tensors made from the metadata."""
    ranks = []
    for tp in range(TP):
        reader = dcp.FileSystemReader(folder / "dcp" / f"rank{tp}")
        entries = reader.read_metadata().state_dict_metadata
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        ranks.append(state)
    return with_torch(ranks)


def safetensors_numpy(folder: Path) -> Found:
    """`safetensors.safe_open` with numpy, which has no bfloat16: its bits are widened to float32."""
    found = Found()
    files = [folder / "safetensors" / f"rank{tp}.safetensors" for tp in range(TP)]
    opened = [safetensors.safe_open(file, framework="numpy") for file in files]
    halves = [bfloat16_of(file) for file in files]
    for tp in range(TP):
        for key in opened[tp].keys():  # noqa: SIM118
            role, name = key.split("/", 1)
            bits = halves[tp](key) if role == "weight" else None
            array = opened[tp].get_tensor(key) if bits is None else (bits.astype(np.uint32) << 16).view(np.float32)
            if not np.isfinite(array).all():
                found.wrong.append(f"{key} is not finite")
            zeros = array.size - int(np.count_nonzero(array))
            norm = float(np.linalg.norm(array.reshape(-1)))
            found.statistics[f"{tp}/{key}"] = float(array.min()), float(array.max()), zeros, norm
            if tp and replicated(name):
                other = halves[0](key) if bits is not None else opened[0].get_tensor(key)
                if not np.array_equal(array if bits is None else bits, other):
                    found.wrong.append(f"{key} differs between the ranks")
            if bits is not None:
                master = opened[tp].get_tensor(f"master/{name}").view(np.uint32)
                if not np.array_equal(bits, ((master + 0x7FFF + (master >> 16 & 1)) >> 16).astype(np.uint16)):
                    found.wrong.append(f"{name} is not its master rounded")
            if role == "exp_avg":
                limit = np.float32(BOUND) * np.sqrt(opened[tp].get_tensor(f"exp_avg_sq/{name}") + np.float32(TINY))
                if (np.abs(array) > limit).any():
                    found.wrong.append(f"the moments of {name} contradict each other")
    return found


def bfloat16_of(file: Path) -> Callable[[str], np.ndarray]:
    """Reads a file's bfloat16 tensors as uint16, by its header: `safe_open` refuses them without another package."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
    content = np.memmap(file, np.uint8, "r", offset=8 + length)

    def read(key: str) -> np.ndarray:
        low, high = header[key]["data_offsets"]
        return np.array(content[low:high]).view(np.uint16).reshape(header[key]["shape"])

    return read


def ours(folder: Path, kernels: str) -> None:
    """`auditor check --level values`."""
    settings = Settings(level=Level.VALUES, threads=1, kernels=kernels)
    (run,) = audit(LocalStore(folder / "run"), settings).runs
    assert not run.findings
    assert all(run.steps[0].judgements[name].num_holds for name in ("CST001", "OPT011", "REP001", "NUM001"))


def compare(folder: Path, options: argparse.Namespace) -> None:
    layers = write_all(folder, int(options.gib * 2**30))
    scripts = {
        "torch.load": lambda: torch_load(folder, mmap=False),
        "torch.load mmap": lambda: torch_load(folder, mmap=True),
        "DCP load": lambda: dcp_load(folder), "safetensors + numpy": lambda: safetensors_numpy(folder),
    }  # fmt: skip
    own = [f"auditor {kernels}" for kernels in options.kernels]
    acts: dict[str, Callable[[], object]] = {"plain read": lambda: plain_read(folder / "run", 1)}
    acts |= {name: lambda name=name: ours(folder, name.split()[1]) for name in own}
    # Once untimed: pages are then in the cache, loops compiled, and all must agree.
    expected = None
    for name, script in scripts.items():
        found = script()
        assert not found.wrong, f"{name}: {found.wrong[0]}"
        expected = expected or found.statistics
        for key, value in found.statistics.items():
            assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(value, expected[key], strict=True)), (name, key)
        acts[name] = script
    for name in own:
        acts[name]()
    times = interleaved(acts, options.repetitions)
    size = size_of(folder / "run") / 2**30
    print(
        f"{size:.2f} GiB, {layers} layers, betas {BETAS}, 1 thread each, medians of {options.repetitions} interleaved"
    )
    print(f"{'':20} {'wall s':>8} {'cpu s':>8}" + "".join(f"{f'cpu / {name}':>22}" for name in own))
    for name in acts:
        factors = "".join(f"{ratio(times, name, mine, 'cpu'):22.2f}" for mine in own)
        print(f"{name:20} {median(times, name):8.2f} {median(times, name, 'cpu'):8.2f}{factors}")


def in_one_thread() -> None:
    """Begin anew with the libraries' own threads switched off: they read these names when they are loaded."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    if any(os.environ.get(name) != "1" for name in names):
        os.environ.update(dict.fromkeys(names, "1"))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=["numpy", "numba"])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    in_one_thread()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        compare(Path(scratch), options)


if __name__ == "__main__":
    main()
