"""What is new, what is over, and telling it to a webhook."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from auditor.errors import UsageError

TIMEOUT_SECONDS = 10
NUM_ATTEMPTS = 3

FindingObject = Mapping[str, Any]
"""A finding as the JSON report has it, with ``run`` and ``key``."""


def keyed(path: str, finding: dict[str, Any]) -> dict[str, Any]:
    """A finding in short, with its run and a key that stays the same while the fault lasts.

    A fault is the same in the next round although more steps and tensors may show it by then: what counts is the
    invariant, the side that disagrees, where it began, and the first tensor or file.
    """
    first = finding["locations"][0] if finding["locations"] else {}
    began = [interval["first_bad"] for interval in finding["intervals"][:1]]
    text = repr((path, finding["id"], finding["minority"], began, first.get("tensor"), first.get("file")))
    kept = ("id", "name", "severity", "class", "message", "hint", "intervals", "waived", "in_baseline")
    key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    where = {name: first.get(name) for name in ("step", "tensor", "role", "coordinate", "file")} if first else None
    short = {name: finding[name] for name in kept}
    return {"key": key, "run": path, **short, "first": where, "num_locations": len(finding["locations"])}


def changes(
    announced: Sequence[FindingObject], present: Sequence[FindingObject]
) -> tuple[list[FindingObject], list[FindingObject]]:
    """Findings that nobody was told of yet, and those that somebody was told of and that are no more."""
    old, new = ({str(item["key"]): item for item in found} for found in (announced, present))
    return [new[key] for key in new.keys() - old.keys()], [old[key] for key in old.keys() - new.keys()]


def check_webhook(url: str) -> None:
    """Refuse what is no web address.

    Raises:
        UsageError: it isn't; the address is not said, for it may hold a secret.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError("--webhook: neither http:// nor https://")


def tell(url: str, document: Mapping[str, Any]) -> str:
    """POST the document as JSON; what went wrong, without the address, or nothing."""
    request = urllib.request.Request(
        url, json.dumps(document).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    failure = ""
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            time.sleep(2**attempt / 2)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
                return ""
        except urllib.error.HTTPError as error:
            failure = f"the webhook answers {error.code}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError) as error:
            failure = f"the webhook was not reached ({type(error).__name__})"
    return failure
