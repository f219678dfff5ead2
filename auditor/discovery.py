"""What a path means: one step, a run, a folder of runs, a single file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from auditor.adapters.adapter import Adapter, Declined, Folder, Match, Options, Pointer
from auditor.adapters.registry import adapters, recognise
from auditor.containers.ahead import several
from auditor.containers.signature import looks_like
from auditor.containers.zarr_names import escape
from auditor.empty_step import empty_step
from auditor.errors import NothingToAuditError, UsageError
from auditor.file_series import checkpoint_in, file_runs
from auditor.sources import Nearest, RunSource, StepSource, asked_for, numbered, pattern_of, set_apart
from auditor.storage.store import Entry, ObjectMissingError, StorageError, Store, base_name, join
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


def discover(store: Store, *, nested: bool = True) -> list[RunSource]:
    """The runs below the store's root.

    ``nested``: whether those in the folder of another run are looked for as well.

    Raises:
        NothingToAuditError: no folder is a checkpoint of any known format; says what was looked for and what came
            nearest.
        StorageError: the root can't be listed.
    """
    search, root = _Search(store, nested), Folder.read(store, "")
    if not store.stat("").is_folder:
        return [_single(store, replace(root, alone=True))]
    runs = list(search.runs(root, (store.stat("").identity,)))
    if runs:
        search.name_left(runs)
        return runs
    nearest = search.nearest
    wanted = "\n".join(f"  {adapter.name}: {adapter.looks_for}" for adapter in adapters())
    single = [name for name in root.files if name.endswith(BY_THEMSELVES)]
    # Scripts name their files as they like; which of them are saves of one run is not known.
    singly = f"\nnamed by itself {single[0]} is read" if single and _is_read(store, root.files[single[0]]) else ""
    nearest_text = f"\nnearest: {nearest.text}" if nearest.text else ""
    raise NothingToAuditError(f"{store.location}: no checkpoint found. Looked for\n{wanted}{nearest_text}{singly}")


def _is_read(store: Store, entry: Entry) -> bool:
    """Whether a file is a checkpoint if named by itself."""
    with suppress(StorageError):
        return isinstance(recognise(store, Folder.of_file(entry)), tuple)
    return False


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


@dataclass(slots=True)
class _Search:
    """One search below a root."""

    store: Store
    nested: bool
    """Whether runs in the folder of another run are looked for as well."""
    nearest: Nearest = field(default_factory=Nearest)
    num_folders: int = 0
    left: dict[str, list[str]] = field(default_factory=dict)
    """Folders with files of checkpoints that are of no run, by their path without numbers: one such file of each."""

    def runs(self, folder: Folder, above: tuple[str, ...]) -> Iterator[RunSource]:
        """The runs in ``folder``; ``above``: identities of the folders down to it, itself included."""
        folder, verdict, vanished = _recognised(self.store, folder)
        run, others = RunSource(folder.path, [], vanished=vanished), list[Folder]()
        if isinstance(verdict, tuple):
            yield RunSource(folder.path, [StepSource(folder, *verdict)])
            self.look_into(folder, above, run, others, verdict[1].holds)
        else:
            self.nearest.consider(folder.path, verdict)
            self.look_into(folder, above, run, others)
        series = [] if isinstance(verdict, tuple) else [*self.series(folder, run), *set_apart(run)]
        if run.steps:
            yield _as_run(self.store, folder, run, others)
        yield from series
        if isinstance(verdict, tuple) or ((run.steps or series) and not self.nested):
            return
        for child in others:
            identity = folder.folders[base_name(child.path)].identity
            # A link to a folder that it lies in leads to nothing new; a hundred of them would to a million folders.
            if child.path not in run.unrecognised and (not identity or identity not in above):
                found = list(self.runs(child, (*above, identity))) if len(above) < MAX_DEPTH else []
                for one in found:
                    one.beside = one.beside or bool(run.steps or series)
                    yield one
                if not found and (name := checkpoint_in(self.store, child)):
                    self.left.setdefault(pattern_of(child.path, whole=True), []).append(join(child.path, name))

    def look_into(
        self, folder: Folder, above: Sequence[str], run: RunSource, others: list[Folder], held: Sequence[str] = ()
    ) -> None:
        """Sort the folders in ``folder`` into steps and others."""
        entries = [entry for name, entry in folder.folders.items() if name not in (OURS, *held)]
        if self.num_folders + len(entries) > MAX_FOLDERS:
            run.unrecognised[folder.path or "."] = f"only the first {MAX_FOLDERS} folders were looked into"
            del entries[max(0, MAX_FOLDERS - self.num_folders) :]
        self.num_folders += len(entries)
        identities = {*above}
        for entry, looked in zip(entries, several(self.store, partial(_look, self.store), entries), strict=True):
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
                self.nearest.consider(child.path, found)
                others.append(child)

    def series(self, folder: Folder, run: RunSource) -> list[RunSource]:
        """Files of ``folder`` that are steps: the one series of a folder is its run, others are runs too."""
        found = file_runs(self.store, folder, self.nearest)
        main = [one for one in found if len(one.steps) > 1 or one.steps[0].match.numbered is not None]
        known = {file.identity for one in (run, *main) for step in one.steps for file in step.folder.files.values()}
        others = [one for one in found if one not in main]
        if main or run.steps:
            # Links and copies of the same object are the step that they name.
            others = [
                one for one in others if next(iter(one.steps[0].folder.files.values())).identity not in known - {""}
            ]
            for one in others:
                one.beside = True
        elif len(others) == 1:
            main, others = others, []
        if len(main) != 1 or run.steps:
            return [*main, *others]
        run.steps += main[0].steps
        run.unrecognised |= main[0].unrecognised
        return others

    def name_left(self, runs: Sequence[RunSource]) -> None:
        """Say of what is left that nobody looked at it, with the run that it lies nearest to."""
        for places in self.left.values():
            path, _, name = places[0].rpartition("/")
            more = f" (and so in {len(places) - 1} more)" if len(places) > 1 else ""
            inside = [run for run in runs if not run.path or f"{path}/".startswith(f"{run.path}/")]
            nearest = max(inside, key=lambda run: len(run.path), default=runs[0])
            nearest.unrecognised[path] = f"no format recognises its files, {name} for example{more}"


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


def _as_run(store: Store, folder: Folder, run: RunSource, others: list[Folder]) -> RunSource:
    like = {pattern_of(source.folder.path): source for source in run.steps}
    for other in others:
        beside = like.get(pattern_of(other.path))
        if beside is None:
            continue
        if _is_gone(store, other):
            run.vanished.append(other.path)
        elif not (other.files or other.folders) and (lost := empty_step(other, beside)):
            run.steps.append(lost)
        else:
            run.unrecognised[other.path] = "named like a step, but nothing in it is recognised"
    run.steps = numbered(run.steps)
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


def one_run(store: Store) -> RunSource:
    """The one run below the store's root.

    Raises:
        UsageError: there are several runs.
        NothingToAuditError: there is none.
    """
    runs = asked_for(discover(store))
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
