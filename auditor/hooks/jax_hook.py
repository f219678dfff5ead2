"""The hook for JAX: a witness of a tree of arrays before it is saved, and an audit once the step is final.

hook = JaxHook(after=AfterCommit())                       # in every process
hook.save(manager, step, args=ocp.args.StandardSave(tree)) # instead of manager.save
hook.close(manager)                                       # instead of manager.wait_until_finished at the end
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from auditor.hooks.after_commit import AfterCommit
from auditor.hooks.exchange import Exchange
from auditor.hooks.hook import Witnessed, Witnesses, survived
from auditor.hooks.jax_digest import dtype_of, measure
from auditor.hooks.jax_pieces import Held, leaves_of, pieces_of
from auditor.hooks.log import LOG
from auditor.hooks.recording import Recorder, add_measured, as_scalars
from auditor.model.region import Box
from auditor.observe.kernel_choice import choose
from auditor.observe.kernels import empty_rows


def record(trees: Sequence[Any], rank: int, num_ranks: int) -> Recorder:
    """Digest what this process's devices hold of trees: every part whole, and the stripe of it that Orbax writes."""
    recorder = Recorder(rank, num_ranks)
    leaves = [leaf for tree in trees for leaf in leaves_of(tree)]
    recorder.scalars.update(as_scalars(dict(leaves)))
    kernels = choose(sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, jax.Array)))
    for key, leaf in leaves:
        for held in pieces_of(key, leaf):
            dtype = dtype_of(held.values)
            if dtype is None:
                recorder.skip(f"dtype {held.values.dtype}")
                continue
            whole = empty_rows(1)
            for part, box, own in _parts(held):
                found = measure(kernels, part, dtype, held.shape, box)
                add_measured(whole, found)
                if own:
                    recorder.add(key, dtype, held.shape, box, held.place, found)
            recorder.add(key, dtype, held.shape, held.box, held.place, whole)
    return recorder


def _parts(held: Held) -> Iterator[tuple[Any, Box, bool]]:
    """A part cut into what lies before its replica's stripe, the stripe, and what lies behind."""
    if held.stripe is None:
        yield held.values, held.box, False
        return
    dim, start, stop = held.stripe
    extent = held.box.shape[dim]
    for low, high in ((0, start), (start, stop), (stop, extent)):
        if high > low:
            cut = tuple(slice(low, high) if at == dim else slice(None) for at in range(len(held.shape)))
            first = [*held.box.start]
            last = [*held.box.stop]
            first[dim], last[dim] = held.box.start[dim] + low, held.box.start[dim] + high
            yield held.values[cut], Box(tuple(first), tuple(last)), low == start


class JaxHook:
    """Made once in every process.

    ``after``: audits in process 0 what is final; None: nothing is audited here. ``launch``: see
    :class:`~auditor.hooks.hook.Witnesses`. ``raising``: whether a failure of the hook itself is raised. ``exchange``:
    ``jax_exchange()`` of :mod:`auditor.hooks.jax_exchange` where processes write to disks of their own.
    """

    def __init__(
        self, after: AfterCommit | None = None, *, launch: str | None = None, raising: bool = False,
        exchange: Exchange | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.raising = jax.process_index(), raising
        self.after = after if self.rank == 0 else None
        self.witnesses = Witnesses(self.rank, jax.process_count(), launch, exchange)
        self._unfinished: list[tuple[int, str]] = []

    def witness(self, step: int, path: str | os.PathLike[str], *trees: Any) -> Witnessed | None:
        """Digest what this process holds of ``trees``, which are about to be saved to ``path``, and leave it beside.

        None: it failed, which is logged.
        """
        begun = time.perf_counter()
        with survived(f"the witness of step {step}", raising=self.raising):
            recorder = record(trees, self.rank, jax.process_count())
            for why, count in recorder.skipped.items():
                LOG.info("the witness of step %d leaves out %d pieces: %s", step, count, why)
            return self.witnesses.leave(step, os.fspath(path), recorder, begun)
        return None

    def save(self, manager: Any, step: int, *arguments: Any, **choices: Any) -> bool:
        """Witness what is saved, and save it by ``CheckpointManager.save``; steps that became final are audited.

        A step that the manager's policy leaves out is not witnessed.

        Raises:
            ViolationError: where the hook was told to raise what an audit finds; and whatever the manager raises.
        """
        path = step_path(manager, step)
        if choices.get("force") or manager.should_save(step):
            self.witness(step, path, *trees_of(choices.get("args", arguments[0] if arguments else None)))
        saved = bool(manager.save(step, *arguments, **choices))
        if saved:
            self._unfinished.append((step, path))
        self.finished()
        return saved

    def finished(self) -> None:
        """Audit those of the saved steps that have their final name by now."""
        waiting, self._unfinished = self._unfinished, []
        for step, path in waiting:
            if not pathlib.Path(path).is_dir():
                self._unfinished.append((step, path))
                continue
            with survived(f"what step {step} is known by", raising=self.raising):
                self.witnesses.committed(step, path)
            if self.after is not None:
                self.after.committed(step, path)

    def close(self, manager: Any | None = None) -> None:
        """Wait for the manager and for the audits under way.

        Raises:
            ViolationError: as :meth:`save`.
        """
        if manager is not None:
            manager.wait_until_finished()
        self.finished()
        if self.after is not None:
            self.after.close()


def step_path(manager: Any, step: int) -> str:
    """Where a CheckpointManager puts a step."""
    names = getattr(manager, "_step_name_format", None)
    name = names.build_name(step) if names is not None else str(step)
    return f"{os.fspath(manager.directory)}/{name}"


def trees_of(arguments: Any) -> list[Any]:
    """The trees that Orbax's save arguments hold: one, or of several items those that are trees."""
    items = list(arguments.values()) if hasattr(arguments, "values") else [arguments]
    return [item.item if hasattr(item, "item") else item for item in items]
