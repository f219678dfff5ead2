"""Turns the files of a Hugging Face folder into a Catalog: one piece a tensor, and what contradicts itself.

A file that must be there but isn't, or can't be read, has its tensors in the Catalog all the same where the index
names them and the configuration tells their shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.dcp.files import PARTS_BELOW
from auditor.adapters.dcp.safetensors import Consolidated, ShardReading, shard_files
from auditor.adapters.hugging_face.averages import add_averages
from auditor.adapters.hugging_face.components import Components, components_in
from auditor.adapters.hugging_face.config import Implied, implied, recorded_dtype
from auditor.adapters.hugging_face.files import (
    ADAPTER_KINDS,
    MODEL_KINDS,
    Kind,
    Weights,
    kind_of_only,
    open_json,
    open_weights,
)
from auditor.adapters.hugging_face.sets import WeightSet, find_set
from auditor.adapters.hugging_face.tensors import (
    CONFIG,
    Placed,
    check_emptiness,
    check_total,
    compare,
    model_order,
    parameters_as_stored,
    place,
    ties_in,
)
from auditor.adapters.hugging_face.trainer_files import (
    TRAINER_STATE,
    Listings,
    TrainerFiles,
    has_trained_siblings,
    record_rates,
)
from auditor.adapters.step_file import Opened
from auditor.adapters.step_names import is_part
from auditor.adapters.ties import distinct
from auditor.model.catalog import WITHHELD, Catalog, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import FLOAT32, DType
from auditor.model.mesh import EVERYWHERE
from auditor.model.region import whole
from auditor.storage.store import Store, join

ADAPTER_CONFIG = "adapter_config.json"
_BEFORE_TRAINER_STATE = ("training_args.bin", "optimizer.pt")
"""What the Trainer writes before ``trainer_state.json``, the last file of a step."""


class HuggingFaceReading:
    """One folder being read."""

    def __init__(self, store: Store, folder: Folder, options: Options) -> None:
        none = Components(folder, {})
        self.components = (components_in(store, folder) or none) if not _has_weights(store, folder) else none
        folder = self.components.folder
        self.store, self.folder, self.options, self.names_only = store, folder, options, options.names_only
        self.builder = CatalogBuilder()
        self.opaque: Counter[str] = Counter()
        self.claimed: set[str] = set()
        self.small: dict[str, Opened[Mapping[str, Any]]] = {}
        self.beside = TrainerFiles(self.builder, store, folder, names_only=options.names_only)

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the folder."""
        self._add_small_files()
        models, adapters = (self._sets(kinds) for kinds in (MODEL_KINDS, ADAPTER_KINDS))
        only = None if models or adapters else kind_of_only(self.folder)
        models = self._sets([only]) if only else models
        placed = [self._read_set(found[0]) for found in (models, adapters) if found]
        placed += [self._read_set(found) for found in self.components.sets.values()]
        for other in (*models[1:], *adapters[1:]):
            # The kind that loaders don't take is legal beside the other; two sets of it are not.
            if other.num_families > 1:
                self._add_leftovers(other)
        model = self._hold_against_config(placed[0]) if models and not self.names_only else Implied()
        if adapters and not self.names_only:
            self._check_rank(placed[-1])
        for one in placed:
            check_total(one)
        order = self._add_tensors(placed, model)
        self.builder.ties.extend(distinct([*model.ties, *(tie for one in placed for tie in ties_in(one))]))
        listings = self._listings(placed, model, order)
        self.beside.add(listings)
        self._add_parts(placed, order)
        averages = set() if self.names_only else add_averages(self.builder, self.store, self.folder, listings)
        claimed = self.claimed | self.beside.claimed | averages
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if name not in claimed]
        catalog = self.builder.build(step, self.folder.path, format_name, self.beside.mesh, self.opaque, unclaimed)
        counted = bool(self.beside.random)
        return replace(
            catalog, not_implied=self._reason(model, models), unseen=self._unseen(placed), ranks_counted=counted
        )

    def _unseen(self, placed: Sequence[Placed]) -> str:
        """Why nothing is known of the other files of the set, where one alone was named."""
        if not self.folder.alone:
            return ""
        ((kind, name),) = [(one.weights.kind, name) for one in placed for name in one.weights.names]
        place = kind.place(name)
        if place:
            return f"one file of {place[1]} was named: whether the others are there was not looked at"
        return "a single file was named: what belongs to it is not known" if is_part(name) else ""

    # Files

    def _add_small_files(self) -> None:
        names = [name for name in (CONFIG, ADAPTER_CONFIG, TRAINER_STATE) if name in self.folder.files]
        for name in names:
            self._add_small(open_json(self.store, self.folder, name))
        if TRAINER_STATE not in names and (
            all(name in self.folder.files for name in _BEFORE_TRAINER_STATE)
            or has_trained_siblings(self.store, self.folder)
        ):
            self._add_small(Opened.absent(TRAINER_STATE))
        step = self._small(TRAINER_STATE).get("global_step")
        if type(step) is int and 0 <= step < 1 << 53:
            self.builder.scalars.append(Scalar("global_steps", float(step), join(self.folder.path, TRAINER_STATE)))
            record_rates(self.builder, join(self.folder.path, TRAINER_STATE), self._small(TRAINER_STATE))

    def _add_small(self, opened: Opened[Mapping[str, Any]]) -> None:
        self.small[opened.name] = opened
        self._claim(opened, "json")

    def _small(self, name: str) -> Mapping[str, Any]:
        opened = self.small.get(name)
        return opened.content if opened and opened.content else {}

    def _claim(self, opened: Opened[Any], container: str, opaque: Mapping[str, int] | None = None) -> None:
        self.claimed.add(opened.name)
        self.builder.file(opened.as_file(self.folder.path, container, opaque=opaque))

    def _sets(self, kinds: Sequence[Kind]) -> list[WeightSet]:
        return [found for kind in kinds if (found := find_set(self.store, self.folder, kind))]

    def _read_set(self, weights: WeightSet) -> Placed:
        """Open every file of a set and find its tensors."""
        if weights.index:
            self._claim(weights.index.opened, "json")
        files: dict[str, Opened[Weights]] = {}
        for name in weights.names:
            opened = files[name] = self._open(name, weights.kind)
            pickled = opened.content.opaque if opened.content and weights.kind.container == "torch-zip" else {}
            container = opened.content.container if opened.content else weights.kind.container
            self._claim(opened, container, pickled)
        self._add_leftovers(weights)
        if self.names_only:
            return Placed(weights, files, self.folder.path)
        return place(weights, files, self.folder.path)

    def _open(self, name: str, kind: Kind) -> Opened[Weights]:
        if name not in self.folder.files:
            return Opened.absent(name)
        if self.names_only:
            return Opened.unopened(self.folder, name)
        opened = open_weights(self.store, self.folder, name, kind)
        self.opaque.update(opened.content.opaque if opened.content else {})
        return opened

    def _add_leftovers(self, weights: WeightSet) -> None:
        for name, reason in weights.leftovers.items():
            self.claimed.add(name)
            self.builder.problems.append(Problem(ProblemKind.LEFTOVER, join(self.folder.path, name), reason))

    def _add_parts(self, sets: Sequence[Placed], order: Mapping[str, int]) -> None:
        """What the ranks wrote before DCP's writer put their parts together: every tensor once more."""
        if PARTS_BELOW not in self.folder.folders or not sets:
            return
        folder = Folder.read(self.store, self.folder.folders[PARTS_BELOW].name)
        if shard_files(folder):
            shapes = {name: array.shape for name, (_, array) in sets[0].found.items()}
            lost, unread = frozenset(sets[0].lost), bool(sets[0].unread)
            whole = Consolidated(shapes, order, lost, join(self.folder.path, sets[0].index_name), unread)
            ShardReading(self.store, folder, self.options, whole, self.builder).add()

    # What should be there

    def _hold_against_config(self, placed: Placed) -> Implied:
        """Compare a model's set with the configuration; what it implies."""
        if check_emptiness(placed):
            return implied(self._small(CONFIG), ())
        model = implied(self._small(CONFIG), placed.found.keys() | placed.lost.keys())
        leftovers: dict[str, Opened[Weights]] = {}
        if model.required.keys() - placed.found.keys():
            kind = placed.weights.kind
            names = [name for name in placed.weights.leftovers if not name.endswith(".json")]
            leftovers = {name: open_weights(self.store, self.folder, name, kind) for name in names}
        compare(placed, model, leftovers)
        return model

    def _check_rank(self, placed: Placed) -> None:
        """A low-rank factor has the rank that the adapter's configuration records, never none."""
        rank = self._small(ADAPTER_CONFIG).get("r")
        if check_emptiness(placed) or type(rank) is not int or rank < 1:
            return
        for name, (file, array) in placed.found.items():
            if (".lora_A." in name or ".lora_B." in name) and 0 in array.shape:
                message = f"holds {name} without elements, {ADAPTER_CONFIG} records rank {rank}"
                placed.problem(ProblemKind.EMPTY, file.name, message, name)

    def _reason(self, model: Implied, models: Sequence[WeightSet]) -> str:
        """Why the configuration implies nothing; empty where it does."""
        config = self.small.get(CONFIG)
        if self.components.sets:
            return "which tensors its components have is not told by their configurations"
        if not models:
            return "a low-rank adapter's tensors are not implied by its configuration"
        if self.folder.alone:
            return f"a single file was named: {CONFIG} was not looked at"
        if config is None:
            return f"there is no {CONFIG} to tell which tensors the model has"
        if config.state in WITHHELD:
            return f"storage did not let {CONFIG} be read"
        return f"{CONFIG} can't be read" if config.lost else model.unknown

    # Tensors

    def _listings(self, sets: Sequence[Placed], model: Implied, positions: Mapping[str, int]) -> Listings:
        """In which orders the model's parameters may have been handed to an optimizer."""
        shapes = {
            self.components.called(one.weights.kind.part, name)[1]: array.shape
            for one in sets
            for name, (_, array) in one.found.items()
        }
        shapes |= {name: shape for one in sets for name in one.lost if (shape := model.shape_of(name)) is not None}
        orders = [{name: shapes[name] for name in model.order if name in shapes}]
        orders += [parameters_as_stored(one) for one in sets if one.weights.kind.container == "torch-zip"]
        adapted = any(one.weights.kind in ADAPTER_KINDS for one in sets)
        if adapted:
            orders, unknown = [], "in which order the adapted modules lie in the base model is not recorded"
        else:
            reason = model.unknown if CONFIG in self.folder.files else f"there is no {CONFIG}"
            unknown = f"safetensors keep no order of the model's parameters, and none is known: {reason}"
        return Listings(shapes, [order for order in orders if order], positions, unknown)

    def _add_tensors(self, sets: Sequence[Placed], model: Implied) -> dict[str, int]:
        """Tensors in model order, those of lost files included, and the problems with their place in it; the order."""
        problems = [problem for placed in sets for problem in placed.problems]
        names = {name for placed in sets for name in (*placed.found, *placed.lost)}
        ordered = sorted(names | {problem.tensor for problem in problems} - {""}, key=model_order)
        order = {name: position for position, name in enumerate(ordered)}
        dtype = recorded_dtype(self._small(CONFIG)) or _usual_dtype(sets)
        taken: set[tuple[Role, str]] = set()
        for placed in sets:
            self._add_found(placed, order, taken)
            self._add_lost(placed, order, model, dtype)
        self.builder.problems += [replace(problem, order=order.get(problem.tensor, -1)) for problem in problems]
        return order

    def _add_found(self, placed: Placed, order: Mapping[str, int], taken: set[tuple[Role, str]]) -> None:
        for name in sorted(placed.found, key=order.__getitem__):
            file, array = placed.found[name]
            role, called = self.components.called(placed.weights.kind.part, name)
            if (role, called) in taken:
                continue
            taken.add((role, called))
            if array.dtype is None:
                reason = f"its elements can't be read: {array.unread}"
                self.builder.tensor(called, Role.OBJECT, FLOAT32, (0,), order[name], undetermined=reason)
                continue
            tensor = self.builder.tensor(
                called, role, array.dtype, array.shape, order[name], stored_once=self.beside.stored_once
            )
            file_id = self.builder.file_id(join(self.folder.path, file.name))
            self.builder.piece(
                tensor, file_id, array.offset, whole(array.shape), EVERYWHERE, key=name, strides=array.strides
            )

    def _add_lost(self, placed: Placed, order: Mapping[str, int], model: Implied, dtype: DType) -> None:
        """Tensors of files that could not be read: with their shape, else at least with their number."""
        nameless: dict[str, list[str]] = {}
        for name in sorted(placed.lost, key=order.__getitem__):
            shape, file = model.shape_of(name), placed.lost[name]
            if shape is None:
                if file.lost:
                    nameless.setdefault(file.name, []).append(name)
                continue
            tensor = self.builder.tensor(
                name, Role.PARAMETER, dtype, shape, order[name], stored_once=self.beside.stored_once
            )
            self.builder.piece(
                tensor, self.builder.file_id(join(self.folder.path, file.name)), 0, whole(shape), EVERYWHERE, key=name
            )
        for file_name, names in nameless.items():
            message = f"should hold {len(names)} tensors whose shapes nothing tells, first {names[0]}"
            self.builder.problems.append(
                Problem(ProblemKind.METADATA, join(self.folder.path, file_name), message)
            )  # fmt: skip


def _has_weights(store: Store, folder: Folder) -> bool:
    return any(find_set(store, folder, kind) for kind in (*MODEL_KINDS, *ADAPTER_KINDS))


def _usual_dtype(sets: Sequence[Placed]) -> DType:
    """The dtype of most tensors that were found."""
    counts = Counter(array.dtype for placed in sets for _, array in placed.found.values() if array.dtype)
    return counts.most_common(1)[0][0] if counts else FLOAT32
