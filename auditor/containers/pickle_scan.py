"""The first pass over a pickle: goes through every instruction, builds nothing, and bounds what building it costs.

It keeps the shape of the stack alone: how deep the value at each place is nested, and where the marks lie. So the
second pass meets nothing that is cut short, no missing mark or memo entry, no more than :class:`Limits` allow; and it
knows which memo entries will be fetched, the only ones that it must keep. The rules are those of CPython's
``Modules/_pickle.c``: nothing reaches below the last mark, and POP takes away a mark that is on top.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from itertools import repeat

from auditor.containers.damage import LimitError
from auditor.containers.pickle_limits import Limits, MemoryLimitError

_BLOCK = 1 << 16
"""Instructions between two looks at the limits of memory and stack."""

(_PUSH, _MEMOIZE, _JOIN_ONE, _JOIN_TWO, _GET, _LONG_GET, _LONG_PUT, _MARK,
 _TAKE, _FILL, _MERGE, _JOIN_THREE, _PUT, _POP, _OTHER) = range(15)  # fmt: skip
"""What an instruction does to the stack: puts a value of fixed size on it; stores its top; makes one value of the last
few; fetches an entry; sets a mark; makes one value of all above the last mark; puts these into the value below; puts
the last few into the one below them; takes one off."""
_KINDS = {
    _PUSH: b"N\x88\x89)]}\x8fKMJG", _MEMOIZE: b"\x94", _PUT: b"q", _LONG_PUT: b"r", _GET: b"h", _LONG_GET: b"j",
    _JOIN_ONE: b"\x85Q", _JOIN_TWO: b"\x86R\x81\x93", _JOIN_THREE: b"\x87\x92", _MARK: b"(", _TAKE: b"tldo\x91",
    _FILL: b"eu\x90", _MERGE: b"abs", _POP: b"01",
}  # fmt: skip
_KIND = tuple(next((kind for kind, codes in _KINDS.items() if code in codes), _OTHER) for code in range(256))

_WIDTH = tuple({0x4B: 2, 0x4D: 3, 0x4A: 5, 0x47: 9}.get(code, 1) for code in range(256))
"""Bytes of an instruction that pushes a value of fixed size."""

_POP_MARK, _STOP, _DUP, _OBJ, _INST, _GLOBAL, _PROTO, _FRAME, _TEXT_PUT, _TEXT_GET, _SETITEM = b"1.2oic\x80\x95pgs"
_DECIMALS, _LINES = b"IL", b"ILFSVPpgci"
"""Instructions whose arguments are whole numbers, or lines of text."""

_NUM_BYTES = {
    b"]": 72, b"}": 80, b"\x8f": 232, b"M": 32, b"J": 32, b"G": 32, b"\x85": 64, b"\x86": 72, b"\x87": 80, b"R": 96,
    b"\x81": 96, b"\x92": 96, b"\x93": 64, b"Q": 96, b"a": 64, b"s": 200, b"t": 64, b"l": 72, b"d": 208, b"o": 160,
    b"\x91": 232, b"e": 64, b"u": 120,
}  # fmt: skip
_COST = tuple(_NUM_BYTES.get(bytes([code]), 0) for code in range(256))
"""Bytes of what an instruction makes, in CPython 3.11 to 3.13 on 64 bits, with the header of the garbage collector.
What is allocated with the first item of a list or a dictionary is counted where items are added."""
_ITEM_COST = tuple({b"d": 46, b"u": 46, b"\x91": 134, b"\x90": 134}.get(bytes([code]), 16) for code in range(256))
"""Bytes for each value above the mark: hash tables and lists have more places than values, twice as many while they
grow. Two values make one item of a dictionary."""
_OBJECT = 64
"""Bytes of an object of a size of its own, without its content."""
_ON_STACK, _STORED, _STORED_FAR = 16, 16, 256
"""Bytes of a place on the stack and of a memo entry."""

_LENGTHS = {
    0x8C: "<B", 0x58: "<I", 0x8D: "<Q", 0x43: "<B", 0x42: "<I", 0x8E: "<Q", 0x96: "<Q", 0x55: "<B", 0x54: "<i",
    0x8A: "<B", 0x8B: "<i",
}  # fmt: skip
_SIZED = {code: struct.Struct(layout) for code, layout in _LENGTHS.items()}
_TEXTS, _LONGS = b"\x8cX\x8d", b"\x8a\x8b"
_SHORT = 256
_FOUR_BYTES, _TWO_BYTES = re.compile(rb"[\xf0-\xff]"), re.compile(rb"[\xc4-\xef]")
"""First bytes of the characters that make a string wide."""
_index = struct.Struct("<I").unpack_from


@dataclass(frozen=True, slots=True)
class Scan:
    """What the first pass found."""

    fetched: bytes
    """By memo index: 1 where the entry is fetched."""
    fetched_far: frozenset[int]
    """Fetched entries whose indexes leave holes."""
    num_memory: int
    """Bytes that the pickle and all that is made of it take at most; the results of calls are not counted."""


class PickleScan:
    """One first pass over one pickle."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self.data, self.limits = data, limits
        self.at = 0
        """Where it is."""
        self._heights: list[int] = []
        """By place on the stack: how many containers are nested in the value, as far as it is written in place."""
        self._marks = [0]
        """Places on the stack; the first entry stands for none."""
        self._memo: list[int] = []
        """Heights by index."""
        self._far: dict[int, int] = {}
        """Heights of entries whose indexes leave holes: no writer makes any, and they must cost no memory."""
        self._fetched, self._fetched_far = bytearray(min(len(data), limits.num_opcodes)), set[int]()
        self._num_bytes, self._deepest = len(data), 0
        self._locals = data, self._heights, self._marks, self._memo, self._far, self._fetched

    def run(self) -> Scan:
        """Go through the whole pickle.

        Raises:
            LimitError: it asks for more than the limits allow.
            IndexError, ValueError, KeyError, struct.error: it is no whole pickle.
        """
        left = self.limits.num_opcodes
        while not self._block(min(left, _BLOCK)):
            left -= _BLOCK
            self._check()
            if left <= 0:
                raise LimitError(f"its pickle needs more than {self.limits.num_opcodes} steps")
        self._check()
        return Scan(bytes(self._fetched[: len(self._memo)]), frozenset(self._fetched_far), self._num_memory())

    def _num_memory(self) -> int:
        stored = _STORED * len(self._memo) + _STORED_FAR * len(self._far)
        return self._num_bytes + stored + _ON_STACK * self._deepest

    def _check(self) -> None:
        self._deepest = max(self._deepest, len(self._heights))
        if self._num_memory() > self.limits.num_memory:
            raise MemoryLimitError(self.limits.num_memory)
        if self._deepest > self.limits.num_stack:
            raise LimitError(f"its pickle needs more than {self.limits.num_stack} places on the stack")

    def _block(self, num_opcodes: int) -> bool:
        """Go through some instructions; whether the last one was the pickle's end.

        What is frequent is done in place: calls would double the time.
        """
        data, heights, marks, memo, far, fetched = self._locals
        at, num_bytes, fence, highest = self.at, 0, marks[-1], self.limits.num_nesting
        for _ in repeat(None, num_opcodes):
            code = data[at]
            kind = _KIND[code]
            if kind == _PUSH:
                heights.append(0)
                num_bytes += _COST[code]
                at += _WIDTH[code]
            elif kind == _MEMOIZE and len(heights) > fence and not far:
                memo.append(heights[-1])
                at += 1
            elif kind == _LONG_PUT and len(heights) > fence and _index(data, at + 1)[0] == len(memo) and not far:
                memo.append(heights[-1])
                at += 5
            elif kind == _JOIN_TWO and len(heights) - 1 > fence and heights[-1] < highest > heights[-2]:
                height = heights.pop()
                heights[-1] = 1 + (height if height > heights[-1] else heights[-1])
                num_bytes += _COST[code]
                at += 1
            elif kind == _JOIN_ONE and len(heights) > fence and heights[-1] < highest:
                heights[-1] += 1
                num_bytes += _COST[code]
                at += 1
            elif kind == _GET and (index := data[at + 1]) < len(memo):
                heights.append(memo[index])
                fetched[index] = 1
                at += 2
            elif kind == _LONG_GET and (index := _index(data, at + 1)[0]) < len(memo):
                heights.append(memo[index])
                fetched[index] = 1
                at += 5
            elif kind == _MARK and len(marks) <= highest:
                marks.append(fence := len(heights))
                at += 1
            else:
                self.at, at = at, self._rest(code, kind, at)
                if code == _STOP:
                    break
                fence = marks[-1]
        self.at, self._num_bytes = at, self._num_bytes + num_bytes
        return code == _STOP

    def _refuse(self, start: int, height: int) -> None:
        """Raise, where an instruction reaches below the last mark or nests too deeply."""
        if start < self._marks[-1]:
            raise IndexError("too few values on the stack")
        if height > self.limits.num_nesting:
            raise LimitError(f"its pickle is nested more than {self.limits.num_nesting} deep")

    # The memo

    def _store(self, index: int) -> None:
        """Store the top of the stack, where that is not simply the next entry."""
        self._refuse(len(self._heights) - 1, 0)
        if index < len(self._memo):
            self._memo[index] = self._heights[-1]
        elif index == len(self._memo):
            self._far.pop(index, None)
            self._memo.append(self._heights[-1])
        else:
            self._far[index] = self._heights[-1]

    def _fetch(self, index: int) -> None:
        if 0 <= index < len(self._memo):
            self._heights.append(self._memo[index])
            self._fetched[index] = 1
        else:
            self._heights.append(self._far[index])
            self._fetched_far.add(index)

    # The rest

    def _rest(self, code: int, kind: int, at: int) -> int:
        """Go through an instruction that is less frequent, or at fault; where the next one is."""
        self._num_bytes += _COST[code]
        at += 1
        if kind in (_TAKE, _FILL):
            self._take_marked(code)
        elif kind == _MERGE:
            self._merge(len(self._heights) - (3 if code == _SETITEM else 2))
        elif kind in (_JOIN_ONE, _JOIN_TWO, _JOIN_THREE):
            self._join(len(self._heights) - (1 + kind - _JOIN_ONE if kind <= _JOIN_TWO else 3))
        elif kind in (_MEMOIZE, _PUT, _LONG_PUT, _GET, _LONG_GET):
            at = self._remember(kind, at)
        elif kind == _MARK:
            raise LimitError(f"its pickle is nested more than {self.limits.num_nesting} deep")
        elif kind == _POP:
            self._pop(code)
        elif code in _SIZED:
            at = self._sized(code, at)
        elif code in _LINES:
            at = self._lines(code, at)
        elif code in (_PROTO, _FRAME):
            at = self._header(code, at)
        elif code in (_STOP, _DUP):
            self._refuse(len(self._heights) - 1, 0)
            self._heights += self._heights[-1:] if code == _DUP else []
        else:
            raise KeyError(chr(code))
        return at

    def _remember(self, kind: int, at: int) -> int:
        """Store the top of the stack, or fetch an entry."""
        width = {_MEMOIZE: 0, _PUT: 1, _GET: 1}.get(kind, 4)
        index = int.from_bytes(self.data[at : at + width], "little") if width else len(self._memo) + len(self._far)
        self._fetch(index) if kind in (_GET, _LONG_GET) else self._store(index)
        return at + width

    def _join(self, start: int) -> None:
        """Make one value of those from the place ``start`` on."""
        height = max(self._heights[max(start, 0) :], default=-1) + 1
        self._refuse(start, height)
        self._heights[start:] = (height,)

    def _take_marked(self, code: int) -> None:
        """Make one value of all above the last mark, or put them into the value below it."""
        heights, start = self._heights, self._marks.pop()
        if not self._marks:
            raise IndexError("no mark on the stack")
        self._num_bytes += _ITEM_COST[code] * (len(heights) - start)
        self._deepest = max(self._deepest, len(heights))
        if _KIND[code] == _FILL:
            self._merge(start - 1)
        elif code == _OBJ and len(heights) == start:
            raise IndexError("a call of nothing")
        else:
            self._join(start)

    def _merge(self, target: int) -> None:
        """Everything above the place ``target`` goes into the value there."""
        heights = self._heights
        height = max(heights[target + 1 :], default=-1) + 1
        self._refuse(target, height)
        heights[target:] = (max(heights[target], height),)

    def _pop(self, code: int) -> None:
        heights, marks = self._heights, self._marks
        if code == _POP_MARK:
            self._take_marked(code)
            heights.pop()
        elif len(marks) > 1 and marks[-1] == len(heights):
            marks.pop()
        else:
            self._refuse(len(heights) - 1, 0)
            heights.pop()

    def _header(self, code: int, at: int) -> int:
        if code == _FRAME:
            (length,) = struct.unpack_from("<Q", self.data, at)
            if at + 8 + length > len(self.data):
                raise ValueError(f"a frame of {length} bytes, {len(self.data) - at - 8} left")
            return at + 8
        if self.data[at] > 5:
            raise ValueError(f"protocol {self.data[at]} is not known")
        return at + 1

    def _sized(self, code: int, at: int) -> int:
        """Text, bytes or an integer whose length comes first."""
        layout = _SIZED[code]
        (length,) = layout.unpack_from(self.data, at)
        at += layout.size
        if length < 0 or at + length > len(self.data):
            raise ValueError(f"{length} bytes announced, {len(self.data) - at} left")
        if code in _LONGS:
            self._check_integer(length)
        self._num_bytes += _OBJECT + (self._text_cost(at, at + length) if code in _TEXTS else length)
        self._heights.append(0)
        return int(at + length)

    def _check_integer(self, length: int) -> None:
        if length > self.limits.num_long_bytes:
            raise LimitError(f"its pickle holds an integer of {length} bytes or digits")

    def _text_cost(self, start: int, end: int) -> int:
        """Bytes of a string: its widest character sets the width of all; narrower forms come before while it grows."""
        if end - start < _SHORT or _FOUR_BYTES.search(self.data, start, end):
            return 4 * (end - start) if end - start < _SHORT else 6 * (end - start)
        return (3 if _TWO_BYTES.search(self.data, start, end) else 1) * (end - start)

    def _line(self, at: int) -> tuple[bytes, int]:
        end = self.data.index(b"\n", at)
        return self.data[at:end], end + 1

    def _lines(self, code: int, at: int) -> int:
        """An instruction of protocol 0, whose arguments are lines of text."""
        line, at = self._line(at)
        self._num_bytes += _OBJECT + 4 * len(line)
        if code in (_TEXT_PUT, _TEXT_GET):
            index = int(line)
            if index < 0:
                raise ValueError("a negative memo index")
            self._store(index) if code == _TEXT_PUT else self._fetch(index)
            return at
        if code in (_GLOBAL, _INST):
            name, at = self._line(at)
            self._num_bytes += 3 * _OBJECT + 4 * len(name)
            if max(len(line), len(name)) > self.limits.num_name_bytes:
                raise LimitError(f"its pickle holds a global of more than {self.limits.num_name_bytes} bytes")
        elif code in _DECIMALS:
            self._check_integer(len(line))
        if code == _INST:
            self._take_marked(code)
        else:
            self._heights.append(0)
        return at
