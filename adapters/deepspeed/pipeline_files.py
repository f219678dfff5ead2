"""The files of one DeepSpeed pipeline checkpoint: their names, what rank wrote them, which must be there.

    layer_<LL>-model_<TT>-model_states.pt                  LL pipeline layer, TT tensor-parallel rank
    layer_<LL>-model_states.pt                             the same in a topology without a model axis
    mp_rank_<MM>_model_states.pt                           MM = pp_rank · tp_degree + tp_rank
    [bf16_]zero_pp_rank_<D>_mp_rank_<MM>_optim_states.pt   D data-parallel rank, not padded

Nothing in the folder marks completeness, so what must be there follows from recorded world sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.adapters.adapter import MAX_LOST, MAX_RANKS, Folder
from auditor.adapters.deepspeed.records import count_in, shapes_in
from auditor.adapters.megatron_names import megatron_args
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import RecordBudget, StoredTensor
from auditor.model.mesh import Coordinate, Mesh
from auditor.storage.store import Store

LAYER = re.compile(r"layer_(\d{2,})(?:-model_(\d{2,}))?-model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d{2,})_model_states\.pt")
ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d{2,})_optim_states\.pt")


@dataclass(frozen=True, slots=True)
class Degrees:
    """Sizes of the mesh axes."""

    pp: int
    dp: int
    tp: int

    @property
    def mesh(self) -> Mesh:
        """Global rank = (pp · dp_degree + dp) · tp_degree + tp, DeepSpeed's pipe-data-model topology."""
        return Mesh((("pp", self.pp), ("dp", self.dp), ("tp", self.tp)), ordered=True)

    def model_coordinate(self, mp_rank: int) -> Coordinate:
        """Stage and tensor-parallel rank of an ``mp_rank``."""
        return Coordinate.of(pp=mp_rank // self.tp, tp=mp_rank % self.tp)


@dataclass(frozen=True, slots=True)
class StepFiles:
    """All files of one step, those that must be there but aren't included."""

    degrees: Degrees
    models: Mapping[int, StepFile]
    """By mp_rank."""
    layers: Mapping[tuple[int, int], StepFile]
    """By layer and tensor-parallel rank."""
    zeros: Mapping[tuple[int, int], StepFile]
    """By data-parallel rank and mp_rank."""
    leftovers: Sequence[str] = ()
    """Files named as this format's, but of ranks that the mesh does not have, or there twice."""
    impossible: Mapping[str, str] = field(default_factory=dict)
    """mp_rank file to the recorded size in it that no run can have."""
    deeper: Sequence[str] = ()
    """Layer files of a deeper model that was saved here before; no loader takes them."""

    def all(self) -> Iterator[tuple[StepFile, Coordinate]]:
        """Every file with the coordinate of the rank whose state it holds."""
        for (_, tp), file in sorted(self.layers.items()):
            yield file, Coordinate.of(tp=tp)
        for mp_rank, file in sorted(self.models.items()):
            yield file, self.degrees.model_coordinate(mp_rank)
        for (dp, mp_rank), file in sorted(self.zeros.items()):
            yield file, self.degrees.model_coordinate(mp_rank).merged(Coordinate.of(dp=dp))

    def of_layer(self, layer: int) -> list[tuple[int, StepFile]]:
        """The files of one layer with their tensor-parallel ranks."""
        return [(tp, self.layers[layer, tp]) for tp in range(self.degrees.tp) if (layer, tp) in self.layers]

    def opaque(self) -> Counter[str]:
        """Unknown objects met in all files, by class."""
        total: Counter[str] = Counter()
        for file, _ in self.all():
            if file.content:
                total.update(file.content.opaque)
        return total

    def stage_shapes(self, stage: int) -> list[dict[str, tuple[int, ...]]]:
        """Per parameter group, name to local shape on a stage, from the first readable file of any of its ranks."""
        for tp in range(self.degrees.tp):
            groups = shapes_in(self.models[stage * self.degrees.tp + tp], "param_shapes")
            if groups:
                return groups
        return []


def read_step_files(store: Store, folder: Folder, *, names_only: bool = False) -> StepFiles:
    """Read every file of the step, then add those that the recorded sizes imply.

    ``names_only``: open the mp_rank files alone, which say what must be there.
    """
    models: dict[int, StepFile] = {}
    layers: dict[tuple[int, int], StepFile] = {}
    zeros: dict[tuple[int, int], StepFile] = {}
    leftovers, budget = [], RecordBudget()
    for name in folder.files:
        if found := MODEL.fullmatch(name):
            models[int(found[1])] = StepFile.read(store, folder, name, budget)
            continue
        target = layers if (found := LAYER.fullmatch(name)) else zeros if (found := ZERO.fullmatch(name)) else None
        if found is None or target is None:
            continue
        key = int(found[1]), int(found[2] or 0)
        if key in target:
            leftovers.append(name)
            continue
        unopened = StepFile.unopened(folder, name)
        target[key] = unopened if names_only else StepFile.read(store, folder, name, budget)
    degrees, impossible = _degrees(models, layers, zeros)
    leftovers += _take_foreign(degrees, models, layers, zeros)
    deeper = _take_deeper(degrees, models, layers)
    impossible |= _add_absent(degrees, models, layers, zeros)
    return StepFiles(degrees, models, layers, zeros, leftovers, impossible, deeper)


def _take_foreign(
    degrees: Degrees, models: dict[int, StepFile], layers: dict[tuple[int, int], StepFile],
    zeros: dict[tuple[int, int], StepFile],
) -> list[str]:  # fmt: skip
    """Take out the files of ranks that the mesh does not have; their names."""
    in_model = degrees.pp * degrees.tp
    foreign = [models.pop(rank).name for rank in sorted(models) if rank >= in_model]
    foreign += [layers.pop(key).name for key in sorted(layers) if key[1] >= degrees.tp]
    foreign += [zeros.pop(key).name for key in sorted(zeros) if key[0] >= degrees.dp or key[1] >= in_model]
    return foreign


def _take_deeper(
    degrees: Degrees, models: Mapping[int, StepFile], layers: dict[tuple[int, int], StepFile]
) -> list[str]:
    """Take out the layers of a deeper model that was saved here before; their files.

    Known where Megatron's ``num_layers`` and the parameter names of all stages agree: another layer that holds what a
    layer of this model holds is then none of it. One with other content may be: what was frozen is not in
    ``param_shapes``.
    """
    depth = next(filter(None, (megatron_args(file).get("num_layers") for file in models.values())), None)
    own: dict[int, dict[str, tuple[int, ...]]] = {}
    stages: set[int] = set()
    for mp_rank, file in models.items():
        for group in (*shapes_in(file, "param_shapes"), *shapes_in(file, "frozen_param_shapes")):
            stages.add(mp_rank // degrees.tp)
            for name, shape in group.items():
                if found := re.fullmatch(r"(\d{1,6})\.(.+)", name):
                    own.setdefault(int(found[1]), {})[found[2]] = shape
    counts = Counter(frozenset(keys) for keys in own.values())
    blocks = [keys for keys, count in counts.items() if count == depth]
    if len(stages) < degrees.pp or not blocks:
        return []
    block, last = max(blocks, key=len), max(own)
    deeper = []
    for layer, tp in sorted(layers):
        tensors = {k: t.shape for k, t in layers[layer, tp].tree.items() if isinstance(t, StoredTensor)}
        same = block <= tensors.keys() or (layer > last and tensors in own.values())
        if layer not in own and same:
            deeper.append(layers.pop((layer, tp)).name)
    return deeper


def _add_absent(
    degrees: Degrees, models: dict[int, StepFile], layers: dict[tuple[int, int], StepFile],
    zeros: dict[tuple[int, int], StepFile],
) -> dict[str, str]:  # fmt: skip
    """Add what the recorded sizes and the parameter names of the stages imply; what of it is impossible, by file."""
    for mp_rank in range(degrees.pp * degrees.tp):
        models.setdefault(mp_rank, StepFile.absent(f"mp_rank_{mp_rank:02d}_model_states.pt"))
    # Names of parameters with their shapes are recorded where their optimizer state lies in files of its own.
    kept_apart = zeros or any(isinstance(file.tree.get("param_shapes"), list) for file in models.values())
    prefix = "bf16_" if any(file.name.startswith("bf16_") for file in zeros.values()) or not zeros else ""
    for dp in range(degrees.dp) if kept_apart else ():
        for mp_rank in range(degrees.pp * degrees.tp):
            name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp_rank:02d}_optim_states.pt"
            zeros.setdefault((dp, mp_rank), StepFile.absent(name))
    numbers = _layer_numbers(models, layers)
    if len(numbers) * degrees.tp > MAX_RANKS:
        first = min(models.values(), key=lambda file: file.name)
        return {first.name: f"records parameters of {len(numbers)} layers on {degrees.tp} tensor-parallel ranks"}
    no_axis = any("-model_states" in file.name and file.name.count("-") == 1 for file in layers.values())
    for layer in numbers:
        for tp in range(degrees.tp):
            middle = "" if no_axis else f"-model_{tp:02d}"
            layers.setdefault((layer, tp), StepFile.absent(f"layer_{layer:02d}{middle}-model_states.pt"))
    return {}


def _layer_numbers(models: Mapping[int, StepFile], layers: Mapping[tuple[int, int], StepFile]) -> set[int]:
    """Layers that have a file or, by the parameter names of a stage, must have one. Holes are normal."""
    numbers = {layer for layer, _ in layers}
    for file in models.values():
        for group in shapes_in(file, "param_shapes"):
            numbers |= {int(name.split(".", 1)[0]) for name in group if re.match(r"\d{1,6}\.", name)}
    return numbers


def _degrees(
    models: Mapping[int, StepFile],
    layers: Mapping[tuple[int, int], StepFile],
    zeros: Mapping[tuple[int, int], StepFile],
) -> tuple[Degrees, dict[str, str]]:
    """Recorded sizes first, so that missing files show; counting files only where nothing is recorded.

    Also returns the file to the recorded size that is set aside because no run can have it.
    """
    counted = Degrees(
        1,
        1 + max((rank for rank, _ in zeros if rank < MAX_RANKS), default=0),
        1 + max((rank for _, rank in layers if rank < MAX_RANKS), default=0),
    )
    impossible: dict[str, str] = {}
    num_files = len(models) + len(zeros)
    for _, file in sorted(models.items()):
        found = _recorded(file, counted, [*models, *(mp_rank for _, mp_rank in zeros)])
        if found.pp * found.dp * found.tp <= min(MAX_RANKS, MAX_LOST * num_files):
            return found, impossible
        mesh = f"{found.pp} x {found.dp} x {found.tp}"
        impossible[file.name] = f"records a mesh of {mesh} ranks, of which {num_files} files are here"
    in_model = 1 + max((rank for rank in models if rank < MAX_RANKS), default=0)
    return Degrees(max(1, in_model // counted.tp), counted.dp, counted.tp), impossible


def _recorded(file: StepFile, counted: Degrees, mp_ranks: Sequence[int]) -> Degrees:
    """The degrees that one mp_rank file records, with what is counted where it records nothing."""
    stated = megatron_args(file).get("tensor_model_parallel_size")
    tp = count_in(file, "checkpoint_parallel_dimensions", "tp_degree")
    if tp is None and isinstance(stated, int) and 0 < stated <= MAX_RANKS:
        tp = stated
    tp = tp or counted.tp
    in_model = count_in(file, "mp_world_size") or max((rank for rank in mp_ranks if rank < MAX_RANKS), default=0) + 1
    return Degrees(max(1, in_model // tp), count_in(file, "dp_world_size") or counted.dp, tp)
