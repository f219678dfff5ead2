"""Columns as Zarr arrays, and records as JSON: exactly what was written comes back, anything else is refused."""

import gzip
import json

import numpy as np
import pytest
import zarr

from auditor.containers.damage import DamagedError, LimitError
from auditor.ledger import arrays
from auditor.ledger.plain import plain, revived
from auditor.ledger.tree import pieces_written
from auditor.model.catalog import Role
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.mesh import Coordinate
from auditor.model.observation import OBSERVED, Difference
from auditor.model.region import Box

COLUMNS = {
    "lanes": np.array([0, 1 << 63, (1 << 64) - 1], np.uint64),
    "small": np.array([1, 2, 250], np.int64),
    "signed": np.array([-3, 200], np.int64),
    "single": np.array([0.5, -0.0, np.inf], np.float64),
    "double": np.array([0.1, 1e300], np.float64),
    "nan": np.array([np.nan, 1.0], np.float64),
    "constant": np.full(5, -2.5),
    "infinite": np.full(4, -np.inf),
    "empty": np.zeros(0, np.int64),
    "rows": np.arange(6.0).reshape(2, 3) / 7,
    "no rows": np.zeros((0, 3)),
    "constant rows": np.full((2, 3), 7),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_come_back_bit_by_bit(name):
    values = COLUMNS[name]
    found = arrays.read("x", dict(arrays.written("x", values)), *values.shape).astype(values.dtype)
    assert found.tobytes() == values.tobytes()
    assert found.shape == values.shape


def test_many_rows_are_several_chunks():
    values = np.arange(10)
    objects = dict(arrays.written("x", values, rows=4))
    assert sorted(objects) == ["x/c/0", "x/c/1", "x/c/2", "x/zarr.json"]
    assert arrays.read("x", objects, 10).tolist() == values.tolist()
    table = np.arange(20).reshape(2, 10)
    objects = dict(arrays.written("x", table, rows=4, along=1))
    assert sorted(objects) == ["x/c/0/0", "x/c/0/1", "x/c/0/2", "x/zarr.json"]
    assert arrays.read("x", objects, 2, 10).tolist() == table.tolist()


@pytest.mark.parametrize("name", COLUMNS)
def test_zarr_reads_them(name, tmp_path):
    for key, content in arrays.written("x", COLUMNS[name]):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(content)
    found = zarr.open_array(tmp_path / "x", mode="r")[...]
    assert found.astype(COLUMNS[name].dtype).tobytes() == COLUMNS[name].tobytes()


def written(**changes):
    objects = dict(arrays.written("x", np.arange(100) * 1000))
    document = json.loads(objects["x/zarr.json"])
    objects["x/zarr.json"] = json.dumps({**document, **changes}).encode()
    return objects


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [101]}, {"shape": [1 << 50]}, {"shape": []}, {"shape": [100, 1]}, {"shape": "many"},
        {"data_type": "object"},
        {"data_type": "float32"}, {"fill_value": "x"}, {"fill_value": [1]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}}, {"chunk_grid": 3},
        {"data_type": "uint8", "fill_value": 300},
    ],
)  # fmt: skip
def test_other_documents_are_refused(changes):
    if changes == {"data_type": "float32"}:
        # As wide as what was written: what it means is not told by its bytes, but by the commit.
        assert len(arrays.read("x", written(**changes), 100)) == 100
        return
    with pytest.raises(DamagedError):
        arrays.read("x", written(**changes), 100)


def test_bombs_do_not_go_off():
    objects = written()
    for bomb in (gzip.compress(b"\0" * (64 << 20)), gzip.compress(b"\0" * 10), b"no gzip", objects["x/c/0"][:-9]):
        with pytest.raises(DamagedError):
            arrays.read("x", {**objects, "x/c/0": bomb}, 100)
    with pytest.raises(DamagedError):
        arrays.text("x", gzip.compress(b"\0" * 2000), 1000)
    big = {"x/zarr.json": json.dumps({**json.loads(objects["x/zarr.json"]), "shape": [1 << 30]}).encode()}
    with pytest.raises(LimitError):
        arrays.read("x", big, 1 << 30)
    with pytest.raises(DamagedError):
        arrays.read("x", {}, 100)


JUDGED = Judgement(
    3,
    (Violation("a", (Location(3, "f.pt", "a", Role.MASTER, 4, Coordinate.of(tp=1, dp=0), region=Box((0, 1), (2, 3)),
                              max_abs_difference=float("inf"), first_index=(1, 2)),), "differs",
               ((Coordinate.of(tp=0),), (Coordinate.of(tp=1),)), Severity.WARNING, (), frozenset({"b", "a"})),),
    {"because": ("x", "y")}, {"not": 2}, frozenset({"z"}),
)  # fmt: skip


def test_records_come_back():
    text = json.dumps(plain(JUDGED))
    assert revived(Judgement, json.loads(text)) == JUDGED
    assert json.dumps(plain(revived(Judgement, json.loads(text)))) == text


def test_an_infinite_difference_comes_back():
    found = Difference(Coordinate.of(tp=1), Coordinate(), 1, 2, 3, float("inf"), float("nan"), -1, 0, ())
    back = revived(Difference, json.loads(json.dumps(plain(found))))
    assert back.max_abs_difference == float("inf")
    assert back.relative_difference != back.relative_difference


@pytest.mark.parametrize(
    "change",
    [
        {"num_holds": "3"}, {"num_holds": True}, {"num_holds": None}, {"violations": {}}, {"violations": [3]},
        {"violations": [{"subject": "a"}]}, {"held": "abc"}, {"undetermined": []}, {"not_applicable": {"x": 1.5}},
        {"violations": [{"subject": "a", "locations": [{"step": 1, "role": "GENERAL"}]}]},
        {"violations": [{"subject": "a", "locations": [{"step": 1, "coordinate": "tp=x"}]}]},
        {"violations": [{"subject": "a", "locations": [{"step": 1, "region": {"start": [1]}}]}]},
    ],
)  # fmt: skip
def test_what_does_not_fit_its_type_is_refused(change):
    with pytest.raises(DamagedError):
        revived(Judgement, {**plain(JUDGED), **change})


def test_fields_of_a_later_version_are_passed_over():
    assert revived(Judgement, {**plain(JUDGED), "certainty": 0.5}) == JUDGED


def test_a_piece_takes_forty_bytes_at_most():
    """Of float32 tensors: two lanes and the squares can't be compressed, extrema are float32, most counts are zero."""
    random, count = np.random.default_rng(0), 20_000
    rows = np.zeros(count, OBSERVED)
    rows["read"] = 1
    for lane in ("lane0", "lane1"):
        rows[lane] = random.integers(0, 1 << 63, count, np.uint64) * 2
    rows["minimum"], rows["maximum"] = (random.normal(size=count).astype(np.float32) for _ in range(2))
    rows["sum_squares"], rows["bits_used"] = random.normal(size=count) ** 2, (1 << 32) - 1
    rows["num_zero"][::7] = random.integers(0, 300, len(rows[::7]))
    places = np.array([np.arange(count) // 4, np.arange(count) % 4, np.full(count, 4096)])
    # A step whose arrays are of so few pieces that their descriptions count costs 1.4 KB at most besides.
    for some, fixed in ((count, 0), (56, 1400)):
        total = sum(len(content) for _, content in pieces_written(rows[:some], places[:, :some]))
        assert total <= 40 * some + fixed
