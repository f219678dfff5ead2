"""One tensor of an export: its replicas written chunk by chunk, read back, and held against the source by digest."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from auditor.containers.damage import DamagedError
from auditor.containers.json_document import MAX_JSON_BYTES, parse_json
from auditor.errors import AuditorError
from auditor.model.catalog import Catalog, Tensor, c_strides
from auditor.model.dtype import Kind
from auditor.model.region import Box, SweepTooLarge, coverage
from auditor.observe.digest import Lanes, add, digest_array, displayed
from auditor.storage.local import LocalStore
from auditor.storage.store import StorageError, read_bytes
from auditor.storage.writer import FolderWriter
from auditor.view.assemble import SourceLostError
from auditor.view.nodes import Array
from auditor.view.tree import StepTree, place_name

BUFFER_BYTES = 1 << 20
MAX_LISTED = 100
"""Lost chunks that an array's attributes list one by one."""
_FOUND_OUT = ("digest", "source_identity", "lost", "num_chunks_lost", "replicas_agree")
"""Attributes that don't tell which array it is."""

_local = threading.local()


class NotVerifiedError(AuditorError):
    """What was written is not what was read. The message names the tensor."""


class OccupiedError(AuditorError):
    """The target holds something else under the name of what is to be written."""


class Readable(Protocol):
    """What gives back what was written."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes from ``offset`` on."""


class Target:
    """The store that is written, as it is by now."""

    def __init__(self, writer: FolderWriter) -> None:
        self.writer, self.store = writer, LocalStore(writer.location)

    def raw_document(self, path: str) -> bytes:
        """A node's ``zarr.json``; empty where there is none."""
        try:
            with self.store.open(f"{path}/zarr.json".lstrip("/")) as handle:
                return read_bytes(handle, 0, min(handle.entry.num_bytes, MAX_JSON_BYTES))
        except StorageError:
            return b""

    def document(self, path: str) -> dict[str, Any]:
        """A node's ``zarr.json`` as a dictionary; empty where there is none, or it is not whole."""
        try:
            found = parse_json(self.raw_document(path) or b"{}")
        except DamagedError:
            return {}
        return found if isinstance(found, dict) else {}

    def write_document(self, path: str, document: bytes) -> None:
        """Write a node's ``zarr.json`` unless it is there.

        Raises:
            WriteError: the target does not take it.
        """
        if self.raw_document(path) != document:
            self.writer.write(f"{path}/zarr.json".lstrip("/"), document)


