"""From a URL to a client of the service. Credentials come from the surroundings alone and are never held here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from auditor.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

SCHEMES = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "adl": "az", "abfs": "az",
    "abfss": "az",
}  # fmt: skip
"""Scheme to the service."""
Client = S3Store | GCSStore | AzureStore

RETRIES: RetryConfig = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=8), "base": 2},
}
"""About six seconds of waiting, four times as long with :class:`~auditor.storage.retrying.RetryingStore` around it: a
burst of refusals is over by then, and what isn't is an outage that a person should be told of."""


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix in a bucket."""

    scheme: str
    bucket: str
    prefix: str = ""
    """Without slashes at its ends."""
    account: str = ""
    """Azure's, where the URL names it."""

    @property
    def url(self) -> str:
        """As a person writes it."""
        host = f"{self.bucket}@{self.account}" if self.account else self.bucket
        return f"{self.scheme}://{host}/{self.prefix}".rstrip("/")

    @classmethod
    def of(cls, url: str) -> Place:
        """The place that a URL names: ``s3://bucket/prefix``, ``abfss://container@account.…/prefix``.

        Keys are taken as they are written; nothing in them is unescaped.

        Raises:
            UsageError: another scheme, no bucket, credentials in the URL, a key with empty parts.
        """
        scheme, _, rest = url.partition("://")
        host, _, key = rest.partition("/")
        if scheme not in SCHEMES:
            raise UsageError(f"{scheme}://: not read; there are {', '.join(SCHEMES)} and file")
        account = ""
        if "@" in host:
            host, _, domain = host.partition("@")
            if SCHEMES[scheme] != "az" or ":" in host:
                raise UsageError(f"{scheme}://: credentials don't belong in a URL; set them in the environment")
            account = domain
        if not host:
            raise UsageError(f"{scheme}://: names no bucket")
        prefix = key.strip("/")
        if prefix and not all(part not in ("", ".", "..") for part in prefix.split("/")):
            raise UsageError(f"{scheme}://{host}/{prefix}: a key with empty parts, . or .. can't be asked for")
        return cls(scheme, host, prefix, account)


def client_of(place: Place) -> Client:
    """A client for the place's bucket, configured by the environment (``AWS_…``, ``GOOGLE_…``, ``AZURE_…``).

    Raises:
        UsageError: the environment does not say enough, or something wrong.
    """
    try:
        return _client(place)
    except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
        # None of their texts may show what was configured.
        raise UsageError(f"{place.url}: no client can be made of what is configured ({type(error).__name__})") from None


def _client(place: Place) -> Client:
    service = SCHEMES[place.scheme]
    if service == "s3":
        return S3Store(place.bucket, client_options=_options("AWS"), retry_config=RETRIES)
    if service == "gs":
        return GCSStore(place.bucket, client_options=_options("GOOGLE"), retry_config=RETRIES)
    config: dict[str, Any] = {"account_name": place.account.partition(".")[0]} if place.account else {}
    return AzureStore(place.bucket, client_options=_options("AZURE"), retry_config=RETRIES, **config)


def _options(service: str) -> ClientConfig:
    """Plain HTTP is taken where the user's own endpoint is of that kind."""
    names = ("ENDPOINT_URL", "ENDPOINT", "ENDPOINT_URL_S3", "STORAGE_ENDPOINT", "BASE_URL")
    plain = any(os.environ.get(f"{service}_{name}", "").startswith("http://") for name in names)
    return {
        "allow_http": plain or os.environ.get(f"{service}_ALLOW_HTTP", "").lower() in ("1", "true"),
        "connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60),
        "pool_max_idle_per_host": "64",
    }  # fmt: skip
