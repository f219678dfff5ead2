"""Small ranges that were read once are kept for a while: headers are read in many small parts, and often twice."""

from __future__ import annotations

import threading

MAX_BYTES = 64 << 20


class SmallRanges:
    """Ranges by the version of the object that they are of; the objects that were added first go first."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], list[tuple[int, bytes | memoryview]]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def find(self, name: str, identity: str, start: int, stop: int) -> memoryview | None:
        """The bytes ``[start, stop)``, if they lie in one range that is held."""
        for at, content in self._held.get((name, identity), ()):
            if at <= start and stop <= at + len(content):
                return memoryview(content)[start - at : stop - at]
        return None

    def add(self, name: str, identity: str, start: int, content: bytes | memoryview) -> None:
        """Hold a range that begins at byte ``start``."""
        with self._lock:
            # A new list: others may be going through the old one.
            held = self._held.get((name, identity), [])
            self._held[name, identity] = [*held, (start, content)]
            self._num_bytes += len(content)
            while self._num_bytes > MAX_BYTES:
                oldest = next(iter(self._held))
                self._num_bytes -= sum(len(part) for _, part in self._held.pop(oldest))
