"""A store in memory that notes every range that is read."""

from contextlib import contextmanager

from auditor.storage.memory import MemoryStore


class RecordingStore(MemoryStore):
    def __init__(self, objects):
        super().__init__(objects)
        self.ranges = []

    @contextmanager
    def open(self, name):
        with super().open(name) as handle:
            yield RecordingHandle(handle, self.ranges)


class RecordingHandle:
    def __init__(self, inner, ranges):
        self.inner, self.ranges, self.entry = inner, ranges, inner.entry

    def read_into(self, offset, buffer):
        self.ranges.append((self.entry.name, offset, offset + len(buffer)))
        self.inner.read_into(offset, buffer)
