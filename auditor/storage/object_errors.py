"""What a service's failure means, said in one line that holds no address, header or key of ours."""

from __future__ import annotations

import re

from obstore import exceptions

from auditor.storage.store import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectMissingError,
    ShortReadError,
    StorageError,
    TransientReadError,
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_KIND = re.compile(r"kind: (Connect|Timeout|Request|Interrupted|Decode|Unknown)\b")
_UNANSWERED = {
    "Connect": "no connection", "Timeout": "no answer in time", "Interrupted": "the connection broke",
    "Decode": "the answer broke off",
}  # fmt: skip
_OTHER_RANGE = re.compile(r"Requested .{1,80}, got |Received non-partial response|content range", re.IGNORECASE)
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


def explained(error: Exception, name: str) -> StorageError:
    """The error as one of ours. ``name``: what was asked for, as a person calls it."""
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    reason = _reason(error, text, status)
    if isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError) or status == 412:
        return ObjectChangedError(f"{name}: another version is there than when it was first seen")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | PermissionError):
        return AccessDeniedError(f"{name}: {reason}")
    if isinstance(error, exceptions.NotFoundError | FileNotFoundError):
        return ObjectMissingError(f"{name}: no such object")
    if status == 416:
        return ShortReadError(f"{name}: the object ends before the range that was asked for")
    if status in (401, 403):
        return AccessDeniedError(f"{name}: {reason}")
    if not status and _OTHER_RANGE.search(text):
        return TransientReadError(f"{name}: another range came than was asked for")
    if status in _TRANSIENT or (not status and _KIND.search(text)):
        return TransientReadError(f"{name}: {reason}")
    return StorageError(f"{name}: {reason}")


def _reason(error: Exception, text: str, status: int) -> str:
    if status:
        code = found[1] if (found := _CODE.search(text)) else ""
        hint = "; is the region right (AWS_REGION)?" if status in (301, 307) else ""
        return f"storage answers {status}{f' {code}' if code else ''}{hint}"
    if isinstance(error, exceptions.InvalidPathError | ValueError):
        return "a key that can't be asked for (empty parts, . or .., control characters)"
    if kind := _KIND.search(text):
        return _UNANSWERED.get(kind[1], "the request failed")
    return f"storage failed ({type(error).__name__})"
