"""What a rank leaves is read back as it was, is small, and harms nobody when somebody else wrote it."""

import json
import struct

import numpy as np
import pytest

from auditor.containers.damage import DamagedError
from auditor.containers.witness_file import encode_part, read_part
from auditor.model.dtype import DTYPES
from auditor.model.mesh import Coordinate
from auditor.model.region import Box
from auditor.model.witness import WITNESSED, WitnessedTensor, WitnessPart
from auditor.storage.memory import MemoryStore
from auditor.witnesses import read_witness
from tests.hooks.parts import held, part_of


def read(content):
    store = MemoryStore({"rank-00000.witness": content})
    with store.open("rank-00000.witness") as handle:
        return read_part(handle, "rank-00000.witness")


def small():
    random = np.random.default_rng(3)
    return part_of(0, {"a.weight": random.standard_normal((3, 5)), "b": random.standard_normal(7)})


def test_a_part_comes_back_as_it_was():
    part = small()
    again = read(encode_part(part))
    assert (again.pieces == part.pieces).all()
    for name in ("step", "rank", "num_ranks", "tensors", "places", "boxes", "launch", "attempt", "taken", "scalars"):
        assert getattr(again, name) == getattr(part, name)


def test_boxes_that_are_no_flat_range_come_back():
    from auditor.hooks.recording import Recorder

    recorder = Recorder(1, 2)
    held(recorder, "w", np.arange(24.0).reshape(4, 6), Box((0, 2), (4, 4)), Coordinate.of(dp=1))
    part = recorder.part(5)
    assert part.boxes == (Box((0, 2), (4, 4)),)
    assert read(encode_part(part)).boxes == part.boxes


def test_anyone_opens_it_with_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "part.safetensors"
    path.write_bytes(encode_part(small()))
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata()["auditor.witness"] == "1"
        assert len(file.get_tensor("piece.lane0")) == 2


def test_a_piece_takes_96_bytes_with_its_name():
    count = 4000
    names = [
        f"optimizer.state.model.layers.{n // 40}.mlp.experts.{n % 40}.down_proj.weight.exp_avg" for n in range(count)
    ]
    tensors = tuple(WitnessedTensor(name, None, DTYPES["bfloat16"], (8192, 28672)) for name in names)
    random = np.random.default_rng(1)
    rows = np.zeros(count, WITNESSED)
    rows["tensor"], rows["start"], rows["stop"] = range(count), 1 << 24, 1 << 25
    for name in ("lane0", "lane1"):
        rows[name] = random.integers(0, 1 << 63, count)
    rows["minimum"], rows["maximum"] = (random.random(count).astype("<f4") for _ in range(2))
    rows["sum_squares"], rows["num_zero"] = random.random(count), random.integers(0, 1 << 20, count)
    part = WitnessPart(1, 2, 8, tensors, (Coordinate.of(dp_replicate=1),), (), rows)
    assert len(encode_part(part)) <= 96 * count


def test_cut_short_anywhere_is_damage():
    content = encode_part(small())
    for length in range(len(content)):
        with pytest.raises(DamagedError):
            read(content[:length])


def test_flipped_bytes_are_damage_or_read_within_bounds():
    content = encode_part(small())
    random = np.random.default_rng(7)
    for _ in range(600):
        changed = bytearray(content)
        changed[random.integers(len(content))] ^= int(random.integers(1, 256))
        try:
            part = read(bytes(changed))
        except DamagedError:
            continue
        assert all(row["tensor"] < len(part.tensors) and row["place"] < len(part.places) for row in part.pieces)


def with_header(change):
    content = encode_part(small())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auditor.witness", "2"), ("step", "-1"), ("rank", "1" * 30), ("places", '[{"rank": -1}]'),
        ("places", "{}"), ("dtypes", '["object"]'), ("dtypes", "[[]]"), ("scalars", '{"a": "b"}'), ("taken", "soon"),
        ("places", "[" * 1000),
    ],
)  # fmt: skip
def test_what_the_header_can_not_mean_is_damage(key, value):
    with pytest.raises(DamagedError):
        read(with_header(lambda header: header["__metadata__"].update({key: value})))


@pytest.mark.parametrize("column", ["piece.lane0", "names", "tensor.shape"])
def test_a_lost_column_is_damage(column):
    def rename(header):
        header["other"] = header.pop(column)

    with pytest.raises(DamagedError):
        read(with_header(rename))


def test_a_bomb_of_names_is_refused():
    import zlib

    from auditor.containers import witness_file

    part = small()
    bomb = np.frombuffer(zlib.compress(b"[" + b'"a",' * (witness_file.MAX_TEXT // 3) + b'"a"]', 9), "u1")
    original = witness_file._packed
    witness_file._packed = lambda names: bomb
    try:
        content = encode_part(part)
    finally:
        witness_file._packed = original
    assert len(content) < 1 << 20
    with pytest.raises(DamagedError, match="names"):
        read(content)


def stored(*parts, **names):
    return MemoryStore({f"w/rank-{part.rank:05d}.witness": encode_part(part) for part in parts} | names)


def test_parts_of_one_step_are_put_together():
    arrays = {"a": np.arange(6.0)}
    witness = read_witness(stored(part_of(0, arrays), part_of(1, arrays)), "w", 3)
    assert witness.lacks == ""
    assert [compared.num_places for compared in witness.compared.values()] == [2]
    assert not any(compared.held for compared in witness.compared.values())


def test_no_folder_is_no_witness():
    assert read_witness(MemoryStore({"x/y": b""}), "w", 3) is None


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"step": 4}, "it is of step 4"),
        ({"launch": "two", "taken": 0.5}, "of another launch"),
        ({"attempt": 1}, "of an earlier save of this step"),
        ({"num_ranks": 3}, "of another launch"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(other, why):
    arrays = {"a": np.arange(6.0)}
    witness = read_witness(stored(part_of(0, arrays), part_of(1, arrays, **other)), "w", 3)
    assert len(witness.rejected) == 1
    assert why in next(iter(witness.rejected.values()))
    assert "can't be used" in witness.lacks


def test_a_rank_that_left_nothing_is_named():
    witness = read_witness(stored(part_of(0, {"a": np.arange(6.0)})), "w", 3)
    assert witness.lacks == "1 of 2 ranks left no witness: 1"


def test_a_damaged_part_is_named_and_the_rest_is_used():
    good = part_of(0, {"a": np.arange(6.0)})
    witness = read_witness(stored(good, **{"w/rank-00001.witness": encode_part(good)[:50]}), "w", 3)
    assert list(witness.rejected) == ["w/rank-00001.witness"]
    assert len(witness.parts) == 1


def test_a_part_under_the_name_of_another_rank_is_not_used():
    good = encode_part(part_of(0, {"a": np.arange(6.0)}))
    witness = read_witness(MemoryStore({"w/rank-00001.witness": good}), "w", 3)
    assert witness.rejected == {"w/rank-00001.witness": "it is of rank 0"}
