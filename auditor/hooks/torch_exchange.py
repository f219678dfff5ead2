"""The exchange through torch.distributed's store (TCPStore, FileStore): ``TorchHook(exchange=torch_exchange())``."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from auditor.hooks.exchange import SECONDS, Exchange


def torch_exchange(store: Any = None, seconds: float = SECONDS) -> Exchange:
    """An exchange through ``store``, by default that of the job's process group. ``seconds``: see :class:`Exchange`.

    Raises:
        ValueError: there is no process group.
    """
    return Exchange(_TorchStore(dist.distributed_c10d._get_default_store() if store is None else store), seconds)


class _TorchStore:
    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, key: str, content: bytes) -> None:
        self.store.set(key, content)

    def take(self, key: str, seconds: float) -> bytes | None:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            return None
        content = bytes(self.store.get(key))
        self.drop(key)
        return content

    def drop(self, key: str) -> None:
        # Not every store can.
        with suppress(RuntimeError, NotImplementedError):
            self.store.delete_key(key)
