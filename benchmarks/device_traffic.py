"""What a witness moves on an accelerator, counted op by op on the CPU: bytes, ops, temporaries. See README.md here.

    python benchmarks/device_traffic.py [--elements 8388608] [--bandwidth 3.35e12] [--launch 5e-6]

The ops are those that `auditor.hooks.torch_digest` gives to a device; nothing is timed. Every op is taken to read its
inputs from memory and to write its outputs there once, so caches make it less. Views move nothing.
"""

import argparse
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auditor.hooks.torch_digest import measured_on_device
from auditor.model.dtype import DTYPES
from auditor.model.region import FlatRange

STATE = {"bfloat16": 1, "float32": 3}
"""Tensors a parameter: itself, and its master and both moments."""


class Counted(TorchDispatchMode):
    """Adds up what every op reads and writes."""

    def __init__(self):
        super().__init__()
        self.num_bytes = self.num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        outputs = [x for x in tree_leaves(found) if torch.is_tensor(x)]
        made = [x for x in outputs if x.untyped_storage().data_ptr() not in before]
        name = str(func)
        in_place = name.split(".")[1].endswith("_")
        if not made and not in_place and "item" not in name and "_to_copy" not in name:
            return found
        self.num_ops += 1
        inputs = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        self.num_bytes += sum(size(x) for x in (*inputs, *(outputs if in_place else made)))
        return found


def size(values):
    """Bytes that lie in memory: an expanded dim is read from where it is."""
    if not values.numel():
        return 0
    extent = 1 + sum((n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True) if s)
    return min(values.numel(), extent) * values.element_size()


def resident(key):
    """Bytes of memory: now (VmRSS), or at most since it was asked for last (VmHWM)."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) << 10


def counted(name, num_elements):
    """What is moved, and the most that is alive beside the tensor."""
    values = torch.ones(num_elements, dtype=getattr(torch, name))
    region = FlatRange(0, num_elements)
    measured_on_device(values, DTYPES[name], (num_elements,), region)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    measured_on_device(values, DTYPES[name], (num_elements,), region)
    peak = resident("VmHWM") - before
    with Counted() as found:
        measured_on_device(values, DTYPES[name], (num_elements,), region)
    return found, peak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes a second")
    parser.add_argument("--launch", type=float, default=5e-6, help="seconds from one op to the next")
    options = parser.parse_args()
    print("| dtype | bytes an element | ops a million elements | temporaries, MiB |")
    print("|---|---|---|---|")
    moved = launched = own = 0.0
    for name, tensors in STATE.items():
        found, peak = counted(name, options.elements)
        each, ops = found.num_bytes / options.elements, found.num_ops / options.elements
        print(f"| {name} | {each:.0f} | {ops * 1e6:.0f} | {peak / 2**20:.0f} |")
        moved, launched = moved + tensors * each, launched + tensors * ops
        own += tensors * torch.empty(0, dtype=getattr(torch, name)).element_size()
    print(f"a parameter with its state ({own:.0f} bytes): {moved:.0f} bytes moved, {launched:.2e} ops")
    print(f"a billion of them: {own * 1e9 / options.bandwidth:.3f} s to read them once at {options.bandwidth:.3g} B/s,")
    print(f"  {moved * 1e9 / options.bandwidth:.2f} s if every temporary went through memory,")
    print(f"  {launched * 1e9 * options.launch:.2f} s of launches at {options.launch * 1e6:.0f} us")
    print(f"to the host: {own * 1e9 / 8192 * 24 / 2**20:.0f} MiB (24 bytes a block of 8 KiB)")
