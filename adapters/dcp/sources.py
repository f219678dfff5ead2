"""The indexes of a checkpoint by ``torch.distributed.checkpoint``, each with the data files that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from auditor.adapters.dcp.data import Contents, DataFile, data_files
from auditor.adapters.dcp.files import TEMPORARY, Part, is_plain_name, rank_of
from auditor.adapters.step_file import Opened
from auditor.containers.dcp_columns import DcpMetadata, Described
from auditor.containers.dcp_metadata import read_dcp_metadata
from auditor.model.catalog import FileState
from auditor.model.mesh import EVERYWHERE, Coordinate
from auditor.model.region import Box
from auditor.storage.store import Store, join


def coordinate_of(name: str) -> Coordinate:
    """The rank that wrote a file."""
    rank = rank_of(name)
    return EVERYWHERE if rank is None else Coordinate.of(rank=rank)


@dataclass
class Source:
    """One index, and what was found by it."""

    part: Part
    opened: Opened[DcpMetadata]
    index: DcpMetadata
    files: Mapping[str, DataFile]
    contents: Contents

    @property
    def coordinate(self) -> Coordinate:
        """The rank whose index it is; everywhere, where it is that of all."""
        return EVERYWHERE if self.part.coordinated else coordinate_of(self.opened.name)

    @property
    def path(self) -> str:
        """The index, below the root."""
        return self.path_of(self.opened.name)

    def path_of(self, name: str) -> str:
        """A file of this part, below the root."""
        return join(self.part.folder.path, name)

    def file_of(self, row: int) -> str:
        """The data file in which an item lies, below the root."""
        return self.path_of(self.index.files[self.index.item_file[row]])

    @cached_property
    def rows(self) -> Mapping[str, Sequence[int]]:
        """Name of a tensor or object to the rows of its items."""
        found: dict[int, list[int]] = {}
        for row, name in enumerate(self.index.item_name):
            found.setdefault(name, []).append(row)
        return {self.index.names[name]: rows for name, rows in found.items()}

    def placed(self, tensor: Described) -> Iterator[tuple[int, Box | None]]:
        """The rows of a tensor with the region that each holds; None for one that no chunk describes.

        Those without elements are left out: a rank with nothing of a tensor writes such a one. A region that is
        described but is in no row comes with the row -1.
        """
        index, dims = self.index, len(tensor.shape)
        placed: set[int] = set()
        for row in self.rows.get(tensor.name, ()):
            chunk = index.item_chunk[row]
            if chunk < 0:
                yield row, None
                continue
            placed.add(chunk)
            corner, extent = index.chunk(chunk, dims)
            if 0 not in extent:
                yield row, _box(corner, extent)
        # Empty chunks fall together: they all begin where the tensor ends.
        for chunk in range(*tensor.chunks) if len(placed) < tensor.chunks[1] - tensor.chunks[0] else ():
            corner, extent = index.chunk(chunk, dims)
            if chunk not in placed and 0 not in extent:
                yield -1, _box(corner, extent)


def _box(corner: tuple[int, ...], extent: tuple[int, ...]) -> Box:
    return Box(corner, tuple(a + n for a, n in zip(corner, extent, strict=True)))


def open_index(store: Store, part: Part, name: str) -> Source:
    """Read one index; what is wrong with it is in its state."""
    if name in part.folder.files:
        opened = Opened[DcpMetadata].open(store, part.folder, name, read_dcp_metadata)
    else:
        opened = Opened[DcpMetadata].absent(name)
        if TEMPORARY in part.folder.files:
            opened = replace(opened, detail=f"it is not there, only {TEMPORARY}: the save was not finished")
    strange = next((file for file in opened.content.files if not is_plain_name(file)), None) if opened.content else None
    if strange is not None:
        detail = f"it places items in {strange[:200]!r}, which is no file beside it"
        opened = Opened(name, FileState.DAMAGED, None, detail, opened.entry)
    index = opened.content or DcpMetadata()
    return Source(part, opened, index, data_files(index), Contents(index.item_offset[:]))


def every_key(sources: Sequence[Source]) -> dict[str, None]:
    """The keys of all tensors and objects, as they are in the state dict where that is recorded.

    An index itself lists them by the rank that stored them.
    """
    known = {key: None for source in sources for key in (*source.index.tensors, *source.index.objects)}
    recorded = {key: None for source in sources for key in source.index.paths if key in known}
    return recorded | known
