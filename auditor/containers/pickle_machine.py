"""Reads a pickle into inert records. Nothing is imported, nothing named in it is ever called.

A pickle is a program for a small stack machine. This is that machine with every dangerous instruction replaced: a
global becomes a :class:`Global` (two strings), a call becomes an :class:`Opaque` (what would have been called, with
which arguments) unless the caller supplied a builder for exactly that name. Everything that grows is bounded by
:class:`Limits`. Sources: CPython's ``pickletools`` for the opcodes, PEP 3154 for protocol 4, PEP 574 for 5.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.containers.damage import DamagedError, LimitError


@dataclass(frozen=True, slots=True)
class Limits:
    """What an honest pickle of a checkpoint never exceeds."""

    num_bytes: int = 256 << 20
    num_opcodes: int = 20_000_000
    """Together with the cheapest object of 64 bytes this bounds memory to about a gigabyte."""
    num_stack: int = 10_000_000
    num_long_bytes: int = 1024
    """Bytes of one integer: decimal conversion and arithmetic on longer ones would take quadratic time."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a module, not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class that is not known here: what would have made it. Equal only to itself."""

    maker: object
    arguments: tuple[Any, ...] = ()
    state: object = None
    items: list[Any] = field(default_factory=list)
    """What was appended or set on it; pairs for a mapping."""

    def attributes(self) -> dict[str, Any]:
        """Its state, where that is the usual dictionary of attributes; else empty."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return {k: v for k, v in state.items() if isinstance(k, str)} if isinstance(state, dict) else {}


Builder = Callable[[tuple[Any, ...]], Any]
"""Makes a known inert value from the arguments of a call; raises TypeError or ValueError on wrong ones."""

_MARK = object()


def hashable(key: Any) -> Any:
    """``key`` itself, where hashing it is safe.

    Hashing a tuple recurses in C without a check: a tuple nested a million deep would end the process.

    Raises:
        LimitError: it is nested deeper than any key of a checkpoint.
    """
    layer = [key]
    for _ in range(8):
        layer = [item for outer in layer if isinstance(outer, tuple) for item in outer]
        if not layer:
            return key
        if len(layer) > 10_000:
            break
    raise LimitError("its pickle uses a deeply nested or huge tuple as a key")


class PickleMachine:
    """One run over one pickle."""

    def __init__(
        self,
        builders: Mapping[str, Builder],
        persistent: Callable[[object], object] | None = None,
        limits: Limits = Limits(),
    ) -> None:
        """``builders``: ``module.name`` to builder. ``persistent``: what a persistent id stands for."""
        self._builders, self._persistent, self._limits = builders, persistent, limits
        self.opaque: Counter[str] = Counter()
        """Calls and objects of unknown classes, counted by name."""
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def load(self, data: bytes) -> Any:
        """The value of the pickle.

        Raises:
            DamagedError: it is no whole pickle.
            LimitError: it asks for more than :class:`Limits` allow.
        """
        if len(data) > self._limits.num_bytes:
            raise LimitError(f"its pickle has {len(data)} bytes, at most {self._limits.num_bytes} are read")
        at = opcodes = 0
        try:
            while True:
                code = data[at]
                at += 1
                opcodes += 1
                if opcodes > self._limits.num_opcodes or len(self._stack) > self._limits.num_stack:
                    raise LimitError(f"its pickle needs more than {opcodes - 1} steps or stack places")
                if code == 0x2E:  # STOP
                    return self._stack.pop()
                at = _OPCODES[code](self, data, at)
        except LimitError:
            raise
        except KeyError as error:
            raise DamagedError(f"its pickle is broken at byte {at}: unknown opcode or memo entry {error}") from error
        except (IndexError, ValueError, TypeError, struct.error, AttributeError) as error:
            raise DamagedError(f"its pickle is broken at byte {at}: {error}") from error

    # The stack

    def push(self, value: object) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        """Take everything above the last mark off the stack, and the mark."""
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError("no mark on the stack")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def memoize(self, index: int) -> None:
        """Remember the top of the stack."""
        self._memo[index] = self._stack[-1]

    # What would run code in a real unpickler

    def call(self, maker: object, arguments: object) -> None:
        """Make a known value, or an :class:`Opaque` that says what would have been called."""
        if not isinstance(arguments, tuple):
            raise TypeError("a call without an argument tuple")
        name = str(maker) if isinstance(maker, Global) else "an object that is no class"
        builder = self._builders.get(name)
        if builder is None:
            self.opaque[name] += 1
            self.push(Opaque(maker, arguments))
        else:
            self.push(builder(arguments))

    def build(self) -> None:
        """Give an opaque object its state."""
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target.state = state
        # On anything else (an ordered dictionary's metadata, say) attributes don't matter here.

    def append(self, items: list[Any]) -> None:
        """Add items to the list or set below them."""
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target.items.extend(items)
        elif isinstance(target, set):
            target.update(map(hashable, items))
        else:
            target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values, in turn, to the mapping below them."""
        target = self._stack[-1]
        pairs = [(hashable(key), value) for key, value in zip(items[::2], items[1::2], strict=True)]
        if isinstance(target, Opaque):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update(pairs)
        else:
            raise TypeError("items set on something that is no mapping")

    def resolve(self, persistent_id: object) -> None:
        """Put on the stack what a persistent id stands for."""
        if self._persistent is None:
            raise TypeError("a persistent id where none are expected")
        self.push(self._persistent(persistent_id))


