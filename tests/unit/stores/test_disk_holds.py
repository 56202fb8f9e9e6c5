"""The disk tier where something goes wrong half-way: nothing stays held, no record of a living object is cleared."""

import errno
import fcntl
import os
import threading
import time
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest
from tests.unit.stores.helpers import batch, get, has, held, key, opened, put
from tests.unit.stores.test_disk_parts import HELD_BY_NOBODY, MIB, settings
from tests.waiting import eventually

from kvpool.stores.base import EVICTED, MISS, UNKNOWN, Hit, Status, Tier
from kvpool.stores.local.disk import attach, erase
from kvpool.stores.local.disk import tier as tier_module
from kvpool.stores.local.disk.demote import Batch
from kvpool.stores.local.disk.erase import Eraser
from kvpool.stores.local.disk.folder import DiskFolder
from kvpool.stores.local.disk.iopool import IoPool
from kvpool.stores.local.disk.promote import Landing
from kvpool.stores.local.disk.record import Record, pack, unpack
from kvpool.stores.local.index import ENTRY
from kvpool.stores.local.jobs import CancelStep, ReserveStep
from kvpool.stores.local.records import Records

KEYS = [key(number) for number in range(4)]
publish, attach_books = Landing._publish, attach._attach
IDLE = {"dram_high": 99, "dram_low": 98}


@pytest.fixture
def store(pool_root, ssd):
    """KEYS lie in memory and on the disk."""
    store = opened(pool_root, 16 * MIB, disk=settings(ssd))
    assert put(store, KEYS) == [Status.OK] * 4
    eventually(lambda: None not in store._pool.disk.books.entries(KEYS), "they are copied")
    yield store
    store.close()


def only_on_disk(store) -> None:
    def retract(records) -> None:
        for name in KEYS:
            unit, _, nbytes, generation = records.entry(name)
            records.retract(name, unit, nbytes, generation, revivable=True)

    eventually(lambda: store._pool.peers.stamps(np.arange(64)).max() == 0, HELD_BY_NOBODY)
    store._pool.writer.call(retract, 1e9)


def test_what_the_demoter_meets_before_its_commit_is_copied_after_it(store, monkeypatch):
    """The stamp of a new object is set a moment before anybody can see the object."""
    touch = store._pool.stamps.touch

    def slow(units, now_ns, places=None, *, stored=False) -> None:
        touch(units, now_ns, places, stored=stored)
        if stored and threading.current_thread() is store._pool.writer._thread:
            time.sleep(0.4)  # some turns of the demoter

    monkeypatch.setattr(store._pool.stamps, "touch", slow, raising=False)
    new = [key(number) for number in range(100, 104)]
    assert put(store, new) == [Status.OK] * 4
    eventually(lambda: None not in store._pool.disk.books.entries(new), "they are copied")


def test_a_removal_that_is_not_committed_holds_nothing(store, monkeypatch):
    books, flush = store._pool.disk.books, Records.flush

    def full(records) -> None:
        flush(records)
        if threading.current_thread() is books.writer._thread:
            raise lmdb.MapFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Records, "flush", full)
        assert store._pool.disk.remove(KEYS[:2])[0].status is Status.NO_SPACE
        eventually(lambda: not books.leases._holds, HELD_BY_NOBODY)
    assert None not in books.entries(KEYS)
    assert [result.status for result in store.remove(KEYS[:2])] == [Status.OK] * 2
    assert not books.leases._holds


def test_a_removal_says_when_its_records_stay(store, monkeypatch):
    disk = store._pool.disk

    def refuse(unit) -> None:
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(disk.files, "clear_record", refuse)
        result = store.remove(KEYS[:1])[0]
    assert result.status is Status.TRANSIENT
    assert "bad sector" in result.text
    assert has(store, KEYS) == [False, True, True, True]
    assert not disk.books.leases._holds


def test_a_batch_that_cannot_look_into_the_books_holds_nothing(pool_root, ssd, monkeypatch):
    store = opened(pool_root, 16 * MIB, disk=settings(ssd, **IDLE))
    put(store, KEYS)
    pool = store._pool
    units = [ENTRY.unpack(raw)[0] for raw in pool.entries(KEYS)]

    def busy(keys) -> None:
        raise OSError(errno.EBUSY, "too many reads")

    monkeypatch.setattr(pool.disk.books, "entries", busy)
    with pytest.raises(OSError, match="too many reads"):
        Batch(pool.disk, units).run()
    assert not pool.leases._holds
    monkeypatch.undo()
    store.close()


def test_the_record_of_an_object_is_not_cleared_for_another_one_that_was_there(store):
    disk = store._pool.disk
    unit = ENTRY.unpack(disk.books.entries(KEYS[:1])[0])[0]
    disk.demoter.eraser.add([(b"gone", unit, 1)])
    eventually(lambda: not disk.demoter.eraser._pending, "nothing is left to clear")
    assert unpack(disk.files.read_record(unit)).key == KEYS[0]
    assert store.verify() == []


