"""Numbers of variable length, bounded by the bytes that are there."""

from __future__ import annotations

from auditor.containers.damage import DamagedError

_MAX_BYTES = 10
"""Of a varint: 64 bits, seven a byte."""


class Numbers:
    """Reads a block of bytes from its beginning."""

    def __init__(self, content: bytes, start: int = 0, stop: int | None = None) -> None:
        self._content, self.at = content, start
        self._stop = len(content) if stop is None else stop

    def take(self, num_bytes: int) -> bytes:
        """So many bytes.

        Raises:
            DamagedError: there are fewer.
        """
        if num_bytes > self._stop - self.at:
            raise DamagedError("a node ends in the middle of what it lists")
        self.at += num_bytes
        return self._content[self.at - num_bytes : self.at]

    def varint(self) -> int:
        """An unsigned number, seven bits a byte, low ones first.

        Raises:
            DamagedError: it isn't whole, or has more than 64 bits.
        """
        content, at = self._content, self.at
        found = shift = 0
        while at < self._stop and shift < 7 * _MAX_BYTES:
            byte = content[at]
            at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                if found >> 64:
                    break
                self.at = at
                return found
            shift += 7
        raise DamagedError("a number in a node is broken")

    def count(self) -> int:
        """How many entries follow, each of which takes a byte at least.

        Raises:
            DamagedError: there can't be so many.
        """
        found = self.varint()
        if found > self._stop - self.at:
            raise DamagedError(f"a node states {found} entries, more than its bytes can hold")
        return found

    def varints(self, count: int) -> list[int]:
        """So many numbers. Raises as :meth:`varint`."""
        return [self.varint() for _ in range(count)]
