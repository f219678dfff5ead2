"""One export: discover the run, refuse places that would touch it, write its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from auditor.discovery import one_run, step_nodes
from auditor.errors import NothingToAuditError
from auditor.settings import DEFAULTS, Settings
from auditor.storage.retrying import RetryingStore
from auditor.storage.writer import FolderWriter
from auditor.view.export import StepExport, begin
from auditor.view.export_tensor import Written

if TYPE_CHECKING:
    from auditor.storage.store import Store

Told = Callable[[str, int], None]
"""Told the step's path and the bytes just written."""


@dataclass(slots=True)
class Exported:
    """What became of an export."""

    location: str
    steps: dict[str, Written] = field(default_factory=dict)
    """By step folder in the target."""
    unrecognised: dict[str, str] = field(default_factory=dict)
    """Folders of the source that are named like a step but could not be read, with the reason."""

    @property
    def changed(self) -> list[str]:
        """Source files that changed while they were read."""
        return [name for written in self.steps.values() for name in written.changed]

    @property
    def incomplete(self) -> bool:
        """Whether something of the source is not in the target."""
        return bool(self.unrecognised) or any(written.lost for written in self.steps.values())


def export(
    store: Store, target: str, settings: Settings = DEFAULTS, *, threads: int = 2,
    progress: Told = lambda path, num_bytes: None, done: Callable[[str, Written], None] = lambda path, written: None,
) -> Exported:  # fmt: skip
    """Write the chosen steps and tensors of the one run below ``store`` into the Zarr store ``target``.

    ``threads``: workers, each with one chunk (16 MiB, or one row where that is more) in memory. ``done`` is told of
    every finished step.

    Raises:
        NothingToAuditError: there is no checkpoint, or no step or tensor that was asked for.
        UsageError: the target lies in the source or the other way round, or is something else.
        LockedError: another export writes into the target.
        WriteError: the target does not take what is written.
        NotVerifiedError, OccupiedError: what was written is not what was read; another export is in the way.
    """
    retrying = RetryingStore(store)
    run = one_run(retrying)
    numbers = settings.steps.choose(sorted({source.match.step for source in run.steps}))
    chosen = {source.folder.path for source in run.steps if source.match.step in numbers}
    if not chosen:
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")
    writer = FolderWriter(target)
    writer.refuse_sources([store.location, *(f"{store.location}/{path}" for path in sorted(chosen))])
    result = Exported(target, unrecognised={} if settings.steps.text else dict(run.unrecognised))
    with writer.locked():
        begin(writer)
        for source, node in zip(run.steps, step_nodes(retrying, run, settings.options), strict=True):
            if source.folder.path not in chosen:
                continue
            step = StepExport(retrying, writer, node, settings.tensors)
            written = step.run(settings.threads or threads, partial(progress, step.path))
            result.steps[step.path] = written
            done(step.path, written)
    if not any(written.num_arrays for written in result.steps.values()):
        raise NothingToAuditError(f"{store.location}: no tensor matches --tensors {settings.tensors}")
    return result
