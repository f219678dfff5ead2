"""One state on random meshes, cut by torch's own planner and written by its own writer: one digest, nothing merged.

Ranks are taken one after another in one process: torch's `fake` process group lets each make its own plan.
"""

import math
import random
import warnings

import pytest

from tests.adapters.test_dcp import bits, digests, loaded, role_and_name

NAMES = ("a.weight", "b.weight", "c.bias")
ROLES = ("model.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def state_of(torch, source):
    """Tensors of odd sizes, of which some ranks get nothing."""
    values = torch.Generator().manual_seed(source.randrange(1 << 30))
    shapes = {name: [source.randrange(1, 12) for _ in range(2 if "weight" in name else 1)] for name in NAMES}
    dtypes = {name: source.choice([torch.float32, torch.bfloat16, torch.float64]) for name in NAMES}
    return {
        role.format(name): torch.randn(shape, generator=values).to(dtypes[name] if role == ROLES[0] else torch.float32)
        for name, shape in shapes.items() for role in ROLES
    }  # fmt: skip


def saved_on(torch, folder, state, mesh, placements):
    """Save a state as all ranks of ``mesh`` would."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    planned = [plan_of(torch, dcp, rank, state, mesh, placements) for rank in range(math.prod(mesh))]
    writer = dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    plans, metadata = planned[0][0].create_global_plan([writer.prepare_local_plan(plan) for _, plan in planned])
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for (planner, _), plan in zip(planned, writer.prepare_global_plan(plans), strict=True)
    ]
    writer.finish(metadata, results)
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


def placed(source, state, mesh):
    """A placement for every parameter, at random; its moments lie as it does."""
    from torch.distributed.tensor import Replicate, Shard

    found = {
        name: [
            Replicate() if source.random() < 0.3 else Shard(source.randrange(2 if "weight" in name else 1))
            for _ in mesh
        ]
        for name in NAMES
    }  # fmt: skip
    return {role.format(name): found[name] for name in NAMES for role in ROLES}


@pytest.mark.parametrize("seed", range(5))
def test_random_meshes_and_odd_sizes(torch, tmp_path, seed):
    source = random.Random(seed)
    state = state_of(torch, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = None
        for number, mesh in enumerate(
            ((1,), (source.randrange(2, 7),), (source.randrange(2, 4), source.randrange(2, 4)))
        ):
            folder = saved_on(torch, tmp_path / f"step-{number}", state, mesh, placed(source, state, mesh))
            found = digests(folder)
            wanted = wanted or found
            assert len(found) == len(NAMES) * len(ROLES)
            assert found == wanted, mesh
        whole = {role_and_name(key): bits(tensor) for key, tensor in loaded(folder).items()}
    assert whole == {role_and_name(key): bits(tensor) for key, tensor in state.items()}
