"""Turns the files of a plain DeepSpeed engine into a Catalog: pieces, scalars, and what contradicts itself."""

from __future__ import annotations

from dataclasses import replace

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.deepspeed.exports import add_exports
from auditor.adapters.deepspeed.files import EngineFiles, Rank, is_engine_file, read_engine_files
from auditor.adapters.deepspeed.flats import Flat, FlatStates
from auditor.adapters.deepspeed.layout import LOCAL_EXPERT, EngineLayout, module_of
from auditor.adapters.deepspeed.records import Shapes, count_in, odd_counts, renamed, schedule_steps, shapes_in
from auditor.adapters.deepspeed.states import PlainStates
from auditor.adapters.deepspeed.weights import EngineWeights
from auditor.adapters.deepspeed.wrapped import Beside
from auditor.adapters.step_file import StepFile
from auditor.adapters.ties import distinct, in_one_storage
from auditor.model.catalog import Catalog, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import Tie
from auditor.storage.store import Store, join


class EngineReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, options: Options, outer: Folder | None = None) -> None:
        """``outer``: the trainer's folder that is the step, where DeepSpeed's files lie in one inside it."""
        self.store, self.folder, self.options, self.outer = store, folder, options, outer
        self.files: EngineFiles = read_engine_files(store, folder, names_only=options.names_only)
        self.mesh = self.files.mesh
        self.layout = EngineLayout(self.files, options)
        self.builder = CatalogBuilder()
        self.flats = FlatStates(self.builder, store, folder.path, self.layout.part)
        self.weights = EngineWeights(self.builder, folder.path, self.files, self.layout)
        self.names: dict[object, tuple[str, ...]] = {}
        """Flat buffer, and ranks that have the same parameters in it, to the names of the tensors."""

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for file, coordinate in self.files.all():
            self.builder.file(file.as_rank_file(self.folder.path, coordinate))
            if problem := renamed(file):
                self._problem(ProblemKind.OTHER_RANK, file, problem, coordinate)
        self.weights.add()
        self.flats.learn([*self.files.zeros.values()], len(self.layout.shapes))
        for rank, file in sorted(self.files.zeros.items()):
            self._add_zero_file(rank, file)
        if not self.options.names_only:
            self._add_plain_states()
        for rank, file in sorted(self.files.models.items()):
            self._add_records(rank, file)
        places = {file.name: place for file, place in self.files.all()}
        for file, what in odd_counts(self.files.models.values()):
            self._problem(ProblemKind.METADATA, file, what, places[file.name])
        self._add_ties()
        for name in self.files.leftovers:
            message = f"is of no rank of the mesh ({self.mesh}), or there twice"
            self.builder.problems.append(Problem(ProblemKind.LEFTOVER, join(self.folder.path, name), message))
        for name, what in self.files.impossible.items():
            self.builder.problems.append(Problem(ProblemKind.METADATA, join(self.folder.path, name), what))
        beside = self._add_beside(self.outer) if self.outer else None
        export = not (self.outer or self.folder.alone or self.options.names_only or self.layout.unplaced)
        if export and self.files.whole:
            add_exports(self.builder, self.store, self.folder.path, *self._parameters())
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if not is_engine_file(name)]
        if beside:
            unclaimed += [join(beside.outer.path, name) for name in beside.outer.files if name not in beside.claimed]
        path = self.outer.path if self.outer else self.folder.path
        catalog = self.builder.build(step, path, format_name, self.mesh, self.files.opaque(), unclaimed)
        implied = "" if beside and beside.has_export else None
        unseen = "a single file was named: what belongs to it is not known" if self.folder.alone else ""
        return replace(catalog, masters_alone=self.files.stage_3, not_implied=implied, unseen=unseen)

    def _add_beside(self, outer: Folder) -> Beside:
        """What a trainer put beside DeepSpeed's own files."""
        beside = Beside(self.builder, self.store, outer)
        if not self.options.names_only:
            shapes, tied = self._parameters()
            known = any(file.tree for file in self.files.models.values())
            every = ((dp, tp) for dp in range(self.files.dp) for tp in range(self.files.tp)) if known else ()
            ranks = [*map(self.files.coordinate, every)]
            beside.add(shapes, tied, self.layout.orders, ranks)
        return beside

    def _parameters(self) -> tuple[Shapes, dict[str, str]]:
        """The model's parameters, and later names of tied ones to the first."""
        tied = {name: tie.names[0] for tie in self.builder.ties for name in tie.names[1:]}
        plain = next((self._module_shapes(file) for _, file in sorted(self.files.models.items())), {})
        return {**self.layout.trained, **self.layout.frozen} or plain, tied

    def _problem(self, kind: ProblemKind, file: StepFile, message: str, coordinate: Coordinate) -> None:
        self.builder.problems.append(Problem(kind, join(self.folder.path, file.name), message, coordinate))

    # Optimizer state

    def _add_zero_file(self, rank: Rank, file: StepFile) -> None:
        coordinate = self.files.coordinate(rank)
        if not self.layout.shapes and file.state is FileState.PRESENT and not self.options.names_only:
            self._problem(ProblemKind.UNPLACED, file, "no model file tells the order of its parameters", coordinate)
        if self.layout.unplaced:
            self.flats.add_nameless(file, coordinate, self.layout.unplaced)
            self.flats.add_groups(file, coordinate, {})
            return
        flats = self.layout.flats_of(rank, file)
        for number, flat in enumerate(flats):
            self.flats.add(file, coordinate, number, flat)
            self.flats.check_mapping(file, coordinate, number, flat)
        if file.content:
            self.flats.add_groups(file, coordinate, {n: self._names_in(rank, n, f) for n, f in enumerate(flats)})

    def _names_in(self, rank: Rank, number: int, flat: Flat) -> tuple[str, ...]:
        """Names of the tensors in a flat buffer; data-parallel ranks share them, but for those with other experts."""
        key = rank[1], number, *(flat.recorded and flat.shapes)
        if key not in self.names:
            coordinate = self.files.coordinate(rank)
            parts = (self.layout.part(name, Role.MASTER, shape, coordinate) for name, shape in flat.shapes.items())
            self.names[key] = tuple(part.name for part in parts)
        return self.names[key]

    def _add_plain_states(self) -> None:
        """Without ZeRO, in the model files; with experts, in a file of each expert-parallel rank."""
        if not self.files.states:
            states = PlainStates(self.builder, self.store, self.folder.path, self.layout.part)
            for rank, file in sorted(self.files.models.items()):
                states.add(file, self.files.coordinate(rank, of_dp=False), self._module_shapes(file))
            return
        # The model files then hold rank 0's state once more, which no loader looks at.
        states = PlainStates(self.builder, self.store, self.folder.path, self.layout.replicated(self.files.states))
        for (expert_rank, tp), file in sorted(self.files.states.items()):
            shapes = self._module_shapes(self.files.models[0, tp]) | self._experts_of(expert_rank, tp)
            experts = tuple(name for name in shapes if LOCAL_EXPERT.fullmatch(name))
            order = tuple(name for name in shapes if name not in experts), experts
            states.add(file, self.files.coordinate((expert_rank, tp)), shapes, [order])

    def _module_shapes(self, file: StepFile) -> Shapes:
        """Parameters of a model file in the order of the module, tied ones once."""
        module = {name: tensor for name, tensor in module_of(file).items() if name not in self.layout.buffers}
        later = {name for tie in in_one_storage(module, file.name) for name in tie.names[1:]}
        return {name: tensor.shape for name, tensor in module.items() if name not in later}

    def _experts_of(self, expert_rank: int, tp: int) -> Shapes:
        """Parameters of the experts that an expert-parallel rank has, which has as many as the others."""
        num_ranks = 1 + max(rank for rank, _ in self.files.states)
        found: Shapes = {}
        for layer in sorted({layer for layer, _, _ in self.files.experts}):
            experts = sorted(expert for at, expert, model in self.files.experts if (at, model) == (layer, tp))
            count = len(experts) // num_ranks
            for expert in experts[expert_rank * count : (expert_rank + 1) * count]:
                held = module_of(self.files.experts[layer, expert, tp], whole_file=True)
                found |= {name: tensor.shape for name, tensor in held.items()}
        return found

    # Scalars and ties

    def _add_records(self, rank: Rank, file: StepFile) -> None:
        coordinate, path = self.files.coordinate(rank, of_dp=self.files.stage_3), join(self.folder.path, file.name)
        for key in ("global_steps", "skipped_steps", "global_samples", "iteration"):
            value = file.tree.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
                self.builder.scalars.append(Scalar(key, float(value), path, coordinate))
        if (count := schedule_steps(file)) is not None:
            self.builder.scalars.append(Scalar("engine_schedule_steps", float(count), path, coordinate))
        for key, degree in (("dp_world_size", self.files.dp), ("mp_world_size", self.files.tp)):
            stated = count_in(file, key)
            if stated not in (None, degree) and file.name not in self.files.impossible:
                self._problem(ProblemKind.METADATA, file, f"records {key} {stated}, others {degree}", coordinate)
        if file.content and shapes_in(file, "param_shapes") not in (self.layout.shapes, []):
            message = "its param_shapes differ from those of the other ranks"
            self._problem(ProblemKind.RANKS_DISAGREE, file, message, coordinate)

    def _add_ties(self) -> None:
        """What a file keeps as one, and what the engine says are two names of one parameter."""
        ties: list[Tie] = []
        for _, file in sorted(self.files.models.items()):
            weights = {name: tensor for name, tensor in module_of(file).items() if name not in self.layout.buffers}
            ties += in_one_storage(weights, file.name)
            shared = file.tree.get("shared_params")
            for alias, source in shared.items() if isinstance(shared, dict) else ():
                if isinstance(alias, str) and isinstance(source, str):
                    ties.append(Tie((source, alias), f"shared_params in {file.name}"))
        self.builder.ties.extend(distinct(ties))
