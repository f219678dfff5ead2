"""Tensors of other kinds than plain ones: which plain ones they are made of.

Sparse tensors are their indices and values, subclasses (torchao's, say) what they keep as attributes; each of these is
a tensor by itself, under the name of the whole with its own behind a dot. What they mean together is not judged.
Source: torch ``torch/_utils.py`` (``_rebuild_sparse_tensor``, ``_rebuild_wrapper_subclass``), ``_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from auditor.containers.pickle_machine import Global, Opaque
from auditor.containers.torch_zip import StoredTensor

_SPARSE = {
    3: ("indices", "values"), 4: ("crow_indices", "col_indices", "values"),
}  # fmt: skip
"""Parts by how many arguments describe the tensor: those, its size, and since torch 2.1 whether it is coalesced."""
_MAX_DEPTH = 3
_MAX_INNER = 64


def inner_tensors(value: Opaque) -> dict[str, StoredTensor]:
    """The plain tensors that a record of another kind holds, by name within it."""
    if _is(value.maker, "_rebuild_sparse_tensor"):
        arguments = value.arguments[1] if len(value.arguments) > 1 else ()
        parts = [item for item in arguments if isinstance(item, StoredTensor)] if isinstance(arguments, tuple) else []
        return dict(zip(_SPARSE.get(len(parts) + 1, ()), parts, strict=False))
    found: dict[str, StoredTensor] = {}
    for name, tensor in _attributes(value, "", 0):
        if len(found) == _MAX_INNER:
            break
        found[name] = tensor
    return found


def is_tensor(value: Opaque) -> bool:
    """Whether a record stands for a tensor that can't be read as a plain one."""
    inside = [item for item in (value.maker, *value.arguments[:1]) if isinstance(item, Global)]
    return any("_rebuild_" in item.name or (item.module, item.name[:6].lower()) == ("torch", "tensor") or
               item.name.startswith("lazily") for item in inside)  # fmt: skip


def kind_of(value: Opaque) -> str:
    """What kind of tensor a record stands for."""
    return value.maker.name[:64] if isinstance(value.maker, Global) else "an unknown kind"


def _is(maker: object, name: str) -> bool:
    return isinstance(maker, Global) and maker.name == name


def _attributes(value: Opaque, prefix: str, depth: int) -> Iterator[tuple[str, StoredTensor]]:
    state = value.state
    for part in state if isinstance(state, tuple) and len(state) <= 2 else (state,):
        for key, item in part.items() if isinstance(part, Mapping) else ():
            if not isinstance(key, str):
                continue
            if isinstance(item, StoredTensor):
                yield f"{prefix}{key[:256]}", item
            elif isinstance(item, Opaque) and depth < _MAX_DEPTH:
                yield from _attributes(item, f"{prefix}{key[:256]}.", depth + 1)