Instruction = Callable[[PickleMachine, bytes, int], int]
"""Runs one instruction whose argument starts at the given byte; returns the byte after it."""

_OPCODES: dict[int, Instruction] = {}


def _opcode(letter: bytes) -> Callable[[Instruction], Instruction]:
    def register(instruction: Instruction) -> Instruction:
        _OPCODES[letter[0]] = instruction
        return instruction

    return register


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.index(b"\n", at)
    return data[at:end], end + 1


def _take(data: bytes, at: int, length: int) -> bytes:
    if length < 0 or at + length > len(data):
        raise ValueError(f"{length} bytes announced, {len(data) - at} left")
    return data[at : at + length]


def _constant(letter: bytes, make: Callable[[], Any]) -> None:
    def instruction(machine: PickleMachine, data: bytes, at: int) -> int:
        machine.push(make())
        return at

    _OPCODES[letter[0]] = instruction


_CONSTANTS: dict[bytes, Callable[[], Any]] = {
    b"N": lambda: None, b"\x88": lambda: True, b"\x89": lambda: False, b")": tuple, b"]": list, b"}": dict,
    b"\x8f": set, b"(": lambda: _MARK,
}  # fmt: skip
for _letter, _make in _CONSTANTS.items():
    _constant(_letter, _make)


