from itertools import product

import pytest

from auditor.model.mesh import EVERYWHERE, NO_MESH, Coordinate, Mesh, Replicate, Shard, global_shape, local_box
from auditor.model.region import Box, coverage


def test_axes_are_written_in_a_fixed_order_whatever_the_order_given():
    assert str(Coordinate.of(tp=1, dp=0, pp=2)) == "pp=2,dp=0,tp=1"
    assert Coordinate.of(tp=1, pp=2) == Coordinate.of(pp=2, tp=1)


def test_unknown_axes_follow_by_name():
    assert str(Coordinate.of(zeta=0, alpha=1, tp=2)) == "tp=2,alpha=1,zeta=0"


def test_a_coordinate_that_states_nothing():
    assert Coordinate() == EVERYWHERE
    assert str(EVERYWHERE) == "all ranks"
    assert EVERYWHERE.as_dict() == {}


def test_along_keeps_only_the_axes_asked_for():
    place = Coordinate.of(pp=1, dp=2, tp=3)
    assert place.along(("tp", "pp")) == Coordinate.of(pp=1, tp=3)
    assert place.along(()) == EVERYWHERE
    assert place.along(["ep"]) == EVERYWHERE


def test_merging_lets_the_other_win():
    merged = Coordinate.of(pp=1, tp=3).merged(Coordinate.of(tp=0, dp=5))
    assert merged == Coordinate.of(pp=1, dp=5, tp=0)


MESH = Mesh((("pp", 2), ("dp", 3), ("tp", 4)), ordered=True)


def test_degrees_and_number_of_ranks():
    assert MESH.num_ranks == 24
    assert MESH.degree("dp") == 3
    assert MESH.degree("ep") == 1
    assert (NO_MESH.num_ranks, str(NO_MESH)) == (1, "one rank")
    assert str(MESH) == "pp 2 · dp 3 · tp 4"


def test_global_ranks_count_the_last_axis_fastest():
    for number, (pp, dp, tp) in enumerate(product(range(2), range(3), range(4))):
        assert MESH.global_ranks(Coordinate.of(pp=pp, dp=dp, tp=tp)) == (number,)


def test_open_axes_give_all_their_ranks():
    assert MESH.global_ranks(Coordinate.of(pp=1, tp=0)) == (12, 16, 20)
    assert MESH.global_ranks(EVERYWHERE) == tuple(range(24))


def test_ranks_of_a_mesh_of_unknown_order_are_unknown():
    assert Mesh((("pp", 2), ("tp", 2))).global_ranks(Coordinate.of(pp=0, tp=0)) is None


def test_a_cut_dim_is_as_long_as_all_parts():
    assert global_shape((3, 5), {"tp": Shard(1), "dp": Replicate()}, MESH) == (3, 20)
    assert global_shape((), {"tp": Replicate()}, MESH) == ()


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_all_ranks_tile_the_tensor(dim):
    placement = {"tp": Shard(dim)}
    shape = global_shape((3, 5), placement, MESH)
    parts = [local_box((3, 5), placement, MESH, Coordinate.of(tp=tp)) for tp in range(4)]
    assert coverage(parts, shape).exact
    assert parts[2].start[dim] == 2 * (3, 5)[dim]


def test_two_axes_may_cut_two_dims():
    placement = {"tp": Shard(0), "dp": Shard(1)}
    shape = global_shape((3, 5), placement, MESH)
    parts = [local_box((3, 5), placement, MESH, Coordinate.of(dp=dp, tp=tp)) for dp in range(3) for tp in range(4)]
    assert shape == (12, 15)
    assert coverage(parts, shape).exact


def test_two_axes_may_cut_one_dim():
    placement = {"dp": Shard(0), "tp": Shard(0)}
    parts = [local_box((3,), placement, MESH, Coordinate.of(dp=dp, tp=tp)) for dp in range(3) for tp in range(4)]
    assert coverage(parts, global_shape((3,), placement, MESH)).exact


def test_replicas_hold_the_whole():
    assert local_box((3, 5), {"tp": Replicate()}, MESH, Coordinate.of(tp=2)) == Box((0, 0), (3, 5))
    assert local_box((), {}, MESH, EVERYWHERE) == Box((), ())
