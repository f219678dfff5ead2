"""Pairs for `compare`: a reference that is sound, and a candidate made to do harm; or the other way round."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.comparison.tree import bfloat16, write_step
from tests.hostile.making import SAFETENSORS, Input, entry, packed, safetensors_folder

PAIR = ("reference", "candidate")
NAN = bfloat16(np.full((8, 4), np.nan))


def pair(
    name: str, lie: str, candidate: Callable[[Path], object], code: int, says: str = "", *,
    reference: Callable[[Path], object] = safetensors_folder, file: str = "", turned: bool = False,
    options: tuple[str, ...] = (),
) -> Input:  # fmt: skip
    def build(folder: Path) -> None:
        for side, make in zip(PAIR, (reference, candidate), strict=True):
            (folder / side).mkdir()
            make(folder / side)

    paths = PAIR[::-1] if turned else PAIR
    return Input(f"compare: {name}", lie, "safetensors", build, code, says, file, "compare", paths, options)


def cut(folder: Path) -> None:
    path = safetensors_folder(folder)
    path.write_bytes(path.read_bytes()[:-100])


def saying(header: dict, data: bytes) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        safetensors_folder(folder).write_bytes(packed(header, data))

    return make


def tree(**tensors: np.ndarray) -> Callable[[Path], object]:
    return lambda folder: write_step(folder, 1, tensors)


def loop(folder: Path) -> None:
    safetensors_folder(folder)
    (folder / "again").symlink_to(folder)
    (folder / "back").symlink_to("..")


def nowhere(folder: Path) -> None:
    (folder / SAFETENSORS).symlink_to(folder / SAFETENSORS)


def no_ledger(folder: Path) -> None:
    (folder / "zarr.json").write_bytes(b'{"zarr_format": 3, "node_type": "group", "attributes": {"auditor_ledger": 1}}')
    (folder / "runs").write_bytes(bytes(range(191, 255)))


GRID = np.arange(32, dtype=np.float64).reshape(8, 4) + 1
OWN = {"a": np.ones((2, 2), np.float32), "b": np.arange(4, dtype=np.float32)}

COMPARISONS = [
    pair("candidate cut", "its end", cut, 3, "incomplete", file=SAFETENSORS),
    pair("reference cut", "its end", cut, 3, file=SAFETENSORS, turned=True),
    pair("NaN everywhere", "numbers", tree(w=NAN), 1, "finite on one side alone", reference=tree(w=bfloat16(GRID))),
    pair("NaN on both sides", "numbers", tree(w=NAN), 0, "equal", reference=tree(w=NAN)),
    pair("largest doubles", "squares", tree(w=GRID * -5e306), 1, "beyond", reference=tree(w=GRID * 5e306)),
    pair("smallest doubles", "squares", tree(w=GRID * -5e-324), 1, "beyond", reference=tree(w=GRID * 5e-324)),
    pair("zeros against numbers", "squares", tree(w=GRID), 1, "reference is zero", reference=tree(w=GRID * 0)),
    pair("no elements", "that there is anything", tree(w=GRID[:0], v=GRID), 0, "equal",
         reference=tree(w=GRID[:0], v=GRID)),
    pair("nothing but no elements", "that there is anything", tree(w=GRID[:0]), 4, "no tensor in common",
         reference=tree(w=GRID[:0])),
    pair("2^62 elements", "shape", saying({"w": entry((1 << 31, 1 << 31), 0, 16)}, bytes(16)), 3, file=SAFETENSORS),
    pair("complex", "numbers", tree(w=GRID * -2j), 1, "beyond", reference=tree(w=GRID * 1j)),
    pair("complex of 64 dims", "dims", tree(w=(GRID * 2j).reshape((1,) * 62 + (8, 4))), 3, "64 dims",
         reference=tree(w=(GRID * 1j).reshape((1,) * 62 + (8, 4)))),
    pair("integers one apart", "numbers", tree(w=GRID.astype(np.int64) + (1 << 60)), 1, "beyond",
         reference=tree(w=GRID.astype(np.int64) + (1 << 60) + 1)),
    pair("names that collide under a map", "names",
         saying({f"{before}w": entry(begin=8 * n, end=8 * n + 8)
                 for n, before in enumerate(("", "model.", "module.model.", "module."))}, bytes(range(32))), 1, "w",
         reference=saying({"w": entry()}, bytes(8))),
    pair("a rename onto another's name", "names", tree(**OWN), 1, "not in the candidate", reference=tree(**OWN),
         options=("--rename", "a=b")),
    pair("control characters in names", "names",
         saying({"\x1b[2J\u202e": entry()}, bytes(8)), 1, "not in the", reference=saying({"w": entry()}, bytes(8))),
    pair("no name in common", "names", tree(x=GRID), 1, "not in the candidate", reference=tree(w=GRID)),
    pair("links that lead back", "that there is an end", loop, 0, "equal"),
    pair("a link to itself", "that there is a file", nowhere, 4),
    pair("a folder", "that it is a checkpoint", lambda folder: None, 4),
    pair("a ledger that is none", "that it is a ledger", no_ledger, 4),
    pair("other shapes of one name", "shape", tree(w=GRID.T), 1, "8×4 against 4×8", reference=tree(w=GRID)),
]  # fmt: skip
