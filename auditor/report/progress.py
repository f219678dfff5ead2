"""What a person at a terminal sees while an audit runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from auditor.report.text_report import safe, size


@contextmanager
def progress() -> Iterator[Callable[[str, int], None]]:
    """Told the step's path and the bytes just read: progress on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda path, num_bytes: None
        return
    from rich.console import Console

    total = [0]
    with Console(stderr=True).status("reading") as status:

        def show(path: str, num_bytes: int) -> None:
            total[0] += num_bytes
            status.update(f"{safe(path)} · {size(total[0])} read")

        yield show
