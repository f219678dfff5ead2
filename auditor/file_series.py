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
        isinstance(_look(store, adapter, step), Match) for adapter, steps in _found(store, folder) for step in steps
    )


def file_runs(store: Store, folder: Folder, nearest: Nearest) -> list[RunSource]:
    """The runs that files directly in ``folder`` make up; ``path`` of each is the pattern of its names.

    Raises:
        StorageError: storage failed.
    """
    return [run for adapter, steps in _found(store, folder) for run in _runs(store, folder, adapter, steps, nearest)]


def _found(store: Store, folder: Folder) -> Iterator[tuple[Adapter, Sequence[Folder]]]:
    for adapter in adapters():
        for steps in adapter.step_files(store, folder) if isinstance(adapter, FileStepsAdapter) else ():
            yield adapter, steps


def _runs(
    store: Store, folder: Folder, adapter: Adapter, steps: Sequence[Folder], nearest: Nearest
) -> Iterator[RunSource]:
    run = RunSource(f"{folder.path}/{min(pattern_of(step.path) for step in steps)}".lstrip("/"), [])
    for step, verdict in zip(steps, several(store, partial(_look, store, adapter), steps), strict=True):
        if isinstance(verdict, StorageError):
            run.unrecognised[step.path] = str(verdict)
        elif isinstance(verdict, Match):
            run.steps.append(StepSource(step, adapter, verdict))
        else:
            nearest.consider(step.path, {adapter.name: verdict})
            run.unrecognised[step.path] = verdict.reason
    if of_one_moment(run.steps):
        yield from (RunSource(step.folder.path, [step], unrecognised=run.unrecognised) for step in run.steps)
    elif run.steps:
        # Of some nothing may tell the step although they are of a series (checkpoint_0.4).
        others = set_apart(run)
        for one in [run, *others] if run.steps else others:
            one.steps = numbered(one.steps)
            yield one


def _look(store: Store, adapter: Adapter, step: Folder) -> Match | Declined | StorageError:
    """What one file, or a few together, is, or why that can't be told."""
    try:
        return adapter.recognise(store, step)
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
