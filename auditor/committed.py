"""By what a step is known again after it was copied: samples of its largest files, taken when it was committed.

The times of copies tell nothing of whether a witness is of the files that it lies beside. What the hook was told is
committed keeps the same bytes wherever it is copied to; a step that was saved again has others.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from auditor.containers.damage import DamagedError
from auditor.containers.json_document import parse_json
from auditor.storage.local import LocalStore
from auditor.storage.store import Entry, StorageError, Store, join, read_bytes
from auditor.storage.walking import walk

NAME = "committed.json"
"""Beside the parts of the step's witness."""
MAX_FILES = 8
"""The largest: they hold weights."""
MAX_LISTED = 100_000
"""Files that are gone through for these."""
SAMPLE_BYTES = 4096
"""Taken at a quarter of a file, at its middle and at its end: what lies at the end of most formats (zip's directory,
checksums) is of everything before it; elsewhere weights that don't move may lie at one of them."""
MAX_BYTES = 1 << 20


def described(run: str, step: str, number: int) -> bytes:
    """The content of :data:`NAME` for step ``number``, a folder or file ``step`` in ``run`` on the local disk.

    Raises:
        StorageError: a file can't be read.
    """
    store = LocalStore(run)
    if store.stat(step).is_folder:
        found = walk(LocalStore(f"{run}/{step}"), refused=lambda folder, error: None)
        names = [entry.name for entry in heapq.nlargest(MAX_FILES, islice(found, MAX_LISTED), key=_size)]
    else:
        names = [""]
    files = [{"name": name, **_sampled(store, join(step, name))} for name in names]
    return json.dumps({"step": number, "files": files}).encode()


def is_as_committed(store: Store, folder: str, path: str) -> bool:
    """Whether the step in ``path`` is still what :data:`NAME` in ``folder`` says of it; not, where nothing says so."""
    try:
        with store.open(join(folder, NAME)) as handle:
            if handle.entry.num_bytes > MAX_BYTES:
                return False
            told = [*_told(parse_json(read_bytes(handle, 0, handle.entry.num_bytes)))]
        return bool(told) and all(_sampled(store, join(path, name)) == sample for name, sample in told)
    except (DamagedError, StorageError):
        return False


def _told(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and sample of every file.

    Raises:
        DamagedError: it names what lies outside of the step, or is something else.
    """
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, list) or len(files) > MAX_FILES:
        raise DamagedError("it describes no files")
    for file in files:
        name = file.get("name") if isinstance(file, dict) else None
        if not isinstance(name, str) or (name and any(part in ("", ".", "..") for part in name.split("/"))):
            raise DamagedError("it names no file of the step")
        yield name, {key: value for key, value in file.items() if key != "name"}


def _size(entry: Entry) -> tuple[int, str]:
    return entry.num_bytes, entry.name


def _sampled(store: Store, name: str) -> dict[str, Any]:
    """Size and digest of samples of one file."""
    with store.open(name) as handle:
        size = handle.entry.num_bytes
        length = min(size, SAMPLE_BYTES)
        digest = hashlib.sha256()
        for at in dict.fromkeys(min(at, size - length) for at in (size // 4, size // 2, size)):
            digest.update(read_bytes(handle, at, length))
    return {"num_bytes": size, "sha256": digest.hexdigest()}
