"""Names that are one tensor because a file stores them so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from auditor.containers.torch_zip import StoredTensor
from auditor.model.optimizer import Tie


def in_one_storage(named: Mapping[str, StoredTensor], file: str) -> list[Tie]:
    """Ties between names whose tensors are one view of one storage of ``file``: torch.save keeps tied tensors so."""
    places: dict[object, list[str]] = {}
    for name, tensor in named.items():
        if tensor.num_elements:
            places.setdefault((tensor.storage, tensor.offset, tensor.shape, tensor.strides), []).append(name)
    return [Tie(tuple(names), f"one storage in {file}") for names in places.values() if len(names) > 1]


def distinct(ties: Iterable[Tie]) -> list[Tie]:
    """Each set of names once, with the source that was given first."""
    found: dict[frozenset[str], Tie] = {}
    for tie in ties:
        names = tuple(dict.fromkeys(tie.names))
        if len(names) > 1:
            found.setdefault(frozenset(names), Tie(names, tie.source))
    return [*found.values()]
