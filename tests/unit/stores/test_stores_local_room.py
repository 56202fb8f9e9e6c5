"""Who is evicted, who is not, and how classes share a pool."""

import threading
import time

import numpy as np
import pytest
from tests.unit.stores.helpers import GRANULE, batch, get, has, key, opened, put

from kvpool.stores.base import Batch, Status
from kvpool.stores.local import LocalStore, jobs


@pytest.fixture
def four(pool_root):
    """A pool for four objects of one granule."""
    store = opened(pool_root, 4 * GRANULE)
    yield store
    assert store.verify() == []
    store.close()


def test_bc_080_room_for_a_batch_is_not_taken_from_the_batch(four):
    a, b, c, d, x, y = (key(name) for name in "abcdxy")
    put(four, [a, b, x, y])
    assert put(four, [a, b, c, d]) == [Status.EXISTS, Status.EXISTS, Status.OK, Status.OK]
    assert has(four, [a, b, c, d, x, y]) == [True, True, True, True, False, False]


def test_bc_082_only_what_is_missing_is_written(pool_root):
    store = opened(pool_root, 1 << 20)
    keys = [key(i) for i in range(10)]
    put(store, keys, fill=1)
    store.remove([keys[4], keys[7]])
    statuses = put(store, keys, fill=2)
    assert [i for i, status in enumerate(statuses) if status is Status.OK] == [4, 7]
    assert get(store, keys) == [2 if i in (4, 7) else 1 for i in range(10)]
    store.close()


def test_tails_go_before_heads(four):
    put(four, [key(i) for i in range(4)])
    put(four, [key("new")])
    assert has(four, [key(i) for i in range(4)]) == [True, True, True, False]


@pytest.mark.parametrize("touch", ["get", "lease", "put"])
def test_use_makes_young(four, touch):
    for i in range(4):
        put(four, [key(i)])
    if touch == "get":
        get(four, [key(0)])
    elif touch == "lease":
        four.release(four.lease([key(0)], 1.0))
    else:
        put(four, [key(0)])
    put(four, [key("new")])
    assert has(four, [key(i) for i in range(4)]) == [True, False, True, True]


def test_all_shards_of_a_block_go_together(pool_root):
    store = opened(pool_root, 8 * GRANULE)
    for block in range(4):
        put(store, [key(block, 0)])
    for block in range(4):
        put(store, [key(block, 1)])
    put(store, [key("new")])
    assert has(store, [key(0, 0), key(0, 1)]) == [False, False]
    assert all(has(store, [key(block, shard) for block in (1, 2, 3) for shard in (0, 1)]))
    assert store.stats().evicted_objects == 2
    store.close()


def test_a_leased_shard_keeps_its_block(pool_root):
    store = opened(pool_root, 4 * GRANULE)
    put(store, [key(0, 0)])
    put(store, [key(0, 1)])
    lease = store.lease([key(0, 1)], 60.0)
    put(store, [key(1)])
    put(store, [key(2)])
    put(store, [key(3), key(4)])
    assert has(store, [key(0, 0), key(0, 1), key(3), key(4)]) == [True, True, True, True]
    store.release(lease)
    store.close()


def test_another_namespace_with_the_same_hash_is_another_block(pool_root):
    store = opened(pool_root, 2 * GRANULE)
    put(store, [key(0, namespace="one")])
    put(store, [key(0, namespace="two")])
    put(store, [key(1)])
    assert has(store, [key(0, namespace="one"), key(0, namespace="two")]) == [False, True]
    store.close()


def test_an_object_larger_than_the_pool_has_no_space(four):
    assert put(four, [key("big")], 5 * GRANULE) == [Status.NO_SPACE]
    assert put(four, [key("all")], 4 * GRANULE) == [Status.OK]


def test_a_class_without_a_slab_takes_the_coldest_of_another(pool_root):
    store = opened(pool_root, 64 * GRANULE)
    small = [key(i) for i in range(64)]
    for name in small:
        put(store, [name])
    get(store, small[:8])
    assert put(store, [key("big")], 16 * GRANULE) == [Status.OK]
    assert sum(has(store, small)) >= 64 - 16
    assert all(has(store, small[:8])), "objects just used were given away though colder ones were there"
    assert store.verify() == []
    store.close()


def test_no_class_starves(pool_root):
    """Three classes in turn in a pool that each could fill: each gets room every time, and the books stay right."""
    store = opened(pool_root, 64 * GRANULE)
    for turn in range(60):
        size = (1, 3, 7)[turn % 3] * GRANULE
        assert put(store, [key(f"{turn}-{i}") for i in range(5)], size) == [Status.OK] * 5, f"turn {turn}"
        assert all(has(store, [key(f"{turn}-{i}") for i in range(5)]))
    assert store.verify() == []
    store.close()


