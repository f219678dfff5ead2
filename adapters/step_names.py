"""Names in which somebody put a step: ``model_10.pt``, ``epoch=1-step=100.ckpt``, a folder ``step_10``.

No library writes these names, so they are read as a person would: a number behind a word for steps counts steps; else
one behind a word for epochs counts epochs; else the last one that stands by itself counts saves. Names that number
parts of one save (ranks, layers, ``-00001-of-00003``) tell no step, nor do those of formats and versions (``zarr3``).
Source of Lightning's form: ``lightning/pytorch/callbacks/model_checkpoint.py`` (``{epoch}-{step}``, ``name=value``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

TORCH_SUFFIXES = (".pth.tar", ".pt.tar", ".pt", ".pth", ".ckpt", ".chkpt", ".bin", ".th")
"""How files of ``torch.save`` are called."""
STATE_SUFFIXES = (".msgpack", ".flax", ".npz")
"""How files of JAX's states are called."""
SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", *STATE_SUFFIXES)

FOREIGN = re.compile(
    r".*_(?:model|optim)_states\.pt|model_optim_rng\.pt|distrib_optim\.pt|(?:common|fp32|exp_avg|exp_avg_sq)\.pt"
    r"|\.metadata|__\d+_\d+\.distcp|.*pytorch_model.*\.bin|adapter_model\.bin|training_args\.bin"
)
"""Files of other frameworks: where they lie, files beside them are theirs."""

_NUMBER = re.compile(r"(?P<word>[A-Za-z]*)(?P<gap>[-_=. ]?)(?P<number>\d+(?:\.\d+)?)", re.A)
_STEPS = frozenset(
    {"step", "steps", "globalstep", "iter", "iters", "iteration", "iterations", "it", "update", "updates", "ba"}
)
"""Composer counts batches: ``ep0-ba10-rank0.pt``."""
_EPOCHS = frozenset({"epoch", "epochs", "ep"})
_CHANGING = _STEPS | _EPOCHS | {"checkpoint"}
"""Numbers behind these are others in every save; fairseq's ``checkpoint_<epoch>_<update>.pt`` has two."""
_SAVES = frozenset({"model", "ckpt", "checkpoint", "chkpt", "net", "weights", "state", "snapshot", "save", "params"})
_PARTS = frozenset({
    "rank", "layer", "shard", "part", "of", "expert", "stage", "chunk", "worker", "gpu", "node", "device",
    "consolidated", "tp", "pp", "dp", "mp",
})  # fmt: skip
_IDENTITIES = frozenset({"v", "version", "seed", "fold", "run", "exp", "split", "member", "client", "trial", "lr"})
"""What these number are runs: they never count saves."""
_FORMATS = frozenset(
    {"zarr", "orbax", "ocdbt", "npz", "bf", "fp", "float", "bfloat", "int", "uint", "mp", "gpt", "llama"}
)
"""What digits behind these, without a gap, tell is a format, a dtype or a model."""
_METRICS = frozenset({"checkpoint", "ckpt"}) | _STEPS | _EPOCHS
"""Behind these Flax's ``save_checkpoint`` puts any number (``checkpoint_0.4``)."""
_LIKELY = re.compile(r"(?:^|[^a-z])(?:model|ckpt|checkpoint|chkpt|weights|snapshot|best|last|latest|final)(?:[^a-z]|$)")


_OPTIMIZERS = re.compile(r"opt(?:s|im|imizer|imizers|imiser|_state)?(?=[^a-z]|[A-Z]|$)|(?:^|[^a-z])adamw?(?:[^a-z]|$)")


@dataclass(frozen=True, slots=True)
class StepName:
    """What a name tells of the save that it is of."""

    series: str
    """The name without what changes from save to save: equal for the saves of one run."""
    number: int | None
    """None where names of a series differ in a number that counts nothing (``checkpoint_0.4``)."""
    of_epoch: bool = False
    """Whether it counts epochs."""


