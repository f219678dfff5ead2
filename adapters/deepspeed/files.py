"""The files of one checkpoint of a plain DeepSpeed engine: their names, what rank wrote them, which must be there.

    mp_rank_<MM>_model_states.pt                           MM model-parallel rank
    zero_pp_rank_<D>_mp_rank_<MM>_model_states.pt          stage 3: D data-parallel rank, not padded
    [bf16_]zero_pp_rank_<D>_mp_rank_<MM>_optim_states.pt   with ZeRO or BF16_Optimizer
    layer_<L>_expert_<E>_mp_rank_<MM>_model_states.pt      one expert of one mixture-of-experts layer
    expp_rank_<X>_mp_rank_<MM>_optim_states.pt             experts without ZeRO: X expert-parallel rank

Nothing in the folder marks completeness, so what must be there follows from recorded world sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from auditor.adapters.adapter import MAX_LOST, MAX_RANKS, Folder
from auditor.adapters.deepspeed.records import count_in, dig
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import RecordBudget
from auditor.model.catalog import FileState
from auditor.model.mesh import Coordinate, Mesh
from auditor.storage.store import Store

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d{2,})_model_states\.pt")
ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d{2,})_optim_states\.pt")
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d{2,})_model_states\.pt")
EXPERT_STATE = re.compile(r"expp_rank_(\d+)_mp_rank_(\d{2,})_optim_states\.pt")

Rank = tuple[int, int]
"""Data- and model-parallel rank."""
Expert = tuple[int, int, int]
"""Mixture-of-experts layer, expert in it, model-parallel rank."""


@dataclass(slots=True)
class EngineFiles:
    """All files of one step, those that must be there but aren't included."""

    stage_3: bool
    dp: int = 1
    tp: int = 1
    """Sizes of the mesh axes. A plain engine's model-parallel ranks are tensor-parallel ones."""
    models: dict[Rank, StepFile] = field(default_factory=dict)
    """One a model-parallel rank, under data-parallel rank 0; of all ranks in stage 3."""
    zeros: dict[Rank, StepFile] = field(default_factory=dict)
    experts: dict[Expert, StepFile] = field(default_factory=dict)
    states: dict[Rank, StepFile] = field(default_factory=dict)
    """Optimizer state by expert-parallel and model-parallel rank."""
    leftovers: list[str] = field(default_factory=list)
    """Files named as this format's, but of ranks or experts that there are not, or there twice."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Model file to the recorded size in it that no run can have."""

    @property
    def mesh(self) -> Mesh:
        """Global rank = dp · tp_degree + tp, as Megatron and DeepSpeed count them."""
        axes = (("dp", self.dp), ("tp", self.tp))
        return Mesh(axes if self.tp > 1 else axes[:1], ordered=True)

    @property
    def whole(self) -> bool:
        """Whether all files that must be there could be read."""
        return all(file.state is FileState.PRESENT for file, _ in self.all())

    def coordinate(self, rank: Rank, *, of_dp: bool = True) -> Coordinate:
        """A rank's place; ``of_dp``: whether what it saved is its own and not that of all data-parallel ranks."""
        dp, tp = rank
        axes = ({"dp": dp} if of_dp else {}) | ({"tp": tp} if self.tp > 1 else {})
        return Coordinate.of(**axes)

    def all(self) -> Iterator[tuple[StepFile, Coordinate]]:
        """Every file with the coordinate of the rank whose state it holds."""
        for rank, file in sorted(self.models.items()):
            yield file, self.coordinate(rank, of_dp=self.stage_3)
        for (_, _, tp), file in sorted(self.experts.items()):
            yield file, self.coordinate((0, tp), of_dp=False)
        for rank, file in sorted([*self.zeros.items(), *self.states.items()]):
            yield file, self.coordinate(rank)

    def opaque(self) -> Counter[str]:
        """Unknown objects met in all files, by class."""
        total: Counter[str] = Counter()
        for file, _ in self.all():
            total.update(file.content.opaque if file.content else {})
        return total


def is_engine_file(name: str) -> bool:
    """Whether a file is called as one of this format."""
    return any(pattern.fullmatch(name) for pattern in (MODEL, ZERO, EXPERT, EXPERT_STATE))


def read_engine_files(
    store: Store, folder: Folder, *, names_only: bool = False, universal: bool = False
) -> EngineFiles:  # fmt: skip
    """Read every file of the step, then add those that the recorded sizes imply.

    ``names_only``: open the first readable model file alone, which says what must be there. ``universal``: optimizer
    state lies in other files.
    """
    found = EngineFiles(any(match[1] for name in folder.files if (match := MODEL.fullmatch(name))))
    budget, told = RecordBudget(), False
    for name in sorted(folder.files, key=_natural):
        if not is_engine_file(name):
            continue
        is_model = bool(MODEL.fullmatch(name))
        skip = names_only and (told or not is_model)
        file = StepFile.unopened(folder, name) if skip else StepFile.read(store, folder, name, budget)
        told = told or (is_model and bool(file.tree))
        _sort_in(found, name, file)
    _set_degrees(found)
    _take_foreign(found)
    if not folder.alone:
        _add_absent(found, zeros=not universal)
        _add_absent_experts(found)
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorting key under which rank 10 comes after rank 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d{1,15})", name)]


