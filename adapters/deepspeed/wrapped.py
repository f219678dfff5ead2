"""DeepSpeed checkpoints inside a trainer's folder, which is the step: what lies beside them.

    checkpoint-<N>/global_step<N>/…, latest                      Hugging Face Trainer
                   model.safetensors or several                  16-bit weights for others to load
                   rng_state_<R>.pth, trainer_state.json, scheduler.pt
    <name>.ckpt/checkpoint/…, latest                             Lightning

Source: transformers ``trainer.py`` (``_save_checkpoint``); Lightning ``strategies/deepspeed.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from auditor.adapters.adapter import MAX_LOST, Folder
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.deepspeed.records import Shapes, step_pointer
from auditor.adapters.hugging_face.files import MODEL_KINDS, Kind, StoredArray, Weights, open_json, open_weights
from auditor.adapters.hugging_face.trainer_files import (
    SCHEDULE,
    TRAINER_STATE,
    record_random_state,
    record_schedule,
)
from auditor.adapters.step_file import Opened, StepFile
from auditor.model.catalog import File, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.mesh import EVERYWHERE, Coordinate
from auditor.model.optimizer import Export
from auditor.model.region import whole
from auditor.storage.store import ObjectMissingError, StorageError, Store, base_name, join

_RNG = re.compile(r"rng_state_(\d{1,6})\.pth")
_TAG = re.compile(r"global_step\d+|checkpoint")
_LIGHTNING = re.compile(r".+\.ckpt")
_KNOWN = re.compile(
    r"latest|trainer_state\.json|training_args\.bin|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|(generation_)?config\.json"
)


def inner_folder(store: Store, folder: Folder) -> Folder | None:
    """The folder of DeepSpeed's files in a trainer's; None for other folders, runs of DeepSpeed's own included."""
    lightning = _LIGHTNING.fullmatch(base_name(folder.path)) and "checkpoint" in folder.folders
    if "latest" not in folder.files or not (TRAINER_STATE in folder.files or lightning):
        return None
    try:
        pointer = step_pointer(store, folder, "latest")
        target = pointer.target if pointer else ""
    except StorageError:
        # One folder alone can be meant.
        inside = [name for name in folder.folders if _TAG.fullmatch(name)]
        target = join(folder.path, inside[0]) if len(inside) == 1 else ""
    if not target:
        return None
    try:
        return Folder.read(store, target)
    except ObjectMissingError:
        # The pointer's step is gone: that must show, whatever else lies here.
        return Folder(target, {}, {})


def trainers_step(store: Store, outer: Folder) -> int | None:
    """The step that the Trainer records in its folder."""
    state = open_json(store, outer, TRAINER_STATE).content if TRAINER_STATE in outer.files else None
    step = state.get("global_step") if state else None
    return step if type(step) is int and 0 <= step < 1 << 53 else None


