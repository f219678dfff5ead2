"""Two saves read in lock-step: measured once, compared alike by all kernels, whatever the layouts are."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.model.catalog import File, FileState, Role
from auditor.model.dtype import DTYPES
from auditor.model.joint import Beside, Joint, JointKind
from auditor.model.mesh import NO_MESH
from auditor.model.region import Box, FlatRange, whole
from auditor.observe import lineup, unit
from auditor.observe.kernels import Side, empty_seams
from auditor.observe.numpy_kernels import NumpyKernels
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.replay import REPLAY
from auditor.observe.shares import Everything
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from tests.observe.test_lineup import FLOAT32, Written, cast

STRIDE = (1e-3, 9.0, 1.1, 0.002, 1e-35, 14.0, 1e-4, 1e-7)
CONSTANTS = {
    JointKind.DECAY: (0.9, 1e-35), JointKind.REST: (), JointKind.STRIDE: STRIDE,
    JointKind.VARIANCE: (0.9, 0.999, 2.0**-24), JointKind.UPDATE: (1e-3, 0.01, 1e-8, 0.4, 0.004, 2.0**-24),
}  # fmt: skip


def numbers(kind, count, seed, bits, num_bad=4):
    """Both saves as one step of Adam leaves them, with a few elements that are another step's."""
    random = np.random.default_rng(seed)
    draw = lambda scale: (random.normal(size=count) * scale).astype(np.float32)  # noqa: E731
    gradient, first, old = draw(1e-2), draw(1e-3), draw(0.1)
    second = np.square(draw(1e-2))
    new_first = (0.9 * first + 0.1 * gradient).astype(np.float32)
    new_second = (0.999 * second + 0.001 * gradient.astype(np.float64) ** 2).astype(np.float32)
    step = 1e-3 / 0.4 * new_first / (np.sqrt(new_second.astype(np.float64)) / np.sqrt(0.004) + 1e-8)
    new = (old * (1 - 1e-5) - step).astype(np.float32)
    for array in (new, new_second, new_first, old):
        bad = random.integers(0, count, random.integers(0, num_bad + 1))
        array[bad] = random.choice([np.nan, np.inf, -1.0, 0.0, 10.0], len(bad))
    sides = {
        JointKind.DECAY: (new_second, second), JointKind.REST: (new_first, first),
        JointKind.STRIDE: (new, new_second, old, second, first),
        JointKind.VARIANCE: (new_second, new_first, second, first), JointKind.UPDATE: (new, new_first, new_second, old),
    }[kind]  # fmt: skip
    return [(side.view(np.uint32) >> 16).astype(np.uint16) if bits == 16 else side.view(np.uint32) for side in sides]


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(JointKind)), count=st.integers(1, 3000), seed=st.integers(0, 1 << 30),
    gap=st.integers(0, 9), bits=st.sampled_from([32, 32, 16]),
)  # fmt: skip
def test_compiled_kernels_find_what_numpy_finds(kind, count, seed, gap, bits):
    compiled = pytest.importorskip("auditor.observe.compiled_kernels").CompiledKernels()
    sides = numbers(kind, count, seed, bits)
    dtype = DTYPES["bfloat16" if bits == 16 else "float32"]
    joint = Joint(kind, tuple(range(len(sides))), (), CONSTANTS[kind])
    ends = np.unique(np.clip([0, count // 3, count], 0, count))
    length, start = np.diff(ends), ends[:-1] + 7
    at = ends[:-1] * (bits // 8)
    given_sides = [Side(np.concatenate([np.zeros(gap, np.uint8), side.view(np.uint8)]), dtype, at + gap)
                   for side in sides]  # fmt: skip
    found = []
    for kernels in (NumpyKernels(), compiled):
        seam = empty_seams(1)
        kernels.join(joint, given_sides, length, start, seam)
        found.append(seam.tolist())
    assert found[0] == found[1]
    assert found[0][0][0] == count


@pytest.mark.parametrize("kind", [kind for kind in JointKind if kind is not JointKind.REST])
def test_a_healthy_step_needs_no_second_look(kind):
    """Else the compiled look would be of no use."""
    compiled = pytest.importorskip("auditor.observe.compiled_kernels").CompiledKernels()
    sides = numbers(kind, 4000, 3, 32, num_bad=0)
    seam, joint = empty_seams(1), Joint(kind, tuple(range(len(sides))), (), CONSTANTS[kind])
    with mock.patch.object(compiled.numpy, "join", side_effect=AssertionError):
        given_sides = [Side(side.view(np.uint8), FLOAT32, np.zeros(1, np.int64)) for side in sides]
        compiled.join(joint, given_sides, np.array([4000]), np.zeros(1, np.int64), seam)
    assert seam.tolist() == [(4000, 0, 0.0, -1, -1)]


class Saves:
    """Weight, and moments, of two saves in two files in memory, cut as they are told."""

    SHAPE = (12, 20)

    def __init__(self, earlier, later, seed=0):
        self.saves = [Written(self.SHAPE, seed), Written(self.SHAPE, seed + 1)]
        for number, (save, regions) in enumerate(zip(self.saves, (earlier, later), strict=True)):
            roles = ((Role.MASTER, save.master), (Role.FIRST_MOMENT, save.first), (Role.SECOND_MOMENT, save.second))
            for role, values in roles:
                tensor = save.tensor(role, FLOAT32)
                for at, region in enumerate(regions):
                    save.piece(tensor, values, f"{number}/{at}", region, gap=3)
            weight = save.tensor(Role.PARAMETER, DTYPES["bfloat16"])
            save.piece(weight, save.weight, f"{number}/w", whole(self.SHAPE))

    def joints(self):
        return [Joint(JointKind.DECAY, (2,), (2,), (0.5, 1e-35)), Joint(JointKind.REST, (1,), (1,)),
                Joint(JointKind.STRIDE, (0, 2), (0, 2, 1), STRIDE)]  # fmt: skip

    def observe(self, folder=None, kernels="numpy", states=(), rows=None, joints=None):
        files = {name: bytes(content) for save in self.saves for name, content in save.files.items()}
        store = MemoryStore(files)
        if folder is not None:
            for name, content in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)
            store = LocalStore(folder)
        catalogs = []
        for number, save in enumerate(self.saves):
            for name, content in save.files.items():
                state = dict(states).get(name, FileState.PRESENT)
                save.builder.file(File(name, len(content), store.stat(name).identity, state, detail="spoilt"))
            catalogs.append(save.builder.build(number, "", "made-up", NO_MESH, {}, ()))
        beside = Beside(catalogs[0], self.joints() if joints is None else joints)
        with ThreadPoolExecutor(1) as pool:
            wanted = wanted_rows(catalogs[1]) if rows is None else np.array(rows, np.int64)
            found = observe(store, catalogs[1], wanted, Everything(pool), pairings=[cast(3, 0)], kernels=kernels,
                            beside=beside)  # fmt: skip
        return catalogs[1], found

    def wanted(self, joint):
        tensors = [[save.master, save.first, save.second] for save in self.saves]
        sides = [tensors[own][number].astype(np.float64) for own, number in joint.streams]
        with np.errstate(all="ignore"):
            return REPLAY[joint.kind](sides, joint.constants)


ROWS = [Box((0, 0), (5, 20)), Box((5, 0), (12, 20))]
COLUMNS = [Box((0, 0), (12, 8)), Box((0, 8), (12, 20))]
FLAT = [FlatRange(0, 97), FlatRange(97, 240)]


WHOLE = [whole((12, 20))]


@pytest.mark.parametrize(("earlier", "later", "kernels"), [
    (WHOLE, WHOLE, "numpy"), (ROWS, ROWS, "numpy"), (ROWS, FLAT, "numpy"), (COLUMNS, ROWS, "numpy"),
    (FLAT, COLUMNS, "numpy"), (ROWS, FLAT, "numba"),
])  # fmt: skip
def test_both_saves_are_measured_in_one_pass(tmp_path, earlier, later, kernels):
    if kernels == "numba":
        pytest.importorskip("numba")
    saves = Saves(earlier, later)
    with mock.patch.object(unit, "LARGE_BYTES", 64):
        catalog, seen = saves.observe(tmp_path, kernels)
    for joint in saves.joints():
        wanted = saves.wanted(joint)
        found = seen.joints[joint]
        assert sum(one.num_compared for one in found) == wanted.size
        assert sum(one.num_beyond for one in found) == int((wanted > 1).sum())
        beyond = np.flatnonzero(wanted > 1)
        if len(beyond):
            assert min(one.first for one in found if one.first >= 0) == beyond[0]
            assert max(one.last for one in found) == beyond[-1]
            assert max(one.largest for one in found) == pytest.approx(float(wanted.max()))
        assert {catalog.pieces.tensor[one.row] for one in found} == {joint.later[0]}
    # Everything of the later save is measured once, and what is read of the other is read once.
    _, alone = Saves(earlier, later).observe(joints=[])
    for column in ("read", "lane0", "lane1", "num_zero", "minimum", "maximum"):
        assert seen.pieces[column].tolist() == alone.pieces[column].tolist()
    assert (seen.num_bytes_read, seen.num_bytes_reread) == (240 * (3 * 4 + 2), 240 * 3 * 4)
    assert seen.pairs[cast(3, 0)][0].num_beyond == 0


def test_what_the_save_before_lacks_keeps_nothing_from_being_compared():
    saves = Saves(ROWS, ROWS)
    _, seen = saves.observe(states={"0/1": FileState.DAMAGED})
    assert seen.joints == {}
    assert seen.pairs[cast(3, 0)][0].num_compared == 240
    assert not seen.failures
    assert seen.num_bytes_reread == 0


def test_a_save_before_that_went_away_says_nothing_of_this_one(tmp_path):
    saves = Saves(ROWS, ROWS)
    opened = LocalStore.open

    def gone(self, name):
        (tmp_path / "0/1").unlink(missing_ok=True)
        return opened(self, name)

    with mock.patch.object(LocalStore, "open", gone):
        _, seen = saves.observe(tmp_path)
    assert seen.joints == {}
    assert (seen.changed, dict(seen.failures)) == ((), {})
    assert (seen.pieces["read"] == 1).all()
    assert seen.pairs[cast(3, 0)][0].num_compared == 240


def test_what_is_known_is_only_compared():
    _, seen = Saves(ROWS, FLAT).observe(rows=[])
    assert len(seen.joints) == 3
    assert seen.num_bytes_read == 0
    assert not seen.pieces["read"].any()


def test_too_many_parts_are_not_cut():
    with mock.patch.object(lineup, "MAX_PARTS", 3):
        _, seen = Saves(ROWS, ROWS).observe()
    assert seen.joints == {}
    assert seen.pairs[cast(3, 0)][0].num_compared == 240
