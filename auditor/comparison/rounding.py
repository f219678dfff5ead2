"""How far two runs that must agree may be apart by round-off alone. Pure; the derivation is docs/rounding-bound.md.

Both sides began with equal weights and saw equal batches. Their gradients differ by rounding; moments are averages of
gradients; weights follow from moments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from auditor.comparison.holding import Holding
from auditor.comparison.matching import Pair, module_of
from auditor.invariants.related import layer
from auditor.model.catalog import Role
from auditor.model.dtype import DTYPES, DType, Kind

ROUNDINGS = 5.0
"""Roundings to the dtype of the computation that one module adds: k of the bound that TTrace's users state."""
GROWTH = 1.03
"""Largest factor by which one layer passes an error on to the layer below it, C of the same bound."""
CONFIDENCE = 4.0
"""λ of the probabilistic bound on a sum of n terms, λ√n·u (Higham and Mary 2019): holds with probability 0.9993."""
SUSPICIOUS = 4.0
"""Up to this multiple of the threshold a difference is suspicious: constants of other models are known no better."""
SAYS_NOTHING = 0.5
"""A threshold above so much of what tensors that have nothing to do with each other would show tells nothing."""
IN_COMMON = 1.2
"""Times their spread by which weights differ that have nothing in common: √2, where both spread alike."""
JUMPS = 2.0
"""Up to this multiple of what tokens that change their expert may do, a difference is suspicious."""
DENSE = 0.5
"""Of that, what reaches tensors that every token goes through."""
SELDOM = 0.01
"""Tokens that change their expert in a step: where fewer are expected none did."""
KERNEL_DIMS = 4
"""Of a convolution over images; matrices of experts and of stacked layers have three."""
UNSHOWN = "a convolution's sums run over pixels, which show in no shape: --tokens states images times pixels"
_ROUTED = re.compile(r"experts?[._]|router|moe|block_sparse", re.IGNORECASE)
"""In names of experts, and of what chooses them."""
KINKED = (
    "gradients through convolutions and batch statistics jump where an activation lies as near to a kink (ReLU) as "
    "rounding: reruns of the reference tell how far (--calibrate)"
)
UNSTATED = 2**20
"""Terms that sums over the tokens of a batch may have where ``--tokens`` does not state how many there are."""
TOKENS = "sums over up to 2^20 tokens a batch may round so far: --tokens states how many there are"
NARROWLY = 0.45
"""Of a bias or norm whose gradient is kept in bfloat16; a square of as much as 1.4 times is 1.75 times as far. Healthy
pairs measured: up to 0.43. What is doubled, or lacks a half, is farther off."""
SUMMED = "biases and norms are summed in the gradients' own dtype: calibrate with reruns of the reference"
NO_BOUND = "how far rounding leads this state of an optimizer apart is not derived: --calibrate"
_NO_AVERAGES = ("step_size", "eta", "mu", "ax", "acc_delta", "mu_product")
"""State that is no average of gradients or of their squares, by the last part of its name."""
_UNKNOWN = "optimizer.state."
"""Before the number of a parameter of which no name is known."""
ACCUMULATOR = "float32"
"""In which matrix products are summed, whatever the dtype of their factors."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Up to which relative difference something is rounding."""

    relative: float
    how: str
    """The derivation with its numbers."""
    kind: str
    """``derived`` or ``calibrated``."""
    num_runs: int = 0
    """Runs behind a calibrated one."""
    suspicious: float = SUSPICIOUS
    """The multiple up to which a difference is suspicious, and beyond rounding above it."""
    unrelated: float = 1.0
    """Relative difference of tensors that have nothing to do with each other, or of which one was not trained."""
    stored: bool = False
    """Whether it is that of one set of weights, stored twice: of weights that were trained apart it tells nothing."""

    unstated: float = 0.0
    """Up to which difference it may be rounding in longer sums than those that are known of."""

    @property
    def vague(self) -> bool:
        """Whether rounding may be so large that a difference within it tells nothing."""
        return self.relative > SAYS_NOTHING * self.unrelated

    @property
    def beyond(self) -> float:
        """From here on a difference is beyond rounding. What unrelated tensors show is no rounding, either."""
        if self.stored:
            return max(self.relative, IN_COMMON * self.unrelated)
        most = max(self.relative * self.suspicious, self.unstated)
        return most if self.vague else min(most, self.unrelated)


