"""What a step holds, without reading weights: mesh, tensors, pieces, files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from auditor.adapters.adapter import Match
from auditor.discovery import discover
from auditor.errors import NothingToAuditError
from auditor.model.catalog import Catalog, FileState, Role
from auditor.model.name_map import mapped
from auditor.report.text_report import safe, size
from auditor.settings import Settings
from auditor.sources import StepSource
from auditor.storage.store import Store, base_name

MAX_STEPS, MAX_TENSORS, MAX_FILES = 8, 100, 20
"""Of each sort, shown for people without --all; JSON has all."""
WITHOUT_WEIGHTS = (
    "*.md", "*.txt", "*.py", "*.log", ".git*", "LICENSE*", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "*.model", "*.jinja", "chat_template.*", "generation_config.json", "*processor_config.json",
    "training_args.bin", "events.out.tfevents.*",
)  # fmt: skip
"""Names of files that lie beside checkpoints everywhere and hold nothing to audit."""


def _sources(store: Store, settings: Settings) -> Iterator[StepSource]:
    """The chosen steps of all runs.

    Raises:
        NothingToAuditError: there is none.
    """
    found = False
    for run in discover(store):
        chosen = settings.steps.choose([source.match.step for source in run.steps])
        for source in run.steps:
            if source.match.step in chosen:
                found = True
                yield source
    if not found:
        raise NothingToAuditError(f"{store.location}: no saved step is among --steps {settings.steps.text}")


def _catalog(store: Store, settings: Settings, source: StepSource) -> Catalog:
    return mapped(source.adapter.read(store, source.folder, source.match, settings.options), settings.name_map)


def inspect_lines(store: Store, settings: Settings, *, all_of_it: bool = False) -> Iterator[str]:
    """Every chosen step for a person, as lines with rich's markup. ``all_of_it``: however many lines that are."""
    sources = list(_sources(store, settings))
    shown = sources if all_of_it else sources[:MAX_STEPS]
    for source in shown:
        catalog = _catalog(store, settings, source)
        yield f"[bold]{safe(source.folder.path or store.location)}[/bold]  step {catalog.step}"
        yield from _head(catalog, source.match)
        yield from _few(list(_tensors(catalog)), None if all_of_it else MAX_TENSORS)
        yield from _files(catalog, None if all_of_it else MAX_FILES)
        yield ""
    if len(shown) < len(sources):
        left = len(sources) - len(shown)
        yield f"… and {left} more {'steps (--all shows them)' if left > 1 else 'step (--all shows it)'}"


def _few(lines: Sequence[str], most: int | None) -> Iterator[str]:
    yield from lines[:most]
    if most is not None and len(lines) > most:
        yield f"    … and {len(lines) - most:,} more (--all shows them)"


def _head(catalog: Catalog, match: Match) -> Iterator[str]:
    ranks = catalog.mesh.num_ranks
    yield f"  format  {catalog.format}: {safe(match.reason)}"
    yield f"  mesh    {safe(catalog.mesh)}{f' ({ranks} ranks)' if ranks > 1 else ''}"
    roles = Counter(tensor.role for tensor in catalog.tensors)
    yield "  tensors " + " · ".join(f"{count} {role.value}" for role, count in roles.items())
    stored = int(catalog.num_bytes().sum()) if len(catalog.pieces) else 0
    yield f"  pieces  {len(catalog.pieces):,} with {size(stored)}"


def _tensors(catalog: Catalog) -> Iterator[str]:
    """A line a tensor: all roles that are stored alike together."""
    alike: dict[tuple[str, str, int, str], dict[str, list[str]]] = {}
    numbered = [(n, t) for n, t in enumerate(catalog.tensors) if t.role is not Role.PADDING]
    # A counter that is kept for every parameter says nothing new a line.
    numbered = [(n, t) for n, t in numbered if t.shape or t.role is not Role.COUNTER]
    numbered.sort(key=lambda entry: (entry[1].order, list(Role).index(entry[1].role)))
    for number, tensor in numbered:
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        key = tensor.name, shape, len(catalog.rows_by_tensor.get(number, ())), _placed(catalog, number)
        alike.setdefault(key, {}).setdefault(tensor.dtype.name, []).append(tensor.role.value)
    width = max((len(name) for name, *_ in list(alike)[:MAX_TENSORS]), default=0)
    previous = ""
    for (name, shape, pieces, how), roles in alike.items():
        shown, previous = "" if name == previous else name, name
        stored = "; ".join(f"{dtype} {', '.join(members)}" for dtype, members in roles.items())
        each = f"{pieces} piece{'s' if pieces != 1 else ''}{' each' if sum(map(len, roles.values())) > 1 else ''}"
        yield f"    {safe(shown):<{width}}  {shape:<12} {stored}  {each}  {safe(how)}".rstrip()


def _placed(catalog: Catalog, number: int) -> str:
    tensor = catalog.tensors[number]
    if tensor.replica_axes:
        return f"{len(catalog.replicas[number])} replicas over {','.join(tensor.replica_axes)}"
    return f"placement unknown: {tensor.undetermined}" if tensor.undetermined else ""


def _files(catalog: Catalog, most: int | None) -> Iterator[str]:
    yield f"  files   {len(catalog.files)} with {size(sum(file.num_bytes for file in catalog.files))}"
    odd = [file for file in catalog.files if file.state is not FileState.PRESENT]
    yield from _few([f"    [red]{file.state.value}[/] {safe(file.name)}: {safe(file.detail)}" for file in odd], most)
    unread = [name for name in catalog.unclaimed if not _is_without_weights(name)]
    yield from _few([f"    not read by any loader: {safe(name)}" for name in unread], most)
    if len(unread) < len(catalog.unclaimed):
        yield f"    {len(catalog.unclaimed) - len(unread)} beside them without weights: texts, tokenizers, logs"
    problems = [f"    [yellow]{x.kind.value}[/] {safe(x.file)} {safe(x.message)}" for x in catalog.problems]
    yield from _few(problems, most)
    if catalog.opaque:
        counted = [f"{name} {count}" for name, count in sorted(catalog.opaque.items())]
        more = ", …" if most is not None and len(counted) > most else ""
        yield f"  objects of unknown classes, not made: {safe(', '.join(counted[:most]))}{more}"


def _is_without_weights(path: str) -> bool:
    return any(fnmatchcase(base_name(path), pattern) for pattern in WITHOUT_WEIGHTS)


def inspect_object(store: Store, settings: Settings) -> dict[str, Any]:
    """Every chosen step for a machine."""
    steps = [_step(source, _catalog(store, settings, source)) for source in _sources(store, settings)]
    return {"schema_version": 1, "steps": steps}


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
