"""One step of several ``torch.save`` files: models, and states of their optimizers that were saved apart.

An optimizer's state belongs to the model whose parameters its groups and moments fit; where several fit, to the one
that its file is named after (``optG_10.pt`` and ``G_10.pt``), else that is undetermined. Several models are told apart
by the words in which their files' names differ; one called ``ema`` holds averages of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.file_sets import AVERAGE, labels
from auditor.adapters.file_steps import matched
from auditor.adapters.optimizer_index import Attached, IndexedState
from auditor.adapters.step_file import StepFile
from auditor.adapters.step_names import called_as_optimizers, step_name
from auditor.adapters.torch_per_rank.catalog import PerRankReading, Slot
from auditor.adapters.torch_per_rank.files import STEPS, Series, rank_state, recorded, state_alone
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Catalog, Role, Scalar
from auditor.model.mesh import EVERYWHERE, NO_MESH
from auditor.storage.store import Store, base_name

_FITS_SEVERAL = "its state fits several of the models that were saved with it"


def recognise_set(store: Store, folder: Folder) -> Match | Declined:
    """The step that files saved together are: as a model's file records it, else as their names have it."""
    files = [StepFile.read(store, folder, name) for name in folder.files]
    readable = [file for file in files if file.content is not None]
    models = [file for file in readable if rank_state(file).found]
    if len(readable) == len(files) and not models:
        return Declined("none of the files that were saved together holds a model", 0.3)
    step = next((step for file in [*models, *readable] if (step := recorded(file, *STEPS)) is not None), None)
    together = f"{len(files)} torch files of one save ({', '.join(folder.files)})"
    return matched(step_name(base_name(folder.path)), step, together, unread=not models)


@dataclass(frozen=True, slots=True)
class _State:
    """An optimizer's state in a file of its own."""

    file: StepFile
    path: str
    """Of the file, below the root."""
    saved: str
    """Before the keys of its tensors: the file, and where in it the state is."""
    state: IndexedState


class _ModelReading(PerRankReading):
    """One of the models, with an optimizer's state from elsewhere if that was saved apart."""

    def __init__(self, store: Store, folder: Folder, name: str, options: Options, label: str) -> None:
        super().__init__(store, folder, Series(name, "", {0: name}, whole=True), options)
        self.label, self.is_average = label, False
        self.apart: _State | None = None
        self.reason = ""

    def give(self, state: _State, reason: str = "") -> None:
        """Take over an optimizer's state; ``reason``: why it isn't known to be of this model."""
        self.apart, self.reason = state, reason
        self.states[0] = replace(self.states[0], optimizer=state.state, saved=state.saved)

    def fits(self, state: _State) -> bool:
        """Whether the optimizer's groups and moments fit the parameters in a known order."""
        if self.is_average or self.states[0].optimizer is not None:
            return False
        own = self.states[0]
        self.give(state)
        attached = self._attached()
        self.states[0], self.apart = own, None
        return not attached.reason

    def _attached(self) -> Attached:
        return Attached({}, (), self.reason) if self.reason else super()._attached()

    def _name(self, key: str) -> str:
        own = super()._name(key)
        return f"{self.label}.{own}" if self.label else own

    def _path(self, rank: int, key: str = "") -> str:
        apart = self.apart
        return apart.path if apart and key.startswith(f"{apart.file.name}:") else super()._path(rank, key)

    def _slots(self, rank: int) -> dict[Slot, StoredTensor]:
        own = super()._slots(rank)
        return {(Role.EMA, name, key): t for (_, name, key), t in own.items()} if self.is_average else own


class SetReading:
    """The files of one step being read."""

    def __init__(self, store: Store, folder: Folder, options: Options) -> None:
        self.store, self.folder, self.options = store, folder, options
        self.builder = CatalogBuilder()
        self.states: list[_State] = []
        """Of optimizers that were saved apart."""
        self.others: list[StepFile] = []
        """Files of which nothing is read but that they are there."""
        self.models = [*self._readings()]

    def _readings(self) -> Iterator[_ModelReading]:
        lacking = [StepFile.absent(name) for name in self.folder.lacks]
        opened = {file.name: file for file in [*map(self._open, self.folder.files), *lacking]}
        models = [name for name, file in opened.items() if not self._is_state(file)]
        called = dict(zip(models, labels(models), strict=True))
        for name, label in called.items():
            if name in self.folder.lacks:
                continue
            reading = _ModelReading(self.store, self.folder, name, self.options, label)
            if not reading.states:
                self.others.append(opened[name])
                continue
            reading.builder = self.builder
            if AVERAGE in label.lower().split("_") and (plain := _without(label)) in called.values():
                reading.label, reading.is_average = plain, True
            yield reading

    def _open(self, name: str) -> StepFile:
        if self.options.names_only:
            return StepFile.unopened(self.folder, name)
        return StepFile.read(self.store, self.folder, name)

    def _is_state(self, file: StepFile) -> bool:
        """Whether a file holds no model; one that is an optimizer's is kept for the models."""
        if file.content is None:
            by_name = called_as_optimizers(file.name)
            self.others += [file] if by_name and file.name not in self.folder.lacks else []
            return by_name
        if rank_state(file).found:
            return False
        saved, state = state_alone(file)
        self.others.append(file)
        if state is not None:
            path = f"{self.folder.place}/{file.name}".lstrip("/")
            self.states.append(_State(file, path, f"{file.name}:{saved}", state))
        return True

    def catalog(self, step: int, format_name: str, unclaimed: Sequence[str] = ()) -> Catalog:
        """The Catalog of the step. ``unclaimed``: files beside these that are read by nobody."""
        for file in self.others:
            self.builder.file(file.as_rank_file(self.folder.place, EVERYWHERE))
        for state in self.states:
            self._give(state)
        for at, model in enumerate(self.models):
            model.first_order = at << 24
            model.fill()
        for one in self.states:
            if (number := recorded(one.file, *STEPS)) is not None:
                self.builder.scalars.append(Scalar("global_steps", float(number), one.path))
        opaque = sum((model.opaque() for model in self.models), start=_opaque(self.states))
        mesh = self.models[0].grid.mesh if len(self.models) == 1 else NO_MESH
        catalog = self.builder.build(step, self.folder.path, format_name, mesh, opaque, unclaimed)
        lacks = ", ".join(self.folder.lacks)
        return replace(catalog, unseen=f"other saves have more files, here there is no {lacks}" if lacks else "")

    def _give(self, state: _State) -> None:
        """Hand an optimizer's state to the one model that it fits."""
        free = [model for model in self.models if not model.is_average and model.states[0].optimizer is None]
        fitting = [model for model in free if model.fits(state)]
        if len(fitting) > 1:
            named = [
                model for model in fitting if model.label and state.file.name.lower().find(model.label.lower()) >= 0
            ]
            fitting = named if len(named) == 1 else fitting
        if len(fitting) == 1 or len(free) == 1:
            [*fitting, *free][0].give(state)
        elif free:
            reason = _FITS_SEVERAL if fitting else "its state fits none of the models that were saved with it"
            [*fitting, *free][0].give(state, reason)


def _without(label: str) -> str:
    return "_".join(word for word in label.split("_") if word.lower() != AVERAGE)


def _opaque(states: Sequence[_State]) -> Counter[str]:
    return sum((Counter(one.file.content.opaque) for one in states if one.file.content), Counter())
