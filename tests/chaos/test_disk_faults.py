"""The disk tier with damaged bytes, a full disk, errors and silence. Every byte that is read is verified."""

import errno
import os
import threading
import time

import numpy as np
import pytest

from kvpool.stores.base import Status, Tier
from kvpool.stores.local.disk import switch, tier
from kvpool.stores.local.disk.record import RECORD_BYTES
from tests.chaos import disk_worker as dw
from tests.chaos import store_worker as sw
from tests.chaos.disk_moves import SIZE, get, on_disk, put, spilled, tiers, wiped
from tests.mounts import mounted
from tests.waiting import eventually


def damage(ssd, store, number, name):
    """Change bytes of an object, or of its record, on the disk."""
    unit, offset, _, _ = np.frombuffer(store._pool.disk.books.entries([sw.key(number, SIZE)])[0], dtype=np.int64).tolist()
    place = offset + 4096 if name == "arena" else unit * RECORD_BYTES + 100
    with open(ssd / "chaos" / name, "r+b") as file:
        file.seek(place)
        old = file.read(16)
        file.seek(place)
        file.write(bytes(byte ^ 255 for byte in old))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("name", ["arena", "records"])
def test_damaged_bytes_are_missing_and_quarantined(pool_root, ssd, name):
    store = dw.open_store(str(pool_root), str(ssd))
    spilled(store)
    assert tiers(store, [0, 1]) == [Tier.DISK] * 2
    damage(ssd, store, 0, name)
    assert get(store, [0, 1]) == 1
    assert tiers(store, [0]) == [None]
    eventually(lambda: store.stats().tiers[1].errors == 1, "it is counted")
    assert store._pool.disk.switch.on
    put(store, [0])
    assert get(store, [0]) == 1
    assert store.verify() == []
    store.close()


