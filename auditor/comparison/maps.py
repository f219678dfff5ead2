"""Built-in name maps between what people convert from and to: which rules make one side's names the other's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from auditor.comparison.bare_names import bare, parameters
from auditor.comparison.holding import Source
from auditor.comparison.maps_hugging_face import fused, meta
from auditor.comparison.maps_megatron import megatron
from auditor.model.catalog import Tensor
from auditor.model.name_map import NameRule

_NUMBERED = re.compile(r"(.*?)(\d+)\.(.*)")
_INDEXED = re.compile(r"_(\d+)(?=\.|$)")
_NORMS = {"word_embeddings.norm": "word_embeddings_layernorm"}
"""What a pipeline's module is called in the model, where their names don't end alike: BLOOM's."""
_FINAL_NORMS = ("ln_f", "norm", "final_layernorm", "final_layer_norm")

Build = Callable[[Source, Source], list[NameRule]]


@dataclass(frozen=True, slots=True)
class NameMap:
    """One built-in map."""

    name: str
    build: Build
    """Rules under which the first side's tensors are called, and lie, as the second's."""


def _by_bare_name(source: Source, target: Source) -> list[NameRule]:
    """Wrappers: DeepSpeed, DDP, torch.compile, PEFT, and models with and without a head."""
    theirs = {bare(name): name for name in parameters(target.catalog)}
    own = parameters(source.catalog)
    return [NameRule(name, (theirs[bare(name)],)) for name in own if bare(name) in theirs]


def _pipeline(source: Source, target: Source) -> list[NameRule]:
    """DeepSpeed's pipelines number all modules from the embedding on; models number their layers."""
    own, theirs = parameters(source.catalog), parameters(target.catalog)
    layers: dict[tuple[int, str], str] = {}
    for name in theirs:
        found = _NUMBERED.fullmatch(name)
        if found and found[1]:
            layers[int(found[2]), found[3]] = name
    numbered = {name: (int(fit[2]), fit[3]) for name in own if (fit := _NUMBERED.fullmatch(name)) and not fit[1]}
    offsets = {number - other for number, rest in numbered.values() for other, same in layers if same == rest}

    def hits(offset: int) -> int:
        return sum((number - offset, rest) in layers for number, rest in numbered.values())

    if not offsets:
        return []
    offset = max(sorted(offsets), key=hits)
    rules = {
        name: layers[number - offset, rest]
        for name, (number, rest) in numbered.items()
        if (number - offset, rest) in layers
    }
    return [NameRule(name, (to,)) for name, to in {**rules, **dict(_leftover(own, theirs, rules))}.items()]


def _leftover(
    own: dict[str, Tensor], theirs: dict[str, Tensor], known: dict[str, str]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Tensors outside of layers: those whose names end alike, and are the only ones of their shape to do so."""
    free = [name for name in theirs if name not in known.values()]
    for name, tensor in own.items():
        if name in known:
            continue
        for ending in _endings(name):
            fits = [
                other for other in free if theirs[other].shape == tensor.shape and f".{other}".endswith(f".{ending}")
            ]
            if len(fits) == 1:
                free.remove(fits[0])
                yield name, fits[0]
                break


def _endings(name: str) -> Iterator[str]:
    """What the model's name of a tensor outside of layers may end with, the surest first."""
    parts = name.split(".")
    yield from (".".join(parts[-count:]) for count in (3, 2))
    for module, other in _NORMS.items():
        if name.endswith(f"{module}.{parts[-1]}"):
            yield f"{other}.{parts[-1]}"
    if len(parts) == 2 and parts[0].isdecimal():
        # The last of the numbered modules is the norm before the head.
        yield from (f"{norm}.{parts[-1]}" for norm in _FINAL_NORMS)
    yield parts[-1]


def _flax(source: Source, target: Source) -> list[NameRule]:
    """Flax's names and its kernels, [in, out], as torch has them."""
    theirs = {_spread(name): name for name in parameters(target.catalog)}
    rules = []
    for name, tensor in parameters(source.catalog).items():
        path, _, last = _spread(name).rpartition(".")
        kind = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(last, last)
        to = theirs.get(f"{path}.{kind}" if path else kind)
        if to is None:
            continue
        dims = len(tensor.shape)
        # Convolutions: spatial dims first, then in and out.
        order = (dims - 1, dims - 2, *range(dims - 2)) if last == "kernel" and dims > 1 else None
        rules.append(NameRule(name, (to,), transpose=order))
    return rules


def _spread(name: str) -> str:
    """A bare name with numbers as parts of their own: Flax says layers_3, and both sides may say ln_1."""
    return bare(_INDEXED.sub(r".\1", name))


MAPS = {
    found.name: found
    for found in (
        NameMap("wrappers", _by_bare_name), NameMap("megatron-hf", megatron), NameMap("deepspeed-hf", _pipeline),
        NameMap("meta-hf", meta), NameMap("fused-hf", fused), NameMap("torch-flax", _flax),
    )
}  # fmt: skip
"""In the order in which they are tried."""
