"""Objects that the auditor itself writes: its ledger, what a patrol remembers, and its locks. Never a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import obstore
from obstore import exceptions

from auditor.storage.object_clients import Place, client_of
from auditor.storage.object_errors import explained
from auditor.storage.store import ObjectMissingError, StorageError, join
from auditor.storage.writer import WriteError

T = TypeVar("T")


class ObjectWriter:
    """Writes below one prefix of a bucket; a :class:`~auditor.storage.writer.Writer`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._client = client_of(place)

    @property
    def location(self) -> str:
        """The URL."""
        return self.place.url

    def write(self, name: str, content: bytes) -> None:
        """Write one object whole; one that is there is replaced."""
        self._ask(name, lambda: obstore.put(self._client, self._key(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Write one object whole, unless there is one of this name; whether it was written."""
        try:
            self._ask(name, lambda: obstore.put(self._client, self._key(name), content, mode="create"))
        except FileExistsError:
            # Perhaps by us: an answer that got lost is asked for again.
            return self._ask(name, lambda: bytes(obstore.get(self._client, self._key(name)).bytes())) == content
        return True

    def remove(self, name: str) -> None:
        """Remove one object, if it is there."""
        with suppress(FileNotFoundError):
            self._ask(name, lambda: obstore.delete(self._client, self._key(name)))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nothing to hold: whoever writes the same object writes the same content, or under another name."""
        yield

    def _key(self, name: str) -> str:
        return join(self.place.prefix, name)

    def _ask(self, name: str, action: Callable[[], T]) -> T:
        """What one request returns.

        Raises:
            WriteError: the service does not take it.
            FileExistsError: there is one already.
            FileNotFoundError: there is none.
        """
        failure: StorageError
        try:
            return action()
        except exceptions.AlreadyExistsError:
            pass
        except (exceptions.BaseError, OSError, ValueError) as error:
            failure = explained(error, f"{self.location}/{name}")
            if isinstance(failure, ObjectMissingError):
                raise FileNotFoundError(str(failure)) from None
            raise WriteError(str(failure)) from None
        raise FileExistsError(f"{self.location}/{name}")
