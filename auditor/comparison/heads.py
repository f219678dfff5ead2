"""Sizes that no shape tells, as a configuration records them; heads that none records, as the numbers tell them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from auditor.comparison.holding import Source
from auditor.comparison.lockstep import Stored, measure
from auditor.containers.damage import DamagedError, LimitError, UnsupportedError
from auditor.containers.json_document import read_json
from auditor.containers.pickle_machine import Opaque
from auditor.containers.torch_zip import read_torch_file
from auditor.model.catalog import Role
from auditor.model.name_map import NameRule, mapped
from auditor.storage.store import StorageError, join
from auditor.view.assemble import SourceLostError

MOST_PROBED = 1 << 26
"""Elements of a fused tensor that is read to tell how its heads lie."""
MOST_HEADS = 1 << 24
"""Heads, their width, and other sizes of a model, that are believed."""
_MOST_COUNTS = 64
"""Counts that are tried."""
_KEYS = {
    "heads": ("num_attention_heads", "n_head", "n_heads"), "groups": ("num_key_value_heads", "n_kv_heads"),
    "width": ("head_dim",), "hidden": ("hidden_size", "n_embd", "dim"), "vocabulary": ("vocab_size",),
}  # fmt: skip
"""What Hugging Face (``config.json``) and Meta (``params.json``) call them."""
_MEGATRON = {
    "heads": "num_attention_heads", "groups": "num_query_groups", "width": "kv_channels", "hidden": "hidden_size",
}  # fmt: skip
"""What Megatron's arguments call them."""
_WITH_ARGUMENTS = ("common.pt", "model_optim_rng.pt")


def recorded_heads(*sources: Source) -> tuple[int, int, int] | None:
    """Query heads, groups of them that share a key, and a head's width, as the first of ``sources`` records them."""
    for source in sources:
        found = _sizes(source)
        found = found if "heads" in found else _arguments(source)
        heads = found.get("heads", 0)
        width = found.get("width") or (found.get("hidden", 0) // heads if heads else 0)
        if heads and width:
            return heads, found.get("groups", heads), width
    return None


def recorded_vocabulary(source: Source) -> int:
    """Rows of the embedding, as a configuration records them; 0 where none does."""
    return _sizes(source).get("vocabulary", 0)


def _sizes(source: Source) -> dict[str, int]:
    path = source.catalog.path
    for folder, name in product(dict.fromkeys((path, path.rpartition("/")[0])), ("config.json", "params.json")):
        try:
            with source.store.open(join(folder, name)) as handle:
                found = read_json(handle, unique_keys=False)
        except (StorageError, DamagedError, LimitError):
            continue
        if isinstance(found, dict):
            return _believed({what: next((found[k] for k in keys if k in found), 0) for what, keys in _KEYS.items()})
    return {}


def _arguments(source: Source) -> dict[str, int]:
    """The same, of the arguments that Megatron keeps in its first file."""
    names = [file.name for file in source.catalog.files if file.name.endswith(_WITH_ARGUMENTS)]
    try:
        with source.store.open(min(names, default="")) as handle:
            tree = read_torch_file(handle).tree
    except (StorageError, DamagedError, LimitError, UnsupportedError):
        return {}
    args = tree.get("args") if isinstance(tree, dict) else None
    kept = args.attributes() if isinstance(args, Opaque) else args if isinstance(args, dict) else {}
    if not kept.get("group_query_attention"):
        # Then the number of groups is not used.
        kept = {**kept, "num_query_groups": 0}
    return _believed({what: kept.get(key) for what, key in _MEGATRON.items()})


def _believed(numbers: Mapping[str, object]) -> dict[str, int]:
    return {what: value for what, value in numbers.items() if type(value) is int and 0 < value < MOST_HEADS}


def divisors(*sizes: int) -> list[int]:
    """Numbers of groups that cut all sizes, the smallest first.

    >>> divisors(8, 12)
    [1, 2, 4]
    """
    most = math.gcd(*sizes)
    return [part for part in range(1, min(most, MOST_HEADS) + 1) if most % part == 0][:_MOST_COUNTS]


def probed(
    source: Source, target: Source, first: str, fused: Callable[[int], list[NameRule]], counts: Sequence[int]
) -> list[NameRule]:  # fmt: skip
    """The rules with the count under which the tensor ``first`` is nearest to the other side's."""
    own = source.catalog.only(lambda name: name == first)
    own_parameters = [tensor for tensor in own.tensors if tensor.role is Role.PARAMETER]
    if len(counts) < 2 or not own_parameters or own_parameters[0].num_elements > MOST_PROBED:
        return fused(counts[0] if counts else 1)
    theirs = {(tensor.role, tensor.name, tensor.shape): n for n, tensor in enumerate(target.catalog.tensors)}

    def apart(count: int) -> float:
        seen = mapped(own, fused(count))
        for number, tensor in enumerate(seen.tensors):
            other = theirs.get((tensor.role, tensor.name, tensor.shape))
            if tensor.role is Role.PARAMETER and other is not None:
                try:
                    return measure(Stored(Source(source.store, seen), number), Stored(target, other)).relative
                except SourceLostError:
                    break
        return float("inf")

    return fused(min(counts, key=apart))
