"""The state of the pickle machine, and the inert records that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.containers.damage import LimitError


@dataclass(frozen=True, slots=True)
class Limits:
    """What an honest pickle of a checkpoint never exceeds."""

    num_bytes: int = 64 << 20
    num_opcodes: int = 5_000_000
    """With some 200 bytes for the largest object that one instruction makes, this bounds memory to a gigabyte."""
    num_stack: int = 10_000_000
    num_copied: int = 20_000_000
    """Elements of all arguments of calls together."""
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

MARK = object()
MAX_KEY_ELEMENTS = 256
"""Elements of a tuple used as a key: it is hashed each time, so a huge one used often would cost unbounded time."""


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
        if len(layer) > MAX_KEY_ELEMENTS:
            break
    raise LimitError("its pickle uses a deeply nested or huge tuple as a key")


class PickleStack:
    """The machine's state, and what its dangerous instructions do instead."""

    def __init__(
        self,
        builders: Mapping[str, Builder],
        persistent: Callable[[object], object] | None = None,
        limits: Limits = Limits(),
    ) -> None:
        """``builders``: ``module.name`` to builder. ``persistent``: what a persistent id stands for."""
        self._builders, self._persistent, self.limits = builders, persistent, limits
        self.opaque: Counter[str] = Counter()
        """Calls and objects of unknown classes, counted by name."""
        self.work = 0
        """Elements of arguments handed to calls so far."""
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    # The stack

    def push(self, value: object) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def charge(self, num_elements: int) -> None:
        """Count what calls copy: one large argument in many small calls would cost unbounded memory."""
        self.work += num_elements
        if self.work > self.limits.num_copied:
            raise LimitError(f"its pickle makes calls with more than {self.limits.num_copied} elements in all")

    def check_integer(self, length: int) -> None:
        """Refuse an integer of more bytes or digits than any checkpoint holds."""
        if length > self.limits.num_long_bytes:
            raise LimitError(f"its pickle holds an integer of {length} bytes or digits")

    def pop_to_mark(self) -> list[Any]:
        """Take everything above the last mark off the stack, and the mark."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise IndexError("no mark on the stack")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def memoize(self, index: int) -> None:
        """Remember the top of the stack."""
        self.memo[index] = self.stack[-1]

    # What would run code in a real unpickler

    def call(self, maker: object, arguments: object) -> None:
        """Make a known value, or an :class:`Opaque` that says what would have been called."""
        if not isinstance(arguments, tuple):
            raise TypeError("a call without an argument tuple")
        self.charge(sum(len(a) for a in arguments if isinstance(a, (tuple, list, dict, set, frozenset, str, bytes))))
        name = str(maker) if isinstance(maker, Global) else "an object that is no class"
        builder = self._builders.get(name)
        if builder is None:
            self.opaque[name] += 1
            self.push(Opaque(maker, arguments))
        else:
            self.push(builder(arguments))

    def build(self) -> None:
        """Give an opaque object its state."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.state = state
        # On anything else (an ordered dictionary's metadata, say) attributes don't matter here.

    def append(self, items: list[Any]) -> None:
        """Add items to the list or set below them."""
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.items.extend(items)
        elif isinstance(target, set):
            target.update(map(hashable, items))
        else:
            target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values, in turn, to the mapping below them."""
        target = self.stack[-1]
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
