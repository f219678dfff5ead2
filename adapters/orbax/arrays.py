"""The arrays of one item: their documents, and where their chunks lie, in a database or as files of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.step_file import Opened
from auditor.adapters.zarr_tree.files import chunks_of
from auditor.containers import ocdbt, zarr_v2
from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.json_document import parse_json
from auditor.containers.zarr_array import Position, ZarrArray, ZarrNode, node_of
from auditor.model.catalog import FileState
from auditor.storage.store import Entry, Handle, ObjectMissingError, StorageError, Store, join, read_bytes

V3_DOCUMENT = "zarr.json"
DOCUMENTS = (zarr_v2.DOCUMENT, V3_DOCUMENT)
MAX_DOCUMENT_BYTES = 1 << 20
_CHUNK = re.compile(r"(?:c[./])?\d{1,15}(?:[./]\d{1,15})*", re.A)
PROCESS = re.compile(r"ocdbt\.process_(\d{1,6})", re.A)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a chunk is stored."""

    file: str
    """Below the root."""
    offset: int
    num_stored: int
    inline: bytes | None = None
    """Its stored bytes, where the database's node holds them."""
    entry: Entry | None = None
    """Of a chunk that is a file of its own."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array, or what is there in its place."""

    name: str
    document: str
    """Path of its document, or of the file of the database that holds it, below the root."""
    array: ZarrArray | None = None
    detail: str = ""
    """What is wrong with the document."""
    state: FileState = FileState.PRESENT
    chunks: Mapping[Position, Chunk] = field(default_factory=dict)
    """Of an array in shards, the shards."""
    strays: tuple[str, ...] = ()
    """Keys of chunks below it that an array of its shape does not have."""

    @property
    def contradiction(self) -> str:
        """What is wrong with a document whose shape has no place for what is stored; empty where nothing is."""
        if not self.strays or self.array is None:
            return ""
        many = f" and {len(self.strays) - 1} more" if len(self.strays) > 1 else ""
        return f"says that {self.name} has shape {list(self.array.shape)}, but chunk {self.strays[0]}{many} is stored"


@dataclass(slots=True)
class Arrays:
    """All arrays of an item."""

    by_name: dict[str, StoredArray] = field(default_factory=dict)
    files: dict[str, Opened[Any]] = field(default_factory=dict)
    """Files of databases, by path below the root."""
    lost_in: str = ""
    """The file whose loss or damage keeps the latest database from being known."""


def document_of(name: str, raw: bytes) -> ZarrArray:
    """The array that a document describes, by the document's name.

    Raises:
        DamagedError: it describes none.
    """
    node = _node_of(name, raw)
    if not isinstance(node, ZarrArray):
        raise DamagedError("it is a group where an array belongs")
    return node


def _node_of(name: str, raw: bytes) -> ZarrNode:
    document = parse_json(raw)
    return zarr_v2.array_of(document) if name == zarr_v2.DOCUMENT else node_of(document)


