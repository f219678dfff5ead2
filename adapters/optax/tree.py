"""What each array of a JAX training state is: parameter, moment, counter, average; and whose.

For adapters of formats that store such states (Orbax, Flax msgpack, npz, …)::

    tree = OptaxTree([Leaf(path, dtype, shape), …])
    tree.meanings[i]                                     # role, name and place in the model of leaf i
    wanted = numbers(tree)                               # leaves that are metadata: read their one element
    record(builder, tree, values, file)                  # counters, hyperparameters, parameter groups

The last two are in ``optax_record``. Sources: optax ``_src/transform.py``, ``_src/factorized.py``,
``transforms/_combining.py``, ``schedules/_inject.py``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from auditor.adapters.optax.paths import (
    BUFFERS,
    EMAS,
    HEAD,
    MASTERS,
    OptimizerRoots,
    Path,
    below,
    best_prefix,
    is_copy,
    named_models,
    split_field,
    split_suffix,
    without_wrappers,
)
from auditor.model.catalog import Role
from auditor.model.dtype import DType, Kind

STEPS = frozenset({"step", "global_step", "_step", "iteration", "train_step", "steps", "num_steps"})
COUNTERS = frozenset({"count", "mini_step", "gradient_step", "step_count", "step", "notfinite_count",
                      "total_notfinite", "plateau_count", "cooldown_count", "num_not_finite"})  # fmt: skip
_RANDOM = frozenset({"rng", "rngs", "key", "keys", "rng_key", "rng_keys", "prng", "prng_key", "dropout_rng", "seed",
                     "rng_state", "training_key", "init_rng", "noise_rng", "dropout_key", "random_key"})  # fmt: skip
_STATISTICS = frozenset({"mean", "var", "running_mean", "running_var"})
"""What normalisation layers keep beside their parameters; parameters if the optimizer has moments for them."""
_WEIGHTS = frozenset({"kernel", "embedding", "scale", "bias", "weight"})
"""What Flax's layers call their parameters."""
_TRUNK = "model"
"""What transformers calls the model below a head: ``{"model": …, "lm_head": …}`` in its ``flax_model.msgpack``."""
_ROLES = {
    "mu": Role.FIRST_MOMENT, "m": Role.FIRST_MOMENT, "grad_ema": Role.FIRST_MOMENT, "nu": Role.SECOND_MOMENT,
    "v": Role.SECOND_MOMENT, "grad_sq_ema": Role.SECOND_MOMENT,
}  # fmt: skip
"""Fields that hold a moving average of gradients or of their squares, if they have their parameters' shapes."""
_OF_ADAM = frozenset(_ROLES) | {"nu_max", "v_row", "v_col", "momentum", "ema", "trace", "m1", "m2"}
"""Trees of the parameters' structure in states of Adam's form. Where a state has others beside them its fields mean
something else: in Adan's ``v`` averages differences of gradients, and in SM3's ``nu`` is the momentum. Source: optax
``_src/transform.py`` (ScaleByAdanState, ScaleBySM3State), 0.2.8."""
_FACTORED = frozenset({"v", "v_row", "v_col"})
_KEYS = {"nu_max": "max_exp_avg_sq"}
"""Fields that hold what torch keeps under another name."""
_ALONE = "no parameters are stored beside the optimizer's state"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the state."""

    path: Path
    """Keys from the root; positions in lists and fields of named tuples as words."""
    dtype: DType
    shape: tuple[int, ...]
    is_key: bool = False
    """Whether the format says that it is a key of a random number generator."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a leaf is."""

    role: Role
    name: str
    order: int
    """Position in the model; roles of one parameter share it. -1 for what belongs to no parameter."""
    undetermined: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """An array that the optimizer keeps for a parameter."""

    node: Path
    """The state that it is a field of."""
    field: str
    parameter: Path
    """Path of its parameter, from the root."""
    is_listed: bool = False
    """Whether it is one of several that are kept in a list: as many as the parameter has dims, say."""


