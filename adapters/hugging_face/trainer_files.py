"""What trainers leave beside the weights: the optimizer's state, schedule, loss scale, random states.

    optimizer.pt   scheduler.pt   scaler.pt   rng_state.pth or rng_state_<R>.pth     Hugging Face Trainer
    optimizer.bin  scheduler.bin  scaler.pt   random_states_<R>.pkl                  accelerate's save_state

Where FSDP gathered it, the optimizer's state is kept by names instead of numbers.
All are torch files, in spite of their names. Data-parallel ranks hold the same model, of which rank 0 saves its own;
random states are each rank's. How many ranks there were is known by these files alone.
Source: transformers ``trainer.py`` (``_save_checkpoint``; 5.24), accelerate ``checkpointing.py``; 1.15.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.adapters.adapter import MAX_LOST, Folder
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.hugging_face.adapted import by_layers
from auditor.adapters.optimizer_index import (
    Attached,
    IndexedState,
    Order,
    Shapes,
    attach,
    consecutive,
    decayed_first,
    indexed_state,
    is_count,
    role_and_name,
    split_by_decay,
    without_frozen,
)
from auditor.adapters.optimizer_record import SavedOptimizer, record, record_loss_scale
from auditor.adapters.step_file import StepFile
from auditor.adapters.stored_sums import content_number
from auditor.containers.torch_zip import RecordBudget, StoredTensor
from auditor.model.catalog import Problem, ProblemKind, Scalar
from auditor.model.mesh import EVERYWHERE, NO_MESH, Coordinate, Mesh
from auditor.model.region import whole
from auditor.storage.store import ObjectMissingError, Store, base_name, join

TRAINER_STATE, SCHEDULE = "trainer_state.json", "scheduler.pt"
_RANDOM = re.compile(r"(?P<head>rng_state_|random_states_)(?P<rank>\d{1,6})(?P<tail>\.pth|\.pkl)")
_ALONE = "rng_state.pth"
_OPTIMIZERS = re.compile(r"optimizer(?:_\d{1,3})?\.(?:pt|bin)")
_SCHEDULERS = re.compile(r"scheduler(?:_\d{1,3})?\.(?:pt|bin)")
_ELSEWHERE = re.compile(r"rank\d+-of-\d+-optimizer\.pt|optimizer\.pt_\d+.*|optimizer(?:_\d+)?\.bin")
"""Where else an optimizer's state may be: torch_xla, SageMaker, a whole FSDP state."""
_UNCOUNTED = ("num_bad_epochs", "_schedulers")
"""What schedules record that don't step with the optimizer, or are made of several."""
_NAMELESS_ORDER = 1 << 40
_OWN_NAME = re.compile(r"checkpoint-\d{1,15}", re.A)
_MAX_SIBLINGS = 16


@dataclass(frozen=True, slots=True)
class Listings:
    """The model's parameters in every order in which an optimizer may have been handed them."""

    shapes: Shapes
    orders: Sequence[Shapes] = ()
    positions: Mapping[str, int] | None = None
    """Parameter name to its place in the model."""
    unknown: str = ""
    """Why there is none."""


