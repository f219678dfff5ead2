"""Built-in name maps between what people convert from and to."""

from __future__ import annotations

MAPS: dict[str, object] = {}