def stem(name: str) -> str:
    """A file's name without its suffix."""
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.endswith(suffix)), name)


def is_part(name: str) -> bool:
    """Whether a name numbers parts of one save."""
    return any(found["word"].lower() in _PARTS for found in _NUMBER.finditer(stem(name)))


def is_likely(name: str) -> bool:
    """Whether a file that can't be looked into is called as checkpoints are."""
    return _LIKELY.search(name.lower()) is not None


def called_as_optimizers(name: str) -> bool:
    """Whether a file that can't be looked into is called as an optimizer's state is."""
    return _OPTIMIZERS.search(name[:1].lower() + name[1:]) is not None


def step_name(name: str, *, strict: bool = False) -> StepName | None:
    """The step in a file's or folder's name, None where it tells none.

    ``strict``: where it counts nothing that has a name, it must be behind a word for checkpoints or be the whole name:
    folders are numbered for many reasons.

    >>> step_name("epoch=1-step=100.ckpt")
    StepName(series='epoch=#-step=#.ckpt', number=100, of_epoch=False)
    >>> step_name("gpt2_5.pt"), step_name("resnet50.pt"), step_name("model-00001-of-00003.safetensors")
    (StepName(series='gpt2_#.pt', number=5, of_epoch=False), None, None)
    >>> step_name("step_10", strict=True).number, step_name("exp_10", strict=True), step_name("10", strict=True).number
    (10, None, 10)
    >>> step_name("checkpoint_0.4"), step_name("checkpoint_4.0").number
    (StepName(series='checkpoint_#', number=None, of_epoch=False), 4)
    """
    body = stem(name)
    found = list(_NUMBER.finditer(body))
    words = [item["word"].lower() for item in found]
    if _PARTS.intersection(words):
        return None
    whole = [at for at, item in enumerate(found) if len(item["number"]) < 16 and "." not in item["number"]]
    at, of_epoch = _counting(found, words, whole, strict=strict)
    number = int(found[at]["number"]) if at >= 0 else None
    if at < 0 and found and not strict and words[-1] in _METRICS and found[-1].end() == len(body):
        at, (integer, _, rest) = len(found) - 1, found[-1]["number"].partition(".")
        number = int(integer) if len(integer) < 16 and not rest.strip("0") else None
    if at < 0:
        return None
    changing = {at} | {
        n for n, item in enumerate(found)
        if item["gap"] == "=" or words[n] in _CHANGING or ("." in item["number"] and words[n] not in _IDENTITIES)
    }  # fmt: skip
    series = body
    for n in sorted(changing, reverse=True):
        series = f"{series[: found[n].start('number')]}#{series[found[n].end() :]}"
    return StepName(series + name[len(body) :], number, of_epoch)


def last_number(name: str) -> int | None:
    """The number at the end of a folder's name, whatever word it follows: for libraries that put steps there.

    >>> last_number("sweep_10"), last_number("run10"), last_number("arrays_zarr3"), last_number("10.bak")
    (10, 10, None, None)
    """
    found = [item for item in _NUMBER.finditer(name) if item.end() == len(name) and len(item["number"]) < 16]
    if not found or "." in found[0]["number"]:
        return None
    of_format = found[0]["word"].lower() in _FORMATS | {"v"} and not found[0]["gap"]
    return None if of_format else int(found[0]["number"])


def _counting(
    found: Sequence[re.Match[str]], words: Sequence[str], whole: Sequence[int], *, strict: bool
) -> tuple[int, bool]:
    """Which of the numbers counts saves, -1 for none; and whether it counts epochs."""
    for counted, of_epoch in ((_STEPS, False), (_EPOCHS, True)):
        if named := [at for at in whole if words[at] in counted]:
            return named[-1], of_epoch
    for at in reversed(whole):
        word, glued = words[at], bool(words[at]) and not found[at]["gap"]
        alone = not word and len(found) == 1 and found[at].start("number") == 0
        if word in _SAVES or (alone if strict else not (glued or word in _IDENTITIES)):
            return at, False
    return -1, False
