"""What DeepSpeed's files record, read carefully: names with shapes, counts, values under a path of keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from auditor.adapters.adapter import Folder, Pointer
from auditor.adapters.step_file import StepFile
from auditor.storage.store import Store, join, read_text

MAX_ELEMENTS = 1 << 40
"""Elements of the largest parameter that is believed."""
MAX_NAMES = 1 << 20
_OWN_SCHEDULE = ("lr_scheduler", "last_batch_iteration")
_OTHER_PACE = ("num_bad_epochs", "_schedulers")
"""What schedules record that follow a metric, or are made of several."""
"""What DeepSpeed's own schedules call their count."""

Shapes = dict[str, tuple[int, ...]]
"""Name to shape."""


def dig(value: Any, *path: object) -> Any:
    """The value under a path of keys and positions, or None."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def shapes_in(file: StepFile, key: str) -> list[Shapes]:
    """``param_shapes`` or the like of one model file: per parameter group, name to (local) shape."""
    recorded = file.tree.get(key)
    groups = recorded if isinstance(recorded, list) else [recorded]
    if sum(len(group) for group in groups if isinstance(group, dict)) > MAX_NAMES:
        return []
    return [
        {name: shape for name, shape in group.items() if isinstance(name, str) and _is_shape(shape)}
        for group in groups
        if isinstance(group, dict)
    ]


def _is_shape(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) > 8:
        return False
    return all(isinstance(n, int) and n >= 0 for n in value) and math.prod(map(int, value)) <= MAX_ELEMENTS


def count_in(file: StepFile, *keys: str) -> int | None:
    """A positive whole number under a path of keys."""
    value = dig(file.tree, *keys)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20 else None


def step_in(file: StepFile) -> int | None:
    """The engine's ``global_steps``."""
    value = file.tree.get("global_steps")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def odd_counts(files: Iterable[StepFile]) -> Iterator[tuple[StepFile, str]]:
    """Model files whose counts are not those of most: samples, skipped steps, the schedule's own steps."""
    read = [file for file in files if file.tree]
    for path in (("global_samples",), ("skipped_steps",), ("lr_scheduler", "last_epoch"), _OWN_SCHEDULE):
        values = {file.name: value for file in read if type(value := dig(file.tree, *path)) is int}
        usual = Counter(values.values()).most_common(1)
        for file in read:
            value = values.get(file.name)
            if value is not None and value != usual[0][0]:
                yield file, f"records {'.'.join(path)} {value}, most others {usual[0][0]}"


def schedule_steps(file: StepFile) -> int | None:
    """How often the engine stepped its schedule, which it does with every step that it does not skip.

    torch's schedules count from 0; DeepSpeed's own from -1, and so lag by one. Source: DeepSpeed ``runtime/engine.py``
    (``_take_model_step``), ``runtime/lr_schedules.py``; 0.19. A schedule that the script drives is not stored.
    """
    schedule = dig(file.tree, "lr_scheduler")
    if not isinstance(schedule, dict) or any(key in schedule for key in _OTHER_PACE):
        return None
    count = schedule.get("last_epoch", schedule.get("last_batch_iteration"))
    return count if type(count) is int and 0 <= count < 1 << 53 else None


def renamed(file: StepFile) -> str:
    """What shows that a file is a copy of another one: torch.save names the root after the path."""
    # A saver that writes NAME.pt.tmp and renames it leaves NAME.pt; one that writes to a buffer leaves `archive`.
    if (
        file.content
        and file.content.root
        and file.content.root not in (file.name.removesuffix(".pt"), file.name, "archive")
    ):
        return f"was saved under the name {file.content.root}"
    return ""


def step_pointer(store: Store, folder: Folder, name: str) -> Pointer | None:
    """A file that holds the name of a step folder, without newline."""
    if name not in folder.files:
        return None
    path = join(folder.path, name)
    tag = read_text(store, path).strip().rstrip("/")
    # A name found inside a file may not lead out of the folder.
    inside = tag and "/" not in tag and "\\" not in tag and tag not in (".", "..")
    return Pointer(path, join(folder.path, tag) if inside else "")
