"""How a container says that a file is not what it should be."""

from __future__ import annotations


class DamagedError(Exception):
    """The file contradicts its own format: cut short, lying about sizes, not of the format at all.

    No :class:`~auditor.errors.AuditorError`: damage is a finding about the checkpoint, and whoever opens a container
    must turn it into one. ``content``: what is told of the file all the same, where its beginning could be read.
    """

    def __init__(self, message: str, content: object = None) -> None:
        super().__init__(message)
        self.content = content


class CutShortError(DamagedError):
    """The file is empty, or ends before what it says of itself does: its writer is at work, or was killed."""


class LimitError(DamagedError):
    """The file asks for more than an honest one needs (memory, steps, nesting); reading it was given up."""


class UnsupportedError(Exception):
    """The file may be sound, but uses something that this reader does not know. Says nothing about the checkpoint."""
