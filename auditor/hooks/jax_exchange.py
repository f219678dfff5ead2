"""The exchange through JAX's distributed service: ``JaxHook(exchange=jax_exchange())``, after its ``initialize``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
from jax._src import distributed

from auditor.hooks.exchange import SECONDS, Exchange


def jax_exchange(seconds: float = SECONDS) -> Exchange:
    """An exchange through the service that ``jax.distributed.initialize`` connected to.

    ``seconds``: see :class:`Exchange`.

    Raises:
        RuntimeError: it was not called.
    """
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed.initialize was not called: there is no store to exchange through")
    return Exchange(_JaxStore(client), seconds)


class _JaxStore:
    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, key: str, content: bytes) -> None:
        self.client.key_value_set_bytes(key, content)

    def take(self, key: str, seconds: float) -> bytes | None:
        try:
            content = bytes(self.client.blocking_key_value_get_bytes(key, max(1, int(1000 * seconds))))
        except jax.errors.JaxRuntimeError:
            return None
        self.drop(key)
        return content

    def drop(self, key: str) -> None:
        with suppress(jax.errors.JaxRuntimeError):
            self.client.key_value_delete(key)
