"""Witnesses made by hand, for tests that need no framework."""

import numpy as np

from auditor.hooks.recording import Recorder, measured_on_cpu
from auditor.model.dtype import DTYPES
from auditor.model.mesh import Coordinate
from auditor.model.region import Box
from auditor.observe.numpy_kernels import NumpyKernels

FLOAT32 = DTYPES["float32"]


def held(recorder, name, whole, box, place, role=None):
    """Let a rank hold ``box`` of the array ``whole``."""
    part = np.ascontiguousarray(whole[tuple(map(slice, box.start, box.stop))]).astype("<f4")
    row = measured_on_cpu(NumpyKernels(), part.reshape(-1).view("u1"), FLOAT32, whole.shape, box)
    recorder.add(name, FLOAT32, whole.shape, box, place, row, role)


def part_of(rank, arrays, *, num_ranks=2, step=3, place=None, **choices):
    """A rank that holds all of ``arrays`` whole."""
    recorder = Recorder(rank, num_ranks)
    for name, array in arrays.items():
        box = Box((0,) * array.ndim, array.shape)
        held(recorder, name, array, box, place or Coordinate.of(rank=rank))
    return recorder.part(step, **{"launch": "one", "taken": 1.0, **choices})
