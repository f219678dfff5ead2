"""What an index of ``torch.distributed.checkpoint`` says of its data files, and what those hold."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.step_file import Opened
from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.dcp_columns import DcpMetadata, Described
from auditor.containers.dcp_forms import Forms
from auditor.containers.dcp_items import CODECS, Found, Item, read_items
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import FileState
from auditor.model.dtype import DType
from auditor.model.encoding import Encoding, EncodingBuilder
from auditor.storage.store import Handle, Store

MAX_FLAWS = 4
MAX_WRONG = 16
"""Items of a file that are not what they should be, after which the rest of them are not opened."""
COUNTERS = frozenset({"step"})
"""Last parts of the keys of counters: their values are metadata."""


@dataclass(slots=True)
class Contents:
    """What was learned of the items of one index by opening them."""

    offset: array[int]
    """By row: the first byte of the item's tensor in its file, or in the file's content where it is compressed; where
    the item begins, if it was not opened."""
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rows whose tensor does not lie in C order."""
    values: dict[int, Any] = field(default_factory=dict)
    """Rows of objects and counters to what they hold."""
    unknown: set[int] = field(default_factory=set)
    """Rows of tensors in a form that is not known."""
    dtypes: dict[int, DType] = field(default_factory=dict)
    """Rows of counters that are tensors."""
    forms: Forms = field(default_factory=Forms)
    """What the items that were opened have in common."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """What an index says of a data file that can't be."""

    message: str
    overlaps: bool
    """Whether two items have the same bytes; else some bytes are of none."""


@dataclass(slots=True)
class DataFile:
    """One data file that an index names."""

    name: str
    rows: list[int]
    """Of the index, in order of their place in the file."""
    num_bytes: int = 0
    """Where the last of its items ends."""
    flaws: list[Flaw] = field(default_factory=list)
    """What the index says of it that can't be."""
    transforms: frozenset[tuple[str, ...]] = frozenset()
    """What its items went through; none of them where all lie as they are."""
    encoding: Encoding | None = None
    opaque: Counter[str] = field(default_factory=Counter)


class Expected:
    """What an index says of each row: which chunk of which tensor."""

    def __init__(self, index: DcpMetadata) -> None:
        self.index = index

    def tensor(self, row: int) -> Described | None:
        """The tensor of which the item is a part."""
        return self.index.tensors.get(self.index.names[self.index.item_name[row]])

    def sizes(self, row: int) -> tuple[int, ...] | None:
        """The shape of the chunk that the item holds; None where the index describes no such chunk."""
        tensor, chunk = self.tensor(row), self.index.item_chunk[row]
        return None if tensor is None or chunk < 0 else self.index.chunk(chunk, len(tensor.shape))[1]


def data_files(index: DcpMetadata) -> dict[str, DataFile]:
    """The data files that an index names; items that overlap or leave holes are among a file's flaws."""
    rows: dict[int, list[int]] = {}
    for row, file in enumerate(index.item_file):
        rows.setdefault(file, []).append(row)
    found: dict[str, DataFile] = {}
    for number, own in rows.items():
        own.sort(key=lambda row: (index.item_offset[row], index.item_length[row]))
        name = index.files[number]
        transforms = frozenset(index.transforms[index.item_transform[row]] for row in own) - {()}
        found[name] = DataFile(name, own, *_extent(index, name, own), transforms)
    return found


def _extent(index: DcpMetadata, name: str, rows: list[int]) -> tuple[int, list[Flaw]]:
    """Where the last of a file's items ends, and what is wrong with their places."""
    end, flaws = 0, list[Flaw]()
    for row in rows:
        start = index.item_offset[row]
        if start != end and len(flaws) < MAX_FLAWS:
            gap, overlap = f"leaves bytes {end} to {start} of {name} to no item", f"places two items at byte {start} of"
            flaws.append(Flaw(gap, False) if start > end else Flaw(f"{overlap} {name}", True))
        end = max(end, start + index.item_length[row])
    return end, flaws


def weight_bytes(expected: Expected, row: int) -> int:
    """Bytes of an item's tensor; 0 where it is metadata itself."""
    tensor, sizes = expected.tensor(row), expected.sizes(row)
    if tensor is None or tensor.dtype is None or sizes is None:
        return 0
    head, _, last = tensor.name.rpartition(".")
    if not tensor.shape and (last in COUNTERS or "param_groups." in head):
        return 0
    return tensor.dtype.num_bytes(math.prod(sizes))


def item_of(expected: Expected, row: int) -> Item:
    """An item as its index has it."""
    index = expected.index
    codec = CODECS.get(index.transforms[index.item_transform[row]], "")
    return Item(index.item_offset[row], index.item_length[row], weight_bytes(expected, row), codec)


