"""What every adapter passes. Subclass :class:`AdapterContract`, name the adapter and real checkpoints of its format.

    class TestMine(AdapterContract):
        adapter = MyAdapter()
        checkpoints = (FIXTURES / "step100",)

        def framework_arrays(self, path):
            '''(role, logical name) -> value bits in C order, by the framework's own loader.'''

A package that registers an adapter under the entry-point group ``auditor.adapters`` runs it the same way. pytest tells
more of a failure if the package's ``conftest.py`` says
``pytest.register_assert_rewrite("auditor.testing.adapter_contract")``.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.adapters.adapter import Adapter, Declined, Folder, Match, Options
from auditor.containers.encoded import open_file
from auditor.model.catalog import Catalog, File, FileState, Piece, Role
from auditor.model.region import Box, coverage
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.store import Store, read_bytes
from auditor.testing.recording import RecordingStore
from auditor.view.assemble import read_box
from auditor.view.tree import StepNode, run_tree
from auditor.view.zarr_store import open_group

MAX_TAIL_BYTES = 64
"""What a container may read of a file's end to find its directory."""


def few(objects: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of files whose names differ in their folder and in numbers alone, the first and the last."""
    alike: dict[str, list[str]] = {}
    for name in sorted(objects):
        alike.setdefault(re.sub(r"\d+", "#", name.rpartition("/")[2]), []).append(name)
    return {name: objects[name] for names in alike.values() for name in (names[0], names[-1])}


class AdapterContract:
    """The suite."""

    adapter: Adapter
    checkpoints: tuple[Path, ...]
    """Folders of single steps, written by the framework."""
    foreign: tuple[Path, ...] = ()
    """Folders of other formats, to be declined."""
    read_ahead: int = 0
    """Bytes that may be read at once where headers lie between the weights."""

    def framework_arrays(self, path: Path) -> Mapping[tuple[str, str], bytes]:
        """(role, logical name) to the tensor's value bits in C order, by the framework's own loader; some or all."""
        raise NotImplementedError

    def comparable(self, elements: bytes) -> bytes:
        """What of a tensor's elements is held against ``framework_arrays``: themselves, or a digest of them."""
        return elements

    # What the tests below share

    def catalog(self, store: Store, path: str = "") -> Catalog:
        folder = Folder.read(store, path)
        match = self.adapter.recognise(store, folder)
        assert isinstance(match, Match), match
        return self.adapter.read(store, folder, match, Options())

    @staticmethod
    def objects(path: Path) -> dict[str, bytes]:
        return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def all_checkpoints(self) -> tuple[Path, ...]:
        assert self.checkpoints, "a contract without checkpoints proves nothing"
        return self.checkpoints

    @staticmethod
    def same(left: Catalog, right: Catalog) -> None:
        assert left.tensors == right.tensors
        assert left.replicas == right.replicas
        assert left.problems == right.problems
        assert left.scalars == right.scalars
        for name in (*left.pieces.COLUMNS, "pool"):
            np.testing.assert_array_equal(getattr(left.pieces, name), getattr(right.pieces, name))

    # Recognition

    def test_recognises_its_own_with_a_reason(self) -> None:
        for path in self.all_checkpoints():
            match = self.adapter.recognise(LocalStore(path), Folder.read(LocalStore(path), ""))
            assert isinstance(match, Match)
            assert match.reason
            assert match.step >= 0

    def test_declines_what_is_not_its_own_with_a_reason(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes.txt").write_text("no checkpoint")
        for path in (tmp_path / "empty", tmp_path / "other", *self.foreign):
            store = LocalStore(path)
            verdict = self.adapter.recognise(store, Folder.read(store, ""))
            assert isinstance(verdict, Declined), path
            assert verdict.reason
            assert 0 <= verdict.nearness < 1

    def test_says_what_it_looks_for(self) -> None:
        assert self.adapter.name
        assert self.adapter.looks_for

    # The Catalog

    def test_catalog_is_valid(self) -> None:
        for path in self.all_checkpoints():
            catalog = self.catalog(LocalStore(path))
            sizes = {file.name: file.encoding.size if file.encoding else file.num_bytes for file in catalog.files}
            assert len(catalog.tensors) == len(catalog.replicas) > 0
            assert all(file.state is FileState.PRESENT for file in catalog.files)
            assert not catalog.problems
            assert len(set(catalog.tensors)) == len(catalog.tensors)
            for piece in catalog.pieces:
                tensor, file = catalog.tensors[piece.tensor], catalog.files[piece.file]
                reach = sum((n - 1) * s for n, s in zip(piece.shape, piece.strides, strict=True)) + 1
                if 0 not in piece.shape:
                    assert 0 <= piece.offset <= piece.offset + tensor.dtype.num_bytes(reach) <= sizes[file.name]
                place = piece.coordinate.along(tensor.replica_axes)
                assert catalog.replicas[piece.tensor][piece.replica] == place
                for axis, index in piece.coordinate.indices:
                    assert 0 <= index < catalog.mesh.degree(axis)

    def test_pieces_tile_every_replica_of_every_tensor(self) -> None:
        for path in self.all_checkpoints():
            catalog = self.catalog(LocalStore(path))
            for number, tensor in enumerate(catalog.tensors):
                for replica in range(len(catalog.replicas[number])):
                    regions = [catalog.pieces.region(int(row)) for row in catalog.rows_of(number, replica)]
                    assert coverage(regions, tensor.shape).exact, tensor

    def test_reading_twice_gives_the_same(self) -> None:
        for path in self.all_checkpoints():
            self.same(self.catalog(LocalStore(path)), self.catalog(LocalStore(path)))

    def test_memory_gives_the_same_as_disk(self) -> None:
        for path in self.all_checkpoints():
            self.same(self.catalog(LocalStore(path)), self.catalog(MemoryStore(self.objects(path))))

    def test_catalog_can_be_shipped_to_workers(self) -> None:
        catalog = self.catalog(LocalStore(self.all_checkpoints()[0]))
        self.same(pickle.loads(pickle.dumps(catalog)), catalog)

    # The data

    def test_view_equals_plain_offsets(self) -> None:
        """What zarr-python reads through the view == numpy over the whole file's content."""
        for path in self.all_checkpoints():
            store = LocalStore(path)
            catalog = self.catalog(store)
            contents = {piece.file: self.content(store, catalog.files[piece.file]) for piece in catalog.pieces}
            tree = run_tree(store, [StepNode("1", partial(self.catalog, store))])
            group: Any = open_group(tree)["steps/1/pieces"]
            for piece in catalog.pieces:
                width = catalog.tensors[piece.tensor].dtype.stored_bits // 8
                raw = np.frombuffer(contents[piece.file], np.uint8)
                at = np.add.outer(self.element_offsets(piece) * width + piece.offset, np.arange(width))
                assert group[str(piece.index)][...].tobytes() == raw[at].tobytes(), piece

    @staticmethod
    def content(store: Store, file: File) -> bytes:
        with open_file(store, file) as handle:
            return read_bytes(handle, 0, file.encoding.size if file.encoding else handle.entry.num_bytes)

    @staticmethod
    def element_offsets(piece: Piece) -> NDArray[np.int64]:
        offsets: NDArray[np.int64] = np.zeros((), np.int64)
        for extent, stride in zip(piece.shape, piece.strides, strict=True):
            offsets = np.add.outer(offsets, np.arange(extent) * stride)
        return offsets

    def test_tensors_equal_the_framework(self) -> None:
        for path in self.all_checkpoints():
            store = LocalStore(path)
            catalog = self.catalog(store)
            ids = {(tensor.role.value, tensor.name): number for number, tensor in enumerate(catalog.tensors)}
            loaded = self.framework_arrays(path)
            assert loaded
            for key, expected in loaded.items():
                shape = catalog.tensors[ids[key]].shape
                for replica in range(len(catalog.replicas[ids[key]])):
                    whole = Box((0,) * len(shape), shape)
                    found = read_box(store, catalog, ids[key], replica, whole).tobytes()
                    assert self.comparable(found) == expected, key

    def test_listing_reads_no_weights(self) -> None:
        for path in self.all_checkpoints():
            store = RecordingStore(self.objects(path))
            catalog = self.catalog(store)
            sizes = catalog.num_bytes()
            by_file: dict[str, list[tuple[int, int]]] = {}
            for piece in catalog.pieces:
                if catalog.tensors[piece.tensor].role is Role.COUNTER:
                    continue  # A count of steps is metadata, wherever it is kept.
                file = catalog.files[piece.file]
                stored = (piece.offset, piece.offset + int(sizes[piece.index]))
                if file.encoding is not None:
                    chunk = file.encoding.between(*stored)
                    if chunk.held[0]:
                        continue  # Its bytes lie inside metadata.
                    stored = int(chunk.offset[0]), int(chunk.offset[0] + chunk.num_stored[0])
                by_file.setdefault(file.name, []).append(stored)
            for name, start, stop in store.ranges:
                total = len(store.objects[name])
                tail = (stop == total and stop - start <= MAX_TAIL_BYTES) or stop - start <= self.read_ahead
                for low, high in by_file.get(name, ()):
                    assert tail or stop <= low or high <= start, (name, start, stop)

    # Bad input: whatever is wrong is in the Catalog, never raised

    def test_every_file_may_be_missing(self) -> None:
        for path in self.all_checkpoints():
            objects = self.objects(path)
            # Without the one file that a step is there is nothing left to look at.
            for name in objects if len(objects) > 1 else ():
                self.harmless(MemoryStore({other: content for other, content in objects.items() if other != name}))

    def test_every_file_may_be_short_or_empty_or_nonsense(self) -> None:
        for path in self.all_checkpoints():
            objects = self.objects(path)
            for name, content in few(objects).items():
                for cut in {0, 1, 8, len(content) // 3, len(content) // 2, len(content) - 1}:
                    self.harmless(MemoryStore({**objects, name: content[:cut]}))
                self.harmless(MemoryStore({**objects, name: b"\xff" * len(content)}))

    def test_every_file_may_be_another_one(self) -> None:
        objects = self.objects(self.all_checkpoints()[0])
        names = sorted(objects)
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            self.harmless(MemoryStore({**objects, name: objects[other]}))

    def test_every_file_may_be_denied(self) -> None:
        for path in self.all_checkpoints():
            for name in few(self.objects(path)):
                store = FaultyStore(LocalStore(path), Faults(denied=name))
                catalog = self.harmless(store)
                states = {file.name: file.state for file in catalog.files} if catalog else {}
                assert states.get(name, FileState.UNREADABLE) in (FileState.UNREADABLE, FileState.PRESENT)

    def test_transient_failures_pass(self) -> None:
        path = self.all_checkpoints()[0]
        store = RetryingStore(FaultyStore(LocalStore(path), Faults(transient="*", num_transient=2)), 4, 0.0)
        self.same(self.catalog(store), self.catalog(LocalStore(path)))

    def harmless(self, store: Store) -> Catalog | None:
        """Recognise and, if recognised, read; returns the Catalog."""
        folder = Folder.read(store, "")
        match = self.adapter.recognise(store, folder)
        if isinstance(match, Declined):
            assert match.reason
            return None
        return self.adapter.read(store, folder, match, Options())
