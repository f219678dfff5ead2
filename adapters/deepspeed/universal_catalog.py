"""Turns a universal checkpoint into a Catalog: whole masters and moments, the weights of the copied model files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.counters import read_numbers
from auditor.adapters.deepspeed.adapter import DeepSpeed
from auditor.adapters.deepspeed.files import EngineFiles, is_engine_file, read_engine_files
from auditor.adapters.deepspeed.flats import FlatStates
from auditor.adapters.deepspeed.layout import EngineLayout, module_of
from auditor.adapters.deepspeed.pipeline import DeepSpeedPipeline
from auditor.adapters.deepspeed.records import MAX_NAMES, renamed
from auditor.adapters.deepspeed.weights import EngineWeights
from auditor.adapters.optimizer_index import is_count
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import RecordBudget, StoredTensor
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import Export
from auditor.model.region import FlatRange, whole
from auditor.storage.store import StorageError, Store, base_name, join

STATE = {"fp32.pt": Role.MASTER, "exp_avg.pt": Role.FIRST_MOMENT, "exp_avg_sq.pt": Role.SECOND_MOMENT}
_STEP, _COMMON = "step.pt", "optimizer_state.pt"
_ANY_ORDER = 1 << 40
_SOURCE = "@source=0"
"""What is added to the names of the source's tensors: a place of their own, as state of one parameter."""


class Source(Protocol):
    """What may read the checkpoint that a universal one was made from."""

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """As an adapter does."""

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """As an adapter does."""


SOURCES: tuple[Source, ...] = (DeepSpeed(), DeepSpeedPipeline())


def read_if(adapter: Source, store: Store, folder: Folder) -> Catalog | None:
    """The Catalog of a folder that an adapter recognises."""
    match = adapter.recognise(store, folder)
    return adapter.read(store, folder, match, Options()) if isinstance(match, Match) else None


class UniversalReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, options: Options) -> None:
        self.store, self.folder, self.names_only = store, folder, options.names_only
        self.files: EngineFiles = read_engine_files(store, folder, names_only=options.names_only, universal=True)
        self.layout = EngineLayout(self.files, options)
        self.builder = CatalogBuilder()
        self.zero = Folder.read(store, join(folder.path, "zero"))
        self.budget = RecordBudget()
        self.opaque = self.files.opaque()

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for file, coordinate in self.files.all():
            self.builder.file(file.as_rank_file(self.folder.path, coordinate))
        EngineWeights(self.builder, self.folder.path, self.files, self.layout).add()
        held = {name: self._listed(name) for name in sorted(map(base_name, self.zero.folders))[:MAX_NAMES]}
        kept = Counter(name for inside in held.values() for name in inside if name in STATE or name == _STEP)
        # A file that most trained parameters have is one that all of them have.
        usual = [name for name in (*STATE, _STEP) if 2 * kept[name] > len(self.layout.trained)]
        for name in dict.fromkeys((*self.layout.trained, *held)):
            self._add_parameter(name, held.get(name, {}), usual if name in self.layout.trained else [])
        self._add_common()
        for _, file in sorted(self.files.models.items()):
            for key in ("global_steps", "skipped_steps"):
                if is_count(value := file.tree.get(key)):
                    path = join(self.folder.path, file.name)
                    self.builder.scalars.append(Scalar(key, float(value), path))
        self._add_source()
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if not is_engine_file(name)]
        unclaimed += [entry.name for name, entry in self.zero.files.items() if name != _COMMON]
        mesh = self.files.mesh
        catalog = self.builder.build(step, self.folder.path, format_name, mesh, self.opaque, unclaimed)
        return replace(catalog, masters_alone=self.files.stage_3 or not any(map(module_of, self.files.models.values())))

    def _listed(self, name: str) -> Mapping[str, str]:
        """Files of one parameter: name to path below the step's folder."""
        try:
            entries = self.store.list(join(self.zero.path, name))
            return {base_name(entry.name): f"zero/{name}/{base_name(entry.name)}" for entry in entries}
        except StorageError:
            return {}

    def _problem(self, kind: ProblemKind, file: str, message: str, tensor: str) -> None:
        order = self.layout.orders.get(tensor, -1)
        self.builder.problems.append(Problem(kind, join(self.folder.path, file), message, Coordinate(), tensor, order))

    def _add_parameter(self, name: str, inside: Mapping[str, str], usual: list[str]) -> None:
        """One parameter's files; ``usual``: those that must be there."""
        if not usual and name not in self.layout.orders and inside and self.layout.trained:
            path = f"zero/{name}"
            self._problem(ProblemKind.UNPLACED, path, "is state of no parameter that the model files name", name)
        for file_name in dict.fromkeys((*usual, *(found for found in inside if found in STATE or found == _STEP))):
            path = f"zero/{name}/{file_name}"
            if file_name not in inside:
                file = StepFile.absent(path)
            elif self.names_only:
                file = StepFile(path, FileState.PRESENT)
            else:
                file = StepFile.read(self.store, self.folder, path, self.budget)
            self._add_file(name, file_name, file)

    def _add_file(self, name: str, file_name: str, file: StepFile) -> None:
        number = self.builder.file(file.as_rank_file(self.folder.path, Coordinate()))
        self.opaque.update(file.content.opaque if file.content else {})
        if problem := renamed(replace(file, name=file_name)):
            self._problem(ProblemKind.OTHER_RANK, file.name, problem, name)
        tree = file.content.tree if file.content else None
        stored = tree.get("param") if isinstance(tree, dict) else tree
        if file_name == _STEP:
            self._add_step(name, number, file, stored)
            return
        role, shape = STATE[file_name], self._shape(name)
        if not isinstance(stored, StoredTensor):
            if file.content:
                self._problem(ProblemKind.METADATA, file.name, "holds no tensor", name)
            elif shape is not None and file.state is not FileState.PRESENT:
                tensor = self.builder.tensor(name, role, FLOAT32, shape, self.layout.orders.get(name, _ANY_ORDER))
                self.builder.piece(tensor, number, 0, whole(shape), Coordinate(), key="param")
            return
        # From stage 3 tensors come flat.
        flat = shape is not None and stored.contiguous and stored.shape == (math.prod(shape),)
        if shape is not None and stored.shape != shape and not flat:
            message = f"has shape {list(stored.shape)}, param_shapes say {list(shape)}"
            self._problem(ProblemKind.METADATA, file.name, message, name)
            return
        role = role if name not in self.layout.buffers else Role.BUFFER
        called = name if role is not Role.BUFFER else f"{name}@zero"
        order = self.layout.orders.get(name, _ANY_ORDER)
        tensor = self.builder.tensor(called, role, stored.dtype, shape or stored.shape, order)
        region = FlatRange(0, stored.num_elements) if flat else whole(stored.shape)
        strides = None if flat else stored.strides
        self.builder.piece(tensor, number, stored.offset, region, Coordinate(), key="param", strides=strides)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The whole shape, where parameters aren't cut over tensor-parallel ranks; else nothing records it."""
        return self.layout.trained.get(name) if self.files.tp == 1 else None

    def _add_step(self, name: str, number: int, file: StepFile, stored: object) -> None:
        """A count of steps: metadata, read."""
        value, dtype = stored, None
        path = join(self.folder.path, file.name)
        if isinstance(stored, StoredTensor):
            order = self.layout.orders.get(name, _ANY_ORDER)
            tensor = self.builder.tensor(name, Role.COUNTER, stored.dtype, stored.shape, order)
            self.builder.piece(tensor, number, stored.offset, whole(stored.shape), Coordinate(), key="step")
            value, dtype = read_numbers(self.store, path, {"step": stored}).get("step"), stored.dtype
        if is_count(value):
            self.builder.scalars.append(Scalar("optimizer_step", float(value), path, Coordinate(), name, dtype))

    def _add_source(self) -> None:
        """The checkpoint that this one was made from, where it lies beside it whole: to hold one against the other."""
        above, _, own = self.folder.path.rpartition("/")
        stem = own.removesuffix("_universal")
        if stem == own or not stem or self.names_only:
            return
        try:
            folder = Folder.read(self.store, join(above, stem))
        except StorageError:
            return
        source = next(filter(None, (read_if(adapter, self.store, folder) for adapter in SOURCES)), None)
        if source is None or any(file.state is not FileState.PRESENT for file in source.files) or source.problems:
            return
        numbers = [self.builder.file(file) for file in source.files]
        for number, tensor in enumerate(source.tensors):
            rows = source.rows_of(number, 0)
            if tensor.role not in STATE.values() or tensor.undetermined or "@" in tensor.name or not len(rows):
                continue
            called = f"{tensor.name}{_SOURCE}"
            copy = self.builder.tensor(called, tensor.role, tensor.dtype, tensor.shape, tensor.order)
            for row in rows.tolist():
                piece = source.pieces[row]
                strides = None if isinstance(piece.region, FlatRange) else piece.strides
                self.builder.piece(copy, numbers[piece.file], piece.offset, piece.region, Coordinate(), key=piece.key,
                                   strides=strides)  # fmt: skip
        names = dict.fromkeys(tensor.name for tensor in source.tensors if tensor.role is Role.MASTER)
        path = join(self.folder.path, "zero")
        self.builder.exports += [Export(name, f"{name}{_SOURCE}", path) for name in names if "@" not in name]

    def _add_common(self) -> None:
        """``optimizer_state.pt``: settings and counts of steps. State in it is rank 0's part, which loaders drop."""
        if _COMMON not in self.zero.files or self.names_only:
            return
        file = StepFile.read(self.store, self.folder, f"zero/{_COMMON}", self.budget)
        self.builder.file(file.as_rank_file(self.folder.path, Coordinate()))
        self.opaque.update(file.content.opaque if file.content else {})
        if not file.content:
            return
        flats = FlatStates(self.builder, self.store, self.folder.path, self.layout.part)
        # From stage 3 it is rank 0's own record; else what is left of one without the state.
        base = {"base_optimizer_state": file.tree} if "param_groups" in file.tree else {}
        tree = {"optimizer_state_dict": {**file.tree, **base}}
        names = {number: tuple(shapes) for number, shapes in enumerate(self.layout.shapes)}
        flats.add_groups(replace(file, content=replace(file.content, tree=tree)), Coordinate(), names)
