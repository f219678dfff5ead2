"""The witness of a torch rank, from the state dict that it is about to save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from auditor.hooks.recording import Recorder, as_scalars
from auditor.hooks.torch_digest import measure
from auditor.hooks.torch_pieces import Held, dtype_of, flattened, pieces_of
from auditor.model.catalog import Role
from auditor.model.mesh import Coordinate
from auditor.observe.kernel_choice import choose

THREADS = 4
COMPILED_BYTES = 64 << 20
"""From so much on the compiled kernels are loaded, once a process."""


def record(
    state: Mapping[str, Any], rank: int, num_ranks: int, plain: Coordinate | None = None,
    buffers: Iterable[str] = (), threads: int = THREADS, more: Iterable[Held] = (),
) -> Recorder:  # fmt: skip
    """Digest all that this rank holds of a state dict (Stateful members resolved).

    ``plain``: the place of tensors that are whole on every rank; its rank by default. ``buffers``: names of tensors
    that are buffers of the model, which need not be equal everywhere. ``more``: what is not in the state dict.
    """
    recorder = Recorder(rank, num_ranks)
    flat = flattened(state)
    recorder.scalars.update(as_scalars(flat))
    place = Coordinate.of(rank=rank) if plain is None else plain
    held = [piece for key, value in flat.items() for piece in pieces_of(key, value, place)] + [*more]
    held = [piece for piece in held if _can_be_read(piece, recorder)]
    total = sum(piece.values.numel() * piece.values.element_size() for piece in held)
    kernels = choose(total, "auto" if total < COMPILED_BYTES else _compiled())
    known = frozenset(buffers)

    def measured(piece: Held) -> Any:
        dtype = dtype_of(piece.values)
        assert dtype is not None
        return measure(kernels, piece.values, dtype, piece.shape, piece.box)

    with torch.no_grad(), ThreadPoolExecutor(threads, "auditor-witness") as pool:
        for piece, row in zip(held, pool.map(measured, held), strict=True):
            dtype = dtype_of(piece.values)
            assert dtype is not None
            role = Role.BUFFER if _is_one_of(piece.key, known) else None
            recorder.add(piece.key, dtype, piece.shape, piece.box, piece.place, row, role)
    return recorder


def _compiled() -> str:
    try:
        choose(0, "numba")
    except ImportError:
        return "numpy"
    return "numba"


def _can_be_read(piece: Held, recorder: Recorder) -> bool:
    if piece.values.is_meta:
        recorder.skip("meta tensor")
    elif piece.values.layout is not torch.strided or piece.values.is_quantized:
        recorder.skip("sparse or quantized tensor")
    elif dtype_of(piece.values) is None:
        recorder.skip(f"dtype {piece.values.dtype}")
    elif piece.values.numel() != piece.box.num_elements:
        recorder.skip("its local part has another size than its place in the tensor")
    else:
        return True
    return False


def _is_one_of(key: str, names: frozenset[str]) -> bool:
    """Whether a stored key ends with one of the names, after a dot or as a whole."""
    at = 0
    while names and at >= 0:
        if key[at:] in names:
            return True
        found = key.find(".", at)
        at = found + 1 if found >= 0 else -1
    return False
