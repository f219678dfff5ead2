"""Turns the files of a DeepSpeed pipeline checkpoint into a Catalog: pieces, scalars, and what contradicts itself.

Files that must be there but aren't, or can't be read, have their pieces in the Catalog all the same: so that what is
lost is known by tensor and region, and is laid to the file.
"""

from __future__ import annotations

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder, Part
from auditor.adapters.deepspeed.flats import Flat, FlatStates
from auditor.adapters.deepspeed.pipeline_files import LAYER, read_step_files
from auditor.adapters.deepspeed.pipeline_layout import Layout
from auditor.adapters.deepspeed.records import count_in, odd_counts, renamed, schedule_steps, shapes_in
from auditor.adapters.deepspeed.states import PlainStates
from auditor.adapters.flat_partitions import FlatGroup
from auditor.adapters.step_file import StepFile
from auditor.adapters.ties import distinct, in_one_storage
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import BFLOAT16, DType
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import Tie
from auditor.storage.store import Store, join

_NAMELESS = "without ZeRO no file records which parameters a stage has"


class PipelineReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, options: Options) -> None:
        self.store, self.folder, self.names_only = store, folder, options.names_only
        self.files = read_step_files(store, folder, names_only=options.names_only)
        self.degrees = self.files.degrees
        self.layout = Layout(self.files, options)
        self.flat_groups = {stage: [*map(FlatGroup, groups)] for stage, groups in self.layout.groups.items()}
        self.builder = CatalogBuilder()
        self.flats = FlatStates(self.builder, store, folder.path, self.layout.part)
        self.names: dict[tuple[int, int], tuple[str, ...]] = {}
        """mp_rank and group to the names of its parameters."""

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for file, coordinate in self.files.all():
            if match := LAYER.fullmatch(file.name):
                coordinate = coordinate.merged(self.layout.stage_of_layer(int(match[1])))
            self.builder.file(file.as_rank_file(self.folder.path, coordinate))
            if problem := renamed(file):
                self._problem(ProblemKind.OTHER_RANK, file, problem, coordinate)
        for layer in self.layout.layers:
            self._add_layer(layer)
        if not self.names_only:
            self._add_unstored_tied()
        self.flats.learn([*self.files.zeros.values()], max(map(len, self.flat_groups.values()), default=0))
        for (dp, mp_rank), file in sorted(self.files.zeros.items()):
            self._add_zero_file(dp, mp_rank, file)
        states = PlainStates(self.builder, self.store, self.folder.path, self.layout.part)
        for mp_rank, file in sorted(self.files.models.items()):
            self._add_model_file(mp_rank, file)
            if not self.names_only:
                states.add(file, self.degrees.model_coordinate(mp_rank), {}, unknown=_NAMELESS)
        places = {file.name: place for file, place in self.files.all()}
        for file, what in odd_counts(self.files.models.values()):
            self._problem(ProblemKind.METADATA, file, what, places[file.name])
        self._add_ties()
        self._add_leftovers()
        claimed = {file.name for file, _ in self.files.all()} | {*self.files.leftovers, *self.files.deeper}
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if name not in claimed]
        return self.builder.build(
            step, self.folder.path, format_name, self.degrees.mesh, self.files.opaque(), unclaimed
        )

    def _problem(
        self, kind: ProblemKind, file: StepFile, message: str, coordinate: Coordinate, tensor: str = ""
    ) -> None:
        self.builder.problems.append(Problem(kind, join(self.folder.path, file.name), message, coordinate, tensor))

    def _scalar(self, name: str, value: float, file: StepFile, coordinate: Coordinate) -> None:
        self.builder.scalars.append(Scalar(name, value, join(self.folder.path, file.name), coordinate))

    def _add_leftovers(self) -> None:
        for name in self.files.leftovers:
            message = f"is of no rank of the mesh ({self.degrees.mesh}), or there twice"
            self.builder.problems.append(Problem(ProblemKind.LEFTOVER, join(self.folder.path, name), message))
        for name in self.files.deeper:
            message = "is a layer of another, deeper model: this one's records know of none there; loaders pass it over"
            path = join(self.folder.path, name)
            self.builder.problems.append(Problem(ProblemKind.LEFTOVER, path, message, ignored=True))
        for name, what in self.files.impossible.items():
            self.builder.problems.append(Problem(ProblemKind.METADATA, join(self.folder.path, name), what))

    # Weights: layer files

    def _add_layer(self, layer: int) -> None:
        files = self.files.of_layer(layer)
        for key, local in self.layout.layers[layer].items():
            stored = [tensor for _, file in files if isinstance(tensor := file.tree.get(key), StoredTensor)]
            dtype = stored[0].dtype if stored else BFLOAT16
            for tp, file in files:
                coordinate = self.layout.stage_of_layer(layer).merged(Coordinate.of(tp=tp))
                name = f"{self.layout.prefixes[layer]}{key}"
                role = Role.BUFFER if self.layout.is_buffer(name, key) else Role.PARAMETER
                part = self.layout.part(name, role, local, coordinate)
                tensor = self.builder.tensor_of(part, role, dtype)
                self._add_weight(tensor, part, file, key, dtype, coordinate)

    def _add_unstored_tied(self) -> None:
        """Tied modules have no number in any name, so their lost files can't be named; that they lack pieces can."""
        for name, local in self.layout.unstored_tied().items():
            for tp in range(self.degrees.tp):
                coordinate = Coordinate.of(pp=self.layout.stages[name][0], tp=tp)
                part = self.layout.part(name, Role.PARAMETER, local, coordinate)
                self.builder.tensor_of(part, Role.PARAMETER, BFLOAT16)

    def _add_weight(
        self, tensor: int, part: Part, file: StepFile, key: str, dtype: DType, coordinate: Coordinate
    ) -> None:
        """The piece that one layer file holds of a tensor, or should hold."""
        file_id, ((box, _),) = self.builder.file_id(join(self.folder.path, file.name)), part.boxes
        stored = file.tree.get(key)
        if not isinstance(stored, StoredTensor):
            if file.state is not FileState.PRESENT:
                self.builder.piece(tensor, file_id, 0, box, coordinate, key=key)
        elif (stored.shape, stored.dtype) == (box.shape, dtype):
            self.builder.piece(tensor, file_id, stored.offset, box, coordinate, key=key, strides=stored.strides)
        else:
            found, expected = f"{stored.dtype.name}{list(stored.shape)}", f"{dtype.name}{list(box.shape)}"
            message = f"holds {key} as {found}, expected is {expected}"
            self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate, part.name)

    # Masters and moments: zero files

    def _add_zero_file(self, dp: int, mp_rank: int, file: StepFile) -> None:
        coordinate = self.degrees.model_coordinate(mp_rank).merged(Coordinate.of(dp=dp))
        groups = self.flat_groups[mp_rank // self.degrees.tp]
        if not groups and file.state is FileState.PRESENT:
            self._problem(ProblemKind.UNPLACED, file, "no mp_rank file tells the order of its parameters", coordinate)
        for number, members in enumerate(groups):
            flat = Flat(members.partition(dp, self.degrees.dp), members.shapes)
            self.flats.add(file, coordinate, number, flat)
            self.flats.check_mapping(file, coordinate, number, flat)
        if file.content:
            names = {number: self._names_in(mp_rank, number) for number in range(len(groups))}
            self.flats.add_groups(file, coordinate, names)

    # Names and scalars

    def _names_in(self, mp_rank: int, group: int) -> tuple[str, ...]:
        """Names of the parameters of a group; data-parallel ranks share them."""
        if (mp_rank, group) not in self.names:
            coordinate = self.degrees.model_coordinate(mp_rank)
            shapes = self.flat_groups[mp_rank // self.degrees.tp][group].shapes
            parts = (self.layout.part(name, Role.MASTER, shape, coordinate) for name, shape in shapes.items())
            self.names[mp_rank, group] = tuple(part.name for part in parts)
        return self.names[mp_rank, group]

    def _add_ties(self) -> None:
        """What a layer's file keeps as one, and what the engine says are two names of one parameter."""
        ties: list[Tie] = []
        for (layer, _), file in sorted(self.files.layers.items()):
            keys = {key: value for key, value in file.tree.items() if isinstance(value, StoredTensor)}
            named = {f"{self.layout.prefixes[layer]}{key}": value for key, value in keys.items()}
            ties += in_one_storage(named, file.name)
        for _, file in sorted(self.files.models.items()):
            shared = file.tree.get("shared_params")
            for alias, source in shared.items() if isinstance(shared, dict) else ():
                if isinstance(alias, str) and isinstance(source, str):
                    ties.append(Tie((source, alias), f"shared_params in {file.name}"))
        self.builder.ties.extend(distinct(ties))

    def _add_model_file(self, mp_rank: int, file: StepFile) -> None:
        coordinate = self.degrees.model_coordinate(mp_rank)
        for key in ("global_steps", "skipped_steps", "global_samples", "iteration"):
            value = file.tree.get(key)
            if isinstance(value, int) and 0 <= value < 1 << 53:
                self._scalar(key, float(value), file, coordinate)
        if (count := schedule_steps(file)) is not None:
            self._scalar("engine_schedule_steps", float(count), file, coordinate)
        for key, degree in (("dp_world_size", self.degrees.dp), ("mp_world_size", self.degrees.pp * self.degrees.tp)):
            stated = count_in(file, key)
            if stated not in (None, degree):
                self._problem(ProblemKind.METADATA, file, f"records {key} {stated}, others {degree}", coordinate)
        if file.content and shapes_in(file, "param_shapes") != self.layout.groups[mp_rank // self.degrees.tp]:
            message = "its param_shapes differ from those of its stage's other tensor-parallel ranks"
            self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate)
