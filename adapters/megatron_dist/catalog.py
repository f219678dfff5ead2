"""Turns a checkpoint by megatron-core's ``dist_checkpointing`` into a Catalog."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.dcp.catalog import DcpReading
from auditor.adapters.dcp.files import Part, part_of, rank_of
from auditor.adapters.dcp.sources import Source
from auditor.adapters.hugging_face.files import open_json
from auditor.adapters.megatron_dist.extra_state import record_scales
from auditor.adapters.megatron_dist.files import COMMON, CONFIG, Recorded, is_of_arrays
from auditor.adapters.megatron_dist.optimizer import record_common
from auditor.adapters.megatron_dist.tensors import RANK, DistPlacing, Ranks
from auditor.adapters.megatron_dist.zarr_backend import ZARR, ZarrReading
from auditor.adapters.megatron_names import recorded_progress
from auditor.adapters.step_file import Opened, StepFile
from auditor.model.catalog import Catalog, FileState, ProblemKind, Scalar
from auditor.model.mesh import EVERYWHERE, Coordinate, Mesh
from auditor.storage.store import Store, join

BACKEND = "torch_dist"
_OBJECT = re.compile(r"(?P<name>.+)/shard_\d+(?:\.\d+)*_(?P<counts>\d{1,7}(?:\.\d{1,7})*)", re.A | re.S)


class MegatronDistReading(DcpReading):
    """One step being read. ``files``: the folder that holds the files, where that is one below the step's."""

    def __init__(self, store: Store, folder: Folder, files: Folder, options: Options) -> None:
        super().__init__(store, folder, [part_of(files) or Part(files, (".metadata",))], options)
        self.files = files
        self.arrays = is_of_arrays(store, files)
        """Whether the step is by the older backend, though nothing may say so."""
        common = StepFile.absent(COMMON)
        if COMMON in files.files:
            unread = options.names_only
            common = StepFile.unopened(files, COMMON) if unread else StepFile.read(store, files, COMMON)
        self.recorded = Recorded.of(common)
        self.num_ranks = 1 + max(self._ranks(), default=0)
        degrees = self.recorded.degrees
        if degrees is not None and degrees.num_ranks < self.num_ranks:
            degrees = None
        self.degrees = degrees
        self.mesh = degrees.mesh if degrees else Mesh(((RANK, self.num_ranks),), ordered=True)

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        config = open_json(self.store, self.files, CONFIG)
        backend = (config.content or {}).get("sharded_backend", ZARR if self.arrays else BACKEND)
        if backend not in (BACKEND, ZARR):
            return self._unsupported(step, format_name, config, str(backend)[:64])
        self._add_own(config)
        source = self._from_arrays(config) if backend == ZARR else self._from_index()
        args = self.recorded.args
        ranks = Ranks(
            self.num_ranks, self.degrees, self.recorded.fused, self.recorded.tied,
            args.get("use_distributed_optimizer") is True,
        )  # fmt: skip
        placing = DistPlacing(self.builder, source, ranks, self._coordinate)
        placing.add_all()
        self.opaque.update(placing.unknown)
        for message in lost_objects(source.index.objects):
            self._problem(ProblemKind.METADATA, source.path, message)
        for where, flaw in self.flaws:
            if flaw.overlaps or not placing.num_missing:
                self._problem(ProblemKind.METADATA, where.path, flaw.message)
        self.opaque.update(record_scales(self.builder, self.store, source))
        record_common(self.builder, self.store, join(self.files.path, COMMON), self.recorded, source)
        # Rank 0 writes that file last: what lacks beside it was there once.
        return replace(self._built(step, format_name), finished=config.content is not None)

    def _from_index(self) -> Source:
        """What torch's index says, with all data files opened."""
        (source,) = self.sources
        self._add_index(source)
        self._open_data(source)
        self._add_unnamed(source.part)
        return source

    def _from_arrays(self, config: Opened[Mapping[str, object]]) -> Source:
        """What the arrays of the older backend say."""
        reading = ZarrReading(self.store, self.files, self.builder, names_only=self.names_only)
        source = reading.source(config)
        self.opaque.update(reading.opaque)
        return source

    def _built(self, step: int, format_name: str) -> Catalog:
        folders = [self.folder] if self.files is self.folder else [self.folder, self.files]
        listed = dict.fromkeys(join(folder.path, name) for folder in folders for name in folder.files)
        unclaimed = [path for path in listed if path not in self.claimed]
        return self.builder.build(step, self.folder.path, format_name, self.mesh, self.opaque, unclaimed)

    def _add_own(self, config: Opened[Mapping[str, object]]) -> None:
        """Megatron's two files beside those of torch."""
        path, common = self.files.path, self.recorded.file
        self.claimed |= {join(path, CONFIG), join(path, COMMON)}
        self.builder.file(common.as_rank_file(path, EVERYWHERE))
        self.builder.file(config.as_file(path, "json"))
        self.opaque.update(common.content.opaque if common.content else {})
        if self.recorded.step is not None:
            self.builder.scalars.append(Scalar("global_steps", float(self.recorded.step), join(path, COMMON)))
        for name, value in recorded_progress(self.recorded.args).items():
            self.builder.scalars.append(Scalar(name, value, join(path, COMMON)))

    def _unsupported(
        self, step: int, format_name: str, config: Opened[Mapping[str, object]], backend: str
    ) -> Catalog:  # fmt: skip
        """A step by a backend that is not read: nothing in it was looked at, and that is said."""
        detail = f"its tensors are in the backend {backend!r}, which is not read; only {BACKEND!r} and {ZARR!r} are"
        unread = replace(config, state=FileState.UNREADABLE, detail=detail)
        self.builder.file(unread.as_file(self.files.path, "json"))
        self.claimed |= {join(self.files.path, name) for name in self.files.files}
        if COMMON in self.files.files:
            self.builder.file(self.recorded.file.as_rank_file(self.files.path, EVERYWHERE))
        return self._built(step, format_name)

    def _coordinate(self, name: str) -> Coordinate:
        """The place of the rank that wrote a file, where ranks are numbered in a known order."""
        rank = rank_of(name)
        if rank is None or not self.mesh.ordered or rank >= self.mesh.num_ranks:
            return EVERYWHERE
        indices = {}
        for axis, degree in reversed(self.mesh.axes):
            rank, indices[axis] = divmod(rank, degree)
        return Coordinate.of(**indices)


def lost_objects(names: Mapping[str, None]) -> Iterator[str]:
    """Objects of which not all parts are stored: each rank or layer has one, ``name/shard_<place>_<counts>``.

    >>> [*lost_objects({"rng_state/shard_0.1_1.2": None})]
    ["lists 1 of the 2 parts of the object 'rng_state'"]
    """
    found: dict[tuple[str, str], int] = {}
    for name in names:
        parts = _OBJECT.fullmatch(name)
        if parts is not None:
            found[parts["name"], parts["counts"]] = found.get((parts["name"], parts["counts"]), 0) + 1
    for (name, counts), number in found.items():
        wanted = math.prod(map(int, counts.split(".")))
        if number < wanted:
            yield f"lists {number} of the {wanted} parts of the object {name[:200]!r}"
