"""What OpaqueStore adds to an adapter: against a library in a dictionary that fails, hangs and half-writes as told."""

import ctypes
import threading
import time

import numpy as np
import pytest

from kvpool.stores import opaque_notes
from kvpool.stores.base import MISS, UNKNOWN, Batch, Capabilities, Health, Hit, Result, Status, StoreStats, Tier
from kvpool.stores.opaque import Limits, OpaqueStore


class Library(OpaqueStore):
    name = "library"
    capabilities = Capabilities()
    limits = Limits(batch_keys=4, exists_keys=8, lookup_s=0.3, close_s=0.3)

    def __init__(self):
        super().__init__()
        self.objects: dict[bytes, bytes] = {}
        self.half: set[bytes] = set()  # written by somebody who died: put answers 0, nothing can be read
        self.calls: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.connected = False

    def enter(self, name, count):
        assert self.connected, "a call after close"
        self.calls.append((name, count))
        self.gate.wait(10)
        if self.error is not None:
            raise self.error

    def _connect(self):
        self.connected = True

    def _disconnect(self):
        self.connected = False

    def _exists(self, keys):
        assert len(keys) <= self.limits.exists_keys
        self.enter("exists", len(keys))
        return [Hit(Tier.REMOTE, 0) if key in self.objects else MISS for key in keys]

    def _put(self, batch):
        assert len(set(batch.keys)) == len(batch.keys) <= self.limits.batch_keys
        self.enter("put", len(batch.keys))
        for row, key in enumerate(batch.keys):
            if key not in self.half:
                runs = zip(batch.addresses[row], batch.sizes, strict=True)
                self.objects[key] = b"".join(ctypes.string_at(int(at), int(size)) for at, size in runs)
        return [Result(Status.OK, batch.object_nbytes)] * len(batch.keys)

    def _get(self, batch):
        self.enter("get", len(batch.keys))
        results = []
        for row, key in enumerate(batch.keys):
            content, start = self.objects.get(key), 0
            if content is None or len(content) != batch.object_nbytes:
                results.append(Result(Status.MISSING))
                continue
            for at, size in zip(batch.addresses[row], batch.sizes, strict=True):
                ctypes.memmove(int(at), content[start : start + int(size)], int(size))
                start += int(size)
            results.append(Result(Status.OK, start))
        return results

    def _remove(self, keys):
        self.enter("remove", len(keys))
        return [Result(Status.OK if self.objects.pop(key, None) is not None else Status.MISSING) for key in keys]

    def _stats(self):
        self.enter("stats", 0)
        return StoreStats(objects=len(self.objects))

    def _health(self):
        self.enter("health", 0)
        return Health(True)


@pytest.fixture
def store():
    made = Library()
    made.open()
    yield made
    made.gate.set()
    made.close()


def batch(keys, memory):
    addresses = memory.ctypes.data + np.arange(len(keys), dtype=np.int64)[:, None] * memory.strides[0]
    return Batch(keys, addresses, np.array([memory.shape[1]], dtype=np.int64))


def put(store, keys, memory, deadline=30.0):
    handle = store.put(batch(keys, memory), deadline)
    assert handle.wait(60)
    return [result.status for result in handle.results()]


def rows(count, nbytes=64):
    return np.random.default_rng(count).integers(0, 256, (count, nbytes), dtype=np.uint8)


def test_a_half_written_key_is_not_reported_as_saved(store):
    store.half.add(b"b")
    assert put(store, [b"a", b"b", b"c"], rows(3)) == [Status.OK, Status.BUSY, Status.OK]
    assert not isinstance(store.exists([b"b"])[0], Hit)


def test_what_is_there_is_not_put_again_and_a_key_goes_once(store):
    assert put(store, [b"a"], rows(1)) == [Status.OK]
    store.calls.clear()
    assert put(store, [b"a", b"b", b"b"], rows(3)) == [Status.EXISTS, Status.OK, Status.EXISTS]
    assert ("put", 1) in store.calls
    store.half.add(b"h")
    assert put(store, [b"h", b"h"], rows(2)) == [Status.BUSY, Status.BUSY]


