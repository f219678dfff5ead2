"""What a patrol remembers from one round to the next: small JSON objects beside the ledger's own.

Each is written whole after what it tells of was done. A patrol that is killed repeats at most one run's names and
headers: the ledger has its measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from auditor.containers.zarr_names import escape, unescape
from auditor.patrol.survey import Survey
from auditor.storage.store import ObjectMissingError, Store, base_name, read_bytes
from auditor.storage.writer import WriteError, Writer

MAX_BYTES = 64 << 20
FOLDER = "patrol"


@dataclass(slots=True)
class Known:
    """What is remembered of one run."""

    digest: str = ""
    """Of the listing that was audited; empty: the run must be looked at again."""
    choices: str = ""
    """Digest of the settings and the version of the tool."""
    exit_codes: list[int] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    """As last seen, each with its ``key``."""
    announced: list[dict[str, Any]] = field(default_factory=list)
    """Findings that the webhook was told of."""
    last_good_step: int | None = None
    unreached: bool = False
    """Whether a budget ended before it: it comes first."""


@dataclass(slots=True)
class Turn:
    """How far the reading again of old steps has come."""

    number: int = 0
    of: int = 0
    done: list[str] = field(default_factory=list)
    """Runs whose steps of this turn were read."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The objects below ``patrol/`` of a ledger. A disk that is full of them silences no finding: the round goes on."""

    store: Store
    writer: Writer
    share: str = "1-of-1"
    lost: list[str] = field(default_factory=list)
    """What was said where something could not be written."""

    def known(self, path: str) -> Known | None:
        """What is remembered of a run; None where there is nothing that can be used."""
        said = self._read(self._run(path))
        try:
            return Known(**said) if isinstance(said, dict) else None
        except TypeError:
            return None

    def remember(self, path: str, known: Known) -> None:
        """Write down what is known of a run."""
        self._write(self._run(path), asdict(known))

    def forget(self, path: str) -> None:
        """A run is gone."""
        self._remove(self._run(path))

    def runs(self) -> Iterator[str]:
        """Runs of which something is remembered."""
        try:
            for entry in self.store.list(f"{FOLDER}/runs"):
                if not entry.is_folder and entry.name.endswith(".json"):
                    yield unescape(base_name(entry.name).removesuffix(".json")).strip("/")
        except ObjectMissingError:
            return

    def turn(self) -> Turn:
        """How far reading again has come."""
        said = self._read(f"{FOLDER}/turn-{self.share}.json")
        try:
            return Turn(**said) if isinstance(said, dict) else Turn()
        except TypeError:
            return Turn()

    def remember_turn(self, turn: Turn) -> None:
        """Write down how far reading again has come."""
        self._write(f"{FOLDER}/turn-{self.share}.json", asdict(turn))

    def save_survey(self, survey: Survey, now: float) -> None:
        """Write down how far the listing has come."""
        self._write(self._survey(), {"at": now, **survey.to_json()})

    def survey(self, store: Store, now: float, max_seconds: float) -> Survey:
        """A survey that goes on where one stopped at most ``max_seconds`` ago; else a new one."""
        said = self._read(self._survey())
        try:
            if isinstance(said, dict) and 0 <= now - said["at"] <= max_seconds:
                return Survey.from_json(store, said)
        except (TypeError, KeyError, ValueError, AttributeError):
            pass
        return Survey(store)

    def forget_survey(self) -> None:
        """The listing is complete."""
        self._remove(self._survey())

    def _survey(self) -> str:
        return f"{FOLDER}/survey-{self.share}.json"

    def _run(self, path: str) -> str:
        return f"{FOLDER}/runs/{escape(f'/{path}')}.json"

    def _read(self, name: str) -> Any:
        try:
            with self.store.open(name) as handle:
                size = handle.entry.num_bytes
                return json.loads(read_bytes(handle, 0, size)) if size <= MAX_BYTES else None
        except ObjectMissingError:
            return None
        except (ValueError, RecursionError):
            # Damaged: what it said is found out anew.
            return None

    def _write(self, name: str, said: Any) -> None:
        try:
            self.writer.write(name, json.dumps(said, separators=(",", ":"), sort_keys=True).encode())
        except WriteError as error:
            self.lost.append(str(error))

    def _remove(self, name: str) -> None:
        try:
            self.writer.remove(name)
        except WriteError as error:
            self.lost.append(str(error))
