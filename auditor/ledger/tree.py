"""The tree of a ledger, specified in ``docs/ledger.md``.

    zarr.json                                     group; says that this is a ledger
    runs/<run>/steps/<step>/<identity>-<content>/ one record: a group, with arrays
        account                                   the text of the record, JSON in bytes
        numbers, lanes, extrema, sum_squares      of every piece
        contents                                  which sketch every replica has that was read whole
        history                                   what this save and those before it said of every tensor
        sketches                                  64 numbers a distinct content
        commit                                    name, length and digest of every object; written last

A record's name holds the digest of its commit, and the commit those of all else: who writes the same finds it there,
who writes something else writes elsewhere, and what was broken off is completed by whoever comes next.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError
from auditor.containers.json_document import MAX_JSON_BYTES, parse_json
from auditor.containers.zarr_array import read_node
from auditor.containers.zarr_names import escape, unescape
from auditor.errors import UsageError
from auditor.ledger import arrays
from auditor.ledger.contents import Contents, summed
from auditor.ledger.plain import plain, revived
from auditor.ledger.record import NUM_HISTORY, SCHEMA_VERSION, StepAccount, StepRecord, files_digest
from auditor.model.observation import BUCKETS, OBSERVED
from auditor.storage.store import ObjectMissingError, StorageError, Store, base_name, read_bytes
from auditor.storage.writer import Writer

WRITER = "auditor ledger"
"""What the root's attributes say."""
COMMIT, _TEXT = "commit", "account/c/0"
MAX_COMMIT_BYTES = 1 << 22
MAX_RECORDS = 100_000
"""Of one run; beyond it a ledger is no honest one."""
_RECORD = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})")
_STEP = re.compile(r"\d{1,15}", re.A)
_TABLES = {
    "numbers": ("read", "num_nan", "num_infinite", "num_zero", "bits_used"), "lanes": ("lane0", "lane1"),
    "extrema": ("minimum", "maximum"), "sum_squares": ("sum_squares",),
}  # fmt: skip
"""Arrays of one row a column and one column a piece: few, for each is described in some 300 bytes. ``numbers`` begins
with tensor, replica and number of elements."""
_NUM_PLACES = 3
MAX_PIECES = 1 << 27
"""Of one record: ten gigabytes of memory."""


