"""The files of one legacy Megatron-LM checkpoint: their names, which rank wrote them, which must be there.

    iter_<NNNNNNN>/mp_rank_<TT>[_<PPP>][_<EEE>]/model_optim_rng.pt
    iter_<NNNNNNN>/mp_rank_<TT>[_<PPP>][_<EEE>]/distrib_optim.pt      with the distributed optimizer

TT tensor-parallel rank, PPP pipeline stage (only where there are several), EEE expert-parallel rank (likewise): one
suffix alone may be either, which only the recorded sizes tell. Written by data-parallel rank 0 of each place.
Source: Megatron-LM ``megatron/training/checkpointing.py`` (get_checkpoint_name, generate_state_dict, save_checkpoint).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.adapter import MAX_LOST, MAX_RANKS, Folder
from auditor.adapters.megatron_names import megatron_args
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import RecordBudget, StoredTensor
from auditor.model.mesh import Coordinate, Mesh
from auditor.storage.store import Entry, StorageError, Store

RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
MAX_NODES = 1 << 20
"""Entries of a saved model that are looked at."""
MAX_NAME = 4096
"""Characters of the longest parameter name that is believed."""

Place = tuple[int, int, int]
"""Pipeline stage, expert-parallel rank, tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Sizes of the mesh axes; data-parallel ranks include the expert-parallel ones."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    tp_pp_dp: bool = False
    """Whether pipeline stages vary faster than data-parallel ranks (``--use-tp-pp-dp-mapping``)."""
    grid: bool = True
    """Whether every stage, expert-parallel and tensor-parallel rank meet; not where experts have a tensor-parallel size
    of their own."""

    @property
    def mesh(self) -> Mesh:
        """Ranks in Megatron's order, tensor-parallel fastest (``tp-cp-ep-dp-pp``)."""
        if self.ep == 1:
            outer = (("dp", self.dp), ("pp", self.pp)) if self.tp_pp_dp else (("pp", self.pp), ("dp", self.dp))
            inner = (("cp", self.cp),) if self.cp > 1 else ()
            return Mesh((*outer, *inner, ("tp", self.tp)), ordered=True)
        # Expert-parallel ranks are data-parallel ranks of everything else; context parallelism interleaves with them.
        axes = (("pp", self.pp), ("edp", max(1, self.dp // self.ep)), ("ep", self.ep), ("cp", self.cp), ("tp", self.tp))
        return Mesh(axes, ordered=self.cp == 1 and self.grid and not self.tp_pp_dp)

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stored_once(self) -> tuple[str, ...]:
        """Axes along which one rank alone writes."""
        once = {"edp" if self.ep > 1 else "dp": self.dp // self.ep, "cp": self.cp}
        return tuple(axis for axis, degree in once.items() if degree > 1)

    def places(self) -> Iterator[Place]:
        """Every place that has a folder."""
        return ((p, e, t) for p in range(self.pp) for e in range(self.ep) for t in range(self.tp))

    def coordinate(self, place: Place) -> Coordinate:
        """The coordinate of a place."""
        stage, expert, tensor = place
        return Coordinate.of(pp=stage, tp=tensor, **({"ep": expert} if self.ep > 1 else {}))

    def folder(self, place: Place) -> str:
        """The name of a place's folder."""
        stage, expert, tensor = place
        pp, ep = (f"_{stage:03d}" if self.pp > 1 else ""), (f"_{expert:03d}" if self.ep > 1 else "")
        return f"mp_rank_{tensor:02d}{pp}{ep}"

    def place(self, folder: str) -> Place | None:
        """The place of a folder, None where the mesh does not have it."""
        found = RANK.fullmatch(folder)
        suffixes = [int(number) for number in found.groups()[1:] if number] if found else []
        if found is None or len(suffixes) != (self.pp > 1) + (self.ep > 1):
            return None
        stage = suffixes[0] if self.pp > 1 else 0
        place = stage, suffixes[-1] if self.ep > 1 else 0, int(found[1])
        return place if stage < self.pp and place[1] < self.ep and place[2] < self.tp else None

    def writer(self, rank: int) -> tuple[int, int]:
        """Stage and tensor-parallel rank of global rank ``rank``."""
        inner = self.tp * self.cp * (self.ep if self.tp_pp_dp else self.dp)
        return rank // inner % self.pp, rank % self.tp


def listing(store: Store, folder: Folder) -> Folder:
    """``folder`` with what lies in its rank folders as files, ``mp_rank_00/model_optim_rng.pt``.

    A rank folder that can't be listed is as one without files: opening what must be in it will tell.
    """
    files: dict[str, Entry] = dict(folder.files)
    for name, entry in folder.folders.items():
        if RANK.fullmatch(name):
            try:
                inside = Folder.read(store, entry.name)
            except StorageError:
                continue
            files |= {f"{name}/{file}": found for file, found in inside.files.items()}
    return Folder(folder.path, files, folder.folders)


def model_files(listed: Folder) -> list[str]:
    """The rank files in a listing, by name."""
    return [name for name in listed.files if name.endswith(f"/{MODEL_FILE}")]


def recorded_step(file: StepFile) -> int | None:
    """The iteration that a rank file records."""
    value = file.tree.get("iteration", file.tree.get("total_iters"))
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def models_in(tree: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """The saved model, or its chunks in order where the pipeline is interleaved, with their keys."""
    if "model" in tree:
        return [("model", tree["model"])]
    chunks: list[tuple[str, Any]] = []
    while f"model{len(chunks)}" in tree and len(chunks) < MAX_RANKS:
        chunks.append((f"model{len(chunks)}", tree[f"model{len(chunks)}"]))
    return chunks


def flattened(value: object) -> dict[str, StoredTensor]:
    """Nested dictionaries as one, keys joined by dots, without a layer's extra state (scales of FP8 and the like)."""
    found: dict[str, StoredTensor] = {}
    stack: list[tuple[str, object]] = [("", value)]
    budget = MAX_NODES
    while stack and budget > 0:
        name, node = stack.pop()
        budget -= 1
        if isinstance(node, StoredTensor):
            found.setdefault(name, node)
        elif isinstance(node, dict) and len(node) <= budget:
            keys = [key for key in node if isinstance(key, str) and len(name) + len(key) < MAX_NAME]
            inside = [(f"{name}.{key}" if name else key, node[key]) for key in keys if not key.endswith("_extra_state")]
            stack.extend(reversed(inside))
    return found


@dataclass(frozen=True, slots=True)
class StepFiles:
    """All files of one step, those that must be there but aren't included."""

    degrees: Degrees
    models: Mapping[Place, StepFile]
    optimizers: Mapping[Place, StepFile]
    """``distrib_optim.pt``, where the distributed optimizer was used."""
    args: Mapping[str, object]
    """Megatron's arguments, as the first readable file has them."""
    leftovers: Sequence[str] = ()
    odd: Mapping[str, str] = field(default_factory=dict)
    """Rank file to what it records of the mesh that is impossible or not what the others record."""

    def all(self) -> Iterator[tuple[StepFile, Coordinate]]:
        """Every file with the coordinate of the rank whose state it holds."""
        for files in (self.models, self.optimizers):
            for place, file in sorted(files.items()):
                yield file, self.degrees.coordinate(place)

    def opaque(self) -> Counter[str]:
        """Unknown objects met in all files, by class."""
        total: Counter[str] = Counter()
        for file, _ in self.all():
            total.update(file.content.opaque if file.content else {})
        return total


def read_step_files(store: Store, folder: Folder, *, names_only: bool = False) -> StepFiles:
    """Read every rank file, then add those that the recorded sizes imply.

    ``names_only``: open rank files only until one tells the sizes.
    """
    listed = listing(store, folder)
    read: dict[str, StepFile] = {}
    told, budget = False, RecordBudget()
    for name in model_files(listed):
        skip = names_only and told
        read[name] = StepFile.unopened(listed, name) if skip else StepFile.read(store, listed, name, budget)
        told = told or bool(megatron_args(read[name]))
    args = next(filter(None, map(megatron_args, read.values())), {})
    degrees, odd = _degrees(read)
    places = {degrees.place(name.split("/")[0]): name for name in reversed([*read])}
    wanted = degrees.places() if degrees.grid else (place for place in sorted(places, key=str) if place)
    models = {
        place: read[places[place]]
        if place in places
        else _unlisted(store, listed, f"{degrees.folder(place)}/{MODEL_FILE}")
        for place in wanted
    }
    optimizers = {}
    distributed = _distributed(args) or any(name.endswith(f"/{OPTIMIZER_FILE}") for name in listed.files)
    for place, file in models.items():
        name = f"{file.name.split('/')[0]}/{OPTIMIZER_FILE}"
        if name not in listed.files and distributed:
            optimizers[place] = _unlisted(store, listed, name)
        elif name in listed.files:
            unread = StepFile.unopened(listed, name)
            optimizers[place] = unread if names_only else StepFile.read(store, listed, name, budget)
    taken = {file.name for file in models.values()}
    leftovers = [name for name in read if name not in taken]
    return StepFiles(degrees, models, optimizers, args, leftovers, odd)


def _unlisted(store: Store, listed: Folder, name: str) -> StepFile:
    """A file that must be there but was not listed: missing, unless its folder could not be listed."""
    if name.split("/")[0] in listed.folders:
        return StepFile.read(store, listed, name)
    return StepFile.absent(name)


def _distributed(args: Mapping[str, object]) -> bool:
    return args.get("use_distributed_optimizer") is True and not args.get("no_save_optim")


def _degrees(read: Mapping[str, StepFile]) -> tuple[Degrees, dict[str, str]]:
    """The sizes that most files record; counted from names only where none records any. And what contradicts them."""
    recorded = {name: found for name, file in read.items() if (found := recorded_degrees(file))}
    odd = {
        name: f"records a mesh of {found.num_ranks} ranks"
        for name, found in recorded.items()
        if max(found.num_ranks, found.ep) > MAX_RANKS
        or found.pp * found.ep * found.tp > MAX_LOST * len(read)
        or (found.grid and found.dp % found.ep)
    }
    possible = Counter(found for name, found in recorded.items() if name not in odd)
    if not possible:
        return _counted(read), odd
    degrees = possible.most_common(1)[0][0]
    odd |= {
        name: f"records the mesh {found.mesh}, others {degrees.mesh}"
        for name, found in recorded.items()
        if name not in odd and found != degrees
    }
    return degrees, odd


def recorded_degrees(file: StepFile) -> Degrees | None:
    """The sizes in one file's ``args``; None where it holds none."""
    args = megatron_args(file)
    if not args:
        return None

    def size(key: str) -> int | None:
        value = args.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31 else None

    # Before 2021 the tensor-parallel size was called the model-parallel size.
    tp = size("tensor_model_parallel_size") or size("model_parallel_size") or 1
    pp, cp = size("pipeline_model_parallel_size") or 1, size("context_parallel_size") or 1
    dp = size("data_parallel_size") or max(1, (size("world_size") or 1) // (tp * pp * cp))
    ep = size("expert_model_parallel_size") or 1
    grid = ep == 1 or (size("expert_tensor_parallel_size") or tp) == tp
    return Degrees(pp, dp, cp, ep, tp, args.get("use_tp_pp_dp_mapping") is True, grid)


def _counted(read: Mapping[str, StepFile]) -> Degrees:
    """Sizes by folder names; one suffix is taken for the pipeline stage, the more usual of the two."""
    found = [match for name in read if (match := RANK.fullmatch(name.split("/")[0]))]
    numbers = [[int(group) + 1 if group else 1 for group in match.groups()] for match in found]
    tp, pp, ep = (max((n for n in column if n <= MAX_RANKS), default=1) for column in zip(*numbers, strict=True))
    degrees = Degrees(pp=pp, tp=tp, ep=ep, dp=ep)
    return degrees if degrees.num_ranks <= MAX_RANKS else Degrees()
