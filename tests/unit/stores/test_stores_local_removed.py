"""Pools whose files go away under them, pools that seem to be from another boot, pools on filesystems of other hosts."""

import json
import os
import shutil

import lmdb
import numpy as np
import pytest
from tests.unit.stores.helpers import GRANULE, batch, get, has, held, key, opened, put

from kvpool.stores.base import Status
from kvpool.stores.local import clients, pool, pool_dir
from kvpool.stores.local.pool_dir import PoolDir

SIZE = 4 * GRANULE


@pytest.fixture
def two(pool_root):
    stores = [opened(pool_root, SIZE) for _ in range(2)]
    yield stores
    for store in stores:
        store.close()


def bytes_at(address: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, GRANULE)


@pytest.mark.parametrize("wiped", ["directory", "clients"])
def test_pins_hold_when_the_pool_is_removed_while_in_use(two, pool_root, wiped):
    one, other = two
    put(one, [key("pinned")], fill=7)
    pins = one.pin([key("pinned")])
    put(other, [key(i) for i in range(3)])
    put(other, [key(3)])  # looks at the others' leases
    if wiped == "directory":
        shutil.rmtree(pool_root / "unit")
    else:
        for path in (pool_root / "unit" / "clients").iterdir():
            path.unlink()
    for store in two:
        assert store.health() == (False, "the pool was removed while in use: it can be read, not written", True)
        for i in range(4, 12):
            assert put(store, [key(i)], fill=9) == [Status.FATAL]
    memory = np.ones((1, GRANULE), dtype=np.uint8)
    text = other.put(batch([key(20)], memory), 5.0).results()[0].text
    assert text == "the pool was removed while in use"
    assert bytes_at(pins.addresses[0]) == bytes([7]) * GRANULE
    assert get(other, [key("pinned")]) == [7]
    assert has(one, [key("pinned")]) == [True]
    assert other.remove([key("pinned")])[0].status is Status.BUSY
    assert bytes_at(pins.addresses[0]) == bytes([7]) * GRANULE


def test_pins_of_a_client_whose_file_alone_is_gone_hold(two, pool_root):
    one, other = two
    put(one, [key("pinned")], fill=7)
    slot = one.reserve(1, GRANULE, 5.0)[0]
    pins = one.pin([key("pinned")])
    for i in range(4):
        put(other, [key(i)])
    (pool_root / "unit" / "clients" / clients._name(one._pool.client)).unlink()
    for i in range(4, 12):
        assert put(other, [key(i)], fill=9) == [Status.OK]
    assert bytes_at(pins.addresses[0]) == bytes([7]) * GRANULE
    assert one.publish([(slot, key("mine"))], 5.0)[0].status is Status.OK


def test_a_client_that_left_does_not_count(two):
    one, other = two
    put(one, [key(0)])
    slots = one.reserve(3, GRANULE, 5.0)
    assert len(slots) == 3
    one.pin([key(0)])
    assert put(other, [key(1)]) == [Status.NO_SPACE]
    one.close()
    assert put(other, [key(i) for i in range(1, 5)]) == [Status.OK] * 4


def test_a_pool_in_use_is_not_emptied_for_another_boot_id(pool_root):
    store = opened(pool_root, SIZE)
    put(store, [key("a")], fill=5)
    meta = pool_root / "unit" / "meta"
    mine = pool_dir.boot_id()
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "boot": "another"}))
    with pytest.raises(OSError, match=rf"'another'.*'{mine}'"):
        opened(pool_root, SIZE)
    assert get(store, [key("a")]) == [5]
    store.close()
    store = opened(pool_root, SIZE)  # nobody uses it now
    assert has(store, [key("a")]) == [False]
    store.close()


@pytest.mark.parametrize(("magic", "name"), [(0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x65735546, "FUSE"), (0x0BD00BD0, "Lustre")])
def test_filesystems_of_other_hosts_are_refused(pool_root, monkeypatch, magic, name):
    monkeypatch.setattr(pool_dir, "filesystem_type", lambda fd: magic)
    before = held()
    with pytest.raises(OSError, match=f"lies on {name}"):
        opened(pool_root, SIZE)
    assert not held() - before
    assert not (pool_root / "unit").exists()


def test_the_type_of_a_filesystem(pool_root):
    fd = os.open("/proc", os.O_RDONLY)
    assert pool_dir.filesystem_type(fd) == 0x9FA0
    os.close(fd)


def test_a_child_forked_under_the_lock_does_not_keep_it(pool_root):
    directory = PoolDir(pool_root, "unit")
    read, write = os.pipe()
    with directory.locked(5.0):
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        with directory.locked(5.0):
            pass
    finally:
        os.close(write)
        os.waitpid(pid, 0)
        os.close(read)
        directory.close()


@pytest.mark.parametrize("error", [lmdb.MapFullError("full"), lmdb.CorruptedError("bad"), OSError(5, "io")])
def test_what_cannot_be_cleaned_at_open_is_a_warning(pool_root, monkeypatch, caplog, error):
    def fail(self, records):
        raise error

    monkeypatch.setattr("kvpool.stores.local.eviction.Evictor.sweep", fail)
    opened(pool_root, SIZE).close()
    assert "could not be taken back" in caplog.text


def test_an_error_late_in_open_leaks_nothing(pool_root, monkeypatch):
    opened(pool_root, SIZE).close()
    before = held()

    def fail(self):
        raise lmdb.CorruptedError("bad")

    with monkeypatch.context() as patch:
        patch.setattr(pool.Pool, "_clean", fail)
        with pytest.raises(OSError, match="the index cannot be opened"):
            opened(pool_root, SIZE)
    assert not held() - before
    assert list((pool_root / "unit" / "clients").iterdir()) == []
    opened(pool_root, SIZE).close()


def test_a_new_pool_in_the_place_of_a_removed_one(two, pool_root):
    put(two[0], [key("a")], fill=1)
    shutil.rmtree(pool_root / "unit")
    fresh = opened(pool_root, SIZE, on_last_close="remove")
    assert has(fresh, [key("a")]) == [False]
    assert put(fresh, [key("a")], fill=2) == [Status.OK]
    for i in range(8):
        assert put(fresh, [key(i)]) == [Status.OK]
        assert put(two[1], [key(i)]) == [Status.FATAL]
    assert get(two[1], [key("a")]) == [1]
    two[0].close()
    assert fresh.health().ok
    assert put(fresh, [key("b")]) == [Status.OK]
    fresh.close()
    assert not (pool_root / "unit").exists()
