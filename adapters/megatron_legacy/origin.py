"""Which rank files of a legacy Megatron-LM checkpoint were written by another rank than their place says.

Every rank's file has the same name, so a file in the wrong folder doesn't show by names. Two things tell: ``args``
holds the global rank of the process that saved it; and a copy has the same checksums as its origin, which no two
model-parallel ranks share that hold different parts. Tools that convert checkpoints write all files from one process:
where all files record one rank, ranks say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from auditor.adapters.adapter import Folder
from auditor.adapters.megatron_legacy.files import Place, StepFiles
from auditor.adapters.megatron_names import megatron_args
from auditor.adapters.step_file import StepFile
from auditor.adapters.stored_sums import storage_sums
from auditor.storage.store import Store, join


def misplaced(store: Store, folder: Folder, files: StepFiles) -> Iterator[tuple[Place, str]]:
    """Places whose file is another rank's, with what shows it."""
    ranks = {place: _rank(file) for place, file in sorted(files.models.items()) if file.content}
    recorded = {rank for rank in ranks.values() if rank is not None}
    wrong: dict[Place, str] = {}
    if len(recorded) > 1:
        for place, rank in ranks.items():
            stage, tensor = files.degrees.writer(rank) if rank is not None else (place[0], place[2])
            if (stage, tensor) != (place[0], place[2]):
                wrong[place] = f"was saved by rank {rank}, which is pp={stage},tp={tensor}"
    for copies in _copies(store, folder, files, ranks):
        if not any(place in wrong for place in copies):
            # Which of them is the origin shows, if at all, by the recorded rank.
            origin = next((place for place in copies if _fits(files, place, ranks[place])), copies[0])
            name = files.degrees.folder(origin)
            wrong |= {place: f"holds the same bytes as that of {name}" for place in copies if place != origin}
    yield from sorted(wrong.items())


def _rank(file: StepFile) -> int | None:
    rank = megatron_args(file).get("rank")
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None


def _fits(files: StepFiles, place: Place, rank: int | None) -> bool:
    return rank is not None and files.degrees.writer(rank) == (place[0], place[2])


def _copies(store: Store, folder: Folder, files: StepFiles, ranks: Mapping[Place, int | None]) -> Iterator[list[Place]]:
    """Sets of places whose files hold the same bytes. Only files of one size that record one rank are looked into."""
    if files.degrees.tp * files.degrees.pp == 1:
        # Expert-parallel ranks of a model without experts hold the same.
        return
    alike: dict[object, list[Place]] = {}
    for place, rank in ranks.items():
        content = files.models[place].content
        alike.setdefault((rank, content.entry.num_bytes if content else 0), []).append(place)
    for suspects in alike.values():
        if len(suspects) > 1:
            same: dict[object, list[Place]] = {}
            for place in suspects:
                sums = storage_sums(store, join(folder.path, files.models[place].name))
                same.setdefault(sums or place, []).append(place)
            yield from (places for places in same.values() if len({(p, t) for p, _, t in places}) > 1)
