"""Train the tiny GPT with DeepSpeed itself and save it every few steps: the writer of the sample and of its twin.

    python samples/bloom_drift/train.py OUT [--tp 2 --pp 1 --dp 2] [--fault]

Starts tp x pp x dp processes on the CPU (gloo). DeepSpeed's PipelineModule and BF16_Optimizer write exactly the
files that BLOOM-176B was saved in. With ``--fault`` three things happen *in training*; no saved tensor is edited:

1. from step 50 on, gradient clipping does nothing on tensor-parallel ranks above 0 (BLOOM's bug, DeepSpeed#1801);
2. after step 84 clipping is repaired and every replicated tensor, its fp32 master and its moments are copied from
   tensor-parallel rank 0, as BLOOM's team did when it loaded step 20448;
3. from step 110 on, rank 1 scales the gradient of ``post_attention_layernorm.weight`` by 1 + 2^-6: a second, smaller
   fault in part of the norms.
"""

from __future__ import annotations

import argparse
import enum
import os
import random
import shutil
import subprocess
import sys
import types
from pathlib import Path

CLIPPING_STOPS, RESYNC_AFTER, SECOND_FAULT_FROM = 50, 84, 110
SEED = 20220324


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--fault", action="store_true")
    return parser.parse_args()


def launch(options: argparse.Namespace) -> int:
    """Start one process a rank and wait for all."""
    world = options.tp * options.pp * options.dp
    shutil.rmtree(options.out, ignore_errors=True)
    common = {
        **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531",
        "LOCAL_SIZE": str(world), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(world)
    ]
    return max(rank.wait() for rank in ranks)


