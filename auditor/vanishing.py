"""A step that is deleted, moved or written anew while its headers are read: what lacks then is no finding about it."""

from __future__ import annotations

from dataclasses import replace

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.listing import Listing
from auditor.model.catalog import Catalog, File, FileState
from auditor.model.mesh import NO_MESH
from auditor.sources import StepSource

GONE = "it changed, or was gone, while the step's headers were read"
_DOUBTFUL = frozenset(FileState) - {FileState.PRESENT}


def withheld(full: Catalog, listing: Listing, source: StepSource, *, in_progress: bool) -> Catalog:
    """The Catalog with every file that lacks, is damaged or changed in state ``CHANGED``, if the step changed since.

    Asked of storage only where something is wrong with it, so of few steps. ``in_progress``: whether its writer may
    be at work: then files come, go and grow, and only a step of which nothing is left was taken away.
    """
    wrong = full.problems or full.unfinished or full.unseen or any(file.state in _DOUBTFUL for file in full.files)
    files = {file.name: file for file in full.files}
    others = listing.changed(source) if wrong else {}
    # A log that grows in the folder is no part of the checkpoint.
    changed = [name for name, gone in others.items() if gone or name in files]
    if not changed or (in_progress and sum(others.values()) < len(listing.files(source))):
        return full
    for name in changed:
        files.setdefault(name, File(name))
    doubted = {name for name, file in files.items() if file.state in _DOUBTFUL} | {*changed}
    told = [replace(f, state=FileState.CHANGED, detail=GONE) if f.name in doubted else f for f in files.values()]
    return replace(full, files=tuple(told), scalars=(), problems=(), unfinished="", unseen="", ranks_counted=False)


def taken_away(source: StepSource, listing: Listing) -> Catalog:
    """The Catalog of a step whose folder could not even be listed any more."""
    builder = CatalogBuilder()
    for entry in listing.files(source):
        builder.file(File(entry.name, entry.num_bytes, entry.identity, FileState.CHANGED, detail=GONE))
    match = source.match
    return builder.build(match.step, source.folder.path, source.adapter.name, NO_MESH, {}, ())
