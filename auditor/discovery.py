"""What a path means: one step, a run, a folder of runs, a single file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from auditor.adapters.adapter import Adapter, Declined, FileStepsAdapter, Folder, Match, Options, Pointer
from auditor.adapters.registry import adapters, recognise
from auditor.containers.ahead import several
from auditor.containers.signature import looks_like
from auditor.containers.zarr_names import escape
from auditor.errors import NothingToAuditError, UsageError
from auditor.storage.store import Entry, ObjectMissingError, StorageError, Store, base_name
from auditor.storage.union import UnionStore
from auditor.view.tree import StepNode

MAX_DEPTH = 3
"""How far below the path steps are looked for."""
OURS = ".auditor"
"""What the hook leaves beside the steps."""
BY_THEMSELVES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""Names of files that may be whole checkpoints and that no format recognised together."""
MAX_FOLDERS = 20_000
"""Folders that are looked into before giving up."""


@dataclass(frozen=True, slots=True)
class StepSource:
    """A recognised step."""

    folder: Folder
    adapter: Adapter
    match: Match


@dataclass(slots=True)
class RunSource:
    """A folder whose direct children (or itself) are steps."""

    path: str
    steps: list[StepSource]
    pointers: list[Pointer] = field(default_factory=list)
    unrecognised: dict[str, str] = field(default_factory=dict)
    """Folders that are named like a step of this run but were not recognised or readable, with the reason."""
    vanished: list[str] = field(default_factory=list)
    """Folders that were listed and gone when they were looked into."""


@dataclass(slots=True)
class _Nearest:
    """What came nearest to being a checkpoint."""

    nearness: float = -1.0
    text: str = ""

    def consider(self, path: str, declined: dict[str, Declined]) -> None:
        for name, verdict in declined.items():
            if verdict.nearness > self.nearness:
                self.nearness, self.text = verdict.nearness, f"{path or '.'} as {name}: {verdict.reason}"


def discover(store: Store) -> list[RunSource]:
    """The runs below the store's root.

    Raises:
        NothingToAuditError: no folder is a checkpoint of any known format; says what was looked for and what came
            nearest.
        StorageError: the root can't be listed.
    """
    nearest, root = _Nearest(), Folder.read(store, "")
    if not store.stat("").is_folder:
        return [_single(store, replace(root, alone=True))]
    runs = list(_search(store, root, (store.stat("").identity,), [0], nearest))
    if runs:
        return runs
    wanted = "\n".join(f"  {adapter.name}: {adapter.looks_for}" for adapter in adapters())
    single = [name for name in root.files if name.endswith(BY_THEMSELVES)]
    # Scripts name their files as they like; which of them are saves of one run is not known.
    singly = f"\nnamed by itself each of {len(single)} files here is read, {single[0]} for example" if single else ""
    nearest_text = f"\nnearest: {nearest.text}" if nearest.text else ""
    raise NothingToAuditError(f"{store.location}: no checkpoint found. Looked for\n{wanted}{nearest_text}{singly}")


def _single(store: Store, root: Folder) -> RunSource:
    """The run that one file by itself is."""
    found = recognise(store, root)
    if isinstance(found, tuple):
        return RunSource("", [StepSource(root, *found)])
    with store.open(next(iter(root.files))) as handle:
        what = looks_like(handle)
    near = sorted(found.items(), key=lambda item: -item[1].nearness)
    reasons = "\n".join(f"  {name}: {declined.reason}" for name, declined in near)
    raise NothingToAuditError(
        f"{store.location}: {what}; no format reads it by itself. Name the folder that it is part of\n{reasons}"
    )


def _search(
    store: Store, folder: Folder, above: tuple[str, ...], seen: list[int], nearest: _Nearest
) -> Iterator[RunSource]:
    """The runs in ``folder``; ``above``: identities of the folders down to it, itself included."""
    folder, verdict, vanished = _recognised(store, folder)
    if isinstance(verdict, tuple):
        yield RunSource(folder.path, [StepSource(folder, *verdict)])
    else:
        nearest.consider(folder.path, verdict)
    run = RunSource(folder.path, [], vanished=vanished)
    others: list[Folder] = []
    identities = {*above}
    held = (OURS, *(verdict[1].holds if isinstance(verdict, tuple) else ()))
    entries = [entry for name, entry in folder.folders.items() if name not in held]
    if seen[0] + len(entries) > MAX_FOLDERS:
        run.unrecognised[folder.path or "."] = f"only the first {MAX_FOLDERS} folders were looked into"
        del entries[max(0, MAX_FOLDERS - seen[0]) :]
    seen[0] += len(entries)
    for entry, looked in zip(entries, several(store, partial(_look, store), entries), strict=True):
        if isinstance(looked, ObjectMissingError):
            run.vanished.append(entry.name)
            continue
        if isinstance(looked, StorageError):
            run.unrecognised[entry.name] = str(looked)
            continue
        child, found = looked
        if isinstance(found, tuple):
            # A link to a step that is there under its own name is that step, not a second one.
            if not entry.identity or entry.identity not in identities:
                identities.add(entry.identity)
                run.steps.append(StepSource(child, *found))
        else:
            nearest.consider(child.path, found)
            others.append(child)
    series = [] if isinstance(verdict, tuple) else _series(store, folder, nearest, run)
    yield from series
    if run.steps:
        yield _as_run(store, folder, run, others)
    elif not series and len(above) < MAX_DEPTH and not isinstance(verdict, tuple):
        for child in others:
            identity = folder.folders[base_name(child.path)].identity
            # A link to a folder that it lies in leads to nothing new; a hundred of them would to a million folders.
            if not identity or identity not in above:
                yield from _search(store, child, (*above, identity), seen, nearest)


