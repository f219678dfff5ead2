"""Turns one ``torch.save`` file a rank into a Catalog: pieces, scalars, and what contradicts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from auditor.adapters.adapter import MAX_LOST, MAX_RANKS, Folder, Options
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.optimizer_index import (
    Attached,
    attach,
    consecutive,
    role_and_name,
    split_by_decay,
    without_frozen,
)
from auditor.adapters.optimizer_record import SavedOptimizer, record, record_loss_scale
from auditor.adapters.schedule_record import schedule_in
from auditor.adapters.step_file import StepFile
from auditor.adapters.ties import distinct, in_one_storage
from auditor.adapters.torch_per_rank.distributed import DistributedTensor, Held, likeness
from auditor.adapters.torch_per_rank.files import (
    NAME,
    STEPS,
    Series,
    averages,
    flat_parameter,
    is_buffer,
    looks_cut,
    lost_keys,
    parallel_setting,
    rank_state,
    recorded,
)
from auditor.adapters.torch_per_rank.grid import Spread, find_grid
from auditor.containers.torch_zip import RecordBudget, StoredTensor
from auditor.model.catalog import Catalog, File, FileState, Problem, ProblemKind, Role, Scalar
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate, Shard, global_shape, local_box
from auditor.model.region import whole
from auditor.storage.store import Store, join

_SCALERS = ("scaler", "grad_scaler", "scaler_state_dict")
_WRAPPER = "module."
_OTHERS = ("one rank's file was named: the other ranks' were not looked at",
           "it holds one rank's part of its tensors: where the other ranks' are is not known")  # fmt: skip
_UNKNOWN = "a single file was named: what belongs to it is not known"

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
            # A file that is no rank's may be what one of many ranks saved for all.
            believed = world and not series.whole and world <= min(MAX_RANKS, MAX_LOST * len(series.names))
            worlds.update([world] if world and believed else [])
        states = {rank: rank_state(file) for rank, file in read.items() if file.content}
        alone = folder.alone or series.whole
        self.ranks_counted = not worlds and not alone
        if not worlds:
            most = MAX_LOST * len(series.names)
            worlds.update(n for state in states.values() for n in state.reader.num_ranks() if max(read) < n <= most)
        self.world = worlds.most_common(1)[0][0] if worlds else 1 + max(read, default=0)
        if alone:
            self.world = max(self.world, *(rank + 1 for rank in read))
        self.leftovers = [*series.doubles, *(series.names[rank] for rank in read if rank >= self.world)]
        ranks = read if alone else range(self.world)
        self.files = {rank: read[rank] if rank in read else StepFile.absent(series.name(rank)) for rank in ranks}
        of_rank = alone and (self.world > 1 or bool(series.tail))
        self.others = _OTHERS[series.whole] if of_rank else ""
        self.unseen = self.others or ("" if series.whole or not alone else _UNKNOWN)
        self.states = {rank: state for rank, state in states.items() if rank in self.files}
        self.grid = find_grid(self.states, self.world, whole=series.whole)
        self.wrapped = all(
            key.startswith(_WRAPPER) for s in self.states.values() for key in (*s.model, *s.parts)
        )  # DDP's own prefix is no part of the model's names; a model may also have a submodule called `module`.
        self.doubt = self._doubt()
        self.lacking, self.lost = (None if self.doubt or self.others else lost_keys(self.states)) or (-1, ())
        """The rank whose model plainly lacks tensors, and their keys."""
        self.builder = CatalogBuilder()
        self.called: dict[tuple[int, str], str] = {}
        """Rank and key in its file to the name of the tensor in the Catalog."""
        self.first_order, self.label = 0, ""
        """Position of its first tensor in the model; what the model is called, where it is one of several."""

    def _doubt(self) -> str:
        """What says that rank files are no replicas, and it isn't known what they are."""
        if any(state.parts for state in self.states.values()):
            return "rank files hold records of DTensor or ShardedTensor: parts, not replicas"
        if self.series.whole:
            return next(filter(None, map(flat_parameter, self.files.values())), self.grid.reason)
        writers = {rank: state.reader.writer for rank, state in self.states.items()}
        if writers and all(writer not in (None, rank) for rank, writer in writers.items()):
            return "files are numbered otherwise than the ranks that wrote them"
        recorded_or_not = (*map(parallel_setting, self.files.values()), *self._looks_cut())
        return self.grid.reason or next(filter(None, recorded_or_not), "")

    def _looks_cut(self) -> Iterator[str]:
        """One file tells; where any records parts, the records do."""
        if self.world > 1 and not any(state.reader.roots for state in self.states.values()):
            yield from (looks_cut(state, self.world) for state in [*self.states.values()][:1])

    def catalog(self, step: int, format_name: str) -> Catalog:
        """The Catalog of the step."""
        self.fill()
        claimed = {file.name for file in self.files.values()} | set(self.leftovers)
        unclaimed = [join(self.folder.place, name) for name in self.folder.files if name not in claimed]
        catalog = self.builder.build(step, self.folder.path, format_name, self.grid.mesh, self.opaque(), unclaimed)
        return replace(catalog, unseen=self.unseen, ranks_counted=self.ranks_counted)

    def opaque(self) -> Counter[str]:
        """Objects of unknown classes in the files."""
        return sum((Counter(file.content.opaque) for file in self.files.values() if file.content), Counter[str]())

    def fill(self) -> None:
        """Hand all that the files hold to the builder."""
        for rank, file in self.files.items():
            self.builder.file(self._as_file(rank, file))
        slots = {rank: self._slots(rank) for rank in self.states}
        nameless = {rank: dict(self._state(rank)) for rank in self.states}
        names = self._attached()
        for rank in self.states:
            for path, (number, key, tensor) in nameless[rank].items():
                known = names.names.get(number)
                role, name = role_and_name(self._name(known) if known else path.removesuffix(f".{key}"), key)
                if known is None and names.reason:
                    self._add_alone(rank, (role, name, path), tensor, 1 << 40, names.reason)
                else:
                    slots[rank][role, name, path] = tensor
        self._add_tensors(slots)
        self._add_parts()
        for rank in self.states:
            self._add_optimizer(rank, names)
        self._add_ties()
        self._add_scalars_and_problems()

    def _as_file(self, rank: int, file: StepFile) -> File:
        return file.as_rank_file(self.folder.place, self.grid.place(rank))

    def _path(self, rank: int, key: str = "") -> str:
        """The file in which a rank keeps ``key``."""
        return join(self.folder.place, self.files[rank].name)

    def _name(self, key: str) -> str:
        return key.removeprefix(_WRAPPER) if self.wrapped else key

    # What files hold

    def _slots(self, rank: int) -> dict[Slot, StoredTensor]:
        state = self.states[rank]
        copies = {
            (Role.EMA, self._name(path.partition(".")[2]), path): tensor
            for path, tensor in averages(self.files[rank], state).items()
        }
        own = {
            (Role.BUFFER if is_buffer(key, tensor) else Role.PARAMETER, self._name(key), f"{state.path}{key}"): tensor
            for key, tensor in state.model.items()
        }
        return own | copies

    def _state(self, rank: int) -> Iterator[tuple[str, tuple[int, str, StoredTensor]]]:
        """Optimizer state by its path in the file."""
        state, saved = self.states[rank].optimizer, self.states[rank].saved
        for number, key, tensor in state.flat() if state else ():
            yield f"{saved}state.{state.key(number) if state else number}.{key}", (number, key, tensor)

    def _attached(self) -> Attached:
        """Names for parameter numbers, on which all files must agree."""
        found: Attached | None = None
        optimizers = {rank: state.optimizer for rank, state in self.states.items() if state.optimizer}
        # An optimizer that has not taken a step keeps nothing by which orders could be told apart.
        stateful = {rank: saved for rank, saved in optimizers.items() if saved.tensors}
        for rank, saved in (stateful or optimizers).items():
            # An optimizer numbers what the model had when it was made: what was lost since is put back.
            state = self.states[rank if rank != self.lacking else next(n for n in self.states if n != rank)]
            shapes = {key: tensor.shape for key, tensor in state.parameters().items()}
            orders = [consecutive(shapes, saved), split_by_decay(shapes, saved)]
            orders.append(split_by_decay(shapes, saved, lambda name, shape: name.endswith("bias")))
            # Where parameters are cut, what every rank has whole may be a buffer.
            cut = {key: t.shape for key, t in state.parameters().items() if isinstance(t, DistributedTensor)}
            orders += [consecutive(cut, saved), split_by_decay(cut, saved)] if 0 < len(cut) < len(shapes) else []
            own = attach(shapes, saved, orders, without_frozen(shapes, saved))
            if (own.reason and not own.names) or (found and own.names != found.names):
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
                order.setdefault(slot[1], self.first_order + len(order))
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

    def _placed(self, slot: Slot, held: Mapping[int, StoredTensor]) -> tuple[Spread | None, str]:
        """How a tensor lies over ranks, or why that isn't known."""
        stated = self.options.stated("dp", slot[1])
        if len({likeness(tensor) for tensor in held.values()}) > 1:
            return None, "rank files hold it with different shapes or dtypes"
        first = next(iter(held.values()))
        cut = isinstance(stated, Shard) or isinstance(first, DistributedTensor)
        if cut and self.others:
            return None, self.others
        if isinstance(stated, Shard) and slot[0] is not Role.COUNTER:
            dims = len(first.shape)
            if stated.dim >= dims:
                return None, f"[placement.dp] names dim {stated.dim}, but it has no dim {stated.dim}: it has {dims}"
            return Spread((), {"dp": stated}), ""
        if self.doubt and stated is None:
            return None, self.doubt
        return self.grid.spread(held, held if self._lost(slot) else self.states)

    def _lost(self, slot: Slot) -> bool:
        """Whether it is of the model and one rank lost it: the others' are replicas all the same."""
        return slot[0] in (Role.PARAMETER, Role.BUFFER) and slot[1] in map(self._name, self.lost)

    def _add_placed(
        self, slot: Slot, expected: StoredTensor, held: Mapping[int, StoredTensor], spread: Spread, order: int
    ) -> None:  # fmt: skip
        role, name, key = slot
        replicas = () if self.others else spread.replicas
        if self._lost(slot):
            replicas = tuple(place for place in replicas if place != self.grid.place(self.lacking))
        shape = expected.shape
        if not isinstance(expected, DistributedTensor):
            shape = global_shape(shape, spread.placement or {}, self.grid.mesh)
        tensor = self.builder.tensor(
            name, role, expected.dtype, shape, order, replicas=replicas,
            replica_axes=spread.replica_axes if replicas else (), placement=spread.placement,
            undetermined=self.others,
        )  # fmt: skip
        for rank, file in self.files.items():
            stored = held.get(rank)
            if stored is None and file.state is FileState.PRESENT:
                continue
            self.called[rank, key] = name
            self._add_pieces(tensor, rank, key, stored, expected, spread)

    def _add_pieces(
        self, tensor: int, rank: int, key: str, stored: StoredTensor | None, expected: StoredTensor, spread: Spread
    ) -> None:
        """What one rank's file holds, or should hold, of a tensor."""
        coordinate = self.grid.place(rank)
        number, source = self.builder.file_id(self._path(rank, key)), stored or expected
        if isinstance(source, DistributedTensor):
            regions = [held for held in source.layout.held(rank) or () if held.box.num_elements]
            if stored is not None and not source.fits(rank):
                self._add_misfit(rank, key, source)
                return
            parts = source.parts
        else:
            box = local_box(source.shape, spread.placement or {}, self.grid.mesh, coordinate)
            regions, parts = [Held(box, 0, (0,) * len(source.shape))], (source,)
        for box, at, start in regions:
            part = parts[at] if at < len(parts) else parts[0]
            skipped = sum(a * stride for a, stride in zip(start, part.strides, strict=True))
            offset = part.offset + skipped * (part.dtype.bits // 8) if stored else 0
            strides = part.strides if stored or len(parts) == 1 else None
            self.builder.piece(tensor, number, offset, box, coordinate, key=key, strides=strides)

    def _add_misfit(self, rank: int, key: str, tensor: DistributedTensor) -> None:
        if self.states[rank].reader.writer in (None, rank):
            stored, implied = ([*map(list, shapes)] for shapes in (
                (part.shape for part in tensor.parts), tensor.layout.shapes(rank),
            ))  # fmt: skip
            message = f"holds {key} as {stored}, its recorded placement implies {implied}"
            self._problem(ProblemKind.METADATA, self.files[rank].name, message, rank, self.called.get((rank, key), ""))

    def _add_alone(self, rank: int, slot: Slot, stored: StoredTensor, order: int, reason: str) -> None:
        """One rank's tensor of which nothing is claimed."""
        role, name, key = slot
        coordinate = self.grid.place(rank)
        called = self.called[rank, key] = f"{name}@{coordinate if coordinate.indices else f'rank {rank}'}"
        number = self.builder.file_id(self._path(rank, key))
        parts = stored.parts if isinstance(stored, DistributedTensor) else (stored,)
        for at, part in enumerate(parts):
            own = called if len(parts) == 1 else f"{called}#{at}"
            tensor = self.builder.tensor(own, role, part.dtype, part.shape, order, undetermined=reason)
            self.builder.piece(
                tensor, number, part.offset, whole(part.shape), coordinate, key=key, strides=part.strides
            )

    def _add_parts(self) -> None:
        """Records of parts that can't be placed; that they are there must show."""
        for key in dict.fromkeys(key for state in self.states.values() for key in state.parts):
            self.builder.tensor(self._name(key), Role.OBJECT, FLOAT32, (0,), 1 << 41, undetermined=self.doubt)
        kinds = {key: kind for state in self.states.values() for key, kind in state.unread.items()}
        for key, kind in kinds.items():
            reason = f"its elements can't be read: {kind}"
            self.builder.tensor(self._name(key), Role.OBJECT, FLOAT32, (0,), 1 << 41, undetermined=reason)

    # Optimizer and ties

    def _add_optimizer(self, rank: int, names: Attached) -> None:
        """What a file records of its optimizer besides tensors."""
        coordinate, tree = self.grid.place(rank), self.files[rank].tree
        for scaler in (tree[key] for key in _SCALERS if key in tree):
            record_loss_scale(self.builder, self.store, self._path(rank), coordinate, scaler)
        state, saved = self.states[rank].optimizer, self.states[rank].saved
        if state is None or self.options.names_only:
            return
        called = {number: self._parameter(rank, name) for number, name in names.names.items()}
        counted = {
            number: self.called.get((rank, f"{saved}state.{state.key(number)}.step"), called.get(number, ""))
            for number in {*state.tensors, *state.counts}
        }
        groups = [tuple(called[number] for number in numbers if number in called) or None for numbers in state.numbers]
        kept = SavedOptimizer(
            self._path(rank, saved), coordinate, state, groups, counted, of_model=self.label, schedule=schedule_in(tree)
        )
        record(self.builder, self.store, kept)

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
                    self.builder.scalars.append(Scalar(name, float(value), self._path(rank), self.grid.place(rank)))
            stated = recorded(file, "world_size")
            if stated not in (None, self.world) and not self.series.whole:
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
            self._problem(ProblemKind.LEFTOVER, name, f"is of no rank of the mesh ({self.grid.mesh}), or there twice")

    def _problem(
        self, kind: ProblemKind, name: str, message: str, rank: int | None = None, tensor: str = ""
    ) -> None:  # fmt: skip
        coordinate = Coordinate() if rank is None else self.grid.place(rank)
        self.builder.problems.append(Problem(kind, join(self.folder.place, name), message, coordinate, tensor))

    def _origin(self, rank: int, file: StepFile, *, several: bool) -> str:
        """What shows that a file is another rank's: torch keeps the stem that was saved to, scripts record the rank."""
        root = NAME.fullmatch(f"{file.content.root}.pt") if file.content else None
        if root and root["head"] == self.series.head and int(root["rank"]) != rank:
            return f"was saved as {file.content.root if file.content else ''}"
        writer = self.states[rank].reader.writer if rank in self.states else None
        if writer not in (None, rank) and not self.doubt and not self.series.whole:
            return f"holds what rank {writer} saved"
        own = recorded(file, "rank")
        return f"records rank {own}" if several and own not in (None, rank) else ""
