"""The flat buffers of zero files (fp32 masters, moments) and what stands beside them: counts of steps, settings.

Both layouts of DeepSpeed have them: pipeline folders and those of a plain engine. The keys differ by stage:

    stage 1, 2, BF16_Optimizer   single_partition_of_fp32_groups[g], base_optimizer_state.state[g].exp_avg
    stage 3                      fp32_flat_groups[g], optimizer_state_dict.state[g].exp_avg

Source: DeepSpeed ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from auditor.adapters.catalog_builder import CatalogBuilder, Part
from auditor.adapters.counters import read_numbers
from auditor.adapters.deepspeed.records import dig
from auditor.adapters.flat_partitions import Slice, length_of, place_slice
from auditor.adapters.optimizer_index import is_count, role_and_name, settings
from auditor.adapters.step_file import StepFile
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import ParameterGroup
from auditor.model.region import FlatRange
from auditor.storage.store import Store, join

_STATE = "optimizer_state_dict"
_ADAM = ("exp_avg", "exp_avg_sq")
_MASTER = "master"
_PADDING_ORDER = 1 << 50

_Kept = tuple[int, str, str]
"""A buffer's group, what it is of, and where in the file it lies."""
PartOf = Callable[[str, Role, tuple[int, ...], Coordinate], Part]
"""Name, role, local shape and coordinate to where that part lies in the whole tensor."""


@dataclass(frozen=True, slots=True)
class Flat:
    """The slices of one flat buffer of one rank, and the local shapes of the parameters in it."""

    slices: Sequence[Slice]
    shapes: Mapping[str, tuple[int, ...]]
    recorded: Mapping[str, str] = field(default_factory=dict)
    """Name to what the rank calls it, where that is something else."""


def masters_of(file: StepFile) -> tuple[str, list[StoredTensor]]:
    """Where a zero file keeps its fp32 masters, and those: one flat buffer a group (a sub-group in stage 3)."""
    for key in ("single_partition_of_fp32_groups", "fp32_flat_groups"):
        found = dig(file.tree, _STATE, key)
        if isinstance(found, list):
            return key, [flat for flat in found if is_flat(flat)]
    return "", []


def is_flat(value: object) -> bool:
    """Whether it is a tensor of one dim without gaps."""
    return isinstance(value, StoredTensor) and len(value.shape) == 1 and value.contiguous


def _base(file: StepFile) -> tuple[str, object]:
    """Where a zero file keeps the state dict of the optimizer that DeepSpeed wraps, and that."""
    for key in ("base_optimizer_state", _STATE):
        found = dig(file.tree, _STATE, key)
        if isinstance(found, (dict, list)):
            return key, found
    return "", None


