"""Turns one ``torch.save`` file a rank into a Catalog: pieces, scalars, and what contradicts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from auditor.adapters.adapter import MAX_LOST, MAX_RANKS, Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.optimizer_index import (
    ROLES,
    Attached,
    IndexedState,
    attach,
    consecutive,
    indexed_state,
    role_and_name,
    split_by_decay,
)
from auditor.adapters.optimizer_record import SavedOptimizer, record, record_loss_scale
from auditor.adapters.step_file import StepFile
from auditor.adapters.ties import distinct, in_one_storage
from auditor.adapters.torch_per_rank.files import (
    NAME,
    STEPS,
    Series,
    averages,
    is_buffer,
    lost_keys,
    parallel_setting,
    rank_state,
    recorded,
)
from auditor.containers.torch_zip import RecordBudget, StoredTensor
from auditor.model.catalog import Catalog, File, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate, Mesh, Placement, Replicate, Shard, global_shape, local_box
from auditor.model.region import whole
from auditor.storage.store import Store, join

_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
_SCALERS = ("scaler", "grad_scaler", "scaler_state_dict")
_WRAPPER = "module."

Slot = tuple[Role, str, str]
"""Role, tensor name, key in the file."""


class PerRankReading:
    """One step being read."""

    def __init__(self, store: Store, folder: Folder, series: Series, options: Options) -> None:
        self.store, self.folder, self.series, self.options = store, folder, series, options
        read: dict[int, StepFile] = {}
        worlds: Counter[int] = Counter()
        budget = RecordBudget()
        for rank, name in sorted(series.names.items()):
            skip = options.names_only and worlds
            unread = StepFile.unopened(folder, name)
            read[rank] = unread if skip else StepFile.read(store, folder, name, budget)
            world = recorded(read[rank], "world_size")
            worlds.update([world] if world and world <= min(MAX_RANKS, MAX_LOST * len(series.names)) else [])
        self.world = worlds.most_common(1)[0][0] if worlds else 1 + max(read, default=0)
        if folder.alone:
            self.world = max(self.world, *(rank + 1 for rank in read))
        self.leftovers = [*series.doubles, *(series.names[rank] for rank in read if rank >= self.world)]
        ranks = read if folder.alone else range(self.world)
        self.files = {rank: read[rank] if rank in read else StepFile.absent(series.name(rank)) for rank in ranks}
        of_rank = folder.alone and (self.world > 1 or bool(series.tail))
        self.others = "one rank's file was named: the other ranks' were not looked at" if of_rank else ""
        alone = "a single file was named: what belongs to it is not known" if folder.alone else ""
        self.unseen = self.others or alone
        self.states = {rank: rank_state(file) for rank, file in self.files.items() if file.content}
        self.mesh = Mesh((("dp", self.world),), ordered=True)
        self.wrapped = all(
            key.startswith(_WRAPPER) for s in self.states.values() for key in (*s.model, *s.parts)
        )  # DDP's own prefix is no part of the model's names; a model may also have a submodule called `module`.
        replicated = self.world > 1 and not self.others
        self.replicas = tuple(Coordinate.of(dp=rank) for rank in range(self.world)) if replicated else ()
        self.ranks_counted = not worlds and not folder.alone
        self.doubt = self._doubt()
        self.lacking, self.lost = (None if self.doubt or self.others else lost_keys(self.states)) or (-1, ())
        """The rank whose model plainly lacks tensors, and their keys."""
        self.builder = CatalogBuilder()
        self.called: dict[tuple[int, str], str] = {}
        """Rank and key in its file to the name of the tensor in the Catalog."""

    def _doubt(self) -> str:
        """What says that rank files are no replicas."""
        if any(state.parts for state in self.states.values()):
            return "rank files hold records of DTensor or ShardedTensor: parts, not replicas"
        return next(filter(None, map(parallel_setting, self.files.values())), "")

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        for rank, file in self.files.items():
            self.builder.file(self._as_file(rank, file))
        slots = {rank: self._slots(rank) for rank in self.states}
        nameless = {rank: dict(self._state(rank)) for rank in self.states}
        names = self._attached()
        for rank in self.states:
            for path, (number, key, tensor) in nameless[rank].items():
                role = ROLES.get(key, Role.MOMENT)
                if names.reason:
                    self._add_alone(rank, (role, path, path), tensor, 1 << 40, names.reason)
                elif number not in names.names:
                    slots[rank][role, path, path] = tensor
                else:
                    role, name = role_and_name(self._name(names.names[number]), key)
                    slots[rank][role, name, path] = tensor
        self._add_tensors(slots)
        self._add_parts()
        for rank in self.states:
            self._add_optimizer(rank, names)
        self._add_ties()
        self._add_scalars_and_problems()
        claimed = {file.name for file in self.files.values()} | set(self.leftovers)
        unclaimed = [join(self.folder.path, name) for name in self.folder.files if name not in claimed]
        opaque: Counter[str] = Counter()
        for file in self.files.values():
            opaque.update(file.content.opaque if file.content else {})
        catalog = self.builder.build(step, self.folder.path, format_name, self.mesh, opaque, unclaimed)
        return replace(catalog, unseen=self.unseen, ranks_counted=self.ranks_counted)

    def _as_file(self, rank: int, file: StepFile) -> File:
        return file.as_rank_file(self.folder.path, Coordinate.of(dp=rank))

    def _name(self, key: str) -> str:
        return key.removeprefix(_WRAPPER) if self.wrapped else key

    # What files hold

    def _slots(self, rank: int) -> dict[Slot, StoredTensor]:
        state = self.states[rank]
        copies = {
            (Role.EMA, self._name(path.partition(".")[2]), path): tensor
            for path, tensor in averages(self.files[rank]).items()
        }
        own = {
            (Role.BUFFER if is_buffer(key, tensor) else Role.PARAMETER, self._name(key), f"{state.path}{key}"): tensor
            for key, tensor in state.model.items()
        }
        return own | copies

    def _state(self, rank: int) -> Iterator[tuple[str, tuple[int, str, StoredTensor]]]:
        """Optimizer state by its path in the file."""
        saved, state = self._saved(rank)
        for number, key, tensor in state.flat() if state else ():
            yield f"{saved}.state.{number}.{key}", (number, key, tensor)

    def _saved(self, rank: int) -> tuple[str, IndexedState | None]:
        """Where a file keeps the optimizer's state, and that state."""
        tree = self.files[rank].tree
        saved = next((key for key in _OPTIMIZERS if key in tree), "")
        return saved, indexed_state(tree.get(saved))

    def _attached(self) -> Attached:
        """Names for parameter numbers, on which all files must agree."""
        found: Attached | None = None
        optimizers = {rank: saved for rank in self.states if (saved := self._saved(rank)[1])}
        # An optimizer that has not taken a step keeps nothing by which orders could be told apart.
        stateful = {rank: saved for rank, saved in optimizers.items() if saved.tensors}
        for rank, saved in (stateful or optimizers).items():
            # An optimizer numbers what the model had when it was made: what was lost since is put back.
            state = self.states[rank if rank != self.lacking else next(n for n in self.states if n != rank)]
            shapes = {key: tensor.shape for key, tensor in state.parameters().items()}
            orders = [consecutive(shapes, saved), split_by_decay(shapes, saved)]
            orders.append(split_by_decay(shapes, saved, lambda name, shape: name.endswith("bias")))
            own = attach(shapes, saved, orders)
            if own.reason or (found and own.names != found.names):
                why = own.reason or "rank files number their optimizer's parameters differently"
                return Attached({}, (), f"{why}{self._why_lacking(rank)}")
            found = own
        return found or Attached({})

    def _why_lacking(self, rank: int) -> str:
        return f"; {self.files[rank].name} lacks {self.lost[0]}" if rank == self.lacking else ""

    # Tensors

    def _add_tensors(self, slots: Mapping[int, Mapping[Slot, StoredTensor]]) -> None:
        order: dict[str, int] = {}
        template: dict[Slot, StoredTensor] = {}
        for of_rank in slots.values():
            for slot, tensor in of_rank.items():
                order.setdefault(slot[1], len(order))
                template.setdefault(slot, tensor)
        for slot, expected in template.items():
            held = {rank: of_rank[slot] for rank, of_rank in slots.items() if slot in of_rank}
            placed, reason = self._placed(slot, held)
            at = order[slot[1]]
            if placed is None:
                for rank, stored in held.items():
                    self._add_alone(rank, slot, stored, at, reason)
            else:
                self._add_placed(slot, expected, held, placed, at)

    def _placed(self, slot: Slot, held: Mapping[int, StoredTensor]) -> tuple[Shard | Replicate | None, str]:
        """How a tensor lies over ranks, or why that isn't known."""
        stated = self.options.stated("dp", slot[1])
        if len({(tensor.shape, tensor.dtype) for tensor in held.values()}) > 1:
            return None, "rank files hold it with different shapes or dtypes"
        if len(held) < len(self.states):
            plain = self._lost(slot) and not isinstance(stated, Shard)
            return (Replicate(), "") if plain else (None, "not every rank file holds it")
        if isinstance(stated, Shard) and self.others:
            return None, self.others
        if isinstance(stated, Shard) and slot[0] is not Role.COUNTER:
            dims = len(next(iter(held.values())).shape)
            return (
                (stated, "") if stated.dim < dims else (None, f"it has no dim {stated.dim}, which is stated to be cut")
            )
        return (None, self.doubt) if self.doubt and stated is None else (Replicate(), "")

    def _lost(self, slot: Slot) -> bool:
        """Whether it is of the model and one rank lost it: the others' are replicas all the same."""
        return slot[0] in (Role.PARAMETER, Role.BUFFER) and slot[1] in map(self._name, self.lost)

    def _add_placed(
        self, slot: Slot, expected: StoredTensor, held: Mapping[int, StoredTensor], how: Shard | Replicate, order: int
    ) -> None:  # fmt: skip
        role, name, key = slot
        placement: Placement = {"dp": how}
        replicas = self.replicas if isinstance(how, Replicate) else ()
        if self._lost(slot):
            replicas = tuple(place for place in replicas if place != Coordinate.of(dp=self.lacking))
        shape = global_shape(expected.shape, placement, self.mesh)
        tensor = self.builder.tensor(
            name, role, expected.dtype, shape, order, replicas=replicas, replica_axes=("dp",) if replicas else (),
            placement=placement, undetermined=self.others,
        )  # fmt: skip
        for rank, file in self.files.items():
            stored = held.get(rank)
            if stored is None and file.state is FileState.PRESENT:
                continue
            coordinate = Coordinate.of(dp=rank)
            box = local_box(expected.shape, placement, self.mesh, coordinate)
            number = self.builder.file_id(join(self.folder.path, file.name))
            self.called[rank, key] = name
            source = stored or expected
            offset = stored.offset if stored else 0
            self.builder.piece(tensor, number, offset, box, coordinate, key=key, strides=source.strides)

    def _add_alone(self, rank: int, slot: Slot, stored: StoredTensor, order: int, reason: str) -> None:
        """One rank's tensor of which nothing is claimed."""
        role, name, key = slot
        coordinate = Coordinate.of(dp=rank)
        tensor = self.builder.tensor(
            f"{name}@{coordinate}", role, stored.dtype, stored.shape, order, undetermined=reason
        )
        self.called[rank, key] = f"{name}@{coordinate}"
        number = self.builder.file_id(join(self.folder.path, self.files[rank].name))
        self.builder.piece(
            tensor, number, stored.offset, whole(stored.shape), coordinate, key=key, strides=stored.strides
        )

    def _add_parts(self) -> None:
        """Records of parts are not read; that they are there must show."""
        for key in dict.fromkeys(key for state in self.states.values() for key in state.parts):
            self.builder.tensor(self._name(key), Role.OBJECT, FLOAT32, (0,), 1 << 41, undetermined=self.doubt)

    # Optimizer and ties

    def _add_optimizer(self, rank: int, names: Attached) -> None:
        """What a file records of its optimizer besides tensors."""
        path, coordinate = join(self.folder.path, self.files[rank].name), Coordinate.of(dp=rank)
        tree = self.files[rank].tree
        for scaler in (tree[key] for key in _SCALERS if key in tree):
            record_loss_scale(self.builder, self.store, path, coordinate, scaler)
        saved, state = self._saved(rank)
        if state is None or self.options.names_only:
            return
        called = {number: self._parameter(rank, name) for number, name in names.names.items()}
        counted = {
            number: self.called.get((rank, f"{saved}.state.{number}.step"), called.get(number, ""))
            for number in {*state.tensors, *state.counts}
        }
        groups = [
            tuple(called[number] for number in numbers) if called.keys() >= set(numbers) and called else None
            for numbers in state.numbers
        ]
        record(self.builder, self.store, SavedOptimizer(path, coordinate, state, groups, counted))

    def _parameter(self, rank: int, key: str) -> str:
        """The name in the Catalog of what a rank's state dict calls ``key``."""
        return self.called.get((rank, f"{self.states[rank].path}{key}"), self._name(key))

    def _add_ties(self) -> None:
        ties = []
        for rank, state in self.states.items():
            named = {self._name(key): t for key, t in state.model.items() if not is_buffer(key, t)}
            ties += in_one_storage(named, self.files[rank].name)
        self.builder.ties.extend(distinct(ties))

    # Scalars and problems

    def _add_scalars_and_problems(self) -> None:
        ranks = {recorded(self.files[rank], "rank") for rank in self.states}
        for rank, file in self.files.items():
            for name, value in (
                ("global_steps", recorded(file, *STEPS)),
                ("world_size", recorded(file, "world_size")),
            ):
                if value is not None:
                    path = join(self.folder.path, file.name)
                    self.builder.scalars.append(Scalar(name, float(value), path, Coordinate.of(dp=rank)))
            stated = recorded(file, "world_size")
            if stated not in (None, self.world):
                self._problem(
                    ProblemKind.METADATA, file.name, f"records world_size {stated}, others {self.world}", rank
                )
            if message := self._origin(rank, file, several=len(ranks) > 1):
                self._problem(ProblemKind.OTHER_RANK, file.name, message, rank)
        for key in self.lost:
            what = "the other rank file holds" if len(self.states) == 2 else "all other rank files hold"
            message = f"lacks {self._name(key)}, which {what}"
            self._problem(
                ProblemKind.RANKS_DISAGREE, self.files[self.lacking].name, message, self.lacking, self._name(key)
            )
        for name in self.leftovers:
            self._problem(ProblemKind.LEFTOVER, name, f"is of no rank of the mesh ({self.mesh}), or there twice")

    def _problem(
        self, kind: ProblemKind, name: str, message: str, rank: int | None = None, tensor: str = ""
    ) -> None:  # fmt: skip
        coordinate = Coordinate() if rank is None else Coordinate.of(dp=rank)
        self.builder.problems.append(Problem(kind, join(self.folder.path, name), message, coordinate, tensor))

    def _origin(self, rank: int, file: StepFile, *, several: bool) -> str:
        """What shows that a file is another rank's: torch keeps the stem that was saved to, scripts record the rank."""
        root = NAME.fullmatch(f"{file.content.root}.pt") if file.content else None
        if root and root["head"] == self.series.head and int(root["rank"]) != rank:
            return f"was saved as {file.content.root if file.content else ''}"
        own = recorded(file, "rank")
        return f"records rank {own}" if several and own not in (None, rank) else ""
