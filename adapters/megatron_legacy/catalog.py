"""Turns the rank files of a legacy Megatron-LM checkpoint into a Catalog: pieces, scalars, what contradicts itself.

A stage's files hold the same tensors, so what a lost file held is known from its peers and is laid to it.
"""

from __future__ import annotations

from itertools import groupby

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder, Part
from auditor.adapters.megatron_legacy.files import Place, listing, read_step_files, recorded_step
from auditor.adapters.megatron_legacy.layout import Chunk, Layout
from auditor.adapters.megatron_legacy.origin import misplaced
from auditor.adapters.megatron_legacy.state import RankState, Slot, read_state
from auditor.adapters.megatron_names import megatron_args, recorded_progress
from auditor.adapters.optimizer_index import is_count, settings
from auditor.adapters.optimizer_record import SavedOptimizer, from_args, record, record_loss_scale
from auditor.adapters.step_file import StepFile
from auditor.adapters.ties import distinct, in_one_storage
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.mesh import Coordinate
from auditor.model.region import whole
from auditor.storage.store import Store, join

_MODEL = (Role.PARAMETER, Role.BUFFER)


class MegatronReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, options: Options) -> None:
        self.store, self.folder, self.names_only = store, folder, options.names_only
        self.files = read_step_files(store, folder, names_only=options.names_only)
        self.degrees = self.files.degrees
        unread = {} if options.names_only else self.files.models
        self.states = {place: read_state(self.files, place) for place in sorted(unread)}
        self.reasons = {place[0]: state.reason for place, state in self.states.items() if state.reason}
        """Stage to why its optimizer state has no names."""
        chunks: dict[Chunk, dict[str, StoredTensor]] = {}
        for (stage, _, _), state in self.states.items():
            for number, keys in state.model.items():
                known = chunks.setdefault((number, stage), {})
                known |= {key: tensor for key, tensor in keys.items() if key not in known}
        self.layout = Layout(self.files, chunks, options)
        self.builder = CatalogBuilder()
        self.called: dict[tuple[Place, str], str] = {}
        """Place and path in its file to the name of the tensor in the Catalog."""

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for file, coordinate in self.files.all():
            self.builder.file(file.as_rank_file(self.folder.path, coordinate))
        # In the order of stages; one without files has nothing to add.
        for stage, places in groupby(self.states, key=lambda place: place[0]):
            self._add_stage(stage, [*places])
        self._add_steps()
        for place in self.states:
            self._add_optimizers(place)
        self._add_ties()
        self._add_problems()
        claimed = {file.name for file, _ in self.files.all()} | set(self.files.leftovers)
        listed = listing(self.store, self.folder).files
        unclaimed = [join(self.folder.path, name) for name in listed if name not in claimed]
        mesh = self.degrees.mesh
        return self.builder.build(step, self.folder.path, format_name, mesh, self.files.opaque(), unclaimed)

    def _problem(self, kind: ProblemKind, name: str, message: str, at: Place | None = None, tensor: str = "") -> None:
        coordinate = self.degrees.coordinate(at) if at else Coordinate()
        self.builder.problems.append(Problem(kind, join(self.folder.path, name), message, coordinate, tensor))

    # Tensors

    def _add_stage(self, stage: int, places: list[Place]) -> None:
        """Every tensor of a stage, for every rank of the stage: ``places``."""
        named = stage not in self.reasons
        slots: dict[Slot, StoredTensor] = {}
        for place in places:
            for slot, tensor in self.states[place].slots.items():
                if named or slot.role in _MODEL:
                    slots.setdefault(slot, tensor)
        for slot, expected in slots.items():
            for place in places:
                self._add(place, slot, expected)
        for place in places:
            self._add_distributed(place, "" if named else self.reasons[stage])
        for place in places if not named else ():
            self._add_nameless(place, self.states[place], self.reasons[stage])
        for place in places if named else ():
            for (path, role), stored in self.states[place].orphans.items():
                self._add_alone(place, self.files.models[place], path, role, stored, "")

    def _add(self, place: Place, slot: Slot, expected: StoredTensor) -> None:
        """The pieces that one rank's files hold of a tensor, or should hold."""
        file = (self.files.optimizers if slot.apart else self.files.models)[place]
        if slot.apart and place[1] and slot not in self.states[place].slots:
            return  # The first expert-parallel rank holds it.
        named = frozenset(range(self.degrees.pp)) - (set() if slot.role in _MODEL else self.reasons.keys())
        part = self.layout.part(
            (slot.chunk, place[0]), slot.key, expected.shape, place, suffix=slot.suffix, stages=named,
            counter=slot.role is Role.COUNTER, apart=slot.apart,
        )  # fmt: skip
        tensor = self.builder.tensor_of(part, slot.role, expected.dtype)
        self.called[place, slot.path] = part.name
        stored = self.states[place].slots.get(slot)
        if stored is None:
            if file.state is not FileState.PRESENT:
                self._pieces(tensor, file, part, expected, place, slot.path, lost=True)
        elif (stored.shape, stored.dtype) == (expected.shape, expected.dtype):
            self._pieces(tensor, file, part, stored, place, slot.path)
        else:
            found, wanted = (f"{item.dtype.name}{list(item.shape)}" for item in (stored, expected))
            message = f"holds {slot.path} as {found}, expected is {wanted}"
            self._problem(ProblemKind.RANKS_DISAGREE, file.name, message, place, part.name)

    def _pieces(
        self, tensor: int, file: StepFile, part: Part, stored: StoredTensor, place: Place, key: str, *,
        lost: bool = False,
    ) -> None:  # fmt: skip
        number = self.builder.file_id(join(self.folder.path, file.name))
        width = stored.dtype.bits // 8
        for box, row in part.boxes:
            offset = 0 if lost else stored.offset + (row * stored.strides[0] * width if row else 0)
            coordinate = self.degrees.coordinate(place)
            self.builder.piece(tensor, number, offset, box, coordinate, key=key, strides=stored.strides)

    def _add_nameless(self, place: Place, state: RankState, reason: str) -> None:
        """Optimizer state of which it isn't known whose it is: each stands for itself."""
        for (path, role), stored in state.nameless.items():
            self._add_alone(place, self.files.models[place], path, role, stored, reason)

    def _add_alone(
        self, place: Place, file: StepFile, path: str, role: Role, stored: StoredTensor, reason: str
    ) -> None:
        coordinate = self.degrees.coordinate(place)
        region = whole(stored.shape)
        self.called[place, path] = f"{path}@{coordinate}"
        part = Part(f"{path}@{coordinate}", 1 << 40, stored.shape, ((region, 0),), undetermined=reason)
        self._pieces(self.builder.tensor_of(part, role, stored.dtype), file, part, stored, place, path)

    def _add_distributed(self, place: Place, reason: str) -> None:
        """Of the distributed optimizer's file, what is no parameter's; with a ``reason``, all of it."""
        state = self.states[place].distributed
        for path, stored in state.padding.items():
            self._add_alone(place, self.files.optimizers[place], path, Role.PADDING, stored, "")
        unnamed = {(path, role): stored for (_, role, path), stored in state.tensors.items()} if reason else {}
        for (path, role), stored in {**state.flats, **unnamed}.items():
            self._add_alone(place, self.files.optimizers[place], path, role, stored, reason)

    # Steps

    def _add_steps(self) -> None:
        """What each file records of the step. The optimizer's own count may lag behind it: see there."""
        for place, file in sorted(self.files.models.items()):
            name, coordinate = join(self.folder.path, file.name), self.degrees.coordinate(place)
            step, scheduler = recorded_step(file), file.tree.get("opt_param_scheduler")
            recorded = settings(scheduler) if isinstance(scheduler, dict) else {}
            scalars = {"global_steps": step} | {f"scheduler.{key}": value for key, value in recorded.items()}
            scalars |= recorded_progress(megatron_args(file))
            if isinstance(version := file.tree.get("checkpoint_version"), (int, float)):
                scalars["checkpoint_version"] = version
            for what, value in scalars.items():
                if is_count(value):
                    self.builder.scalars.append(Scalar(what, float(value), name, coordinate))

    # Optimizer and ties

    def _add_optimizers(self, place: Place) -> None:
        """What a rank file records of its optimizers besides tensors.

        Their count of steps may lag behind the iteration: steps are skipped where numbers overflow, optimizers begin
        anew.
        """
        file, coordinate = self.files.models[place], self.degrees.coordinate(place)
        path, kind = join(self.folder.path, file.name), self.files.args.get("optimizer")
        saved = file.tree.get("optimizer")
        scaler = saved.get("grad_scaler") if isinstance(saved, dict) else None
        record_loss_scale(self.builder, self.store, path, coordinate, scaler)
        before = 0
        for item in self.states[place].optimizers:
            names = {number: self.called.get((place, at), at) for number, at in item.names.items()}
            counted = {
                number: self.called.get((place, f"{item.path}.state.{number}.step"), names.get(number, ""))
                for number in {*item.state.tensors, *item.state.counts}
            }
            known = [tuple(names[at] for at in group) if names else None for group in item.state.numbers]
            otherwise = from_args(self.files.args) if kind == "adam" else {}
            optimizer = kind.lower()[:64] if isinstance(kind, str) else ""
            record(self.builder, self.store, SavedOptimizer(
                path, coordinate, item.state, known, counted, optimizer, otherwise, before,
            ))  # fmt: skip
            before += len(item.state.groups)

    def _add_ties(self) -> None:
        ties = []
        for place, state in self.states.items():
            named = {
                self.called[place, slot.path]: tensor
                for slot, tensor in state.slots.items()
                if slot.role is Role.PARAMETER and (place, slot.path) in self.called
            }
            ties += in_one_storage(named, self.files.models[place].name)
            ties += self.layout.ties_in(place[0], state.model)
        self.builder.ties.extend(distinct(ties))

    # Problems

    def _add_problems(self) -> None:
        for name in self.files.leftovers:
            message = f"is of no rank of the mesh ({self.degrees.mesh}), or there twice"
            self._problem(ProblemKind.LEFTOVER, name, message)
        for name, message in self.files.odd.items():
            self._problem(ProblemKind.METADATA, name, message)
        if not self.names_only:
            for place, message in misplaced(self.store, self.folder, self.files):
                self._problem(ProblemKind.OTHER_RANK, self.files.models[place].name, message, place)