@dataclass(frozen=True, slots=True)
class Motion:
    """What one step of the optimizer does to a weight. Lengths of the whole tensor, in learning rates."""

    apart: float
    """By which rounding may lead two runs apart."""
    moved: float
    """By which it moves the weight."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the derived bound needs to know of both runs."""

    compute: DType
    """The lowest dtype in which either side keeps its weights, or the stated one."""
    num_steps: float
    """Optimizer steps since both were equal."""
    layers: tuple[str, ...]
    """Numbers of layers in model order."""
    levels: Mapping[tuple[Role, str, bool], float]
    """Role and layer (module, outside of layers), and whether of matrices alone, to the root mean square of the
    reference's elements."""
    num_terms: int = 0
    """Terms of the longest sum that no shape shows (tokens a batch), where they are stated."""
    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    """Of the optimizer; None where it is not recorded."""
    has_masters: bool = False
    counted: float = 1.0
    """The reference's own count of optimizer steps."""
    trained: bool = False
    """Whether both were seen equal in a step before."""
    whole: bool = False
    """Whether an update is made of whole matrices (Muon): what rounding does to one element reaches all."""
    routed: bool = False
    """Whether routers send tokens to experts."""
    unshown: bool = False
    """Whether sums run over pixels, of which there may be any number, and ``num_terms`` is not stated."""
    kinked: bool = False
    """Whether it normalises convolutions by statistics of the batch."""
    narrow: DType | None = None
    """The dtype of gradients, where that is the weights' own and narrower than float32."""

    def depth(self, name: str) -> int:
        """Layers that an error passes on its way back from the loss to this one, itself included."""
        number = layer(name)
        if number in self.layers:
            return len(self.layers) - self.layers.index(number)
        return len(self.layers) + 1

    def gradient(self, name: str, shape: Sequence[int], num_terms: int = 0) -> tuple[float, str]:
        """The expected relative round-off of a gradient, and its derivation; ``num_terms``: instead of those stated."""
        own, sums = self.compute.epsilon, DTYPES[ACCUMULATOR].epsilon / 2
        terms = max([*shape, num_terms or self.num_terms, 1])
        grown = GROWTH ** self.depth(name)
        found = (ROUNDINGS * own + CONFIDENCE * math.sqrt(terms) * sums) * grown
        text = (
            f"({ROUNDINGS:g}·2^{math.log2(own):g} + {CONFIDENCE:g}·√{terms}·2^{math.log2(sums):g})"
            f"·{GROWTH:g}^{self.depth(name)}"
        )
        return found, text

    def jump(self, name: str, share: float) -> float:
        """How far a gradient may jump where tokens change their expert: a choice of the best is not continuous.

        A token does so where its scores are nearer to each other than they are rounded. ``share``: the round-off, which
        that part of the tokens is taken to be. Their gradients are others then, so the sum over tokens changes by the
        root of their part. With the number of tokens known, none is expected where the part is far below one token.
        """
        if not self.routed or (self.num_terms and share * self.num_terms * len(self.layers) < SELDOM):
            return 0.0
        return math.sqrt(share) * (1.0 if _ROUTED.search(name) else DENSE)

    def floor(self, role: Role, name: str, shape: Sequence[int]) -> float:
        """Length that a tensor of this shape has where its elements are as large as its layer's.

        A matrix is held against matrices: where a layer's branches are scaled by a small vector (LayerScale), that
        vector's own gradient is larger by its inverse, and no sum of which theirs are a rest.
        """
        return self.levels.get((role, _place(name), len(shape) > 1), 0.0) * math.sqrt(math.prod(shape))

    def narrowly(self, pair: Pair, shape: Sequence[int]) -> float:
        """Up to which part of a bias or norm it may be rounding where gradients are kept in few bits; 0 elsewhere.

        They are sums over tokens by no matrix product: kernels, and microbatches one after the other, add them up in
        the gradients' own dtype.
        """
        if self.narrow is None or len(shape) > 1 or pair.role is Role.BUFFER:
            return 0.0
        return NARROWLY * (1.75 if pair.role is Role.SECOND_MOMENT else 1.0)

    def longer(self, pair: Pair, shape: Sequence[int]) -> str:
        """Why a moment may be farther apart than its threshold, and what would tell."""
        return SUMMED if self.narrowly(pair, shape) else TOKENS

    def rounds(self, pair: Pair, shape: Sequence[int], largest: float) -> bool:
        """Whether elements of a moment up to ``largest`` are what rounding makes of zero beside its layer's."""
        floor = self.floor(pair.role, pair.name, shape) / math.sqrt(max(1, math.prod(shape)))
        return largest <= self.gradient(pair.name, shape)[0] * floor


