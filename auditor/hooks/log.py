"""Where all hooks log: the logger ``auditor``."""

from __future__ import annotations

import logging

LOG = logging.getLogger("auditor")
