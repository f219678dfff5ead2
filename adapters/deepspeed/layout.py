"""What the files of a plain DeepSpeed engine say together: names, model order, shapes, placement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from auditor.adapters.adapter import Options
from auditor.adapters.catalog_builder import Part
from auditor.adapters.deepspeed.files import EngineFiles, Rank
from auditor.adapters.deepspeed.flats import Flat, PartOf, masters_of
from auditor.adapters.deepspeed.records import Shapes, dig, shapes_in
from auditor.adapters.flat_partitions import CutParameters, FlatGroup, cut_anew, length_of
from auditor.adapters.megatron_names import megatron_args, place, sizes_from
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role
from auditor.model.mesh import Coordinate, Placement, Replicate, coordinates_along, global_shape, local_box
from auditor.model.region import whole

LOCAL_EXPERT = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..+)")
"""An expert's parameter: optimizers know experts by their number on the rank, files of experts by that in the model."""
_LAST = 1 << 40


class EngineLayout:
    """Names and places of all tensors of one step."""

    def __init__(self, files: EngineFiles, options: Options) -> None:
        self.files, self.mesh, self.options = files, files.mesh, options
        readable = [file for _, file in sorted(files.models.items()) if file.tree]
        self.shapes: list[Shapes] = next(filter(None, (shapes_in(file, "param_shapes") for file in readable)), [])
        """Per parameter group (sub-group in stage 3), name to local shape, in the order of the flat buffers."""
        self.trained = {name: shape for group in self.shapes for name, shape in group.items()}
        frozen = next(filter(None, (shapes_in(file, "frozen_param_shapes") for file in readable)), [])
        self.frozen: Shapes = frozen[0] if frozen else {}
        self.buffers = {str(name) for file in readable for name in _listed(file, "buffer_names")}
        self.orders: dict[str, int] = {}
        """Name to its place in the model."""
        modules = [module_of(file) for file in readable]
        experts = [module_of(file, whole_file=True) for _, file in sorted(files.experts.items())]
        everything: tuple[Mapping[str, object], ...] = (*modules, *experts, self.frozen, self.trained)
        for names in everything:
            for name in names:
                self.orders.setdefault(name, len(self.orders))
        args = next(filter(None, map(megatron_args, readable)), {})
        self.sizes = sizes_from(args, self.trained)
        self.unplaced = next(filter(None, map(_cut_otherwise, readable)), "")
        """Why it isn't known which parameter lies where in flat buffers."""
        self._parts: dict[object, Part] = {}
        self._counts = next(filter(None, map(_partition_counts, files.zeros.values())), [])

    def part(self, name: str, role: Role, local: tuple[int, ...], coordinate: Coordinate) -> Part:
        """Where the part of ``name`` with shape ``local`` lies that the rank at ``coordinate`` holds."""
        # Weights are written by data-parallel rank 0 alone; in stage 3 each rank has its own part of everything.
        once = role in (Role.PARAMETER, Role.BUFFER) and not self.files.stage_3
        key = name, once, local, coordinate.along(("tp",)) if self.files.tp > 1 else None
        if key not in self._parts:
            self._parts[key] = self._part(name, local, coordinate, ("dp",) if once and self.files.dp > 1 else ())
        return self._parts[key]

    def _part(self, name: str, local: tuple[int, ...], coordinate: Coordinate, once: tuple[str, ...]) -> Part:
        order = self.orders.get(name, _LAST)
        placed = place(name, local, self.files.tp, self.sizes, self.options.stated("tp", name))
        if placed.how is None:
            alone = f"{name}@{coordinate.along(('tp',))}"
            return Part(alone, order, local, ((whole(local), 0),), stored_once=once, undetermined=placed.reason)
        placement: Placement = {"tp": placed.how} if self.files.tp > 1 else {}
        axes = (("tp", range(self.files.tp)),) if placement and isinstance(placed.how, Replicate) else ()
        return Part(
            name, order, global_shape(local, placement, self.mesh),
            ((local_box(local, placement, self.mesh, coordinate), 0),), tuple(axis for axis, _ in axes),
            coordinates_along(axes) if axes else (), once, placement,
        )  # fmt: skip

    def replicated(self, ranks: Mapping[Rank, StepFile]) -> PartOf:
        """As :meth:`part`, of state that every one of these ranks keeps, but for experts, which one alone has."""
        degree = 1 + max(rank for rank, _ in ranks)

        def part(name: str, role: Role, local: tuple[int, ...], coordinate: Coordinate) -> Part:
            found = self.part(name, role, local, coordinate)
            if degree == 1 or found.undetermined or LOCAL_EXPERT.match(name):
                return found
            axes = (("dp", range(degree)), *((axis, range(self.mesh.degree(axis))) for axis in found.replica_axes))
            return replace(found, replica_axes=tuple(axis for axis, _ in axes), replicas=coordinates_along(axes))

        return part

    # Flat buffers

    def flats_of(self, rank: Rank, file: StepFile) -> list[Flat]:
        """What lies in each flat buffer of a rank, by the recorded shapes."""
        if not self.files.stage_3:
            gaps = dig(file.tree, "optimizer_state_dict", "param_alignment_paddings")
            return [self._flat(rank, group, _gaps(gaps, group, len(s))) for group, s in enumerate(self.shapes)]
        parts = [CutParameters(shapes).partition(rank[0], self.files.dp) for shapes in self.shapes]
        lengths = [flat.shape[0] for flat in masters_of(file)[1]]
        implied = [length_of(part) for part in parts]
        if lengths != implied and sum(lengths) == sum(implied):
            # Older ones record shapes by parameter group, buffers are by sub-group.
            return [Flat(part, self.trained) for part in cut_anew(parts, lengths)]
        return [Flat(part, shapes) for part, shapes in zip(parts, self.shapes, strict=True)]

    def _flat(self, rank: Rank, group: int, gaps: tuple[int, ...]) -> Flat:
        """One flat buffer of stage 1 or 2: of all ranks, or of those that have the same experts."""
        shapes, count = self.shapes[group], self._counts[group] if group < len(self._counts) else self.files.dp
        # Ranks with the same experts are as many apart as there are expert-parallel ranks: those are neighbours.
        degree = self.files.dp // count if 0 < count <= self.files.dp else 1
        called = self.global_names(shapes, rank[0] % degree)
        members = FlatGroup({called.get(name, name): shape for name, shape in shapes.items()}, gaps)
        recorded = {new: old for old, new in called.items()}
        return Flat(members.partition(rank[0] // degree, self.files.dp // degree), members.shapes, recorded)

    @staticmethod
    def global_names(names: Mapping[str, tuple[int, ...]], expert_rank: int) -> dict[str, str]:
        """Names of a rank's experts to what they are called in the whole model."""
        found = {name: match for name in names if (match := LOCAL_EXPERT.fullmatch(name))}
        counts: dict[str, int] = {}
        for match in found.values():
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
        return {
            name: f"{match[1]}{expert_rank * counts[match[1]] + int(match[2])}{match[3]}"
            for name, match in found.items()
            if expert_rank
        }


def module_of(file: StepFile, *, whole_file: bool = False) -> dict[str, StoredTensor]:
    """The module's state dict in a model file; ``whole_file``: the file is one."""
    module = file.tree if whole_file else file.tree.get("module")
    found = module.items() if isinstance(module, dict) else ()
    return {name: value for name, value in found if isinstance(name, str) and isinstance(value, StoredTensor)}


def _cut_otherwise(file: StepFile) -> str:
    """A recorded setting by which optimizer state lies otherwise than the sizes of the mesh say, or elsewhere.

    Source: DeepSpeed ``runtime/zero/mics.py``; ``runtime/engine.py`` (``_save_zero_checkpoint``).
    """
    settings = dig(file.tree, "ds_config", "zero_optimization")
    shard = dig(settings, "mics_shard_size")
    if type(shard) is int and shard > 0:
        return f"mics_shard_size {shard}: parameters are cut over groups of ranks, which part a file has is not known"
    if dig(settings, "offload_optimizer", "device") == "nvme":
        return "the optimizer's state is offloaded to NVMe: it lies in offloaded_tensors/, which is not read"
    return ""


def _listed(file: StepFile, key: str) -> list[object]:
    value = file.tree.get(key)
    return value if isinstance(value, list) else []


def _partition_counts(file: StepFile) -> list[int]:
    """In how many parts each group is cut; experts are on fewer ranks than the rest."""
    counts = dig(file.tree, "optimizer_state_dict", "partition_count")
    sane = isinstance(counts, list) and all(type(count) is int and count > 0 for count in counts)
    return counts if sane and isinstance(counts, list) else []


def _gaps(recorded: object, group: int, count: int) -> tuple[int, ...]:
    """``param_alignment_paddings`` of a group, where they can be true."""
    gaps = dig(recorded, group)
    sane = isinstance(gaps, list) and len(gaps) == count and all(type(gap) is int and 0 <= gap < 64 for gap in gaps)
    return tuple(gaps) if sane and isinstance(gaps, list) else ()
