"""What a step holds, without reading weights: mesh, tensors, pieces, files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from auditor.adapters.adapter import Match
from auditor.discovery import discover
from auditor.errors import NothingToAuditError
from auditor.model.catalog import Catalog, FileState, Role
from auditor.model.name_map import mapped
from auditor.report.text_report import safe, size
from auditor.settings import Settings
from auditor.sources import StepSource
from auditor.storage.store import Store

MAX_ROWS = 400
"""Tensors listed for people; JSON has all."""


def _chosen(store: Store, settings: Settings) -> Iterator[tuple[StepSource, Catalog]]:
    found = False
    for run in discover(store):
        chosen = settings.steps.choose([source.match.step for source in run.steps])
        for source in run.steps:
            if source.match.step in chosen:
                found = True
                catalog = source.adapter.read(store, source.folder, source.match, settings.options)
                yield source, mapped(catalog, settings.name_map)
    if not found:
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")


def inspect_lines(store: Store, settings: Settings) -> Iterator[str]:
    """Every chosen step for a person, as lines with rich's markup."""
    for source, catalog in _chosen(store, settings):
        yield f"[bold]{safe(source.folder.path or store.location)}[/bold]  step {catalog.step}"
        yield from _head(catalog, source.match)
        yield from _tensors(catalog)
        yield from _files(catalog)
        yield ""


def _head(catalog: Catalog, match: Match) -> Iterator[str]:
    yield f"  format  {catalog.format}: {safe(match.reason)}"
    yield f"  mesh    {safe(catalog.mesh)} ({catalog.mesh.num_ranks} ranks)"
    roles = Counter(tensor.role for tensor in catalog.tensors)
    yield "  tensors " + " · ".join(f"{count} {role.value}" for role, count in roles.items())
    stored = int(catalog.num_bytes().sum()) if len(catalog.pieces) else 0
    yield f"  pieces  {len(catalog.pieces):,} with {size(stored)}"


def _tensors(catalog: Catalog) -> Iterator[str]:
    shown = [(n, t) for n, t in enumerate(catalog.tensors) if t.role is not Role.PADDING]
    shown.sort(key=lambda entry: (entry[1].order, list(Role).index(entry[1].role)))
    width = max((len(tensor.name) for _, tensor in shown[:MAX_ROWS]), default=0)
    previous = ""
    for number, tensor in shown[:MAX_ROWS]:
        name = tensor.name if tensor.name != previous else ""
        previous = tensor.name
        how = (
            f"{len(catalog.replicas[number])} replicas over {','.join(tensor.replica_axes)}"
            if tensor.replica_axes
            else ""
        )
        how = how or (f"placement unknown: {tensor.undetermined}" if tensor.undetermined else "")
        pieces = len(catalog.rows_by_tensor.get(number, ()))
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        yield (f"    {safe(name):<{width}}  {tensor.role.value:<13} {tensor.dtype.name:<9} {shape:<12} "
               f"{pieces} piece{'s' if pieces != 1 else ''}  {safe(how)}").rstrip()  # fmt: skip
    if len(shown) > MAX_ROWS:
        yield f"    … and {len(shown) - MAX_ROWS} more (all in --format json)"


def _files(catalog: Catalog) -> Iterator[str]:
    yield f"  files   {len(catalog.files)} with {size(sum(file.num_bytes for file in catalog.files))}"
    for file in catalog.files:
        if file.state is not FileState.PRESENT:
            yield f"    [red]{file.state.value}[/] {safe(file.name)}: {safe(file.detail)}"
    for name in catalog.unclaimed:
        yield f"    not read by any loader: {safe(name)}"
    for problem in catalog.problems:
        yield f"    [yellow]{problem.kind.value}[/] {safe(problem.file)} {safe(problem.message)}"
    if catalog.opaque:
        counted = ", ".join(f"{name} {count}" for name, count in sorted(catalog.opaque.items()))
        yield f"  objects of unknown classes, not made: {safe(counted)}"


def inspect_object(store: Store, settings: Settings) -> dict[str, Any]:
    """Every chosen step for a machine."""
    return {"schema_version": 1, "steps": [_step(source, catalog) for source, catalog in _chosen(store, settings)]}


def _step(source: StepSource, catalog: Catalog) -> dict[str, Any]:
    return {
        "step": catalog.step, "path": source.folder.path, "format": catalog.format, "reason": source.match.reason,
        "mesh": dict(catalog.mesh.axes), "num_pieces": len(catalog.pieces),
        "tensors": [
            {"name": t.name, "role": t.role.value, "dtype": t.dtype.name, "shape": list(t.shape),
             "replicas": [place.as_dict() for place in catalog.replicas[n]], "stored_once": list(t.stored_once),
             "num_pieces": len(catalog.rows_by_tensor.get(n, ())), "undetermined": t.undetermined or None}
            for n, t in enumerate(catalog.tensors)
        ],
        "files": [
            {"name": f.name, "num_bytes": f.num_bytes, "state": f.state.value,
             "coordinate": f.coordinate.as_dict(), "detail": f.detail or None}
            for f in catalog.files
        ],
        "unclaimed": list(catalog.unclaimed), "opaque": dict(sorted(catalog.opaque.items())),
    }  # fmt: skip