class TrainerFiles:
    """The files beside the weights of one folder."""

    def __init__(self, builder: CatalogBuilder, store: Store, folder: Folder, *, names_only: bool) -> None:
        self.builder, self.store, self.folder, self.names_only = builder, store, folder, names_only
        self.budget = RecordBudget()
        self.claimed: set[str] = set()
        self.random = {} if folder.alone else self._random_states()
        self.num_ranks = 1 + max(self.random, default=0)
        several = 1 < self.num_ranks <= MAX_LOST * len(self.random)
        self.mesh = Mesh((("dp", self.num_ranks),), ordered=True) if several else NO_MESH

    @property
    def stored_once(self) -> tuple[str, ...]:
        """Axes along which ranks held what one of them saved."""
        return tuple(axis for axis, _ in self.mesh.axes)

    def add(self, listings: Listings) -> None:
        """All of them. ``listings``: the model that the optimizer was made for."""
        if self.folder.alone:
            return
        for name in sorted(self.folder.files):
            if _OPTIMIZERS.fullmatch(name):
                self._add_optimizer(name, listings)
            elif _SCHEDULERS.fullmatch(name):
                self._add_scheduler(name)
            elif name == "scaler.pt":
                file = self._file(name)
                record_loss_scale(self.builder, self.store, self._path(name), EVERYWHERE, file.tree)
        self._add_absent()
        self._add_random()

    def _path(self, name: str) -> str:
        return join(self.folder.path, name)

    def _file(self, name: str, coordinate: Coordinate = EVERYWHERE) -> StepFile:
        self.claimed.add(name)
        if name not in self.folder.files:
            file = StepFile.absent(name)
        elif self.names_only:
            file = StepFile.unopened(self.folder, name)
        else:
            file = StepFile.read(self.store, self.folder, name, self.budget)
        self.builder.file(file.as_rank_file(self.folder.path, coordinate))
        return file

    # The optimizer

    def _add_optimizer(self, name: str, listings: Listings) -> None:
        file = self._file(name)
        state = indexed_state(file.tree)
        if state is None:
            if file.content is not None:
                message = "holds no optimizer's state in torch's form: no param_groups with a state"
                self._problem(ProblemKind.METADATA, name, message)
            return
        names = _attached(state, listings)
        counted: dict[int, str] = {}
        for number, key, tensor in state.flat():
            place = f"{_place(name, state.key(number))}.{key}"
            called = self._add_state(name, number, place, tensor, names, listings)
            if key == "step":
                counted[number] = called
        counted |= {number: names.names.get(number, _place(name, state.key(number))) for number in state.counts}
        groups = [
            tuple(names.names[number] for number in numbers if number in names.names) or None
            for numbers in state.numbers
        ]
        record(self.builder, self.store, SavedOptimizer(self._path(name), EVERYWHERE, state, groups, counted))

    def _add_state(
        self, file: str, number: int, place: str, stored: StoredTensor, names: Attached, listings: Listings
    ) -> str:
        """One tensor of the optimizer's, which is at ``place``; its name in the Catalog."""
        at, _, key = place.rpartition(".")
        owner, reason = names.names.get(number, at), "" if number in names.names else names.reason
        role, called = role_and_name(owner, key)
        order = (listings.positions or {}).get(owner, _NAMELESS_ORDER)
        tensor = self.builder.tensor(
            called, role, stored.dtype, stored.shape, order, stored_once=() if reason else self.stored_once,
            undetermined=reason,
        )  # fmt: skip
        self.builder.piece(
            tensor, self.builder.file_id(self._path(file)), stored.offset, whole(stored.shape), EVERYWHERE,
            key=place.partition(".")[2], strides=stored.strides,
        )  # fmt: skip
        return called

    # The schedule

    def _add_scheduler(self, name: str) -> None:
        """The Trainer's schedule steps with the optimizer. accelerate's steps once a rank, or as the script has it."""
        file = self._file(name)
        if name == SCHEDULE:
            record_schedule(self.builder, self._path(name), file)

    # Files that are not there

    def _add_absent(self) -> None:
        """The Trainer writes the optimizer's state and the schedule together, and loads neither without the other.

        A folder without ``trainer_state.json`` is not there to be resumed from.
        """
        names, folders = self.folder.files, self.folder.folders
        elsewhere = any(map(_ELSEWHERE.fullmatch, names)) or any(name.startswith("optimizer") for name in folders)
        if TRAINER_STATE not in names:
            return
        if "optimizer.pt" in names and SCHEDULE not in names:
            self._file(SCHEDULE)
        if SCHEDULE in names and "optimizer.pt" not in names and not elsewhere:
            self._file("optimizer.pt")

    def _random_states(self) -> dict[int, re.Match[str]]:
        found = filter(None, map(_RANDOM.fullmatch, sorted(self.folder.files)))
        return {int(match["rank"]): match for match in found}

    def _add_random(self) -> None:
        """One file a rank; a hole in their numbers is a file that is not there."""
        if _ALONE in self.folder.files:
            self._file(_ALONE)
            if self.random:
                message = "is of a save by one process, beside those of several; ranks don't load it"
                self._problem(ProblemKind.LEFTOVER, _ALONE, message, ignored=True)
        if not self.random:
            return
        if self.mesh is NO_MESH and self.num_ranks > 1:
            name = self.random[self.num_ranks - 1][0]
            self._problem(ProblemKind.METADATA, name, f"is of rank {self.num_ranks - 1}, and almost no other is there")
        pattern = self.random[min(self.random)]
        for rank in range(self.num_ranks) if self.mesh is not NO_MESH else sorted(self.random):
            coordinate = Coordinate.of(dp=rank) if self.mesh is not NO_MESH else EVERYWHERE
            name = self.random[rank][0] if rank in self.random else f"{pattern['head']}{rank}{pattern['tail']}"
            file = self._file(name, coordinate)
            self._check_origin(file, coordinate)
            record_random_state(self.builder, self.store, self._path(name), file, coordinate)

    def _check_origin(self, file: StepFile, coordinate: Coordinate) -> None:
        """Torch keeps the stem that a file was saved to."""
        saved = _RANDOM.fullmatch(f"{file.content.root}.pth") if file.content else None
        if file.content and saved and file.content.root != file.name.rpartition(".")[0]:
            problem = f"was saved as {file.content.root}: it is the random state of rank {int(saved['rank'])}"
            self._problem(ProblemKind.OTHER_RANK, file.name, problem, coordinate=coordinate)

    def _problem(
        self, kind: ProblemKind, name: str, message: str, *, coordinate: Coordinate = EVERYWHERE, ignored: bool = False
    ) -> None:
        self.builder.problems.append(Problem(kind, self._path(name), message, coordinate, ignored=ignored))


