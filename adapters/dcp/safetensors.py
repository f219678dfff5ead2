"""A rank's parts in safetensors files, as DCP's ``HuggingFaceStorageWriter(save_distributed=True)`` leaves them.

    shard-<rank + 1>-model-<i>-of-<n>.safetensors

There is no index. Where a part begins in its tensor is in the header, under ``__metadata__``: ``DCP_SHARDING_INFO`` is
JSON, name to ``{"saved_offsets": […]}``. The shape of the whole tensor is recorded nowhere: it is where the last part
ends, so that a missing last rank makes tensors smaller and nothing else.
With ``enable_consolidation`` they lie in ``sharded/`` below the folder in which their tensors are put together: one
step, in which every tensor is stored twice.
Source: torch ``torch/distributed/checkpoint/hf_storage.py``, ``_hf_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.dcp.files import PARTS_BELOW, SHARD
from auditor.adapters.hugging_face.tensors import model_order
from auditor.adapters.step_file import Opened
from auditor.containers.damage import DamagedError
from auditor.containers.json_document import parse_json
from auditor.containers.safetensors_file import Record, SafetensorsFile, read_safetensors
from auditor.model.catalog import Catalog, Problem, ProblemKind, Role
from auditor.model.mesh import EVERYWHERE, Coordinate, Mesh
from auditor.model.optimizer import Export
from auditor.model.region import Box, SweepTooLarge, coverage
from auditor.storage.store import Handle, Store, join

_INFERRED = "its shape is inferred from its parts, and whether other ranks held it too is not recorded"
_UNSEEN = "the number of ranks is not recorded: that the last of them are missing would not show"
_ONE_RANK = "whether other ranks held it too is not recorded"
_INFO = "DCP_SHARDING_INFO"
_MAX_FILES = 1 << 14


def shard_files(folder: Folder) -> dict[str, int]:
    """The files of this kind by name, with their rank; those that must be among them but aren't, too."""
    found = {name: match for name in folder.files if (match := SHARD.fullmatch(name)) and int(match[1])}
    ranks = {int(match[1]): int(match[3]) for match in found.values()}
    if not ranks or sum(ranks.values()) > _MAX_FILES:
        return {name: int(match[1]) - 1 for name, match in found.items()}
    usual = max(ranks.values())
    expected = {
        f"shard-{rank:05d}-model-{number:05d}-of-{ranks.get(rank, usual):05d}.safetensors": rank - 1
        for rank in range(1, max(ranks) + 1)
        for number in range(1, ranks.get(rank, usual if rank in ranks else 1) + 1)
    }
    return expected | {name: int(match[1]) - 1 for name, match in found.items()}


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The tensors of such parts, put together in the folder above."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of those that could be read, by name."""
    order: Mapping[str, int]
    lost: frozenset[str]
    """Names of those in files that could not be read."""
    file: str
    """The index, or the file that takes its place, below the root."""
    unread: bool
    """Whether a file could not be read of which it is not known what it holds."""


