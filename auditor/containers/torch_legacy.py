"""``torch.save`` files of the form before torch 1.6, which it still writes when told to.

Five pickles back to back (a magic number, a protocol, the writer's machine, the saved object, the keys of its storages
in order), then for each key the number of its elements as a little-endian int64, and the elements. Nothing is checked
by a sum, and nothing tells the name that the file was saved under.
Source: torch ``torch/serialization.py`` (``_legacy_save``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from auditor.containers.damage import CutShortError, DamagedError, LimitError, UnsupportedError
from auditor.containers.pickle_machine import Builder, Limits, PickleMachine
from auditor.containers.zip_directory import Member
from auditor.storage.store import Handle, ShortReadError, read_bytes

MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
ROOT = "legacy"
"""What takes the place of the first part of a zip file's member names."""
_PROTOCOL, _FIRST_BLOCK, MAX_STORAGES = 1001, 1 << 16, 1 << 20


class Pickles:
    """The five pickles of one file."""

    def __init__(self, handle: Handle, limits: Limits) -> None:
        self.handle, self.limits = handle, limits
        self.data = b""
        self.starts: list[int] = []
        self.end = 0
        """First byte behind them."""
        self.keys: tuple[str, ...] = ()
        self._find()

    def _find(self) -> None:
        """Read no more of the file than the pickles take, or as much again: their length is written nowhere."""
        size, block = self.handle.entry.num_bytes, _FIRST_BLOCK
        while True:
            self.data = read_bytes(self.handle, 0, min(size, block))
            try:
                self._split()
            except LimitError:
                raise
            except DamagedError:
                if block >= size:
                    raise
                if block >= self.limits.num_bytes:
                    raise LimitError(f"its pickles have more than {self.limits.num_bytes} bytes") from None
                block *= 2
            else:
                return

    def _split(self) -> None:
        at, self.starts = 0, []
        values: list[Any] = []
        for number in range(5):
            self.starts.append(at)
            # The object itself is gone through later, when it is known where storages lie.
            machine = PickleMachine({}, lambda persistent_id: None, self.limits)
            if number == 3:
                machine.skip(self.data[at:])
            else:
                values.append(machine.load(self.data[at:]))
            at += machine.num_read
        self.end = at
        _, protocol, system, keys = values
        if protocol != _PROTOCOL or not isinstance(system, dict):
            raise DamagedError(f"it begins as a torch file, but its protocol is not {_PROTOCOL}")
        if system.get("little_endian") is False:
            raise UnsupportedError("its tensors are big-endian")
        if not isinstance(keys, list) or len(keys) > MAX_STORAGES or not all(isinstance(key, str) for key in keys):
            raise DamagedError("its list of storages is none")
        self.keys = tuple(keys)

    @property
    def saved(self) -> bytes:
        """The pickle of the saved object."""
        return self.data[self.starts[3] : self.starts[4]]

    def members(self, widths: Mapping[str, int]) -> dict[str, Member]:
        """Where storages lie, as the members of a zip file. ``widths``: bytes of an element, by key.

        Raises:
            DamagedError: the file ends before they do.
        """
        return {f"{ROOT}/data/{key}": Member(key, at, at, size, 0) for key, at, size in self._placed(widths)}

    def _placed(self, widths: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
        at = self.end
        for key in self.keys:
            if key not in widths:
                raise DamagedError("its list names a storage that its object does not have")
            try:
                (count,) = struct.unpack("<q", read_bytes(self.handle, at, 8))
            except ShortReadError as error:
                raise CutShortError(f"the file ends before its storages do ({error})") from error
            size = count * widths[key]
            if count < 0 or at + 8 + size > self.handle.entry.num_bytes:
                raise CutShortError(f"a storage of {count} elements reaches beyond the end of the file")
            yield key, at + 8, size
            at += 8 + size


def collect(saved: bytes, limits: Limits, builders: Mapping[str, Builder], storage: Any) -> dict[str, Any]:
    """The storages that the object names, by key. ``storage``: makes one of a persistent id."""
    found: dict[str, Any] = {}

    def resolve(persistent_id: object) -> object:
        made = storage(persistent_id)
        key = getattr(made, "key", None)
        if isinstance(key, str):
            found[key] = made
        return made

    PickleMachine(builders, resolve, limits).load(saved)
    return found
