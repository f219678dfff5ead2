"""The hook for torch: a witness of a state dict before it is saved, by whatever writer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from auditor.hooks.hook import LOG, Witnessed, Witnesses, survived
from auditor.hooks.torch_pieces import resolved
from auditor.hooks.torch_witness import THREADS, record
from auditor.model.mesh import Coordinate


class TorchHook:
    """Made once on every rank, after the process group.

    ``rank, num_ranks``: told by torch.distributed where it is set up, else 0 of 1. ``axes``: this rank's index along
    named mesh axes, for tensors that are whole on every rank; by default ``{"rank": rank}``. ``launch``: see
    :class:`~auditor.hooks.hook.Witnesses`. ``raising``: whether a failure of the hook itself is raised.
    """

    def __init__(
        self, *, rank: int | None = None, num_ranks: int | None = None, axes: Mapping[str, int] | None = None,
        launch: str | None = None, threads: int = THREADS, raising: bool = False,
    ) -> None:  # fmt: skip
        own, total = _of_process_group()
        self.rank = own if rank is None else rank
        self.num_ranks = total if num_ranks is None else num_ranks
        self.place = Coordinate.of(**axes) if axes else Coordinate.of(rank=self.rank)
        self.threads, self.raising = threads, raising
        self.witnesses = Witnesses(self.rank, self.num_ranks, launch)

    def witness(
        self, step: int, state: Mapping[str, Any], path: str | os.PathLike[str], *, buffers: Iterable[str] = ()
    ) -> Witnessed | None:
        """Digest what this rank holds of ``state``, which is about to be saved to ``path``, and leave it beside.

        No other rank is waited for. ``buffers``: names of tensors that are buffers of the model. None: it failed, which
        is logged.
        """
        begun = time.perf_counter()
        with survived(f"the witness of step {step}", raising=self.raising):
            recorder = record(state, self.rank, self.num_ranks, self.place, buffers, self.threads)
            for why, count in recorder.skipped.items():
                LOG.info("the witness of step %d leaves out %d pieces: %s", step, count, why)
            return self.witnesses.leave(step, os.fspath(path), recorder, begun)
        return None

    def save(self, step: int, state: Mapping[str, Any], path: str | os.PathLike[str], **choices: Any) -> Any:
        """Witness ``state`` and save it by ``torch.distributed.checkpoint.save``, which takes ``choices``."""
        import torch.distributed.checkpoint as dcp

        plain = resolved(state)
        self.witness(step, plain, path)
        return dcp.save(plain, checkpoint_id=path, **choices)


def _of_process_group() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
