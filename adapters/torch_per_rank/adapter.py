"""One ``torch.save`` file a rank, as training scripts with DistributedDataParallel write them.

    <step folder>/<stem>rank<N><rest>.pt       e.g. rank_0.pt, rank_1.pt or checkpoint_rank0.pth
    step_10_rank_0.pt, step_10_rank_1.pt, …    files of several steps in one folder, by the number of the step

Files belong together if their names differ in the number after ``rank`` alone; where there is but one, and it records
no ``world_size``, that is all of the step (INT013 speaks where other saves have more). Each holds a model's state dict
(under ``model``, ``state_dict``, ``module``, ``model_state_dict`` and the like, or the whole file is one) and perhaps
an optimizer's in torch's integer-keyed form.

A tensor is a replica over ``dp`` only if every file has it with one shape and dtype, and nothing says otherwise:
records of DTensor or ShardedTensor mean that files hold parts, recorded tensor- or pipeline-parallel sizes above 1 that
ranks differ. Then, and where names or shapes differ, it is undetermined, unless ``[placement.dp]`` states it; what one
rank alone lacks of a model that all hold is a problem. Where no file records ``world_size``, ranks are only counted.
Source: torch ``torch/nn/parallel/distributed.py``; the pattern is that of scripts, no library writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer
from auditor.adapters.step_file import StepFile
from auditor.adapters.step_names import last_number
from auditor.adapters.torch_per_rank.catalog import PerRankReading
from auditor.adapters.torch_per_rank.files import (
    NAME,
    STEPS,
    Series,
    rank_state,
    recorded,
    series_in,
    step_in_rank_name,
)
from auditor.model.catalog import Catalog
from auditor.storage.store import Entry, Store, base_name

_TORCH_NAMES = (".pt", ".pth")


class TorchPerRank:
    """The adapter."""

    name = "torch-per-rank"
    looks_for = "files that differ in the number after `rank` alone (rank_0.pt, rank_1.pt), with a model"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By one series of rank files of which a readable one holds a model's state dict."""
        found: list[tuple[Series, Match]] = []
        nearest = Declined("no file's name has `rank` and a number")
        for series in series_in(folder):
            verdict = self._recognise(store, folder, series)
            if isinstance(verdict, Match):
                found.append((series, verdict))
            elif verdict.nearness >= nearest.nearness:
                nearest = verdict
        if len(found) > 1:
            names = ", ".join(f"{series.head}*{series.tail}" for series, _ in found[:3])
            return Declined(f"it holds several series of rank files ({names}); a step needs a folder of its own", 0.9)
        return found[0][1] if found else nearest

    def _recognise(self, store: Store, folder: Folder, series: Series) -> Match | Declined:
        in_name = step_in_rank_name(next(iter(series.names.values())))
        stated = in_name.number if in_name else last_number(base_name(folder.path))
        steps: list[int] = []
        num_models = 0
        for name in series.names.values():
            file = StepFile.read(store, folder, name)
            if file.content and not rank_state(file).found:
                return Declined(f"{name} holds no model's state dict", 0.2)
            num_models += file.content is not None
            step = recorded(file, *STEPS)
            steps += [step] if step is not None else []
            # A stale file must not decide alone: the folder's number or another file has to agree.
            if file.content and (step is None or step == stated or steps.count(step) > 1):
                break
        if folder.alone:
            (name,) = folder.files
            if not NAME.fullmatch(name):
                return Declined("its name is not that of a rank's file", 0.1)
            if not num_models and not name.endswith(_TORCH_NAMES):
                return Declined("it could not be read as a torch file", 0.1)
            reason = "a torch file with a model" if num_models else "a torch file by name"
            return Match(steps[0] if steps else 0, reason)
        if not num_models:
            return Declined(f"none of {len(series.names)} rank files could be read", 0.4)
        agreed = next((step for step in steps if step == stated or steps.count(step) > 1), None)
        told = next((s for s in (agreed, stated if len(steps) > 1 else None, *steps, stated) if s is not None), None)
        held = f"{len(series.names)} files {series.head}*{series.tail}, each with a model"
        numbered = in_name.number if in_name and folder.is_of_files and not in_name.of_epoch else None
        return Match(told or 0, held, numbered=numbered, unread=not num_models, apart=told is None)

    def step_files(self, store: Store, folder: Folder) -> Iterator[Sequence[Folder]]:
        """Files of several steps in one folder: those of the ranks that saved one step together."""
        series: dict[str, dict[int, list[Entry]]] = {}
        for name, entry in folder.files.items():
            told = step_in_rank_name(name)
            if told and told.number is not None:
                series.setdefault(told.series, {}).setdefault(told.number, []).append(entry)
        for steps in series.values():
            yield [Folder.of_files(entries) for _, entries in sorted(steps.items())]

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """Scripts agree on none."""
        return None

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        first, *others = series_in(folder)
        matching = (s for s in (first, *others) if isinstance(self._recognise(store, folder, s), Match))
        series = next(matching, first) if others else first
        return PerRankReading(store, folder, series, options).catalog(match.step, self.name)