def said(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a node's document says under ``auditor``."""
    attributes = document.get("attributes")
    found = attributes.get("auditor") if isinstance(attributes, dict) else None
    return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class Written:
    """What became of an export, or of a part of it."""

    num_arrays: int = 0
    num_kept: int = 0
    """Of those, arrays that were there already, whole."""
    num_bytes: int = 0
    """Of the chunks that were written."""
    lost: Counter[str] = field(default_factory=Counter)
    """What was said of a source to the number of chunks that were not written because of it."""
    changed: tuple[str, ...] = ()
    """Source files that changed while they were read."""

    def add(self, other: Written) -> None:
        """Add what became of another part."""
        self.num_arrays += other.num_arrays
        self.num_kept += other.num_kept
        self.num_bytes += other.num_bytes
        self.lost.update(other.lost)
        self.changed += other.changed


class _Tally:
    """Digest of what is read of the source, before it is put in its place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.strides = tensor, c_strides(tensor.shape)
        self.lanes: Lanes = (0, 0)

    def __call__(self, start: tuple[int, ...], bits: NDArray[Any]) -> None:
        base = sum(a * s for a, s in zip(start, self.strides, strict=True))
        self.lanes = add(self.lanes, digest_array(_carried(bits, self.tensor), self.tensor.dtype, base, self.strides))


def _carried(bits: NDArray[Any], tensor: Tensor) -> NDArray[np.unsignedinteger]:
    carrier = np.dtype(tensor.dtype.carrier)
    if tensor.dtype.kind is Kind.COMPLEX:
        return np.ascontiguousarray(bits).reshape(-1).view(carrier).reshape(*bits.shape, 2)
    return bits.view(carrier)


def digest_of(content: Readable, tensor: Tensor, box: Box) -> Lanes:
    """Digest of a chunk as it was written; ``box`` is whole along every dim but the first, so it is one run."""
    if not hasattr(_local, "buffer"):
        _local.buffer = bytearray(BUFFER_BYTES)
    buffer: bytearray = _local.buffer
    width, lanes = tensor.dtype.stored_bits // 8, (0, 0)
    base = sum(a * s for a, s in zip(box.start, c_strides(tensor.shape), strict=True))
    for low in range(0, box.num_elements, len(buffer) // width):
        count = min(len(buffer) // width, box.num_elements - low)
        content.read_into(low * width, memoryview(buffer)[: count * width])
        bits = np.frombuffer(buffer, f"V{width}", count)
        lanes = add(lanes, digest_array(_carried(bits, tensor), tensor.dtype, base + low, (1,)))
    return lanes


@dataclass(slots=True)
class _Replica:
    """One array of the target."""

    path: str
    number: int
    """Of the replica."""
    lanes: Lanes = (0, 0)
    digest: str = ""
    kept: bool = False
    lost: dict[str, str] = field(default_factory=dict)
    """Key of every chunk that was not written, with the reason."""


class TensorExport:
    """Writes one tensor of a step. ``finished``: its step was whole before, so that no chunk of it may change."""

    def __init__(self, tree: StepTree, target: Target, path: str, number: int, node: str, *, finished: bool) -> None:
        self.tree, self.target, self.finished = tree, target, finished
        self.catalog: Catalog = tree.catalog
        self.number, self.what = number, tree.catalog.tensors[number]
        self.written = Written()
        # The lowest coordinate's replica is the one under `tensors/`; no byte is written twice.
        folders = ["tensors", *(f"replicas/{place_name(place)}" for place in self.catalog.replicas[number][1:])]
        self.replicas = [
            _Replica(f"{path}/{folder}/{self.what.role.value}/{node}", at) for at, folder in enumerate(folders)
        ]

    def run(self) -> Written:
        """Write all replicas, then their documents.

        Raises:
            WriteError, NotVerifiedError, OccupiedError: as they say; the tensor is named.
        """
        for replica in self.replicas:
            self._write_chunks(replica)
        whole = not any(replica.lost for replica in self.replicas)
        agree = len({replica.digest for replica in self.replicas}) == 1 if whole else None
        for replica in self.replicas:
            self.written.num_arrays += 1
            self.written.num_kept += replica.kept
            self.written.lost.update(replica.lost.values())
            more = self._found_out(replica)
            if replica.number == 0 and len(self.replicas) > 1:
                more["replicas_agree"] = agree
            document = self.tree.array(self.number, replica.number, partial(dict, more)).document()
            self.target.write_document(replica.path, document)
        return self.written

    def _found_out(self, replica: _Replica) -> dict[str, Any]:
        more: dict[str, Any] = {"source_identity": self._source_identity(replica.number)}
        if replica.digest:
            more["digest"] = replica.digest
        if self.what.dtype.packed:
            more["unexported"] = "its elements share bytes"
        elif replica.lost:
            listed = list(replica.lost.items())[:MAX_LISTED]
            more |= {"lost": dict(listed), "num_chunks_lost": len(replica.lost)}
        return more

    def _source_identity(self, replica: int) -> str:
        """Changes when a source file has; says nothing else."""
        files = set(self.catalog.pieces.file[self.catalog.rows_of(self.number, replica)].tolist())
        names = sorted((self.catalog.files[n].name, self.catalog.files[n].identity) for n in files)
        return blake2b(repr(names).encode("utf-8", "replace"), digest_size=8).hexdigest()

    def _write_chunks(self, replica: _Replica) -> None:
        tally = _Tally(self.what)
        array = self.tree.array(self.number, replica.number, seen=tally)
        before = self.target.document(replica.path)
        if before and self._is_whole(array, before, replica):
            replica.kept, replica.digest = True, said(before)["digest"]
            return
        reason = self._not_exportable(replica.number)
        for key, box in array.boxes():
            tally.lanes = (0, 0)
            try:
                if reason:
                    raise SourceLostError(reason)
                self._write_chunk(array, f"{replica.path}/{key}", box, tally)
                replica.lanes = add(replica.lanes, tally.lanes)
            except SourceLostError as error:
                replica.lost[key] = str(error)
        if not replica.lost:
            replica.digest = displayed(replica.lanes, self.what.dtype, self.what.shape)

    def _is_whole(self, array: Array, before: dict[str, Any], replica: _Replica) -> bool:
        """Whether the array is in the target already, of the same source."""
        wanted = parse_json(array.document())
        for key in ("node_type", "shape", "data_type", "chunk_grid", "codecs"):
            if before.get(key) != wanted[key]:
                raise OccupiedError(f"{self.target.store.location}/{replica.path}: another array is there ({key})")
        there, due = said(before), said(wanted)
        same = all(there.get(key) == value for key, value in due.items() if key not in _FOUND_OUT)
        same = same and there.get("source_identity") == self._source_identity(replica.number)
        return same and isinstance(there.get("digest"), str) and all(
            self.target.writer.num_bytes(f"{replica.path}/{key}") == array.chunk_bytes for key in array.chunk_keys()
        )  # fmt: skip

    def _not_exportable(self, replica: int) -> str:
        """Why the source does not say what the replica is; empty where it does. Gaps show chunk by chunk."""
        rows = self.catalog.rows_of(self.number, replica).tolist()
        called = f"{self.what.name} ({self.what.role.value})"
        if self.what.dtype.packed:
            return f"{called}: elements that share bytes are not exported yet"
        try:
            found = coverage([self.catalog.pieces.region(row) for row in rows], self.what.shape)
        except SweepTooLarge:
            return f"{called}: its pieces are cut too irregularly"
        if not found.num_elements_overlapping and not found.out_of_bounds:
            return ""
        files = ", ".join(sorted({self.catalog.file_of(row).name for row in rows})[:8])
        return f"{called}: its pieces in {files} overlap or leave it, so it is not known what it is"

    def _write_chunk(self, array: Array, path: str, box: Box, tally: _Tally) -> None:
        """Write one chunk, unless it is there with these values.

        Raises:
            SourceLostError: the source can't be read.
        """
        values = array.read(box)
        if self.target.writer.num_bytes(path) == array.chunk_bytes:
            with self.target.store.open(path) as handle:
                if digest_of(handle, self.what, box) == tally.lanes:
                    return
            if self.finished:
                raise OccupiedError(
                    f"{self.target.store.location}/{path}: {self._called()} was exported with other values than the "
                    "source has now; remove the step from the target to export it anew"
                )
        with self.target.writer.draft(path) as draft:
            draft.append(values.reshape(-1).view(np.uint8).data)
            draft.pad(array.chunk_bytes)
            found = digest_of(draft, self.what, box)
            if found != tally.lanes:
                one, other = (displayed(lanes, self.what.dtype, box.shape) for lanes in (found, tally.lanes))
                raise NotVerifiedError(
                    f"{self.target.store.location}/{path}: what was written of {self._called()} has digest {one}, what "
                    f"was read {other}"
                )
            draft.publish()
        self.written.num_bytes += array.chunk_bytes

    def _called(self) -> str:
        return f"{self.what.name} ({self.what.role.value})"
