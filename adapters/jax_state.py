"""Puts the arrays of a JAX training state into a Catalog, for formats that keep each as plain bytes of one file.

Such writers store what one process sees: of replicas the first one. So no tensor is stored twice, and whether its
replicas agree is not on disk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.optax.paths import Path
from auditor.adapters.optax.record import numbers, record, recorded_step
from auditor.adapters.optax.tree import Leaf, OptaxTree
from auditor.containers.encoded import open_file
from auditor.containers.state_array import Plain, StateArray, Stretch
from auditor.model.catalog import Role, c_strides
from auditor.model.dtype import DTYPES, DType
from auditor.model.mesh import EVERYWHERE
from auditor.model.region import FlatRange, whole
from auditor.storage.store import Handle, StorageError, Store, read_bytes

REPLICA = "replica"
"""The axis along which states are replicated in memory; writers of one process keep one replica, and no mesh."""
_FORMS = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """One leaf of a state, as a file has it."""

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    file: str
    """Below the root."""
    stretches: tuple[Stretch, ...] = ()
    """Its bytes in C order; none where ``value`` says it all."""
    value: float | None = None
    """The number that it is, where the file keeps it as such."""
    key: str = ""
    """What the file calls it, where that is not its path joined by dots."""
    is_key: bool = False
    column_major: bool = False


def stored(
    file: str, prefix: Path, leaves: Iterable[tuple[Path, StateArray | Plain | None]]
) -> tuple[list[Stored], dict[str, int]]:
    """The leaves of a file's tree that are arrays or numbers; and dtypes that aren't read, with how many have them."""
    found, unknown = list[Stored](), dict[str, int]()
    for path, node in leaves:
        if isinstance(node, StateArray) and node.dtype is None:
            name = f"dtype {node.dtype_name[:32]}"
            unknown[name] = unknown.get(name, 0) + 1
        elif isinstance(node, StateArray) and node.dtype is not None:
            found.append(
                Stored((*prefix, *path), node.dtype, node.shape, file, node.stretches, column_major=node.column_major)
            )
        elif isinstance(node, Plain) and isinstance(node.value, (int, float)):
            dtype = DTYPES["bool" if isinstance(node.value, bool) else f"{type(node.value).__name__}64"]
            found.append(Stored((*prefix, *path), dtype, (), file, value=float(node.value)))
    return found, unknown


class StatePlacing:
    """One step's state being put into a Catalog."""

    def __init__(self, builder: CatalogBuilder, store: Store, leaves: Sequence[Stored]) -> None:
        self.builder, self.store, self.leaves = builder, store, leaves
        self.tree = OptaxTree([Leaf(leaf.path, leaf.dtype, leaf.shape, leaf.is_key) for leaf in leaves])

    def add_all(self) -> None:
        """Add tensors, counters and groups. The files must have been added before."""
        for leaf, meaning in zip(self.leaves, self.tree.meanings, strict=True):
            if leaf.value is None:
                once = () if meaning.role in (Role.COUNTER, Role.PADDING) else (REPLICA,)
                number = self.builder.tensor(
                    meaning.name, meaning.role, leaf.dtype, leaf.shape, meaning.order, stored_once=once,
                    undetermined=meaning.undetermined,
                )  # fmt: skip
                self._add_pieces(number, leaf)
        values = self.values()
        # Counters of one optimizer are held against each other within a file: all count as those of one.
        file = next((self.leaves[at].file for at in values), self.leaves[0].file if self.leaves else "")
        record(self.builder, self.tree, values, file)

    def recorded_step(self) -> int | None:
        """The step that the training loop keeps in its state."""
        return recorded_step(self.tree, self.values())

    def _add_pieces(self, number: int, leaf: Stored) -> None:
        file, key = self.builder.file_id(leaf.file), leaf.key or ".".join(leaf.path)
        if len(leaf.stretches) == 1:
            strides = tuple(reversed(c_strides(tuple(reversed(leaf.shape))))) if leaf.column_major else None
            self.builder.piece(
                number, file, leaf.stretches[0].offset, whole(leaf.shape), EVERYWHERE, key=key, strides=strides
            )
            return
        start = 0
        for stretch in leaf.stretches:
            stop = start + stretch.num_bytes // (leaf.dtype.stored_bits // 8)
            self.builder.piece(number, file, stretch.offset, FlatRange(start, stop), EVERYWHERE, key=key)
            start = stop

    def values(self) -> dict[int, float]:
        """Counts and hyperparameters."""
        found: dict[int, float] = {}
        by_file: dict[str, list[int]] = {}
        for at in numbers(self.tree):
            value = self.leaves[at].value
            if value is not None:
                found[at] = value
            elif self.leaves[at].stretches:
                by_file.setdefault(self.leaves[at].file, []).append(at)
        for file, wanted in by_file.items():
            try:
                with open_file(self.store, self.builder.file_at(self.builder.file_id(file))) as handle:
                    read = ((at, read_scalar(handle, self.leaves[at])) for at in wanted)
                    found |= {at: value for at, value in read if value is not None}
            except StorageError:
                continue
        return found


def read_scalar(handle: Handle, leaf: Stored) -> float | None:
    """The one number that a leaf is, if its dtype is one of numpy's or bfloat16.

    Raises:
        StorageError: storage failed.
    """
    if leaf.dtype.name not in _FORMS and leaf.dtype.name != "bfloat16":
        return None
    raw = read_bytes(handle, leaf.stretches[0].offset, leaf.dtype.num_bytes(1))
    wide, form = (b"\0\0" + raw, "f") if leaf.dtype.name == "bfloat16" else (raw, _FORMS[leaf.dtype.name])
    return float(struct.unpack(f"<{form}", wide)[0])
