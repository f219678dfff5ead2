"""What is kept of one step: its files, what was measured of its pieces, and what was said of it.

Names of files are kept relative to the step's folder, so that a record is good wherever the run lies.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.ledger.contents import NOTHING, Contents, contents_of, places_of
from auditor.model.catalog import WITHHELD, Catalog, FileState, Role, Scalar
from auditor.model.finding import Judgement
from auditor.model.mesh import NO_MESH, Coordinate, Mesh
from auditor.model.observation import OBSERVED, Difference, FileChecksums, Observations, Read, Sketches
from auditor.model.pairing import Pairing, PairResult
from auditor.model.run import StepState

SCHEMA_VERSION = 2
NUM_HISTORY = 11
DIGEST_VERSION = 1
"""Of ``docs/digest.md``: lanes of another version are not compared."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file as it was when it was audited."""

    name: str
    """Below the step's folder."""
    num_bytes: int = 0
    identity: str = ""
    """What storage said to tell this content from another; empty where it says nothing."""
    weights: bool = False
    """Whether pieces lie in it."""
    state: FileState = FileState.PRESENT


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor, by which contents are found when the Catalog is gone."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    order: int = -1
    replicas: tuple[Coordinate, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptPair:
    """What was measured of one pairing."""

    pairing: Pairing
    results: tuple[PairResult, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured besides the columns of the pieces. Numbers of files and tensors are the Catalog's."""

    failures: Mapping[int, str] = field(default_factory=dict)
    broken: Mapping[int, str] = field(default_factory=dict)
    differences: Mapping[int, tuple[Difference, ...]] = field(default_factory=dict)
    pairs: tuple[KeptPair, ...] = ()
    checksums: Mapping[int, FileChecksums] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    """Second passes that were made: ``differences``, ``checksums``, ``digests``."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the audit said of the step, for the time when its files are gone."""

    state: StepState
    judgements: Mapping[str, Judgement]
    wholeness: Mapping[str, Judgement]
    level: str
    """The name of the level at which it was read."""
    tool: str
    """The version that judged."""
    choices: str
    """Digest of the choices that change a judgement."""
    opaque: Mapping[str, int] = field(default_factory=dict)
    mesh: Mesh = NO_MESH
    before: str = ""
    """The save by which its motion was judged (:func:`save_identity`); empty where there was none."""
    listing: str = ""
    """Digest of all files of which anything was read; empty where some of them may change without being listed."""
    absent: tuple[str, ...] = ()
    """What was looked for beside the step and wasn't there."""
    rates: tuple[tuple[float, ...], ...] = ()
    """The betas that this save and those before it record; an empty one where a group records none."""


@dataclass(frozen=True, slots=True)
class StepAccount:
    """The part of a record that is text."""

    schema_version: int
    digest_version: int
    step: int
    folder: str
    """What the step's folder is called."""
    format: str
    catalog: str
    """Digest of the Catalog: which pieces of which tensors lie where."""
    num_pieces: int
    files: tuple[KeptFile, ...]
    tensors: tuple[KeptTensor, ...]
    measured: Measured
    said: Said
    scalars: tuple[Scalar, ...] = ()
    num_contents: int = 0
    num_sketches: int = 0
    sequence: int = 0
    """How many other contents of the step were known when this one was audited."""
    lineage: tuple[tuple[int, int], ...] = ((0, 0),)
    """Branch and the first step saved in it, from the beginning of the run on."""
    root: str = ""
    """Digest of where the run lay when it was audited: two runs may have one name."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """All that is kept of one step."""

    account: StepAccount
    pieces: NDArray[np.void]
    """Rows of :data:`~auditor.model.observation.OBSERVED`, parallel to the Catalog's pieces."""
    places: NDArray[np.int64]
    """As :func:`~auditor.ledger.contents.places_of`."""
    contents: Contents = NOTHING
    history: NDArray[np.float64] = field(default_factory=lambda: np.zeros((NUM_HISTORY, 0)))
    """What this save and those before it said of every tensor, a column each
    (:meth:`~auditor.invariants.neighbours.Past.numbers`)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an audit wants to have measured of one step."""

    rows: NDArray[np.int64]
    pairings: tuple[Pairing, ...] = ()
    differences: bool = False
    checksums: bool = False
    digests: bool = False
    """Of files, for at-rest integrity."""

    @property
    def passes(self) -> tuple[str, ...]:
        """The second passes that are wanted, by name."""
        return tuple(name for name in ("differences", "checksums", "digests") if getattr(self, name))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step stands among those that were audited before."""

    folder: str
    """What the step's folder is called."""
    sequence: int = 0
    lineage: tuple[tuple[int, int], ...] = ((0, 0),)


def record_of(
    catalog: Catalog, observations: Observations, asked: Asked, said: Said, place: Place, history: NDArray[np.float64]
) -> StepRecord:  # fmt: skip
    """The record of a step that was just audited."""
    contents = contents_of(catalog, observations)
    account = _account(catalog, observations, asked, said, place.folder)
    account = replace(
        account, num_contents=len(contents), num_sketches=len(contents.sketches), sequence=place.sequence,
        lineage=place.lineage,
    )  # fmt: skip
    return StepRecord(account, observations.pieces, places_of(catalog), contents, history)


def _account(catalog: Catalog, observations: Observations, asked: Asked, said: Said, folder: str) -> StepAccount:
    holds = np.bincount(catalog.pieces.file, minlength=len(catalog.files)) if len(catalog.pieces) else np.zeros(1)
    files = tuple(
        KeptFile(catalog.within(file.name), file.num_bytes, file.identity, bool(holds[number : number + 1].any()),
                 file.state)
        for number, file in enumerate(catalog.files)
    )  # fmt: skip
    tensors = tuple(
        KeptTensor(what.name, what.role, what.dtype.name, what.shape, what.order, places)
        for what, places in zip(catalog.tensors, catalog.replicas, strict=True)
    )
    pairs = tuple(KeptPair(pairing, tuple(found)) for pairing, found in observations.pairs.items())
    differences = {number: tuple(found) for number, found in sorted(observations.differences.items())}
    measured = Measured(
        dict(sorted(observations.failures.items())), dict(sorted(observations.broken.items())), differences, pairs,
        dict(sorted(observations.checksums.items())), asked.passes,
    )  # fmt: skip

    def inside(path: str) -> str:
        return below_step(path, catalog.path)

    said = moved(replace(said, state=replace(said.state, path="")), inside)
    return StepAccount(
        SCHEMA_VERSION, DIGEST_VERSION, catalog.step, folder, catalog.format, catalog_digest(catalog),
        len(catalog.pieces), files, tensors, measured, said, moved(catalog.scalars, inside),
    )  # fmt: skip


def keepable(catalog: Catalog, observations: Observations) -> bool:
    """Whether what was measured can be relied on: nothing changed meanwhile, and storage refused nothing."""
    failed = bool((observations.pieces["read"] == Read.FAILED).any())
    return not (failed or observations.changed or any(file.state in WITHHELD for file in catalog.files))


def recalled(record: StepRecord, catalog: Catalog, asked: Asked) -> Observations | None:
    """What the record holds of what is asked for, as a pass over the weights would have measured it.

    None where it holds less, or is of another content or layout.
    """
    account = record.account
    if not is_of(account, catalog) or len(record.pieces) != len(catalog.pieces):
        return None
    wanted = np.zeros(len(catalog.pieces), bool)
    wanted[asked.rows] = True
    known = {kept.pairing: kept.results for kept in account.measured.pairs}
    missing = wanted & (record.pieces["read"] == Read.NOT_ASKED)
    if missing.any() or not known.keys() >= set(asked.pairings) or set(asked.passes) - set(account.measured.asked):
        return None
    pieces = record.pieces.copy()
    # At a lower level, or with fewer invariants, less would have been read: so that nothing else is said of it.
    pieces[~wanted] = np.zeros(1, OBSERVED)
    used = set(np.unique(catalog.pieces.file[wanted]).tolist())
    measured = account.measured
    return Observations(
        pieces,
        {number: text for number, text in measured.failures.items() if number in used},
        {row: text for row, text in measured.broken.items() if row < len(wanted) and wanted[row]},
        differences=dict(measured.differences) if asked.differences else {},
        pairs={pairing: known[pairing] for pairing in asked.pairings},
        checksums=dict(measured.checksums) if asked.checksums else {},
        sketches=_sketches(record.contents, np.unique(catalog.pieces.tensor[wanted])),
    )


def _sketches(contents: Contents, tensors: NDArray[np.int32]) -> Sketches:
    """The sketches of these tensors, as a pass makes them."""
    rows = np.flatnonzero((contents.sketch >= 0) & np.isin(contents.tensor, tensors))
    return Sketches(contents.tensor[rows], contents.replica[rows], contents.sketches[contents.sketch[rows]])


def is_of(account: StepAccount, catalog: Catalog) -> bool:
    """Whether a record is of this content: the same files, unchanged, and the same pieces in them."""
    known_digest = account.digest_version == DIGEST_VERSION and account.catalog == catalog_digest(catalog)
    return known_digest and has_files_of(account, catalog)


def has_files_of(account: StepAccount, catalog: Catalog) -> bool:
    """Whether a record is of the same files, unchanged, whatever is said to lie in them."""
    known = {file.name: file for file in account.files}
    for file in catalog.files:
        kept = known.get(catalog.within(file.name))
        if kept is None or (kept.num_bytes, kept.state) != (file.num_bytes, file.state):
            return False
        if file.state is FileState.PRESENT and (not file.identity or kept.identity != file.identity):
            return False
    return len(known) == len(catalog.files)


def files_digest(account: StepAccount) -> str:
    """The identity of a step: a digest of its files' names, sizes and identities."""
    return _files_digest((file.name, file.num_bytes, file.identity, file.state.name) for file in account.files)


def save_identity(catalog: Catalog) -> str:
    """A save's step, and the digest of its files that :func:`files_digest` gives for its record."""
    files = ((catalog.within(f.name), f.num_bytes, f.identity, f.state.name) for f in catalog.files)
    return f"{catalog.step} {_files_digest(files)}"


def _files_digest(files: Iterable[tuple[str, int, str, str]]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        found.update(repr(file).encode())
    return found.hexdigest()


def catalog_digest(catalog: Catalog) -> str:
    """Equal for Catalogs that say the same of which piece lies where, whatever the folder is called."""
    known = catalog.__dict__.get("_digest_for_ledger")
    if known is None:
        known = catalog.__dict__["_digest_for_ledger"] = _catalog_digest(catalog)
    return str(known)


def _catalog_digest(catalog: Catalog) -> str:
    found = hashlib.blake2b(digest_size=16)
    found.update(repr((catalog.step, catalog.format, catalog.mesh)).encode())
    for what, places in zip(catalog.tensors, catalog.replicas, strict=True):
        found.update(repr((what, places)).encode())
    found.update(repr([catalog.within(file.name) for file in catalog.files]).encode())
    pieces = catalog.pieces
    found.update(repr(pieces.coordinates).encode())
    for name in (*(name for name in pieces.COLUMNS if name != "key"), "pool"):
        found.update(np.ascontiguousarray(getattr(pieces, name)).tobytes())
    return found.hexdigest()


_PATHS = frozenset({
    ("Location", "file"), ("Location", "reference_file"), ("Violation", "explained_by"), ("StepState", "missing"),
    ("StepState", "cut_short"), ("StepState", "optimizer_files"), ("Scalar", "file"), ("Change", "changed"),
    ("Change", "rewritten"), ("Change", "lost"),
})  # fmt: skip
"""Fields of records that hold paths below the root that was opened."""
_ABOVE, _ITSELF = "../", "."


def below_step(path: str, step: str) -> str:
    """A path below the root as it is kept: told from the folder ``step``."""
    if not path or not step:
        return path
    if path == step:
        return _ITSELF
    inside = path.removeprefix(f"{step}/")
    beside = path.removeprefix(f"{posixpath.dirname(step)}/") if posixpath.dirname(step) else path
    return inside if inside != path else _ABOVE + beside


def below_root(kept: str, step: str) -> str:
    """What :func:`below_step` made of a path, told from the root again."""
    if kept == _ITSELF:
        return step
    if kept.startswith(_ABOVE):
        return posixpath.join(posixpath.dirname(step), kept.removeprefix(_ABOVE))
    return f"{step}/{kept}" if kept and step else kept


def moved(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every path in it changed."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        changed = {}
        for item in fields(value):
            before = getattr(value, item.name)
            if (kind, item.name) in _PATHS:
                after = change(before) if isinstance(before, str) else type(before)(map(change, before))
            else:
                after = moved(before, change)
            if after is not before:
                changed[item.name] = after
        return replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        return {key: moved(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and value and not isinstance(value[0], (str, int, float)):
        return tuple(moved(item, change) for item in value)
    return value
