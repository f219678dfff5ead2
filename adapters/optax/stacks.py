"""Stacks taken apart: where a scan over layers keeps all layers in one array, each layer becomes a tensor of its own.

``nn.scan`` (MaxText), Haliax's ``Stacked`` (Levanter) and their like keep the arrays of all layers in one, under a key
such as ``layers`` with no number behind it. Which dim counts the layers is recorded nowhere; it follows where one dim
alone has one extent in all arrays below the key, and vectors among them have become matrices. Else the stack stays.
Sources: MaxText ``layers/decoders.py`` (``param_scan_axis``); haliax ``nn/scan.py``; flax ``linen/transforms.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from auditor.containers.encoded import KEPT_BYTES
from auditor.model.catalog import Catalog, Role, Tensor
from auditor.model.name_map import NameRule, mapped
from auditor.model.optimizer import parameter_of

_KEY = re.compile(r"(?:\w{1,40}_)?(?:layers|blocks)|layer|block|h|stacked|[Ss]can\w{0,40}", re.A)
MAX_LAYERS = 1024
MAX_PIECES = 1 << 20
"""That a Catalog may have afterwards."""
MAX_TRIES = 1 << 18
"""Rules times tensors. A model has a few dozen kinds of arrays a layer."""
_VECTOR, _MATRIX = 2, 3
"""Dims of what a layer holds as a vector, and as a matrix."""


def unstacked(catalog: Catalog) -> Catalog:
    """The Catalog with every stack taken apart whose dim of layers is certain; in the order of the model."""
    stacks: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in catalog.tensors:
        if tensor.role is Role.PARAMETER and (prefix := _prefix(tensor.name)):
            stacks[prefix].append(tensor)
    rules, depths = list[NameRule](), dict[str, int]()
    for prefix, members in stacks.items():
        dim = _dim(members)
        if dim is not None and _is_worth_it(catalog, {tensor.name for tensor in members}, dim):
            depths[prefix] = members[0].shape[dim]
            rules += [_rule(prefix, tensor.name, dim) for tensor in members]
    if not rules or len(rules) * len(catalog.tensors) > MAX_TRIES:
        return catalog
    return _in_order(mapped(catalog, rules), depths, {tensor.name: tensor.order for tensor in catalog.tensors})


def _prefix(name: str) -> str:
    """What leads to a stack, its key included; empty where the name has none."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if _KEY.fullmatch(part) and not parts[at + 1].isdecimal():
            return ".".join(parts[: at + 1])
    return ""


def _dim(members: Sequence[Tensor]) -> int | None:
    """The dim that counts the layers; None where it isn't certain."""
    dims = [len(tensor.shape) for tensor in members]
    if min(dims) != _VECTOR or max(dims) < _MATRIX:
        return None
    common = set.intersection(*(set(enumerate(tensor.shape)) for tensor in members))
    fits = [(dim, extent) for dim, extent in common if 2 <= extent <= MAX_LAYERS]
    return fits[0][0] if len(common) == len(fits) == 1 else None


def _is_worth_it(catalog: Catalog, names: set[str], dim: int) -> bool:
    """Whether all that is kept for the parameters has their shapes, and taking it apart costs no second decoding."""
    num_pieces = len(catalog.pieces)
    shapes = {tensor.name: tensor.shape for tensor in catalog.tensors if tensor.role is Role.PARAMETER}
    for number, tensor in enumerate(catalog.tensors):
        owner = tensor.name if tensor.name in shapes else parameter_of(tensor.name)
        if owner not in names or tensor.role is Role.COUNTER:
            continue
        rows = catalog.rows_by_tensor.get(number, ())
        num_pieces += len(rows) * shapes[owner][dim]
        if tensor.shape != shapes[owner] or num_pieces > MAX_PIECES:
            return False
        # Layers that lie among each other would each have the whole chunk decoded that holds them.
        encodings = {id(encoding): encoding for row in rows if (encoding := catalog.file_of(int(row)).encoding)}
        if dim and any((encoding.num_bytes > KEPT_BYTES).any() for encoding in encodings.values()):
            return False
    return True


def _rule(prefix: str, name: str, dim: int) -> NameRule:
    return NameRule(name, (f"{prefix}.{{n}}{name.removeprefix(prefix)}",), unstack=dim)


def _in_order(catalog: Catalog, depths: dict[str, int], before: dict[str, int]) -> Catalog:
    """Layer by layer, each stack where its first array was."""
    firsts: dict[str, int] = {}
    for name, order in before.items():
        prefix = _prefix(name)
        if prefix in depths and order >= 0:
            firsts[prefix] = min(order, firsts.get(prefix, order))
    keys = [_place(tensor, depths, firsts, before) for tensor in catalog.tensors]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    tensors = (
        tensor if tensor.order < 0 else replace(tensor, order=ranks[key])
        for tensor, key in zip(catalog.tensors, keys, strict=True)
    )  # fmt: skip
    return replace(catalog, tensors=tuple(tensors))


def _place(
    tensor: Tensor, depths: dict[str, int], firsts: dict[str, int], before: dict[str, int]
) -> tuple[int, int, int]:
    """Where the tensor's stack was, its layer, and where its array was."""
    parts = tensor.name.split(".") if tensor.name not in before else []
    for at, part in enumerate(parts[:-1]):
        prefix = ".".join(parts[: at + 1]) if _KEY.fullmatch(part) and parts[at + 1].isdecimal() else ""
        if prefix in depths:
            return firsts.get(prefix, tensor.order), int(parts[at + 1]), tensor.order
    return tensor.order, -1, tensor.order
