"""The state of the second pass over a pickle, and the inert records that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.containers.damage import LimitError
from auditor.containers.pickle_limits import LIMITS, Limits, MemoryLimitError


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a module, not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Attribute(Global):
    """What a class has under a name: a class within it, or a member of an enumeration."""


_GETATTR = ("builtins.getattr", "__builtin__.getattr")


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class that is not known here: what would have made it. Equal only to itself."""

    maker: object
    arguments: tuple[Any, ...] = ()
    state: object = None
    items: Sequence[Any] = ()
    """What was appended or set on it; pairs for a mapping."""

    def attributes(self) -> dict[str, Any]:
        """Its state, where that is the usual dictionary of attributes; else empty."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return {k: v for k, v in state.items() if isinstance(k, str)} if isinstance(state, dict) else {}

    def add(self, items: Iterable[Any]) -> None:
        """Keep what is appended or set on it."""
        # Most have no items: a list for each would be half of their size.
        if isinstance(self.items, list):
            self.items.extend(items)
        else:
            self.items = [*items]


Builder = Callable[[tuple[Any, ...]], Any]
"""Makes a known inert value from the arguments of a call; raises TypeError or ValueError on wrong ones."""

MAX_KEY_ELEMENTS = 256
"""Elements of a tuple or frozen set used as a key: it is hashed or compared each time, so a huge one used often would
cost unbounded time."""
MAX_KEY_COLLISIONS = 128
"""Keys of one container with one hash."""
_KEPT_HASHES = 1 << 61
"""Whole numbers nearer to zero have hashes of their own; the hashes of text can't be foreseen by who writes a file."""
_SEVERAL = 1000
_NAME, _MADE, _HASHED, _ELEMENT = 256, 192, 134, 16
"""Bytes of a new name and its count, of what a builder makes, of an element in a hash table that grows, and elsewhere;
an unknown object's bytes are counted by the first pass."""


def hashable(key: Any) -> Any:
    """``key`` itself, where hashing it and comparing it with others is safe.

    Both recurse in C without a check and without a memory of what they met: a tuple nested a million deep would end the
    process, one that holds another twice, and that another, would take exponential time.

    Raises:
        LimitError: it is nested deeper than any key of a checkpoint.
    """
    if type(key) is str:
        return key
    layer = [key]
    for _ in range(8):
        layer = [item for outer in layer if isinstance(outer, (tuple, frozenset)) for item in outer]
        if not layer:
            return key
        if len(layer) > MAX_KEY_ELEMENTS:
            break
    raise LimitError("its pickle uses a deeply nested or huge tuple or set as a key")


class KeyGuard:
    """Lets keys through to the containers that they are looked up in, where that is safe."""

    def __init__(self, charge: Callable[[int], None] = lambda num_bytes: None) -> None:
        """``charge``: counts the bytes of memory that this takes."""
        self._charge = charge
        self._hashes: Counter[tuple[int, int]] = Counter()
        """By container and hash, for keys whose hashes may have been chosen."""

    def keys(self, found: Iterable[Any], container: object = None) -> Iterator[Any]:
        """The keys themselves. Thousands with one hash would take quadratic time.

        Raises:
            LimitError: a key is nested too deeply, or too many of one container have one hash.
        """
        for key in found:
            if type(key) is not str:
                hashable(key)
                if isinstance(key, (tuple, frozenset)) or (isinstance(key, int) and abs(key) >= _KEPT_HASHES):
                    self._count(id(container), hash(key))
            yield key

    def _count(self, container: int, number: int) -> None:
        self._charge(_NAME)
        self._hashes[container, number] += 1
        if self._hashes[container, number] > MAX_KEY_COLLISIONS:
            raise LimitError(f"its pickle uses more than {MAX_KEY_COLLISIONS} keys with one hash")


