"""Turns the files of a plain DeepSpeed engine into a Catalog: pieces, scalars, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder, Part
from auditor.adapters.deepspeed_files import EngineFiles, Rank, read_engine_files
from auditor.adapters.deepspeed_flats import Flat, FlatStates, masters_of
from auditor.adapters.deepspeed_records import Shapes, count_in, renamed, shapes_in
from auditor.adapters.flat_partitions import CutParameters, FlatGroup, cut_anew, length_of
from auditor.adapters.megatron_names import megatron_args, place, sizes_from
from auditor.adapters.step_file import StepFile
from auditor.adapters.ties import distinct, in_one_storage
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import BFLOAT16, DType
from auditor.model.mesh import Coordinate, Placement, Replicate, coordinates_along, global_shape, local_box
from auditor.model.optimizer import Tie
from auditor.model.region import whole
from auditor.storage.store import Store, join


class EngineReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, options: Options) -> None:
        self.store, self.folder, self.options = store, folder, options
        self.files: EngineFiles = read_engine_files(store, folder, names_only=options.names_only)
        self.mesh = self.files.mesh
        self.builder = CatalogBuilder()
        self.flats = FlatStates(self.builder, store, folder.path, self.part)
        readable = [file for _, file in sorted(self.files.models.items()) if file.tree]
        self.shapes: list[Shapes] = next(filter(None, (shapes_in(file, "param_shapes") for file in readable)), [])
        """Per parameter group (sub-group in stage 3), name to local shape, in the order of the flat buffers."""
        self.trained = {name: shape for group in self.shapes for name, shape in group.items()}
        self.frozen = next(filter(None, (shapes_in(file, "frozen_param_shapes") for file in readable)), [{}])[0]
        self.buffers = {str(name) for file in readable for name in _listed(file, "buffer_names")}
        self.orders: dict[str, int] = {}
        """Name to its place in the model."""
        for names in (*(file.tree["module"] for file in readable if _module(file)), self.trained, self.frozen):
            for name in names:
                self.orders.setdefault(name, len(self.orders))
        args = next(filter(None, map(megatron_args, readable)), {})
        self.sizes = sizes_from(args, self.trained)
        self.parts: dict[object, Part] = {}
        self.names: dict[tuple[int, int], tuple[str, ...]] = {}
        """Model-parallel rank and flat buffer to the names of the tensors in it."""

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for file, coordinate in self.files.all():
            self.builder.file(file.as_rank_file(self.folder.path, coordinate))
            if problem := renamed(file):
                self._problem(ProblemKind.OTHER_RANK, file, problem, coordinate)
        self._add_weights()
        self.flats.learn([*self.files.zeros.values()], len(self.shapes))
        for rank, file in sorted(self.files.zeros.items()):
            self._add_zero_file(rank, file)
        for rank, file in sorted(self.files.models.items()):
            self._add_records(rank, file)
        self._add_ties()
        for name in self.files.leftovers:
            message = f"is of no rank of the mesh ({self.mesh}), or there twice"
            self.builder.problems.append(Problem(ProblemKind.LEFTOVER, join(self.folder.path, name), message))
        for name, what in self.files.impossible.items():
            self.builder.problems.append(Problem(ProblemKind.METADATA, join(self.folder.path, name), what))
        claimed = {file.name for file, _ in self.files.all()} | {*self.files.leftovers}
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if name not in claimed]
        catalog = self.builder.build(step, self.folder.path, format_name, self.mesh, self.files.opaque(), unclaimed)
        return replace(catalog, masters_alone=self.files.stage_3)

    def _problem(
        self, kind: ProblemKind, file: StepFile, message: str, coordinate: Coordinate, tensor: str = ""
    ) -> None:
        self.builder.problems.append(Problem(kind, join(self.folder.path, file.name), message, coordinate, tensor))

    def part(self, name: str, role: Role, local: tuple[int, ...], coordinate: Coordinate) -> Part:
        """Where the part of ``name`` with shape ``local`` lies that the rank at ``coordinate`` holds."""
        once = role in (Role.PARAMETER, Role.BUFFER)
        key = name, once, local, coordinate.along(("tp",))
        if key not in self.parts:
            self.parts[key] = self._part(name, local, coordinate, once=once)
        return self.parts[key]

    def _part(self, name: str, local: tuple[int, ...], coordinate: Coordinate, *, once: bool) -> Part:
        order = self.orders.get(name, 1 << 40)
        placed = place(name, local, self.files.tp, self.sizes, self.options.stated("tp", name))
        # Weights are written by data-parallel rank 0 alone; with stage 3, each rank has its own part.
        stored_once = ("dp",) if once and self.files.dp > 1 and not self.files.stage_3 else ()
        if placed.how is None:
            alone = f"{name}@{coordinate.along(('tp',))}"
            return Part(alone, order, local, ((whole(local), 0),), stored_once=stored_once, undetermined=placed.reason)
        placement: Placement = {"tp": placed.how} if self.files.tp > 1 else {}
        axes = (("tp", range(self.files.tp)),) if placement and isinstance(placed.how, Replicate) else ()
        return Part(
            name, order, global_shape(local, placement, self.mesh),
            ((local_box(local, placement, self.mesh, coordinate), 0),), tuple(axis for axis, _ in axes),
            coordinates_along(axes) if axes else (), stored_once, placement,
        )  # fmt: skip

    # Weights

    def _add_weights(self) -> None:
        modules = {rank: _module(file) for rank, file in self.files.models.items()}
        expected = {**self.trained, **self.frozen}
        for key in self.orders:
            stored = {rank: module[key] for rank, module in modules.items() if key in module}
            if self.files.stage_3:
                continue
            found = next(iter(stored.values()), None)
            local = expected.get(key, found.shape if found else None)
            if local is not None:
                self._add_weight(key, local, found.dtype if found else BFLOAT16, stored)

    def _add_weight(
        self, key: str, local: tuple[int, ...], dtype: DType, stored: Mapping[Rank, StoredTensor]
    ) -> None:  # fmt: skip
        role = Role.BUFFER if key in self.buffers else Role.PARAMETER
        for rank, file in self.files.models.items():
            coordinate = self.files.coordinate(rank, of_dp=False)
            part = self.part(key, role, local, coordinate)
            tensor = self.builder.tensor_of(part, role, dtype)
            file_id, ((box, _),) = self.builder.file_id(join(self.folder.path, file.name)), part.boxes
            found = stored.get(rank)
            if found is None:
                if file.state is not FileState.PRESENT:
                    self.builder.piece(tensor, file_id, 0, box, coordinate, key=f"module.{key}")
            elif (found.shape, found.dtype) == (box.shape, dtype):
                self.builder.piece(
                    tensor, file_id, found.offset, box, coordinate, key=f"module.{key}", strides=found.strides
                )
            else:
                has, wanted = f"{found.dtype.name}{list(found.shape)}", f"{dtype.name}{list(box.shape)}"
                message = f"holds {key} as {has}, expected is {wanted}"
                self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate, part.name)

    # Masters and moments

    def _add_zero_file(self, rank: Rank, file: StepFile) -> None:
        coordinate = self.files.coordinate(rank)
        if not self.shapes and file.state is FileState.PRESENT:
            self._problem(ProblemKind.UNPLACED, file, "no model file tells the order of its parameters", coordinate)
        flats = self._flats_of(rank, file)
        for number, flat in enumerate(flats):
            self.flats.add(file, coordinate, number, flat)
            self.flats.check_mapping(file, coordinate, number, flat)
        if file.content:
            self.flats.add_groups(file, coordinate, {n: self._names_in(rank, n, f) for n, f in enumerate(flats)})

    def _flats_of(self, rank: Rank, file: StepFile) -> list[Flat]:
        """What lies in each flat buffer of a rank, by the recorded shapes."""
        if not self.files.stage_3:
            gaps = file.tree.get("optimizer_state_dict", {})
            gaps = gaps.get("param_alignment_paddings") if isinstance(gaps, dict) else None
            groups = [FlatGroup(shapes, _gaps(gaps, at, len(shapes))) for at, shapes in enumerate(self.shapes)]
            return [Flat(group.partition(rank[0], self.files.dp), group.shapes) for group in groups]
        parts = [CutParameters(shapes).partition(rank[0], self.files.dp) for shapes in self.shapes]
        lengths = [flat.shape[0] for flat in masters_of(file)[1]]
        implied = [length_of(part) for part in parts]
        if lengths != implied and sum(lengths) == sum(implied):
            # Older ones record shapes by parameter group, buffers are by sub-group.
            parts = cut_anew(parts, lengths)
            return [Flat(part, self.trained) for part in parts]
        return [Flat(part, shapes) for part, shapes in zip(parts, self.shapes, strict=True)]

    def _names_in(self, rank: Rank, number: int, flat: Flat) -> tuple[str, ...]:
        """Names of the tensors in a flat buffer; data-parallel ranks share them."""
        key = rank[1], number
        if key not in self.names:
            coordinate = self.files.coordinate(rank)
            parts = (self.part(name, Role.MASTER, shape, coordinate) for name, shape in flat.shapes.items())
            self.names[key] = tuple(part.name for part in parts)
        return self.names[key]

    # Scalars and ties

    def _add_records(self, rank: Rank, file: StepFile) -> None:
        coordinate, path = self.files.coordinate(rank, of_dp=self.files.stage_3), join(self.folder.path, file.name)
        for key in ("global_steps", "skipped_steps", "global_samples", "iteration"):
            value = file.tree.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
                self.builder.scalars.append(Scalar(key, float(value), path, coordinate))
        for key, degree in (("dp_world_size", self.files.dp), ("mp_world_size", self.files.tp)):
            stated = count_in(file, key)
            if stated not in (None, degree) and file.name not in self.files.impossible:
                self._problem(ProblemKind.METADATA, file, f"records {key} {stated}, others {degree}", coordinate)
        if file.content and shapes_in(file, "param_shapes") not in (self.shapes, []):
            message = "its param_shapes differ from those of the other ranks"
            self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate)

    def _add_ties(self) -> None:
        """What a file keeps as one, and what the engine says are two names of one parameter."""
        ties: list[Tie] = []
        for _, file in sorted(self.files.models.items()):
            weights = {name: tensor for name, tensor in _module(file).items() if name not in self.buffers}
            ties += in_one_storage(weights, file.name)
            shared = file.tree.get("shared_params")
            for alias, source in shared.items() if isinstance(shared, dict) else ():
                if isinstance(alias, str) and isinstance(source, str):
                    ties.append(Tie((source, alias), f"shared_params in {file.name}"))
        self.builder.ties.extend(distinct(ties))


def _module(file: StepFile) -> dict[str, StoredTensor]:
    """The module's state dict in a model file."""
    module = file.tree.get("module")
    found = module.items() if isinstance(module, dict) else ()
    return {name: value for name, value in found if isinstance(name, str) and isinstance(value, StoredTensor)}


def _listed(file: StepFile, key: str) -> list[object]:
    value = file.tree.get(key)
    return value if isinstance(value, list) else []


def _gaps(recorded: object, group: int, count: int) -> tuple[int, ...]:
    """``param_alignment_paddings`` of a group, where they can be true."""
    gaps = recorded[group] if isinstance(recorded, list) and group < len(recorded) else None
    sane = isinstance(gaps, list) and len(gaps) == count and all(type(gap) is int and 0 <= gap < 64 for gap in gaps)
    return tuple(gaps) if sane and isinstance(gaps, list) else ()
