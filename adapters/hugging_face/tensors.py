"""Where the tensors of one set lie, held against its index and against what the configuration implies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from auditor.adapters.hugging_face.config import Implied
from auditor.adapters.hugging_face.files import StoredArray, Weights
from auditor.adapters.hugging_face.sets import WeightSet
from auditor.adapters.step_file import Opened
from auditor.model.catalog import Problem, ProblemKind
from auditor.model.dtype import Kind
from auditor.model.optimizer import Tie
from auditor.storage.store import join

CONFIG = "config.json"

_MAX_ORDERED = 512
"""Characters of a name by which it is put in order; names from strangers may be as long as a file."""

_HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs", "cls")
_EMBEDDINGS = ("wte", "wpe")
_PARTS = re.compile(r"(\d+)")


def model_order(name: str) -> tuple[int, tuple[tuple[int, str], ...], str]:
    """Sorts names as the model runs: embeddings, layers by number, what has no number, heads.

    >>> sorted(["lm_head.w", "h.10.w", "norm.w", "h.9.w", "embed_tokens.w"], key=model_order)
    ['embed_tokens.w', 'h.9.w', 'h.10.w', 'norm.w', 'lm_head.w']
    """
    words = name[:_MAX_ORDERED].split(".")
    numbered = any(word.isdecimal() for word in words)
    embedding = any("emb" in word or word in _EMBEDDINGS for word in words)
    place = 3 if words[0] in _HEADS else 1 if numbered else 0 if embedding else 2
    # A number by its length and digits: one of a thousand digits is never converted.
    parts = tuple(_natural(part) for part in _PARTS.split(name[:_MAX_ORDERED]))
    return place, parts, name


def _natural(part: str) -> tuple[int, str]:
    digits = part.lstrip("0") if part.isdecimal() else ""
    return (len(digits), digits) if part.isdecimal() else (0, part)


@dataclass(slots=True)
class Placed:
    """The tensors of one set."""

    weights: WeightSet
    files: Mapping[str, Opened[Weights]]
    """All of the set, by name within the folder."""
    path: str
    """The folder."""
    found: dict[str, tuple[Opened[Weights], StoredArray]] = field(default_factory=dict)
    lost: dict[str, Opened[Weights]] = field(default_factory=dict)
    """Names that must lie in a file which could not be read."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def index_name(self) -> str:
        """The index, or the file that takes its place."""
        named = self.weights.index.opened.name if self.weights.index else ""
        return named or next(iter(self.weights.names), self.weights.kind.single)

    def problem(self, kind: ProblemKind, file: str, message: str, tensor: str = "", *, ignored: bool = False) -> None:
        """Note something wrong with ``file``, a name within the folder. ``ignored``: no loader looks at it."""
        self.problems.append(Problem(kind, join(self.path, file), message, tensor=tensor, ignored=ignored))

    @property
    def unread(self) -> list[Opened[Weights]]:
        """Files of which not even the names of the tensors are known."""
        return [file for file in self.files.values() if file.content is None]


def place(weights: WeightSet, files: Mapping[str, Opened[Weights]], path: str) -> Placed:
    """Find every tensor of a set; what index and files say of each other that does not fit is among the problems."""
    placed = Placed(weights, files, path)
    holders: dict[str, list[str]] = {}
    for file in files.values():
        for name in file.content.arrays if file.content else ():
            holders.setdefault(name, []).append(file.name)
    for name, names in holders.items():
        _place_one(placed, name, names)
    index = weights.index
    for name, home in index.weight_map.items() if index else ():
        if name in holders:
            continue
        if files[home].content is not None:
            message = f"does not hold {name}, which {placed.index_name} places in it"
            placed.problem(ProblemKind.ABSENT, home, message, name)
        else:
            placed.lost[name] = files[home]
    for name, said in index.strange.items() if index else ():
        message = f"places {name} in {said!r}, which is no file of this folder"
        placed.problem(ProblemKind.METADATA, placed.index_name, message, name)
    return placed


def _place_one(placed: Placed, name: str, holders: Sequence[str]) -> None:
    """The file that a tensor is taken from, among those that hold it."""
    index = placed.weights.index
    home = index.weight_map.get(name, "") if index else ""
    chosen = home if home in holders else holders[0]
    file = placed.files[chosen]
    assert file.content is not None
    placed.found[name] = file, file.content.arrays[name]
    if index is not None and index.usable and home not in holders:
        where = f"{placed.index_name} places in {home}" if home else f"{placed.index_name} does not name"
        placed.problem(ProblemKind.METADATA, chosen, f"holds {name}, which {where}", name)
    for other in holders:
        if other != chosen:
            placed.problem(ProblemKind.METADATA, other, f"holds {name} too, which is taken from {chosen}", name)


