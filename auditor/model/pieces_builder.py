"""Collects the piece table of a Catalog row by row, in compact arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from auditor.model.catalog import Pieces, c_strides
from auditor.model.mesh import Coordinate
from auditor.model.region import FlatRange, Region


class PiecesBuilder:
    """Collects rows into compact arrays; :meth:`build` hands out the finished table."""

    def __init__(self) -> None:
        self._columns = {
            "tensor": array("i"), "file": array("i"), "offset": array("q"), "coordinate": array("i"),
            "replica": array("i"), "key": array("i"), "num_dims": array("b"), "region_at": array("q"),
            "strides_at": array("q"), "pool": array("q"),
        }  # fmt: skip
        self._coordinates: dict[Coordinate, int] = {}
        self._keys: dict[str, int] = {}

    def add(
        self, tensor: int, file: int, offset: int, region: Region, coordinate: Coordinate,
        *, replica: int = 0, key: str = "", strides: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add one piece. ``strides`` (elements) may be left out where they are C order of the region's shape.

        Raises:
            ValueError: strides of a flat range, whose elements must lie without gaps.
        """
        if isinstance(region, FlatRange) and strides is not None and tuple(strides) != (1,):
            raise ValueError("the elements of a flat range lie without gaps")
        column = self._columns
        pool = column["pool"]
        column["tensor"].append(tensor)
        column["file"].append(file)
        column["offset"].append(offset)
        column["coordinate"].append(self._coordinates.setdefault(coordinate, len(self._coordinates)))
        column["replica"].append(replica)
        column["key"].append(self._keys.setdefault(key, len(self._keys)))
        column["region_at"].append(len(pool))
        if isinstance(region, FlatRange):
            column["num_dims"].append(-1)
            pool.extend((region.start, region.stop))
            shape: tuple[int, ...] = (region.num_elements,)
        else:
            column["num_dims"].append(len(region.start))
            pool.extend(region.start)
            pool.extend(region.stop)
            shape = region.shape
        if strides is None or tuple(strides) == c_strides(shape):
            column["strides_at"].append(-1)
        else:
            column["strides_at"].append(len(pool))
            pool.extend(strides)

    def add_boxes(
        self, tensor: int, file: int, offsets: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64],
        coordinates: Sequence[Coordinate], places: NDArray[np.int64],
        *, replica: int = 0, key: str = "", strides: Sequence[int],
    ) -> None:  # fmt: skip
        """Add many pieces of one tensor, whose regions are boxes: a row each in ``start`` and ``stop``.

        ``places``: of each, the position of its coordinate in ``coordinates``. All have the same ``strides``.
        """
        column, (count, dims) = self._columns, start.shape
        known = [self._coordinates.setdefault(place, len(self._coordinates)) for place in coordinates]
        first = len(column["pool"])
        # Strides have their place in the pool once, whether some row needs them or not.
        column["pool"].extend(strides)
        rows: dict[str, NDArray[np.int64]] = {
            "offset": offsets, "coordinate": np.array(known, np.int64)[places],
            "region_at": first + dims + 2 * dims * np.arange(count),
            "strides_at": np.where(_in_c_order(stop - start, strides), -1, first),
        }  # fmt: skip
        same = {"tensor": tensor, "file": file, "replica": replica, "num_dims": dims}
        same["key"] = self._keys.setdefault(key, len(self._keys))
        rows |= {name: np.full(count, value, np.int64) for name, value in same.items()}
        for name, values in rows.items():
            column[name].frombytes(values.astype(column[name].typecode).tobytes())
        column["pool"].frombytes(np.concatenate([start, stop], axis=1).astype("q").tobytes())

    def build(self) -> Pieces:
        """The finished table."""
        types = {"i": np.int32, "q": np.int64, "b": np.int8}
        columns = {name: np.array(c, dtype=types[c.typecode]) for name, c in self._columns.items()}
        return Pieces(columns, list(self._coordinates), list(self._keys))


def _in_c_order(shapes: NDArray[np.int64], strides: Sequence[int]) -> NDArray[np.bool_]:
    """Of which rows of ``shapes`` the strides are those of C order."""
    good, step = np.ones(len(shapes), bool), np.ones(len(shapes), np.int64)
    for dim in reversed(range(shapes.shape[1])):
        good &= step == strides[dim]
        step *= np.maximum(shapes[:, dim], 1)
    return good
