"""Reads a pickle into inert records. Nothing is imported, nothing named in it is ever called.

A pickle is a program for a small stack machine. This is that machine with every dangerous instruction replaced: a
global becomes a :class:`Global` (two strings), a call becomes an :class:`Opaque` (what would have been called, with
which arguments) unless the caller supplied a builder for exactly that name. Everything that grows is bounded by
:class:`Limits`.
"""

from __future__ import annotations

import struct
from typing import Any

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.pickle_opcodes import OPCODES
from auditor.containers.pickle_stack import Builder, Global, Limits, Opaque, PickleStack, hashable

__all__ = ["Builder", "Global", "Limits", "Opaque", "PickleMachine", "hashable"]


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
        at = opcodes = 0
        try:
            while True:
                code = data[at]
                at += 1
                opcodes += 1
                if opcodes > self.limits.num_opcodes or len(self.stack) > self.limits.num_stack:
                    raise LimitError(f"its pickle needs more than {opcodes - 1} steps or stack places")
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                at = OPCODES[code](self, data, at)
        except LimitError:
            raise
        except (RecursionError, MemoryError) as error:
            raise LimitError(f"its pickle is nested too deeply or too large at byte {at}") from error
        except KeyError as error:
            raise DamagedError(f"its pickle is broken at byte {at}: unknown opcode or memo entry {error}") from error
        except (IndexError, ValueError, TypeError, struct.error, AttributeError, OverflowError) as error:
            raise DamagedError(f"its pickle is broken at byte {at}: {error}") from error
