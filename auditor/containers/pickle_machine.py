"""Reads a pickle into inert records. Nothing is imported, nothing named in it is ever called.

A pickle is a program for a small stack machine. This is that machine with every dangerous instruction replaced: a
global becomes a :class:`Global` (two strings), a call becomes an :class:`Opaque` (what would have been called, with
which arguments) unless the caller supplied a builder for exactly that name.

It goes through a pickle twice. The first pass (:mod:`auditor.containers.pickle_scan`) builds nothing, and bounds by
:class:`Limits` everything that grows; the second builds the records, and remembers only what is fetched again.
"""

from __future__ import annotations

import struct
from typing import Any

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.pickle_limits import LIMITS, Limits, MemoryLimitError
from auditor.containers.pickle_opcodes import OPCODES
from auditor.containers.pickle_scan import PickleScan
from auditor.containers.pickle_stack import Builder, Global, KeyGuard, Opaque, PickleStack, hashable

__all__ = [
    "LIMITS", "Builder", "Global", "KeyGuard", "Limits", "MemoryLimitError", "Opaque", "PickleMachine", "hashable",
]  # fmt: skip

_SMALL, _MEMOIZE, _LONG_PUT, _GET, _LONG_GET, _STOP = b"K\x94rhj."
_index = struct.Struct("<I").unpack_from


class PickleMachine(PickleStack):
    """One run over one pickle."""

    def load(self, data: bytes) -> Any:
        """The value of the pickle.

        Raises:
            DamagedError: it is no whole pickle.
            LimitError: it asks for more than :class:`Limits` allow.
        """
        if len(data) > self.limits.num_bytes:
            raise LimitError(f"its pickle has {len(data)} bytes, at most {self.limits.num_bytes} are read")
        self._at = 0
        try:
            self._scan(data)
            return self._build(data)
        except LimitError:
            raise
        except (RecursionError, MemoryError) as error:
            raise LimitError(f"its pickle is nested too deeply or too large at byte {self._at}") from error
        except KeyError as error:
            message = f"its pickle is broken at byte {self._at}: unknown opcode or memo entry {error}"
            raise DamagedError(message) from error
        except (IndexError, ValueError, TypeError, struct.error, AttributeError, OverflowError) as error:
            raise DamagedError(f"its pickle is broken at byte {self._at}: {error}") from error

    def skip(self, data: bytes) -> None:
        """Go through a pickle without making its value.

        Raises:
            DamagedError: it is no whole pickle.
            LimitError: it asks for more than :class:`Limits` allow.
        """
        self._at = 0
        try:
            self._scan(data)
        except LimitError:
            raise
        except (RecursionError, MemoryError) as error:
            raise LimitError(f"its pickle is too large at byte {self._at}") from error
        except (KeyError, IndexError, ValueError, TypeError, struct.error, OverflowError) as error:
            raise DamagedError(f"its pickle is broken at byte {self._at}: {error}") from error

    @property
    def num_read(self) -> int:
        """Bytes of the pickle that was gone through; what lies behind its end is not looked at."""
        return self._at

    def _scan(self, data: bytes) -> None:
        """The first pass."""
        scan = PickleScan(data, self.limits)
        try:
            found = scan.run()
        finally:
            self._at = scan.at
        self.fetched, self.fetched_far, self.num_memory = found.fetched, found.fetched_far, found.num_memory

    def _build(self, data: bytes) -> Any:
        """The second pass. What is frequent is done in place: calls of functions would double the time."""
        stack, memo, far, fetched, opcodes = self.stack, self.memo, self.far, self.fetched, OPCODES
        at = 0
        try:
            while True:
                code = data[at]
                at += 1
                if code == _MEMOIZE and not far:
                    memo.append(stack[-1] if fetched[len(memo)] else None)
                elif code == _SMALL:
                    stack.append(data[at])
                    at += 1
                elif code == _LONG_PUT and not far and _index(data, at)[0] == len(memo):
                    memo.append(stack[-1] if fetched[len(memo)] else None)
                    at += 4
                elif code == _GET and (index := data[at]) < len(memo):
                    stack.append(memo[index])
                    at += 1
                elif code == _LONG_GET and (index := _index(data, at)[0]) < len(memo):
                    stack.append(memo[index])
                    at += 4
                elif code == _STOP:
                    return stack.pop()
                else:
                    at = opcodes[code](self, data, at)
        finally:
            self._at = at
