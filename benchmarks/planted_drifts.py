"""Which planted drifts does a framework report, which a reload, and which do we? See README.md here.

    python benchmarks/planted_drifts.py [--jax PYTHON]     PYTHON: one that has jax and orbax-checkpoint

Every drift is planted in memory right before (or while) a step is saved, and the same job saves a healthy step before.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

RANKS, GOOD, BAD = 4, 1, 2
HERE = Path(__file__).parent


def some(*shape):
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def state_of(lay):
    """A model of two tensors and its moments, laid out by ``lay``."""
    model = {"up.weight": some(8, 6), "norm.weight": some(8)}
    moments = {name: {"exp_avg": value * 0.1, "exp_avg_sq": value * value} for name, value in model.items()}
    state = {"model": model, "optimizer": {"state": moments}}

    def laid(values):
        return {k: laid(v) if isinstance(v, dict) else lay(v) for k, v in values.items()}

    return laid(state)


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def change(value):
    local(value).view(-1)[0] += 0.25


# What is planted: told the state, the rank, and whether this is the step that is spoilt


def parameter(state, rank):
    if rank == 2:
        change(state["model"]["norm.weight"])


def moment(state, rank):
    if rank == 2:
        change(state["optimizer"]["state"]["norm.weight"]["exp_avg_sq"])


def nothing(state, rank):
    pass


def hybrid():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return lambda value: distribute_tensor(value, mesh, (Replicate(), Shard(0)))


def whole():
    return lambda value: value.clone()


def plain_save(state, path, rank):
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=path)


def unstaged_save(state, path, rank):
    """Nothing is staged, storage is slow, and the next update comes before all is copied."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    class Slow(FileSystemWriter):
        def write_data(self, plan, planner):
            time.sleep(1)
            return super().write_data(plan, planner)

        def stage(self, state_dict):
            return state_dict

    saved = dcp.async_save(state, storage_writer=Slow(path))
    change(state["model"]["up.weight"])
    saved.result()


def flipping_save(state, path, rank):
    """A bit flips on the way to storage."""
    import torch.distributed as dist

    plain_save(state, path, rank)
    dist.barrier()
    if rank == 0:
        content = local(state["model"]["up.weight"])[:1].numpy().tobytes()
        for file in path.glob("*.distcp"):
            raw = bytearray(file.read_bytes())
            if (at := raw.find(content)) >= 0:
                raw[at] ^= 1
                file.write_bytes(raw)
    dist.barrier()


SCENES = {
    "parameter of one HSDP replica": (hybrid, parameter, plain_save),
    "second moment of one HSDP replica": (hybrid, moment, plain_save),
    "parameter of one DDP rank": (whole, parameter, plain_save),
    "second moment of one DDP rank": (whole, moment, plain_save),
    "weights updated while an unstaged async_save copies them": (hybrid, nothing, unstaged_save),
    "one bit flipped between memory and storage": (hybrid, nothing, flipping_save),
}


def flat(state):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return {key: local(value).clone() for key, value in flatten_state_dict(state)[0].items()}


def reloaded(state, path):
    """What this rank gets back, as somebody who resumes would."""
    import copy

    import torch.distributed.checkpoint as dcp

    fresh = copy.deepcopy(state)
    dcp.load(fresh, checkpoint_id=path)
    return flat(fresh)


def scene(rank, name, folder):
    import torch
    import torch.distributed as dist

    from auditor.hooks.torch_hook import TorchHook

    lay, plant, save = SCENES[name]
    hook, state = TorchHook(raising=True), state_of(lay())
    hook.witness(GOOD, state, folder / f"step-{GOOD}")
    plain_save(state, folder / f"step-{GOOD}", rank)
    plant(state, rank)
    path = folder / f"step-{BAD}"
    hook.witness(BAD, state, path)
    held = flat(state)
    with warnings.catch_warnings(record=True) as at_save:
        warnings.simplefilter("always")
        save(state, path, rank)
    dist.barrier()
    with warnings.catch_warnings(record=True) as at_load:
        warnings.simplefilter("always")
        found = reloaded(state, path)
    unlike = sorted(key for key in held if not torch.equal(held[key], found[key]))
    said = {"save": _said(at_save), "load": _said(at_load), "unlike": unlike}
    (folder.parent / f"{folder.name}.{rank}.json").write_text(json.dumps(said))
    dist.barrier()


def _said(caught):
    """Warnings that speak of values, replicas or tensors being unequal; none of the frameworks' other ones do."""
    words = ("replica", "mismatch", "differ", "inconsisten", "corrupt", "checksum")
    return sorted({str(w.message)[:80] for w in caught if any(word in str(w.message).lower() for word in words)})