def test_a_class_shut_out_by_leases_gets_room_when_they_end(pool_root):
    store = opened(pool_root, 64 * GRANULE)
    small = [key(i) for i in range(64)]
    put(store, small)
    lease = store.lease(small[::2], 60.0)
    assert put(store, [key("big")], 16 * GRANULE) == [Status.NO_SPACE]
    assert all(has(store, small[::2])), "a leased object was evicted"
    store.release(lease)
    assert put(store, [key("big")], 16 * GRANULE) == [Status.OK]
    assert store.verify() == []
    store.close()


def test_reserved_slots_are_never_taken(four):
    slots = four.reserve(3, GRANULE, 5.0)
    assert put(four, [key(i) for i in range(3)]) == [Status.OK, Status.NO_SPACE, Status.NO_SPACE]
    assert put(four, [key("big")], 2 * GRANULE) == [Status.NO_SPACE]
    four.discard(slots)
    assert put(four, [key("big")], 2 * GRANULE) == [Status.OK]


def test_an_evicted_object_that_proves_leased_comes_back(four, monkeypatch):
    """The lease is taken between the evictor's first look and the removal."""
    put(four, [key(i) for i in range(4)])
    evictor = four._pool.evictor
    real = type(evictor)._evict_block
    taken = []

    def late_lease(self, records, name, slot_bytes):
        if not taken:
            taken.append(four.lease([key(i) for i in range(4)], 60.0))
        return real(self, records, name, slot_bytes)

    monkeypatch.setattr(type(evictor), "_evict_block", late_lease)
    assert put(four, [key("new")]) == [Status.NO_SPACE]
    assert has(four, [key(i) for i in range(4)]) == [True] * 4
    assert get(four, [key(i) for i in range(4)]) == [1] * 4


