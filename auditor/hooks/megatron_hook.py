"""The hook around megatron-core's ``dist_checkpointing.save``, synchronous or not.

    save = around_save(TorchHook(after=AfterCommit()))
    request = save(step, sharded_state_dict, folder, ("torch_dist", 1), async_sharded_save=True)

instead of ``dist_checkpointing.save(sharded_state_dict, folder, …)``. A request is finalized as before: its last
``finalize_fns`` then tells the hook, on every rank and after all ranks' files are there, that the step is committed.
Witnessed are the tensors of the model and its optimizer, one for each layer and expert as the adapter names them; not
the buckets in which the distributed optimizer may hand out its state, of which no tensor is known.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from auditor.adapters.megatron_dist.names import cut, each, read_key
from auditor.hooks.hook import survived
from auditor.hooks.recording import Recorder
from auditor.hooks.torch_digest import measure
from auditor.hooks.torch_hook import Path, TorchHook
from auditor.hooks.torch_pieces import dtype_of
from auditor.model.mesh import Coordinate
from auditor.model.region import Box
from auditor.observe.kernel_choice import choose

_AXES = ("pp", "tp", "dp")
"""What the three numbers of a replica's id count. Source: megatron-core 0.16 ``transformer/utils.py``."""


def around_save(hook: TorchHook) -> Callable[..., Any]:
    """``dist_checkpointing.save`` with the step first: leaves a witness before, and has the step audited after."""

    def save(step: int, sharded_state_dict: dict[str, Any], folder: Path, *arguments: Any, **choices: Any) -> Any:
        begun = time.perf_counter()
        with survived(f"the witness of step {step}", raising=hook.raising):
            hook.leave(step, folder, record(sharded_state_dict, hook.rank, hook.num_ranks), begun)
        request = dist_checkpointing.save(sharded_state_dict, os.fspath(folder), *arguments, **choices)
        if request is None:
            hook.committed(step, folder)
        else:
            request.add_finalize_fn(partial(hook.committed, step, folder))
        return request

    return save


def record(state: Mapping[str, Any], rank: int, num_ranks: int) -> Recorder:
    """Digest all ShardedTensors that this rank has of a sharded state dict."""
    recorder = Recorder(rank, num_ranks)
    recorder.scalars |= {key: float(value) for key, value in state.items() if isinstance(value, int | float)}
    found = [*_tensors(state)]
    keys = {read_key(one.key).parameter for one in found}
    fused = getattr(state.get("args"), "transformer_impl", None) != "local"
    kernels = choose(sum(one.data.numel() * one.data.element_size() for one in found))
    for one in found:
        dtype, what = dtype_of(one.data), read_key(one.key)
        if dtype is None or what.bucket or math.prod(one.local_shape) != one.data.numel() or one.data.is_meta:
            recorder.skip("a bucket of the distributed optimizer" if what.bucket else "a tensor of an unknown kind")
            continue
        how = cut(what.parameter, keys, fused=fused)
        if len(one.global_shape) < how.num_leading:
            recorder.skip("a tensor with too few dims to number layers or experts")
            continue
        for numbers, part, shape, box in _layers(one, how.num_leading, how.half):
            row = measure(kernels, part, dtype, shape, box)
            recorder.add(how.tensor(numbers) + what.suffix, dtype, shape, box, _place(one.replica_id), row, what.role)
    return recorder


def _tensors(value: Any) -> Iterator[ShardedTensor]:
    if isinstance(value, ShardedTensorFactory):
        value = value.build()
    if isinstance(value, ShardedTensor):
        if value.data is not None:
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _layers(
    one: ShardedTensor, leading: int, half: int | None
) -> Iterator[tuple[tuple[int, ...], Any, tuple[int, ...], Box]]:
    """Layer and expert, the local part of it, its global shape, and where in it the part lies."""
    start = tuple(one.global_offset)
    extent = (1,) * one.prepend_axis_num + tuple(one.local_shape)
    stop = tuple(a + n for a, n in zip(start, extent, strict=True))
    shape, box = tuple(one.global_shape)[leading:], Box(start[leading:], stop[leading:])
    if half is not None:
        box = box.shifted((half * shape[0], *(0 for _ in shape[1:])))
        shape = (2 * shape[0], *shape[1:])
    values = one.data.view(extent)
    for numbers in each(start[:leading], stop[:leading]):
        at = tuple(number - first for number, first in zip(numbers, start, strict=False))
        yield numbers, values[at], shape, box


def _place(replica: int | tuple[int, ...]) -> Coordinate:
    if isinstance(replica, tuple) and len(replica) == len(_AXES):
        return Coordinate.of(**dict(zip(_AXES, map(int, replica), strict=True)))
    numbers = replica if isinstance(replica, tuple) else (replica,)
    return Coordinate.of(**{f"replica{at or ''}": int(number) for at, number in enumerate(numbers)})
