"""Reads no faster than was allowed, over all threads."""

import pickle
import threading

import pytest

from auditor.storage.memory import MemoryStore
from auditor.storage.throttled import MAX_SAVED_SECONDS, ThrottledStore


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.lock = 100.0, threading.Lock()

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        with self.lock:
            self.now += seconds


def throttled(bytes_per_second=1000.0):
    time = Time()
    return ThrottledStore(MemoryStore({"a": bytes(range(250)) * 40}), bytes_per_second, time, time.sleep), time


def read(store, times, num_bytes=500):
    with store.open("a") as handle:
        for at in range(times):
            buffer = bytearray(num_bytes)
            handle.read_into(at * num_bytes, memoryview(buffer))
            assert bytes(buffer) == (bytes(range(250)) * 40)[at * num_bytes : (at + 1) * num_bytes]


def test_reading_takes_the_time_that_its_bytes_are_worth():
    store, time = throttled()
    read(store, 20)
    assert time.now - 100 == pytest.approx(10, abs=0.5 + MAX_SAVED_SECONDS)


def test_a_pause_does_not_allow_a_burst():
    store, time = throttled()
    read(store, 1)
    time.sleep(3600)
    begun = time.now
    read(store, 20)
    assert time.now - begun == pytest.approx(10, abs=0.5 + MAX_SAVED_SECONDS)


def test_listing_and_looking_are_free():
    store, time = throttled(1.0)
    assert [entry.name for entry in store.list("")] == ["a"]
    assert store.stat("a").num_bytes == 10_000
    assert time.now == 100


def test_it_can_be_shipped_to_another_process():
    store = pickle.loads(pickle.dumps(ThrottledStore(MemoryStore({"a": bytes(1000)}), 1e9)))
    read_ = bytearray(1000)
    with store.open("a") as handle:
        handle.read_into(0, memoryview(read_))
    assert store.location == MemoryStore({}).location
