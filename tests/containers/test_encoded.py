"""Files whose content is decoded while it is read: any range in any order, bounded, damage told once."""

import gzip
import tracemalloc

import numpy as np
import pytest
import zstandard

from auditor.containers import encoded
from auditor.containers.encoded import open_file
from auditor.model.catalog import File
from auditor.model.encoding import GZIP, PLAIN, ZSTD, EncodingBuilder, one_chunk
from auditor.storage.memory import MemoryStore
from auditor.storage.store import ShortReadError, UndecodableError, read_bytes
from auditor.testing.recording import RecordingStore

PACK = {PLAIN: bytes, ZSTD: zstandard.compress, GZIP: gzip.compress}


def noise(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 9, num_bytes, np.uint8).tobytes()


def stored(chunks):
    """A file of several chunks under their codecs, some of them held in memory; and its content."""
    builder, raw, content = EncodingBuilder(), b"", {}
    for codec, plain, held in chunks:
        packed = PACK[codec](plain)
        if held:
            start = builder.hold(len(plain), codec, packed)
        else:
            start = builder.add(len(plain), codec, len(raw), len(packed))
            raw += packed
        content[start] = plain
    encoding = builder.build()
    whole = bytearray(encoding.size)
    for start, plain in content.items():
        whole[start : start + len(plain)] = plain
    return {"f": raw}, File("f", encoding=encoding), bytes(whole)


MIXED = [
    (ZSTD, noise(5000), False), (PLAIN, noise(17, 1), False), (ZSTD, noise(13, 2), True),
    (GZIP, noise(3 << 20, 3), False), (PLAIN, noise(2 << 20, 4), False), (ZSTD, noise(3 << 20, 5), False),
    (PLAIN, b"", False), (ZSTD, noise(9, 6), True),
]  # fmt: skip


def test_any_range_in_any_order():
    objects, file, whole = stored(MIXED)
    draw = np.random.default_rng(0)
    with open_file(MemoryStore(objects), file) as handle:
        assert read_bytes(handle, 0, len(whole)) == whole
        for _ in range(60):
            low, high = sorted(draw.integers(0, len(whole) + 1, 2).tolist())
            assert read_bytes(handle, low, min(high - low, 1 << 20)) == whole[low : min(high, low + (1 << 20))]
        with pytest.raises(ShortReadError):
            read_bytes(handle, len(whole) - 1, 2)


def test_what_is_read_in_order_is_decoded_once():
    objects, file, whole = stored([(ZSTD, noise(6 << 20), False), (ZSTD, noise(5 << 20, 1), False)])
    store = RecordingStore(objects)
    half = 6 << 20
    with open_file(store, file) as handle:
        for at in range(0, 5 << 20, 1 << 18):
            # Two tensors in lock-step.
            assert read_bytes(handle, at, 1 << 18) == whole[at : at + (1 << 18)]
            assert read_bytes(handle, half + at, 1 << 18) == whole[half + at : half + at + (1 << 18)]
        assert read_bytes(handle, 5 << 20, 1 << 20) == whole[5 << 20 : 6 << 20]
    assert sum(stop - start for _, start, stop in store.ranges) == len(objects["f"])


def test_memory_does_not_grow_with_the_chunk():
    objects, file, _ = stored([(ZSTD, bytes(256 << 20), False)])
    with open_file(MemoryStore(objects), file) as handle:
        buffer = memoryview(bytearray(1 << 20))
        tracemalloc.start()
        for at in range(0, 256 << 20, 1 << 20):
            handle.read_into(at, buffer)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("codec", [ZSTD, GZIP])
@pytest.mark.parametrize("size", [1000, 3 << 20])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda raw: raw[: len(raw) // 2], "too early|cut short"), (lambda raw: b"\0" * len(raw), "broken"),
        (lambda raw: b"", "too few|too early|cut short"),
    ],
)  # fmt: skip
def test_a_broken_chunk_is_told_and_others_are_read(codec, size, change, told):
    good = noise(64, 7)
    broken = change(PACK[codec](noise(size)))
    builder = EncodingBuilder()
    builder.add(size, codec, 0, len(broken))
    beside = builder.add(64, PLAIN, len(broken), 64)
    file = File("f", encoding=builder.build())
    with open_file(MemoryStore({"f": broken + good}), file) as handle:
        for _ in range(2):
            with pytest.raises(UndecodableError, match=told):
                read_bytes(handle, 0, size)
        assert read_bytes(handle, beside, 64) == good


@pytest.mark.parametrize("codec", [ZSTD, GZIP, PLAIN])
@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_more_or_less_than_the_array_says(codec, size):
    packed = PACK[codec](noise(size))
    for stated in (size - 1, size + 1):
        file = File("f", encoding=one_chunk(stated, codec, len(packed)))
        with open_file(MemoryStore({"f": packed}), file) as handle, pytest.raises(UndecodableError):
            read_bytes(handle, 0, stated)


def test_behind_a_break_nothing_is_decoded_again(monkeypatch):
    packed = bytearray(zstandard.compress(noise(4 << 20)))
    packed[len(packed) // 2 :] = bytes(len(packed) - len(packed) // 2)
    opened = []
    real = encoded.ZstdStream
    monkeypatch.setattr(encoded, "ZstdStream", lambda *arguments: opened.append(1) or real(*arguments))
    file = File("f", encoding=one_chunk(4 << 20, ZSTD, len(packed)))
    with open_file(MemoryStore({"f": bytes(packed)}), file) as handle:
        failed = 0
        for at in range(0, 4 << 20, 1 << 16):
            try:
                read_bytes(handle, at, 1 << 16)
            except UndecodableError:
                failed += 1
    assert failed > 10
    assert len(opened) == 1


def test_between_keeps_positions():
    _, file, _ = stored(MIXED)
    whole = file.encoding
    for first, last in ((0, 10), (5001, 5100), (whole.size - 9, whole.size), (0, whole.size)):
        part = whole.between(first, last)
        kept = [
            at for at in range(len(whole)) if whole.start[at] < last and whole.start[at] + whole.num_bytes[at] > first
        ]
        assert set(part.start.tolist()) >= {int(whole.start[at]) for at in kept}
        rows = list(zip(whole.start.tolist(), whole.num_bytes.tolist(), strict=True))
        for at, row in enumerate(zip(part.start.tolist(), part.num_bytes.tolist(), strict=True)):
            number = rows.index(row)
            if part.held[at]:
                mine, theirs = (
                    one.memory[int(one.offset[n]) : int(one.offset[n] + one.num_stored[n])]
                    for one, n in ((part, at), (whole, number))
                )
                assert mine == theirs


def test_what_a_file_can_not_hold_is_contradicted():
    def said(*chunks, size=100):
        builder = EncodingBuilder()
        for offset, length in chunks:
            builder.add(8, PLAIN, offset, length)
        return builder.build().contradiction(size)

    assert said((0, 50), (50, 50)) == ""
    assert "cut short" in said((0, 50), (50, 51))
    assert "byte 49" in said((0, 50), (49, 10))
    assert "byte 10" in said((0, 100), (10, 1), (40, 2))
    assert said() == ""
