"""OCDBT, TensorStore's key-value database: which keys there are, and where their values lie.

    manifest.ocdbt   configuration, and the latest versions: where each one's B+tree has its root
    d/<32 hex>       values and nodes, anywhere in the file; a leaf holds small values itself

Every node is an envelope: magic (uint32, big-endian), length (uint64), version 0, compression (0 none, 1 zstd), body,
CRC-32C of all before it. Numbers are little-endian or varints of seven bits. A node names files relative to the
database; a base path in front of a file's name leads into another database below, and holds for that node's children.
Source: TensorStore, ``kvstore/ocdbt/index.rst``; its page leaves out ``manifest_kind`` behind the manifest's uuid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from auditor.containers.compression import unpack
from auditor.containers.crc32c import crc32c
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.varints import Numbers
from auditor.storage.store import Handle, ObjectMissingError, ShortReadError, Store, join, read_bytes

MANIFEST = "manifest.ocdbt"
MANIFEST_MAGIC, BTREE_MAGIC, VERSION_MAGIC = 0x0CDB3A2A, 0x0CDB20DE, 0x0CDB1234
MAX_NODE_BYTES = 256 << 20
"""Of a decoded node; Orbax makes them up to 100 MB."""
MAX_TOTAL_BYTES = 1 << 30
"""Of all decoded nodes of one database."""
MAX_HEIGHT = 16
"""Of a tree; with two children a node that is 65 536 leaves."""
MAX_KEY_BYTES = 65_535
MAX_FILES = 1 << 20
MAX_KEYS = 1 << 21
"""Of one database, whose keys are chunks and documents."""
MAX_NAME_BYTES = 256 << 20
"""Of all its names together. Each may repeat 64 KiB of the one before in a few bytes, which zstd makes fewer still."""
MAX_VERSIONS = 1 << 16
"""That one manifest lists: TensorStore's arity of version trees is at most that."""
MAX_LOST = 256
"""Faults of one database that are told; beyond it nothing new is learnt."""
_FOOTER_BYTES = 4


class Place(NamedTuple):
    """A stretch of a file of the database."""

    base: str
    """Path that is put before the files that a node there names."""
    file: str
    """Below the database, ``base`` included."""
    offset: int
    num_bytes: int


class Value(NamedTuple):
    """Where a key's value is."""

    place: Place
    """Of an inline value, the node that holds it."""
    inline: bytes | None = None
    """The value itself, where the node holds it."""


class FileFaultError(DamagedError):
    """One file of the database, not the manifest, is at fault."""

    def __init__(self, file: str, message: str) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True, slots=True)
class Database:
    """What one version of a database holds."""

    values: dict[str, Value]
    generation: int = 0
    num_versions: int = 0
    lost: tuple[FileFaultError, ...] = ()
    """Nodes that could not be read, with what is wrong; their keys are not known."""
    num_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Version:
    """One version's root."""

    generation: int
    height: int
    root: Place | None
    """None: the version holds nothing."""
    num_keys: int


@dataclass(slots=True)
class _Nodes:
    """Opens the files of one database and reads nodes from them."""

    store: Store
    path: str
    stack: ExitStack
    handles: dict[str, Handle] = field(default_factory=dict)
    num_bytes: int = 0
    num_nodes: int = 0
    num_keys: int = 0
    num_name_bytes: int = 0

    def body(self, place: Place, magic: int) -> bytes:
        """The decoded body of the node at ``place``.

        Raises:
            FileFaultError: it isn't there, or isn't that.
            LimitError: it asks for more than an honest one needs.
            StorageError: storage failed.
        """
        try:
            if place.file not in self.handles:
                self.handles[place.file] = self.stack.enter_context(self.store.open(join(self.path, place.file)))
            handle = self.handles[place.file]
            if place.num_bytes > MAX_NODE_BYTES:
                raise LimitError(f"a node of {place.num_bytes} bytes is larger than any honest one")
            if place.offset + place.num_bytes > handle.entry.num_bytes:
                raise DamagedError(
                    f"a node is said to lie at bytes {place.offset} to {place.offset + place.num_bytes}, "
                    f"it has {handle.entry.num_bytes}"
                )
            body = opened(read_bytes(handle, place.offset, place.num_bytes), magic)
        except ObjectMissingError as error:
            raise FileFaultError(place.file, "it is not there") from error
        except ShortReadError as error:
            raise FileFaultError(place.file, f"the file ends before its listed size ({error})") from error
        except DamagedError as error:
            raise FileFaultError(place.file, f"{error} (node at byte {place.offset})") from error
        self.num_nodes += 1
        self.num_bytes += len(body)
        if self.num_bytes > MAX_TOTAL_BYTES:
            raise LimitError("its nodes hold more than any honest database's")
        return body

    def take_names(self, prefix: int, numbers: Sequence[int], more: Sequence[int]) -> None:
        """Count names of a node, each of ``prefix`` and two more parts.

        Raises:
            LimitError: they are more than an honest database's, or longer.
        """
        self.num_keys += len(more)
        self.num_name_bytes += prefix * len(more) + sum(numbers) + sum(more)
        if self.num_keys > MAX_KEYS or self.num_name_bytes > MAX_NAME_BYTES:
            raise LimitError("its nodes list more names than any honest database's, or longer ones")