class Beside:
    """What lies beside DeepSpeed's own files in a trainer's folder."""

    def __init__(self, builder: CatalogBuilder, store: Store, outer: Folder) -> None:
        self.builder, self.store, self.outer = builder, store, outer
        self.claimed: set[str] = {name for name in outer.files if _KNOWN.fullmatch(name)}

    def add(
        self, shapes: Shapes, tied: Mapping[str, str], orders: Mapping[str, int], ranks: Sequence[Coordinate]
    ) -> None:
        """All of it. ``shapes``: the model's parameters; ``tied``: later names of them to the first."""
        self._add_state()
        self._add_schedule()
        self._add_random_states(ranks)
        self._add_export(shapes, tied, orders)

    @property
    def has_export(self) -> bool:
        """Whether weights lie there for others to load."""
        return bool(self._files())

    def _path(self, name: str) -> str:
        return join(self.outer.path, name)

    def _problem(self, kind: ProblemKind, file: str, message: str, tensor: str, order: int) -> None:
        self.builder.problems.append(Problem(kind, self._path(file), message, Coordinate(), tensor, order))

    def _add_state(self) -> None:
        """``trainer_state.json``: its own count of steps."""
        if TRAINER_STATE not in self.outer.files:
            return
        state = open_json(self.store, self.outer, TRAINER_STATE)
        self.builder.file(state.as_file(self.outer.path, "json", Coordinate()))
        if (step := trainers_step(self.store, self.outer)) is not None:
            self.builder.scalars.append(Scalar("global_steps", float(step), self._path(TRAINER_STATE)))

    def _add_schedule(self) -> None:
        """The Trainer's own, of which the engine knows nothing."""
        if SCHEDULE in self.outer.files:
            file = StepFile.read(self.store, self.outer, SCHEDULE)
            self.builder.file(file.as_rank_file(self.outer.path, EVERYWHERE))
            record_schedule(self.builder, self._path(SCHEDULE), file)

    def _add_random_states(self, ranks: Sequence[Coordinate]) -> None:
        """One file a rank, where there are several ranks; none at all is another trainer's habit."""
        found = {int(match[1]) for name in self.outer.files if (match := _RNG.fullmatch(name))}
        if not found or not ranks or len(ranks) > MAX_LOST * len(found):
            return
        for rank, coordinate in enumerate(ranks):
            name = f"rng_state_{rank}.pth"
            file = StepFile.read(self.store, self.outer, name) if rank in found else StepFile.absent(name)
            self.builder.file(file.as_rank_file(self.outer.path, coordinate))
            record_random_state(self.builder, self.store, self._path(name), file, coordinate)
        for rank in sorted(found - set(range(len(ranks)))):
            name = f"rng_state_{rank}.pth"
            message = f"is of rank {rank}, of {len(ranks)} ranks"
            self.builder.problems.append(Problem(ProblemKind.LEFTOVER, self._path(name), message, ignored=True))

    # The export

    def _files(self) -> list[tuple[str, Kind]]:
        for kind in MODEL_KINDS:
            several = [name for name in self.outer.files if kind.place(name)]
            names = [kind.single] if kind.single in self.outer.files else sorted(several)
            if names:
                return [(name, kind) for name in names]
        return []

    def _add_export(self, shapes: Shapes, tied: Mapping[str, str], orders: Mapping[str, int]) -> None:
        """Weights that loaders take from here, each held against the parameter of its name."""
        files = self._files()
        held: set[str] = set()
        whole_export = True
        for name, kind in files:
            self.claimed |= {name, kind.index}
            opened: Opened[Weights] = open_weights(self.store, self.outer, name, kind)
            if opened.content and opened.state is FileState.PRESENT and kind.container == "torch-zip":
                opened = replace(opened, detail="")
            self._add_file(opened, kind)
            whole_export = whole_export and opened.state is FileState.PRESENT
            for key, array in (opened.content.arrays if opened.content else {}).items():
                held.add(key)
                self._add_array(name, key, array, shapes.get(tied.get(key, key)), orders.get(key, 1 << 40))
        if files and whole_export:
            for key in shapes:
                names = {key, *(alias for alias, source in tied.items() if source == key)}
                if not names & held:
                    message = f"lacks {key}, which the model has as {list(shapes[key])}"
                    self._problem(ProblemKind.ABSENT, files[0][0], message, key, orders.get(key, -1))

    def _add_file(self, opened: Opened[Weights], kind: Kind) -> File:
        file = opened.as_file(
            self.outer.path, opened.content.container if opened.content else kind.container, Coordinate()
        )
        self.builder.file(file)
        return file

    def _add_array(self, file: str, key: str, array: StoredArray, shape: tuple[int, ...] | None, order: int) -> None:
        if array.dtype is None:
            return
        if shape is not None and 0 in array.shape and 0 not in shape:
            message = f"holds {key} without elements, the model has {list(shape)}"
            self._problem(ProblemKind.EMPTY, file, message, key, order)
            return
        if shape is not None and array.shape != shape:
            message = f"holds {key} as {list(array.shape)}, the model has it as {list(shape)}"
            self._problem(ProblemKind.SHAPE, file, message, key, order)
            return
        tensor = self.builder.tensor(f"{key}@{file}", Role.PARAMETER, array.dtype, array.shape, order)
        self.builder.piece(
            tensor, self.builder.file_id(self._path(file)), array.offset, whole(array.shape), Coordinate(), key=key,
            strides=array.strides,
        )  # fmt: skip
        if shape is not None:
            self.builder.exports.append(Export(f"{key}@{file}", key, self._path(file)))
