"""One step of the tiny GPT under FSDP2, two gloo processes, saved by torch.distributed.checkpoint: `… FOLDER`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests.comparison.gpt import BATCH, BETAS, DECAY, EPSILON, RATE, Training, begin, make_batch

RANKS = 2


class Gpt(torch.nn.Module):
    """The functional model with its weights as parameters; a dot in a name is no name of an attribute."""

    def __init__(self, weights):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(weight))

    def forward(self, batch):
        weights = {name.replace("/", "."): parameter for name, parameter in self.named_parameters()}
        return Training().loss(weights, batch)


def work(rank, folder, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    model = Gpt(begin(0))
    fully_shard(model, mesh=mesh)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=RATE, betas=BETAS, eps=EPSILON,
    )  # fmt: skip
    batch = make_batch(0, 1)
    own = batch.take(torch.arange(BATCH).chunk(RANKS)[rank])
    # FSDP2 averages over ranks, the loss is a sum over tokens of all.
    (model(own) * RANKS / batch.valid.sum()).backward()
    optimizer.step()
    weights = {name.replace("/", "."): value for name, value in get_model_state_dict(model).items()}
    state = get_optimizer_state_dict(model, optimizer)
    optim = {
        "state": {name.replace("/", "."): value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [name.replace("/", ".") for name in group["params"]]} for group in state["param_groups"]
        ],
    }
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=Path(folder) / "step-1")
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.spawn(work, (sys.argv[1], 29511), RANKS)