def _place(file: str, key: str) -> str:
    """Where a file has a parameter's state: what it is called by where it isn't known which parameter it is."""
    return f"{file.partition('.')[0]}.state.{key}"


def record_schedule(builder: CatalogBuilder, path: str, file: StepFile) -> None:
    """Add how often the Trainer stepped its schedule, where it steps with the optimizer."""
    count = file.tree.get("last_epoch")
    if is_count(count) and count >= 0 and not any(key in file.tree for key in _UNCOUNTED):
        builder.scalars.append(Scalar("scheduler_steps", float(count), path))


def record_rates(builder: CatalogBuilder, path: str, state: Mapping[str, Any]) -> None:
    """Add since which step the rates that the Trainer logged only fall, and until which they were logged.

    Two that fall tell that the rates do: the first may be one that still rose.
    """
    history = state.get("log_history")
    logged = [
        (float(entry["step"]), float(entry["learning_rate"]))
        for entry in (history if isinstance(history, list) else ())
        if isinstance(entry, dict) and is_count(entry.get("step")) and is_count(entry.get("learning_rate"))
    ]
    since = len(logged) - 1
    while since > 0 and logged[since - 1][1] >= logged[since][1]:
        since -= 1
    if since + 1 < len(logged):
        builder.scalars.append(Scalar("rates_fall_since", logged[since + 1][0], path))
        builder.scalars.append(Scalar("rates_logged_until", logged[-1][0], path))


def record_random_state(
    builder: CatalogBuilder, store: Store, path: str, file: StepFile, coordinate: Coordinate
) -> None:
    """Add a scalar ``random_state`` that ranks with the same random state have in common."""
    if file.content is not None and (number := content_number(store, path)) is not None:
        builder.scalars.append(Scalar("random_state", number, path, coordinate))


def has_trained_siblings(store: Store, folder: Folder) -> bool:
    """Whether a folder that the Trainer named, and began to fill, lies beside one with the Trainer's last file.

    A folder with weights and ``training_args.bin`` alone may be a finished export; the Trainer calls those otherwise.

    Raises:
        StorageError: storage failed.
    """
    above, _, name = folder.path.rpartition("/")
    if not _OWN_NAME.fullmatch(name) or "training_args.bin" not in folder.files:
        return False
    others = (entry.name for entry in store.list(above) if _OWN_NAME.fullmatch(base_name(entry.name)))
    for other in sorted({*others} - {folder.path})[:_MAX_SIBLINGS]:
        try:
            store.stat(join(other, TRAINER_STATE))
        except ObjectMissingError:
            continue
        return True
    return False


def _attached(state: IndexedState, listings: Listings) -> Attached:
    """Names for the optimizer's numbers, or why there are none."""
    orders: list[Order | None] = []
    frozen: list[Order] = []
    for shapes in listings.orders:
        trainers = decayed_first(shapes, state)
        # Two groups of these very sizes are the Trainer's; moments, where there are any, must fit it all the same.
        others = (consecutive, split_by_decay) if trainers is None or state.tensors else ()
        orders += [trainers, *(order(shapes, state) for order in others)]
        frozen += without_frozen(shapes, state)
    if not listings.orders:
        orders = [by_layers(listings.shapes, state)]
    found = attach(listings.shapes, state, orders, frozen)
    if found.reason and not listings.orders:
        return Attached({}, (), listings.unknown)
    return found
