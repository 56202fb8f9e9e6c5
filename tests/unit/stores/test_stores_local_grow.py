"""A pool that got no memory asks for it again."""

import errno
import os

import pytest
from tests.unit.stores.helpers import GRANULE, has, key, opened, put

from kvpool.stores.base import Status
from kvpool.stores.local import allocator, arena

SIZE = 64 * GRANULE


@pytest.fixture
def memory(monkeypatch):
    """How many bytes of an arena the filesystem gives."""
    given = {"bytes": 16 * GRANULE, "asked": 0}

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/arena"):
            given["asked"] += 1
            if offset + nbytes > given["bytes"]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, nbytes)

    monkeypatch.setattr(arena, "allocate", allocate)
    monkeypatch.setattr("kvpool.stores.local.prefault.Prefaulter.start", lambda self, slabs: None)
    return given


def fill(store, count: int = 64) -> int:
    """Objects that the pool holds after ``count`` more."""
    for number in range(count):
        put(store, [key(number)])
    return store.stats().objects


def test_a_pool_grows_again_when_there_is_memory(pool_root, memory, monkeypatch):
    store = opened(pool_root, SIZE)
    assert fill(store) == 16
    asked = memory["asked"]
    assert fill(store) == 16
    assert memory["asked"] == asked, "not within the minute"
    assert store.stats().capacity_bytes == 16 * GRANULE
    monkeypatch.setattr(allocator, "_GROW_AGAIN_S", 0.0)
    fill(store, 4)
    assert memory["asked"] > asked, "in vain"
    assert store.stats().capacity_bytes == 16 * GRANULE
    memory["bytes"] = SIZE
    assert fill(store) == 64
    assert store.stats().capacity_bytes == SIZE
    assert store.verify() == []
    store.close()


def test_a_pool_without_any_memory_is_well_when_it_is_time_to_ask_again(pool_root, memory, monkeypatch):
    memory["bytes"] = 0
    store = opened(pool_root, SIZE)
    assert put(store, [key("a")]) == [Status.NO_SPACE]
    assert not store.health().ok
    memory["bytes"] = SIZE
    assert put(store, [key("a")]) == [Status.NO_SPACE]
    monkeypatch.setattr(allocator, "_GROW_AGAIN_S", 0.0)
    assert store.health().ok
    assert put(store, [key("a")]) == [Status.OK]
    assert has(store, [key("a")]) == [True]
    assert store.health().ok
    store.close()