def model_of(
    reference: Holding, candidate: Holding, pairs: Sequence[Pair], num_steps: float, *,
    compute: str = "", num_terms: int = 0, learning_rate: float | None = None, trained: bool = False,
) -> Model:  # fmt: skip
    """What both sides record of how they computed."""
    weights = [(reference, p.reference) for p in pairs if p.role is Role.PARAMETER and p.reference is not None]
    weights += [(candidate, p.candidate) for p in pairs if p.role is Role.PARAMETER and p.candidate is not None]
    dtypes = [side.tensors[number].dtype for side, number in weights]
    floats = [dtype for dtype in dtypes if dtype.kind is Kind.FLOAT and dtype.bits >= 16]
    lowest = min(floats, key=lambda dtype: dtype.mantissa_bits, default=DTYPES["float32"])
    names = [pair.name for pair in sorted(pairs, key=lambda pair: pair.order)]
    layers = tuple(dict.fromkeys(number for name in names if (number := layer(name)) != name))
    rates = [rate for rate in _rates(reference) if rate > 0]
    masters = any(tensor.role is Role.MASTER for tensor in reference.tensors)
    return Model(
        DTYPES[compute] if compute else lowest, num_steps, layers, _levels(reference), num_terms,
        learning_rate or max(rates, default=None), _betas(reference), _epsilon(reference), masters,
        counted_steps(reference) or num_steps, trained, _whole(reference), any(map(_ROUTED.search, names)),
        not num_terms and _convolves(reference), _convolves(reference) and _normalises(reference),
        lowest if lowest.bits < 32 and not masters else None,
    )  # fmt: skip


def _rates(holding: Holding) -> list[float]:
    found = [group.hyperparameters.get(name) for group in holding.groups for name in ("lr", "initial_lr", "max_lr")]
    return [float(rate) for rate in found if isinstance(rate, (int, float)) and math.isfinite(rate)]


def _betas(holding: Holding) -> tuple[float, float] | None:
    for group in holding.groups:
        betas = group.hyperparameters.get("betas")
        if isinstance(betas, tuple) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas):
            return betas[0], betas[1]
    return None


def _whole(holding: Holding) -> bool:
    return any("muon" in group.optimizer or "ns_steps" in group.hyperparameters for group in holding.groups)


def _convolves(holding: Holding) -> bool:
    """Whether most matrices are kernels of convolutions. A transformer may have one, for its patches."""
    dims = [len(tensor.shape) for tensor in holding.tensors if tensor.role is Role.PARAMETER and len(tensor.shape) > 1]
    return 2 * sum(count >= KERNEL_DIMS for count in dims) > len(dims)


def _normalises(holding: Holding) -> bool:
    """Whether a module keeps a running variance of the batch."""
    return any(tensor.role is Role.BUFFER and tensor.name.endswith("running_var") for tensor in holding.tensors)


def _epsilon(holding: Holding) -> float | None:
    """Of Adam; None where it is recorded of an optimizer that steps otherwise (RAdam, as torch records it)."""
    found = [
        group.hyperparameters.get("eps") for group in holding.groups
        if not {"decoupled_weight_decay"} <= group.hyperparameters.keys()
        or {"amsgrad", "momentum_decay"} & group.hyperparameters.keys()
    ]  # fmt: skip
    return next((float(eps) for eps in found if isinstance(eps, (int, float)) and 0 <= eps < 1), None)


def counted_steps(holding: Holding) -> float:
    """The largest count of optimizer steps that a side records; 0 where it records none."""
    counts = [scalar.value for scalar in holding.scalars if scalar.tensor and math.isfinite(scalar.value)]
    own = [group.step for group in holding.groups if group.step is not None]
    counts += [step for step in own if math.isfinite(step)]
    return float(max([0.0, *counts]))


def _place(name: str) -> str:
    """The layer of a tensor; where layers have no numbers, its module (of a bias, that of its weight).

    Of state whose weight is not known all lies in one.
    """
    if name.startswith(_UNKNOWN):
        return _UNKNOWN
    number = layer(name)
    return number if number != name else module_of(name) or name


def _levels(holding: Holding) -> dict[tuple[Role, str, bool], float]:
    """The root mean square over all elements of one role in one layer or module (False), and over its matrices'."""
    squares: dict[tuple[Role, str, bool], list[float]] = {}
    for number, tensor in enumerate(holding.tensors):
        for matrices in (False, True) if len(tensor.shape) > 1 else (False,):
            total = squares.setdefault((tensor.role, _place(tensor.name), matrices), [0.0, 0.0])
            total[0] += holding.size(number) * holding.size(number)
            total[1] += tensor.num_elements
    return {
        key: math.sqrt(square / count) for key, (square, count) in squares.items() if 0 < square < math.inf and count
    }


