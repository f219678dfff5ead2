"""Where in a JAX training state the optimizer's state, the parameters and their averages lie, told by its paths alone.

A state is a tree of dicts, lists, tuples and named tuples; a path is the keys down to one array, list positions and
fields as words (``("opt_state", "0", "mu", "layer_0", "kernel")``). optax keeps its moments in trees of the parameters'
own structure, so that what comes after ``mu`` is the path of a parameter below wherever the parameters are: that is how
the two are tied, not by the names of what comes before. Source: optax ``transforms/_accumulation.py``,
``_src/transform.py``; flax ``training/train_state.py``, ``nnx/training/optimizer.py``; t5x ``optimizers.py``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

Path = tuple[str, ...]

FIELDS = frozenset({
    "mu", "nu", "nu_max", "trace", "v", "v_row", "v_col", "ema", "sum_of_squares", "e_g", "e_x", "step_sizes",
    "prev_updates", "previous_gradient", "acc_grads", "z", "params", "updates", "diff_params_memory",
    "diff_updates_memory", "grad", "exp_avg", "exp_avg_sq", "momentum", "m", "grad_ema", "grad_sq_ema",
})  # fmt: skip
"""Fields of optimizer states that hold a tree of the parameters' structure."""
LAST_FIELDS = frozenset({"m", "v", "v_row", "v_col", "grad_ema", "grad_sq_ema", "momentum", "param_ema"})
"""Fields that t5x and the old flax.optim keep below each parameter, in a tree called ``param_states``."""
PARAM_STATES = "param_states"
MODELS = ("params", "model_params", "model", "target", "variables", "weights", "module", "nnx_params")
"""What trainers call the tree of parameters; the surest first."""
BUFFERS = frozenset({"batch_stats", "batch_norm_stats", "cache", "mutable", "model_state", "extra_variables",
                     "flax_mutables", "mutable_variables", "non_trainable"})  # fmt: skip
MASTERS = re.compile(
    r"(?:master|fp32|f32|float32)_(?:copy|params|weights)|(?:params|weights)_(?:master|fp32|f32)", re.A
)
EMAS = re.compile(r"(?:\w{1,40}_)?(?:ema|swa|polyak|avg|average|averaged)(?:_\w{1,40})?|target_params", re.A)
_OPTIMIZER = re.compile(r"(?:\w{1,40}_)?(?:opt|optim|optimizers?)(?:_states?)?(?:_\w{1,40})?", re.A)
_SIGNATURES = (frozenset({"mu", "nu"}), frozenset({"v_row", "v_col"}), frozenset({"trace"}), frozenset({"count", "mu"}))
"""Fields by which a state is known in a tree that nothing calls an optimizer's."""
_COUNTED = ("count", PARAM_STATES)
HEAD = 4
"""Keys of a path among which the name of a whole tree is looked for."""
_SAMPLES, _CANDIDATES = 16, 32


def below(path: Path, root: Path) -> bool:
    """Whether a path leads into the tree at ``root``."""
    return path[: len(root)] == root


def without_wrappers(paths: Sequence[Path]) -> list[Path]:
    """Paths without what Flax NNX puts around every array, ``value``; as they are where some have none."""
    wrapped = [path for path in paths if len(path) > 1 and path[-1] == "value"]
    # What isn't wrapped are counters beside a model that is.
    if not wrapped or any(len(path) > HEAD and path[-1] != "value" for path in paths):
        return list(paths)
    return [path[:-1] if path[-1] == "value" and len(path) > 1 else path for path in paths]


class OptimizerRoots:
    """The trees of optimizers in a state."""

    def __init__(self, paths: Sequence[Path]) -> None:
        named: dict[Path, set[str]] = defaultdict(set)
        for path in paths:
            root = _named_root(path)
            if root is not None:
                named[root].update(part for part in path[len(root) :] if part in FIELDS or part in _COUNTED)
        roots = {root for root, fields in named.items() if fields}
        # What keeps fields around another optimizer's state wraps it: together they are one.
        wrappers = {root for root in roots if named[root] & FIELDS}
        self._roots = frozenset(
            root for root in roots if not any(root[:length] in wrappers for length in range(1, len(root)))
        )
        self._lengths: tuple[int, ...] = ()
        self._measure()
        rest = [path for path in paths if self.of(path) is None]
        self._roots |= frozenset(_unnamed_roots(rest))
        self._measure()

    def _measure(self) -> None:
        self._lengths = tuple(sorted({len(root) for root in self._roots}, reverse=True))

    def of(self, path: Path) -> Path | None:
        """The root of the optimizer's tree in which a path lies; None for others."""
        for length in self._lengths:
            if len(path) > length and path[:length] in self._roots:
                return path[:length]
        return None


