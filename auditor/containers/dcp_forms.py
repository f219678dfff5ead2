"""What items of ``torch.distributed.checkpoint`` that one writer wrote have in common, so that most need no parsing.

A checkpoint has a million items, each a zip file with a directory of its own. Those of tensors of the same size are the
same but for their weights, the numbers in their pickle and checksums. Of such a kind one is read as a zip file is;
where another is equal to it but for those bytes, its members lie where they lay in the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from auditor.containers.torch_zip import StoredTensor, plain_reader
from auditor.containers.zip_directory import Member, checksum_fields, read_directory
from auditor.storage.store import Handle, read_bytes

MAX_FORMS = 1024
"""Kinds that are remembered."""
MAX_FORM_BYTES = 1 << 16
"""Of an item, without its weights."""


@dataclass(slots=True)
class Form:
    """Items of one length with weights of one length. Without their weights they are a head and a tail."""

    head: int
    """Bytes before the weights."""
    mask: int
    """Bits that are the same in all of them, of head and tail as one little-endian number."""
    expected: int
    first: int
    last: int
    """Where the pickle lies."""
    read: Callable[[bytes], StoredTensor | None]
    """The tensor of a pickle; None where it is no plain one."""
    _before: tuple[bytes, StoredTensor | None] = (b"", None)
    """The last pickle and its tensor, in one: several threads may read."""

    def tensor(self, head: bytes, tail: bytes) -> StoredTensor | None:
        """The tensor of an item, its offset from the item's beginning; None where the item has another form."""
        if int.from_bytes(head + tail, "little") & self.mask != self.expected:
            return None
        pickled = head[self.first : self.last]
        before = self._before
        if before[0] != pickled:
            before = self._before = pickled, self.read(pickled)
        return before[1]


@dataclass(slots=True)
class Forms:
    """The forms of one checkpoint's items."""

    head: int = 0
    """Bytes before the weights of the tensor that was read first; 0 before one was."""
    _known: dict[tuple[int, int], Form | None] = field(default_factory=dict)

    def get(self, length: int, num_weight_bytes: int) -> Form | None:
        """The form of items of these lengths, if one was learned."""
        return self._known.get((length, num_weight_bytes))

    def head_of(self, length: int, num_weight_bytes: int) -> int:
        """Where the weights of such an item are likely to begin."""
        form = self._known.get((length, num_weight_bytes))
        return form.head if form else self.head

    def learn(self, item: Handle, num_weight_bytes: int, tensor: StoredTensor) -> None:
        """Learn from an item that was read as a whole, and was found to hold ``tensor``.

        Raises:
            DamagedError, StorageError: as reading its directory.
        """
        self.head = self.head or tensor.offset
        key = item.entry.num_bytes, num_weight_bytes
        if key not in self._known and len(self._known) < MAX_FORMS:
            self._known[key] = _form_of(item, num_weight_bytes)


def _form_of(item: Handle, num_weight_bytes: int) -> Form | None:
    members = read_directory(item)
    pickled = next(name for name in members if name.endswith("/data.pkl"))
    root = pickled.removesuffix("/data.pkl")
    data = [member for name, member in members.items() if name.startswith(f"{root}/data/")]
    size = item.entry.num_bytes
    if len(data) != 1 or data[0].num_bytes != num_weight_bytes or size - num_weight_bytes > MAX_FORM_BYTES:
        return None
    head = data[0].offset
    resumed = head + num_weight_bytes
    content = read_bytes(item, 0, head) + read_bytes(item, resumed, size - resumed)
    mask = bytearray(b"\xff" * len(content))
    for start, stop in _varying(item, root, members):
        if start != head:
            at = start if start < head else start - num_weight_bytes
            mask[at : at + stop - start] = bytes(stop - start)
    bits, own = int.from_bytes(mask, "little"), members[pickled]
    expected = int.from_bytes(content, "little") & bits
    return Form(head, bits, expected, own.offset, own.offset + own.num_bytes, plain_reader(root, members))


def _varying(item: Handle, root: str, members: Mapping[str, Member]) -> list[tuple[int, int]]:
    """What may differ between items of one form: what members hold, but for the order of bytes, and checksums."""
    held = [(m.offset, m.offset + m.num_bytes) for name, m in members.items() if name != f"{root}/byteorder"]
    return [*held, *((at, at + 4) for at in checksum_fields(item, members))]
