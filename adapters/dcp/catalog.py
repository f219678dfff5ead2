"""Turns a checkpoint by ``torch.distributed.checkpoint`` into a Catalog: its files, and what contradicts itself.

DCP records no mesh. The one axis that is known is ``rank``: the number of the process that wrote a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from auditor.adapters.adapter import Folder, Options, folder_name
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.dcp.data import DataFile, Flaw, open_data
from auditor.adapters.dcp.files import LIGHTNING, TEMPORARY, TRAINER_STATE, Part, is_step, rank_of
from auditor.adapters.dcp.names import Names
from auditor.adapters.dcp.numbered import attach_numbers
from auditor.adapters.dcp.objects import record_objects
from auditor.adapters.dcp.sources import Source, coordinate_of, every_key, open_index
from auditor.adapters.dcp.tensors import AXIS, TensorPlacing
from auditor.adapters.hugging_face.files import open_json
from auditor.adapters.step_file import Opened, StepFile
from auditor.containers.ahead import several
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind, Scalar
from auditor.model.mesh import EVERYWHERE, Coordinate, Mesh
from auditor.storage.store import Store, base_name, join


class DcpReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, parts: Sequence[Part], options: Options) -> None:
        self.store, self.folder, self.parts, self.names_only = store, folder, parts, options.names_only
        named = [(part, name) for part in parts for name in part.metadata]
        self.sources = [*several(store, lambda each: open_index(store, *each), named)]
        self.builder = CatalogBuilder()
        self.opaque: Counter[str] = Counter()
        self.claimed: set[str] = set()
        self.flaws: list[tuple[Source, Flaw]] = []

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for source in self.sources:
            self._add_index(source)
            self._open_data(source)
        self._add_trainer_state()
        for part in self.parts:
            self._add_marker(part)
            self._add_unnamed(part)
        paths = {key: path for source in self.sources for key, path in source.index.paths.items()}
        names, num_ranks = Names(every_key(self.sources), paths), 1 + max(self._ranks(), default=0)
        attach_numbers(names, self.sources)
        placing = TensorPlacing(self.builder, names, self.sources, num_ranks)
        placing.add_all()
        self.opaque.update(placing.unknown)
        for source, flaw in self.flaws:
            # Bytes of no item where a chunk has none: it is the chunk that lacks.
            if flaw.overlaps or not placing.num_missing:
                self._problem(ProblemKind.METADATA, source.path, flaw.message)
        for source in self.sources:
            record_objects(self.builder, names, source, step)
        folders = [self.folder, *(part.folder for part in self.parts)]
        listed = dict.fromkeys(join(folder.path, name) for folder in folders for name in folder.files)
        unclaimed = [path for path in listed if path not in self.claimed]
        mesh = Mesh(((AXIS, num_ranks),), ordered=True)
        built = self.builder.build(step, self.folder.path, format_name, mesh, self.opaque, unclaimed)
        return replace(built, finished=self._is_finished(built))

    def _is_finished(self, built: Catalog) -> bool:
        """Whether every mark is there that a writer leaves last: what lacks then was there once."""
        marks = {source.path for source in self.sources if source.part.coordinated}
        marks |= {join(part.folder.path, LIGHTNING) for part in self.parts}
        rewritten = any(TEMPORARY in part.folder.files for part in self.parts)
        coordinated = all(part.coordinated for part in self.parts)
        return (
            coordinated
            and not rewritten
            and all(file.state is FileState.PRESENT for file in built.files if file.name in marks)
        )

    def _ranks(self) -> Iterable[int]:
        """The ranks that took part: every one leaves a file, if only of 0 bytes."""
        for source in self.sources:
            files = source.part.folder.files
            known = source.opened.content is not None
            left = [name for name in source.part.data if not files[name].num_bytes or not known]
            for name in (*source.files, *left, source.opened.name):
                rank = rank_of(name)
                if rank is not None:
                    yield rank

    # Files

    def _coordinate(self, name: str) -> Coordinate:
        """The rank that wrote a file."""
        return coordinate_of(name)

    def _add_file(
        self, folder: Folder, opened: Opened[None], container: str, file: DataFile | None = None, save_id: str = ""
    ) -> None:
        path = join(folder.path, opened.name)
        if path not in self.claimed:
            self.claimed.add(path)
            opaque = file.opaque if file else None
            found = opened.as_file(folder.path, container, self._coordinate(opened.name), opaque)
            number = self.builder.file(replace(found, save_id=save_id))
            if file and file.encoding is not None:
                self.builder.encode(number, file.encoding)

    def _add_index(self, source: Source) -> None:
        folder, index = source.part.folder.path, source.index
        self.claimed.add(source.path)
        self.opaque.update(index.opaque)
        self.builder.file(source.opened.as_file(folder, "dcp-metadata", source.coordinate, index.opaque))

    def _open_data(self, source: Source) -> None:
        """Open all data files that an index names, many at once where the store takes long to answer."""
        folder = source.part.folder

        def opened_of(file: DataFile) -> Opened[None]:
            return open_data(self.store, folder, source.index, file, source.contents, names_only=self.names_only)

        files = [*source.files.values()]
        for file, opened in zip(files, several(self.store, opened_of, files), strict=True):
            self.opaque.update(file.opaque)
            self._add_file(folder, opened, "dcp", file, source.index.save_id)
            if not opened.lost:
                self.flaws += [(source, flaw) for flaw in file.flaws]

    def _add_marker(self, part: Part) -> None:
        """Lightning's own file, which it writes after the index."""
        keys = every_key(self.sources)
        named = folder_name(self.store, part.folder).endswith(".ckpt")
        of_lightning = any(key.startswith("state_dict.") for key in keys) and (
            named or any(key.startswith("optimizer_0.") for key in keys)
        )
        if LIGHTNING not in part.folder.files:
            if of_lightning:
                self._add_file(part.folder, Opened[None].absent(LIGHTNING), "torch-zip")
            return
        self.claimed.add(path := join(part.folder.path, LIGHTNING))
        if self.names_only:
            self.builder.file(Opened[None].unopened(part.folder, LIGHTNING).as_file(part.folder.path, "torch-zip"))
            return
        marker = StepFile.read(self.store, part.folder, LIGHTNING)
        self.opaque.update(marker.content.opaque if marker.content else {})
        self.builder.file(marker.as_rank_file(part.folder.path, EVERYWHERE))
        self._add_step(path, marker.tree.get("global_step"))

    def _add_trainer_state(self) -> None:
        """What the Trainer records beside the parts of a step."""
        if TRAINER_STATE in self.folder.files:
            opened = open_json(self.store, self.folder, TRAINER_STATE)
            self.claimed.add(path := join(self.folder.path, TRAINER_STATE))
            self.builder.file(opened.as_file(self.folder.path, "json"))
            self._add_step(path, (opened.content or {}).get("global_step"))

    def _add_step(self, path: str, step: object) -> None:
        if is_step(step):
            self.builder.scalars.append(Scalar("global_steps", float(step), path))

    def _add_unnamed(self, part: Part) -> None:
        """Data files that no index names. Those without a byte are of ranks that had nothing to write."""
        known = all(source.opened.content is not None for source in self.sources if source.part is part)
        for name in part.data:
            path = join(part.folder.path, name)
            if path in self.claimed:
                continue
            self._add_file(part.folder, Opened[None].unopened(part.folder, name), "")
            if known and part.folder.files[name].num_bytes:
                self._problem(ProblemKind.LEFTOVER, path, "is named by no index: it is of another save")
        if TEMPORARY in part.folder.files:
            self.claimed.add(path := join(part.folder.path, TEMPORARY))
            if known:
                message = "is of a save into this folder that was not finished: data may be newer than the index"
                self._problem(ProblemKind.LEFTOVER, path, message)

    def _problem(self, kind: ProblemKind, path: str, message: str) -> None:
        self.builder.problems.append(Problem(kind, path, message, self._coordinate(base_name(path))))