def ties_in(placed: Placed) -> list[Tie]:
    """Names that a torch file stores as one view of one storage."""
    views: dict[object, list[str]] = {}
    for name, (file, array) in placed.found.items():
        if array.storage is not None and array.num_bytes > 0:
            view = file.name, array.storage, array.offset, array.shape, array.strides
            views.setdefault(view, []).append(name)
    tied = (sorted(names, key=model_order) for names in views.values() if len(names) > 1)
    return [Tie(tuple(names), f"one storage in {placed.found[names[0]][0].name}") for names in tied]


def parameters_as_stored(placed: Placed) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the order of the files, which for torch files is the model's.

    Without second names of tied parameters, and without integers, which aren't trained.
    """
    named: dict[object, tuple[str, tuple[int, ...]]] = {}
    for name, (file, array) in placed.found.items():
        if array.dtype is not None and array.dtype.kind is Kind.FLOAT:
            named.setdefault((file.name, array.storage, array.offset, array.shape), (name, array.shape))
    return dict(named.values())


def check_total(placed: Placed) -> None:
    """The recorded number of bytes, where nothing else is wrong that would explain another one."""
    index = placed.weights.index
    if index is None or index.total_size is None:
        return
    if placed.problems or placed.lost or placed.unread or placed.weights.leftovers:
        return
    sizes = [(file.name, array) for file, array in placed.found.values()]
    if any(array.num_bytes < 0 for _, array in sizes):
        return
    # Tied tensors are counted once by some writers, views of one buffer too; each of these counts is right.
    by_place = {(file, array.storage, array.offset, array.num_bytes): array.num_bytes for file, array in sizes}
    by_storage: dict[object, int] = {}
    for file, array in sizes:
        by_storage.setdefault((file, array.offset if array.storage is None else array.storage), array.num_bytes)
    counts = sum(array.num_bytes for _, array in sizes), sum(by_place.values()), sum(by_storage.values())
    if index.total_size not in counts:
        # No loader looks at it, and many public folders have it wrong.
        message = f"records total_size {index.total_size}, the tensors have {counts[1]} bytes; loaders don't look"
        placed.problem(ProblemKind.METADATA, index.opened.name, message, ignored=True)


def compare(placed: Placed, implied: Implied, leftovers: Mapping[str, Opened[Weights]]) -> None:
    """Hold names and shapes against the configuration.

    ``leftovers``: files beside the set, read to find where names that it lacks may lie.
    """
    for name, (file, array) in placed.found.items():
        wanted = implied.shape_of(name)
        if wanted is None or array.dtype is None or array.shape == wanted:
            continue
        if math.prod(array.shape) == 0:
            message = f"holds {name} without elements, {CONFIG} implies {list(wanted)}"
            placed.problem(ProblemKind.EMPTY, file.name, message, name)
        else:
            message = f"holds {name} as {list(array.shape)}, {CONFIG} implies {list(wanted)}"
            placed.problem(ProblemKind.SHAPE, file.name, message, name)
    accused = {problem.tensor for problem in placed.problems if problem.kind is ProblemKind.ABSENT}
    for name in implied.required:
        if name not in placed.found and name not in placed.lost and name not in accused:
            _miss(placed, name, implied.required[name], leftovers)


def _miss(placed: Placed, name: str, shape: tuple[int, ...], leftovers: Mapping[str, Opened[Weights]]) -> None:
    """A tensor that the configuration implies and no file of the set holds."""
    index = placed.weights.index
    if placed.unread and not (index and index.usable):
        # Nothing tells what the unread files hold. One of them holds it, or none.
        if len(placed.unread) == 1:
            placed.lost[name] = placed.unread[0]
        elif all(file.lost for file in placed.unread):
            message = f"may hold {name}, which no other file does"
            placed.problem(ProblemKind.ABSENT, placed.unread[0].name, message, name)
        return
    holder = next((file.name for file in leftovers.values() if file.content and name in file.content.arrays), None)
    if holder:
        message = f"holds {name}, which {CONFIG} implies and no file of the set holds"
    else:
        message = f"lacks {name}, which {CONFIG} implies as {list(shape)}"
    placed.problem(ProblemKind.ABSENT, holder or placed.index_name, message, name)


def check_emptiness(placed: Placed) -> bool:
    """Whether the set holds no tensor at all, which is noted; then nothing more is to be said of names."""
    if placed.found or placed.unread or placed.lost or not placed.files:
        return False
    for name in placed.files:
        placed.problem(ProblemKind.EMPTY, name, "holds no tensor at all")
    return True