def test_damaged_records_are_dropped_by_the_scan(pool_root, ssd, caplog):
    caplog.set_level("INFO")
    store = dw.open_store(str(pool_root), str(ssd))
    numbers = spilled(store)
    damage(ssd, store, 3, "records")
    there = [n for n, raw in zip(numbers, store._pool.disk.books.entries([sw.key(n, SIZE) for n in numbers])) if raw]
    wiped(store, pool_root)
    store = dw.open_store(str(pool_root), str(ssd))
    assert "dropped: 1 torn" in caplog.text
    found = {n for n, where in zip(numbers, tiers(store, numbers)) if where}
    assert 3 not in found
    assert found >= set(there) - {3}
    store.close()


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 24 MiB (a tmpfs, which has no O_DIRECT)."""
    with mounted(tmp_path / "disk", "tmpfs", "size=24m,mode=700") as folder:
        yield folder


def test_a_disk_smaller_than_the_tier(pool_root, small_disk, caplog):
    store = dw.open_store(str(pool_root), str(small_disk))
    shrinks = lambda: sum("shrinks" in record.message for record in caplog.records)  # noqa: E731
    for start in range(0, 160, 4):
        put(store, list(range(start, start + 4)))
        copied = lambda least=start - 8: store.stats().tiers[1].objects >= least  # noqa: E731
        eventually(lambda copied=copied: shrinks() or copied(), "it is copied, or the disk is full")
    assert shrinks() == 1
    stats = store.stats().tiers[1]
    assert 0 < stats.used_bytes <= stats.capacity_bytes < dw.DISK
    assert (stats.ok, stats.errors) == (True, 0)
    assert get(store, list(range(150, 160))) == 10
    assert store.verify() == []
    store.close()


def broken(store, monkeypatch, names, error):
    def fail(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    for name in names:
        monkeypatch.setattr(store._pool.disk.files, name, fail)


def tried_again_now(store):
    """The time for which the disk is off is over."""
    store._pool.disk.switch._until[0] = time.monotonic_ns()


def test_write_errors_switch_the_tier_off_and_memory_goes_on(pool_root, ssd, monkeypatch, caplog):
    store = dw.open_store(str(pool_root), str(ssd))
    with monkeypatch.context() as patch:
        broken(store, patch, ["write_data"], errno.EIO)
        put(store, list(range(40)))
        eventually(lambda: not store.stats().tiers[1].ok, "it is switched off")
        assert store.stats().tiers[1].errors >= switch.FAILURES
        assert get(store, list(range(30, 40))) == 10
        assert sum("switched off" in r.message for r in caplog.records) == 1
    tried_again_now(store)
    on_disk(store, 8)
    eventually(lambda: store.stats().tiers[1].ok, "it is tried again")
    assert store.verify() == []
    store.close()


def test_read_errors_are_transient_then_misses(pool_root, ssd, monkeypatch):
    store = dw.open_store(str(pool_root), str(ssd))
    numbers = spilled(store)
    memory = np.zeros((4, SIZE // 8), dtype=np.uint64)
    with monkeypatch.context() as patch:
        broken(store, patch, ["read_data"], errno.EIO)
        first = store.get(sw.batch([0, 1, 2, 3], memory, SIZE), 5.0).results()
        assert [result.status for result in first] == [Status.TRANSIENT] * 4
        assert first[0].code == errno.EIO
        get(store, [4])
        assert tiers(store, [0, 1, 2, 3]) == [None] * 4, "nothing is offered while the disk is off"
    tried_again_now(store)
    eventually(lambda: tiers(store, [0])[0] is Tier.DISK, "it is tried again")
    assert get(store, numbers) == len(numbers)
    store.close()


def hung(pool_root, ssd, monkeypatch):
    """A store with objects on a disk whose reads end only when the gate opens."""
    store = dw.open_store(str(pool_root), str(ssd))
    spilled(store)
    monkeypatch.setattr(tier, "STALL_S", 0.5)
    monkeypatch.setattr(tier, "_CLOSE_S", 0.3)
    gate, real = threading.Event(), store._pool.disk.files.read_data

    def hang(*arguments: object) -> None:
        gate.wait(120)
        real(*arguments)

    monkeypatch.setattr(store._pool.disk.files, "read_data", hang)
    return store, gate


def test_a_hung_disk_hangs_nobody(pool_root, ssd, monkeypatch):
    """Reads do not come back: the caller is answered at its deadline, the tier goes off, nothing is ever written late."""
    store, gate = hung(pool_root, ssd, monkeypatch)
    memory = np.zeros((4, SIZE // 8), dtype=np.uint64)
    began = time.monotonic()
    results = store.get(sw.batch([0, 1, 2, 3], memory, SIZE), 0.3).results()
    assert time.monotonic() - began < 15
    assert {result.status for result in results} == {Status.TRANSIENT}
    began = time.monotonic()
    results = store.get(sw.batch([4, 5, 6, 7], memory, SIZE), 30.0).results()
    assert time.monotonic() - began < 15, "a hung disk is given up long before the deadline"
    assert {result.status for result in results} == {Status.TRANSIENT}
    assert tiers(store, [0]) == [None]
    put(store, [100, 101])
    assert get(store, [100, 101]) == 2
    assert not store.stats().tiers[1].ok
    gate.set()
    eventually(lambda: store.stats().writing == 0, "the slots are given back when the reads return")
    assert not memory.any(), "nothing was written into the caller's memory"
    assert store.verify() == []
    store.close()


def test_close_with_a_hung_disk(pool_root, ssd, monkeypatch):
    store, gate = hung(pool_root, ssd, monkeypatch)
    memory = np.zeros((1, SIZE // 8), dtype=np.uint64)
    store.get(sw.batch([0], memory, SIZE), 0.2)
    pool = store._pool
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 20
    assert pool.arena.base != 0, "the disk may still write into it"
    gate.set()
    other = dw.open_store(str(pool_root), str(ssd))
    assert other.verify() == []
    other.close()
    assert pool.disk.close()
