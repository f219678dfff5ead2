"""REP002: a replica whose second moments are of another size, and all that must not look like one."""

import numpy as np
import pytest

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.invariants.stripes import ALPHA, _smallest_p, stripes_look_alike
from auditor.model.catalog import File, Role
from auditor.model.dtype import FLOAT32
from auditor.model.mesh import Coordinate, Mesh
from auditor.model.observation import OBSERVED, Observations, Read
from auditor.model.region import Box
from auditor.model.run import StepEvidence

HIDDEN, WIDE, WORDS = 64, 256, 512


def evidence(num_replicas, num_layers, size_of, unread=""):
    """A transformer's second moments in stripes along dim 0. ``size_of``: (name, stripe) to root mean square."""
    builder = CatalogBuilder()
    file = builder.file(File("data"))
    shapes = {"embed": (WORDS, HIDDEN), "norm": (HIDDEN,)}
    for at in range(num_layers):
        shapes |= {f"layers.{at}.up": (HIDDEN, WIDE), f"layers.{at}.down": (WIDE, HIDDEN), f"layers.{at}.n": (HIDDEN,)}
    rows = []
    for order, (name, shape) in enumerate(shapes.items()):
        number = builder.tensor(name, Role.SECOND_MOMENT, FLOAT32, shape, order, stored_once=("data",))
        step = shape[0] // num_replicas
        for stripe in range(num_replicas):
            box = Box((stripe * step, *[0] * (len(shape) - 1)), ((stripe + 1) * step, *shape[1:]))
            builder.piece(number, file, 0, box, Coordinate.of(data=stripe))
            rows.append((size_of(name, stripe) ** 2) * box.num_elements)
    catalog = builder.build(1, "", "test", Mesh((("data", num_replicas),)), {}, [])
    seen = np.zeros(len(rows), OBSERVED)
    seen["read"], seen["sum_squares"] = Read.DONE, rows
    return StepEvidence(catalog, Observations(seen), unread)


def noise(seed, spread=0.3):
    """Rows along the model dimension are alike in all tensors; each layer's own ranges are by themselves."""
    draw = np.random.default_rng(seed)
    known = {}

    def size_of(name, stripe):
        own = name if name.endswith("down") else "words" if name == "embed" else "hidden"
        alike = known.setdefault((own, stripe), draw.normal(0, spread))
        return float(np.exp(alike + draw.normal(0, spread / 4)))

    return size_of


@pytest.mark.parametrize("num_replicas", [2, 8])
def test_a_replica_of_another_size_is_named(num_replicas):
    healthy = noise(1)

    def odd(name, stripe):
        return healthy(name, stripe) * (4.0 if stripe == 1 else 1.0)

    (violation,) = stripes_look_alike(evidence(num_replicas, 32, odd)).violations
    assert violation.minority == ((Coordinate.of(data=1),) if num_replicas > 2 else ())
    assert {location.coordinate for location in violation.locations} == {Coordinate.of(data=1)}
    assert not stripes_look_alike(evidence(num_replicas, 32, noise(1))).violations


@pytest.mark.parametrize(("num_replicas", "num_layers"), [(2, 32), (4, 6), (8, 12), (16, 2)])
def test_honest_noise_is_no_finding(num_replicas, num_layers):
    judged = [stripes_look_alike(evidence(num_replicas, num_layers, noise(seed))) for seed in range(60)]
    assert not any(found.violations for found in judged)
    assert all(found.num_holds for found in judged)


@pytest.mark.parametrize("num_replicas", [4, 8])
def test_outlier_features_of_the_model_dimension_are_no_finding(num_replicas):
    """The first stripe of every tensor along the model dimension is large, in all layers."""
    for seed in range(10):
        healthy = noise(seed)

        def outlier(name, stripe, healthy=healthy):
            along_model = not name.endswith("down") and name != "embed"
            return healthy(name, stripe) * (20.0 if along_model and stripe == 0 else 1.0)

        assert not stripes_look_alike(evidence(num_replicas, 24, outlier)).violations


def test_a_small_factor_is_no_finding_however_consistent():
    def odd(name, stripe):
        return 1.02 if stripe == 1 else 1.0

    assert not stripes_look_alike(evidence(8, 12, odd)).violations


def test_too_few_ranges_are_undetermined():
    found = stripes_look_alike(evidence(2, 2, noise(0)))
    assert not found.num_holds
    (reason,) = found.undetermined
    assert "too few" in reason
    assert _smallest_p(15, 2) <= ALPHA / 1.5 < _smallest_p(12, 2)


def test_zeros_tell_nothing():
    found = stripes_look_alike(evidence(8, 12, lambda name, stripe: 0.0))
    assert not found.num_holds
    assert "0 index ranges" in next(iter(found.undetermined))


def test_what_was_not_read_is_undetermined():
    assert "level" in next(iter(stripes_look_alike(evidence(8, 2, noise(0), "level names")).undetermined))


def test_all_equal_holds():
    assert stripes_look_alike(evidence(8, 12, lambda name, stripe: 1.0)).num_holds == 1
