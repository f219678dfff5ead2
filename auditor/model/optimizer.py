"""What a checkpoint records of its optimizer besides tensors; which parameters are tied, which stored once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from auditor.model.mesh import EVERYWHERE, Coordinate

Hyperparameter = float | bool | str | None | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One parameter group of an optimizer, as one file records it."""

    number: int
    file: str
    coordinate: Coordinate = EVERYWHERE
    optimizer: str = ""
    """Class of the optimizer where it is recorded, lower case (``adamw``); empty where it is not."""
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)
    """By torch's names: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``amsgrad``, ``maximize``, ``initial_lr`` …"""
    parameters: tuple[str, ...] | None = None
    """Names of the tensors handed to the group; None where the files don't say which they are."""
    step: float | None = None
    """The group's own count of optimizer steps, where it keeps one."""
    from_state: bool = False
    """Whether its parameters are known by the state that is kept for them, and by nothing else."""
    of_model: str = ""
    """Which model's it is, where several were saved together."""
    schedule: Mapping[str, Hyperparameter] = field(default_factory=dict)
    """What its schedule of rates records, by torch's names, and ``base_lr``; empty where the form is not known."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that are one tensor in the model."""

    names: tuple[str, ...]
    """The one that is stored in any case first (the embedding), then its other users."""
    source: str
    """What says so: ``config.json: tie_word_embeddings``, ``one storage in model.pt`` …"""


@dataclass(frozen=True, slots=True)
class Export:
    """A parameter (or its state) that is stored once more: in a file made from the weights, masters or moments."""

    tensor: str
    """Name of the tensor that is the copy; empty where the export lacks the parameter."""
    source: str
    """Name of what it was made from."""
    file: str
    """Path below the root of the file or folder that holds the copy."""
    doubtful: bool = False
    """Whether the export may be of another step: nothing in it says of which it is."""


def parameter_of(moment: str) -> str:
    """The parameter whose moment has this name of its own, with the place whose own both are.

    >>> parameter_of("head.weight.square_avg@dp=1")
    'head.weight@dp=1'
    """
    whole, at, place = moment.partition("@")
    return f"{whole.rpartition('.')[0]}{at}{place}"
