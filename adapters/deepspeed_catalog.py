"""Turns the files of a DeepSpeed pipeline checkpoint into a Catalog: pieces, scalars, and what contradicts itself.

Files that must be there but aren't, or can't be read, have their pieces in the Catalog all the same: so that what is
lost is known by tensor and region, and is laid to the file.
"""

from __future__ import annotations

from typing import Any

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder, Part
from auditor.adapters.counters import read_numbers
from auditor.adapters.deepspeed_files import LAYER, count_in, read_step_files, shapes_in
from auditor.adapters.deepspeed_layout import Layout
from auditor.adapters.flat_partitions import FlatGroup, place_slice
from auditor.adapters.optimizer_index import is_count, settings
from auditor.adapters.step_file import StepFile
from auditor.adapters.ties import distinct, in_one_storage
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import BFLOAT16, FLOAT32, DType
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import ParameterGroup, Tie
from auditor.model.region import FlatRange
from auditor.storage.store import Store, join

_FLATS: dict[Role, tuple[str, ...]] = {
    Role.MASTER: ("single_partition_of_fp32_groups",),
    Role.FIRST_MOMENT: ("base_optimizer_state", "state", "exp_avg"),
    Role.SECOND_MOMENT: ("base_optimizer_state", "state", "exp_avg_sq"),
}
"""Where in ``optimizer_state_dict`` a role's flat partitions are; the group's number goes in before the last key."""


class DeepSpeedReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, options: Options) -> None:
        self.store, self.folder, self.names_only = store, folder, options.names_only
        self.files = read_step_files(store, folder, names_only=options.names_only)
        self.degrees = self.files.degrees
        self.layout = Layout(self.files, options)
        self.flat_groups = {stage: [*map(FlatGroup, groups)] for stage, groups in self.layout.groups.items()}
        self.builder = CatalogBuilder()
        self.names: dict[tuple[int, int], tuple[str, ...]] = {}
        """mp_rank and group to the names of its parameters."""

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for file, coordinate in self.files.all():
            if match := LAYER.fullmatch(file.name):
                coordinate = coordinate.merged(Coordinate.of(pp=self.layout.stage_of_layer(int(match[1]))))
            self.builder.file(file.as_rank_file(self.folder.path, coordinate))
            self._check_root(file, coordinate)
        for layer in self.layout.layers:
            self._add_layer(layer)
        if not self.names_only:
            self._add_unstored_tied()
        for (dp, mp_rank), file in sorted(self.files.zeros.items()):
            self._add_zero_file(dp, mp_rank, file)
        for mp_rank, file in sorted(self.files.models.items()):
            self._add_model_file(mp_rank, file)
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

    def _check_root(self, file: StepFile, coordinate: Coordinate) -> None:
        """torch.save names the root after the path: a copied or renamed file keeps that of its origin."""
        # A saver that writes NAME.pt.tmp and renames it leaves NAME.pt; one that writes to a buffer leaves `archive`.
        if file.content and file.content.root not in (file.name.removesuffix(".pt"), file.name, "archive"):
            self._problem(ProblemKind.OTHER_RANK, file, f"was saved under the name {file.content.root}", coordinate)

    # Weights: layer files

    def _add_layer(self, layer: int) -> None:
        files = self.files.of_layer(layer)
        for key, local in self.layout.layers[layer].items():
            stored = [tensor for _, file in files if isinstance(tensor := file.tree.get(key), StoredTensor)]
            dtype = stored[0].dtype if stored else BFLOAT16
            for tp, file in files:
                coordinate = Coordinate.of(pp=self.layout.stage_of_layer(layer), tp=tp)
                name = f"{self.layout.prefixes[layer]}{key}"
                part = self.layout.part(name, Role.PARAMETER, local, coordinate)
                tensor = self.builder.tensor_of(part, Role.PARAMETER, dtype)
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
        groups = self.layout.groups[mp_rank // self.degrees.tp]
        if not groups and file.state is FileState.PRESENT:
            self._problem(ProblemKind.UNPLACED, file, "no mp_rank file tells the order of its parameters", coordinate)
        for group, members in enumerate(self.flat_groups[mp_rank // self.degrees.tp]):
            for role in _FLATS:
                self._add_flat(file, role, group, members, coordinate)
            self._check_mapping(file, group, members, coordinate)
        if file.content:
            self._add_groups(file, mp_rank, coordinate)

    def _add_flat(self, file: StepFile, role: Role, group: int, members: FlatGroup, coordinate: Coordinate) -> None:
        """The pieces of one flat partition, or those that a lost file should hold."""
        flat = _flat(file, role, group)
        length = members.partition_length(self.degrees.dp)
        if flat is None and file.state is FileState.PRESENT:
            return
        filled = members.num_elements - coordinate.as_dict()["dp"] * length
        # ZeRO-1 and 2 store the last fp32 partition without its padding.
        trimmed = flat is not None and 0 <= filled < length and flat.shape[0] == filled
        if flat is not None and flat.shape[0] != length and not trimmed:
            # Cut at the wrong places, every slice would be another parameter's.
            message = f"its {role.value} group {group} has {flat.shape[0]} elements, param_shapes imply {length}"
            self._problem(ProblemKind.METADATA, file, message, coordinate)
            return
        dtype, offset = (flat.dtype, flat.offset) if flat else (FLOAT32, 0)
        file_id = self.builder.file_id(join(self.folder.path, file.name))
        key, width = f"{'.'.join(_FLATS[role])}[{group}]", dtype.bits // 8
        for piece in members.slices(coordinate.as_dict()["dp"], length):
            # Of a lost file nobody misses the padding; a small model on a large mesh has little else.
            if not piece.name and (trimmed or flat is None):
                continue
            if not piece.name:
                name, count = f"{role.value}.group{group}@{coordinate}", piece.stop - piece.start
                tensor = self.builder.tensor(name, Role.PADDING, dtype, (count,), 1 << 50)
                self.builder.piece(tensor, file_id, offset + piece.at * width, FlatRange(0, count), coordinate, key=key)
                continue
            part = self.layout.part(piece.name, role, members.shapes[piece.name], coordinate)
            tensor = self.builder.tensor_of(part, role, dtype)
            ((box, _),) = part.boxes
            for region, at in place_slice(piece, box, part.shape):
                self.builder.piece(tensor, file_id, offset + at * width, region, coordinate, key=key)

    def _check_mapping(self, file: StepFile, group: int, members: FlatGroup, coordinate: Coordinate) -> None:
        """``param_slice_mappings``, where recorded, must say what the shapes imply."""
        recorded = _dig(file.tree, "optimizer_state_dict", "param_slice_mappings", group)
        flat = _flat(file, Role.MASTER, group)
        if flat is None or not isinstance(recorded, dict):
            return
        parts = members.slices(coordinate.as_dict()["dp"], flat.shape[0])
        implied = {part.name: (part.at, part.stop - part.start) for part in parts if part.name}
        stated = {
            str(name): (address.attributes().get("start"), address.attributes().get("numel"))
            for name, address in recorded.items()
            if isinstance(address, Opaque)
        }
        for name in sorted(stated.keys() | implied.keys()):
            if stated.get(name) != implied.get(name):
                message = f"its slice mapping puts {name} at {stated.get(name)}, param_shapes imply {implied.get(name)}"
                self._problem(ProblemKind.METADATA, file, message, coordinate, name)
                return

    # Scalars

    def _add_groups(self, file: StepFile, mp_rank: int, coordinate: Coordinate) -> None:
        """Parameter groups, and the optimizer's own step in each.

        That is a 0-d tensor (torch), or a number in the state or in the group (fused Adams).
        """
        path = join(self.folder.path, file.name)
        base = _dig(file.tree, "optimizer_state_dict", "base_optimizer_state")
        groups = range(len(self.flat_groups[mp_rank // self.degrees.tp]))
        kept = {(key, at): _dig(base, *where) for at in groups for key, where in _steps_of(at)}
        tensors = {key: value for key, value in kept.items() if isinstance(value, StoredTensor)}
        kept |= read_numbers(self.store, path, tensors)
        kind = _dig(file.tree, "ds_config", "optimizer", "type")
        for at in groups:
            steps = [(float(value), key) for key, _ in _steps_of(at) if is_count(value := kept[key, at])]
            if steps:
                tensor = tensors.get((steps[0][1], at))
                dtype = tensor.dtype if tensor else None
                self.builder.scalars.append(Scalar("optimizer_step", steps[0][0], path, coordinate, "", dtype))
            recorded = _dig(base, "param_groups", at)
            self.builder.groups.append(ParameterGroup(
                at, path, coordinate, kind.lower()[:64] if isinstance(kind, str) else "",
                settings(recorded) if isinstance(recorded, dict) else {}, self._names_in(mp_rank, at),
                steps[0][0] if steps else None,
            ))  # fmt: skip

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
        for key, degree in (("dp_world_size", self.degrees.dp), ("mp_world_size", self.degrees.pp * self.degrees.tp)):
            stated = count_in(file, key)
            if stated not in (None, degree):
                self._problem(ProblemKind.METADATA, file, f"records {key} {stated}, others {degree}", coordinate)
        if file.content and shapes_in(file, "param_shapes") != self.layout.groups[mp_rank // self.degrees.tp]:
            message = "its param_shapes differ from those of its stage's other tensor-parallel ranks"
            self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate)


def _flat(file: StepFile, role: Role, group: int) -> StoredTensor | None:
    """The flat partition of one role and group, if the file holds it as one."""
    *path, last = _FLATS[role]
    value = (
        _dig(file.tree, "optimizer_state_dict", *path, group, last)
        if path
        else _dig(file.tree, "optimizer_state_dict", last, group)
    )
    fits = isinstance(value, StoredTensor) and len(value.shape) == 1 and value.contiguous
    return value if fits else None


def _steps_of(group: int) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """Where a group's step may be, the place that counts first."""
    return ("state", ("state", group, "step")), ("group", ("param_groups", group, "step"))


def _dig(value: Any, *path: object) -> Any:
    """The value under a path of keys and positions, or None."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value
