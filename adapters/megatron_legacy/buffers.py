"""The distributed optimizer's file, ``distrib_optim.pt``: flat buffers, and which parameter lies where in one.

    {buffers_coalesced, <buffer>: {(<dtype>, <dtype of gradients>): {param, exp_avg, exp_avg_sq, numel_unpadded}}}

Data-parallel rank 0 gathers the fp32 masters and both moments of all ranks of its place. A buffer holds a model chunk's
parameters of one dtype from the last to the first, each begun at a multiple of 64 elements; it is cut into buckets, and
what pads the end of a bucket is left out, so that the next one follows without a gap. Where buckets end follows from
``args`` and matters only where sizes are no multiples of 64. The buffer's length must be what comes of it; where it
isn't (frozen parameters, say), nothing is placed.
Of several optimizers (one for experts) the file is a list. Before February 2024 a buffer was a list of buckets.
Source: megatron-core 0.16 ``optimizer/distrib_optimizer.py`` (get_parameter_state_dp_zero), ``optimizer/optimizer.py``
(ChainedOptimizer), ``distributed/param_and_grad_buffer.py``, ``distributed/distributed_data_parallel.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from auditor.adapters.megatron_legacy.files import Degrees, Place
from auditor.adapters.megatron_legacy.layout import is_tied_over_stages
from auditor.adapters.step_file import StepFile
from auditor.containers.pickle_machine import Global
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import Role

ROLES = {"param": Role.MASTER, "exp_avg": Role.FIRST_MOMENT, "exp_avg_sq": Role.SECOND_MOMENT}
_ALIGNED = 64
"""Elements to a multiple of which a parameter's first one is put."""
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_MAX_DEPTH = 4
_EXPERTS = ".experts."

Parameters = Mapping[str, tuple[int, str, StoredTensor]]
"""Path in the rank's file to chunk, key and tensor of each parameter that an optimizer was handed, in model order."""
Starts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatState:
    """What one such file holds."""

    tensors: Mapping[tuple[str, Role, str], StoredTensor] = field(default_factory=dict)
    """Masters and moments: the parameter's path in the rank's file, role, and path in this file."""
    padding: Mapping[str, StoredTensor] = field(default_factory=dict)
    """What lies between, by its path."""
    flats: Mapping[tuple[str, Role], StoredTensor] = field(default_factory=dict)
    """The buffers themselves by their path, where it isn't known what lies where."""
    reason: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer: its place in the file, its dtypes and flat tensors."""

    path: str
    dtype: str
    flats: Mapping[str, StoredTensor]


def flat_state(file: StepFile, parameters: Parameters, args: Mapping[str, object], at: Place, degrees: Degrees
               ) -> FlatState:  # fmt: skip
    """Where masters and moments of the parameters of the rank at ``at`` lie in its distributed optimizer's file."""
    content = file.content.tree if file.content else None
    optimizers = [*enumerate(content)] if isinstance(content, list) else [(None, content)]
    buffers = [[*_buffers(saved, number)] for number, saved in optimizers]
    wanted = _wanted(parameters, len(buffers), degrees)
    if wanted is None:
        return _nameless(content, "which parameters each of several optimizers has is not recorded")
    tensors: dict[tuple[str, Role, str], StoredTensor] = {}
    padding: dict[str, StoredTensor] = {}
    for of_optimizer, models in zip(buffers, wanted, strict=True):
        # Of an optimizer whose data-parallel ranks include expert-parallel ones the first of those saves the state.
        if not of_optimizer and isinstance(content, list):
            continue
        if [buffer.dtype for buffer in of_optimizer] != [dtype for dtype, _ in models]:
            return _nameless(content, "its buffers are not those of the model's parameters")
        for buffer, (_, names) in zip(of_optimizer, models, strict=True):
            shapes = {name: parameters[name][2].shape for name in names}
            places = _places(shapes, _breaks(parameters, names, at, degrees, args), _length(buffer))
            if isinstance(places, str):
                return _nameless(content, places)
            for key, flat in buffer.flats.items():
                path, role = f"{buffer.path}.{key}", ROLES[key]
                tensors |= {(n, role, f"{path}[{n}]"): _cut(flat, places[n], shapes[n]) for n in names}
                padding |= dict(_gaps(path, flat, places, shapes))
    return FlatState(tensors, padding)


def _nameless(content: object, reason: str) -> FlatState:
    flats = dict(_flats("distrib_optim", content))
    return FlatState(flats=flats, reason=reason if flats else "")


def _buffers(saved: object, number: int | None) -> Iterator[_Buffer]:
    """One optimizer's buffers in their order."""
    head = "distrib_optim" + ("" if number is None else f".{number}")
    for index, of_dtypes in saved.items() if isinstance(saved, dict) else ():
        for dtypes, kept in of_dtypes.items() if isinstance(of_dtypes, dict) else ():
            named = kept.items() if isinstance(kept, dict) else ()
            flats = {key: value for key, value in named if key in ROLES and isinstance(value, StoredTensor)}
            if flats:
                first = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
                yield _Buffer(f"{head}.{_text(index)}.{_text(dtypes)}", _text(first), flats)


