"""Which runs lie below a prefix, told from one listing and the small files by which formats are recognised.

Keys come in order, so a folder is complete when a key outside of it comes: it is looked at then and forgotten. What is
held is the path down to the present key, and one line a run. A million keys take no more memory than a thousand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from auditor.adapters.adapter import Folder
from auditor.adapters.registry import recognise
from auditor.file_series import checkpoint_in, holds_file_steps
from auditor.storage.store import Entry, StorageError, Store, base_name, join
from auditor.storage.walking import walk

MAX_FILES = 50_000
"""Files of one folder that are looked at; more are no step of a checkpoint."""
MAX_LEFT = 1000
"""Folders that nobody recognises of which each is named."""
SAVE_EVERY = 20_000
"""Keys after which it is worth writing down how far the listing came."""


@dataclass(frozen=True, slots=True)
class Found:
    """A run."""

    path: str
    """Its folder, below the prefix."""
    digest: str
    """Changes whenever a key below the folder, its size or its version does."""
    modified: float
    """When the newest object was written, seconds since the epoch."""
    num_bytes: int
    num_keys: int


@dataclass(slots=True)
class _Open:
    """A folder of which more keys may come."""

    path: str
    digest: str = ""
    modified: float = 0.0
    num_bytes: int = 0
    num_keys: int = 0
    has_steps: bool = False
    files: dict[str, Entry] = field(default_factory=dict)
    folders: dict[str, Entry] = field(default_factory=dict)
    inner: list[Found] = field(default_factory=list)
    """Runs in folders of it that are complete."""
    left: dict[str, str] = field(default_factory=dict)
    """Folders down from it with files of checkpoints that are of no run, with the reason."""

    def listing(self) -> Folder:
        """The folder as adapters look at it."""
        return Folder(self.path, dict(sorted(self.files.items())), dict(sorted(self.folders.items())))

    def to_json(self) -> dict[str, Any]:
        """As it is written down, for :meth:`from_json`."""
        return {**asdict(self), "folders": [*self.folders]}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> _Open:
        """What was written down.

        Raises:
            TypeError, KeyError, AttributeError: that was something else.
        """
        path = str(said["path"])
        files = {str(name): Entry(**entry) for name, entry in said["files"].items()}
        folders = {str(name): Entry(join(path, name), is_folder=True) for name in said["folders"]}
        inner = [Found(**found) for found in said["inner"]]
        left = {str(name): str(why) for name, why in said["left"].items()}
        return cls(**{**said, "path": path, "files": files, "folders": folders, "inner": inner, "left": left})

    def add(self, entry: Entry) -> None:
        line = f"{self.digest}{entry.name}\0{entry.num_bytes}\0{entry.identity}"
        self.digest = hashlib.blake2b(line.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        self.modified = max(self.modified, entry.modified)
        self.num_bytes += entry.num_bytes
        self.num_keys += 1


@dataclass(slots=True)
class Survey:
    """What lies below a prefix."""

    store: Store
    found: list[Found] = field(default_factory=list)
    """The runs, once all keys were gone through."""
    refused: dict[str, str] = field(default_factory=dict)
    """Folders that could not be looked at, with the reason: the survey is incomplete."""
    unrecognised: dict[str, str] = field(default_factory=dict)
    """Folders with files of checkpoints that no format recognises, once all keys were gone through."""
    num_keys: int = 0
    after: str = ""
    """The last key that was gone through."""
    stack: list[_Open] = field(default_factory=lambda: [_Open("")])
    """The path down to it, of which more may come."""

    def to_json(self) -> dict[str, Any]:
        """How far it has come, to be gone on with by another process: between any two keys, also inside a run."""
        stack = [folder.to_json() for folder in self.stack]
        return {"after": self.after, "num_keys": self.num_keys, "refused": self.refused, "stack": stack}

    @classmethod
    def from_json(cls, store: Store, said: dict[str, Any]) -> Survey:
        """One that goes on where another had come to.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: what was written down is something else.
        """
        stack = [_Open.from_json(folder) for folder in said["stack"]]
        if not stack or stack[0].path:
            raise ValueError("does not begin at the root")
        return cls(store, [], dict(said["refused"]), {}, int(said["num_keys"]), str(said["after"]), stack)

    def run(self, save: Callable[[Survey], None] = lambda survey: None) -> Survey:
        """Go through all keys, or those after ``after``. ``save`` is called now and then, to go on from there."""
        stack, saved = self.stack, self.num_keys
        for entry in walk(self.store, self.after, self.refuse):
            if self.num_keys - saved >= SAVE_EVERY:
                saved = self.num_keys
                save(self)
            folder = entry.name.rpartition("/")[0]
            while not _within(folder, stack[-1].path):
                self.close(stack)
            for part in _parts_below(folder, stack[-1].path):
                path = join(stack[-1].path, part)
                if len(stack[-1].folders) < MAX_FILES:
                    stack[-1].folders[part] = Entry(path, is_folder=True)
                stack.append(_Open(path))
            if len(stack[-1].files) <= MAX_FILES:
                stack[-1].files[base_name(entry.name)] = entry
            for above in stack:
                above.add(entry)
            self.after = entry.name
            self.num_keys += 1
        while stack:
            self.close(stack)
        return self

    def refuse(self, folder: str, error: StorageError) -> None:
        """Note a folder that can't be looked at."""
        self.refused[folder or "."] = str(error)

    def close(self, stack: list[_Open]) -> None:
        """Judge a folder that is complete."""
        top = stack.pop()
        above = stack[-1] if stack else None
        is_step = self.is_step(top)
        if not is_step and self.holds_steps(top):
            top.has_steps = True
        if is_step and above is not None:
            # What lies inside a step is its own.
            above.has_steps = True
            return
        if is_step:
            top.inner, top.left = [], {}
        elif not top.has_steps and (name := checkpoint_in(self.store, top.listing())):
            top.left[top.path] = f"no format recognises its files, {name} for example"
        if top.has_steps or is_step:
            top.inner.append(Found(top.path, top.digest, top.modified, top.num_bytes, top.num_keys))
        if above is None:
            self.found, self.unrecognised = top.inner, top.left
            return
        above.inner += top.inner
        if len(above.left) < MAX_LEFT:
            above.left |= top.left

    def is_step(self, folder: _Open) -> bool:
        """Whether a folder is a step of any format."""
        if len(folder.files) > MAX_FILES:
            self.refused[folder.path or "."] = f"holds more than {MAX_FILES} files; it was not looked at"
            return False
        if not folder.files and not folder.folders:
            return False
        try:
            return isinstance(recognise(self.store, folder.listing()), tuple)
        except StorageError as error:
            self.refuse(folder.path, error)
            return False

    def holds_steps(self, folder: _Open) -> bool:
        """Whether files of a folder are steps by themselves."""
        try:
            return 0 < len(folder.files) <= MAX_FILES and holds_file_steps(self.store, folder.listing())
        except StorageError as error:
            self.refuse(folder.path, error)
            return False


def _within(folder: str, other: str) -> bool:
    return not other or folder == other or folder.startswith(f"{other}/")


def _parts_below(folder: str, other: str) -> Iterable[str]:
    rest = folder[len(other) :].strip("/")
    return rest.split("/") if rest else ()