def test_large_calls_are_split(store):
    keys = [b"%d" % i for i in range(11)]
    assert put(store, keys, rows(11)) == [Status.OK] * 11
    assert [count for name, count in store.calls if name == "put"] == [4, 4, 3]
    assert all(isinstance(answer, Hit) for answer in store.exists(keys))
    back = np.zeros((11, 64), dtype=np.uint8)
    handle = store.get(batch(keys, back), 5)
    assert handle.wait(60)
    assert [result.status for result in handle.results()] == [Status.OK] * 11
    assert np.array_equal(back, rows(11))


def test_a_failing_piece_fails_its_own_keys_only(store):
    real, seen = store._put, []

    def sometimes(part):
        seen.append(part)
        if len(seen) == 2:
            raise RuntimeError("broken")
        return real(part)

    store._put = sometimes
    found = put(store, [b"%d" % i for i in range(10)], rows(10))
    assert found == [Status.OK] * 4 + [Status.TRANSIENT] * 4 + [Status.OK] * 2


def test_a_library_that_hangs_makes_unknown_and_pins(store):
    put(store, [b"a"], rows(1))
    store.gate.clear()
    began = time.monotonic()
    assert store.exists([b"a"]) == [UNKNOWN]
    assert not store.health().ok
    assert store.stats() == StoreStats()
    memory = rows(1)
    handle = store.get(batch([b"a"], memory), 0.1)
    assert not handle.wait(0.1)
    assert not handle.abandon()
    assert time.monotonic() - began < 8
    store.gate.set()
    assert handle.wait(60)
    assert handle.results()[0].status is Status.OK


def test_what_begins_after_the_deadline_is_transient(store):
    keys = [b"%d" % i for i in range(9)]
    real = store._put
    store._put = lambda part: (time.sleep(0.15), real(part))[1]
    assert put(store, keys, rows(9), deadline=0.2)[-1] is Status.TRANSIENT


def test_close_leaves_a_library_that_is_busy(store):
    store.gate.clear()
    handle = store.get(batch([b"a"], rows(1)), 5)
    while ("get", 1) not in store.calls:
        time.sleep(0.01)
    store.close()
    assert store.connected, "closing it under a call could end the process"
    store.gate.set()
    assert handle.wait(60)
    assert store.exists([b"a"]) == [UNKNOWN]


def test_errors_of_a_lookup_are_unknown_never_a_miss(store):
    store.error = RuntimeError("down")
    assert store.exists([b"a", b"b"]) == [UNKNOWN, UNKNOWN]
    assert [r.status for r in store.remove([b"a"])] == [Status.TRANSIENT]
    store.error = None
    store._exists = lambda keys: [MISS]
    assert store.exists([b"a", b"b"]) == [UNKNOWN, UNKNOWN], "fewer answers than keys"


def test_notes_are_found_by_family_and_told_once(store):
    store.write_note(b"v1:note:namespace:aa", "first")
    store.write_note(b"v1:note:namespace:bb", "second")
    store.write_note(b"v1:note:namespace:aa", "again")
    assert store.notes(b"v1:note:namespace:") == {b"v1:note:namespace:aa": "first", b"v1:note:namespace:bb": "second"}
    assert store.notes(b"v1:note:other:") == {}


def test_no_note_goes_to_a_store_that_does_not_take_host_memory(store):
    store.write_note(b"n:1", "x")
    store.capabilities = Capabilities(device_memory=True)
    store.calls.clear()
    store.write_note(b"n:2", "y")
    assert store.notes(b"n:") == {}
    assert store.calls == []


def test_notes_beyond_the_places_are_dropped(store):
    for i in range(opaque_notes.PLACES + 3):
        store.write_note(b"n:%d" % i, "x")
    assert len(store.notes(b"n:")) == opaque_notes.PLACES
    store.error = RuntimeError("down")
    assert store.notes(b"n:") == {}
