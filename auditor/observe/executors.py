"""Where units of work run: threads of this process, or the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

from auditor.errors import UsageError

CONNECT_SECONDS = 10


@contextmanager
def executor_of(threads: int, scheduler: str = "") -> Iterator[Executor]:
    """A pool of ``threads``, or the cluster whose scheduler listens at ``scheduler`` (``tcp://host:port``).

    The workers of a cluster must see the checkpoint under the same path.

    Raises:
        UsageError: Dask is not installed, or nothing answers at that address.
    """
    if scheduler:
        with _dask(scheduler) as cluster:
            yield cluster
        return
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        # Without it an interrupt would wait until all queued work is done.
        pool.shutdown(cancel_futures=True)


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError("--scheduler needs Dask: pip install 'ckpt-auditor[dask]'") from error
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"--scheduler {address}: {error}") from error
    with client, client.get_executor(pure=False) as executor:
        yield executor
