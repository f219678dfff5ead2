"""Objects in S3, Google Cloud Storage and Azure, read through obstore.

What is asked of a service is an absolute range of one version of an object: every request carries the ETag under which
the object was first seen, so that one which is replaced meanwhile is an error (:class:`ObjectChangedError`) and never a
mixture. Requests are tried again by obstore with growing, jittered waits; what still fails is final.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions

from auditor.storage.object_clients import Place, client_of
from auditor.storage.object_errors import explained
from auditor.storage.small_ranges import SmallRanges
from auditor.storage.store import (
    Entry,
    ObjectMissingError,
    ShortReadError,
    TransientReadError,
    join,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

START_BYTES = 16 << 10
"""How much an opening brings along, and how much a small read at an object's beginning or end does: headers are read in
many small parts, and each would cost a round trip."""
SMALL_BYTES = 1 << 10
"""How much a small read elsewhere brings along."""
_TIME = re.compile(r"\d+\.0")
NUM_READERS = 32
"""Requests under way that keep a service busy which takes 20 ms to answer."""
NEAR_SECONDS = 0.005
"""A service that has answered faster is near: two requests a processor keep it busy, and more of them only take the
processors' time from each other. On two processors 32 cost a fifth more than four."""
MAX_KNOWN = 50_000
"""Objects whose version is remembered from their listing, so that opening them costs no request."""


class ObjectStore:
    """The objects under one prefix of a bucket. ``/`` in their keys makes folders."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.fastest_seconds = math.inf
        """Of all requests so far."""
        self._client = client_of(place)
        self._known: dict[str, Entry] = {}
        self.small = SmallRanges()
        self._bucket_seen = False

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[Place]]:
        # Credentials aren't shipped: every process takes them from its own surroundings.
        return ObjectStore, (self.place,)

    @property
    def location(self) -> str:
        """The URL, without anything that could be a secret."""
        return self.place.url

    @property
    def above(self) -> tuple[ObjectStore, str] | None:
        """The prefix in which the root lies, and the root's name there; None for a whole bucket."""
        prefix, _, name = self.place.prefix.rpartition("/")
        return (ObjectStore(replace(self.place, prefix=prefix)), name) if name else None

    @property
    def num_readers(self) -> int:
        """How many requests at once keep the service busy, by how fast it has answered so far."""
        near = self.fastest_seconds < NEAR_SECONDS
        return min(NUM_READERS, max(4, 2 * (os.cpu_count() or 1))) if near else NUM_READERS

    def key(self, name: str) -> str:
        """The whole key of a name."""
        return join(self.place.prefix, name) if name else self.place.prefix

    def ask(self, name: str, action: Callable[[], T], *, buffered: bool = False) -> T:
        """What one request returns. ``buffered``: it may have been answered before, so its time tells nothing.

        Raises:
            StorageError: what the service says. ObjectMissingError only if the bucket itself is there.
        """
        begun = time.perf_counter()
        try:
            found = action()
        except (exceptions.BaseError, OSError, ValueError) as error:
            # It is not chained: its text shows requests, and addresses with signatures in them.
            failure = explained(error, name or self.location)
        else:
            if not buffered:
                self.fastest_seconds = min(self.fastest_seconds, time.perf_counter() - begun)
            return found
        if isinstance(failure, ObjectMissingError):
            self.see_bucket()
        raise failure

    def see_bucket(self) -> None:
        """Make sure that the bucket is there and may be listed: only then is an object that isn't found missing.

        Raises:
            StorageError: it isn't, or may not.
        """
        if not self._bucket_seen:
            self.ask("", lambda: next(iter(obstore.list(self._client, self.place.prefix or None, chunk_size=1)), None))
            self._bucket_seen = True

    def list(self, folder: str) -> Iterator[Entry]:
        """The entries directly in ``folder``."""
        prefix = self.key(folder)
        found = self.ask(folder, lambda: obstore.list_with_delimiter(self._client, prefix or None))
        self._bucket_seen = True
        folders = [self._name(key) for key in found["common_prefixes"]]
        # An object of the folder's own name, with a slash, is how consoles make empty folders.
        files = [self._remembered(meta) for meta in found["objects"] if meta["path"] != prefix]
        if not folders and not files and not found["objects"]:
            raise ObjectMissingError(f"{folder or self.location}: no such folder")
        yield from (Entry(name, is_folder=True) for name in folders)
        yield from files

    def walk(self, after: str = "") -> Iterator[Entry]:
        """Every object, in the order of keys, in constant memory; ``after``: only those that come after this name."""
        offset = self.key(after) if after else None
        stream = iter(obstore.list(self._client, self.place.prefix or None, offset=offset))
        while (batch := self.ask("", lambda: next(stream, None), buffered=True)) is not None:
            self._bucket_seen = True
            yield from (self._entry(meta) for meta in batch)

    def stat(self, name: str) -> Entry:
        """Size and version of one object as they are now, or a folder."""
        key = self.key(name)
        if key:
            try:
                meta = self.ask(name, lambda: obstore.head(self._client, key))
            except ObjectMissingError:
                pass
            else:
                return self._entry(meta, name)
        page = self.ask(name, lambda: next(iter(obstore.list(self._client, key or None, chunk_size=1)), None))
        self._bucket_seen = True
        if not page:
            raise ObjectMissingError(f"{name or self.location}: no such object")
        return Entry(name, is_folder=True)

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectHandle]:
        """Open an object; of one that was listed and is large nothing is asked yet."""
        known = self._known.get(name)
        # A small one may have been written anew since it was listed, as pointers are: it is read as it is now.
        if known and (known.num_bytes > START_BYTES or self.small.find(name, known.identity, 0, known.num_bytes)):
            yield ObjectHandle(self, known)
        else:
            yield self._opened(name)

    def _opened(self, name: str) -> ObjectHandle:
        """The object as it is now, with its first bytes."""
        key = self.key(name)
        try:
            found = self.ask(name, lambda: obstore.get(self._client, key, options={"range": (0, START_BYTES)}))
            start = self.ask(name, lambda: bytes(found.bytes()), buffered=True)
        except ShortReadError:  # the answer for an object without bytes
            return ObjectHandle(self, self._remembered(self.ask(name, lambda: obstore.head(self._client, key)), name))
        entry = self._remembered(found.meta, name)
        if len(start) != min(entry.num_bytes, START_BYTES):
            raise TransientReadError(f"{name}: {len(start)} bytes came, {START_BYTES} of {entry.num_bytes} wanted")
        self.small.add(name, entry.identity, 0, start)
        return ObjectHandle(self, entry)

    def fetch(self, entry: Entry, offset: int, num_bytes: int) -> memoryview:
        """One range of one version of an object.

        Raises:
            ObjectChangedError: there is another version.
            TransientReadError: something else came than was asked for.
            StorageError: as the service says.
        """
        options: Any = {"range": (offset, offset + num_bytes)}
        if tag := _tag(entry.identity):
            options["if_match"] = tag
        key = self.key(entry.name)

        def get() -> tuple[Any, memoryview]:
            found = obstore.get(self._client, key, options=options)
            return found, memoryview(found.bytes())

        found, content = self.ask(entry.name, get)
        if len(content) != num_bytes or found.range != (offset, offset + num_bytes):
            raise TransientReadError(f"{entry.name}: {len(content)} bytes came where {num_bytes} were wanted")
        return content

    def _name(self, key: str) -> str:
        return key[len(self.place.prefix) :].lstrip("/")

    def _entry(self, meta: ObjectMeta, name: str | None = None) -> Entry:
        # A listing tells the time to a fraction of a second that the object itself does not.
        modified = float(int(meta["last_modified"].timestamp()))
        # Listings of some services leave out the quotes that an ETag has elsewhere.
        identity = f"{meta['size']}-{(meta['e_tag'] or str(modified)).strip(chr(34))}"
        return Entry(self._name(meta["path"]) if name is None else name, False, meta["size"], identity, modified)

    def _remembered(self, meta: ObjectMeta, name: str | None = None) -> Entry:
        entry = self._entry(meta, name)
        if len(self._known) >= MAX_KNOWN:
            self._known = {}
        self._known[entry.name] = entry
        return entry


