"""Flax's msgpack checkpoints: one file a step, as ``flax.serialization.to_bytes`` and ``save_checkpoint`` write it.

    checkpoint_<step>      by flax.training.checkpoints.save_checkpoint (before it used Orbax); any number: 0.4, too
    <anything>.msgpack     by people, and by Hugging Face (flax_model.msgpack)

Source: google/flax ``flax/training/checkpoints.py``.
"""

from __future__ import annotations

import re

from auditor.adapters.state_files import StateFile, StateFiles
from auditor.containers.damage import DamagedError
from auditor.containers.flax_msgpack import FlaxFile, read_flax
from auditor.storage.store import Handle


class FlaxMsgpack(StateFiles):
    """The adapter."""

    name = "flax-msgpack"
    looks_for = "files checkpoint_<step> or *.msgpack, each a msgpack map with arrays as flax.serialization writes them"
    what = "msgpack map with arrays"
    suffixes = (".msgpack", ".flax")
    own_names = re.compile(r"checkpoint_\d{1,15}(?:\.\d{1,15})?", re.A)

    def read_file(self, handle: Handle) -> StateFile:
        """One file without its weights."""
        return read_flax(handle)

    def salvage(self, error: DamagedError) -> StateFile | None:
        """Of a file that is cut short, what its beginning tells."""
        return error.content if isinstance(error.content, FlaxFile) else None

    def begins(self, head: bytes) -> bool:
        """A map that isn't empty, whose first key is a text. Pickles begin with 0x80 and a small number."""
        first, second = head[:2].ljust(2, b"\0")
        return (0x81 <= first <= 0x8F and 0xA0 <= second < 0xE0) or first in (0xDE, 0xDF)
