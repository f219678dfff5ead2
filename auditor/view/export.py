"""The Zarr view written as a store on disk, verified by digest, one chunk in memory at a time a worker.

A node's ``zarr.json`` is written after all that it stands for: an array's after its chunks, a step's after its arrays.
So whatever was interrupted is not visible to readers of Zarr, which would fill its holes. What is there already is kept
if it is this array; chunks of an array that has no ``zarr.json`` yet are compared with the source first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

from auditor.errors import UsageError
from auditor.model.catalog import File, FileState, Role
from auditor.storage.store import Entry, Store, changed_since
from auditor.storage.writer import FolderWriter
from auditor.view.export_tensor import Target, TensorExport, Written, said
from auditor.view.nodes import Array, Node, group
from auditor.view.tree import SCHEMA_VERSION, StepNode, StepTree, place_name

WRITER = "auditor export"
"""What the root's attributes say, so that a later export knows the store as one."""


def begin(writer: FolderWriter) -> None:
    """Make the root of the store, or find it.

    Raises:
        UsageError: the folder holds something else.
        WriteError: it can't be written.
    """
    target = Target(writer)
    found = said(target.document(""))
    if writer.names() and found.get("writer") != WRITER:
        raise UsageError(f"{writer.location} holds files that are no export's; name a new or empty folder")
    if found and found.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(f"{writer.location} is an export in layout version {found.get('schema_version')}")
    root = group({}, {"auditor": {"schema_version": SCHEMA_VERSION, "writer": WRITER}})
    target.write_document("", root.document())
    target.write_document("steps", group({}).document())


class StepExport:
    """Writes one step. ``tensors``: a glob, kept in the step's attributes so that a reader knows what must be there."""

    def __init__(self, store: Store, writer: FolderWriter, node: StepNode, tensors: str = "") -> None:
        self.store, self.writer, self.target = store, writer, Target(writer)
        self.catalog, self.path, self.glob = node.load(), f"steps/{node.name}", tensors or "*"
        self.tree = StepTree(store, self.catalog)
        self.wanted = {
            at: number
            for at, number in self.tree.ids.items()
            if fnmatchcase(self.catalog.tensors[number].name, self.glob)
        }
        self.before = said(self.target.document(self.path))

    def run(self, threads: int, progress: Callable[[int], None] = lambda num_bytes: None) -> Written:
        """Write the arrays, then the step's own document.

        Raises:
            WriteError: the target does not take it.
            NotVerifiedError, OccupiedError: as they say.
        """
        total = Written()
        pool = ThreadPoolExecutor(threads)
        try:
            for written in pool.map(self._write, self.wanted):
                total.add(written)
                progress(written.num_bytes)
        finally:
            # Without it an interrupt would wait until all queued work is done.
            pool.shutdown(cancel_futures=True)
        total.changed = tuple(file.name for file in self.catalog.files if self._has_changed(file))
        if not total.changed:
            self._finish(total)
        return total

    def _has_changed(self, file: File) -> bool:
        """Whether a source file is another one than when the Catalog was read, or was already then changing."""
        known = Entry(file.name, False, file.num_bytes, file.identity) if file.identity else None
        return file.state is FileState.CHANGED or changed_since(self.store, file.name, known)

    def _write(self, at: tuple[Role, str]) -> Written:
        finished = bool(self.before) and not self.before.get("num_chunks_lost")
        return TensorExport(self.tree, self.target, self.path, self.wanted[at], at[1], finished=finished).run()

    def _finish(self, total: Written) -> None:
        for path, node in self._groups():
            self.target.write_document(f"{self.path}/{path}", node.document())
        for name, column in self._columns():
            for key in column.chunk_keys():
                self.writer.write(f"{self.path}/catalog/{name}/{key}", column.chunk(key) or b"")
            self.target.write_document(f"{self.path}/catalog/{name}", column.document())
        self.target.write_document(f"{self.path}/catalog", self.tree.columns().document())
        known = self.before.get("tensors")
        globs = {self.glob, *(known if isinstance(known, list) else ())}
        added = {"tensors": ["*"] if "*" in globs else sorted(globs), "num_chunks_lost": total.lost.total()}
        document = group({}, {"auditor": {**self.tree.attributes(), **added}}).document()
        self.target.write_document(self.path, document)

    def _columns(self) -> Iterator[tuple[str, Array]]:
        columns = self.tree.columns()
        for name in columns.children():
            column = columns.child(name)
            if isinstance(column, Array):
                yield name, column

    def _groups(self) -> Iterator[tuple[str, Node]]:
        """The groups between the step and its arrays."""
        held: dict[str, set[str]] = {"tensors": {role.value for role, _ in self.wanted}}
        for (role, _), number in self.wanted.items():
            for place in self.catalog.replicas[number][1:]:
                held.setdefault(f"replicas/{place_name(place)}", set()).add(role.value)
        if len(held) > 1:
            yield "replicas", group({})
        for folder, roles in held.items():
            yield folder, group({})
            yield from ((f"{folder}/{role}", group({})) for role in sorted(roles))