def _named_root(path: Path) -> Path | None:
    for at, part in enumerate(path[:HEAD]):
        if part in MODELS or part in BUFFERS:
            return None
        if _OPTIMIZER.fullmatch(part):
            after = path[at + 1] if at + 1 < len(path) else ""
            if after in MODELS:
                return None
            return path[: at + 1 + bool(after == "state" or _OPTIMIZER.fullmatch(after))]
    return None


def _unnamed_roots(paths: Sequence[Path]) -> Iterator[Path]:
    """States that lie under no telling name: a saved tuple ``(params, opt_state)``, or the optimizer's state alone."""
    fields: dict[Path, set[str]] = defaultdict(set)
    for path in paths:
        for at, part in enumerate(path):
            if part in FIELDS or part == "count":
                fields[path[:at]].add(part)
                break
    nodes = {node for node, found in fields.items() if any(signature <= found for signature in _SIGNATURES)}
    nodes = {node for node in nodes if not any(part in MODELS for part in node)}
    if not nodes:
        return
    known: dict[Path, set[bool]] = defaultdict(set)
    for path in paths:
        for at in range(len(path)):
            known[path[:at]].add(any(part in FIELDS or part == "count" for part in path[at:]))
    for node in nodes:
        # A chain is a tuple of states: all of it is the optimizer's, if each of its arrays is one of a state.
        while node and node[-1].isdecimal() and known[node[:-1]] == {True}:
            node = node[:-1]
        yield node


def split_field(path: Path, root: Path) -> tuple[Path, str, Path] | None:
    """A path in an optimizer's tree as state, field and parameter's path, by the names of fields; None without one.

    >>> split_field(("opt_state", "0", "mu", "head", "kernel"), ("opt_state",))
    (('opt_state', '0'), 'mu', ('head', 'kernel'))
    """
    if PARAM_STATES in path[len(root) :]:
        at = path.index(PARAM_STATES, len(root))
        return (path[: at + 1], path[-1], path[at + 1 : -1]) if path[-1] in LAST_FIELDS else None
    for at in range(len(root), len(path)):
        if path[at] in FIELDS:
            return path[:at], path[at], path[at + 1 :]
    return None


def split_suffix(path: Path, root: Path, parameters: Iterable[Path] | Mapping[Path, object]) -> (
    tuple[Path, str, Path] | None
):  # fmt: skip
    """The same for fields of any name: the longest end of the path that is a parameter's.

    Numbers after it count to the field: some optimizers keep a list for each parameter.
    """
    end = len(path)
    while True:
        for at in range(len(root) + 1, end):
            if path[at:end] in parameters:
                return path[: at - 1], "_".join((path[at - 1], *path[end:])), path[at:end]
        if not path[end - 1].isdecimal() or end <= len(root) + 2:
            return None
        end -= 1


def best_prefix(rests: Sequence[Path], outside: Sequence[Path], root: Path) -> Path | None:
    """Where the parameters lie: the prefix under which most of ``rests`` are paths of the state.

    Averages have the parameters' structure as well, and several models may have one: of equals the one that isn't
    called an average is taken, then the one that shares most of the way with the optimizer's ``root``.
    """
    wanted = [rest for rest in rests if rest]
    if not wanted:
        return next((path for path in outside if path[-1] in MODELS), None)
    paths, by_last = set(outside), defaultdict(list)
    for path in outside:
        by_last[path[-1]].append(path)
    found: Counter[Path] = Counter()
    for rest in wanted[:: max(len(wanted) // _SAMPLES, 1)]:
        found.update(path[: -len(rest)] for path in by_last[rest[-1]] if path[-len(rest) :] == rest)
    scored = [
        (sum(prefix + rest in paths for rest in wanted), not is_copy(prefix), _shared(prefix, root), -at, prefix)
        for at, (prefix, _) in enumerate(found.most_common(_CANDIDATES))
    ]
    return max(scored)[-1] if scored else None


def _shared(one: Path, other: Path) -> int:
    """How many keys two paths have in common from the root on."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def is_copy(path: Path) -> bool:
    """Whether a tree is called an average of the parameters, or a master."""
    return any(EMAS.fullmatch(part) or MASTERS.fullmatch(part) for part in path)


def named_models(outside: Sequence[Path]) -> list[Path]:
    """Trees that are called what trainers call parameters: all with the surest of these names."""
    best: dict[Path, int] = {}
    for path in outside:
        for at, part in enumerate(path[: HEAD - 1]):
            if is_copy(path[: at + 1]) or part in BUFFERS:
                break
            stem = "params" if part.startswith("params_") or part.endswith("_params") else part
            if stem in MODELS and at + 1 < len(path):
                best[path[: at + 1]] = MODELS.index(stem)
                break
    surest = min(best.values(), default=0)
    return [path for path, rank in best.items() if rank == surest]
