"""The weights in the model files of a plain DeepSpeed engine: whole ones, parts of frozen ones, experts.

In stage 3 most names hold placeholders: the weights are in no file, their fp32 masters are. Small parameters that ranks
keep gathered are whole in every rank's file, and so are buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

from auditor.adapters.catalog_builder import CatalogBuilder, Part
from auditor.adapters.deepspeed.files import EXPERT, EngineFiles, Rank
from auditor.adapters.deepspeed.layout import LOCAL_EXPERT, EngineLayout, module_of
from auditor.adapters.flat_partitions import CutParameters
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import FileState, Problem, ProblemKind, Role
from auditor.model.dtype import BFLOAT16, DType
from auditor.model.mesh import Coordinate
from auditor.model.region import FlatRange, whole
from auditor.storage.store import join

_ANY_ORDER = 1 << 50


class EngineWeights:
    """Puts weights and buffers into the Catalog."""

    def __init__(self, builder: CatalogBuilder, folder: str, files: EngineFiles, layout: EngineLayout) -> None:
        self.builder, self.folder, self.files, self.layout = builder, folder, files, layout
        self.modules = {rank: module_of(file) for rank, file in files.models.items()}

    def add(self) -> None:
        """All of them."""
        if self.files.stage_3:
            self._add_fragments()
            self._add_gathered()
        else:
            self._add_modules()
        self._add_experts()

    def _file_id(self, file: StepFile) -> int:
        return self.builder.file_id(join(self.folder, file.name))

    def _problem(self, kind: ProblemKind, file: StepFile, message: str, place: Coordinate, tensor: str) -> None:
        path = join(self.folder, file.name)
        self.builder.problems.append(Problem(kind, path, message, place, tensor, self.layout.orders.get(tensor, -1)))

    def _role(self, name: str) -> Role:
        return Role.BUFFER if name in self.layout.buffers else Role.PARAMETER

    # Stages 0 to 2: one file a model-parallel rank

    def _add_modules(self) -> None:
        expected = {**self.layout.trained, **self.layout.frozen}
        for name in self.layout.orders:
            stored = {rank: module[name] for rank, module in self.modules.items() if name in module}
            first = next(iter(stored.values()), None)
            local = expected.get(name, first.shape if first else None)
            if local is not None and (first is not None or not LOCAL_EXPERT.fullmatch(name)):
                dtype = first.dtype if first else BFLOAT16
                for rank, file in self.files.models.items():
                    self._add_whole(name, local, dtype, file, self.files.coordinate(rank, of_dp=False),
                                    stored.get(rank), f"module.{name}")  # fmt: skip

    def _add_whole(
        self, name: str, local: tuple[int, ...], dtype: DType, file: StepFile, coordinate: Coordinate,
        stored: StoredTensor | None, key: str,
    ) -> None:  # fmt: skip
        """The piece that one file holds of a tensor, or should hold."""
        role = self._role(name)
        part = self.layout.part(name, role, local, coordinate)
        tensor = self.builder.tensor_of(part, role, dtype)
        (box, _) = part.boxes[0]
        if stored is None:
            if file.state is not FileState.PRESENT:
                self.builder.piece(tensor, self._file_id(file), 0, box, coordinate, key=key)
        elif (stored.shape, stored.dtype) == (box.shape, dtype):
            self.builder.piece(
                tensor, self._file_id(file), stored.offset, box, coordinate, key=key, strides=stored.strides
            )
        else:
            has, wanted = f"{stored.dtype.name}{list(stored.shape)}", f"{dtype.name}{list(box.shape)}"
            message = f"holds {name} as {has}, expected is {wanted}"
            self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate, part.name)

    # Stage 3: one file a rank

    def _add_fragments(self) -> None:
        """Frozen parameters: each rank's part of the flattened tensor."""
        dp = self.files.dp
        for name, shape in self.layout.frozen.items():
            stored = {rank: found for rank, file in self.files.models.items()
                      if (found := _fragment(file, name)) is not None}  # fmt: skip
            dtype = next((found.dtype for found in stored.values()), BFLOAT16)
            for rank, file in self.files.models.items():
                coordinate = self.files.coordinate(rank)
                part = self.layout.part(name, Role.PARAMETER, shape, coordinate)
                tensor, found = self.builder.tensor_of(part, Role.PARAMETER, dtype), stored.get(rank)
                if found is None and file.state is FileState.PRESENT:
                    continue
                for piece in CutParameters({name: shape}).partition(rank[0], dp):
                    offset = (found.offset if found else 0) + piece.at * dtype.bits // 8
                    if found is not None and found.num_elements < piece.at + piece.stop - piece.start:
                        message = f"holds {found.num_elements} elements of {name}, too few for its part"
                        self._problem(ProblemKind.METADATA, file, message, coordinate, name)
                        break
                    if piece.name:
                        region = FlatRange(piece.start, piece.stop)
                        key = f"frozen_param_fragments.{name}"
                        self.builder.piece(tensor, self._file_id(file), offset, region, coordinate, key=key)
                    elif found is not None:
                        self._add_padding(name, dtype, piece.stop - piece.start, file, offset, coordinate)

    def _add_padding(
        self, name: str, dtype: DType, count: int, file: StepFile, offset: int, coordinate: Coordinate
    ) -> None:
        tensor = self.builder.tensor(f"{name}.padding@{coordinate}", Role.PADDING, dtype, (count,), _ANY_ORDER)
        self.builder.piece(tensor, self._file_id(file), offset, FlatRange(0, count), coordinate)

    def _add_gathered(self) -> None:
        """What every rank's file holds whole: replicas over data-parallel ranks."""
        for name in self.layout.orders:
            if name in self.layout.frozen:
                continue
            stored = {rank: module[name] for rank, module in self.modules.items() if name in module}
            shape = self.layout.trained.get(name)
            if name in self.layout.buffers:
                shape = next((found.shape for found in stored.values()), None)
            elif shape is not None:
                self._judge_placeholders(name, shape, stored)
                stored = {rank: found for rank, found in stored.items() if found.shape == shape}
            if shape is not None and stored:
                self._add_gathered_one(name, shape, stored)

    def _judge_placeholders(self, name: str, shape: tuple[int, ...], stored: Mapping[Rank, StoredTensor]) -> None:
        """What is neither the whole nor a placeholder fits nothing."""
        for rank, found in stored.items():
            if found.shape != shape and found.num_elements > 1:
                message = f"holds {name} as {list(found.shape)}, param_shapes say {list(shape)}"
                self._problem(ProblemKind.METADATA, self.files.models[rank], message, self.files.coordinate(rank), name)

    def _add_gathered_one(self, name: str, shape: tuple[int, ...], stored: Mapping[Rank, StoredTensor]) -> None:
        role, first = self._role(name), next(iter(stored.values()))
        if self.files.tp > 1:
            reason = "with stage 3, how it lies on tensor-parallel ranks is not known"
            for rank, found in stored.items():
                alone, place = f"{name}@{self.files.coordinate(rank)}", self.files.coordinate(rank)
                order = self.layout.orders[name]
                tensor = self.builder.tensor(alone, role, found.dtype, found.shape, order, undetermined=reason)
                self.builder.piece(tensor, self._file_id(self.files.models[rank]), found.offset, whole(found.shape),
                                   place, key=f"module.{name}", strides=found.strides)  # fmt: skip
            return
        replicas = tuple(self.files.coordinate(rank) for rank in self.files.models)
        axes = ("dp",) if self.files.dp > 1 else ()
        part = Part(name, self.layout.orders[name], shape, ((whole(shape), 0),), axes, replicas if axes else ())
        tensor = self.builder.tensor_of(part, role, first.dtype)
        for rank, file in self.files.models.items():
            own, coordinate = stored.get(rank), self.files.coordinate(rank)
            if own is not None and (own.shape, own.dtype) == (shape, first.dtype):
                self.builder.piece(
                    tensor, self._file_id(file), own.offset, whole(shape), coordinate, key=f"module.{name}",
                    strides=own.strides,
                )  # fmt: skip
            elif file.state is not FileState.PRESENT:
                self.builder.piece(tensor, self._file_id(file), 0, whole(shape), coordinate, key=f"module.{name}")
            else:
                message = f"holds {name} not as {first.dtype.name}{list(shape)}, as other ranks do"
                self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate, name)

    # Experts

    def _add_experts(self) -> None:
        """One file an expert; of a lost one, what another expert of its layer holds."""
        known: dict[int, dict[str, StoredTensor]] = {}
        for (layer, expert, tp), file in sorted(self.files.experts.items()):
            coordinate, held = self.files.coordinate((0, tp), of_dp=False), module_of(file, whole_file=True)
            known.setdefault(layer, held) if held else None
            for name in held:
                match = LOCAL_EXPERT.fullmatch(name)
                if match and int(match[2]) != expert:
                    self._problem(ProblemKind.OTHER_RANK, file, f"holds expert {match[2]}", coordinate, name)
                    break
            for name, stored in held.items():
                self._add_whole(name, stored.shape, stored.dtype, file, coordinate, stored, name)
        for (layer, expert, tp), file in sorted(self.files.experts.items()):
            if file.state is not FileState.PRESENT and EXPERT.fullmatch(file.name):
                coordinate = self.files.coordinate((0, tp), of_dp=False)
                for name, like in known.get(layer, {}).items():
                    if match := LOCAL_EXPERT.fullmatch(name):
                        name = f"{match[1]}{expert}{match[3]}"
                    self._add_whole(name, like.shape, like.dtype, file, coordinate, None, name)


def _fragment(file: StepFile, name: str) -> StoredTensor | None:
    fragments = file.tree.get("frozen_param_fragments")
    found = fragments.get(name) if isinstance(fragments, dict) else None
    return found if isinstance(found, StoredTensor) and len(found.shape) == 1 and found.contiguous else None