def test_the_record_that_a_killed_demoter_did_not_publish_is_cleared(store):
    disk = store._pool.disk
    room = disk.books.writer.call(ReserveStep(disk.books, [b"unpublished"], 4096), 1e9).rooms[0]
    record = Record(disk.files.identity, room.generation, room.unit, 4096, 4096, 0, 1, 0, 0, b"unpublished")
    disk.files.write_record(room.unit, pack(record))
    disk.demoter.eraser.look_for_leftovers()
    time.sleep(0.3)
    assert unpack(disk.files.read_record(room.unit)) == record, "it may be under way"
    disk.books.writer.cancel(CancelStep([room]))
    eventually(lambda: unpack(disk.files.read_record(room.unit)) is None, "the record is cleared")


def stuck_eraser(monkeypatch, clear) -> Eraser:
    monkeypatch.setattr(erase, "_WAIT_S", 1.0)
    monkeypatch.setattr(erase, "_sort_out", lambda records, pending: (list(pending), []))
    tier = SimpleNamespace(
        io=IoPool(1),
        usable=True,
        demoter=SimpleNamespace(stopping=False),
        files=SimpleNamespace(clear_record=clear),
        books=SimpleNamespace(look=lambda function: function(None)),
    )
    return Eraser(tier)


def test_clearing_ends_when_nobody_waits_for_it_and_is_tried_again(monkeypatch):
    gate, cleared = threading.Event(), []
    eraser = stuck_eraser(monkeypatch, lambda unit: gate.wait(60) and cleared.append(unit))
    eraser.add((b"key", unit, 1) for unit in range(5))
    with pytest.raises(TimeoutError):
        eraser.run()
    eraser.reused([3])
    gate.set()
    assert eraser._tier.io.close(30)
    assert cleared == [0], "the others may be used again by now"
    assert sorted(eraser._pending) == [0, 1, 2, 4]


def test_a_tier_that_cannot_be_opened_leaves_nothing_open(pool_root, ssd, monkeypatch):
    def full(directory) -> None:
        raise OSError(errno.ENOSPC, "no room for the switch")

    before = held()
    monkeypatch.setattr(tier_module, "Switch", full)
    with pytest.raises(OSError, match="no room"):
        opened(pool_root, 16 * MIB, disk=settings(ssd))
    assert not held() - before
    folder = DiskFolder(ssd, "unit")
    assert folder.alone()
    folder.close()


def test_nothing_is_called_evicted_while_the_disk_is_off(store):
    pool = store._pool
    missing = key("elsewhere")
    pool.ghosts.add(missing)
    assert store.exists([missing]) == [EVICTED]
    pool.disk.switch.hangs(9.0)
    assert store.exists([missing]) == [MISS]
    assert store.lease([missing], 1.0).answers == [MISS]


def test_an_object_of_another_length_is_not_read_from_the_disk(store, monkeypatch):
    only_on_disk(store)
    reads = []
    monkeypatch.setattr(store._pool.disk.files, "read", lambda *place: reads.append(place))
    assert get(store, KEYS, 8192) == [None] * 4
    assert reads == []


def test_a_child_of_a_forked_child_keeps_its_files(store):
    """Its parent may have opened others under the numbers that were closed for it."""
    pool = store._pool
    numbers = [pool._client_fd, pool.disk.books._client_fd, pool.disk.files.folder._users]
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDONLY)
        for number in numbers:
            os.dup2(null, number)
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(sum(not os.path.exists(f"/proc/self/fd/{number}") for number in numbers))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def read(store, deadline_s: float) -> tuple[np.ndarray, list[Status]]:
    memory = np.zeros((len(KEYS), 4096), dtype=np.uint8)
    return memory, [result.status for result in store.get(batch(KEYS, memory), deadline_s).results()]


def test_nothing_is_written_to_the_caller_past_the_deadline(store, monkeypatch):
    only_on_disk(store)
    monkeypatch.setattr(Landing, "_publish", lambda landing, until: publish(landing, until) or time.sleep(0.4))
    memory, statuses = read(store, 0.3)
    assert statuses == [Status.TRANSIENT] * 4
    assert not memory.any()


def test_a_busy_index_does_not_keep_bytes_that_are_there(store, pool_root):
    only_on_disk(store)
    lock = os.open(pool_root / "unit" / "index" / "data.mdb", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        memory, statuses = read(store, 2.0)
    finally:
        os.close(lock)
    assert statuses == [Status.OK] * 4
    assert (memory == 1).all()


def test_memory_is_found_while_the_books_cannot_be_read(store, monkeypatch):
    def fail(keys) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(store._pool.disk, "entries", fail)
    monkeypatch.setattr(store._pool.disk, "hold", lambda keys, until: fail(keys))
    wanted = [KEYS[0], key("elsewhere")]
    assert store.exists(wanted) == [Hit(Tier.DRAM, 4096), UNKNOWN]
    lease = store.lease(wanted, 5.0)
    assert lease.answers == [Hit(Tier.DRAM, 4096), UNKNOWN]
    store.release(lease)
    assert store._pool.leases.held() == (0, 0)
    monkeypatch.undo()


def test_a_tier_that_opens_too_late_is_closed(pool_root, ssd, monkeypatch):
    gate, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(attach, "_OPEN_S", 0.1)
    monkeypatch.setattr(attach, "_attach", lambda *arguments: gate.wait(60) and attach_books(*arguments))
    with pytest.raises(TimeoutError, match="does not answer"):
        opened(pool_root, 16 * MIB, disk=settings(ssd))
    gate.set()
    eventually(lambda: not set(threading.enumerate()) - before, "its threads have ended")
    folder = DiskFolder(ssd, "unit")
    assert folder.alone()
    folder.close()
