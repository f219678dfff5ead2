"""Optimizer state that lies in one file by itself: engines without ZeRO.

    fp32           optimizer = {state, param_groups}, torch's own form
    bf16, fp16     optimizer = {optimizer_state_dict: that, fp32_groups: [[master of each parameter] of each group]}
    fused Adam     optimizer = {optimizer_state_dict: one flat state a group, fp32_groups_flat: [flat master]}

State is numbered, not named (see ``optimizer_index``): the order is that of the module, trained parameters alone.
Source: DeepSpeed ``runtime/fp16/unfused_optimizer.py``, ``runtime/fp16/fused_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.deepspeed.flats import PartOf
from auditor.adapters.deepspeed.records import Shapes, dig
from auditor.adapters.optimizer_index import (
    Attached,
    IndexedState,
    Order,
    attach,
    consecutive,
    indexed_state,
    is_count,
    role_and_name,
    split_by_decay,
)
from auditor.adapters.optimizer_record import SavedOptimizer, record
from auditor.adapters.step_file import StepFile
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role, Scalar
from auditor.model.mesh import Coordinate
from auditor.model.region import whole
from auditor.storage.store import Store, join

_ANY_ORDER = 1 << 40
_MOST_TRIED = 64
_Slot = tuple[int, str]
"""Parameter number, and the key of what is kept for it; empty for its master."""
_FLAT = "its state is one flat buffer a group, and nothing records the order of the parameters in it"


class PlainStates:
    """Puts such state into the Catalog."""

    def __init__(self, builder: CatalogBuilder, store: Store, folder: str, part: PartOf) -> None:
        self.builder, self.store, self.folder, self.part = builder, store, folder, part

    def add(
        self, file: StepFile, coordinate: Coordinate, shapes: Shapes, orders: Sequence[Order] = (), unknown: str = ""
    ) -> None:
        """What one file holds.

        ``shapes``: trained parameters in the order of the module; ``orders``: others to try; ``unknown``: why neither
        is known.
        """
        saved = file.tree.get("optimizer")
        if not isinstance(saved, dict):
            return
        inner = saved.get("optimizer_state_dict")
        state = indexed_state(inner if isinstance(inner, dict) else saved)
        if state is None:
            return
        flat = isinstance(saved.get("fp32_groups_flat"), list)
        unknown = _FLAT if flat else unknown
        names = Attached({}, (), unknown) if unknown else self._attached(shapes, state, orders)
        tensors = dict(self._tensors(saved, state, flat))
        for (number, key), tensor in tensors.items():
            name = "" if names.reason else names.names.get(number, "")
            self._add(file, coordinate, (number, key), tensor, name, names.reason)
        path = join(self.folder, file.name)
        called = {number: self.part(name, Role.MASTER, shapes[name], coordinate).name
                  for number, name in names.names.items() if name in shapes}  # fmt: skip
        groups = [
            tuple(called[number] for number in numbers) if called and called.keys() >= set(numbers) else None
            for numbers in state.numbers
        ]
        counted = {number: called.get(number, "") for number in {*state.tensors, *state.counts}}
        record(self.builder, self.store, SavedOptimizer(path, coordinate, state, groups, counted))
        if saved.get("dynamic_loss_scale") is True and is_count(scale := saved.get("cur_scale")):
            self.builder.scalars.append(Scalar("loss_scale", float(scale), path, coordinate))

    @staticmethod
    def _attached(shapes: Shapes, state: IndexedState, orders: Sequence[Order]) -> Attached:
        usual = [consecutive(shapes, state), split_by_decay(shapes, state)]
        usual.append(split_by_decay(shapes, state, lambda name, shape: name.endswith("bias")))
        found = attach(shapes, state, [*usual, *_with_counts(orders, state)])
        if not found.reason or sum(map(len, state.numbers)) != len(shapes) - 1:
            return found
        # One name too many may be a second name of a tied parameter that was saved as a copy: shapes tell which.
        known = list(shapes.values())
        doubles = [name for name, shape in shapes.items() if len(shape) > 1 and known.count(shape) > 1]
        fewer: list[Order | None] = []
        for left_out in doubles[:_MOST_TRIED]:
            left = {name: shape for name, shape in shapes.items() if name != left_out}
            fewer.append(consecutive(left, state))
            dealt = [tuple(tuple(name for name in group if name != left_out) for group in order) for order in orders]
            fewer += _with_counts(dealt, state)
        other = attach(shapes, state, fewer)
        return found if other.reason else other

    @staticmethod
    def _tensors(
        saved: Mapping[Any, Any], state: IndexedState, flat: bool
    ) -> list[tuple[tuple[int, str], StoredTensor]]:
        """Parameter number and key to moment or master."""
        found = [((number, key), tensor) for number, key, tensor in state.flat()]
        for group, numbers in enumerate(state.numbers):
            masters = dig(saved, "fp32_groups_flat" if flat else "fp32_groups", group)
            masters = [masters] if flat else masters
            if isinstance(masters, list) and len(masters) == len(numbers):
                kept = zip(numbers, masters, strict=True)
                found += [((number, ""), master) for number, master in kept if isinstance(master, StoredTensor)]
        return found

    def _add(
        self, file: StepFile, coordinate: Coordinate, slot: _Slot, tensor: StoredTensor, name: str, reason: str
    ) -> None:
        number, key = slot
        path = f"optimizer.{'state' if key else 'fp32_groups'}.{number}.{key}".rstrip(".")
        role, called = role_and_name(name or path.removesuffix(f".{key}"), key) if key else (Role.MASTER, name or path)
        if role is Role.COUNTER and tensor.num_elements != 1:
            role = Role.MOMENT
        file_id = self.builder.file_id(join(self.folder, file.name))
        part = self.part(called if role is not Role.COUNTER else name or path, role, tensor.shape, coordinate)
        if name and role is not Role.COUNTER:
            number_in = self.builder.tensor_of(part, role, tensor.dtype)
            (box, _) = part.boxes[0]
        else:
            at = f"@{coordinate}" if coordinate.indices else ""
            number_in = self.builder.tensor(
                f"{called}{at}", role, tensor.dtype, tensor.shape, part.order if name else _ANY_ORDER,
                undetermined=reason or ("" if name else "no parameter has this number"),
            )  # fmt: skip
            box = whole(tensor.shape)
        self.builder.piece(number_in, file_id, tensor.offset, box, coordinate, key=path, strides=tensor.strides)


def _with_counts(orders: Sequence[Order], state: IndexedState) -> list[Order]:
    """Those whose groups have as many parameters as the optimizer's."""
    return [order for order in orders if [*map(len, order)] == [*map(len, state.numbers)]]