def opened(raw: bytes, magic: int) -> bytes:
    """The body of an envelope, its checksum held against it.

    Raises:
        DamagedError: it is no such envelope.
        UnsupportedError: it is compressed in a way that is not read here.
    """
    if len(raw) < 14 + _FOOTER_BYTES or int.from_bytes(raw[:4], "big") != magic:
        raise DamagedError("there is no node of the database where one is said to be")
    if int.from_bytes(raw[4:12], "little") != len(raw):
        raise DamagedError(f"a node states {int.from_bytes(raw[4:12], 'little')} bytes, it has {len(raw)}")
    if crc32c(raw[:-_FOOTER_BYTES]) != int.from_bytes(raw[-_FOOTER_BYTES:], "little"):
        raise DamagedError("a node's bytes don't fit its checksum (CRC-32C)")
    head = Numbers(raw, 12, len(raw) - _FOOTER_BYTES)
    version, compression = head.varint(), head.varint()
    if version != 0 or compression > 1:
        raise UnsupportedError(f"a node of version {version}, compression {compression}: neither is known")
    body = memoryview(raw)[head.at : -_FOOTER_BYTES]
    return unpack(body, MAX_NODE_BYTES) if compression else bytes(body)


def read_database(store: Store, path: str) -> Database:
    """What the latest version of the database in folder ``path`` holds.

    Raises:
        DamagedError: the manifest is broken. What is wrong with other files is in the result.
        LimitError: it asks for more than an honest one needs.
        UnsupportedError: it uses what is not known here.
        ObjectMissingError: there is no manifest.
        StorageError: storage failed.
    """
    with ExitStack() as stack:
        manifest = stack.enter_context(store.open(join(path, MANIFEST)))
        versions = read_manifest(manifest)
        if not versions:
            return Database({})
        latest = versions[-1]
        tree = _Tree(_Nodes(store, path, stack))
        if latest.root is not None:
            tree.descend(latest.root, latest.height, b"")
        return Database(tree.values, latest.generation, len(versions), tuple(tree.lost), tree.nodes.num_nodes)


def read_manifest(handle: Handle) -> list[Version]:
    """The versions that a manifest itself lists, oldest first: the latest is always among them.

    Raises:
        DamagedError, LimitError, UnsupportedError, StorageError: as :func:`read_database`.
    """
    size = handle.entry.num_bytes
    if size > MAX_NODE_BYTES:
        raise LimitError(f"it has {size} bytes, at most {MAX_NODE_BYTES} are read")
    try:
        body = opened(read_bytes(handle, 0, size), MANIFEST_MAGIC)
    except ShortReadError as error:
        raise DamagedError(f"the file ends before its listed size ({error})") from error
    numbers = Numbers(body)
    numbers.take(16)
    kind = numbers.varint()
    if kind:
        raise UnsupportedError("its versions lie in numbered manifests, which are not read")
    numbers.varint(), numbers.varint()
    numbers.take(1)
    if numbers.varint():
        numbers.take(4)
    return _versions(numbers, _files(numbers, "", nameless=True))


def _versions(numbers: Numbers, files: Sequence[tuple[str, str]]) -> list[Version]:
    count = numbers.count()
    if count > MAX_VERSIONS:
        raise LimitError(f"it lists {count} versions")
    generations = numbers.varints(count)
    heights = numbers.take(count)
    places = _places(files, numbers.varints(count), numbers.varints(count), numbers.varints(count))
    num_keys = numbers.varints(count)
    # An empty version's root is a reference to nothing: no offset fits it, and the file may have no name.
    if any(keys and not place.file for place, keys in zip(places, num_keys, strict=True)):
        raise DamagedError("it names a file outside the database: ''")
    return [
        Version(generation, height, place if keys else None, keys)
        for generation, height, place, keys in zip(generations, heights, places, num_keys, strict=True)
    ]


