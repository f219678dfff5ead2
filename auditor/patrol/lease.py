"""A lock that needs nothing of storage but a listing and a write that never takes another's place.

Locks are numbered objects in one folder. Whoever wants it looks at the highest: while that has not expired, its owner
holds the lock. Else the next number is created; of several who try, storage lets one. Who created it looks once more,
so that one who slept between look and write gives way. The owner writes its own object again while it works; where it
finds a higher number it has lost the lock, and stops. Clocks must differ by much less than a lock is held.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from auditor.errors import LockedError
from auditor.storage.store import ObjectMissingError, Store, base_name, read_text
from auditor.storage.writer import WriteError, Writer

HELD_SECONDS = 300.0
"""For how long a lock counts after its owner wrote it last."""


def owner_name() -> str:
    """Who this process is, for the message that another one prints."""
    return f"{socket.gethostname()} pid {multiprocessing.current_process().pid} {secrets.token_hex(4)}"


@dataclass(slots=True)
class Lease:
    """One lock, in a folder of its own."""

    store: Store
    writer: Writer
    folder: str
    held_seconds: float = HELD_SECONDS
    owner: str = field(default_factory=owner_name)
    now: Callable[[], float] = time.time
    number: int = -1
    lost: threading.Event = field(default_factory=threading.Event)
    """Set when another process has taken the lock over."""

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            LockedError: another process holds it, or was faster.
            WriteError, StorageError: storage fails.
        """
        numbers = self.numbers()
        self.refuse_live(numbers[-1:])
        number = numbers[-1] + 1 if numbers else 0
        if not self.writer.create(self.name(number), self.content()):
            raise LockedError(f"{self.store.location}: another patrol took the lock at the same time")
        self.number = number
        later = [other for other in self.numbers() if other > number]
        if later:
            self.release()
            self.refuse_live(later)
            raise LockedError(f"{self.store.location}: another patrol took the lock at the same time")
        for other in numbers:
            self.writer.remove(self.name(other))

    def refuse_live(self, numbers: list[int]) -> None:
        """Raise LockedError where one of these locks has not expired."""
        for number in numbers:
            owner, until = self.read(number)
            if until > self.now():
                when = datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                raise LockedError(f"{self.store.location}: {owner or 'another patrol'} holds the lock until {when}")

    def read(self, number: int) -> tuple[str, float]:
        """Owner of a lock and when it expires; a lock that can't be understood counts for as long as any."""
        try:
            said = json.loads(read_text(self.store, self.name(number)))
            return str(said["owner"])[:200], min(float(said["expires"]), self.now() + 10 * self.held_seconds)
        except ObjectMissingError:
            return "", 0.0
        except (ValueError, TypeError, KeyError):
            return "", self.store.stat(self.name(number)).modified + self.held_seconds

    def renew(self) -> None:
        """Hold the lock for longer, or notice that it is lost."""
        if [number for number in self.numbers() if number > self.number]:
            self.lost.set()
        else:
            self.writer.write(self.name(self.number), self.content())

    def check(self) -> None:
        """Raise LockedError where the lock is lost."""
        if self.lost.is_set():
            raise LockedError(f"{self.store.location}: another patrol took the lock over")

    def release(self) -> None:
        """Give the lock back."""
        self.writer.remove(self.name(self.number))

    @contextmanager
    def held(self) -> Iterator[Lease]:
        """Hold the lock, renewed by a thread of its own."""
        self.acquire()
        done = threading.Event()
        thread = threading.Thread(target=self._keep, args=(done,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join(self.held_seconds)
            with suppress(WriteError):
                self.release()

    def _keep(self, done: threading.Event) -> None:
        while not done.wait(self.held_seconds / 4) and not self.lost.is_set():
            # Tried again at the next turn; a lock that was not renewed expires.
            with suppress(OSError):
                self.renew()

    def numbers(self) -> list[int]:
        """The numbers of all locks, in order."""
        try:
            names = [base_name(entry.name) for entry in self.store.list(self.folder) if not entry.is_folder]
        except ObjectMissingError:
            return []
        return sorted(int(name) for name in names if name.isdecimal() and name.isascii())

    def name(self, number: int) -> str:
        """The object of one lock."""
        return f"{self.folder}/{number:09d}"

    def content(self) -> bytes:
        """What the owner writes."""
        return json.dumps({"owner": self.owner, "expires": self.now() + self.held_seconds}).encode()
