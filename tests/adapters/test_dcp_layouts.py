"""One state on random meshes, cut by torch's own planner and written by its own writers: one digest, nothing merged.

Ranks are taken one after another in one process: torch's `fake` process group lets each make its own plan. The same
state is saved under the keys of `get_state_dict`, under Megatron-core's (with fp32 masters, all layers in one array),
and its parameters by the Hugging Face writer.
"""

import json
import math
import random
import warnings

import pytest

from tests.adapters.test_dcp import bits, digests, loaded

NAMES = ("a.weight", "b.weight", "c.bias", "decoder.layers.0.w", "decoder.layers.1.w", "decoder.layers.2.w")
LAYERS = NAMES[3:]
TORCH = {
    "parameter": "model.{}", "first_moment": "optimizer.state.{}.exp_avg",
    "second_moment": "optimizer.state.{}.exp_avg_sq",
}  # fmt: skip
MEGATRON = {
    "parameter": "{}", "first_moment": "optimizer.state.exp_avg.{}", "second_moment": "optimizer.state.exp_avg_sq.{}",
    "master": "optimizer.state.fp32_param.{}",
}  # fmt: skip
HUGGING_FACE = {"parameter": "{}"}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def state_of(torch, source):
    """Role and name to tensors of odd sizes, of which some ranks get nothing; layers are of one shape."""
    values = torch.Generator().manual_seed(source.randrange(1 << 30))
    shapes = {name: [source.randrange(1, 12) for _ in range(1 if name == "c.bias" else 2)] for name in NAMES[:4]}
    dtypes = {name: source.choice([torch.float32, torch.bfloat16, torch.float64]) for name in NAMES[:4]}
    state = {}
    for name in NAMES:
        first = LAYERS[0] if name in LAYERS else name
        for role in MEGATRON:
            drawn = torch.randn(shapes[first], generator=values)
            state[role, name] = drawn.to(dtypes[first] if role == "parameter" else torch.float32)
    return state


def keyed(torch, state, form):
    """The state under the keys of one form; Megatron has all layers in one array."""
    found = {form[role].format(name): tensor for (role, name), tensor in state.items() if role in form}
    if form is MEGATRON:
        for key in form.values():
            layers = [found.pop(key.format(name)) for name in LAYERS]
            found[key.format("decoder.layers.w")] = torch.stack(layers)
    return found


def saved_on(torch, folder, state, mesh, placements, form=TORCH):
    """Save a state as all ranks of ``mesh`` would."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    planned = [plan_of(torch, dcp, rank, state, mesh, placements) for rank in range(math.prod(mesh))]
    by_parts = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True) if form is HUGGING_FACE else None
    writer = by_parts or dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    plans, metadata = planned[0][0].create_global_plan([writer.prepare_local_plan(plan) for _, plan in planned])
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for (planner, _), plan in zip(planned, writer.prepare_global_plan(plans), strict=True)
    ]
    writer.finish(metadata, results)
    if form is MEGATRON:
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "common_backend": "torch"}))
    return folder


def plan_of(torch, dcp, rank, state, mesh, placements):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=math.prod(mesh), store=FakeStore())
    try:
        grid = DeviceMesh("cpu", torch.arange(math.prod(mesh)).reshape(mesh), _init_backend=False)
        held = {}
        for key, tensor in state.items():
            how = placements[key]
            shape, offset = compute_local_shape_and_global_offset(tensor.shape, grid, how)
            part = tensor[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))].clone()
            held[key] = DTensor.from_local(
                part, grid, how, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )  # fmt: skip
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(held, is_coordinator=rank == 0)
        return planner, planner.create_local_plan()
    finally:
        torch.distributed.destroy_process_group()


def placed(source, state, mesh, form):
    """A placement for every parameter, at random; its moments and master lie as it does."""
    from torch.distributed.tensor import Replicate, Shard

    found = {}
    for name in (*NAMES, "decoder.layers.w"):
        dims = 1 if name == "c.bias" else 3 if name == "decoder.layers.w" else 2
        how = [Replicate() if source.random() < 0.3 else Shard(source.randrange(dims)) for _ in mesh]
        found |= {key.format(name): how for key in form.values()}
    return found


@pytest.mark.parametrize("seed", range(4))
def test_random_meshes_and_odd_sizes(torch, tmp_path, seed):
    source = random.Random(seed)
    state = state_of(torch, source)
    meshes = [(1,), (source.randrange(2, 7),), (source.randrange(2, 4), source.randrange(2, 4))]
    wanted = {}
    for number, form in enumerate((TORCH, MEGATRON, HUGGING_FACE)):
        tensors = keyed(torch, state, form)
        for mesh in meshes[number % 2 :]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folder = tmp_path / f"iter_{len(wanted):07d}" / f"{number}" / f"step-{len(mesh)}{sum(mesh)}"
                folder.mkdir(parents=True)
                saved_on(torch, folder, tensors, mesh, placed(source, state, mesh, form), form)
                found = digests(folder)
            assert len(found) == len(NAMES) * len(form)
            assert {key: wanted.setdefault(key, held) for key, held in found.items()} == found, mesh
        if form is not HUGGING_FACE:
            # Torch's own loader gives what was saved: the digests are those of the state.
            assert {key: bits(t) for key, t in loaded(folder).items()} == {k: bits(t) for k, t in tensors.items()}
    assert wanted.keys() == state.keys()
    assert all(len(held) == 1 for held in wanted.values())
