"""What the environment of a job tells of it."""

from __future__ import annotations

import hashlib
import os

_LAUNCH = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR",
    "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS",
)  # fmt: skip


def launch_of_job() -> str:
    """Equal in all ranks of one launch, another after a restart, as far as the launcher tells; no names in it."""
    told = [f"{name}={os.environ[name]}" for name in _LAUNCH if name in os.environ]
    return hashlib.blake2b("\n".join(told).encode(), digest_size=8).hexdigest() if told else ""


def absolute(path: str | os.PathLike[str]) -> str:
    """A local path from the root, without links resolved."""
    return os.path.abspath(os.fspath(path))
