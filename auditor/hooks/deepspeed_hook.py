"""The hook around DeepSpeed's ``engine.save_checkpoint``, which tells nobody when it begins or is done.

    save_checkpoint = around_save_checkpoint(engine, TorchHook(after=AfterCommit()))
    save_checkpoint(run)                                  # instead of engine.save_checkpoint(run)

Witnessed are parameters and buffers that are whole on a rank, and its partitions of masters and moments, each as a
flat range of the parameter it belongs to: as DeepSpeed itself maps them (``_hp_mapping`` at stages 1 and 2, its
functions for local partitions at stage 3). At stage 0 the optimizer's state is left out. Tensor parallelism is not
looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from auditor.hooks.hook import survived
from auditor.hooks.recording import Recorder
from auditor.hooks.torch_digest import measure
from auditor.hooks.torch_hook import TorchHook
from auditor.hooks.torch_pieces import dtype_of
from auditor.model.catalog import Role
from auditor.model.mesh import EVERYWHERE, Coordinate
from auditor.model.region import FlatRange, Region, whole
from auditor.observe.kernel_choice import choose

_MOMENTS = {"exp_avg": Role.FIRST_MOMENT, "exp_avg_sq": Role.SECOND_MOMENT}

Piece = tuple[str, Role, Any, tuple[int, ...], Region, Coordinate]


def around_save_checkpoint(engine: Any, hook: TorchHook) -> Callable[..., Any]:
    """``engine.save_checkpoint``: leaves a witness before, and has the step audited when all ranks are done."""
    import deepspeed.comm as dist

    def save_checkpoint(save_dir: str, tag: str | None = None, **choices: Any) -> Any:
        step = int(engine.global_steps)
        path = f"{save_dir}/{tag or f'global_step{step}'}"
        begun = time.perf_counter()
        with survived(f"the witness of step {step}", raising=hook.raising):
            hook.leave(step, path, _record(engine, hook), begun)
        done = engine.save_checkpoint(save_dir, tag=tag, **choices)
        # save_checkpoint itself ends with a barrier for the tag's pointer, but not for asynchronous engines.
        dist.barrier()
        hook.committed(step, path)
        return done

    return save_checkpoint


def _record(engine: Any, hook: TorchHook) -> Recorder:
    recorder = Recorder(hook.rank, hook.num_ranks)
    recorder.scalars["global_steps"] = float(engine.global_steps)
    kernels = choose(0)
    for name, role, values, shape, region, place in _pieces(engine, hook):
        dtype = dtype_of(values)
        if dtype is None or values.numel() != region.num_elements:
            recorder.skip("a tensor of an unknown dtype or size")
            continue
        recorder.add(name, dtype, shape, region, place, measure(kernels, values, dtype, shape, region), role)
    return recorder


def _pieces(engine: Any, hook: TorchHook) -> Iterator[Piece]:
    for name, buffer in engine.module.named_buffers():
        yield name, Role.BUFFER, buffer, tuple(buffer.shape), whole(buffer.shape), hook.place
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            yield from _of_stage_3(engine, name, parameter)
            continue
        shape = tuple(parameter.shape)
        yield name, Role.PARAMETER, parameter.data, shape, whole(shape), hook.place
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            at = mapping.lp_fragment_address
            region = FlatRange(int(at.start), int(at.start + at.numel))
            yield name, Role.MASTER, mapping.get_hp_fragment(), shape, region, EVERYWHERE
            for key, role in _MOMENTS.items():
                if key in mapping.get_optim_state_keys():
                    yield name, role, mapping.get_optim_state_fragment(key), shape, region, EVERYWHERE


def _of_stage_3(engine: Any, name: str, parameter: Any) -> Iterator[Piece]:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    shape, each = tuple(parameter.ds_shape), int(parameter.ds_tensor.ds_numel)
    rank = engine.optimizer.partition_count and engine.optimizer.dp_process_group.rank()
    start = rank * each
    stop = min(start + each, int(parameter.ds_numel))
    found = {Role.MASTER: safe_get_local_fp32_param(parameter)}
    found |= {role: safe_get_local_optimizer_state(parameter, key) for key, role in _MOMENTS.items()}
    for role, values in found.items():
        if values is not None and stop > start:
            yield name, role, values.reshape(-1)[: stop - start], shape, FlatRange(start, stop), EVERYWHERE