class OptaxTree:
    """The meaning of all arrays of one state. Names are keys joined by dots, without what leads to the parameters."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.paths = without_wrappers([leaf.path for leaf in leaves])
        self._quoted = len({".".join(path) for path in self.paths}) < len(set(self.paths))
        roots = OptimizerRoots(self.paths)
        self.root_of = [roots.of(path) for path in self.paths]
        by_root = self._find_models()
        self._models = tuple(dict.fromkeys(by_root.values()))
        self._trained = frozenset(
            by_root[r] + rest for r, rests in self._rests.items() if r in by_root for rest in rests
        )
        self.parameters = self._find_parameters()
        self.kept = self._find_kept(by_root)
        self._taken: set[tuple[Role, str]] = set()
        outer = [None if self.root_of[at] is not None else self._outer(at) for at in range(len(leaves))]
        self.meanings = tuple(known or self._inner(at) for at, known in enumerate(outer))

    # Where parameters are

    def _find_models(self) -> dict[Path | None, Path]:
        """The trees of parameters by the root of their optimizer; without any, those that are called so."""
        outside = [path for path, root in zip(self.paths, self.root_of, strict=True) if root is None]
        models: dict[Path | None, Path] = {}
        for root, rests in self._rests.items():
            prefix = best_prefix(rests, outside, root)
            if prefix is not None:
                models[root] = self._past_collections(prefix, outside)
        if not models:
            alone = len(outside) == len(self.paths)
            named = [] if alone and self._is_model() else named_models(outside)
            named = named or ([()] if alone else [])
            # Without an optimizer, only the order of what is found counts.
            return {(str(at),): self._past_collections(model, outside) for at, model in enumerate(named)}
        return models

    def _is_model(self) -> bool:
        """Whether the state is a model with a head, whose trunk is called what a trainer calls all of a model."""
        tops = {path[0] for path in self.paths if path[-1] in _WEIGHTS}
        beside = (EMAS.fullmatch(top) or MASTERS.fullmatch(top) or top in BUFFERS for top in tops)
        return tops > {_TRUNK} and not any(beside)

    @cached_property
    def _rests(self) -> Mapping[Path, list[Path]]:
        """Root of an optimizer to the paths of parameters that its fields hold, as far as those are known by name."""
        rests: dict[Path, list[Path]] = defaultdict(list)
        for path, root in zip(self.paths, self.root_of, strict=True):
            split = split_field(path, root) if root is not None else None
            if root is not None and split is not None:
                rests[root].append(_whole(split[2]))
        return rests

    def _past_collections(self, model: Path, outside: Sequence[Path]) -> Path:
        """Linen's variables hold parameters in a collection of that name."""
        inner = (*model, "params")
        return inner if any(len(path) > len(inner) and below(path, inner) for path in outside) else model

    def _find_parameters(self) -> dict[Path, int]:
        """Paths of parameters to their place in the model."""
        found: dict[Path, int] = {}
        for at, path in enumerate(self.paths):
            if self.root_of[at] is None and (path in self._trained or self._is_parameter(at, path)):
                found[path] = len(found)
        return found

    def _is_parameter(self, at: int, path: Path) -> bool:
        """Whether a leaf for which no moments are kept is a parameter all the same."""
        leaf, model = self.leaves[at], self._model_of(path)
        if model is None or leaf.is_key or self._is_step(at) or _is_random(leaf, path):
            return False
        rest = path[len(model) :]
        if not model and (is_copy(path[:1]) or path[0] in BUFFERS or (self._trained and not leaf.shape)):
            return False
        number = leaf.dtype.kind in (Kind.FLOAT, Kind.COMPLEX)
        quantised = leaf.dtype.bits <= 8 and len(leaf.shape) > 1 and leaf.dtype.kind is not Kind.BOOL
        return (number and not (rest and rest[-1] in _STATISTICS)) or quantised

    def _model_of(self, path: Path) -> Path | None:
        """The tree of parameters in which a path lies."""
        return next((model for model in self._models if below(path, model)), None)

    def _is_step(self, at: int) -> bool:
        leaf, path = self.leaves[at], self.paths[at]
        return not leaf.shape and path[-1] in STEPS and len(path) <= HEAD and leaf.dtype.kind is not Kind.BOOL

    # What the optimizer keeps

    def _find_kept(self, models: Mapping[Path | None, Path]) -> dict[int, Kept]:
        """Leaves that the optimizer keeps for parameters."""
        inside: dict[Path, dict[Path, Path]] = defaultdict(dict)
        for path in self.parameters:
            model = self._model_of(path)
            if model is not None:
                inside[model][path[len(model) :]] = path
        found: dict[int, Kept] = {}
        for at, (path, root) in enumerate(zip(self.paths, self.root_of, strict=True)):
            counter = not self.leaves[at].shape and path[-1] in COUNTERS
            if root is None or counter or "hyperparams" in path[len(root) :] or _is_random(self.leaves[at], path):
                continue
            model = models.get(root, ())
            rests = inside.get(model, {})
            split = split_field(path, root)
            if split is None or _whole(split[2]) not in rests:
                split = split_suffix(path, root, rests) or split
            # A field that is one array is a tree of parameters only if those are one array.
            if split is not None and (split[2] or not rests or () in rests):
                rest = _whole(split[2])
                is_listed = bool(rest) and path[-1].isdecimal() and path[-len(rest) :] != rest
                found[at] = Kept(split[0], split[1], rests.get(rest, model + rest), is_listed)
        return found

    @cached_property
    def _of_other_form(self) -> frozenset[Path]:
        """States that keep for parameters what Adam's and its like don't."""
        return frozenset(kept.node for kept in self.kept.values() if kept.field not in _OF_ADAM)

    @cached_property
    def _of_other_shape(self) -> frozenset[tuple[Path, str]]:
        """States and fields that mostly don't have their parameters' shapes: those keep something else."""
        votes: Counter[tuple[Path, str]] = Counter()
        for at, kept in self.kept.items():
            shape = self._shapes.get(kept.parameter)
            if shape and not self._is_placeholder(at, kept):
                votes[kept.node, kept.field] += 1 if self.leaves[at].shape != shape else -1
        return frozenset(key for key, vote in votes.items() if vote > 0)

    @cached_property
    def _shapes(self) -> Mapping[Path, tuple[int, ...]]:
        pairs = zip(self.paths, self.leaves, strict=True)
        return {path: leaf.shape for path, leaf in pairs if path in self.parameters}

    def _is_placeholder(self, at: int, kept: Kept) -> bool:
        """Adafactor keeps a second moment or its factors; in the place of what it doesn't keep is one zero."""
        odd = self.leaves[at].shape == (1,) != self._shapes.get(kept.parameter)
        return odd and kept.field in _FACTORED

    # Meanings

    def _outer(self, at: int) -> Meaning:
        """What a leaf is that isn't the optimizer's."""
        path, leaf = self.paths[at], self.leaves[at]
        if path in self.parameters:
            return self._named(Role.PARAMETER, self.name_of(path), self.parameters[path])
        if self._is_step(at):
            return self._named(Role.COUNTER, self.joined(path), -1)
        if leaf.is_key or _is_random(leaf, path):
            return self._named(Role.OBJECT, self.joined(path), -1)
        for end, part in enumerate(path[:HEAD], 1):
            role = Role.EMA if EMAS.fullmatch(part) else Role.MASTER if MASTERS.fullmatch(part) else None
            owner = self._owner(path[end:]) if role else None
            if role and owner is not None:
                return self._named(role, self.name_of(owner), self.parameters[owner])
            if part in BUFFERS:
                return self._named(Role.BUFFER, self.joined(path[end - 1 :]), -1)
        model = self._model_of(path)
        role = Role.OBJECT if model is None or not leaf.shape else Role.BUFFER
        return self._named(role, self.joined(path[len(model or ()) :]), -1)

    def _owner(self, rest: Path) -> Path | None:
        """The parameter of which a path within an average is."""
        candidates = (model + _whole(rest) for model in self._models)
        return next((path for path in candidates if path in self.parameters), None)

    def _inner(self, at: int) -> Meaning:
        """What a leaf of the optimizer's is."""
        kept, leaf, path = self.kept.get(at), self.leaves[at], self.paths[at]
        if kept is None or kept.is_listed:
            role = Role.COUNTER if not leaf.shape and path[-1] in COUNTERS else Role.OBJECT
            return self._named(role, self.joined(path), -1)
        name, role = self.name_of(kept.parameter), self._role(at, kept)
        order, unknown = self.parameters.get(kept.parameter, -1), "" if self.parameters else _ALONE
        if role in (Role.MOMENT, Role.PADDING) or (role, name) in self._taken:
            role = role if role is Role.PADDING else Role.MOMENT
            own = f"{name}.{_KEYS.get(kept.field, kept.field).replace('.', '_')}"
            alone = kept.field == "trace" and (role, name) not in self._taken
            name = name if alone else self._free(role, own)
        return self._named(role, name, order, unknown)

    def _role(self, at: int, kept: Kept) -> Role:
        if self._is_placeholder(at, kept):
            return Role.PADDING
        # A moment of one odd shape among many that fit is a fault; where none fits, it isn't that moment.
        unlike = kept.node in self._of_other_form or (kept.node, kept.field) in self._of_other_shape
        return Role.MOMENT if unlike else _ROLES.get(kept.field, Role.MOMENT)

    def _free(self, role: Role, name: str) -> str:
        """A name that no other state of the parameter has: chains may hold two averages of one kind."""
        number, found = 1, name
        while (role, found) in self._taken:
            number += 1
            found = f"{name}_{number}"
        return found

    def _named(self, role: Role, name: str, order: int, undetermined: str = "") -> Meaning:
        self._taken.add((role, name))
        return Meaning(role, name, order, undetermined)

    def joined(self, path: Path) -> str:
        """A path as a name. Keys with dots are quoted where names would not tell paths apart without."""
        return ".".join(f"'{part}'" if self._quoted and "." in part else part for part in path)

    def name_of(self, parameter: Path) -> str:
        """The name of a parameter: below its tree, if there is one tree alone."""
        model = self._model_of(parameter)
        inside = len(self._models) == 1 and model is not None and len(parameter) > len(model)
        return self.joined(parameter[len(model or ()) :] if inside else parameter)


def _whole(rest: Path) -> Path:
    """A parameter's path without Linen's collection, which moments have where parameters have it."""
    return rest[1:] if len(rest) > 1 and rest[0] == "params" else rest


def _is_random(leaf: Leaf, path: Path) -> bool:
    """Whether a leaf is a key of a random number generator: JAX's own are two or four words, or a batch of such."""
    words = leaf.dtype.name == "uint32" and bool(leaf.shape) and leaf.shape[-1] in (2, 4)
    return leaf.is_key or (words and not _RANDOM.isdisjoint(path[-2:]))
