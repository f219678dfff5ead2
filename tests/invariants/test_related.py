"""What was seen of whole replicas, which several invariants ask for."""

from __future__ import annotations

import numpy as np

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.invariants.related import seen_whole
from auditor.model.catalog import Catalog, File, Role
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate, Mesh
from auditor.model.observation import OBSERVED, Observations, Read
from auditor.model.region import Box


def catalog_of(shape: tuple[int, ...], box: Box) -> Catalog:
    builder = CatalogBuilder()
    file = builder.file(File("f"))
    builder.piece(builder.tensor("w", Role.PARAMETER, FLOAT32, shape, 0), file, 0, box, Coordinate())
    return builder.build(0, "", "synthetic", Mesh(), {}, ())


def read() -> Observations:
    rows = np.zeros(1, OBSERVED)
    rows["read"] = Read.DONE
    return Observations(rows)


def test_a_replica_that_was_read_whole_is_seen():
    assert seen_whole(catalog_of((4, 6), Box((0, 0), (4, 6))), read())[0].num_elements == 24


def test_part_of_a_tensor_is_not_the_whole():
    assert seen_whole(catalog_of((4, 6), Box((0, 0), (4, 5))), read()) == {}


def test_shapes_beyond_64_bits_are_no_error():
    assert seen_whole(catalog_of((1 << 40, 1 << 40), Box((0, 0), (1, 1))), read()) == {}


def test_what_is_remembered_is_of_the_same_catalog():
    seen = read()
    assert seen_whole(catalog_of((4, 6), Box((0, 0), (4, 6))), seen)
    assert seen_whole(catalog_of((4, 6), Box((0, 0), (4, 5))), seen) == {}
