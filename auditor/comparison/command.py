"""What a user can choose for one comparison, from flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from auditor.comparison.maps import MAPS
from auditor.comparison.matching import EVERYTHING, Filter
from auditor.errors import UsageError
from auditor.model.dtype import DTYPES, Kind
from auditor.model.name_map import NameRule
from auditor.settings import Settings


@dataclass(frozen=True, slots=True)
class Choices:
    """All choices of one comparison besides those of an audit."""

    chosen: Filter = EVERYTHING
    rename: tuple[NameRule, ...] = ()
    """How the candidate's tensors are called in the reference."""
    map: str = "auto"
    """A built-in map by name, ``auto``, or ``none``."""
    exact: bool = False
    resume: bool = False
    """Save, load, save: every role, counter and recorded number must be equal."""
    calibrate: tuple[str, ...] = ()
    compute: str = ""
    """The dtype of the computation; empty: the lowest in which weights are kept."""
    num_terms: int = 0
    """Terms of the longest sum that no shape shows: tokens a batch."""
    learning_rate: float | None = None
    power: bool = False


def choices_of(
    settings: Settings, *, only: Sequence[str] = (), ignore: Sequence[str] = (), rename: Sequence[str] = (),
    map: str = "auto", exact: bool = False, resume: bool = False, calibrate: Sequence[str] = (), compute: str = "",
    tokens: int = 0, learning_rate: float | None = None, power: bool = False,
) -> Choices:  # fmt: skip
    """Choices from what flags say; ``[[map]]`` tables of the configuration count as renames.

    Raises:
        UsageError: a rename, map or dtype that there isn't.
    """
    if map not in ("auto", "none", *MAPS):
        raise UsageError(f"--map {map}: none of auto|none|{'|'.join(MAPS)}")
    if compute and (compute not in DTYPES or DTYPES[compute].kind is not Kind.FLOAT):
        raise UsageError(f"--compute-dtype {compute}: no float dtype is called so")
    rules = tuple(rule for text in rename for rule in [_rename(text)])
    chosen = Filter(tuple(only), tuple(ignore))
    return Choices(
        chosen, rules + settings.name_map, map, exact or resume, resume, tuple(calibrate), compute, tokens,
        learning_rate, power,
    )  # fmt: skip


def _rename(text: str) -> NameRule:
    source, sign, target = text.partition("=")
    rule = NameRule(source, (target,))
    if not sign or rule.flaw():
        raise UsageError(f"--rename {text}: write FROM=TO, the candidate's name first{_why(rule)}")
    return rule


def _why(rule: NameRule) -> str:
    flaw = rule.flaw()
    return f"; {flaw}" if flaw else ""