def _sort_in(found: EngineFiles, name: str, file: StepFile) -> None:
    """Put a file where its name says."""
    if match := MODEL.fullmatch(name):
        rank = int(match[1] or 0), int(match[2])
        twice = rank in found.models or (found.stage_3 and match[1] is None)
        target = None if twice else found.models
    elif match := EXPERT.fullmatch(name):
        expert = int(match[1]), int(match[2]), int(match[3])
        found.experts[expert] = file
        return
    else:
        match = ZERO.fullmatch(name) or EXPERT_STATE.fullmatch(name)
        assert match
        rank = int(match[1]), int(match[2])
        target = found.zeros if ZERO.fullmatch(name) else found.states
        target = None if rank in target else target
    if target is None:
        found.leftovers.append(name)
    else:
        target[rank] = file


def _set_degrees(found: EngineFiles) -> None:
    """Recorded sizes first, so that missing files show; counting files only where nothing is recorded.

    A recorded size that no run can have is set aside. A stale file must not decide: what most files record counts.
    """
    ranks = [*found.models, *found.zeros]
    num_files = len(ranks) + len(found.experts) + len(found.states)
    counted_dp = 1 + max((dp for dp, _ in ranks if dp < MAX_RANKS), default=0)
    counted_tp = 1 + max((tp for _, tp in ranks if tp < MAX_RANKS), default=0)
    sizes: Counter[tuple[int, int]] = Counter()
    for _, file in sorted(found.models.items()):
        if not file.content:
            continue
        dp, tp = count_in(file, "dp_world_size") or counted_dp, count_in(file, "mp_world_size") or counted_tp
        # One file a model-parallel rank is all that there is without ZeRO: nothing else tells of the other ranks.
        implied = tp if not (found.zeros or found.stage_3 or _kept_apart(found)) else dp * tp
        if implied <= min(MAX_RANKS, MAX_LOST * num_files) and dp * tp <= MAX_RANKS:
            sizes[dp, tp] += 1
        else:
            found.impossible[file.name] = f"records a mesh of {dp} x {tp} ranks, of which {num_files} files are here"
    (found.dp, found.tp), _ = sizes.most_common(1)[0] if sizes else ((counted_dp, counted_tp), 0)


def _kept_apart(found: EngineFiles) -> bool:
    """Whether optimizer state lies in zero files: model files then record the order of its parameters."""
    return any(isinstance(file.tree.get("param_shapes"), list) for file in found.models.values())


def _take_foreign(found: EngineFiles) -> None:
    """Take out the files of ranks that the mesh does not have."""
    for files in (found.models, found.zeros, found.states):
        foreign = [rank for rank in sorted(files) if rank[0] >= found.dp or rank[1] >= found.tp]
        found.leftovers += [files.pop(rank).name for rank in foreign]


def _add_absent(found: EngineFiles, *, zeros: bool) -> None:
    """Add the ranks' files that the recorded sizes imply; ``zeros``: zero files, too."""
    every = [(dp, tp) for dp in range(found.dp) for tp in range(found.tp)]
    for dp, tp in every if found.stage_3 else [(0, tp) for tp in range(found.tp)]:
        prefix = f"zero_pp_rank_{dp}_" if found.stage_3 else ""
        found.models.setdefault((dp, tp), StepFile.absent(f"{prefix}mp_rank_{tp:02d}_model_states.pt"))
    if not zeros or (not found.zeros and not _kept_apart(found)):
        return
    config = next((file.tree.get("ds_config") for file in found.models.values() if file.tree), None)
    prefix = "bf16_" if dig(config, "bf16", "enabled") is True else ""
    prefix = next((file.name.partition("zero_")[0] for file in found.zeros.values()), prefix)
    for dp, tp in every:
        absent = StepFile.absent(f"{prefix}zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt")
        found.zeros.setdefault((dp, tp), absent)


def _add_absent_experts(found: EngineFiles) -> None:
    """Add the experts' files that ``num_experts`` implies, one number a layer; take out those of more experts."""
    recorded = next(filter(None, (_experts_in(file) for file in found.models.values())), ())
    if not recorded or sum(recorded) * found.tp > MAX_LOST * (len(found.experts) + len(found.models)):
        return
    for key in sorted(found.experts):
        layer, expert, tp = key
        if layer >= len(recorded) or expert >= recorded[layer] or tp >= found.tp:
            found.leftovers.append(found.experts.pop(key).name)
    for layer, count in enumerate(recorded):
        for key in ((layer, expert, tp) for expert in range(count) for tp in range(found.tp)):
            name = f"layer_{key[0]}_expert_{key[1]}_mp_rank_{key[2]:02d}_model_states.pt"
            found.experts.setdefault(key, StepFile.absent(name))


def _experts_in(file: StepFile) -> Sequence[int]:
    """Experts of each mixture-of-experts layer, as a model file records them."""
    recorded = file.tree.get("num_experts")
    sane = isinstance(recorded, list) and all(type(count) is int and 0 < count < 1 << 16 for count in recorded)
    return recorded if sane and isinstance(recorded, list) else ()
