"""Tells from saved checkpoints alone whether a distributed training run is still sound, and if not, since when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zarr

    from auditor.comparison.outcome import Comparison
    from auditor.exporting import Exported
    from auditor.reports import Report

__version__ = "0.1.0"
__all__ = ["__version__", "check", "compare", "export", "open_zarr"]


def check(path: str, **choices: Any) -> Report:
    """Audit everything under a path or URL, as `auditor check` does.

    ``choices``: the command's options by name (``level="headers"``, ``steps="100:500"``, ``select=["REP"]``, …).

    Raises:
        auditor.errors.UsageError: a choice that there isn't.
        auditor.errors.AuditorError: as :func:`auditor.audit.audit`.
    """
    from auditor.audit import audit
    from auditor.configuration import make_settings
    from auditor.ledger.folder import open_ledger
    from auditor.storage.roots import open_store

    store, settings = open_store([path]), make_settings(choices)
    return audit(store, settings, ledger=open_ledger(settings.ledger, store) if settings.ledger else None)


def compare(reference: str, candidate: str, **choices: Any) -> Comparison:
    """Hold a checkpoint, run or ledger against a reference, as `auditor compare` does.

    ``choices``: the command's options by name (``exact=True``, ``only=["*.weight"]``, ``calibrate=["rerun"]``, …), and
    ``steps``, ``fail_on``, ``strict``, ``threads``.

    Raises:
        auditor.errors.UsageError: a choice that there isn't.
        auditor.errors.AuditorError: as :func:`auditor.comparison.comparing.compare`.
    """
    from auditor.comparison.command import choices_of
    from auditor.comparison.comparing import compare as compare_sides
    from auditor.configuration import NAMES, make_settings

    settings = make_settings({name: value for name, value in choices.items() if name in NAMES and name != "ignore"})
    own = {name: value for name, value in choices.items() if name not in NAMES or name == "ignore"}
    return compare_sides(reference, candidate, settings, choices_of(settings, **own))


def open_zarr(path: str) -> zarr.Group:
    """The checkpoints under a path or URL as one read-only Zarr v3 group; see ``docs/zarr-layout.md``.

    Nothing is copied: arrays are assembled from the original files as they are read.
    """
    from auditor.discovery import step_nodes
    from auditor.storage.roots import open_store
    from auditor.view.tree import run_tree
    from auditor.view.zarr_store import open_group

    store = open_store([path])
    return open_group(run_tree(store, step_nodes(store)))


def export(path: str, target: str, **choices: Any) -> Exported:
    """Write the run under a path or URL as a Zarr store, as `auditor export` does.

    ``choices``: ``steps`` and ``tensors``, as the command's options.

    Raises:
        auditor.errors.UsageError: a choice that there isn't; the target is something else, or lies in the run.
        auditor.errors.AuditorError: as :func:`auditor.exporting.export`.
    """
    from auditor.configuration import make_settings
    from auditor.exporting import export as export_run
    from auditor.storage.roots import open_store

    return export_run(open_store([path]), target, make_settings(choices))
