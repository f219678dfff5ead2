"""Parts of a witness handed to rank 0 through the job's key-value store: for ranks that write to disks of their own.

Every rank writes its part beside its step in any case. What it also puts into the store rank 0 fetches when the step is
committed, within a time for all ranks together: a rank that died is left out, and holds nobody up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from auditor.hooks.log import LOG

MAX_BYTES = 32 << 20
"""Of one part. Stores keep all of it in one process's memory."""
SECONDS = 30.0
"""How long rank 0 waits for the parts of all ranks of a step."""


class KeyValueStore(Protocol):
    """What the stores of torch and JAX have in common."""

    def put(self, key: str, content: bytes) -> None:
        """Set a key; waits for nobody."""

    def take(self, key: str, seconds: float) -> bytes | None:
        """The content of a key, which is removed; None where it was not set within so long."""

    def drop(self, key: str) -> None:
        """Remove a key, if it is there."""


@dataclass
class Exchange:
    """One rank's end. ``seconds``: how long rank 0 waits for all parts of a step together."""

    store: KeyValueStore
    seconds: float = SECONDS
    _put: str = field(default="", init=False)

    def hand_over(self, step: int, name: str, attempt: int, rank: int, content: bytes) -> None:
        """Put this rank's part into the store, in place of what nobody fetched of the step before."""
        if self._put:
            self.store.drop(self._put)
            self._put = ""
        if len(content) > MAX_BYTES:
            LOG.warning("the witness of step %d is not handed to rank 0: it has %d bytes", step, len(content))
            return
        self._put = _key(step, name, attempt, rank)
        self.store.put(self._put, content)

    def collected(self, step: int, name: str, attempt: int, num_ranks: int) -> Iterator[tuple[int, bytes]]:
        """The parts of all ranks but rank 0, of those that handed theirs over in time."""
        ends = time.monotonic() + self.seconds
        for rank in range(1, num_ranks):
            # Once the time is spent, what is there already is still fetched.
            content = self.store.take(_key(step, name, attempt, rank), max(0.01, ends - time.monotonic()))
            if content is None:
                LOG.warning("rank %d handed over no witness of step %d in time", rank, step)
            else:
                yield rank, content


def _key(step: int, name: str, attempt: int, rank: int) -> str:
    """Ranks of disks of their own have folders of their own: the step's own name is what they share."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"auditor/{step}/{digest}/{attempt}/{rank}"
