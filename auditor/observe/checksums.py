"""Level ``full``: every file's own checksums, held against its bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from auditor.containers.checksums import VERIFIERS, sha256_of, verify_compressed
from auditor.containers.damage import DamagedError
from auditor.model.catalog import Catalog, FileState
from auditor.model.observation import FileChecksums, Observations
from auditor.storage.store import StorageError, Store


def verify_checksums(
    store: Store, catalog: Catalog, observations: Observations, executor: Executor, progress: Callable[[int], None],
    *, digests: bool = False,
) -> Observations:  # fmt: skip
    """``observations`` with what the checksums of every present file say. Reads every file once more, in order.

    ``digests``: also take the SHA-256 of every file as a whole, which is another read.
    """
    present = [number for number, file in enumerate(catalog.files) if file.state is FileState.PRESENT]
    found: dict[int, FileChecksums] = {}
    num_bytes = 0
    for number, (result, count) in zip(present, executor.map(_Verify(store, catalog, digests), present), strict=True):
        found[number] = result
        num_bytes += count
        progress(count)
    return replace(observations, checksums=found, num_bytes_reread=observations.num_bytes_reread + num_bytes)


@dataclass(frozen=True)
class _Verify:
    """Does one file; a class so that any executor can ship it."""

    store: Store
    catalog: Catalog
    digests: bool

    def __call__(self, number: int) -> tuple[FileChecksums, int]:
        found, num_bytes = self.verified(number)
        if not self.digests or found.reason:
            return found, num_bytes
        try:
            with self.store.open(self.catalog.files[number].name) as handle:
                return replace(found, sha256=sha256_of(handle)), num_bytes + handle.entry.num_bytes
        except StorageError as error:
            return replace(found, reason=str(error)), num_bytes

    def verified(self, number: int) -> tuple[FileChecksums, int]:
        """What the file's own checksums say."""
        file = self.catalog.files[number]
        verifier = VERIFIERS.get(file.container)
        if verifier is None:
            return FileChecksums(), 0
        try:
            with self.store.open(file.name) as handle:
                items = file.encoding if file.container == "dcp" else None
                found = verify_compressed(handle, items) if items else verifier(handle)
        except (DamagedError, StorageError) as error:
            return FileChecksums(reason=str(error)), 0
        return FileChecksums(found.num_good, found.bad, found.num_without), found.num_bytes_read
