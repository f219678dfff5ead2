"""Files on disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from auditor.storage.store import (
    AccessDeniedError,
    Entry,
    ObjectMissingError,
    ShortReadError,
    StorageError,
    TransientReadError,
    join,
)

_TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})


BULK_BYTES = 128 << 10
"""Files so large hold weights, which are read from front to back and never again."""


class LocalStore:
    """A folder on disk. Symbolic links are followed, as the operating system does."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fspath(root)

    @property
    def location(self) -> str:
        """The folder as the user gave it."""
        return self._root

    @property
    def above(self) -> tuple[LocalStore, str] | None:
        """The folder in which the root lies, links resolved, and the root's name there."""
        folder, name = os.path.split(os.path.realpath(self._root))
        return (LocalStore(folder), name) if name else None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def list(self, folder: str) -> Iterator[Entry]:
        """The entries directly in ``folder``; a link that leads nowhere is an entry without identity."""
        try:
            with os.scandir(self._path(folder)) as found:
                names = [item.name for item in found]
        except (OSError, ValueError) as error:
            raise _explained(error, folder or self._root) from error
        for name in names:
            try:
                yield self.stat(join(folder, name))
            except ObjectMissingError:
                yield Entry(join(folder, name), is_folder=False)
            except StorageError:
                yield Entry(join(folder, name), is_folder=False, identity="unreadable")

    def stat(self, name: str) -> Entry:
        """Size, identity and time of one file or folder."""
        try:
            return _entry(name, os.stat(self._path(name)))
        except (OSError, ValueError) as error:
            raise _explained(error, name or self._root) from error

    @contextmanager
    def open(self, name: str) -> Iterator[LocalHandle]:
        """Open a regular file."""
        # Without O_NONBLOCK the opening of a named pipe would wait for a writer for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path(name), flags)
        except (OSError, ValueError) as error:
            raise _explained(error, name) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"{name}: not a regular file")
            if status.st_size >= BULK_BYTES:
                # Here, as the compiled kernels take the descriptor and read by themselves.
                _advise(descriptor)
            yield LocalHandle(descriptor, replace(_entry(name, status), link_name=_link_name(self._path(name))))
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """An open file."""

    descriptor: int
    entry: Entry

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on; several reads where the kernel gives less than asked."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise _explained(error, self.entry.name) from error
            if count == 0:
                have, want = offset + done, offset + len(buffer)
                raise ShortReadError(f"{self.entry.name}: ends at byte {have}, {want} wanted")
            done += count


def _advise(descriptor: int) -> None:
    """Tell the kernel that these pages needn't push others (a training job's data) out of memory."""
    advice = getattr(os, "POSIX_FADV_NOREUSE", None)
    if advice is not None:
        # Advice only: a file system that doesn't take it still reads.
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, advice)


def _entry(name: str, status: os.stat_result) -> Entry:
    identity = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
    return Entry(name, stat.S_ISDIR(status.st_mode), status.st_size, identity, status.st_mtime)


def _link_name(path: str) -> str:
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _explained(error: Exception, name: str) -> StorageError:
    code = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(code) if code else str(error)
    if code in _MISSING:
        return ObjectMissingError(f"{name}: {reason}")
    if code in (errno.EACCES, errno.EPERM):
        return AccessDeniedError(f"{name}: {reason}")
    if code in _TRANSIENT:
        return TransientReadError(f"{name}: {reason}")
    return StorageError(f"{name}: {reason}")