def of_moment(model: Model, pair: Pair, dtype: DType, shape: Sequence[int], size: float) -> Threshold | str:
    """The threshold of a moment (or a buffer), or why there is none.

    ``dtype``: the narrower in which it is stored; ``size``: length of the reference's tensor. A tensor whose gradient
    is far smaller than those around it is a difference of larger numbers (the bias of attention's keys is the plainest
    case: its gradient is zero but for rounding): its round-off is theirs.
    """
    if model.unshown:
        return UNSHOWN
    if model.kinked and pair.role is not Role.BUFFER:
        return KINKED
    kind = pair.name.rpartition(".")[2] if pair.role is Role.MOMENT else ""
    if kind in _NO_AVERAGES or (kind == "sum" and model.num_steps > 1):
        return NO_BOUND
    if model.whole and model.num_steps > 1:
        return (
            "updates are made of whole matrices: how far weights, and gradients after them, may be apart is not derived"
        )
    share, text = model.gradient(pair.name, shape)
    is_known = model.num_terms or pair.role is Role.BUFFER
    longer = 0.0 if is_known else model.gradient(pair.name, shape, UNSTATED)[0] / share
    jump = model.jump(pair.name, share)
    if pair.role is Role.SECOND_MOMENT:
        share, jump, text = 2 * share, 2 * jump, f"2·{text}"
    if dtype.mantissa_bits < DTYPES[ACCUMULATOR].mantissa_bits:
        share, text = share + dtype.epsilon, f"({text} + 2^-{dtype.mantissa_bits} as stored)"
    if model.num_steps > 1:
        share, text = model.num_steps * share, f"{model.num_steps:g} steps·{text}"
    floor = model.floor(pair.role, pair.name, shape)
    if not size:
        return "the reference is zero"
    if floor > size:
        share, text = share * floor / size, f"{text}·{floor / size:.3g} (small beside its layer)"
    if not jump:
        return Threshold(share, text, "derived", unstated=max(longer * share, model.narrowly(pair, shape)))
    beyond = SUSPICIOUS * share + JUMPS * jump
    text = f"{text} + {jump:.2g} (tokens that change their expert)"
    return Threshold(share + jump, text, "derived", suspicious=beyond / (share + jump))


def uncertainty(
    model: Model, pair: Pair, shape: Sequence[int], moment: float, calibrated: Threshold | None = None
) -> float:
    """Round-off of one element of the gradient, an absolute number.

    ``moment``: length of the reference's first moment of the parameter; ``calibrated``: what reruns tell of it.
    """
    first = model.betas[0] if model.betas else 0.9
    if calibrated is None:
        share, _ = model.gradient(pair.name, shape)
        size = max(moment, model.floor(Role.FIRST_MOMENT, pair.name, shape))
    else:
        share, size = calibrated.relative, moment
    correction = 1 - math.pow(first, max(1.0, model.counted))
    return share * size / math.sqrt(max(1, math.prod(shape))) / correction


def of_weight(model: Model, dtype: DType, size: float, spread: float, motion: Motion) -> Threshold | str:
    """The threshold of a weight or master that was trained apart, or why there is none.

    ``size``: length of the reference's tensor; ``spread``: by how much of that unrelated weights of the kind differ.
    Weights that were trained on other batches from the same beginning are led apart at least as far as a walk of as
    many steps at random goes: rounding that may be of that size is told from nothing.
    """
    own = dtype.epsilon
    times = 1.0 if model.has_masters and dtype.bits < 32 else max(1.0, model.num_steps)
    stored, text = own * times, f"{times:g}·2^{math.log2(own):g}"
    if not size:
        return "the reference is zero"
    if model.learning_rate is None:
        return "no learning rate is recorded, so it is not known how far a step leads apart: --learning-rate states it"
    if model.unshown or model.kinked:
        return UNSHOWN if model.unshown else KINKED
    steps = max(1.0, model.num_steps)
    apart = steps * model.learning_rate * motion.apart / size
    walked = math.sqrt(steps) * model.learning_rate * motion.moved / size
    how = f"{text} + {steps:g}·{model.learning_rate:g}·{motion.apart / size:.3g}"
    return Threshold(stored + apart, how, "derived", unrelated=min(spread, walked))