def work(rank, folder, port):
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("cpu:gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    for number, name in enumerate(SCENES):
        scene(rank, name, folder / f"scene{number}")
    dist.destroy_process_group()


# JAX


def jax_scenes(folder):
    """Eight CPU devices, data 2 x model 4, saved by Orbax."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from auditor.hooks.jax_hook import JaxHook

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def put(values, *spec):
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    def drifted(array):
        parts = []
        for shard in array.addressable_shards:
            values = np.array(shard.data)
            if np.argwhere(mesh.devices == shard.device)[0][0] == 1:
                values = values + np.float32(0.25)
            parts.append(jax.device_put(values, shard.device))
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    def buffers(tree):
        return {jax.tree_util.keystr(path): [np.array(shard.data) for shard in leaf.addressable_shards]
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}  # fmt: skip

    draw = np.random.default_rng(5)
    tree = {"params": {"up": put(draw.standard_normal((16, 8)).astype("f4"), None, "model"),
                       "scale": put(draw.standard_normal(16).astype("f4"))},
            "momentum": {"scale": put(draw.standard_normal(16).astype("f4"))}}  # fmt: skip
    for number, group in enumerate(("params", "momentum")):
        spoilt = {**tree, group: {**tree[group], "scale": drifted(tree[group]["scale"])}}
        hook, path = JaxHook(raising=True), folder / f"jax{number}"
        options = ocp.CheckpointManagerOptions(max_to_keep=None)
        with ocp.CheckpointManager(path, options=options) as manager, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step, held in ((GOOD, tree), (BAD, spoilt)):
                hook.save(manager, step, args=ocp.args.StandardSave(held))
            hook.close(manager)
            found = manager.restore(BAD, args=ocp.args.StandardRestore(spoilt))
        mine, theirs = buffers(spoilt), buffers(found)
        devices = [n for n in range(8) if any((mine[key][n] != theirs[key][n]).any() for key in mine)]
        said = {"said": _said(caught), "unlike": devices}
        path.with_suffix(".json").write_text(json.dumps(said))


# What is said


def ours(run):
    """Findings at the spoilt step: id, tensors, places."""
    from auditor import check

    found = {}
    for finding in check(str(run), level="values").runs[0].findings:
        at = [x for x in finding.locations if x.step == BAD]
        assert all(x.step == BAD for x in finding.locations), finding
        places = sorted({str(x.coordinate) for x in at})
        found[finding.id] = f"{finding.id} {', '.join(sorted({f'{x.tensor} ({x.role.value})' for x in at}))}"
        if finding.id == "REP001":
            found[finding.id] += f" at {', '.join(places)}"
    return "; ".join(found.values()) or "nothing"


def row(name, run, framework, reload):
    """One line of the table; without the witness the same run is judged once more."""
    with_witness = ours(run)
    shutil.rmtree(run / ".auditor")
    print(f"| {name} | {framework or 'nothing'} | {reload} | {ours(run)} | {with_witness} |", flush=True)


def main(options):
    import torch.multiprocessing as processes

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        processes.start_processes(work, (folder, port), nprocs=RANKS, start_method="spawn")
        print("| planted | the framework says | a reload differs from memory on | we, without witness | we, with it |")
        print("|---|---|---|---|---|")
        for number, name in enumerate(SCENES):
            ranks = [json.loads((folder / f"scene{number}.{rank}.json").read_text()) for rank in range(RANKS)]
            framework = "; ".join(sorted({text for said in ranks for text in (*said["save"], *said["load"])}))
            unlike = [str(rank) for rank, said in enumerate(ranks) if said["unlike"]]
            row(name, folder / f"scene{number}", framework, f"ranks {', '.join(unlike)}" if unlike else "none")
        if options.jax:
            environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu",
                           "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # fmt: skip
            subprocess.run([options.jax, __file__, "--jax-scenes", text], check=True, env=environment)
            for number, name in enumerate(("parameter", "moment")):
                said = json.loads((folder / f"jax{number}.json").read_text())
                unlike = f"devices {', '.join(map(str, said['unlike']))}" if said["unlike"] else "none"
                title = f"{name} of one data-parallel half of a jax.Array, Orbax"
                row(title, folder / f"jax{number}", "; ".join(said["said"]), unlike)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax", default="")
    parser.add_argument("--jax-scenes", type=Path)
    arguments = parser.parse_args()
    if arguments.jax_scenes:
        jax_scenes(arguments.jax_scenes)
    else:
        main(arguments)
