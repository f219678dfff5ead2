"""One step made of numpy arrays, and what a pass over it would measure, by numpy alone.

Written apart from the engine, so that invariants are tested by arithmetic that they don't share with it.
"""

import math

import numpy as np

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.invariants.registry import find
from auditor.model.catalog import File, FileState, Role, Scalar
from auditor.model.dtype import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from auditor.model.mesh import EVERYWHERE, NO_MESH, Coordinate
from auditor.model.observation import OBSERVED, Observations, Read
from auditor.model.optimizer import ParameterGroup, Tie
from auditor.model.pairing import PairKind, PairResult
from auditor.model.region import whole
from auditor.model.run import StepEvidence

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
FIRST, SECOND, MASTER, PARAMETER = Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.MASTER, Role.PARAMETER


def to_bfloat16(values):
    """Bits of float32 numbers rounded to bfloat16: nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    """The float32 numbers that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of(values, dtype):
    """Numbers as the unsigned integers that a file holds; unsigned integers are taken as they are."""
    values = np.asarray(values)
    if values.dtype.kind == "u":
        return values
    if dtype == BFLOAT16:
        return to_bfloat16(values)
    native = {FLOAT16: np.float16, FLOAT32: np.float32, FLOAT64: np.float64}[dtype]
    return np.ascontiguousarray(values, native).view(dtype.carrier)


def numbers_of(bits, dtype):
    """Bits as float64 numbers."""
    native = {FLOAT16: np.float16, FLOAT32: np.float32, FLOAT64: np.float64}
    return (from_bfloat16(bits) if dtype == BFLOAT16 else bits.view(native[dtype])).astype(np.float64)


class Step:
    """Tensors, groups, ties and counters of one saved step. Every replica is a piece of its own."""

    def __init__(self, step=100, *, steps_taken=None, group=ADAM, optimizer=""):
        self.builder, self.step, self.contents = CatalogBuilder(), step, []
        self.builder.file(File("model.pt"))
        if steps_taken is not None:
            self.builder.scalars.append(Scalar("optimizer_step", float(steps_taken), "model.pt"))
        if group is not None:
            self.group(group, optimizer=optimizer)

    def group(self, hyperparameters, parameters=None, *, optimizer="", number=0):
        self.builder.groups.append(
            ParameterGroup(number, "model.pt", EVERYWHERE, optimizer, hyperparameters, parameters)
        )

    def tie(self, *names, source="config.json: tie_word_embeddings"):
        self.builder.ties.append(Tie(names, source))

    def lose_a_file(self):
        self.builder.file(File("lost.pt", state=FileState.MISSING))

    def add(self, name, role, *replicas, dtype=FLOAT32, read=Read.DONE):
        """A tensor with the content of each of its replicas."""
        arrays = [bits_of(values, dtype) for values in replicas]
        places = [Coordinate.of(tp=index) for index in range(len(arrays))] if len(arrays) > 1 else [EVERYWHERE]
        axes = ("tp",) if len(arrays) > 1 else ()
        number = self.builder.tensor(name, role, dtype, arrays[0].shape, len(self.contents), replicas=places,
                                     replica_axes=axes)  # fmt: skip
        for place, bits in zip(places, arrays, strict=True):
            self.builder.piece(number, 0, 0, whole(bits.shape), place)
            self.contents.append((bits, dtype, read))
        return number

    def moments(self, name, first, second, **more):
        self.add(name, FIRST, first, **more)
        self.add(name, SECOND, second, **more)

    def evidence(self, identifier=None, *, unread=""):
        """What an invariant would see, with the pairs that it asks for."""
        catalog = self.builder.build(self.step, "", "test", NO_MESH, {}, ())
        pieces = np.zeros(len(self.contents), OBSERVED)
        for row, (bits, dtype, read) in zip(pieces, self.contents, strict=True):
            row["read"] = Read.NOT_ASKED if unread else read
            if row["read"] == Read.DONE:
                _measure(row, bits, dtype)
        asked = find(identifier).pairings if identifier else None
        pairs = {} if unread or asked is None else {pairing: self._pair(catalog, pairing) for pairing in asked(catalog)}
        return StepEvidence(catalog, Observations(pieces, pairs=pairs), unread)

    def _pair(self, catalog, pairing):
        results = []
        for left in range(len(catalog.replicas[pairing.left])):
            right = min(left, len(catalog.replicas[pairing.right]) - 1)
            rows = [int(catalog.rows_of(pairing.left, left)[0]), int(catalog.rows_of(pairing.right, right)[0])]
            sides = [self.contents[row] for row in rows]
            if all(read == Read.DONE for _, _, read in sides):
                results.append(_compare(pairing, left, right, *((bits, dtype) for bits, dtype, _ in sides)))
        return tuple(results)

    def judge(self, identifier, **more):
        return find(identifier).judge_step(self.evidence(identifier, **more))


def _measure(row, bits, dtype):
    values = numbers_of(bits, dtype).reshape(-1)
    finite = values[np.isfinite(values)]
    keys = np.arange(1, bits.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        row["lane0"] = ((bits.reshape(-1).astype(np.uint64) + np.uint64(1)) * (keys | np.uint64(1))).sum()
        row["lane1"] = ((bits.reshape(-1).astype(np.uint64) + np.uint64(1)) * (~keys | np.uint64(1))).sum()
    row["num_nan"], row["num_infinite"] = np.isnan(values).sum(), np.isinf(values).sum()
    row["num_zero"] = (values == 0).sum()
    known = values[~np.isnan(values)]
    row["minimum"], row["maximum"] = known.min(initial=math.inf) + 0.0, known.max(initial=-math.inf) + 0.0
    row["sum_squares"] = np.square(finite).sum()
    row["bits_used"] = np.bitwise_or.reduce(bits.reshape(-1))


def _compare(pairing, left_replica, right_replica, left, right):
    (bits, dtype), (other, source) = left, right
    one_ulp, largest = 0, 0.0
    if pairing.kind is PairKind.BOUND:
        first, second = np.abs(numbers_of(bits, dtype)), numbers_of(other, source)
        with np.errstate(all="ignore"):
            root = np.sqrt(second + pairing.floor)
            judged = np.isfinite(first) & (second >= 0)
            largest = float(np.where(judged & (first > 0), first / root, 0).max(initial=0))
            beyond = judged & (first > pairing.limit * root)
    elif pairing.kind is PairKind.EQUAL:
        beyond = bits != other
    else:
        wanted = bits_of(numbers_of(other, source).astype(np.float32), dtype)
        beyond = bits != wanted
        distance = np.abs(_ordered(bits) - _ordered(wanted))[beyond]
        one_ulp, largest = int((distance == 1).sum()), float(distance.max(initial=0))
    first_beyond = int(beyond.reshape(-1).argmax()) if beyond.any() else -1
    return PairResult(left_replica, right_replica, bits.size, int(beyond.sum()), one_ulp, largest, first_beyond)


def _ordered(bits):
    magnitude = bits.astype(np.int64) & 0x7FFF
    return np.where(bits & 0x8000, -magnitude, magnitude)