class PickleStack:
    """The machine's state, and what its dangerous instructions do instead.

    The first pass has checked every length, mark and memo entry.
    """

    def __init__(
        self,
        builders: Mapping[str, Builder],
        persistent: Callable[[object], object] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        """``builders``: ``module.name`` to builder. ``persistent``: what a persistent id stands for."""
        self._builders, self._persistent, self.limits = builders, persistent, limits
        self.opaque: Counter[str] = Counter()
        """Calls and objects of unknown classes, counted by name."""
        self.num_memory = 0
        """Bytes that the pickle and its records take at most."""
        self._work = 0
        self.guard = KeyGuard(self.charge)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        """Places on the stack."""
        self.memo: list[Any] = []
        """Entries by index, None where nothing fetches them."""
        self.far: dict[int, Any] = {}
        """Entries whose indexes leave holes."""
        self.fetched, self.fetched_far = b"", frozenset[int]()

    # The stack and the memo

    def charge(self, num_bytes: int) -> None:
        """Count memory that the first pass could not know of."""
        self.num_memory += num_bytes
        if self.num_memory > self.limits.num_memory:
            raise MemoryLimitError(self.limits.num_memory)

    def count_work(self, num_elements: int) -> None:
        """Count what calls look at: one large argument in many small calls would cost unbounded time."""
        self._work += num_elements
        if self._work > self.limits.num_copied:
            raise LimitError(f"its pickle makes calls with more than {self.limits.num_copied} elements in all")

    def check_name(self, module: str, name: str) -> None:
        """Refuse the name of a global that is longer than any."""
        if max(len(module), len(name)) > self.limits.num_name_bytes:
            raise LimitError(f"its pickle holds a global of more than {self.limits.num_name_bytes} characters")

    def pop_to_mark(self) -> list[Any]:
        """Take everything above the last mark off the stack, and the mark."""
        stack, at = self.stack, self.marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    def pop(self) -> None:
        """Take the top off the stack, be it a value or a mark."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def store(self, index: int) -> None:
        """Remember the top of the stack, if it is ever fetched."""
        memo, top = self.memo, self.stack[-1]
        if index < len(memo):
            memo[index] = top if self.fetched[index] else None
        elif index == len(memo):
            self.far.pop(index, None)
            memo.append(top if self.fetched[index] else None)
        else:
            self.far[index] = top if index in self.fetched_far else None

    def fetch(self, index: int) -> None:
        """Put a memo entry on the stack."""
        self.stack.append(self.memo[index] if index < len(self.memo) else self.far[index])

    # What would run code in a real unpickler

    def call(self, maker: object, arguments: object) -> None:
        """Make a known value, or an :class:`Opaque` that says what would have been called."""
        if not isinstance(arguments, tuple):
            raise TypeError("a call without an argument tuple")
        elements = text = 0
        for argument in arguments:
            if isinstance(argument, (str, bytes)):
                text += len(argument)
            elif isinstance(argument, (tuple, list, dict, set, frozenset)):
                elements += len(argument)
        self.count_work(text + elements)
        name = f"{maker.module}.{maker.name}" if isinstance(maker, Global) else "an object that is no class"
        if name in _GETATTR and (attribute := self._attribute(arguments)):
            self.stack.append(attribute)
            return
        if isinstance(maker, Attribute) and not _is_class_name(maker.name):
            self.opaque[_GETATTR[0]] += 1  # A method, perhaps: what it does is not told by its name.
        builder = self._builders.get(name)
        if builder is not None:
            self.charge(_MADE + text + (_HASHED if elements > _SEVERAL else _ELEMENT) * elements)
            made = builder(arguments)
            if elements <= _SEVERAL and isinstance(made, (set, dict)):
                self.charge(_HASHED * len(made))
            self.stack.append(made)
            return
        if name not in self.opaque:
            self.charge(_NAME + 4 * len(name))
        self.opaque[name] += 1
        self.stack.append(Opaque(maker, arguments))

    def _attribute(self, arguments: tuple[Any, ...]) -> Attribute | None:
        """What ``getattr`` takes from a class; None of anything else.

        Protocol 2 names a class within a class so (torch's ``ShardedTensor.ProcessGroupState``), and Python 3.11.0 to
        3.11.3 the members of enumerations. Taking it runs nothing; calling it may.
        """
        if len(arguments) != 2 or not isinstance(arguments[0], Global) or not isinstance(arguments[1], str):
            return None
        owner, name = arguments
        if not _is_class_name(owner.name) or not name.isidentifier() or name.startswith("_"):
            return None
        full = f"{owner.name}.{name}"
        self.check_name(owner.module, full)
        self.charge(_NAME + 4 * len(full))
        return Attribute(owner.module, full)

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
            target.add(items)
        elif isinstance(target, set):
            target.update(self.guard.keys(items, target))
        else:
            target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values, in turn, to the mapping below them."""
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.add(zip(map(hashable, items[::2]), items[1::2], strict=True))
        elif isinstance(target, dict):
            target.update(zip(self.guard.keys(items[::2], target), items[1::2], strict=True))
        else:
            raise TypeError("items set on something that is no mapping")

    def set_item(self, key: object, value: object) -> None:
        """Add one key and its value to the mapping below them."""
        target = self.stack[-1]
        if isinstance(target, dict) and type(key) is str:
            target[key] = value
        else:
            self.set_items([key, value])

    def resolve(self, persistent_id: object) -> None:
        """Put on the stack what a persistent id stands for."""
        if self._persistent is None:
            raise TypeError("a persistent id where none are expected")
        self.stack.append(self._persistent(persistent_id))


def _is_class_name(name: str) -> bool:
    """Whether a name is written as classes are."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()
