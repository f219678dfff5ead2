"""The tree of a ledger, specified in ``docs/ledger.md``.

    zarr.json                                     group; says that this is a ledger
    runs/<run>/steps/<step>/<identity>-<content>/ one record: a group, with arrays
        account                                   the text of the record, JSON in bytes
        pieces/<column>                           one number a piece
        contents/<column>                         one number a replica that was read whole
        sketches                                  64 numbers a distinct content
        commit                                    name, length and digest of every object; written last

A record's name holds the digest of its commit, and the commit those of all else: who writes the same finds it there,
who writes something else writes elsewhere, and what was broken off is completed by whoever comes next.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError
from auditor.containers.json_document import MAX_JSON_BYTES, parse_json
from auditor.containers.zarr_array import read_node
from auditor.containers.zarr_names import escape, unescape
from auditor.errors import UsageError
from auditor.ledger import arrays
from auditor.ledger.contents import Contents
from auditor.ledger.plain import plain, revived
from auditor.ledger.record import SCHEMA_VERSION, StepAccount, StepRecord, files_digest
from auditor.model.observation import BUCKETS, OBSERVED
from auditor.storage.store import ObjectMissingError, StorageError, Store, base_name, read_bytes
from auditor.storage.writer import Writer

WRITER = "auditor ledger"
"""What the root's attributes say."""
COMMIT = "commit"
MAX_COMMIT_BYTES = 1 << 22
MAX_RECORDS = 100_000
"""Of one run; beyond it a ledger is no honest one."""
_RECORD = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})")
_STEP = re.compile(r"\d{1,15}", re.A)
_COLUMNS = tuple(name for name in OBSERVED.names or ())
_PLACES = ("tensor", "replica", "sketch")
_TOTALS = ("lane0", "lane1", "num_nan", "num_infinite", "num_zero", "minimum", "maximum", "sum_squares")
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
        return self._account(self._objects(name, lambda part: part.startswith("account/")))

    def record(self, name: RecordName) -> StepRecord:
        """A whole record.

        Raises:
            DamagedError, StorageError: as :meth:`account`.
        """
        objects = self._objects(name, lambda part: True)
        account = self._account(objects)
        if not 0 <= account.num_pieces <= MAX_PIECES or not 0 <= account.num_contents <= account.num_pieces:
            raise DamagedError(f"a record of {account.num_pieces} pieces is no honest one")
        pieces = _rows("pieces", objects, account.num_pieces)
        return StepRecord(account, pieces, _contents(objects, account))

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
        raw = objects.get("account/c/0", b"")
        text = arrays.text("account/c/0", raw, MAX_JSON_BYTES)
        account: StepAccount = revived(StepAccount, parse_json(text))
        if account.schema_version != SCHEMA_VERSION:
            raise DamagedError(f"it is a record of version {account.schema_version}")
        return account


def _is_entry(entry: tuple[str, Any]) -> bool:
    """Whether a commit's line names an object inside the record."""
    name, value = entry
    inside = re.fullmatch(r"[a-z0-9_]+(\.json)?(/[a-z0-9_]+(\.json)?){0,4}", name) is not None
    return (
        inside and isinstance(value, list) and len(value) == 2 and type(value[0]) is int
        and 0 <= value[0] <= arrays.MAX_BYTES and isinstance(value[1], str)
    )  # fmt: skip


def _rows(name: str, objects: Mapping[str, bytes], count: int, columns: Sequence[str] = _COLUMNS) -> NDArray[np.void]:
    """Rows of :data:`~auditor.model.observation.OBSERVED`."""
    rows = np.zeros(count, OBSERVED)
    for column in columns:
        rows[column] = arrays.read(f"{name}/{column}", objects, count).astype(OBSERVED[column], casting="unsafe")
    return rows


def _contents(objects: Mapping[str, bytes], account: StepAccount) -> Contents:
    count, num_sketches = account.num_contents, account.num_sketches
    if not 0 <= num_sketches <= count:
        raise DamagedError("it has more sketches than contents")
    tensor, replica, sketch = (
        arrays.read(f"contents/{name}", objects, count).astype(np.int64, casting="unsafe") for name in _PLACES
    )
    sketches = np.asarray(arrays.read("sketches", objects, num_sketches), np.float64)
    replicas = np.array([len(what.replicas) for what in account.tensors] or [0])
    fits = (tensor >= 0) & (tensor < len(account.tensors)) & (sketch >= -1) & (sketch < num_sketches)
    if not fits.all() or not ((replica >= 0) & (replica < np.maximum(replicas[tensor], 1))).all():
        raise DamagedError("its contents are of tensors that it does not have")
    if sketches.shape != (num_sketches, BUCKETS):
        raise DamagedError("its sketches have no 64 numbers each")
    return Contents(tensor, replica, sketch, _rows("contents", objects, count, _TOTALS), sketches)


def _objects_of(record: StepRecord) -> Iterator[tuple[str, bytes]]:
    account = record.account
    attributes = {"schema_version": SCHEMA_VERSION, "step": account.step, "format": account.format}
    yield arrays.DOCUMENT, arrays.group({"auditor": attributes})
    text = json.dumps(plain(account), separators=(",", ":")).encode()
    yield from arrays.written("account", np.frombuffer(text, np.uint8), len(text))
    yield f"pieces/{arrays.DOCUMENT}", arrays.group({})
    for column in _COLUMNS:
        yield from arrays.written(f"pieces/{column}", record.pieces[column])
    yield f"contents/{arrays.DOCUMENT}", arrays.group({})
    for name in _PLACES:
        yield from arrays.written(f"contents/{name}", getattr(record.contents, name))
    for column in _TOTALS:
        yield from arrays.written(f"contents/{column}", record.contents.totals[column])
    yield from arrays.written("sketches", record.contents.sketches)


def _commit_of(objects: Mapping[str, bytes]) -> bytes:
    listed = {name: [len(content), _digest(content)] for name, content in sorted(objects.items())}
    return json.dumps({"schema_version": SCHEMA_VERSION, "objects": listed}, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
