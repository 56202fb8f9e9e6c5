"""A pool of which everything is held: the long look at it is not repeated for every object that finds no room."""

import time

import pytest
from tests.unit.stores.helpers import GRANULE, has, key, opened, put

from kvpool.stores.base import Status
from kvpool.stores.local import allocator

COUNT = 256
KEYS = [key(f"{number:04d}") for number in range(COUNT)]


@pytest.fixture
def full(pool_root):
    store = opened(pool_root, COUNT * GRANULE)
    assert set(put(store, KEYS)) == {Status.OK}
    yield store
    assert store.verify() == []
    store.close()


@pytest.fixture
def looks(full, monkeypatch):
    """The units that were looked at."""
    looked = []
    real = full._pool.peers.stamps
    monkeypatch.setattr(full._pool.peers, "stamps", lambda units: looked.append(len(units)) or real(units))
    return looked


def test_nothing_evictable_is_remembered_for_a_moment(full, looks, monkeypatch):
    monkeypatch.setattr(allocator, "_BARREN_S", 60.0)
    lease = full.lease(KEYS, 60.0)
    assert put(full, [key("a")]) == [Status.NO_SPACE]
    first = sum(looks)
    assert first >= COUNT
    assert len(looks) <= 8
    for number in range(50):
        assert put(full, [key(number)]) == [Status.NO_SPACE]
    assert sum(looks) == first
    full.release(lease)
    assert put(full, [key("a")]) == [Status.OK], "the end of a lease of this process counts at once"


def test_it_is_looked_at_again_soon(full, looks, monkeypatch):
    monkeypatch.setattr(allocator, "_BARREN_S", 2.0)
    full.lease(KEYS, 1.0)
    assert put(full, [key("a")]) == [Status.NO_SPACE]
    time.sleep(1.05)
    assert put(full, [key("a")]) == [Status.NO_SPACE], "the leases have run out, but it remembers"
    time.sleep(2.0)
    assert put(full, [key("a")]) == [Status.OK]


@pytest.mark.parametrize("change", ["a client leaves", "an object is removed and another stored"])
def test_what_changes_the_state_of_things_counts_at_once(full, pool_root, monkeypatch, change):
    monkeypatch.setattr(allocator, "_BARREN_S", 60.0)
    other = opened(pool_root, COUNT * GRANULE)
    other.lease(KEYS, 60.0)
    assert put(full, [key("a")]) == [Status.NO_SPACE]
    if change == "a client leaves":
        other.close()
        assert put(full, [key("a")]) == [Status.OK]
        return
    slots = full.reserve(1, GRANULE, 5.0)
    assert slots == []
    other.close()
    assert put(full, KEYS[:1]) in ([Status.EXISTS], [Status.OK])
    assert put(full, [key("b"), key("c")]) == [Status.OK] * 2


def test_the_only_object_that_may_go_is_found(full):
    """However recently it was used."""
    for last in (0, COUNT // 2, COUNT - 1):
        lease = full.lease([name for place, name in enumerate(KEYS) if place != last], 60.0)
        assert put(full, [key(f"new{last}")]) == [Status.OK]
        assert not any(has(full, [KEYS[last]]))
        full.release(lease)
        full.remove([key(f"new{last}")])
        assert put(full, [KEYS[last]]) == [Status.OK]
