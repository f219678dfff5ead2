"""Puts a Catalog together piece by piece; which replica a piece belongs to follows from its coordinate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Catalog, File, FileState, Problem, Role, Scalar, Tensor
from auditor.model.dtype import DType
from auditor.model.encoding import Encoding
from auditor.model.mesh import Coordinate, Mesh, Placement
from auditor.model.optimizer import Export, ParameterGroup, Tie
from auditor.model.pieces_builder import PiecesBuilder
from auditor.model.region import Box, Region


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a tensor: which tensor, and where in it."""

    name: str
    order: int
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, int], ...]
    """Where it lies in the whole tensor, each box with its first row in the stored part."""
    replica_axes: tuple[str, ...] = ()
    replicas: tuple[Coordinate, ...] = ()
    stored_once: tuple[str, ...] = ()
    placement: Placement | None = None
    undetermined: str = ""


class CatalogBuilder:
    """Collects tensors, files and pieces of one step."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._ids: dict[object, int] = {}
        self._replicas: list[tuple[Coordinate, ...]] = []
        self._numbers: list[dict[Coordinate, int]] = []
        self._files: list[File] = []
        self._file_ids: dict[str, int] = {}
        self._pieces = PiecesBuilder()
        self.scalars: list[Scalar] = []
        self.problems: list[Problem] = []
        self.groups: list[ParameterGroup] = []
        self.ties: list[Tie] = []
        self.exports: list[Export] = []

    def file(self, file: File) -> int:
        """Add a file; its number."""
        self._file_ids[file.name] = len(self._files)
        self._files.append(file)
        return self._file_ids[file.name]

    def file_id(self, name: str) -> int:
        """The number of a file added before."""
        return self._file_ids[name]

    def file_at(self, number: int) -> File:
        """A file added before."""
        return self._files[number]

    def encode(self, number: int, encoding: Encoding) -> None:
        """How the content of a file added before is stored; one that can't be stored so is damaged."""
        file = replace(self._files[number], encoding=encoding)
        if file.state is FileState.PRESENT and (told := encoding.contradiction(file.num_bytes)):
            file = replace(file, state=FileState.DAMAGED, detail=told)
        self._files[number] = file

    def add_opaque(self, number: int, opaque: Mapping[str, int]) -> None:
        """Add to the unknown objects, by class, of a file added before."""
        if opaque:
            file = self._files[number]
            total = Counter(dict(file.opaque)) + Counter(opaque)
            self._files[number] = replace(file, opaque=tuple(sorted(total.items())))

    def tensor(
        self, name: str, role: Role, dtype: DType, shape: tuple[int, ...], order: int, *,
        replicas: Sequence[Coordinate] = (), replica_axes: tuple[str, ...] = (),
        stored_once: tuple[str, ...] = (), placement: Placement | None = None, undetermined: str = "",
    ) -> int:  # fmt: skip
        """Add a tensor, or find it if it was added before; its number."""
        # Shape and replicas belong to the identity: names from files may clash with names made here.
        identity = role, name, shape, replica_axes, len(replicas)
        if identity in self._ids:
            return self._ids[identity]
        number = self._ids[identity] = len(self._tensors)
        self._tensors.append(
            Tensor(
                name,
                role,
                dtype,
                shape,
                order,
                replica_axes,
                stored_once,
                tuple((placement or {}).items()),
                undetermined,
            )
        )
        self._replicas.append(tuple(replicas) or (Coordinate(),))
        self._numbers.append({place: at for at, place in enumerate(self._replicas[-1])})
        return number

    def tensor_of(self, part: Part, role: Role, dtype: DType) -> int:
        """Add the tensor that a part is of, or find it; its number."""
        return self.tensor(
            part.name, role, dtype, part.shape, part.order, replicas=part.replicas, replica_axes=part.replica_axes,
            stored_once=part.stored_once, placement=part.placement, undetermined=part.undetermined,
        )  # fmt: skip

    def piece(
        self, tensor: int, file: int, offset: int, region: Region, coordinate: Coordinate, *,
        key: str = "", strides: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add a piece of ``tensor``; its replica is the one at its coordinate along the tensor's replica axes."""
        axes = self._tensors[tensor].replica_axes
        replica = self._numbers[tensor][coordinate.along(axes)] if axes else 0
        self._pieces.add(tensor, file, offset, region, coordinate, replica=replica, key=key, strides=strides)

    def boxes(
        self, tensor: int, file: int, offsets: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64],
        coordinates: Sequence[Coordinate], places: NDArray[np.int64], *, key: str = "", strides: Sequence[int],
    ) -> None:  # fmt: skip
        """Add many pieces of one replica of ``tensor``, as :meth:`PiecesBuilder.add_boxes` has them."""
        axes = self._tensors[tensor].replica_axes
        replica = self._numbers[tensor][coordinates[0].along(axes)] if axes and coordinates else 0
        self._pieces.add_boxes(
            tensor, file, offsets, start, stop, coordinates, places, replica=replica, key=key, strides=strides,
        )  # fmt: skip

    def build(
        self, step: int, path: str, format_name: str, mesh: Mesh, opaque: Mapping[str, int], unclaimed: Sequence[str]
    ) -> Catalog:
        """The finished Catalog."""
        return Catalog(
            step, path, format_name, mesh, tuple(self._tensors), tuple(self._replicas), self._pieces.build(),
            tuple(self._files), tuple(self.scalars), tuple(self.problems), dict(opaque), tuple(unclaimed),
            groups=tuple(self.groups), ties=tuple(self.ties), exports=tuple(self.exports),
        )  # fmt: skip