def _sized(letter: bytes, layout: str, make: Callable[[bytes], object]) -> None:
    """An instruction that pushes a value whose length is given by a number of ``layout``."""
    length_of = struct.Struct(layout)

    def instruction(machine: PickleMachine, data: bytes, at: int) -> int:
        (length,) = length_of.unpack_from(data, at)
        at += length_of.size
        machine.push(make(_take(data, at, length)))
        end: int = at + length
        return end

    _OPCODES[letter[0]] = instruction


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _long(raw: bytes) -> int:
    if len(raw) > Limits().num_long_bytes:
        raise LimitError(f"its pickle holds an integer of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


for _letter, _layout, _read in (
    (b"\x8c", "<B", _text), (b"X", "<I", _text), (b"\x8d", "<Q", _text),
    (b"C", "<B", bytes), (b"B", "<I", bytes), (b"\x8e", "<Q", bytes), (b"\x96", "<Q", bytearray),
    (b"U", "<B", lambda raw: raw.decode("latin-1")), (b"T", "<i", lambda raw: raw.decode("latin-1")),
    (b"\x8a", "<B", _long), (b"\x8b", "<i", _long),
):  # fmt: skip
    _sized(_letter, _layout, _read)


def _fixed(letter: bytes, layout: str) -> None:
    """An instruction that pushes one number of ``layout``."""
    number = struct.Struct(layout)

    def instruction(machine: PickleMachine, data: bytes, at: int) -> int:
        machine.push(number.unpack_from(data, at)[0])
        return at + number.size

    _OPCODES[letter[0]] = instruction


for _letter, _layout in ((b"K", "<B"), (b"M", "<H"), (b"J", "<i"), (b"G", ">d")):
    _fixed(_letter, _layout)


def _decimal(line: bytes) -> int | bool:
    if line in (b"00", b"01"):
        return line == b"01"
    if len(line) > Limits().num_long_bytes:
        raise LimitError(f"its pickle holds an integer of {len(line)} digits")
    return int(line.removesuffix(b"L"))


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a string without its quotes")
    return line[1:-1].decode("latin-1")


def _lined(letter: bytes, make: Callable[[bytes], object]) -> None:
    """An instruction of protocol 0, whose argument is a line of text."""

    def instruction(machine: PickleMachine, data: bytes, at: int) -> int:
        line, at = _line(data, at)
        machine.push(make(line))
        return at

    _OPCODES[letter[0]] = instruction


for _letter, _read_line in (
    (b"I", _decimal), (b"L", _decimal), (b"F", float), (b"S", _quoted),
    (b"V", lambda line: line.decode("raw-unicode-escape")),
):  # fmt: skip
    _lined(_letter, _read_line)


def _memory(letter: bytes, layout: str, *, store: bool) -> None:
    """An instruction that stores the top of the stack under an index, or fetches it from there."""
    number = struct.Struct(layout)

    def instruction(machine: PickleMachine, data: bytes, at: int) -> int:
        (index,) = number.unpack_from(data, at)
        # A dictionary, not an array: a huge index must cost no memory.
        machine.memoize(index) if store else machine.push(machine._memo[index])
        return at + number.size

    _OPCODES[letter[0]] = instruction


for _letter, _layout, _stores in ((b"q", "<B", True), (b"r", "<I", True), (b"h", "<B", False), (b"j", "<I", False)):
    _memory(_letter, _layout, store=_stores)


@_opcode(b"p")
def _put(machine: PickleMachine, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.memoize(int(line))
    return at


@_opcode(b"g")
def _get(machine: PickleMachine, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.push(machine._memo[int(line)])
    return at


@_opcode(b"\x94")
def _memoize(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.memoize(len(machine._memo))
    return at


@_opcode(b"\x80")
def _protocol(machine: PickleMachine, data: bytes, at: int) -> int:
    if data[at] > 5:
        raise ValueError(f"protocol {data[at]} is not known")
    return at + 1


@_opcode(b"\x95")
def _frame(machine: PickleMachine, data: bytes, at: int) -> int:
    (length,) = struct.unpack_from("<Q", data, at)
    if at + 8 + length > len(data):
        raise ValueError(f"a frame of {length} bytes, {len(data) - at - 8} left")
    return at + 8


@_opcode(b"c")
def _global(machine: PickleMachine, data: bytes, at: int) -> int:
    module, at = _line(data, at)
    name, at = _line(data, at)
    machine.push(Global(_text(module), _text(name)))
    return at


@_opcode(b"\x93")
def _stack_global(machine: PickleMachine, data: bytes, at: int) -> int:
    name, module = machine._stack.pop(), machine._stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("a global whose name is no string")
    machine.push(Global(module, name))
    return at


def _simple(letter: bytes) -> Callable[[Callable[[PickleMachine], None]], None]:
    """An instruction without argument."""

    def register(act: Callable[[PickleMachine], None]) -> None:
        def instruction(machine: PickleMachine, data: bytes, at: int) -> int:
            act(machine)
            return at

        _OPCODES[letter[0]] = instruction

    return register


@_simple(b"R")
def _reduce(machine: PickleMachine) -> None:
    arguments, maker = machine._stack.pop(), machine._stack.pop()
    machine.call(maker, arguments)


@_simple(b"\x81")
def _new_object(machine: PickleMachine) -> None:
    arguments, maker = machine._stack.pop(), machine._stack.pop()
    machine.call(maker, arguments)


@_simple(b"\x92")
def _new_object_with_keywords(machine: PickleMachine) -> None:
    keywords, arguments, maker = machine._stack.pop(), machine._stack.pop(), machine._stack.pop()
    machine.call(maker, (*arguments, keywords))


@_simple(b"o")
def _object(machine: PickleMachine) -> None:
    maker, *arguments = machine.pop_to_mark()
    machine.call(maker, tuple(arguments))


@_opcode(b"i")
def _instance(machine: PickleMachine, data: bytes, at: int) -> int:
    module, at = _line(data, at)
    name, at = _line(data, at)
    machine.call(Global(_text(module), _text(name)), tuple(machine.pop_to_mark()))
    return at


@_simple(b"b")
def _build(machine: PickleMachine) -> None:
    machine.build()


@_simple(b"Q")
def _persistent_id(machine: PickleMachine) -> None:
    machine.resolve(machine._stack.pop())


@_opcode(b"P")
def _persistent_line(machine: PickleMachine, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.resolve(_text(line))
    return at


@_simple(b"0")
def _pop(machine: PickleMachine) -> None:
    machine._stack.pop()


@_simple(b"1")
def _pop_mark(machine: PickleMachine) -> None:
    machine.pop_to_mark()


@_simple(b"2")
def _duplicate(machine: PickleMachine) -> None:
    machine.push(machine._stack[-1])


@_simple(b"t")
def _tuple(machine: PickleMachine) -> None:
    machine.push(tuple(machine.pop_to_mark()))


def _short_tuple(letter: bytes, length: int) -> None:
    @_simple(letter)
    def act(machine: PickleMachine) -> None:
        if len(machine._stack) < length:
            raise IndexError("stack too short for a tuple")
        items = tuple(machine._stack[-length:])
        del machine._stack[-length:]
        machine.push(items)


for _letter, _length in ((b"\x85", 1), (b"\x86", 2), (b"\x87", 3)):
    _short_tuple(_letter, _length)


@_simple(b"l")
def _list(machine: PickleMachine) -> None:
    machine.push(machine.pop_to_mark())


@_simple(b"d")
def _dict(machine: PickleMachine) -> None:
    items = machine.pop_to_mark()
    machine.push({})
    machine.set_items(items)


@_simple(b"\x91")
def _frozen_set(machine: PickleMachine) -> None:
    machine.push(frozenset(map(hashable, machine.pop_to_mark())))


@_simple(b"a")
def _append(machine: PickleMachine) -> None:
    machine.append([machine._stack.pop()])


@_simple(b"e")
def _appends(machine: PickleMachine) -> None:
    machine.append(machine.pop_to_mark())


@_simple(b"\x90")
def _add_items(machine: PickleMachine) -> None:
    machine.append(machine.pop_to_mark())


@_simple(b"s")
def _set_item(machine: PickleMachine) -> None:
    value, key = machine._stack.pop(), machine._stack.pop()
    machine.set_items([key, value])


@_simple(b"u")
def _set_items(machine: PickleMachine) -> None:
    machine.set_items(machine.pop_to_mark())
