"""The data files of ``torch.distributed.checkpoint``: items one after another, each a whole ``torch.save`` file.

    [item][item]…        no header, no padding, no directory: only ``.metadata`` says where each begins

Items are small and many, and each has its own directory at its end. What lies between the weights of two neighbours
(the end of one item, the beginning of the next) is read at once; weights are not.

An item that went through zstd (``stream.zstd/1``) is one frame, whose content is such a file. Of a large one only as
much is decoded as holds the pickle and the first of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from auditor.containers.compression import ZstdStream, read_all
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.dcp_forms import Forms
from auditor.containers.encoded import InMemory
from auditor.containers.layers import Stored
from auditor.containers.torch_zip import StoredTensor, read_number, read_torch_file, tensor_at
from auditor.containers.zip_directory import archive_before
from auditor.model.encoding import BEGINNING, PLAIN, ZSTD
from auditor.storage.store import Entry, Handle, ShortReadError

MAX_READ = 4 << 20
"""Bytes that are read at once."""
SMALL_ITEM = 1 << 16
"""An item without weights that is not longer is read as a whole; a compressed one, whatever it holds."""
HEAD_BYTES = 1 << 16
"""Content of a compressed item in which its first weight lies: a pickle of a tensor takes about a thousand."""
MAX_OBJECT_BYTES = 16 << 20
"""Content of a compressed item that holds no tensor."""
MAX_EXPANSION, MAX_DECODED_BYTES = 64, 256 << 20
"""Content of all such items of a file: so many times the file's bytes and one such item besides, and no more."""
CODECS = {(): PLAIN, ("stream.zstd/1",): ZSTD}
"""Descriptors of stream extensions to what undoes them. Source: torch ``distributed/checkpoint/_extension.py``."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a file, as ``.metadata`` has it."""

    offset: int
    length: int
    num_weight_bytes: int
    """Bytes of its tensor, which are not read; 0 where there is none or it is metadata itself."""
    codec: str = PLAIN

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Window:
    """A range of an open file as if it were a file."""

    inner: Handle
    start: int
    num_bytes: int

    @property
    def entry(self) -> Entry:
        """The file's name, the range's size."""
        return Entry(self.inner.entry.name, False, self.num_bytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``."""
        if offset < 0 or offset + len(buffer) > self.num_bytes:
            raise ShortReadError(f"{self.inner.entry.name}: its part ends at byte {self.num_bytes}")
        self.inner.read_into(self.start + offset, buffer)


class _Ahead:
    """An open file of which some stretches are in memory."""

    def __init__(self, inner: Handle) -> None:
        self.inner = inner
        self.entry = inner.entry
        self.room = min(MAX_OBJECT_BYTES + MAX_EXPANSION * self.entry.num_bytes, MAX_DECODED_BYTES)
        """Bytes of objects that may still be decoded."""
        self._held: list[tuple[int, int, memoryview]] = []

    def hold(self, start: int, stop: int) -> None:
        """Read a stretch; of those before it only the last is kept."""
        buffer = memoryview(bytearray(stop - start))
        self.inner.read_into(start, buffer)
        self._held = [*self._held[-1:], (start, stop, buffer)]

    def held(self, start: int, stop: int) -> bytes:
        """A range that is in memory; empty where it is not."""
        for low, high, content in self._held:
            if low <= start and stop <= high:
                return bytes(content[start - low : stop - low])
        return b""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``, from memory where it is there."""
        end = offset + len(buffer)
        for start, stop, held in self._held:
            if start <= offset and end <= stop:
                buffer[:] = held[offset - start : end - start]
                return
        self.inner.read_into(offset, buffer)


@dataclass(frozen=True, slots=True)
class Found:
    """What one item holds."""

    content: object
    """The saved object; a tensor's offset counts from the file's beginning, of a compressed item from its content's."""
    opaque: Mapping[str, int]
    number: float | None = None
    """Of a tensor of one element that was read as metadata, its value."""
    num_bytes: int = 0
    """Of a compressed item: bytes of its content, as far as they are known to be there."""
    codec: str = PLAIN


Result = Found | DamagedError | UnsupportedError


def read_items(handle: Handle, items: Sequence[Item], forms: Forms | None = None) -> Iterator[Result]:
    """What each item holds, or what is wrong with it. ``items`` in order of their offsets, within the file.

    ``forms``: what was learned of items of other files by the same writer.

    Raises:
        StorageError: storage failed.
    """
    ahead, held, forms = _Ahead(handle), 0, forms or Forms()
    first = next((at for at, item in enumerate(items) if item.num_weight_bytes), len(items))
    stretches = _stretches(items if forms.head else items[:first], forms)
    for position, item in enumerate(items):
        while held < item.stop and (stretch := next(stretches, None)) is not None:
            ahead.hold(*stretch)
            held = stretch[1]
        known = forms.head
        read = _read_compressed if item.codec else _read
        found = _read_as_before(ahead, item, forms) or read(ahead, item)
        yield found
        if item.num_weight_bytes and not item.codec and isinstance(found, Found):
            _learn(ahead, item, found, forms)
        if forms.head != known:
            # The layout of one item tells that of those that the same writer wrote after it.
            stretches, held = _stretches(items[position + 1 :], forms), item.stop


def _read_as_before(ahead: _Ahead, item: Item, forms: Forms) -> Found | None:
    """An item of a known form, with the least effort; None where it is none such."""
    form = forms.get(item.length, item.num_weight_bytes) if item.num_weight_bytes and not item.codec else None
    if form is None:
        return None
    start = item.offset + form.head
    head, tail = ahead.held(item.offset, start), ahead.held(start + item.num_weight_bytes, item.stop)
    tensor = form.tensor(head, tail) if head and tail else None
    if tensor is None:
        return None
    offset = tensor.offset + item.offset
    return Found(StoredTensor(tensor.dtype, tensor.shape, tensor.strides, offset, tensor.storage), {})


def _learn(ahead: _Ahead, item: Item, found: Found, forms: Forms) -> None:
    if isinstance(found.content, StoredTensor) and forms.get(item.length, item.num_weight_bytes) is None:
        tensor = replace(found.content, offset=found.content.offset - item.offset)
        weights = found.content.offset, found.content.offset + item.num_weight_bytes
        for start, stop in ((item.offset, weights[0]), (weights[1], item.stop)):
            if start < stop <= start + SMALL_ITEM and not ahead.held(start, stop):
                ahead.hold(start, stop)
        forms.learn(Window(ahead, item.offset, item.length), item.num_weight_bytes, tensor)


def _stretches(items: Sequence[Item], forms: Forms) -> Iterator[tuple[int, int]]:
    """Ranges that hold all but the weights, in order; neighbouring ones are one."""
    start = stop = -1
    for item in items:
        for low, high in _wanted(item, forms):
            if low != stop or high - start > MAX_READ:
                if stop > start >= 0:
                    yield start, stop
                start = low
            stop = high
    if stop > start >= 0:
        yield start, stop


def _wanted(item: Item, forms: Forms) -> Iterator[tuple[int, int]]:
    weights = item.num_weight_bytes
    head = forms.head_of(item.length, weights)
    if not weights or item.codec:
        if item.length <= SMALL_ITEM:
            yield item.offset, item.stop
    elif head + weights < item.length <= head + weights + SMALL_ITEM:
        yield item.offset, item.offset + head
        yield item.offset + head + weights, item.stop


def _read(handle: Handle, item: Item) -> Result:
    try:
        found = read_torch_file(Window(handle, item.offset, item.length))
    except (DamagedError, UnsupportedError) as error:
        return error
    if not isinstance(found.tree, StoredTensor):
        return Found(found.tree, found.opaque)
    moved = replace(found.tree, offset=found.tree.offset + item.offset)
    metadata = not item.num_weight_bytes and moved.num_elements == 1
    return Found(moved, found.opaque, read_number(handle, moved) if metadata else None)


def _read_compressed(handle: _Ahead, item: Item) -> Result:
    """An item of which the content has to be decoded. A large tensor's is known up to its last weight alone."""
    try:
        stream = ZstdStream(Stored(handle, item.offset, item.length), SMALL_ITEM)
        content = stream.read(HEAD_BYTES + 1)
        if len(content) > HEAD_BYTES and item.num_weight_bytes:
            tensor = tensor_at(content)
            return Found(tensor, {}, None, tensor.offset + tensor.num_spanned, f"{BEGINNING}/{ZSTD}")
        content += _rest(stream, handle, len(content))
    except (DamagedError, UnsupportedError) as error:
        return error
    size = len(content)
    plain = InMemory(Entry(handle.entry.name, False, size), memoryview(content))
    found = _read(plain, Item(0, size, item.num_weight_bytes))
    return replace(found, num_bytes=size, codec=ZSTD) if isinstance(found, Found) else found


def _rest(stream: ZstdStream, file: _Ahead, num_bytes: int) -> bytes:
    """What follows the first bytes of an item, as far as there is room for it.

    Raises:
        DamagedError: the frame is broken.
        UnsupportedError: there is no room for it. Honest objects are small; what they expand to costs time.
    """
    limit = max(0, min(MAX_OBJECT_BYTES, file.room) - num_bytes)
    try:
        found = read_all(stream, limit)
    except LimitError as error:
        file.room -= limit
        raise UnsupportedError(f"it is an object, of which so much is not decoded: {error}") from error
    file.room -= len(found)
    return found


def items_from_the_end(handle: Handle) -> Iterator[Window]:
    """The items of a file, last one first, told by the items themselves.

    Raises:
        DamagedError: what lies there is no whole item.
        StorageError: storage failed.
    """
    stop = handle.entry.num_bytes
    while stop > 0:
        start = archive_before(Window(handle, 0, stop))
        yield Window(handle, start, stop - start)
        stop = start