def _length(buffer: _Buffer) -> int:
    """Elements of each of a buffer's tensors; 0 where they differ or are not flat."""
    shapes = {flat.shape for flat in buffer.flats.values()}
    plain = len(shapes) == 1 and all(len(f.shape) == 1 and f.contiguous for f in buffer.flats.values())
    return next(iter(shapes))[0] if plain else 0


def _wanted(parameters: Parameters, num_optimizers: int, degrees: Degrees) -> list[list[tuple[str, list[str]]]] | None:
    """Per optimizer, per buffer: its dtype and its parameters in model order. None where that can't be told."""
    chunks: dict[int, list[str]] = {}
    experts: dict[int, list[str]] = {}
    for name, (chunk, key, _) in parameters.items():
        apart = degrees.ep > 1 and _EXPERTS in key
        (experts if apart else chunks).setdefault(chunk, []).append(name)
    dense = [_by_dtype(parameters, names) for _, names in sorted(chunks.items())]
    sparse = [buffer for _, names in sorted(experts.items()) for buffer in _by_dtype(parameters, names)]
    together = [[buffer for buffers in dense for buffer in buffers]]
    for found in (together, dense):
        whole = [*found, *([sparse] if sparse else [])]
        if len(whole) == num_optimizers:
            return whole
    return None


def _by_dtype(parameters: Parameters, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(parameters[name][2].dtype.name, []).append(name)
    return [*found.items()]


def _breaks(
    parameters: Parameters, names: Sequence[str], at: Place, degrees: Degrees, args: Mapping[str, object]
) -> tuple[frozenset[str], int]:
    """The parameters that have a bucket of their own, and the elements with which a bucket is full; 0: it never is."""
    own = frozenset(name for name in names if is_tied_over_stages(parameters[name][1], at[0], degrees.pp, args))
    first = parameters[names[0]][0] == 0 and at[0] == 0
    if args.get("overlap_grad_reduce") is not True or not first:
        return own, 0
    stated, count = args.get("ddp_bucket_size"), args.get("ddp_num_buckets")
    if type(count) is int and count > 0:
        return own, sum(tensor.num_elements for _, _, tensor in parameters.values()) // count
    return own, stated if type(stated) is int and stated > 0 else max(_LEAST_BUCKET, _BUCKET_PER_RANK * degrees.dp)


def _places(shapes: Mapping[str, tuple[int, ...]], breaks: tuple[frozenset[str], int], length: int
            ) -> dict[str, int] | str:  # fmt: skip
    """The first element of each parameter, or why that isn't known."""
    sizes = {name: math.prod(shape) for name, shape in reversed([*shapes.items()])}
    own, full = breaks
    # As args say; in one bucket; without alignment, as before 2024.
    rules = [_starts(sizes, own, full, _ALIGNED), _starts(sizes, own, 0, _ALIGNED), _starts(sizes, frozenset(), 0, 1)]
    # Two of them give one length only where they give the same places: a bucket's end leaves padding out, or nothing.
    starts = next((starts for starts, end in rules if end == length), None)
    if starts is None:
        return f"its buffer has {length} elements, which no known order of the model's parameters explains"
    return dict(zip(sizes, starts, strict=True))


def _starts(sizes: Mapping[str, int], own: frozenset[str], full: int, aligned: int) -> tuple[Starts, int]:
    """First elements of parameters in a buffer of which the ends of buckets are left out, and its length.

    ``own``: parameters with a bucket of their own; ``full``: elements that fill one, 0 for none.
    """
    found: list[int] = []
    base = at = 0
    for name, size in sizes.items():
        # Within a bucket: buckets begin at multiples of the alignment in the buffer that was cut up.
        at += -at % aligned
        if name in own and at:
            base, at = base + at, 0
        found.append(base + at)
        at += size
        if name in own or (full and at >= full):
            base, at = base + at, 0
    return tuple(found), base + at


def _cut(flat: StoredTensor, start: int, shape: tuple[int, ...]) -> StoredTensor:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return StoredTensor(flat.dtype, shape, strides, flat.offset + start * flat.dtype.bits // 8, flat.storage)


def _gaps(
    path: str, flat: StoredTensor, places: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, StoredTensor]]:
    """What lies between parameters so that the next one is aligned."""
    end = 0
    for name, start in sorted(places.items(), key=lambda item: item[1]):
        if start > end:
            yield f"{path}.padding[{end}]", _cut(flat, end, (start - end,))
        end = start + math.prod(shapes[name])


def _flats(path: str, value: Any, depth: int = 0) -> Iterator[tuple[tuple[str, Role], StoredTensor]]:
    """Every buffer by its path, ``<buffer>.<dtypes>.<param|exp_avg|…>``; older files have a list of buckets there."""
    if depth > _MAX_DEPTH:
        return
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        named = f"{path}.{_text(key)}"[:256]
        if isinstance(item, StoredTensor) and key in ROLES:
            yield (named, ROLES[key]), item
        elif isinstance(item, list) and key in ROLES:
            tensors = [part for part in item if isinstance(part, StoredTensor)]
            yield from (((f"{named}.{at}", ROLES[key]), part) for at, part in enumerate(tensors))
        else:
            yield from _flats(named, item, depth + 1)


def _text(key: object) -> str:
    if isinstance(key, tuple) and len(key) < 4:
        return ",".join(map(_text, key))
    return key.name if isinstance(key, Global) else str(key)[:64]
