"""What stops the auditor. A bad checkpoint is a finding; these say that the auditor could not do its work."""

from __future__ import annotations


class AuditorError(Exception):
    """Base of everything that the auditor raises on purpose. The message names the file or folder."""


class UsageError(AuditorError, ValueError):
    """The caller asked for something that can't be: a bad option, a configuration that doesn't parse."""


class NothingToAuditError(AuditorError, LookupError):
    """Nothing under the path is a checkpoint that any adapter knows."""


class LockedError(AuditorError):
    """Another process of the auditor writes there. The message names the folder."""
