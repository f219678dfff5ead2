"""What is known of a whole step, told of some of its tensors: they and their pieces are numbered anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from auditor.ledger.record import Asked
from auditor.model.catalog import Catalog
from auditor.model.observation import Observations
from auditor.model.pairing import Pairing


def among(full: Catalog, chosen: Sequence[int], asked: Asked) -> Asked:
    """What is asked of the ``chosen`` tensors, in the numbers of the whole Catalog."""
    pairings = tuple(_renumbered(pairing, chosen) for pairing in asked.pairings)
    return replace(asked, rows=_rows(full, chosen)[asked.rows], pairings=pairings, differences=False)


def of_chosen(full: Catalog, chosen: Sequence[int], seen: Observations) -> Observations:
    """What :func:`among` asked for, in the numbers of the Catalog of the ``chosen`` tensors; no differences."""
    rows = _rows(full, chosen)
    place = {row: number for number, row in enumerate(rows.tolist())}
    back = {number: at for at, number in enumerate(chosen)}
    return replace(
        seen, pieces=seen.pieces[rows], sketches=None,
        broken={place[row]: text for row, text in seen.broken.items() if row in place},
        pairs={_renumbered(pairing, back): found for pairing, found in seen.pairs.items()},
    )  # fmt: skip


def _rows(full: Catalog, chosen: Sequence[int]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.flatnonzero(np.isin(full.pieces.tensor, chosen))
    return found


def _renumbered(pairing: Pairing, numbers: Sequence[int] | dict[int, int]) -> Pairing:
    return replace(pairing, left=numbers[pairing.left], right=numbers[pairing.right])
