"""The one place that writes: exports and ledgers. Every file appears whole under its name, or not at all.

A file is drafted under a temporary name beside its own (``.<name>.partial``), may be read back there, and is renamed
when it is done. Whoever is killed leaves a draft that the next run overwrites. What must be new is drafted without a
name, where the file system can: several processes may create the same file. Symbolic links inside the folder are
refused, so that nothing is written through one to another place.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

from auditor.errors import AuditorError, LockedError, UsageError
from auditor.storage.store import ShortReadError, join


class WriteError(AuditorError, OSError):
    """The target did not take what was written: disk full, permission. The message names the file."""


class Writer(Protocol):
    """What a ledger needs of storage: whole objects, and one kind of write that never takes the place of another.

    Names are below the writer's root. Object stores give both by plain and by conditional puts.
    """

    @property
    def location(self) -> str:
        """What a person would call the root."""

    def write(self, name: str, content: bytes) -> None:
        """Write one object whole; one that is there is replaced.

        Raises:
            WriteError: storage does not take it.
        """

    def create(self, name: str, content: bytes) -> bool:
        """Write one object whole, unless there is one of this name; whether it was written.

        Raises:
            WriteError: storage does not take it.
        """

    def remove(self, name: str) -> None:
        """Remove one object, if it is there.

        Raises:
            WriteError: storage does not do it.
        """

    def locked(self) -> AbstractContextManager[None]:
        """Hold the root for this process alone, where storage has a way to.

        Raises:
            LockedError: another process holds it.
        """


class Draft:
    """A file under its temporary name."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self._path = descriptor, path
        self.num_bytes = 0
        self.done = False

    def append(self, content: memoryview) -> None:
        """Add bytes at the end.

        Raises:
            WriteError: the disk is full, or fails.
        """
        at = 0
        with _explained(self._path):
            while at < len(content):
                at += os.pwrite(self._descriptor, content[at:], self.num_bytes + at)
        self.num_bytes += at

    def pad(self, num_bytes: int) -> None:
        """Zeros up to a length of ``num_bytes``."""
        with _explained(self._path):
            os.ftruncate(self._descriptor, num_bytes)
        self.num_bytes = num_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with what was written from ``offset`` on.

        Raises:
            WriteError: it can't be read back.
        """
        done = 0
        with _explained(self._path):
            while done < len(buffer):
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if not count:
                    raise ShortReadError(f"{self._path}: ends at byte {offset + done} although more was written")
                done += count

    def publish(self) -> None:
        """Give the file its name."""
        with _explained(self._path):
            os.replace(_draft_name(self._path), self._path)
        self.done = True

    def publish_new(self) -> bool:
        """Give the file its name, unless there is one of that name; whether it was given."""
        with _explained(self._path):
            try:
                os.link(_draft_name(self._path), self._path)
            except FileExistsError:
                return False
            except OSError:
                # A file system without hard links: between the look and the renaming another may come first.
                if os.path.lexists(self._path):
                    return False
                self.publish()
                return True
        return True


class FolderWriter:
    """Writes below one folder of the local disk. May be used by several threads."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.location = os.fspath(root)
        self._root = os.path.realpath(self.location)
        self._known: set[str] = set()

    def refuse_sources(self, sources: Sequence[str]) -> None:
        """Make sure that nothing of a checkpoint lies in the folder, nor the folder in a checkpoint.

        Raises:
            UsageError: one lies in the other, perhaps by a symbolic link.
        """
        for source in map(os.path.realpath, sources):
            common = os.path.commonpath([source, self._root])
            if common == source:
                raise UsageError(f"{self.location} lies inside {source}, from which is read; choose another place")
            if common == self._root:
                raise UsageError(f"{source}, from which is read, lies inside {self.location}; choose another place")

    def make(self) -> None:
        """Make the folder, if it isn't there.

        Raises:
            WriteError: it can't be made, or is no folder.
        """
        with _explained(self.location):
            os.makedirs(self._root, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and hold it for this process alone.

        Raises:
            LockedError: another process holds it.
            WriteError: it can't be made, or is no folder.
        """
        self.make()
        with _explained(self.location):
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Storage without locks: two exports at once are then the user's to avoid.
            with suppress(OSError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise LockedError(f"{self.location}: another process of the auditor is writing into it") from None
            yield
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """What the folder holds, drafts left out."""
        with _explained(self.location):
            return sorted(name for name in os.listdir(self._root) if not name.endswith(".partial"))

    def num_bytes(self, name: str) -> int | None:
        """The length of a file, None where there is none."""
        try:
            status = os.lstat(self._path(name))
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def write(self, name: str, content: bytes) -> None:
        """Write one small file whole.

        Raises:
            WriteError: as :meth:`Draft.append`.
        """
        with self.draft(name) as draft:
            draft.append(memoryview(content))
            draft.publish()

    def create(self, name: str, content: bytes) -> bool:
        """Write one small file whole, unless it is there; whether it was written.

        Raises:
            WriteError: as :meth:`Draft.append`.
        """
        if os.path.lexists(self._path(name)):
            # Who was killed between giving the name and clearing up left a draft.
            with suppress(OSError):
                os.unlink(_draft_name(self._path(name)))
            return False
        with _explained(self._path(name)):
            self._make_folder(name.rpartition("/")[0])
        created = _created_nameless(self._path(name), content)
        if created is not None:
            return created
        with self.draft(name) as draft:
            draft.append(memoryview(content))
            return draft.publish_new()

    def remove(self, name: str) -> None:
        """Remove one file, and the folders that it leaves empty.

        Raises:
            WriteError: it can't be removed.
        """
        path = self._path(name)
        with _explained(path), suppress(FileNotFoundError):
            os.unlink(path)
        folder = name.rpartition("/")[0]
        while folder:
            try:
                os.rmdir(self._path(folder))
            except OSError:
                break
            self._known.discard(folder)
            folder = folder.rpartition("/")[0]

    @contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        """A file to be written; it is thrown away unless it was published.

        Raises:
            WriteError: it can't be made.
        """
        path = self._path(name)
        with _explained(path):
            self._make_folder(name.rpartition("/")[0])
            with suppress(FileNotFoundError):
                os.unlink(_draft_name(path))
            descriptor = os.open(_draft_name(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        draft = Draft(descriptor, path)
        try:
            yield draft
        finally:
            os.close(descriptor)
            if not draft.done:
                with suppress(OSError):
                    os.unlink(_draft_name(path))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, folder: str) -> None:
        """Make a folder and those above it, none of which may be a link."""
        if not folder or folder in self._known:
            return
        self._make_folder(folder.rpartition("/")[0])
        path = self._path(folder)
        with suppress(FileExistsError):
            os.mkdir(path)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise WriteError(f"{join(self.location, folder)}: is no folder of its own (a link, or a file)")
        self._known.add(folder)


def _created_nameless(path: str, content: bytes) -> bool | None:
    """Write a file that has no name until it is whole; whether it got its name, None where it has to have a draft.

    The draft of another process that creates the same file at the same time would be this one's: each would take away
    what the other wrote.
    """
    try:
        descriptor = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except (OSError, AttributeError):
        return None
    try:
        if os.write(descriptor, content) != len(content):
            return None
        # Python follows the link only where it is told a folder, which means nothing to a path from the root.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except FileExistsError:
        return False
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return True


def _draft_name(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.partial"


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except AuditorError:
        raise
    except OSError as error:
        raise WriteError(f"{path}: {os.strerror(error.errno) if error.errno else error}") from error
