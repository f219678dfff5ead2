"""Puts the tensors of a ``torch_dist`` checkpoint into the Catalog: a tensor for every layer and expert.

Every part is stored once: of replicas over tensor-, pipeline- and data-parallel ranks the main one alone is written.
How a tensor was cut over tensor-parallel ranks shows in the grid of its parts; a part's coordinate is that of the rank
that wrote it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.dcp.files import rank_of
from auditor.adapters.dcp.sources import Source
from auditor.adapters.megatron_dist.names import Cut, Key, cut, each, order_of, read_key
from auditor.adapters.megatron_legacy.files import Degrees
from auditor.containers.dcp_columns import Described
from auditor.model.catalog import Problem, ProblemKind, Role, c_strides
from auditor.model.dtype import DType
from auditor.model.mesh import Coordinate, Placement, Replicate, Shard
from auditor.model.region import Box, FlatRange
from auditor.storage.store import base_name

RANK = "rank"
_TIED = "embedding.word_embeddings.weight"
_BUCKET = (
    "it is a part of a bucket of the distributed optimizer; whose it is is not recorded "
    "(with --dist-ckpt-optim-fully-reshardable Megatron-LM saves it by parameter)"
)
_OTHER_SHAPE = "it is stored in another shape than its parameter"
MIN_TENSORS, PER_PART = 1 << 19, 64
"""How many tensors and pieces stacked arrays may give: so many, and so many more for each stored part."""
_PARAMETER_ALIGNMENT = 64
"""Elements at which parameters begin in such a buffer; between them lies what was never written."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """What is known of the ranks that wrote a checkpoint."""

    num_ranks: int
    degrees: Degrees | None
    fused: bool
    tied: bool
    distributed_optimizer: bool

    def once(self, what: Key, name: str, num_parts: int) -> tuple[str, ...]:
        """The axes along which a tensor that is stored in so many parts was replicated."""
        of = self.degrees
        if of is None:
            return (RANK,) if num_parts < self.num_ranks else ()
        spread = self.distributed_optimizer and what.role is not Role.PARAMETER
        axes = [*(() if spread else of.stored_once)]
        axes += ["ep"] if of.ep > 1 and ".experts." not in name else []
        axes += ["tp"] if of.tp > 1 and of.grid and num_parts == 1 else []
        return (*axes, *(["pp"] if of.pp > 1 and self.tied and name == _TIED else ()))

    def placement(self, parts: frozenset[Box], shape: tuple[int, ...]) -> Placement:
        """How a tensor lies on the tensor-parallel axis, where its parts are as many as its ranks."""
        if self.degrees is None or self.degrees.tp == 1 or not self.degrees.grid:
            return {}
        if len(parts) == 1:
            return {"tp": Replicate()}
        cuts = [dim for dim, extent in enumerate(shape) if {part.shape[dim] for part in parts} != {extent}]
        return {"tp": Shard(cuts[0])} if len(cuts) == 1 and len(parts) == self.degrees.tp else {}


@dataclass(frozen=True, slots=True)
class _Held:
    """One stored part of an array, or of a stored part what is one box of the array."""

    row: int
    region: Box
    cell: Box
    """What one rank has of the array: more than the region where data-parallel ranks have flat ranges of it."""
    skipped: int = 0
    """Elements before it in the stored part."""


class DistPlacing:
    """Adds all tensors of one step."""

    def __init__(
        self, builder: CatalogBuilder, source: Source, ranks: Ranks, coordinate: Callable[[str], Coordinate]
    ) -> None:
        self.builder, self.source, self.ranks, self.coordinate = builder, source, ranks, coordinate
        self.known: Mapping[str, Described] = source.index.tensors
        self.parameters = {read_key(key).parameter: key for key in self.known if read_key(key).role is Role.PARAMETER}
        self.keys = {what.parameter for what in map(read_key, self.known)}
        self.unknown: Counter[str] = Counter()
        """Dtypes that are not known here."""
        self.num_missing = 0
        """Parts that the index describes and places nowhere."""
        self.budget = MIN_TENSORS + PER_PART * source.index.num_items
        """Tensors and pieces that stacks may still give."""
        self._orders: dict[str, int] = {}
        self._places: dict[int, tuple[int, Coordinate]] = {}

    def add_all(self) -> None:
        """Add every tensor of the index, parameters first."""
        read = {key: read_key(key) for key in self.known}
        for key in sorted(read, key=lambda key: read[key].role is not Role.PARAMETER):
            tensor, what = self.known[key], read[key]
            if tensor.dtype is None or tensor.dtype.bits < 8:
                self.unknown[f"torch dtype {tensor.dtype_name}"] += 1
                continue
            held = [*self._held(tensor)]
            if what.bucket:
                self._add_bucket(key, what, tensor.dtype, held)
            else:
                self._add(key, what, tensor, tensor.dtype, held)

    def _held(self, tensor: Described) -> Iterator[_Held]:
        for row, region in self.source.placed(tensor):
            if region is None:
                message = f"places a part of {tensor.name} that it does not describe"
                self.builder.problems.append(
                    Problem(ProblemKind.METADATA, self.source.path, message, tensor=tensor.name)
                )
            elif row < 0:
                self.num_missing += 1
            else:
                yield _Held(row, region, region)

    # Tensors

    def _add(self, key: str, what: Key, tensor: Described, dtype: DType, held: list[_Held]) -> None:
        owner = self.known[self.parameters.get(what.parameter, key)]
        doubt, shape, parts = "", tensor.shape, held
        if owner.shape != shape:
            plain = not any(one.row in self.source.contents.strides for one in held)
            found = [*unflattened(held, shape, owner.shape)] if plain else []
            shape, parts = (owner.shape, found) if found else (shape, held)
            doubt = doubt or ("" if found else _OTHER_SHAPE)
        how = cut(what.parameter, self.keys, fused=self.ranks.fused)
        doubt = doubt or self._too_many(shape, how.num_leading, parts)
        if doubt:
            self._add_whole(key, what, tensor, dtype, held, doubt)
        else:
            self._add_cut(key, what, how, shape, dtype, parts)

    def _too_many(self, shape: tuple[int, ...], lead: int, parts: list[_Held]) -> str:
        """Why an array is not cut: an index that lies about its layers would make millions of them."""
        if len(shape) < lead:
            return "it has too few dims to number layers or experts"
        wanted = math.prod(shape[:lead])
        for one in parts:
            wanted += math.prod(min(one.region.shape[dim], shape[dim]) for dim in range(lead))
        if wanted > self.budget:
            return "it has more layers than parts are stored"
        self.budget -= wanted
        return ""

    def _add_cut(
        self, key: str, what: Key, how: Cut, stacked: tuple[int, ...], dtype: DType, held: list[_Held]
    ) -> None:  # fmt: skip
        """One tensor for each combination of layer and expert; layers without a part have a gap."""
        lead = how.num_leading
        shape = stacked[lead:]
        whole_shape = shape if how.half is None else (2 * shape[0], *shape[1:])
        shift = (0 if not how.half else shape[0], *(0 for _ in shape[1:])) if shape else ()
        parts = frozenset(Box(one.cell.start[lead:], one.cell.stop[lead:]) for one in held)
        placement = self.ranks.placement(parts, shape) if how.half is None else {}
        numbers: dict[tuple[int, ...], int] = {}
        for number in each((0,) * lead, stacked[:lead]):
            name = how.tensor(number)
            order = self._orders.setdefault(name, order_of(name, len(self._orders)))
            numbers[number] = self.builder.tensor(
                name + what.suffix, what.role, dtype, whole_shape, order,
                stored_once=self.ranks.once(what, name, len(parts)), placement=placement,
            )  # fmt: skip
        for one in held:
            start, stop = one.region.start, one.region.stop
            box = Box(start[lead:], stop[lead:]).shifted(shift)
            strides = self.source.contents.strides.get(one.row) or c_strides(one.region.shape)
            for number in each(start[:lead], tuple(map(min, stop[:lead], stacked))):
                if number in numbers:
                    skipped = one.skipped + sum((n - a) * s for n, a, s in zip(number, start, strides, strict=False))
                    self._piece(numbers[number], one.row, box, key, strides[lead:], skipped * dtype.bits // 8)

    def _add_whole(
        self, key: str, what: Key, tensor: Described, dtype: DType, held: list[_Held], doubt: str
    ) -> None:  # fmt: skip
        number = self.builder.tensor(key, what.role, dtype, tensor.shape, 1 << 50, undetermined=doubt)
        for one in held:
            self._piece(number, one.row, one.region, key, self.source.contents.strides.get(one.row), 0)

    def _add_bucket(self, key: str, what: Key, dtype: DType, held: list[_Held]) -> None:
        """Every part of a buffer by itself: one parameter's, or what lies between two.

        Moments and master of one place have one name, so that they are held against each other.
        """
        between = self._between(held) if all(len(one.region.start) == 1 for one in held) else set()
        for one in held:
            start, shape = one.region.start, one.region.shape
            role = Role.PADDING if one.row in between else what.role
            owner = key if role is Role.PADDING else key.rpartition(".")[0]
            name = f"{owner}@{','.join(map(str, start))}"
            number = self.builder.tensor(name, role, dtype, shape, 1 << 50, undetermined=_BUCKET)
            strides = self.source.contents.strides.get(one.row)
            self._piece(number, one.row, Box((0,) * len(shape), shape), key, strides, 0)

    def _between(self, held: list[_Held]) -> set[int]:
        """Rows of what lies between two parameters: those begin at multiples of 64 alone, as gaps end there.

        Where one rank's part of a bucket ends and the next one's begins, parameters and gaps are cut as well.
        """
        found: set[int] = set()
        before: _Held | None = None
        for one in sorted(held, key=lambda one: one.region.start):
            start, stop = one.region.start[0], one.region.stop[0]
            like_a_gap = stop % _PARAMETER_ALIGNMENT == 0 and stop - start < _PARAMETER_ALIGNMENT
            goes_on = before is not None and before.row not in found and self._writer(before) != self._writer(one)
            if start % _PARAMETER_ALIGNMENT and (like_a_gap or not goes_on):
                found.add(one.row)
            before = one
        return found

    def _writer(self, one: _Held) -> int | None:
        """The rank that wrote a part."""
        return rank_of(base_name(self.source.file_of(one.row)))

    def _piece(
        self, tensor: int, row: int, box: Box, key: str, strides: tuple[int, ...] | None, num_bytes: int
    ) -> None:  # fmt: skip
        at = self.source.index.item_file[row]
        if at not in self._places:
            path = self.source.file_of(row)
            self._places[at] = self.builder.file_id(path), self.coordinate(base_name(path))
        file, where = self._places[at]
        offset = self.source.contents.offset[row] + num_bytes
        self.builder.piece(tensor, file, offset, box, where, key=key, strides=strides)


def unflattened(held: Sequence[_Held], stored: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[_Held]:
    """Flat ranges of what each rank has of an array of ``shape``, as boxes of it; nothing where they are none such.

    Before megatron-core 0.14 the distributed optimizer stored ``[X, Y]``, of which each rank has ``[x, y]``, as
    ``[X/x, Y/y, x·y]``: a data-parallel rank has a range of the last dim. Source: megatron-core 0.12
    ``dist_checkpointing/strategies/torch.py`` (sharded_tensor_to_torch_sharded_tensor).
    """
    grid = stored[:-1]
    if len(grid) != len(shape) or not all(
        count and extent % count == 0 for count, extent in zip(grid, shape, strict=True)
    ):
        return
    local = tuple(extent // count for count, extent in zip(grid, shape, strict=True))
    if math.prod(local) != stored[-1] or any(set(one.region.shape[:-1]) > {1} for one in held):
        return
    for one in held:
        corner = tuple(at * extent for at, extent in zip(one.region.start, local, strict=False))
        cell = Box(corner, tuple(a + n for a, n in zip(corner, local, strict=True)))
        skipped = 0
        for box in FlatRange(one.region.start[-1], one.region.stop[-1]).boxes(local):
            yield _Held(one.row, box.shifted(corner), cell, skipped)
            skipped += box.num_elements
