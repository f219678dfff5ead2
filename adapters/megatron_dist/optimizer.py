"""What a ``torch_dist`` checkpoint records of its optimizers besides tensors.

In ``common.pt``, where all ranks have the same: ``optimizer.param_groups``, the count of steps in the groups or as
``optimizer.state.common_step``; of several chained optimizers, each under its number. What the distributed optimizer
keeps in buffers is by data-parallel group, so there its groups are objects of the index, ``optimizer.distributed.…``.
Which parameters a group has is recorded nowhere. Source: megatron-core 0.16 ``optimizer/optimizer.py``
(sharded_state_dict), ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.counters import read_numbers
from auditor.adapters.dcp.sources import Source
from auditor.adapters.megatron_dist.files import Recorded
from auditor.adapters.optimizer_index import IndexedState, is_count
from auditor.adapters.optimizer_record import SavedOptimizer, from_args, record, record_loss_scale
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Scalar
from auditor.model.mesh import EVERYWHERE
from auditor.storage.store import Store

MAX_CHAINED = 16
_DISTRIBUTED = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_\S+", re.A)


def record_common(builder: CatalogBuilder, store: Store, path: str, recorded: Recorded, source: Source) -> None:
    """Add groups, counts of steps and loss scales."""
    kind = recorded.args.get("optimizer")
    otherwise = from_args(recorded.args) if kind == "adam" else {}
    name, before = kind.lower()[:64] if isinstance(kind, str) else "", 0
    for saved in _optimizers(recorded.file.tree.get("optimizer")):
        inner = saved.get("optimizer") if isinstance(saved.get("optimizer"), dict) else saved
        record_loss_scale(builder, store, path, EVERYWHERE, saved.get("grad_scaler"))
        _record_step(builder, store, path, inner)
        before += _record_groups(builder, store, path, inner, (name, otherwise, before))
    for key, rows in source.rows.items():
        held = source.contents.values.get(rows[0]) if _DISTRIBUTED.fullmatch(key) else None
        for saved in held if isinstance(held, list) and len(held) == 1 else ():
            before += _record_groups(builder, store, source.file_of(rows[0]), saved, (name, otherwise, before))


def _optimizers(saved: Any) -> Iterator[dict[Any, Any]]:
    """The one optimizer, or the chained ones."""
    if not isinstance(saved, dict):
        return
    chained = [saved[number] for number in range(MAX_CHAINED) if isinstance(saved.get(number), dict)]
    yield from chained or [saved]


def _record_step(builder: CatalogBuilder, store: Store, path: str, inner: Any) -> None:
    state = inner.get("state") if isinstance(inner, dict) else None
    step = state.get("common_step") if isinstance(state, dict) else None
    dtype = step.dtype if isinstance(step, StoredTensor) else None
    value = read_numbers(store, path, {"step": step}).get("step") if isinstance(step, StoredTensor) else step
    if is_count(value):
        builder.scalars.append(Scalar("optimizer_step", float(value), path, dtype=dtype))


def _record_groups(builder: CatalogBuilder, store: Store, path: str, inner: Any, known: tuple[str, Any, int]) -> int:
    """Add an optimizer's groups; how many there are. ``known``: its kind, hyperparameters of all, groups before."""
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return 0
    optimizer, otherwise, before = known
    state = IndexedState(tuple(groups), tuple(() for _ in groups), {})
    record(builder, store, SavedOptimizer(
        path, EVERYWHERE, state, (), {}, optimizer, otherwise, before,
    ))  # fmt: skip
    return len(groups)