class ShardReading:
    """One folder being read. ``whole``: the same, put together; ``builder``: of the step that both belong to."""

    def __init__(
        self, store: Store, folder: Folder, options: Options, whole: Consolidated | None = None,
        builder: CatalogBuilder | None = None,
    ) -> None:  # fmt: skip
        self.store, self.folder, self.names_only, self.whole = store, folder, options.names_only, whole
        self.builder = builder or CatalogBuilder()
        self.ranks = shard_files(folder)
        self.files: dict[str, Opened[SafetensorsFile]] = {}

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the folder."""
        self.add()
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if name not in self.files]
        mesh = Mesh((("rank", 1 + max(self.ranks.values(), default=0)),), ordered=True)
        built = self.builder.build(step, self.folder.path, format_name, mesh, {}, unclaimed)
        return replace(built, unseen=_UNSEEN)

    def add(self) -> None:
        """Add files and tensors; beside what was put together, each as the export of a tensor there."""
        for name in sorted(self.ranks):
            opened = self.files[name] = self._open(name)
            self.builder.file(opened.as_file(self.folder.path, "safetensors", self._place(name)))
        parts: dict[str, list[tuple[str, Record, Box]]] = {}
        for name, opened in self.files.items():
            for record, region in self._parts(name, opened):
                parts.setdefault(record.name, []).append((name, record, region))
        for order, tensor in enumerate(sorted(parts, key=model_order)):
            self._add(tensor, order, parts[tensor])
        known = all(opened.content is not None for opened in self.files.values())
        if self.whole and known and not self.names_only:
            names = self.whole.shapes.keys() | self.whole.lost
            first = join(self.folder.path, min(self.files))
            self.builder.exports += [Export("", name, first) for name in sorted(names - parts.keys())]
            lacking = () if self.whole.unread else sorted(parts.keys() - names)
            self.builder.exports += [Export("", name, self.whole.file) for name in lacking]

    def _place(self, file: str) -> Coordinate:
        """The rank that wrote a file; beside what was put together no mesh is told."""
        return EVERYWHERE if self.whole else Coordinate.of(rank=self.ranks[file])

    def _open(self, name: str) -> Opened[SafetensorsFile]:
        if name not in self.folder.files:
            return Opened[SafetensorsFile].absent(name)
        if self.names_only:
            return Opened[SafetensorsFile].unopened(self.folder, name)

        def salvage(error: DamagedError) -> SafetensorsFile | None:
            return error.content if isinstance(error.content, SafetensorsFile) else None

        return Opened[SafetensorsFile].open(self.store, self.folder, name, _read, salvage)

    def _parts(self, name: str, opened: Opened[SafetensorsFile]) -> Iterator[tuple[Record, Box]]:
        """What a file holds, each with its place in the whole tensor."""
        content = opened.content
        info = _sharding(content.metadata) if content else {}
        for record in content.records.values() if content else ():
            offsets = _offsets(info.get(record.name), len(record.shape))
            if offsets is None:
                self._problem(name, f"says of {record.name} that it begins nowhere", record.name)
            elif record.dtype is not None and record.dtype.bits >= 8:
                stop = tuple(a + n for a, n in zip(offsets, record.shape, strict=True))
                yield record, Box(offsets, stop)

    def _add(self, name: str, order: int, parts: list[tuple[str, Record, Box]]) -> None:
        first = parts[0][1]
        kept = []
        for file, record, region in parts:
            if record.dtype == first.dtype and len(record.shape) == len(first.shape):
                kept.append((file, record, region))
            else:
                self._problem(file, f"holds {name} as {record.dtype_name}{list(record.shape)}, not as others do", name)
        shape = tuple(max(region.stop[dim] for _, _, region in kept) for dim in range(len(first.shape)))
        assert first.dtype is not None
        called, doubt = name, _INFERRED
        if self.whole:
            called, order, known = (
                f"{name}@{PARTS_BELOW}",
                self.whole.order.get(name, order),
                self.whole.shapes.get(name, ()),
            )
            if len(known) == len(shape) and all(a <= b for a, b in zip(shape, known, strict=True)):
                shape, doubt = known, _ONE_RANK
            if name in self.whole.shapes:
                self.builder.exports.append(Export(called, name, join(self.folder.path, kept[0][0])))
        number = self.builder.tensor(called, Role.PARAMETER, first.dtype, shape, order, undetermined=doubt)
        for file, record, region in kept:
            if region.num_elements:
                where = self._place(file)
                self.builder.piece(number, self._file_id(file), record.begin, region, where, key=name)
        self._add_lost(number, name, shape, [region for _, _, region in kept])

    def _add_lost(self, number: int, name: str, shape: tuple[int, ...], regions: list[Box]) -> None:
        """What no file holds must be in one that is lost, if one is."""
        lost = next((file for file, opened in self.files.items() if opened.lost and not opened.content), None)
        if lost is None:
            return
        try:
            gaps = coverage(regions, shape).gaps
        except SweepTooLarge:
            return
        for gap in gaps:
            self.builder.piece(number, self._file_id(lost), 0, gap, self._place(lost), key=name)

    def _file_id(self, name: str) -> int:
        return self.builder.file_id(join(self.folder.path, name))

    def _problem(self, file: str, message: str, tensor: str) -> None:
        where = self._place(file)
        path = join(self.folder.path, file)
        self.builder.problems.append(Problem(ProblemKind.METADATA, path, message, where, tensor))


def _read(handle: Handle) -> SafetensorsFile:
    content = read_safetensors(handle)
    _sharding(content.metadata)
    return content


def _sharding(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Tensor name to what the header says of its place.

    Raises:
        DamagedError: it is no JSON dictionary.
    """
    stated = metadata.get(_INFO)
    info = parse_json(stated.encode()) if stated is not None else {}
    if not isinstance(info, dict):
        raise DamagedError(f"its {_INFO} is no dictionary")
    return info


def _offsets(stated: Any, dims: int) -> tuple[int, ...] | None:
    """Where a part begins in its tensor: at its first element, where nothing is said."""
    if stated is None:
        return (0,) * dims
    offsets = stated.get("saved_offsets") if isinstance(stated, dict) else None
    good = isinstance(offsets, list) and len(offsets) == dims
    if not good or not all(type(number) is int and 0 <= number < 1 << 62 for number in offsets or ()):
        return None
    return tuple(offsets or ())