class FlatStates:
    """Puts flat buffers into the Catalog: as pieces of the tensors whose elements they hold."""

    def __init__(self, builder: CatalogBuilder, store: Store, folder: str, part: PartOf) -> None:
        self.builder, self.store, self.folder, self.part = builder, store, folder, part
        self._kept: dict[int, tuple[str, ...]] = {}
        """Group to the keys of its moments, for files that are lost."""

    def learn(self, files: Sequence[StepFile], num_groups: int) -> None:
        """What moments the optimizer keeps, from the first readable file: a lost one must have held the same."""
        for file in files:
            for group in range(num_groups):
                keys = tuple(self._moments(file, group))
                if keys:
                    self._kept.setdefault(group, keys)
            if len(self._kept) == num_groups:
                break

    def add(self, file: StepFile, coordinate: Coordinate, group: int, flat: Flat) -> None:
        """The pieces of one group's flat buffers, or those that a lost file should hold."""
        stored: dict[str, tuple[str, StoredTensor | None]] = {}
        if file.content:
            key, masters = masters_of(file)
            stored[_MASTER] = f"{key}[{group}]", masters[group] if group < len(masters) else None
            stored |= self._moments(file, group)
        elif file.state is not FileState.PRESENT:
            stored = dict.fromkeys((_MASTER, *self._kept.get(group, _ADAM)), ("", None))
        for kept, (key, tensor) in stored.items():
            if tensor is not None or file.content is None:
                self._add_flat(file, coordinate, (group, kept, key), flat, tensor)

    @staticmethod
    def _moments(file: StepFile, group: int) -> dict[str, tuple[str, StoredTensor]]:
        """Key to place and buffer of each moment of a group."""
        where, base = _base(file)
        # Elastic checkpoints keep a list of states, without padding.
        state = dig(base, group) if isinstance(base, list) else dig(base, "state", group)
        if not isinstance(state, dict):
            return {}
        return {
            key: (f"{where}.{key}[{group}]", value)
            for key, value in state.items()
            if isinstance(key, str) and key != "step" and isinstance(value, StoredTensor) and is_flat(value)
        }

    def _add_flat(
        self, file: StepFile, coordinate: Coordinate, what: _Kept, flat: Flat, stored: StoredTensor | None
    ) -> None:
        group, kept, key = what
        role, suffix = (Role.MASTER, "") if kept == _MASTER else role_and_name("", kept)
        length = length_of(flat.slices)
        tail = flat.slices[-1] if flat.slices and not flat.slices[-1].name else None
        # ZeRO-1 and 2 store the last fp32 partition without its padding.
        least = length - (tail.stop - tail.start if tail else 0)
        if stored is not None and not least <= stored.shape[0] <= length:
            # Cut at the wrong places, every slice would be another parameter's.
            message = f"its {role.value} group {group} has {stored.shape[0]} elements, param_shapes imply {length}"
            path = join(self.folder, file.name)
            self.builder.problems.append(Problem(ProblemKind.METADATA, path, message, coordinate))
            return
        dtype, offset = (stored.dtype, stored.offset) if stored else (FLOAT32, 0)
        file_id, width = self.builder.file_id(join(self.folder, file.name)), dtype.bits // 8
        for piece in flat.slices:
            if not piece.name:
                continue
            part = self.part(piece.name, role, flat.shapes[piece.name], coordinate)
            tensor = self.builder.tensor_of(_named_by(part, suffix), role, dtype)
            ((box, _),) = part.boxes
            for region, at in place_slice(piece, box, part.shape):
                self.builder.piece(tensor, file_id, offset + at * width, region, coordinate, key=key)
        if stored is not None:
            self._add_padding(flat, stored, file_id, f"{kept}.group{group}@{coordinate}", coordinate, key)

    def add_nameless(self, file: StepFile, coordinate: Coordinate, reason: str) -> None:
        """Flat buffers of which it isn't known what lies where: each stands for itself."""
        key, masters = masters_of(file)
        found = [(Role.MASTER, f"{key}[{group}]", flat) for group, flat in enumerate(masters)]
        groups = range(max(len(masters), 1))
        moments = {place: kept for group in groups for place, kept in self._moments(file, group).values()}
        found += [(Role.MOMENT, place, kept) for place, kept in moments.items()]
        for role, place, flat in found:
            name = f"{place}@{coordinate}"
            tensor = self.builder.tensor(name, role, flat.dtype, flat.shape, _PADDING_ORDER, undetermined=reason)
            region = FlatRange(0, flat.shape[0])
            number = self.builder.file_id(join(self.folder, file.name))
            self.builder.piece(tensor, number, flat.offset, region, coordinate, key=place)
        if not found:
            self.builder.tensor(
                f"optimizer@{coordinate}", Role.OBJECT, FLOAT32, (0,), _PADDING_ORDER, undetermined=reason
            )

    def _add_padding(
        self, flat: Flat, stored: StoredTensor, file: int, name: str, coordinate: Coordinate, key: str
    ) -> None:
        """One tensor for all padding of one buffer. Of a lost file nobody misses it."""
        gaps = [(piece.at, min(piece.stop - piece.start, stored.shape[0] - piece.at)) for piece in flat.slices
                if not piece.name]  # fmt: skip
        total = sum(max(count, 0) for _, count in gaps)
        if not total:
            return
        tensor = self.builder.tensor(name, Role.PADDING, stored.dtype, (total,), _PADDING_ORDER)
        done, width = 0, stored.dtype.bits // 8
        for at, count in gaps:
            if count > 0:
                region = FlatRange(done, done + count)
                self.builder.piece(tensor, file, stored.offset + at * width, region, coordinate, key=key)
                done += count

    # What stands beside them

    def check_mapping(self, file: StepFile, coordinate: Coordinate, group: int, flat: Flat) -> None:
        """``param_slice_mappings``, where recorded, must say what the shapes imply."""
        recorded = dig(file.tree, _STATE, "param_slice_mappings", group)
        _, masters = masters_of(file)
        if group >= len(masters) or not isinstance(recorded, dict):
            return
        implied = {
            flat.recorded.get(piece.name, piece.name): (piece.at, piece.stop - piece.start)
            for piece in flat.slices
            if piece.name
        }
        stated = {
            str(name): (address.attributes().get("start"), address.attributes().get("numel"))
            for name, address in recorded.items()
            if isinstance(address, Opaque)
        }
        # With this setting DeepSpeed writes the mapping of the order before it dealt parameters out. Loaders pass it
        # over, conversion to a universal checkpoint goes by it.
        dealt = dig(file.tree, "ds_config", "zero_optimization", "round_robin_gradients") is True
        for name in sorted(stated.keys() | implied.keys()):
            if stated.get(name) != implied.get(name):
                message = f"its slice mapping puts {name} at {stated.get(name)}, param_shapes imply {implied.get(name)}"
                message += "; round_robin_gradients explains it, and universal checkpoints come out wrong" * dealt
                path = join(self.folder, file.name)
                problem = Problem(ProblemKind.METADATA, path, message, coordinate, name, ignored=dealt)
                self.builder.problems.append(problem)
                return

    def add_groups(self, file: StepFile, coordinate: Coordinate, names: Mapping[int, tuple[str, ...]]) -> None:
        """Parameter groups, and the optimizer's own step in each.

        That is a 0-d tensor (torch), or a number in the state or in the group (fused Adams). ``names``: flat buffer to
        the tensors in it.
        """
        path, (_, base) = join(self.folder, file.name), _base(file)
        numbers = dict(_numbers_of_groups(base, names))
        kept = {(key, at): dig(base, *where) for at in numbers for key, where in _steps_of(base, numbers[at], at)}
        tensors = {key: value for key, value in kept.items() if isinstance(value, StoredTensor)}
        kept |= read_numbers(self.store, path, tensors)
        kind = dig(file.tree, "ds_config", "optimizer", "type")
        for at, flats in numbers.items():
            steps = [(float(value), key) for key in ("state", "group") if is_count(value := kept.get((key, at)))]
            if steps:
                tensor = tensors.get((steps[0][1], at))
                dtype = tensor.dtype if tensor else None
                self.builder.scalars.append(Scalar("optimizer_step", steps[0][0], path, coordinate, "", dtype))
            recorded = dig(base, "param_groups", at)
            self.builder.groups.append(ParameterGroup(
                at, path, coordinate, kind.lower()[:64] if isinstance(kind, str) else "",
                settings(recorded) if isinstance(recorded, dict) else {},
                names[flats[0]] if len(flats) == 1 else tuple(name for flat in flats for name in names.get(flat, ())),
                steps[0][0] if steps else None,
            ))  # fmt: skip
        scaler = dig(file.tree, _STATE, "loss_scaler")
        scale = scaler.attributes().get("cur_scale") if isinstance(scaler, Opaque) else None
        if dig(file.tree, _STATE, "dynamic_loss_scale") is True and is_count(scale):
            self.builder.scalars.append(Scalar("loss_scale", float(scale), path, coordinate))


def _named_by(part: Part, suffix: str) -> Part:
    """The part under the name that a moment of no known role has: ``w.sum@tp=1`` of ``w@tp=1``."""
    if not suffix:
        return part
    name, at, place = part.name.partition("@")
    return replace(part, name=f"{name}{suffix}{at}{place}")


def _numbers_of_groups(base: object, names: Mapping[int, tuple[str, ...]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Parameter group to its flat buffers: one, but for the sub-groups of stage 3."""
    groups = dig(base, "param_groups")
    if not isinstance(groups, list):
        yield from ((number, (number,)) for number in names)
        return
    for number, group in enumerate(groups):
        handed = dig(group, "params")
        known = tuple(flat for flat in handed if flat in names) if isinstance(handed, list) else ()
        if known or number in names:
            yield number, known or (number,)


def _steps_of(base: object, flats: Sequence[int], group: int) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """Where a group's step may be, the place that counts first."""
    first = (flats[0], "step") if isinstance(base, list) else ("state", flats[0], "step")
    return ("state", first), ("group", ("param_groups", group, "step"))
