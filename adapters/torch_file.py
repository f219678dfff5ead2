"""One ``torch.save`` file a step, as most training scripts, Lightning and timm write them.

    model_10.pt, model_20.pt, …                    files of one folder whose names differ in the step
    epoch=1-step=100.ckpt                          Lightning's; checkpoint-10.pth.tar: timm's
    step_10/checkpoint.pt, step_20/checkpoint.pt   a folder a step, with one file that holds a model
    step_10/model.pt, step_10/optim.pt             and perhaps others with the state of its optimizer
    last.ckpt, model_best.pt                       files by themselves, without a number
    ckpt_10.pt, optim_10.pt; G_10.pth, D_10.pth    files of one step, by their numbers

Each holds a model's state dict, or the pickled module itself (under ``model``, ``state_dict``, ``net`` and the like, or
as the whole file), and perhaps an optimizer's in torch's integer-keyed form. Files that hold no model (tokenizers,
arguments, data) are no steps; files whose names number ranks or parts of one save neither. Which tensor is what is told
as for a rank's file (:mod:`auditor.adapters.torch_per_rank`); what is replicated over ranks is stored once.

A step is numbered as the file records it; the number in the name counts where most of a run's files record what their
names tell (:class:`~auditor.adapters.adapter.Match`).
Source: the pattern is that of scripts; Lightning ``pytorch/callbacks/model_checkpoint.py``, timm
``utils/checkpoint_saver.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.file_sets import joined
from auditor.adapters.file_steps import MAX_BESIDE, Holds, file_series, matched, step_of_file
from auditor.adapters.step_file import StepFile
from auditor.adapters.step_names import (
    FOREIGN,
    TORCH_SUFFIXES,
    StepName,
    called_as_optimizers,
    is_likely,
    is_part,
    step_name,
)
from auditor.adapters.torch_file_set import SetReading, recognise_set
from auditor.adapters.torch_per_rank.catalog import PerRankReading
from auditor.adapters.torch_per_rank.files import NAME, STEPS, Series, holds_model, rank_state, recorded, state_alone
from auditor.containers.torch_zip import SCRIPT
from auditor.model.catalog import Catalog
from auditor.storage.store import Store, base_name


class TorchFiles:
    """The adapter."""

    name = "torch-file"
    looks_for = "torch.save files with a model, numbered (model_10.pt, model_20.pt) or in folders that are (step_10/)"

    def step_files(self, store: Store, folder: Folder) -> Iterator[Sequence[Folder]]:
        """Series of numbered files, those of one save together, then files without a number with a model in them."""
        some = any(name.endswith(TORCH_SUFFIXES) for name in folder.files)
        if some and not any(map(FOREIGN.fullmatch, folder.files)):
            found = [*file_series(folder, TORCH_SUFFIXES, partial(_holds, store))]
            yield from joined([series for series in found if series.numbered])
            for series in found:
                if not series.numbered and series.holds is Holds.MODEL:
                    yield [*map(Folder.of_file, series.entries)]

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """A file with a model; a numbered folder with one such file."""
        if folder.alone:
            return self._recognise_file(store, folder)
        if folder.is_of_files:
            return recognise_set(store, folder)
        number = step_name(folder_name(store, folder), strict=True)
        names = _candidates(folder)
        if not names:
            return Declined("it holds no torch file that could be a whole model's")
        if number is None:
            return Declined(f"it holds {names[0]}, but its name tells no step: its files are looked at one by one", 0.2)
        found = _models(_opened(store, folder, names))
        if len(found) != 1:
            what = f"{len(found)} torch files with a model" if found else "torch files, but none holds a model"
            return Declined(f"it holds {what}; a step is one file", 0.3)
        return _matched(found[0], number, f"{found[0].name} is the one torch file with a model in it")

    def _recognise_file(self, store: Store, folder: Folder) -> Match | Declined:
        (name,) = folder.files
        if NAME.fullmatch(name):
            return Declined("its name is that of one rank's file")
        file, called = StepFile.read(store, folder, name), name or base_name(folder.path)
        if file.content and file.content.container == SCRIPT:
            return Declined(f"{called} is a TorchScript program (torch.jit.save), which no training goes on from", 0.2)
        if file.content and not rank_state(file).found:
            return Declined(f"{called} holds no model's state dict", 0.2)
        # In a folder, step_files has told that it is one.
        if not file.content and name and not name.endswith((".pt", ".pth")):
            return Declined("it could not be read as a torch file", 0.1)
        number = step_of_file(store, folder)
        return _matched(file, number, "a torch file with a model" if file.content else "a torch file by name")

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """Scripts agree on none."""
        return None

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        if folder.is_of_files and not folder.alone:
            return SetReading(store, folder, options).catalog(match.step, self.name)
        names = list(folder.files) if folder.alone else _candidates(folder)
        opened = _opened(store, folder, names) if len(names) > 1 else []
        found = [file.name for file in _models(opened)] or names
        if states := [file.name for file in opened if file.name not in found and _holds_state(file)]:
            together = replace(folder, files={name: folder.files[name] for name in (*found, *states)})
            beside = [entry.name for name, entry in folder.files.items() if name not in together.files]
            return SetReading(store, together, options).catalog(match.step, self.name, beside)
        part = folder.alone and is_part(found[0] or base_name(folder.path))
        series = Series(found[0], "", {0: found[0]}, whole=not part)
        return PerRankReading(store, folder, series, options).catalog(match.step, self.name)


def _candidates(folder: Folder) -> list[str]:
    """Files of a folder that may be the one that holds its model."""
    names = [name for name in folder.files if name.endswith(TORCH_SUFFIXES)]
    if not 0 < len(names) <= MAX_BESIDE:
        return []
    foreign = any(FOREIGN.fullmatch(name) or NAME.fullmatch(name) for name in folder.files)
    return [] if foreign else [name for name in names if not is_part(name)]


def _opened(store: Store, folder: Folder, names: Sequence[str]) -> list[StepFile]:
    return [StepFile.read(store, folder, name) for name in names]


def _models(opened: Sequence[StepFile]) -> list[StepFile]:
    """Those that hold a model; if none can be read, those that are called so."""
    found = [file for file in opened if file.content is not None and holds_model(file)]
    return found or [file for file in opened if file.content is None and is_likely(file.name)]


def _holds_state(file: StepFile) -> bool:
    """Whether it holds an optimizer's state alone; of one that can't be read, whether it is called so."""
    return called_as_optimizers(file.name) if file.content is None else state_alone(file)[1] is not None


def _holds(store: Store, folder: Folder) -> Holds | None:
    file = StepFile.read(store, folder, "")
    if file.content is None:
        return None
    if holds_model(file):
        return Holds.MODEL
    return Holds.OPTIMIZER if state_alone(file)[1] is not None else Holds.OTHER


def _matched(file: StepFile, number: StepName | None, reason: str) -> Match:
    return matched(number, recorded(file, *STEPS), reason, unread=file.content is None)
