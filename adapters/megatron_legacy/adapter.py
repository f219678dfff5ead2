"""Legacy Megatron-LM checkpoints: one ``torch.save`` file a model-parallel rank (``--ckpt-format torch``).

A step is a folder of rank folders, ``iter_0001000/mp_rank_00_000/model_optim_rng.pt``; the tracker file beside the
steps holds the number of the newest, or ``release`` for a checkpoint without one. Data-parallel rank 0 alone writes:
replicas over tensor- and pipeline-parallel ranks are kept, those over data-parallel ranks are lost. Tensors are called
as in the unsharded model, layers counted through.
Source: Megatron-LM ``megatron/training/checkpointing.py``.
"""

from __future__ import annotations

import re

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.megatron_legacy.catalog import MegatronReading
from auditor.adapters.megatron_legacy.files import RANK, listing, model_files, models_in, recorded_step
from auditor.adapters.step_file import StepFile
from auditor.model.catalog import Catalog
from auditor.storage.store import Store, join, read_text

TRACKER = "latest_checkpointed_iteration.txt"
_STEP_FOLDER = re.compile(r"iter_(\d{1,15})")


class MegatronLegacy:
    """The adapter."""

    name = "megatron-legacy"
    looks_for = "folders mp_rank_* that hold model_optim_rng.pt, a saved dictionary with model and args"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the rank folders, and by what a rank file holds.

        The step is the one that files record. A single stale file must not decide, so what a file records counts if
        the folder's number or a second file says the same.
        """
        number = _STEP_FOLDER.fullmatch(folder_name(store, folder))
        ranks = [name for name in folder.folders if RANK.fullmatch(name)]
        if not ranks:
            return Declined("it has no folders mp_rank_*", 0.2 if number else 0.0)
        listed = listing(store, folder)
        names = model_files(listed)
        if not names:
            return Declined(f"none of its {len(ranks)} folders mp_rank_* holds model_optim_rng.pt", 0.6)
        stated = int(number[1]) if number else None
        seen: list[int] = []
        num_readable = num_models = 0
        for name in names:
            file = StepFile.read(store, listed, name)
            num_readable += file.content is not None
            num_models += bool(models_in(file.tree))
            step = recorded_step(file)
            if models_in(file.tree) and step is not None and (step == stated or step in seen):
                reason = f"{len(names)} rank files; {name} holds model and records iteration={step}"
                return Match(step, reason, stated)
            seen += [step] if step is not None else []
        if num_readable and not num_models:
            return Declined("no model_optim_rng.pt holds a model", 0.7)
        step = stated if stated is not None else seen[0] if seen else 0
        return Match(step, f"{len(names)} rank files by name; their iteration could not be confirmed")

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """The tracker: a number or ``release``."""
        if TRACKER not in folder.files:
            return None
        name = join(folder.path, TRACKER)
        text = read_text(store, name).strip()
        step = f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,15}", text) else "release" if text == "release" else ""
        return Pointer(name, join(folder.path, step) if step else "")

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        return MegatronReading(store, folder, options).catalog(match.step, self.name)