def test_bc_116_gauges_stay_within_bounds(pool_root):
    store = opened(pool_root, 16 * GRANULE)
    for turn in range(30):
        put(store, [key(turn), key(turn + 1)], (1 + turn % 3) * GRANULE)
        store.remove([key(turn // 2), key(turn // 2)])
        lease = store.lease([key(turn)], 1.0)
        store.release(lease)
        store.release(lease)
        stats = store.stats()
        assert 0 <= stats.used_bytes <= stats.capacity_bytes == 16 * GRANULE
        assert stats.objects == len(store.list())
        assert (stats.leases, stats.pinned, stats.writing) == (0, 0, 0)
    store.clear(b"")
    store.close()
    again = opened(pool_root, 16 * GRANULE)
    assert again.stats().used_bytes == 0
    again.close()


def blocked(store: LocalStore):
    """As if another process were stopped inside a write transaction."""
    return store._pool.write_lock.held()


def test_bc_112_overdue_put_leaves_nothing_behind(pool_root):
    store = opened(pool_root, 16 * GRANULE)
    put(store, [key("there")])
    with blocked(store):
        before = time.monotonic()
        assert put(store, [key(i) for i in range(4)], deadline_s=0.2) == [Status.TRANSIENT] * 4
        assert store.reserve(2, GRANULE, 0.1) == []
        assert store.begin_write([key("w")], GRANULE, 0.1).results[0].status is Status.TRANSIENT
        assert time.monotonic() - before < 15
        assert get(store, [key("there")]) == [1]
        assert isinstance(store.stats().objects, int)
    assert put(store, [key(i) for i in range(4)]) == [Status.OK] * 4
    assert store.stats().writing == 0
    assert store.verify() == []
    store.close()


def test_overdue_publish_keeps_the_slot(pool_root):
    store = opened(pool_root, 16 * GRANULE)
    slots = store.reserve(1, GRANULE, 5.0)
    with blocked(store):
        assert store.publish([(slots[0], key("a"))], 0.1)[0].status is Status.TRANSIENT
    assert has(store, [key("a")]) == [False]
    assert store.publish([(slots[0], key("a"))], 5.0)[0].status is Status.OK
    assert store.verify() == []
    store.close()


def test_overdue_between_reserve_and_publish_gives_the_slots_back(pool_root):
    class Blocking:
        name = "cpu"

        def copy(self, targets, sources, sizes, **side):
            ready.set()
            assert go.wait(30)

    ready, go = threading.Event(), threading.Event()
    store = opened(pool_root, 16 * GRANULE, engine=Blocking())
    outcome = []
    thread = threading.Thread(target=lambda: outcome.extend(put(store, [key("a")], deadline_s=2.0)))
    thread.start()
    assert ready.wait(30)
    with blocked(store):
        go.set()
        thread.join(30)
        assert outcome == [Status.TRANSIENT]
    store.remove([key("b")])
    assert store.stats().writing == 0
    assert store.stats().used_bytes == 0
    store.close()


def test_a_failing_copy_gives_the_slots_back(pool_root):
    class Failing:
        name = "cpu"

        def copy(self, targets, sources, sizes, **side):
            raise RuntimeError("no")

    store = opened(pool_root, 16 * GRANULE, engine=Failing())
    assert put(store, [key("a")]) == [Status.TRANSIENT]
    store.remove([key("b")])
    assert store.stats().writing == 0
    assert has(store, [key("a")]) == [False]
    store.close()


def test_an_exception_in_a_job_fails_that_job_only(pool_root, monkeypatch):
    store = opened(pool_root, 16 * GRANULE)

    def broken(self, records):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(jobs.ReserveStep, "__call__", broken)
        assert put(store, [key("a")]) == [Status.TRANSIENT]
    assert put(store, [key("a")]) == [Status.OK]
    assert store.verify() == []
    store.close()


def test_bc_102_nothing_is_visible_before_its_bytes_are_there(pool_root):
    seen = []

    class Watching:
        name = "cpu"

        def copy(self, targets, sources, sizes, **side):
            seen.extend(has(other, keys))

    keys = [key(i) for i in range(4)]
    store, other = opened(pool_root, 1 << 20, engine=Watching()), opened(pool_root, 1 << 20)
    put(store, keys)
    assert seen == [False] * 4
    assert has(other, keys) == [True] * 4
    store.close()
    other.close()


def test_deadline_in_the_past_moves_nothing(four):
    assert put(four, [key("a")], deadline_s=0.0) == [Status.TRANSIENT]
    put(four, [key("a")])
    memory = np.zeros((1, GRANULE), dtype=np.uint8)
    assert four.get(batch([key("a")], memory), 0.0).results()[0].status is Status.TRANSIENT
    assert not memory.any()


def test_bc_155_twice_in_one_batch(four):
    statuses = put(four, [key("a"), key("b"), key("a")])
    assert statuses == [Status.OK, Status.OK, Status.EXISTS]
    assert four.stats().objects == 2


def test_batch_with_scattered_segments(pool_root):
    store = opened(pool_root, 1 << 20)
    rng = np.random.default_rng(3)
    source = rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    sizes = np.array([100, 0, 4000, 1], dtype=np.int64)
    offsets = rng.permutation(12)[:12].reshape(3, 4).astype(np.int64) * 4096
    keys = [key(i) for i in range(3)]
    put_ = store.put(Batch(keys, source.ctypes.data + offsets, sizes), 5.0).results()
    assert [result.nbytes for result in put_] == [4101] * 3
    target = np.zeros_like(source)
    store.get(Batch(keys, target.ctypes.data + offsets, sizes), 5.0)
    for offset in offsets:
        for start, size in zip(offset, sizes, strict=True):
            assert np.array_equal(target[start : start + size], source[start : start + size])
    assert np.count_nonzero(target) <= 3 * 4101
    store.close()


@pytest.mark.parametrize("first", ["commits", "aborts", "closes"])
def test_bc_096_two_writers_of_one_key_never_mix(pool_root, first):
    """Each writes into room of its own: whoever commits first is there whole, and what the other leaves is taken back."""
    one, other = opened(pool_root, 1 << 20), opened(pool_root, 1 << 20)
    name, half = key("x"), np.array([GRANULE // 2], dtype=np.int64)
    memory = {fill: np.full((1, GRANULE), fill, dtype=np.uint8) for fill in (1, 2)}

    def piece(fill: int, offset: int):
        return np.array([[memory[fill].ctypes.data + offset]], dtype=np.int64), half

    mine = one.begin_write([name], GRANULE, 5.0)
    assert mine.write([0], 0, *piece(1, 0))[0].status is Status.OK
    theirs = other.begin_write([name], GRANULE, 5.0)
    assert theirs.results[0].status in (Status.OK, Status.BUSY)
    assert has(other, [name]) == [False]
    if first == "commits":
        mine.write([0], GRANULE // 2, *piece(1, GRANULE // 2))
        assert mine.commit()[0].stored
    elif first == "aborts":
        mine.abort()
    else:
        one.close()
    theirs.abort()
    if first == "commits":
        assert put(other, [name], fill=2) == [Status.EXISTS]
    else:
        assert get(other, [name]) == [None]
        end = time.monotonic() + 60  # the other store's thread takes the slot back
        while (stored := put(other, [name], fill=2)) == [Status.BUSY] and time.monotonic() < end:
            time.sleep(0.01)
        assert stored == [Status.OK]
    assert get(other, [name]) == [1 if first == "commits" else 2]
    assert (other.stats().writing, other.stats().objects) == (0, 1)
    assert other.verify() == []
    one.close()
    other.close()
