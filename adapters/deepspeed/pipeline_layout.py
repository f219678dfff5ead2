"""What the files of a DeepSpeed pipeline checkpoint say together: names, model order, stages, placement.

A layer file knows ``input_layernorm.weight``; the optimizer side knows ``3.input_layernorm.weight``, which is the
tensor's name. A module used by two stages (the embedding, again as output head) is ``tied_modules.<key>.…`` there, and
its weights are stored under the number of the layer that uses it first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from auditor.adapters.adapter import Options
from auditor.adapters.catalog_builder import Part
from auditor.adapters.deepspeed.pipeline_files import StepFiles
from auditor.adapters.megatron_names import Placed, megatron_args, place, rule_for, sizes_from
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role
from auditor.model.mesh import EVERYWHERE, Coordinate, Placement, Replicate, coordinates_along, global_shape, local_box
from auditor.model.region import whole

_TIED = re.compile(r"tied_modules\.[^.]+\.")
_NUMBERED = re.compile(r"(\d{1,6})\.")
_POSITIONS = "position_embeddings.weight"
_ORDER_PER_LAYER = 1 << 20
_OF_LAYERS = (Role.PARAMETER, Role.BUFFER)
"""What layer files hold."""


class Layout:
    """Names and places of all tensors of one step."""

    def __init__(self, files: StepFiles, options: Options) -> None:
        self.files, self.degrees, self.options = files, files.degrees, options
        self.groups = {stage: files.stage_shapes(stage) for stage in range(self.degrees.pp)}
        """Per stage and parameter group, name to local shape, in the order of the flat partitions."""
        self.stages: dict[str, list[int]] = {}
        """Name to the stages that hold it, first user first."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        for stage, groups in self.groups.items():
            for group in groups:
                for name, shape in group.items():
                    self.stages.setdefault(name, []).append(stage)
                    self.shapes.setdefault(name, shape)
        self._by_prefix: dict[str, dict[str, tuple[int, ...]]] = {}
        """What goes before a key in a name (``3.``, ``tied_modules.embed.``) to the keys with it."""
        for name, shape in self.shapes.items():
            key = self.key_of(name)
            self._by_prefix.setdefault(name[: len(name) - len(key)], {})[key] = shape
        recorded = (file.tree.get("buffer_names") for file in files.models.values())
        self.buffers = {str(name) for names in recorded if isinstance(names, list) for name in names}
        args = next(filter(None, (megatron_args(file) for _, file in sorted(files.models.items()))), {})
        self.sizes = sizes_from(args, self.shapes)
        self.layers: dict[int, dict[str, tuple[int, ...]]] = {}
        """Layer number to key within its files to local shape, in stored order."""
        self.prefixes: dict[int, str] = {}
        """Layer number to what goes before its keys to make names."""
        for layer in sorted({layer for layer, _ in files.layers}):
            self._learn(layer)
        self.orders = {
            f"{self.prefixes[layer]}{key}": layer * _ORDER_PER_LAYER + at
            for layer, keys in self.layers.items()
            for at, key in enumerate(keys)
        }

    def _learn(self, layer: int) -> None:
        """Keys in the stored order of the first readable file, then those that only the mp_rank files know of."""
        keys: dict[str, tuple[int, ...]] = {}
        for _, file in self.files.of_layer(layer):
            for key, value in file.tree.items():
                if isinstance(key, str) and isinstance(value, StoredTensor):
                    keys.setdefault(key, value.shape)
        prefix = f"{layer}."
        if prefix not in self._by_prefix:
            # No parameter carries this number: the layer is the first user of a tied module.
            tied = (
                p for p, known in self._by_prefix.items() if _TIED.fullmatch(p) and not known.keys().isdisjoint(keys)
            )
            prefix = next(tied, prefix)
        self.prefixes[layer], self.layers[layer] = prefix, {**keys, **self._by_prefix.get(prefix, {})}

    def is_buffer(self, name: str, key: str) -> bool:
        """Whether a file's ``key``, in the model ``name``, is a buffer; what is tied may be known by its key alone."""
        return name in self.buffers or any(
            _TIED.match(other) and other.endswith(f".{key}") for other in self.buffers - self.shapes.keys()
        )

    def unstored_tied(self) -> dict[str, tuple[int, ...]]:
        """Names and local shapes of tied modules of which no layer file is there, not even a damaged one's name."""
        known = set(self.prefixes.values())
        if any(not keys for keys in self.layers.values()):
            # A layer of which nothing could be read: it may be theirs.
            return {}
        return {
            f"{prefix}{key}": shape
            for prefix, keys in self._by_prefix.items()
            if _TIED.fullmatch(prefix) and prefix not in known
            for key, shape in keys.items()
        }

    def stage_of_layer(self, layer: int) -> Coordinate:
        """The stage that wrote the layer's files; nothing where none is recorded (frozen layers, no ZeRO)."""
        prefix = self.prefixes[layer]
        stage = next((self.stages[f"{prefix}{key}"][0] for key in self._by_prefix.get(prefix, ())), None)
        return EVERYWHERE if stage is None and self.degrees.pp > 1 else Coordinate.of(pp=stage or 0)

    def key_of(self, name: str) -> str:
        """A name within its layer."""
        match = _TIED.match(name) or _NUMBERED.match(name)
        return name[match.end() :] if match else name

    def part(self, name: str, role: Role, local: tuple[int, ...], coordinate: Coordinate) -> Part:
        """Where the part of ``name`` with shape ``local`` lies that the rank at ``coordinate`` holds."""
        key, order = self.key_of(name), self.orders.get(name, 1 << 40)
        placed = place(key, local, self.degrees.tp, self.sizes, self.options.stated("tp", name))
        stages = self.stages.get(name, [0])
        stage = coordinate.as_dict().get("pp", stages[0])
        unknown = len(stages) > 1 and rule_for(key) is None and not key.endswith(_POSITIONS) and not self._only(name)
        if len(stages) > 1 and not self._synchronised(name, key):
            # Of a tied module only the tied weight is kept equal over stages; the rest are tensors of their own.
            if stage != stages[0]:
                name, order = f"{name}@pp={stage}", order + (1 << 39)
            stages = [stage]
        if placed.how is None:
            # Each rank's part stands for itself: nothing is claimed about how the parts belong together.
            alone = f"{name}@{coordinate.along(('tp',))}"
            return Part(alone, order, local, ((whole(local), 0),), undetermined=placed.reason)
        found = self._placed_part(name, order, role, local, coordinate, placed, stages)
        reason = "which parameters of a module on several stages are kept equal is not recorded"
        return replace(found, undetermined=reason) if unknown else found

    def _placed_part(
        self, name: str, order: int, role: Role, local: tuple[int, ...], coordinate: Coordinate, placed: Placed,
        stages: list[int],
    ) -> Part:  # fmt: skip
        assert placed.how is not None
        placement: Placement = {"tp": placed.how}
        axes: Mapping[str, Sequence[int]] = {
            "pp": tuple(stages) if role not in _OF_LAYERS else (),
            "tp": range(self.degrees.tp) if isinstance(placed.how, Replicate) else (),
        }
        axes = {axis: indices for axis, indices in axes.items() if len(indices) > 1}
        # Weights are written by data-parallel rank 0 and by the first stage alone.
        once = {"pp": len(stages), "dp": self.degrees.dp} if role in _OF_LAYERS else {}
        return Part(
            name, order, global_shape(local, placement, self.degrees.mesh),
            ((local_box(local, placement, self.degrees.mesh, coordinate), 0),), tuple(axes),
            coordinates_along(tuple(axes.items())),
            tuple(axis for axis, degree in once.items() if degree > 1), placement,
        )  # fmt: skip

    def _synchronised(self, name: str, key: str) -> bool:
        """Whether a tied parameter is kept equal over stages: of a module of one parameter, that must be meant."""
        rule = rule_for(key)
        return self._only(name) or (rule is not None and rule.synchronised_over_stages)

    def _only(self, name: str) -> bool:
        """Whether a parameter is the only one of its tied module."""
        key = self.key_of(name)
        return len(self._by_prefix.get(name[: len(name) - len(key)], ())) == 1
