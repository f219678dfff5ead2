"""Runs whose steps are files beside one another: series of numbered files, and files by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from auditor.adapters.adapter import Adapter, Declined, FileStepsAdapter, Folder, Match
from auditor.adapters.registry import adapters
from auditor.adapters.step_names import FOREIGN, TORCH_SUFFIXES, is_likely, is_part
from auditor.containers.ahead import several
from auditor.sources import Nearest, RunSource, StepSource, numbered, of_one_moment, pattern_of, set_apart
from auditor.storage.store import Entry, StorageError, Store, read_bytes


def holds_file_steps(store: Store, folder: Folder) -> bool:
    """Whether files directly in ``folder`` are steps by themselves.

    Raises:
        StorageError: storage failed.
    """
    return any(
        isinstance(_look(store, adapter, entry), Match)
        for adapter, entries in _found(store, folder)
        for entry in entries
    )


def file_runs(store: Store, folder: Folder, nearest: Nearest) -> list[RunSource]:
    """The runs that files directly in ``folder`` make up; ``path`` of each is the pattern of its names.

    Raises:
        StorageError: storage failed.
    """
    return [
        run for adapter, entries in _found(store, folder) for run in _runs(store, folder, adapter, entries, nearest)
    ]


def _found(store: Store, folder: Folder) -> Iterator[tuple[Adapter, Sequence[Entry]]]:
    for adapter in adapters():
        for entries in adapter.step_files(store, folder) if isinstance(adapter, FileStepsAdapter) else ():
            yield adapter, entries


def _runs(
    store: Store, folder: Folder, adapter: Adapter, entries: Sequence[Entry], nearest: Nearest
) -> Iterator[RunSource]:
    run = RunSource(f"{folder.path}/{min(pattern_of(entry.name) for entry in entries)}".lstrip("/"), [])
    for entry, verdict in zip(entries, several(store, partial(_look, store, adapter), entries), strict=True):
        if isinstance(verdict, StorageError):
            run.unrecognised[entry.name] = str(verdict)
        elif isinstance(verdict, Match):
            run.steps.append(StepSource(Folder.of_file(entry), adapter, verdict))
        else:
            nearest.consider(entry.name, {adapter.name: verdict})
            run.unrecognised[entry.name] = verdict.reason
    if of_one_moment(run.steps):
        yield from (RunSource(step.folder.path, [step], unrecognised=run.unrecognised) for step in run.steps)
    elif run.steps:
        # Of some nothing may tell the step although they are of a series (checkpoint_0.4).
        others = set_apart(run)
        for one in [run, *others] if run.steps else others:
            one.steps = numbered(one.steps)
            yield one


def _look(store: Store, adapter: Adapter, entry: Entry) -> Match | Declined | StorageError:
    """What one file is, or why that can't be told."""
    try:
        return adapter.recognise(store, Folder.of_file(entry))
    except StorageError as error:
        return error


def checkpoint_in(store: Store, folder: Folder) -> str:
    """A file of a folder that nobody recognised which is a checkpoint's; empty where there is none.

    Told by names; of those that anything may have, also by how the file begins: folders of logs, code and data are not
    named.
    """
    for name, entry in folder.files.items():
        if FOREIGN.fullmatch(name) or (name.endswith(".safetensors") and (is_likely(name) or is_part(name))):
            return name
        if name.endswith(TORCH_SUFFIXES) and (is_likely(name) or is_part(name)) and _begins_as_torch(store, entry):
            return name
    return ""


def _begins_as_torch(store: Store, entry: Entry) -> bool:
    try:
        with store.open(entry.name) as handle:
            return read_bytes(handle, 0, min(4, entry.num_bytes)).startswith((b"PK", b"\x80"))
    except StorageError:
        return False
