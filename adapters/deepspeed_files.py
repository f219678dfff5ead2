"""The files of one checkpoint of a plain DeepSpeed engine: their names, what rank wrote them, which must be there.

    mp_rank_<MM>_model_states.pt                           MM model-parallel rank
    zero_pp_rank_<D>_mp_rank_<MM>_model_states.pt          stage 3: D data-parallel rank, not padded
    [bf16_]zero_pp_rank_<D>_mp_rank_<MM>_optim_states.pt   with ZeRO or BF16_Optimizer

Nothing in the folder marks completeness, so what must be there follows from recorded world sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.adapters.adapter import MAX_LOST, MAX_RANKS, Folder
from auditor.adapters.deepspeed_records import count_in
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import RecordBudget
from auditor.model.mesh import Coordinate, Mesh
from auditor.storage.store import Store

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d{2,})_model_states\.pt")
ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d{2,})_optim_states\.pt")

Rank = tuple[int, int]
"""Data- and model-parallel rank."""


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """All files of one step, those that must be there but aren't included."""

    dp: int
    tp: int
    """Sizes of the mesh axes. A plain engine's model-parallel ranks are tensor-parallel ones."""
    stage_3: bool
    models: Mapping[Rank, StepFile]
    """One a model-parallel rank, under data-parallel rank 0; of all ranks in stage 3."""
    zeros: Mapping[Rank, StepFile]
    leftovers: Sequence[str] = ()
    """Files named as this format's, but of ranks that the mesh does not have, or there twice."""
    impossible: Mapping[str, str] = field(default_factory=dict)
    """Model file to the recorded size in it that no run can have."""

    @property
    def mesh(self) -> Mesh:
        """Global rank = dp · tp_degree + tp, as Megatron and DeepSpeed count them."""
        axes = (("dp", self.dp), ("tp", self.tp))
        return Mesh(axes if self.tp > 1 else axes[:1], ordered=True)

    def coordinate(self, rank: Rank, *, of_dp: bool = True) -> Coordinate:
        """A rank's place; ``of_dp``: whether what it saved is its own and not that of all data-parallel ranks."""
        dp, tp = rank
        axes = ({"dp": dp} if of_dp else {}) | ({"tp": tp} if self.tp > 1 else {})
        return Coordinate.of(**axes)

    def all(self) -> Iterator[tuple[StepFile, Coordinate]]:
        """Every file with the coordinate of the rank whose state it holds."""
        for rank, file in sorted(self.models.items()):
            yield file, self.coordinate(rank, of_dp=self.stage_3)
        for rank, file in sorted(self.zeros.items()):
            yield file, self.coordinate(rank)

    def opaque(self) -> Counter[str]:
        """Unknown objects met in all files, by class."""
        total: Counter[str] = Counter()
        for file, _ in self.all():
            total.update(file.content.opaque if file.content else {})
        return total


def read_engine_files(store: Store, folder: Folder, *, names_only: bool = False) -> EngineFiles:
    """Read every file of the step, then add those that the recorded sizes imply.

    ``names_only``: open the first readable model file alone, which says what must be there.
    """
    models: dict[Rank, StepFile] = {}
    zeros: dict[Rank, StepFile] = {}
    leftovers: list[str] = []
    budget, told = RecordBudget(), False
    stage_3 = any(found[1] for name in folder.files if (found := MODEL.fullmatch(name)))
    for name in sorted(folder.files, key=_natural):
        found = MODEL.fullmatch(name)
        target = models if found else zeros
        found = found or ZERO.fullmatch(name)
        if not found:
            continue
        rank = int(found[1] or 0), int(found[2])
        if rank in target or (target is models and stage_3 and found[1] is None):
            leftovers.append(name)
            continue
        skip = names_only and (told or target is zeros)
        target[rank] = StepFile.unopened(folder, name) if skip else StepFile.read(store, folder, name, budget)
        told = told or (target is models and bool(target[rank].tree))
    dp, tp, impossible = _degrees(models, zeros)
    leftovers += _take_foreign(dp, tp, models, zeros)
    _add_absent(dp, tp, stage_3, models, zeros)
    return EngineFiles(dp, tp, stage_3, models, zeros, leftovers, impossible)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorting key under which rank 10 comes after rank 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _degrees(models: Mapping[Rank, StepFile], zeros: Mapping[Rank, StepFile]) -> tuple[int, int, dict[str, str]]:
    """Recorded sizes first, so that missing files show; counting files only where nothing is recorded.

    Also returns the file to the recorded size that is set aside because no run can have it.
    """
    ranks = [*models, *zeros]
    counted_dp = 1 + max((dp for dp, _ in ranks if dp < MAX_RANKS), default=0)
    counted_tp = 1 + max((tp for _, tp in ranks if tp < MAX_RANKS), default=0)
    impossible: dict[str, str] = {}
    found: Counter[tuple[int, int]] = Counter()
    for _, file in sorted(models.items()):
        dp, tp = count_in(file, "dp_world_size") or counted_dp, count_in(file, "mp_world_size") or counted_tp
        if not file.content:
            continue
        if dp * tp <= min(MAX_RANKS, MAX_LOST * len(ranks)):
            found[dp, tp] += 1
        else:
            impossible[file.name] = f"records a mesh of {dp} x {tp} ranks, of which {len(ranks)} files are here"
    # A stale file must not decide: what most files record.
    (dp, tp), _ = found.most_common(1)[0] if found else ((counted_dp, counted_tp), 0)
    return dp, tp, impossible


def _take_foreign(dp: int, tp: int, models: dict[Rank, StepFile], zeros: dict[Rank, StepFile]) -> list[str]:
    """Take out the files of ranks that the mesh does not have; their names."""
    return [
        files.pop(rank).name for files in (models, zeros) for rank in sorted(files) if rank[0] >= dp or rank[1] >= tp
    ]


def _add_absent(dp: int, tp: int, stage_3: bool, models: dict[Rank, StepFile], zeros: dict[Rank, StepFile]) -> None:
    """Add what the recorded sizes imply."""
    for rank in ((d, m) for d in range(dp if stage_3 else 1) for m in range(tp)):
        prefix = f"zero_pp_rank_{rank[0]}_" if stage_3 else ""
        models.setdefault(rank, StepFile.absent(f"{prefix}mp_rank_{rank[1]:02d}_model_states.pt"))
    # Names of parameters with their shapes are recorded where their optimizer state lies in files of its own.
    apart = any(isinstance(file.tree.get("param_shapes"), list) for file in models.values())
    if not zeros and not apart:
        return
    config = next((file.tree.get("ds_config") for file in models.values() if file.tree), None)
    bf16 = config.get("bf16") if isinstance(config, dict) else None
    prefix = "bf16_" if isinstance(bf16, dict) and bf16.get("enabled") is True else ""
    prefix = next((file.name.partition("zero_")[0] for file in zeros.values()), prefix)
    for rank in ((d, m) for d in range(dp) for m in range(tp)):
        name = f"{prefix}zero_pp_rank_{rank[0]}_mp_rank_{rank[1]:02d}_optim_states.pt"
        zeros.setdefault(rank, StepFile.absent(name))