class DatabaseArrays:
    """Reads the arrays of an item that is an OCDBT database."""

    def __init__(self, store: Store, folder: Folder) -> None:
        self.store, self.folder = store, folder
        self.found = Arrays()
        self.documents: dict[bytes, ZarrArray] = {}
        """Many arrays have one shape, and so one document."""

    def read(self) -> Arrays:
        """The arrays. What is wrong is in the result."""
        values = self._values(self.folder.path)
        processes = sorted(name for name in self.folder.folders if PROCESS.fullmatch(name))
        whole = not self.found.lost_in
        for name in processes:
            others = self._values(join(self.folder.path, name), apart=True)
            if not whole:
                # What the lost part held is known from the processes' own databases, which are merged into it.
                values = {**others, **values}
        self._add(values)
        return self.found

    def _values(self, path: str, apart: bool = False) -> dict[str, tuple[str, ocdbt.Value]]:
        """Key to the database's folder and the value."""
        manifest = join(path, ocdbt.MANIFEST)
        try:
            entry = self.store.stat(manifest)
            database = ocdbt.read_database(self.store, path)
        except ObjectMissingError:
            self._note(Opened[Any].absent(manifest), apart)
            return {}
        except DamagedError as error:
            self._note(Opened(manifest, FileState.DAMAGED, None, str(error), entry), apart)
            return {}
        except (UnsupportedError, StorageError) as error:
            self._note(Opened(manifest, FileState.UNREADABLE, None, str(error)), apart)
            return {}
        self._note(Opened(manifest, FileState.PRESENT, database, "", entry), apart)
        for fault in database.lost:
            self._note(self._at_fault(join(path, fault.file), str(fault)), apart)
        return {key: (path, value) for key, value in database.values.items()}

    def _note(self, opened: Opened[Any], apart: bool) -> None:
        self.found.files[opened.name] = opened
        if opened.state is not FileState.PRESENT and not apart:
            self.found.lost_in = self.found.lost_in or opened.name

    def _at_fault(self, path: str, detail: str) -> Opened[Any]:
        try:
            return Opened(path, FileState.DAMAGED, None, detail, self.store.stat(path))
        except ObjectMissingError:
            return Opened[Any].absent(path)
        except StorageError as error:
            return Opened(path, FileState.UNREADABLE, None, str(error))

    def _add(self, values: Mapping[str, tuple[str, ocdbt.Value]]) -> None:
        documents = {}
        for key in values:
            name, _, last = key.rpartition("/")
            if last in DOCUMENTS:
                documents[name] = key
        arrays = {name: self._document(name, *values[key]) for name, key in documents.items()}
        chunks: dict[str, dict[Position, Chunk]] = {name: {} for name in arrays}
        strays: dict[str, list[str]] = {}
        for key, (path, value) in values.items():
            if key.rpartition("/")[2] in DOCUMENTS:
                continue
            owner = _owner(key, arrays)
            array = arrays[owner].array if owner is not None else None
            position = array.shards.position(key[len(owner) + 1 :]) if array and owner is not None else None
            if owner is not None and position is not None:
                chunks[owner][position] = self._chunk(path, value)
            elif owner is not None and _CHUNK.fullmatch(key[len(owner) + 1 :]):
                strays.setdefault(owner, []).append(key[len(owner) + 1 :])
        for name, stored in arrays.items():
            self.found.by_name[name] = StoredArray(
                name, stored.document, stored.array, stored.detail, stored.state, chunks[name],
                tuple(sorted(strays.get(name, ()))),
            )  # fmt: skip

    def _chunk(self, path: str, value: ocdbt.Value) -> Chunk:
        file = join(path, value.place.file)
        if file not in self.found.files:
            self.found.files[file] = self._stat(file)
        if value.inline is not None:
            return Chunk(file, 0, len(value.inline), value.inline)
        return Chunk(file, value.place.offset, value.place.num_bytes)

    def _stat(self, file: str) -> Opened[Any]:
        try:
            return Opened(file, FileState.PRESENT, None, "", self.store.stat(file))
        except ObjectMissingError:
            return Opened[Any].absent(file)
        except StorageError as error:
            return Opened(file, FileState.UNREADABLE, None, str(error))

    def _document(self, name: str, path: str, value: ocdbt.Value) -> StoredArray:
        file, last = join(path, value.place.file), zarr_v2.DOCUMENT
        try:
            raw = self._read(file, value)
            if raw not in self.documents:
                last = V3_DOCUMENT if b'"node_type"' in raw else last
                self.documents[raw] = document_of(last, raw)
            return StoredArray(name, file, self.documents[raw])
        except DamagedError as error:
            return StoredArray(name, file, None, f"the document of {name}: {error}", FileState.DAMAGED)
        except StorageError as error:
            return StoredArray(name, file, None, str(error), FileState.UNREADABLE)

    def _read(self, file: str, value: ocdbt.Value) -> bytes:
        if value.inline is not None:
            return value.inline
        if value.place.num_bytes > MAX_DOCUMENT_BYTES:
            raise DamagedError(f"it has {value.place.num_bytes} bytes, at most {MAX_DOCUMENT_BYTES} are read")
        with self.store.open(file) as handle:
            return read_bytes(handle, value.place.offset, value.place.num_bytes)


def _owner(key: str, arrays: Mapping[str, StoredArray]) -> str | None:
    """The array below which a key lies."""
    at = len(key)
    while (at := key.rfind("/", 0, at)) > 0:
        if key[:at] in arrays:
            return key[:at]
    return None


def _beginning(handle: Handle) -> bytes:
    return read_bytes(handle, 0, min(handle.entry.num_bytes, MAX_DOCUMENT_BYTES))


class FileArrays:
    """Reads the arrays of an item in which every array is a folder."""

    def __init__(self, store: Store, folder: Folder) -> None:
        self.store, self.folder = store, folder
        self.found = Arrays()
        self._entered = {""}
        """Identities of folders: a link that leads back is not followed for ever."""

    def read(self) -> Arrays:
        """The arrays. What is wrong is in the result."""
        waiting = [*self._folders(self.folder, "")]
        while waiting:
            entry, name = waiting.pop()
            if entry.identity and entry.identity in self._entered:
                continue
            self._entered.add(entry.identity)
            with suppress(StorageError):
                folder = Folder.read(self.store, entry.name)
                if not self._add(folder, name):
                    waiting += self._folders(folder, name)
        return self.found

    def _folders(self, folder: Folder, above: str) -> Iterator[tuple[Entry, str]]:
        """Folders that are arrays, or may be; keys with a slash in them make folders of folders. The last first."""
        for name, entry in reversed(list(folder.folders.items())):
            if not above and (PROCESS.fullmatch(name) or name in ("array_metadatas", "d")):
                continue
            yield entry, f"{above}/{name}" if above else name

    def _add(self, folder: Folder, name: str) -> bool:
        """Add the array that a folder is, if it is one; a group, whose document tools put above arrays, is none."""
        document = next((last for last in DOCUMENTS if last in folder.files), None)
        if document is None:
            return False
        opened = Opened[ZarrNode].open(
            self.store, folder, document, lambda handle: _node_of(document, _beginning(handle)),
        )  # fmt: skip
        path, array = join(folder.path, document), opened.content
        if array is None:
            self.found.by_name[name] = StoredArray(name, path, None, opened.detail, opened.state)
        if not isinstance(array, ZarrArray):
            return array is None
        try:
            there = chunks_of(self.store, folder, array)
        except DamagedError as error:
            self.found.by_name[name] = StoredArray(name, path, None, str(error), FileState.DAMAGED)
            return True
        chunks = {at: Chunk(entry.name, 0, entry.num_bytes, None, entry) for at, entry in there.items()}
        self.found.files[path] = Opened(path, opened.state, None, opened.detail, opened.entry)
        position = array.shards.position
        strays = tuple(key for key in folder.files if _CHUNK.fullmatch(key) and position(key) is None)
        self.found.by_name[name] = StoredArray(name, path, array, chunks=chunks, strays=strays)
        return True