def open_data(
    store: Store, folder: Folder, index: DcpMetadata, file: DataFile, contents: Contents, *, names_only: bool
) -> Opened[None]:
    """A data file, with all its items opened; what is wrong with it is in its state."""
    if file.name not in folder.files:
        what = "an item" if len(file.rows) == 1 else f"{len(file.rows)} items"
        return Opened(file.name, FileState.MISSING, None, f"it is not there; the index places {what} in it")
    if unknown := [transform for extension in sorted(file.transforms - CODECS.keys()) for transform in extension]:
        how = f"its items went through extensions that are not known here: {', '.join(unknown)[:200]}"
        entry = folder.files[file.name]
        wrong = _wrong_size(file, entry.num_bytes)
        return Opened(file.name, FileState.DAMAGED if wrong else FileState.UNREADABLE, None, wrong or how, entry)
    if names_only:
        wrong = _wrong_size(file, folder.files[file.name].num_bytes)
        state = FileState.DAMAGED if wrong else FileState.PRESENT
        return Opened(file.name, state, None, wrong, folder.files[file.name])
    return Opened.open(store, folder, file.name, lambda handle: _read(handle, index, file, contents))


def _wrong_size(file: DataFile, num_bytes: int) -> str:
    """What is wrong where a file is not as long as its items say."""
    if num_bytes < file.num_bytes:
        return f"it has {num_bytes} bytes, its items need {file.num_bytes}: cut short, or of another save"
    if num_bytes > file.num_bytes:
        return f"{num_bytes - file.num_bytes} bytes follow its last item: of another save, or written to twice"
    return ""


def _read(handle: Handle, index: DcpMetadata, file: DataFile, contents: Contents) -> None:
    """Open all items.

    Raises:
        DamagedError: some are no whole items, or others than the index says.
        UnsupportedError: some use what is not known here.
    """
    if wrong := _wrong_size(file, handle.entry.num_bytes):
        raise DamagedError(wrong)
    expected = Expected(index)
    items = [item_of(expected, row) for row in file.rows]
    content = EncodingBuilder()
    wrongs: list[str] = []
    unknown: list[str] = []
    for row, found in zip(file.rows, read_items(handle, items, contents.forms), strict=False):
        name = index.names[index.item_name[row]]
        if isinstance(found, UnsupportedError):
            unknown.append(f"the item of {name}: {found}")
            continue
        wrong = str(found) if isinstance(found, DamagedError) else _misfit(expected, row, found)
        if wrong:
            wrongs.append(f"the item of {name} at byte {index.item_offset[row]}: {wrong}")
            if len(wrongs) == MAX_WRONG:
                break
        elif isinstance(found, Found):
            _take(row, found, contents, file)
            if file.transforms:
                _place(row, found, contents, index, content)
            if isinstance(found.content, Opaque) and index.item_chunk[row] >= 0:
                contents.unknown.add(row)
    file.encoding = content.build() if file.transforms else None
    if wrongs:
        or_more = " or more" if len(wrongs) == MAX_WRONG else ""
        more = f" (and {len(wrongs) - 1}{or_more} of {len(items)} besides)" if len(wrongs) > 1 else ""
        raise DamagedError(f"{wrongs[0]}{more}")
    if unknown:
        raise UnsupportedError(unknown[0])


def _misfit(expected: Expected, row: int, found: Found) -> str:
    """What an item holds instead of what the index says."""
    tensor, held = expected.tensor(row), found.content
    if expected.index.corner(row) is None or tensor is None:
        return ""
    sizes = expected.sizes(row)
    if sizes is None or isinstance(held, Opaque):
        return ""
    said = f"{tensor.dtype_name}{list(sizes)}"
    if not isinstance(held, StoredTensor):
        return f"it holds no tensor, the index says {said}"
    if held.shape != sizes or (tensor.dtype is not None and held.dtype != tensor.dtype):
        return f"it holds {held.dtype.name}{list(held.shape)}, the index says {said}: of another save, or damaged"
    return ""


def _place(row: int, found: Found, contents: Contents, index: DcpMetadata, content: EncodingBuilder) -> None:
    """Where an item lies in the content of its file, of which some items are compressed."""
    offset, length = index.item_offset[row], index.item_length[row]
    start = content.add(found.num_bytes if found.codec else length, found.codec, offset, length)
    if isinstance(found.content, StoredTensor):
        contents.offset[row] += start if found.codec else start - offset


def _take(row: int, found: Found, contents: Contents, file: DataFile) -> None:
    file.opaque.update(found.opaque)
    held = found.content
    if isinstance(held, StoredTensor):
        contents.offset[row] = held.offset
        if not held.contiguous:
            contents.strides[row] = held.strides
        if found.number is not None:
            contents.values[row], contents.dtypes[row] = found.number, held.dtype
    else:
        contents.values[row] = held
