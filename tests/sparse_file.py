"""Files that would not fit into memory."""

from auditor.storage.store import Entry


class Sparse:
    """An open file that is mostly zeros, so that it may be larger than any memory."""

    def __init__(self, num_bytes: int, parts: dict[int, bytes]) -> None:
        self.entry, self.parts = Entry("sparse", False, num_bytes, "1"), parts

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = bytes(len(buffer))
        for start, content in self.parts.items():
            low, high = max(start, offset), min(start + len(content), offset + len(buffer))
            if low < high:
                buffer[low - offset : high - offset] = content[low - start : high - start]
