"""Names and places of the tensors of a legacy Megatron-LM checkpoint.

Every rank file numbers the layers of its own pipeline stage from 0; the unsharded model counts through. With
interleaving, a stage holds several chunks (``model0``, ``model1``, …) and the model runs through all stages' first
chunks before the second ones, so layers are counted in the order (chunk, stage). Source: Megatron-LM
``megatron/core/transformer/transformer_layer.py`` (get_transformer_layer_offset).

With one embedding for input and output and several stages, the last stage holds its own replica of the weight, as
``output_layer.weight`` (megatron-core) or ``word_embeddings_for_head.weight`` (before).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from auditor.adapters.adapter import Options
from auditor.adapters.catalog_builder import Part
from auditor.adapters.megatron_legacy.files import Place, StepFiles
from auditor.adapters.megatron_names import Placed, core_sizes_from, place, rule_for
from auditor.containers.torch_zip import StoredTensor
from auditor.model.mesh import Coordinate, Placement, Replicate, coordinates_along, global_shape, local_box
from auditor.model.optimizer import Tie
from auditor.model.region import Box, whole

_LAYERS = re.compile(r"((?:.*?\.)?layers\.)(\d{1,6})(\..*)")
_OTHER_MODEL_PARTS = {"encoder.layers.": "encoder_num_layers", "decoder.layers.": "decoder_num_layers"}
_EMBEDDING = "embedding.word_embeddings.weight"
_HEADS = {"output_layer.weight": _EMBEDDING, "word_embeddings_for_head.weight": f"language_model.{_EMBEDDING}"}
"""Key of the tied weight on the last stage to the tensor that it is a replica of."""
_TIED_BY = "args: untie_embeddings_and_output_weights is False"
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")
_ORDER_PER_CHUNK = 1 << 24

Chunk = tuple[int, int]
"""Number of the model chunk, pipeline stage: in this order they follow each other in the model."""


def is_buffer(key: str) -> bool:
    """Whether a key names what is saved with the model but not trained."""
    return key.endswith(_BUFFERS)


def is_tied_over_stages(key: str, stage: int, num_stages: int, args: Mapping[str, object]) -> bool:
    """Whether a key of a stage is the embedding that the first and the last stage both hold."""
    if num_stages < 2 or args.get("untie_embeddings_and_output_weights") is not False:
        return False
    return (stage == 0 and key in _HEADS.values()) or (stage == num_stages - 1 and key in _HEADS)


class Layout:
    """Names and places of all tensors of one step."""

    def __init__(self, files: StepFiles, chunks: Mapping[Chunk, Mapping[str, StoredTensor]], options: Options) -> None:
        """``chunks``: per chunk and stage, the model's keys with a stored part of any of its ranks."""
        self.degrees, self.args, self.chunks, self.options = files.degrees, files.args, chunks, options
        shapes = {key: tensor.shape for keys in chunks.values() for key, tensor in keys.items()}
        self.sizes = core_sizes_from(self.args, shapes, self.degrees.tp)
        versions = (file.tree.get("checkpoint_version") for _, file in sorted(files.models.items()) if file.content)
        # Megatron takes a file without a version for one of version 0.
        self.version = next((v if isinstance(v, (int, float)) else 0 for v in versions), 3)
        self.num_chunks = 1 + max((number for number, _ in chunks), default=0)
        self.offsets = {prefix: self._offsets(prefix) for prefix in sorted(self._prefixes())}
        """Per prefix of layer names, the number of the first layer of each chunk; empty where it isn't known."""
        self.stages: dict[str, list[int]] = {}
        """Name to the stages that hold it."""
        self.orders: dict[str, int] = {}
        for virtual, chunk in enumerate(sorted(chunks)):
            for at, key in enumerate(chunks[chunk]):
                name = self.name(chunk, key)
                stages = self.stages.setdefault(name, [])
                stages.extend([chunk[1]] if chunk[1] not in stages else [])
                self.orders.setdefault(name, virtual * _ORDER_PER_CHUNK + at)

    # Names

    def name(self, chunk: Chunk, key: str) -> str:
        """The name in the unsharded model of what a chunk calls ``key``."""
        tied = self._tied(chunk, key)
        if tied:
            return tied
        found = _LAYERS.fullmatch(key)
        if found is None:
            return key
        offset = self.offsets[found[1]].get(chunk)
        if offset is None:
            # Where in the model this chunk's layers are is not known: they keep their own numbers.
            return f"{key}@pp={chunk[1]}" + (f",chunk={chunk[0]}" if self.num_chunks > 1 else "")
        return f"{found[1]}{int(found[2]) + offset}{found[3]}"

    def _tied(self, chunk: Chunk, key: str) -> str:
        """The embedding's name, if ``key`` is its replica on the last stage."""
        tied = _HEADS.get(key, "")
        if not tied or chunk[1] == 0 or chunk[1] != self.degrees.pp - 1 or tied in self.chunks[chunk]:
            return ""
        untied = self.args.get("untie_embeddings_and_output_weights")
        # The older key exists only for tied weights; the newer one is an output layer of its own unless said otherwise.
        return tied if untied is False or key != "output_layer.weight" else ""

    def ties_in(self, stage: int, model: Mapping[int, Mapping[str, StoredTensor]]) -> list[Tie]:
        """Embeddings and heads that one rank file holds under a name each, though the arguments tie them."""
        if self.args.get("untie_embeddings_and_output_weights") is not False:
            return []
        return [
            Tie((self.name((number, stage), embedding), self.name((number, stage), head)), _TIED_BY)
            for number, keys in model.items()
            for head, embedding in _HEADS.items()
            if head in keys and embedding in keys
        ]

    def _prefixes(self) -> set[str]:
        return {found[1] for keys in self.chunks.values() for key in keys if (found := _LAYERS.fullmatch(key))}

    def _offsets(self, prefix: str) -> dict[Chunk, int]:
        counts: dict[Chunk, int] = {}
        for chunk, keys in self.chunks.items():
            numbers = {int(found[2]) for key in keys if (found := _LAYERS.fullmatch(key)) and found[1] == prefix}
            if keys:
                counts[chunk] = len(numbers)
                if numbers != set(range(len(numbers))):
                    return {}
        everywhere = [(number, stage) for number in range(self.num_chunks) for stage in range(self.degrees.pp)]
        holders = [chunk for chunk in counts if counts[chunk]]
        if len(everywhere) == 1 or (len(holders) == 1 and len(counts) == len(everywhere)):
            return dict.fromkeys(holders, 0)
        total = self._num_layers(prefix)
        if total is not None and len(counts) < len(everywhere):
            # Files are lost: where all others hold equally many layers, so did they.
            even, rest = divmod(total, len(everywhere))
            counts = dict.fromkeys(everywhere, even) if not rest and set(counts.values()) == {even} else counts
        if len(counts) != len(everywhere) or sum(counts.values()) != total:
            return {}
        return {chunk: sum(counts[before] for before in everywhere[:at]) for at, chunk in enumerate(everywhere)}

    def _num_layers(self, prefix: str) -> int | None:
        own = next((arg for end, arg in _OTHER_MODEL_PARTS.items() if prefix.endswith(end)), "")
        for value in (self.args.get(own), self.args.get("num_layers")):
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20:
                return value
        return None

    # Places

    def part(self, chunk: Chunk, key: str, local: tuple[int, ...], at: Place, *, suffix: str = "",
             stages: frozenset[int], counter: bool = False, apart: bool = False) -> Part:  # fmt: skip
        """Where the part with shape ``local`` lies that the rank at ``at`` holds of what a chunk calls ``key``.

        ``suffix``: appended to the name. ``stages``: those that hold a replica, should the tensor be tied.
        ``counter``: a number that is the same on all ranks, wherever the parameter lies.
        ``apart``: it lies in the distributed optimizer's file, of which expert-parallel ranks share the first one's.
        """
        name, coordinate = self.name(chunk, key), self.degrees.coordinate(at)
        order, held = self.orders.get(name, 1 << 40), self.stages.get(name, [at[0]])
        rule = rule_for(name)
        tied = len(held) > 1 and rule is not None and rule.synchronised_over_stages
        if len(held) > 1 and not tied:
            # Stages that use one name without keeping it equal hold tensors of their own.
            name = name if at[0] == held[0] else f"{name}@pp={at[0]}"
        placed = self._placed(name, local, counter=counter)
        if placed.how is None:
            axes = ("tp", "ep", "pp") if tied else ("tp", "ep")
            alone = f"{name}{suffix}@{coordinate.along(axes)}"
            return Part(alone, order, local, ((whole(local), 0),), undetermined=placed.reason)
        placement: Placement = {"tp": placed.how}
        replica_axes: dict[str, Sequence[int]] = {
            "pp": tuple(sorted(stages & set(held))) if tied else (),
            "ep": () if apart else range(self.degrees.ep),
            "tp": range(self.degrees.tp) if isinstance(placed.how, Replicate) else (),
        }
        axes_held = {axis: indices for axis, indices in replica_axes.items() if len(indices) > 1}
        return Part(
            name + suffix, order, global_shape(local, placement, self.degrees.mesh),
            self._boxes(local, placed, placement, coordinate), tuple(axes_held),
            coordinates_along(tuple(axes_held.items())),
            self.degrees.stored_once + (("ep",) if apart and self.degrees.ep > 1 else ()), placement,
        )  # fmt: skip

    def _placed(self, name: str, local: tuple[int, ...], *, counter: bool) -> Placed:
        stated = self.options.stated("tp", name)
        if not self.degrees.grid:
            return Placed(None, "experts have a tensor-parallel size of their own")
        if ".experts." in name and self.degrees.ep > 1:
            return Placed(None, "which experts of the model these are is not known")
        if counter:
            return Placed(Replicate())
        if "query_key_value" in name and self.version < 2 and self.degrees.tp > 1 and stated is None:
            return Placed(None, "before checkpoint version 2 its rows lie in another order on each rank")
        return place(name, local, self.degrees.tp, self.sizes, stated)

    def _boxes(
        self, local: tuple[int, ...], placed: Placed, placement: Placement, coordinate: Coordinate
    ) -> tuple[tuple[Box, int], ...]:
        if not placed.halves:
            return ((local_box(local, placement, self.degrees.mesh, coordinate), 0),)
        half = (local[0] // 2, *local[1:])
        box = local_box(half, placement, self.degrees.mesh, coordinate)
        up = box.shifted((half[0] * self.degrees.tp, *(0 for _ in half[1:])))
        return (box, 0), (up, half[0])
