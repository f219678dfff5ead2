"""Checkpoints by ``torch.distributed.checkpoint`` (DCP): FSDP2, tensor parallelism, torchtitan, Lightning, accelerate.

A step is a folder with an index, ``.metadata``, and data files ``__<rank>_<n>.distcp``; accelerate and the Trainer put
two such folders (``pytorch_model_fsdp_0``, ``optimizer_0``) beside each other into one step's, and scripts do so under
names of their own (``model``, ``optim``). HuggingFaceStorageWriter leaves a rank's parts in safetensors files.
Megatron's ``torch_dist`` has names and rules of its own: another format.
Sources: torch ``torch/distributed/checkpoint`` (2.0 to 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from auditor.adapters.adapter import Declined, Folder, Match, Options, Pointer, folder_name
from auditor.adapters.dcp.catalog import DcpReading
from auditor.adapters.dcp.files import (
    LIGHTNING,
    MEGATRON,
    TRAINER_STATE,
    Part,
    files_of,
    is_inner,
    is_step,
    number_in,
    parts_of,
)
from auditor.adapters.dcp.objects import recorded_step
from auditor.adapters.dcp.safetensors import ShardReading, shard_files
from auditor.adapters.dcp.sources import open_index
from auditor.adapters.hugging_face.files import open_json
from auditor.adapters.step_file import StepFile
from auditor.adapters.step_names import step_name
from auditor.model.catalog import Catalog
from auditor.storage.store import Entry, Store

MAX_INDEX_BYTES = 16 << 20
"""An index that is read only to find a step in it is not longer: about a second."""
_WITHIN, _NOTHING = "there is a step in the folder's name", "nothing tells a step"
_APART = (_WITHIN, _NOTHING)


class TorchDcp:
    """The adapter."""

    name = "torch-dcp"
    looks_for = "`.metadata` or `__<rank>.metadata` with files __<rank>_<n>.distcp beside it"

    def recognise(self, store: Store, folder: Folder) -> Match | Declined:
        """By the names of its files."""
        parts = parts_of(store, folder)
        shards = shard_files(folder)
        if not parts and not shards:
            return Declined("it holds no .metadata and no file __<rank>_<n>.distcp")
        if folder.alone:
            return Declined("it is one file of several that make up a step", 0.6)
        if own := MEGATRON.intersection(folder.files):
            return Declined(f"it is Megatron's form of a distributed checkpoint: it holds {min(own)}", 0.5)
        if is_inner(store, folder):
            return Declined("it is a part of the checkpoint in the folder above it", 0.3)
        step, reason, named = self._step(store, folder, parts)
        if not parts:
            held = f"{len(shards)} files shard-<rank>-model-….safetensors"
            return Match(step, f"{held}; {reason}", named, apart=reason in _APART)
        num_files = sum(len(part.data) for part in parts)
        index = ", ".join(part.metadata[0] for part in parts)
        return Match(
            step, f"{num_files} data files, {index} says what they hold; {reason}", named, apart=reason in _APART
        )

    def _step(self, store: Store, folder: Folder, parts: Sequence[Part]) -> tuple[int, str, int | None]:
        """The step, where it is from, and what a folder that the Trainer named says beside what is recorded."""
        number, of_steps = number_in(folder_name(store, folder))
        if TRAINER_STATE in folder.files:
            step = (open_json(store, folder, TRAINER_STATE).content or {}).get("global_step")
            if is_step(step):
                return step, f"{TRAINER_STATE} records global_step {step}", number
        if LIGHTNING in folder.files:
            step = StepFile.read(store, folder, LIGHTNING).tree.get("global_step")
            if is_step(step):
                return step, f"{LIGHTNING} records global_step {step}", None
        if not of_steps and (step := self._recorded(store, parts)) is not None:
            return step, f"step {step} was saved with it", None
        if number is not None:
            return number, "its step is the folder's number", None
        within = step_name(folder_name(store, folder), strict=True)
        if within and within.number is not None:
            return within.number, _WITHIN, None
        return 0, _NOTHING, None

    def _recorded(self, store: Store, parts: Sequence[Part]) -> int | None:
        """A step that the training script saved with the model: read where the folder's name tells none for certain."""
        for part in parts:
            name = part.metadata[0]
            if name in part.folder.files and part.folder.files[name].num_bytes <= MAX_INDEX_BYTES:
                step = recorded_step(store, open_index(store, part, name))
                if step is not None:
                    return step
        return None

    def pointer(self, store: Store, folder: Folder) -> Pointer | None:
        """DCP writes none."""
        return None

    def files(self, store: Store, folder: Folder) -> Iterator[Entry]:
        """Every file of a step."""
        return files_of(store, folder)

    def read(self, store: Store, folder: Folder, match: Match, options: Options) -> Catalog:
        """The Catalog of one step."""
        parts = parts_of(store, folder)
        reading = DcpReading(store, folder, parts, options) if parts else ShardReading(store, folder, options)
        return reading.catalog(match.step, self.name)
