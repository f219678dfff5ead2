"""The protocol through which everything is read. Nothing in it can write.

Names are relative to the store's root and use ``/``; the root itself is ``""``. All methods may be called from
several threads at once.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from auditor.errors import AuditorError


class StorageError(AuditorError, OSError):
    """Storage did not do what was asked. Says nothing about the checkpoint."""


class ObjectMissingError(StorageError, FileNotFoundError):
    """There is no such object."""


class AccessDeniedError(StorageError, PermissionError):
    """Storage refuses the object to us."""


class ShortReadError(StorageError, EOFError):
    """The object ends before the range that was asked for."""


class ObjectChangedError(StorageError):
    """Another version of the object is there than the one that was opened."""


class UndecodableError(StorageError):
    """The object is there, but what is stored in the range that was asked for can't be decoded: it is damaged."""


class TransientReadError(StorageError):
    """Storage failed in a way that may pass; worth another try."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder."""

    name: str
    """Full name below the root."""
    is_folder: bool
    num_bytes: int = 0
    identity: str = ""
    """Changes whenever the content may have changed."""
    modified: float = 0.0
    """Seconds since the epoch, UTC."""
    link_name: str = ""
    """Of a symbolic link that was opened: last part of what it leads to. Caches name their files by digest there."""


class Handle(Protocol):
    """An object opened for reading."""

    @property
    def entry(self) -> Entry:
        """Size and identity as of the opening."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Raises:
            ShortReadError: the object ends inside the range.
            StorageError: anything else that storage says.
        """


def reads_one_version(handle: Handle | StorageError | None) -> bool:
    """Whether storage itself refuses ranges of any other version than the opened one."""
    return bool(getattr(handle, "one_version", False))


@dataclass(frozen=True, slots=True)
class WrappedHandle:
    """An open object whose ranges are read in another way: again, slower, through faults."""

    inner: Handle
    read: Callable[[Handle, int, memoryview], None]
    descriptor: int | None = None
    """As :func:`descriptor_of` the inner one, where what the other way adds may be left out."""

    @property
    def entry(self) -> Entry:
        """As the wrapped handle."""
        return self.inner.entry

    @property
    def one_version(self) -> bool:
        """As the wrapped handle."""
        return reads_one_version(self.inner)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``; errors as the wrapped handle's, and what the other way adds."""
        self.read(self.inner, offset, buffer)


class Store(Protocol):
    """A tree of objects that can be listed and read."""

    @property
    def location(self) -> str:
        """What a person would call the root."""

    def list(self, folder: str) -> Iterator[Entry]:
        """The entries directly in ``folder``, in any order.

        Raises:
            ObjectMissingError: there is no such folder.
        """

    def stat(self, name: str) -> Entry:
        """The entry of one object or folder.

        Raises:
            ObjectMissingError: there is no such object.
        """

    def open(self, name: str) -> AbstractContextManager[Handle]:
        """Open an object for reading ranges of it."""


def descriptor_of(handle: Handle) -> int | None:
    """The file descriptor from which bulk may be read past ``read_into``, by whoever goes back to it when that fails.

    None where reading has another source than a local file, or is slowed down or disturbed on purpose.
    """
    found = getattr(handle, "descriptor", None)
    return found if isinstance(found, int) else None


def num_readers(store: Store) -> int:
    """How many reads at once it takes to keep the store busy; 0 where it does not say, and processors are the limit."""
    roots = getattr(store, "roots", ()) or (getattr(store, "inner", None),)
    return max(getattr(store, "num_readers", 0), *(num_readers(root) for root in roots if root is not None), 0)


def join(folder: str, name: str) -> str:
    """``name`` in ``folder``, both relative to the root. A file that is a step by itself has no name in its step."""
    return f"{folder}/{name}" if folder and name else folder or name


def base_name(name: str) -> str:
    """The last part of a name."""
    return posixpath.basename(name)


def changed_since(store: Store, name: str, known: Entry | None) -> bool:
    """Whether an object is another one now, or gone. False where storage does not say."""
    if known is None:
        return False
    try:
        return store.stat(name).identity != known.identity
    except ObjectMissingError:
        return True
    except StorageError:
        return False


def grown_since(store: Store, name: str, known: Entry | None) -> bool:
    """Whether an object has become longer, as one does that is being written. False where storage does not say."""
    try:
        return known is not None and store.stat(name).num_bytes > known.num_bytes
    except StorageError:
        return False


def read_bytes(handle: Handle, offset: int, num_bytes: int) -> bytes:
    """A small range as bytes: headers, metadata. Weights go into reused buffers instead."""
    buffer = bytearray(num_bytes)
    handle.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def read_text(store: Store, name: str, limit: int = 4096) -> str:
    """A small text object, at most ``limit`` bytes of it, undecodable bytes replaced."""
    with store.open(name) as handle:
        raw = read_bytes(handle, 0, min(handle.entry.num_bytes, limit))
    return raw.decode("utf-8", "replace")