def _recognised(store: Store, folder: Folder) -> tuple[Folder, tuple[Adapter, Match] | dict[str, Declined], list[str]]:
    """What a folder is. Where one in it went meanwhile it is listed anew; which went so is told."""
    try:
        return folder, recognise(store, folder), []
    except ObjectMissingError:
        again = Folder.read(store, folder.path)
        went = [entry.name for name, entry in folder.folders.items() if name not in again.folders]
        return again, recognise(store, again), went


def _look(store: Store, entry: Entry) -> tuple[Folder, tuple[Adapter, Match] | dict[str, Declined]] | StorageError:
    """One folder, and what it is; or why that can't be told."""
    try:
        child = Folder.read(store, entry.name)
        return child, recognise(store, child)
    except StorageError as error:
        return error


def holds_file_steps(store: Store, folder: Folder) -> bool:
    """Whether files directly in ``folder`` are steps by themselves."""
    return any(True for _ in _file_runs(store, folder, _Nearest()))


def _series(store: Store, folder: Folder, nearest: _Nearest, run: RunSource) -> list[RunSource]:
    """Files of ``folder`` that are steps by themselves: each series a run, one alone that of the folder."""
    series = list(_file_runs(store, folder, nearest))
    if len(series) != 1 or run.steps:
        return series
    run.steps += series[0].steps
    run.unrecognised |= series[0].unrecognised
    return []


def _file_runs(store: Store, folder: Folder, nearest: _Nearest) -> Iterator[RunSource]:
    for adapter in adapters():
        for entries in adapter.step_files(store, folder) if isinstance(adapter, FileStepsAdapter) else ():
            names = {_stem(entry.name) for entry in entries}
            run = RunSource(f"{folder.path}/{min(names)}".lstrip("/"), [])
            for entry in entries:
                own = Folder.of_file(entry)
                try:
                    verdict = adapter.recognise(store, own)
                except StorageError as error:
                    run.unrecognised[entry.name] = str(error)
                    continue
                if isinstance(verdict, Match):
                    run.steps.append(StepSource(own, adapter, verdict))
                else:
                    nearest.consider(entry.name, {adapter.name: verdict})
                    run.unrecognised[entry.name] = verdict.reason
            run.steps.sort(key=lambda source: (source.match.step, source.folder.path))
            if run.steps:
                yield run


def _as_run(store: Store, folder: Folder, run: RunSource, others: list[Folder]) -> RunSource:
    run.steps.sort(key=lambda source: (source.match.step, source.folder.path))
    stems = {_stem(source.folder.path) for source in run.steps}
    for other in others:
        if _stem(other.path) not in stems:
            continue
        if _is_gone(store, other):
            run.vanished.append(other.path)
        else:
            run.unrecognised[other.path] = (
                "named like a step, but nothing in it is recognised"
                if (other.files or other.folders)
                else "named like a step, but empty"
            )
    for adapter in {source.adapter.name: source.adapter for source in run.steps}.values():
        for root in store.roots if isinstance(store, UnionStore) else (store,):
            try:
                pointer = adapter.pointer(root, Folder.read(root, folder.path))
            except ObjectMissingError:
                continue
            except StorageError as error:
                run.unrecognised[folder.path or "."] = str(error)
                continue
            if pointer and not _moved_on(store, folder, run, pointer):
                run.pointers.append(pointer)
    if isinstance(store, UnionStore):
        for source in run.steps:
            for name, root_name in store.shadowed(source.folder.path).items():
                run.unrecognised[f"{root_name}/{name}"] = "another root has a file of this name; that one is read"
    return run


def _moved_on(store: Store, folder: Folder, run: RunSource, pointer: Pointer) -> bool:
    """Whether the step that a pointer names came, or went, after the folder was listed."""
    if pointer.target in run.vanished:
        return True
    listed = {entry.name for entry in folder.folders.values()} | {source.folder.path for source in run.steps}
    if not pointer.target or pointer.target in listed:
        return False
    with suppress(StorageError):
        return store.stat(pointer.target).is_folder
    return False


def _is_gone(store: Store, folder: Folder) -> bool:
    """Whether a folder in which nothing was recognised is being deleted: less is in it now than when it was listed."""
    try:
        now = Folder.read(store, folder.path)
    except ObjectMissingError:
        return True
    except StorageError:
        return False
    return not {*folder.files, *folder.folders} <= {*now.files, *now.folders}


def _stem(path: str) -> str:
    """A folder's name with its number taken out."""
    return re.sub(r"\d+", "#", base_name(path))


def one_run(store: Store) -> RunSource:
    """The one run below the store's root.

    Raises:
        UsageError: there are several runs.
        NothingToAuditError: there is none.
    """
    runs = discover(store)
    if len(runs) > 1:
        raise UsageError(f"{store.location} holds {len(runs)} runs; name one: {', '.join(run.path for run in runs)}")
    return runs[0]


def step_nodes(store: Store, run: RunSource | None = None, options: Options | None = None) -> list[StepNode]:
    """The steps of the one run below the store's root, for its Zarr view; one for each of ``run.steps``.

    Raises:
        UsageError, NothingToAuditError: as :func:`one_run`, where ``run`` is not given.
    """
    nodes: dict[str, StepNode] = {}
    for source in (run or one_run(store)).steps:
        name = str(source.match.step)
        if name in nodes:
            # Two folders with one step: both are shown, the second under its folder's name as well.
            name = f"{name}@{escape(base_name(source.folder.path))}"
        load = partial(source.adapter.read, store, source.folder, source.match, options or Options())
        nodes[name] = StepNode(name, load)
    return list(nodes.values())