@dataclass(frozen=True, slots=True, order=True)
class RecordName:
    """Where a record lies."""

    run: str
    step: int
    identity: str
    """Digest of the files' names, sizes and identities."""
    content: str
    """Digest of the record's commit."""

    @property
    def folder(self) -> str:
        """Below the ledger's root."""
        return f"runs/{escape(self.run)}/steps/{self.step}/{self.identity}-{self.content}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger that is read, and written where ``writer`` is there."""

    store: Store
    writer: Writer | None = None

    @property
    def location(self) -> str:
        """What a person would call it."""
        return self.store.location

    def exists(self) -> bool:
        """Whether there is something.

        Raises:
            UsageError: it is no ledger, or one of another version.
        """
        try:
            names = {base_name(entry.name) for entry in self.store.list("")}
        except ObjectMissingError:
            return False
        if not names - {f".{arrays.DOCUMENT}.partial"}:
            return False
        try:
            with self.store.open(arrays.DOCUMENT) as handle:
                said = read_node(handle).attributes.get("auditor")
        except (StorageError, DamagedError):
            said = None
        if not isinstance(said, dict) or said.get("writer") != WRITER:
            raise UsageError(
                f"{self.location} is no ledger: `auditor check RUN --ledger FOLDER` makes one in a new or empty folder"
            )
        if said.get("schema_version") != SCHEMA_VERSION:
            raise UsageError(f"{self.location} is a ledger of version {str(said.get('schema_version'))[:20]}")
        return True

    def runs(self) -> list[str]:
        """The runs of which something is kept."""
        return sorted(unescape(base_name(name)) for name in self._folders("runs"))

    def names(self, run: str, step: int | None = None) -> list[RecordName]:
        """The committed records of one run, or of one step of it, in order of step.

        Raises:
            DamagedError: there are more than any honest ledger has.
        """
        root = f"runs/{escape(run)}/steps"
        steps = [f"{root}/{step}"] if step is not None else self._folders(root)
        found: list[RecordName] = []
        for folder in steps:
            if not _STEP.fullmatch(base_name(folder)):
                continue
            for name in self._folders(folder):
                match = _RECORD.fullmatch(base_name(name))
                if match and self._is_there(f"{name}/{COMMIT}"):
                    found.append(RecordName(run, int(base_name(folder)), match[1], match[2]))
            if len(found) > MAX_RECORDS:
                raise DamagedError(f"{self.location} has more than {MAX_RECORDS} records of {run}")
        return sorted(found)

    def account(self, name: RecordName) -> StepAccount:
        """The text of a record.

        Raises:
            DamagedError: it is not what was committed, or nothing that was ever written.
            StorageError: storage failed.
        """
        return self._account(self._objects(name, lambda part: part == _TEXT))

    def record(self, name: RecordName) -> StepRecord:
        """A whole record.

        Raises:
            DamagedError, StorageError: as :meth:`account`.
        """
        objects = self._objects(name, lambda part: True)
        account = self._account(objects)
        pieces, places = _pieces(objects, account)
        history = arrays.read("history", objects, NUM_HISTORY, len(account.tensors))
        contents = _contents(objects, account, pieces, places)
        return StepRecord(account, pieces, places, contents, history.astype(np.float64))

    def add(self, run: str, record: StepRecord) -> RecordName:
        """Write a record, unless it is there already.

        Raises:
            WriteError: storage does not take it.
        """
        assert self.writer is not None
        objects = dict(_objects_of(record))
        commit = _commit_of(objects)
        name = RecordName(run, record.account.step, files_digest(record.account), _digest(commit))
        self._begin(run, record.account.step)
        if self._is_there(f"{name.folder}/{COMMIT}") and self.damage(name) == "":
            self.writer.create(f"{name.folder}/{COMMIT}", commit)
            return name
        for part, content in objects.items():
            self.writer.write(f"{name.folder}/{part}", content)
        if not self.writer.create(f"{name.folder}/{COMMIT}", commit) and self.damage(name):
            # One is there and none that this record's name was made of: rot, or a stranger's.
            self.writer.write(f"{name.folder}/{COMMIT}", commit)
        return name

    def damage(self, name: RecordName) -> str:
        """What is wrong with a record; empty where it is what was committed."""
        try:
            self._objects(name, lambda part: True)
        except (DamagedError, StorageError) as error:
            return str(error)
        return ""

    def begin(self) -> None:
        """Make the root, where it isn't there.

        Raises:
            UsageError: something else is there.
            WriteError: storage does not take it.
        """
        assert self.writer is not None
        if not self.exists():
            stated = {"auditor": {"schema_version": SCHEMA_VERSION, "writer": WRITER}}
            with self.writer.locked():
                self.writer.create(arrays.DOCUMENT, arrays.group(stated))

    def parts(self, name: RecordName) -> list[str]:
        """The objects of a record as its commit lists them.

        Raises:
            DamagedError, StorageError: as :meth:`account`.
        """
        return sorted(self._listed(name))

    def _begin(self, run: str, step: int) -> None:
        """The groups above a record, where they aren't there."""
        assert self.writer is not None
        stated = {"auditor": {"schema_version": SCHEMA_VERSION, "writer": WRITER}}
        run_folder = f"runs/{escape(run)}"
        for folder, attributes in (
            ("", stated), ("runs/", {}), (f"{run_folder}/", {}), (f"{run_folder}/steps/", {}),
            (f"{run_folder}/steps/{step}/", {}),
        ):  # fmt: skip
            self.writer.create(f"{folder}{arrays.DOCUMENT}", arrays.group(attributes))

    def _folders(self, folder: str) -> list[str]:
        try:
            return [entry.name for entry in self.store.list(folder) if entry.is_folder]
        except ObjectMissingError:
            return []

    def _is_there(self, name: str) -> bool:
        try:
            return not self.store.stat(name).is_folder
        except StorageError:
            return False

    def _objects(self, name: RecordName, wanted: Any) -> dict[str, bytes]:
        """The objects of a record whose name is ``wanted``, each as it was committed."""
        found = {}
        for part, (num_bytes, digest) in self._listed(name).items():
            if wanted(part):
                content = self._read(f"{name.folder}/{part}", num_bytes)
                if len(content) != num_bytes or _digest(content) != digest:
                    raise DamagedError(f"{self.location}/{name.folder}/{part} is not what was committed")
                found[part] = content
        return found

    def _listed(self, name: RecordName) -> dict[str, tuple[int, str]]:
        """Name to length and digest of all objects of a record."""
        commit = self._read(f"{name.folder}/{COMMIT}", MAX_COMMIT_BYTES)
        if _digest(commit) != name.content:
            raise DamagedError(f"{self.location}/{name.folder}/{COMMIT} is not what was written")
        stated = parse_json(commit)
        listed = stated.get("objects") if isinstance(stated, dict) else None
        if not isinstance(listed, dict) or not all(map(_is_entry, listed.items())):
            raise DamagedError(f"{self.location}/{name.folder}/{COMMIT} lists no objects")
        return {part: (num_bytes, digest) for part, (num_bytes, digest) in listed.items()}

    def _read(self, name: str, limit: int) -> bytes:
        try:
            with self.store.open(name) as handle:
                if handle.entry.num_bytes > limit:
                    raise DamagedError(f"{self.location}/{name} is longer than was committed")
                return read_bytes(handle, 0, handle.entry.num_bytes)
        except ObjectMissingError as error:
            raise DamagedError(f"{self.location}/{name} is missing") from error

    def _account(self, objects: Mapping[str, bytes]) -> StepAccount:
        text = arrays.text(_TEXT, objects.get(_TEXT, b""), MAX_JSON_BYTES)
        account: StepAccount = revived(StepAccount, parse_json(text))
        if account.schema_version != SCHEMA_VERSION:
            raise DamagedError(f"it is a record of version {account.schema_version}")
        pieces, contents = account.num_pieces, account.num_contents
        if not 0 <= pieces <= MAX_PIECES or not 0 <= contents <= pieces or (pieces and not account.tensors):
            raise DamagedError(f"a record of {pieces} pieces of {len(account.tensors)} tensors is no honest one")
        return account