def _places(
    files: Sequence[tuple[str, str]], numbers: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> list[Place]:
    if numbers and max(numbers) >= len(files):
        raise DamagedError("a node refers to a file that it does not list")
    return [
        Place(*files[number], offset, length) for number, offset, length in zip(numbers, offsets, lengths, strict=True)
    ]


def _files(numbers: Numbers, base: str, *, nameless: bool = False) -> list[tuple[str, str]]:
    """Base path and full path of the files that a node lists, both below the database.

    ``nameless``: whether one may have no name.
    """
    count = numbers.count()
    if count > MAX_FILES:
        raise LimitError(f"a node lists {count} files")
    prefixes = [0, *numbers.varints(count - 1)] if count else []
    suffixes, bases = numbers.varints(count), numbers.varints(count)
    if sum(prefixes) + sum(suffixes) + len(base) * count > MAX_NAME_BYTES:
        raise LimitError("a node's files have longer names than any honest ones")
    found: list[tuple[str, str]] = []
    for path, length in zip(_joined(numbers, prefixes, suffixes), bases, strict=True):
        if length > len(path):
            raise DamagedError("the base path of a file is longer than its name")
        name = "" if nameless and not path else base + _inside(_text(path))
        found.append((base + _text(path[:length]), name))
    return found


def _joined(numbers: Numbers, prefixes: Sequence[int], suffixes: Sequence[int]) -> Iterator[bytes]:
    """Strings of which each begins as the one before."""
    last = b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(last) or prefix + suffix > MAX_KEY_BYTES:
            raise DamagedError("a node's names don't fit together")
        last = last[:prefix] + numbers.take(suffix)
        yield last


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedError("a name in it is not UTF-8") from error


def _inside(path: str) -> str:
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise DamagedError(f"it names a file outside the database: {path[:200]!r}")
    return path


@dataclass(slots=True)
class _Tree:
    """A B+tree being walked, in the order of its keys."""

    nodes: _Nodes
    values: dict[str, Value] = field(default_factory=dict)
    lost: list[FileFaultError] = field(default_factory=list)
    seen: set[Place] = field(default_factory=set)
    """Nodes that were read; one that leads back to itself, or is everyone's child, would be read for ever."""

    def descend(self, place: Place, height: int, prefix: bytes) -> None:
        """Add what lies below one node; what can't be read is noted."""
        if height > MAX_HEIGHT:
            raise LimitError(f"its tree is {height} nodes high")
        try:
            if place in self.seen:
                raise FileFaultError(place.file, f"the node at byte {place.offset} is met twice in one tree")
            self.seen.add(place)
            numbers = Numbers(self.nodes.body(place, BTREE_MAGIC))
            if numbers.take(1)[0] != height:
                raise FileFaultError(place.file, f"the node at byte {place.offset} has another height than is said")
            children = list(self.entries(numbers, place, height, prefix))
        except FileFaultError as error:
            self.lost.append(error)
            return
        except (LimitError, UnsupportedError):
            raise
        except DamagedError as error:
            self.lost.append(FileFaultError(place.file, f"{error} (node at byte {place.offset})"))
            return
        for child, begins in children:
            if len(self.lost) >= MAX_LOST:
                return
            self.descend(child, height - 1, begins)

    def entries(self, numbers: Numbers, place: Place, height: int, prefix: bytes) -> Iterator[tuple[Place, bytes]]:
        """The children of an inner node with the prefix of their keys; of a leaf none, its values are added."""
        files = _files(numbers, place.base)
        count = numbers.count()
        if not count:
            raise DamagedError("a node is empty")
        if count > MAX_KEYS:
            raise LimitError(f"a node lists {count} names")
        prefixes, suffixes = [0, *numbers.varints(count - 1)], numbers.varints(count)
        common = numbers.varints(count) if height else []
        self.nodes.take_names(len(prefix), prefixes, suffixes)
        keys = list(_joined(numbers, prefixes, suffixes))
        if height:
            places = _places(files, numbers.varints(count), numbers.varints(count), numbers.varints(count))
            if any(length > len(key) for key, length in zip(keys, common, strict=True)):
                raise DamagedError("a node's names don't fit together")
            yield from ((at, prefix + key[:n]) for at, key, n in zip(places, keys, common, strict=True))
            return
        self.add(numbers, files, place, [prefix + key for key in keys])

    def add(self, numbers: Numbers, files: Sequence[tuple[str, str]], node: Place, keys: Sequence[bytes]) -> None:
        """Add the values of a leaf."""
        lengths, kinds = numbers.varints(len(keys)), numbers.varints(len(keys))
        if kinds and max(kinds) > 1:
            raise DamagedError("a value is neither in its node nor in a file")
        apart = [length for length, kind in zip(lengths, kinds, strict=True) if kind]
        places = iter(_places(files, numbers.varints(len(apart)), numbers.varints(len(apart)), apart))
        found: dict[str, Value] = {}
        for key, length, kind in zip(keys, lengths, kinds, strict=True):
            found[_text(key)] = Value(next(places)) if kind else Value(node, numbers.take(length))
        self.values |= found
