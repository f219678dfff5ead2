"""The files of a checkpoint by ``torch.distributed.checkpoint``, and how they lie in a step's folder.

    <folder>/.metadata, __<rank>_<n>.distcp          written last, by rank 0, and renamed: it commits the save
    <folder>/__<rank>.metadata, __<rank>_<n>.distcp  without a coordinator (``use_collectives=False``): one a rank
    <step>/pytorch_model_fsdp_0/…, <step>/optimizer_0/…   accelerate and the Trainer: two such folders make a step
    <step>/model/…, <step>/optim/…                   so do those of scripts that call them by what is in them

A rank that got nothing to write leaves a file of 0 bytes. Sources: torch ``distributed/checkpoint/filesystem.py``;
huggingface/accelerate ``utils/fsdp_utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

from auditor.adapters.adapter import MAX_RANKS, Folder
from auditor.storage.store import Entry, ObjectMissingError, Store, base_name

METADATA, TEMPORARY = ".metadata", ".metadata.tmp"
LIGHTNING, TRAINER_STATE = "meta.pt", "trainer_state.json"
"""Where Lightning and the Trainer record the step."""
DATA = re.compile(r"__(\d{1,6})_(\d{1,9})\.distcp", re.A)
OWN_METADATA = re.compile(r"__(\d{1,6})\.metadata", re.A)
SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors", re.A)
"""A rank's part as HuggingFaceStorageWriter writes it; ranks count from 1."""
_PARTS = re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_\d{1,3})?", re.A)
_MODEL = re.compile(r"models?(?:_states?)?(?:_dict)?|weights|params")
_OPTIMIZER = re.compile(r"opt(?:im(?:izers?)?)?(?:_states?)?(?:_dict)?")
"""Names by scripts: parts of a step where one of either kind is there, for a ``model`` alone may be all of it."""
MEGATRON = frozenset({"metadata.json", "common.pt"})
"""Files of Megatron's form of a distributed checkpoint."""
PARTS_BELOW = "sharded"
"""Where HuggingFaceStorageWriter keeps the ranks' parts when it puts them together in the folder above."""
_STEP = re.compile(
    r"(?:.*[-_.=])?(?:checkpoint|ckpt|steps?|iter|iteration|global_step)[-_=]?(?P<named>\d{1,15})(?:\.ckpt)?|"
    r"(?P<counted>\d{1,15})", re.A,
)  # fmt: skip


def rank_of(name: str) -> int | None:
    """The rank that wrote a file, by its name."""
    found = DATA.fullmatch(name) or OWN_METADATA.fullmatch(name)
    rank = int(found[1]) if found else MAX_RANKS
    return rank if rank < MAX_RANKS else None


def number_in(name: str) -> tuple[int | None, bool]:
    """The number in a folder's name, and whether the name says that it is one of steps.

    ``checkpoint_3`` may as well be the third that was saved.
    """
    found = _STEP.fullmatch(name)
    if found is None:
        return None, False
    return int(found["named"] or found["counted"]), any(word in name for word in ("step", "iter"))


def is_step(value: object) -> TypeGuard[int]:
    """Whether what is recorded as a step may be one."""
    return type(value) is int and 0 <= value < 1 << 53


@dataclass(frozen=True, slots=True)
class Part:
    """One folder with an index of its own."""

    folder: Folder
    metadata: tuple[str, ...] = ()
    """The files that say what lies where; those that must be there but aren't, too."""
    data: tuple[str, ...] = field(default=())

    @property
    def coordinated(self) -> bool:
        """Whether one index was written for all ranks."""
        return not any(OWN_METADATA.fullmatch(name) for name in self.metadata)


def part_of(folder: Folder) -> Part | None:
    """A folder's index and data files; None where it has neither."""
    data = tuple(name for name in folder.files if DATA.fullmatch(name) and rank_of(name) is not None)
    own = {rank: name for name in folder.files if OWN_METADATA.fullmatch(name) and (rank := rank_of(name)) is not None}
    if METADATA in folder.files or (data and not own):
        return Part(folder, (METADATA,), data)
    if not own:
        return Part(folder, (METADATA,)) if TEMPORARY in folder.files else None
    # Every rank writes its own: those below the highest, and those of data files, must be there.
    highest = max([*own, *(rank_of(name) or 0 for name in data if folder.files[name].num_bytes)])
    return Part(folder, tuple(own.get(rank, f"__{rank}.metadata") for rank in range(highest + 1)), data)


def parts_of(store: Store, folder: Folder) -> list[Part]:
    """The parts of a step: the folder itself, or those below it that are the model and the optimizer."""
    own = part_of(folder)
    if own is not None:
        return [own]
    if folder.alone:
        return []
    by_script = _MODEL, _OPTIMIZER
    paired = all(any(map(kind.fullmatch, folder.folders)) for kind in by_script)
    kinds = (_PARTS, *by_script) if paired else (_PARTS,)
    named = [entry for name, entry in sorted(folder.folders.items()) if any(kind.fullmatch(name) for kind in kinds)]
    parts = [part for entry in named if (part := part_of(Folder.read(store, entry.name))) is not None]
    names = [base_name(part.folder.path) for part in parts if not MEGATRON.intersection(part.folder.files)]
    if all(any(map(kind.fullmatch, names)) for kind in by_script):
        return parts
    return [part for part in parts if _PARTS.fullmatch(base_name(part.folder.path))]


def is_inner(store: Store, folder: Folder) -> bool:
    """Whether a folder is a part of the step that the folder above it is."""
    above, _, name = folder.path.rpartition("/")
    named = (_PARTS, _MODEL, _OPTIMIZER)
    if not folder.path or not (name == PARTS_BELOW or any(kind.fullmatch(name) for kind in named)):
        return False
    try:
        parent = Folder.read(store, above)
    except ObjectMissingError:
        return False
    if name == PARTS_BELOW:
        return any(other.endswith(".safetensors") for other in parent.files)
    return part_of(parent) is None and any(part.folder.path == folder.path for part in parts_of(store, parent))


def files_of(store: Store, folder: Folder) -> Iterator[Entry]:
    """Every file of a step."""
    yield from folder.files.values()
    for part in parts_of(store, folder):
        if part.folder is not folder:
            yield from part.folder.files.values()


def is_plain_name(name: str) -> bool:
    """Whether an index's word for a file is the name of one beside it."""
    return 0 < len(name) < 256 and base_name(name) == name and name not in (".", "..") and "\\" not in name