def _is_entry(entry: tuple[str, Any]) -> bool:
    """Whether a commit's line names an object inside the record."""
    name, value = entry
    inside = re.fullmatch(r"[a-z0-9_]+(\.json)?(/[a-z0-9_]+(\.json)?){0,4}", name) is not None
    return (
        inside and isinstance(value, list) and len(value) == 2 and type(value[0]) is int
        and 0 <= value[0] <= arrays.MAX_BYTES and isinstance(value[1], str)
    )  # fmt: skip


def _pieces(objects: Mapping[str, bytes], account: StepAccount) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Rows of :data:`~auditor.model.observation.OBSERVED`, and places."""
    count = account.num_pieces
    rows, places = np.zeros(count, OBSERVED), np.zeros((_NUM_PLACES, 0), np.int64)
    for table, columns in _TABLES.items():
        above = _NUM_PLACES * (table == "numbers")
        found = arrays.read(table, objects, above + len(columns), count)
        for at, column in enumerate(columns):
            rows[column] = found[above + at].astype(OBSERVED[column], casting="unsafe")
        places = found[:above].astype(np.int64, casting="unsafe") if above else places
    replicas = np.array([len(what.replicas) for what in account.tensors] or [0])
    tensor, replica, sizes = places
    fits = (tensor >= 0) & (tensor < len(account.tensors)) & (sizes >= 0)
    if not fits.all() or not ((replica >= 0) & (replica < np.maximum(replicas[tensor], 1))).all():
        raise DamagedError("its pieces are of tensors that it does not have")
    return rows, places


def _contents(
    objects: Mapping[str, bytes], account: StepAccount, pieces: NDArray[np.void], places: NDArray[np.int64]
) -> Contents:  # fmt: skip
    found = summed(places, pieces)
    if len(found) != account.num_contents or not 0 <= account.num_sketches <= len(found):
        raise DamagedError("it has other contents than its pieces make")
    sketch = arrays.read("contents", objects, len(found)).astype(np.int64, casting="unsafe")
    sketches = np.asarray(arrays.read("sketches", objects, account.num_sketches, BUCKETS), np.float64)
    if not ((sketch >= -1) & (sketch < len(sketches))).all():
        raise DamagedError("its contents have sketches that it does not have")
    return replace(found, sketch=sketch, sketches=sketches)


def _objects_of(record: StepRecord) -> Iterator[tuple[str, bytes]]:
    account = record.account
    attributes = {"schema_version": SCHEMA_VERSION, "step": account.step, "format": account.format}
    yield arrays.DOCUMENT, arrays.group({"auditor": attributes})
    text = json.dumps(plain(account), separators=(",", ":")).encode()
    yield from arrays.written("account", np.frombuffer(text, np.uint8), len(text))
    yield from pieces_written(record.pieces, record.places)
    yield from arrays.written("contents", record.contents.sketch)
    yield from arrays.written("history", record.history, along=1)
    yield from arrays.written("sketches", record.contents.sketches)


def pieces_written(pieces: NDArray[np.void], places: NDArray[np.int64]) -> Iterator[tuple[str, bytes]]:
    """The objects of what was measured of all pieces."""
    for table, columns in _TABLES.items():
        kept = np.array([pieces[column] for column in columns])
        if table == "numbers":
            # Counts, sizes, positions and bits: none is negative.
            kept = np.concatenate([places.astype(np.uint64), kept.astype(np.uint64)])
        yield from arrays.written(table, kept, along=1)


def _commit_of(objects: Mapping[str, bytes]) -> bytes:
    listed = {name: [len(content), _digest(content)] for name, content in sorted(objects.items())}
    return json.dumps({"schema_version": SCHEMA_VERSION, "objects": listed}, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