def megatron_enum() -> enum.Enum:
    """An argument value of a class from ``megatron.enums``, as in real runs: readers don't have that module."""
    module = types.ModuleType("megatron.enums")
    kind = enum.Enum("PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3}, module="megatron.enums")
    module.PositionEmbeddingType = kind
    sys.modules["megatron"], sys.modules["megatron.enums"] = types.ModuleType("megatron"), module
    return kind.alibi


def megatron_args(options: argparse.Namespace, sizes) -> argparse.Namespace:
    """The ``args`` that Megatron puts into every mp_rank file."""
    import torch

    return argparse.Namespace(
        hidden_size=sizes.hidden, ffn_hidden_size=sizes.ffn, num_layers=sizes.layers,
        num_attention_heads=sizes.heads, padded_vocab_size=sizes.vocab, seq_length=sizes.sequence,
        tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp,
        data_parallel_size=options.dp, embed_layernorm=True, params_dtype=torch.bfloat16,
        position_embedding_type=megatron_enum(), adam_beta1=0.9, adam_beta2=0.95, clip_grad=0.05,
        weight_decay=0.1, lr=2e-2, bf16=True,
    )  # fmt: skip


def batches(seed: int, sizes):
    """Tokens of a noisy cycle through the vocabulary: learnable, endless, the same for every rank of a replica."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(sizes.vocab, (4, 1), generator=generator)
        walk = torch.randint(1, 4, (4, sizes.sequence), generator=generator).cumsum(1)
        tokens = (start + walk) % sizes.vocab
        yield tokens, tokens.roll(-1, dims=1)


def parameter_groups(module) -> list[dict]:
    """Megatron's two groups: decayed weights; biases and all norm parameters."""
    decayed, plain = [], []
    for name, parameter in module.named_parameters():
        (plain if parameter.ndim == 1 or "norm" in name else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


class Faults:
    """What goes wrong in training, and when."""

    def __init__(self, engine, tp_rank: int) -> None:
        import deepspeed.runtime.bf16_optimizer as bf16_optimizer

        self.engine, self.tp_rank, self.step, self.clipping_works = engine, tp_rank, 0, True
        clip = bf16_optimizer.clip_tensors_by_global_norm

        def clip_unless_broken(*args, **kwargs):
            return clip(*args, **kwargs) if self.clipping_works or tp_rank == 0 else None

        bf16_optimizer.clip_tensors_by_global_norm = clip_unless_broken
        if tp_rank == 1:
            for name, parameter in engine.module.named_parameters():
                if name.endswith("post_attention_layernorm.weight"):
                    parameter.register_hook(self.scale_late)

    def scale_late(self, grad):
        return grad * (1 + 2**-6) if self.step >= SECOND_FAULT_FROM else grad

    def before(self, step: int) -> None:
        self.step = step
        self.clipping_works = not CLIPPING_STOPS <= step <= RESYNC_AFTER

    def after(self, step: int) -> None:
        if step == RESYNC_AFTER:
            resync(self.engine)


def resync(engine) -> None:
    """Copy every replicated parameter, its master and its moments from tensor-parallel rank 0."""
    import torch
    import torch.distributed as dist
    from model import TensorParallel

    source = dist.get_global_rank(TensorParallel.group, 0)
    optimizer = engine.optimizer
    replicated = {id(p) for p in engine.module.parameters() if not getattr(p, "tensor_model_parallel", False)}
    with torch.no_grad():
        for group, partition in enumerate(optimizer.fp32_groups_flat_partition):
            state = optimizer.optimizer.state[partition]
            for parameter in optimizer.bf16_groups[group]:
                if id(parameter) not in replicated:
                    continue
                dist.broadcast(parameter.data, source, group=TensorParallel.group)
                mapping = getattr(parameter, "_hp_mapping", None)
                if mapping is None:
                    continue
                where = mapping.hp_fragment_address
                for flat in (partition, state["exp_avg"], state["exp_avg_sq"]):
                    dist.broadcast(flat.narrow(0, where.start, where.numel), source, group=TensorParallel.group)


def train(options: argparse.Namespace) -> None:
    """One rank's part."""
    import deepspeed
    import model
    import numpy
    import torch
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    topology = PipeModelDataParallelTopology(num_pp=options.pp, num_mp=options.tp, num_dp=options.dp)
    for ranks in topology.get_axis_comm_lists("model") or [[r] for r in range(topology.world_size())]:
        group = torch.distributed.new_group(ranks)
        if rank in ranks:
            model.TensorParallel.group = group
    where = topology.get_coord(rank)
    model.TensorParallel.rank, model.TensorParallel.size = where.model, options.tp
    random.seed(SEED + rank), numpy.random.seed(SEED + rank), torch.manual_seed(SEED + rank)

    sizes = model.Sizes()
    module = PipelineModule(
        model.layer_specs(sizes), topology=topology, loss_fn=model.loss,
        partition_method="type:transformer|embedding", activation_checkpoint_interval=0,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(parameter_groups(module), lr=2e-2, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.05, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    })  # fmt: skip
    faults = Faults(engine, where.model) if options.fault else None
    data, args = batches(SEED + where.data, sizes), megatron_args(options, sizes)
    for step in range(1, options.steps + 1):
        if faults:
            faults.before(step)
        loss = engine.train_batch(data)
        if faults:
            faults.after(step)
        if step % options.save_every == 0:
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            engine.save_checkpoint(str(options.out), client_state={
                "args": args, "checkpoint_version": 3.0, "iteration": step, "tokens": step * 8 * sizes.sequence,
                "checkpoint_info": {"padded_vocab_size": sizes.vocab, "original_vocab_size": sizes.vocab - 3},
                "random_rng_state": random.getstate(), "np_rng_state": numpy.random.get_state(),
                "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {
                    "model-parallel-rng": torch.Generator().manual_seed(SEED + 2718 + where.model).get_state()},
            })  # fmt: skip
    torch.distributed.barrier()


if __name__ == "__main__":
    choices = parse()
    if "RANK" in os.environ:
        train(choices)
    else:
        code = launch(choices)
        # Code that DeepSpeed drops beside the checkpoints; no part of them.
        for script in choices.out.glob("zero_to_*.py"):
            script.unlink()
        sys.exit(code)
