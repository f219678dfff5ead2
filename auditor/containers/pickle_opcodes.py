"""The second pass's instructions, one function each, by opcode. Sources: ``pickletools``, PEP 3154, PEP 574.

They rely on the first pass, which has checked every length, mark and memo entry.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from auditor.containers.pickle_stack import Global, PickleStack

Instruction = Callable[[PickleStack, bytes, int], int]
"""Runs one instruction whose argument starts at the given byte; returns the byte after it."""


def _unknown(machine: PickleStack, data: bytes, at: int) -> int:
    raise KeyError(chr(data[at - 1]))


OPCODES: list[Instruction] = [_unknown] * 256
"""By opcode."""


def _opcode(letter: bytes) -> Callable[[Instruction], Instruction]:
    def register(instruction: Instruction) -> Instruction:
        OPCODES[letter[0]] = instruction
        return instruction

    return register


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.index(b"\n", at)
    return data[at:end], end + 1


_SHORT = 1024


def _constant(letter: bytes, make: Callable[[], Any]) -> None:
    def instruction(machine: PickleStack, data: bytes, at: int) -> int:
        machine.stack.append(make())
        return at

    OPCODES[letter[0]] = instruction


_CONSTANTS: dict[bytes, Callable[[], Any]] = {
    b"N": lambda: None, b"\x88": lambda: True, b"\x89": lambda: False, b")": tuple, b"]": list, b"}": dict,
    b"\x8f": set,
}  # fmt: skip
for _letter, _make in _CONSTANTS.items():
    _constant(_letter, _make)


@_opcode(b"(")
def _mark(machine: PickleStack, data: bytes, at: int) -> int:
    machine.marks.append(len(machine.stack))
    return at


def _sized(letter: bytes, layout: str, make: Callable[[bytes | memoryview], object]) -> None:
    """An instruction that pushes a value whose length is given by a number of ``layout``."""
    length_of = struct.Struct(layout)

    def instruction(machine: PickleStack, data: bytes, at: int) -> int:
        (length,) = length_of.unpack_from(data, at)
        at += length_of.size
        end: int = at + length
        # A long text is not copied before it is decoded.
        machine.stack.append(make(data[at:end] if length < _SHORT else memoryview(data)[at:end]))
        return end

    OPCODES[letter[0]] = instruction


def _text(raw: bytes | memoryview) -> str:
    return str(raw, "utf-8", "surrogatepass")


for _letter, _layout, _read in (
    (b"\x8c", "<B", _text), (b"X", "<I", _text), (b"\x8d", "<Q", _text),
    (b"C", "<B", bytes), (b"B", "<I", bytes), (b"\x8e", "<Q", bytes), (b"\x96", "<Q", bytearray),
    (b"U", "<B", lambda raw: str(raw, "latin-1")), (b"T", "<i", lambda raw: str(raw, "latin-1")),
):  # fmt: skip
    _sized(_letter, _layout, _read)


def _long(letter: bytes, layout: str) -> None:
    """An instruction that pushes an integer of any length."""
    length_of = struct.Struct(layout)

    def instruction(machine: PickleStack, data: bytes, at: int) -> int:
        (length,) = length_of.unpack_from(data, at)
        at += length_of.size
        end: int = at + length
        machine.stack.append(int.from_bytes(data[at:end], "little", signed=True))
        return end

    OPCODES[letter[0]] = instruction


_long(b"\x8a", "<B")
_long(b"\x8b", "<i")


def _fixed(letter: bytes, layout: str) -> None:
    """An instruction that pushes one number of ``layout``."""
    number = struct.Struct(layout)

    def instruction(machine: PickleStack, data: bytes, at: int) -> int:
        machine.stack.append(number.unpack_from(data, at)[0])
        return at + number.size

    OPCODES[letter[0]] = instruction


for _letter, _layout in ((b"K", "<B"), (b"M", "<H"), (b"J", "<i"), (b"G", ">d")):
    _fixed(_letter, _layout)


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a string without its quotes")
    return line[1:-1].decode("latin-1")


def _lined(letter: bytes, make: Callable[[bytes], object]) -> None:
    """An instruction of protocol 0, whose argument is a line of text."""

    def instruction(machine: PickleStack, data: bytes, at: int) -> int:
        line, at = _line(data, at)
        machine.stack.append(make(line))
        return at

    OPCODES[letter[0]] = instruction


for _letter, _read_line in (
    (b"F", float), (b"S", _quoted),
    (b"V", lambda line: line.decode("raw-unicode-escape")),
):  # fmt: skip
    _lined(_letter, _read_line)


@_opcode(b"I")
@_opcode(b"L")
def _decimal(machine: PickleStack, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.stack.append(line == b"01" if line in (b"00", b"01") else int(line.removesuffix(b"L")))
    return at


def _memory(letter: bytes, layout: str, *, store: bool) -> None:
    """An instruction that stores the top of the stack under an index, or fetches it from there."""
    number = struct.Struct(layout)

    def instruction(machine: PickleStack, data: bytes, at: int) -> int:
        (index,) = number.unpack_from(data, at)
        machine.store(index) if store else machine.fetch(index)
        return at + number.size

    OPCODES[letter[0]] = instruction


for _letter, _layout, _stores in ((b"q", "<B", True), (b"r", "<I", True), (b"h", "<B", False), (b"j", "<I", False)):
    _memory(_letter, _layout, store=_stores)


@_opcode(b"p")
def _put(machine: PickleStack, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.store(int(line))
    return at


@_opcode(b"g")
def _get(machine: PickleStack, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.fetch(int(line))
    return at


@_opcode(b"\x94")
def _memoize(machine: PickleStack, data: bytes, at: int) -> int:
    machine.store(len(machine.memo) + len(machine.far))
    return at


@_opcode(b"\x80")
def _protocol(machine: PickleStack, data: bytes, at: int) -> int:
    return at + 1


@_opcode(b"\x95")
def _frame(machine: PickleStack, data: bytes, at: int) -> int:
    return at + 8


@_opcode(b"c")
def _global(machine: PickleStack, data: bytes, at: int) -> int:
    module, at = _line(data, at)
    name, at = _line(data, at)
    machine.stack.append(Global(_text(module), _text(name)))
    return at


@_opcode(b"\x93")
def _stack_global(machine: PickleStack, data: bytes, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("a global whose name is no string")
    machine.check_name(module, name)
    machine.stack.append(Global(module, name))
    return at


def _simple(letter: bytes) -> Callable[[Callable[[PickleStack], None]], None]:
    """An instruction without argument."""

    def register(act: Callable[[PickleStack], None]) -> None:
        def instruction(machine: PickleStack, data: bytes, at: int) -> int:
            act(machine)
            return at

        OPCODES[letter[0]] = instruction

    return register


@_simple(b"R")
def _reduce(machine: PickleStack) -> None:
    arguments, maker = machine.stack.pop(), machine.stack.pop()
    machine.call(maker, arguments)


@_simple(b"\x81")
def _new_object(machine: PickleStack) -> None:
    arguments, maker = machine.stack.pop(), machine.stack.pop()
    machine.call(maker, arguments)


@_simple(b"\x92")
def _new_object_with_keywords(machine: PickleStack) -> None:
    keywords, arguments, maker = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.count_work(len(arguments))
    machine.charge(16 * len(arguments))
    machine.call(maker, (*arguments, keywords))


@_simple(b"o")
def _object(machine: PickleStack) -> None:
    maker, *arguments = machine.pop_to_mark()
    machine.call(maker, tuple(arguments))


@_opcode(b"i")
def _instance(machine: PickleStack, data: bytes, at: int) -> int:
    module, at = _line(data, at)
    name, at = _line(data, at)
    machine.call(Global(_text(module), _text(name)), tuple(machine.pop_to_mark()))
    return at


@_simple(b"b")
def _build(machine: PickleStack) -> None:
    machine.build()


@_simple(b"Q")
def _persistent_id(machine: PickleStack) -> None:
    machine.resolve(machine.stack.pop())


@_opcode(b"P")
def _persistent_line(machine: PickleStack, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.resolve(_text(line))
    return at


@_simple(b"0")
def _pop(machine: PickleStack) -> None:
    machine.pop()


@_simple(b"1")
def _pop_mark(machine: PickleStack) -> None:
    machine.pop_to_mark()


@_simple(b"2")
def _duplicate(machine: PickleStack) -> None:
    machine.stack.append(machine.stack[-1])


@_simple(b"t")
def _tuple(machine: PickleStack) -> None:
    machine.stack.append(tuple(machine.pop_to_mark()))


def _short_tuple(letter: bytes, length: int) -> None:
    @_simple(letter)
    def act(machine: PickleStack) -> None:
        items = tuple(machine.stack[-length:])
        del machine.stack[-length:]
        machine.stack.append(items)


for _letter, _length in ((b"\x85", 1), (b"\x86", 2), (b"\x87", 3)):
    _short_tuple(_letter, _length)


@_simple(b"l")
def _list(machine: PickleStack) -> None:
    machine.stack.append(machine.pop_to_mark())


@_simple(b"d")
def _dict(machine: PickleStack) -> None:
    items = machine.pop_to_mark()
    machine.stack.append({})
    machine.set_items(items)


@_simple(b"\x91")
def _frozen_set(machine: PickleStack) -> None:
    machine.stack.append(frozenset(machine.guard.keys(machine.pop_to_mark())))


@_simple(b"a")
def _append(machine: PickleStack) -> None:
    machine.append([machine.stack.pop()])


@_simple(b"e")
def _appends(machine: PickleStack) -> None:
    machine.append(machine.pop_to_mark())


@_simple(b"\x90")
def _add_items(machine: PickleStack) -> None:
    machine.append(machine.pop_to_mark())


@_simple(b"s")
def _set_item(machine: PickleStack) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_item(key, value)


@_simple(b"u")
def _set_items(machine: PickleStack) -> None:
    machine.set_items(machine.pop_to_mark())