def _tag(identity: str) -> str:
    """The strong ETag in an identity, by which a version can be asked for; empty where there is none."""
    tag = identity.partition("-")[2]
    # Weak ones never match, and a time of change is none.
    return "" if tag.startswith("W/") or _TIME.fullmatch(tag) else f'"{tag}"'


@dataclass(slots=True)
class ObjectHandle:
    """One version of an object."""

    store: ObjectStore
    entry: Entry

    @property
    def one_version(self) -> bool:
        """Whether every range is asked for by its version."""
        return bool(_tag(self.entry.identity))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``; a small read brings along what lies around it."""
        wanted, entry = len(buffer), self.entry
        if offset + wanted > entry.num_bytes:
            raise ShortReadError(f"{entry.name}: ends at byte {entry.num_bytes}, {offset + wanted} wanted")
        if not wanted:
            return
        if wanted > START_BYTES:
            buffer[:] = self.store.fetch(entry, offset, wanted)
            return
        found = self.store.small.find(entry.name, entry.identity, offset, offset + wanted)
        if found is None:
            start, stop = _around(offset, offset + wanted, entry.num_bytes)
            content = self.store.fetch(entry, start, stop - start)
            self.store.small.add(entry.name, entry.identity, start, content)
            found = content[offset - start : offset - start + wanted]
        buffer[:] = found


def _around(start: int, stop: int, size: int) -> tuple[int, int]:
    """What is asked for instead of ``[start, stop)`` of an object of ``size`` bytes."""
    if stop <= START_BYTES:
        return 0, min(size, START_BYTES)
    if start >= size - START_BYTES:
        return size - START_BYTES, size
    return start, min(size, max(stop, start + SMALL_BYTES))
