"""The hook for torch: a witness of a state dict before it is saved, by whatever writer, and an audit after it.

hook = TorchHook(after=AfterCommit())                      # on every rank
hook.save(step, state, f"{run}/step-{step}")               # instead of torch.distributed.checkpoint.save
future = hook.async_save(step, state, f"{run}/step-{step}")

hook.witness(step, state, path)                            # with any other writer: before it saves
hook.committed(step, path)                                 # and when all ranks' files are there
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from auditor.hooks.after_commit import AfterCommit
from auditor.hooks.exchange import Exchange
from auditor.hooks.hook import Witnessed, Witnesses, survived
from auditor.hooks.log import LOG
from auditor.hooks.recording import Recorder
from auditor.hooks.torch_pieces import pieces_of_optimizer, resolved
from auditor.hooks.torch_witness import THREADS, record
from auditor.model.mesh import Coordinate

Path = str | os.PathLike[str]


class TorchHook:
    """Made once on every rank; the process group may come later, but before the first witness.

    ``after``: audits on rank 0 what was committed; None: nothing is audited here. ``rank, num_ranks``: told by
    torch.distributed where it is set up by then, else 0 of 1. ``axes``: this rank's index along named mesh axes, for
    tensors that are whole on every rank; by default ``{"rank": rank}``. ``launch``: see
    :class:`~auditor.hooks.hook.Witnesses`. ``raising``: whether a failure of the hook itself is raised. ``exchange``:
    ``torch_exchange()`` of :mod:`auditor.hooks.torch_exchange` where ranks write to disks of their own.
    """

    def __init__(
        self, after: AfterCommit | None = None, *, rank: int | None = None, num_ranks: int | None = None,
        axes: Mapping[str, int] | None = None, launch: str | None = None, threads: int = THREADS,
        raising: bool = False, exchange: Exchange | None = None,
    ) -> None:  # fmt: skip
        self._rank, self._num_ranks, self._axes, self._after = rank, num_ranks, axes, after
        self._launch, self._exchange = launch, exchange
        self.threads, self.raising = threads, raising

    @cached_property
    def rank(self) -> int:
        """Of this process among all that save together."""
        return _of_process_group()[0] if self._rank is None else self._rank

    @cached_property
    def num_ranks(self) -> int:
        """How many save together."""
        return _of_process_group()[1] if self._num_ranks is None else self._num_ranks

    @cached_property
    def place(self) -> Coordinate:
        """Of tensors that are whole on every rank."""
        return Coordinate.of(**self._axes) if self._axes else Coordinate.of(rank=self.rank)

    @property
    def after(self) -> AfterCommit | None:
        """What audits, on the rank that does."""
        return self._after if self.rank == 0 else None

    @cached_property
    def witnesses(self) -> Witnesses:
        """Where this rank leaves its parts."""
        return Witnesses(self.rank, self.num_ranks, self._launch, self._exchange)

    def witness(
        self, step: int, state: Mapping[str, Any], path: Path, *, buffers: Iterable[str] = (),
        optimizer: Any = None,
    ) -> Witnessed | None:  # fmt: skip
        """Digest what this rank holds of ``state``, which is about to be saved to ``path``, and leave it beside.

        No other rank is waited for. ``buffers``: names of tensors that are buffers of the model. ``optimizer``:
        one whose own state dict the writer stores in a file by itself. None: it failed, which is logged.
        """
        begun = time.perf_counter()
        with survived(f"the witness of step {step}", raising=self.raising):
            more = () if optimizer is None else pieces_of_optimizer(optimizer, self.place)
            recorder = record(resolved(state), self.rank, self.num_ranks, self.place, buffers, self.threads, more)
            return self.leave(step, path, recorder, begun)
        return None

    def leave(self, step: int, path: Path, recorder: Recorder, begun: float) -> Witnessed:
        """Write what was recorded of a step since ``begun`` (of ``time.perf_counter``).

        Raises:
            WriteError: the disk is full, or read-only.
        """
        for why, count in recorder.skipped.items():
            LOG.info("the witness of step %d leaves out %d pieces: %s", step, count, why)
        done = self.witnesses.leave(step, os.fspath(path), recorder, begun)
        if self.after is not None and self.after.log is not None:
            numbers = {"auditor/witness_seconds": done.seconds, "auditor/witness_bytes": float(done.num_bytes)}
            self.after.log(numbers, step)
        return done

    def committed(self, step: int, path: Path) -> None:
        """Tell that all ranks' files of the step are durable; audited on rank 0.

        Raises:
            ViolationError: where the hook was told to raise what an audit finds.
        """
        with survived(f"what step {step} is known by", raising=self.raising):
            self.witnesses.committed(step, os.fspath(path))
        if self.after is not None:
            self.after.committed(step, os.fspath(path))

    def save(self, step: int, state: Mapping[str, Any], path: Path, **choices: Any) -> Any:
        """Witness ``state`` and save it by ``torch.distributed.checkpoint.save``, which takes ``choices``.

        Raises:
            ViolationError: as :meth:`committed`; and whatever the writer raises.
        """
        import torch.distributed.checkpoint as dcp

        plain = resolved(state)
        self.witness(step, plain, path)
        metadata = dcp.save(plain, checkpoint_id=path, **choices)
        self.committed(step, path)
        return metadata

    def async_save(self, step: int, state: Mapping[str, Any], path: Path, **choices: Any) -> Any:
        """As :meth:`save` by ``async_save``: the witness is taken before it returns, the audit when all is uploaded.

        The step that is staged must not change meanwhile: INT014 is what shows that it did.
        """
        import torch.distributed.checkpoint as dcp

        plain = resolved(state)
        self.witness(step, plain, path)
        response = dcp.async_save(plain, checkpoint_id=path, **choices)
        uploaded = getattr(response, "upload_completion", response)
        uploaded.add_done_callback(lambda future: self._uploaded(step, path, future))
        return response

    def _uploaded(self, step: int, path: Path, future: Any) -> None:
        if future.cancelled() or future.exception() is not None:
            LOG.warning("step %d was not saved, so it is not audited", step)
            return
        # In a thread of the writer's: what an audit finds is raised by the next call of the hook.
        with survived(f"the audit of step {step}", raising=False):
            self.committed(step, path)

    def close(self) -> None:
        """Wait for the audits under way.

        Raises:
            ViolationError: as :meth:`committed`.
        """
        if self.after is not None:
            self.after.close()


def _of_process_group() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
