"""Writers, readers, opening and closing used from several threads at once. Copies are held in the middle by a gate."""

import math
import threading
import time

import numpy as np
import pytest
from tests.unit.stores.helpers import GRANULE, batch, get, has, key, opened, put

from kvpool.devices import CpuCopyEngine
from kvpool.stores.base import UNKNOWN, Hit, Status
from kvpool.stores.faulty import FaultyStore
from kvpool.stores.local import LocalStore, store
from kvpool.stores.local.pool_dir import PoolDir


class Gate(CpuCopyEngine):
    """Copies of a thread that ``holds`` wait until ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.inside, self.go = threading.Event(), threading.Event()

    def copy(self, targets, sources, sizes, **side):
        if threading.get_ident() in self.held:
            self.inside.set()
            assert self.go.wait(60)
        super().copy(targets, sources, sizes, **side)


class Call:
    """A call in a thread of its own, held in its copy."""

    def __init__(self, engine: Gate, function, *args) -> None:
        self.result = None

        def run() -> None:
            engine.held.add(threading.get_ident())
            self.result = function(*args)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert engine.inside.wait(30)

    def end(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


@pytest.fixture
def engine():
    gate = Gate()
    yield gate
    gate.go.set()


@pytest.fixture
def one(pool_root, engine):
    """A pool for a single object."""
    one = opened(pool_root, GRANULE, engine=engine)
    yield one
    engine.go.set()
    one.close()


def piece(fill: int):
    memory = np.full((1, GRANULE), fill, dtype=np.uint8)
    whole = batch([b"k"], memory)
    return memory, whole.addresses, whole.sizes


def writing(one, engine, deadline_s: float = 10.0):
    writer = one.begin_write([key("a")], GRANULE, deadline_s)
    memory, addresses, sizes = piece(1)
    call = Call(engine, writer.write, [0], 0, addresses, sizes)
    call.memory = memory
    return writer, call


def test_a_slot_is_not_given_away_under_a_running_write(one, engine):
    writer, call = writing(one, engine)
    writer.abort()
    writer.abort()
    assert put(one, [key("b")], fill=2) == [Status.NO_SPACE]
    _memory, addresses, sizes = piece(3)
    assert writer.write([0], 0, addresses, sizes)[0].status is Status.FATAL
    engine.go.set()
    call.end()
    assert put(one, [key("b")], fill=2) == [Status.OK]
    assert get(one, [key("a"), key("b")]) == [None, 2]
    assert one.verify() == []


def test_commit_waits_for_a_running_write(one, engine):
    writer, call = writing(one, engine)
    committed = []
    commit = threading.Thread(target=lambda: committed.extend(writer.commit()))
    commit.start()
    commit.join(0.2)
    assert commit.is_alive()
    assert has(one, [key("a")]) == [False]
    engine.go.set()
    commit.join(30)
    assert call.end()[0].status is Status.OK
    assert committed[0].status is Status.OK
    assert get(one, [key("a")]) == [1]
    assert writer.commit()[0].status is Status.FATAL, "it has ended"
    writer.abort()
    assert get(one, [key("a")]) == [1]


def test_commit_gives_up_on_a_write_that_does_not_end(one, engine):
    writer, call = writing(one, engine, deadline_s=2.0)
    assert writer.commit()[0].status is Status.TRANSIENT
    assert put(one, [key("b")], fill=2) == [Status.NO_SPACE]
    engine.go.set()
    call.end()
    assert put(one, [key("b")], fill=2) == [Status.OK]
    assert has(one, [key("a")]) == [False]


def test_an_object_stays_pinned_under_a_running_read(one, engine):
    put(one, [key("a")], fill=1)
    reader = one.begin_read([key("a")], 10.0)
    memory, addresses, sizes = piece(0)
    call = Call(engine, reader.read, [0], 0, addresses, sizes)
    reader.end()
    reader.end()
    assert put(one, [key("b")], fill=2) == [Status.NO_SPACE]
    other = piece(0)
    assert reader.read([0], 0, other[1], other[2])[0].status is Status.FATAL
    engine.go.set()
    assert call.end()[0].status is Status.OK
    assert (memory == 1).all()
    assert put(one, [key("b")], fill=2) == [Status.OK]
    assert one.stats().pinned == 0


def test_many_threads_write_one_object(pool_root):
    store = opened(pool_root, 64 * GRANULE)
    for turn in range(30):
        writer = store.begin_write([key(turn)], GRANULE, 10.0)
        _memory, addresses, _ = piece(turn + 1)
        size = np.array([GRANULE // 8], dtype=np.int64)
        threads = [
            threading.Thread(target=writer.write, args=([0], i * GRANULE // 8, addresses + i * GRANULE // 8, size))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        if turn % 3 == 0:
            writer.abort()
        for thread in threads:
            thread.join()
        assert writer.commit()[0].status is (Status.OK if turn % 3 else Status.FATAL)
        assert get(store, [key(turn)]) == [turn + 1 if turn % 3 else None]
    assert store.stats().writing == 0
    assert store.verify() == []
    store.close()


def test_opening_blocks_no_other_call(pool_root):
    opened(pool_root, GRANULE).close()
    directory = PoolDir(pool_root, "unit")
    waiting = LocalStore(pool_root, "unit", GRANULE)
    with directory.locked(5.0):
        threads = [threading.Thread(target=waiting.open) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        before = time.monotonic()
        assert waiting.exists([key("a")]) == [UNKNOWN]
        assert waiting.health() == (False, "the store is closed", False)
        assert time.monotonic() - before < 4
    for thread in threads:
        thread.join(20)
    directory.close()
    assert put(waiting, [key("a")]) == [Status.OK]
    assert len(list((pool_root / "unit" / "clients").iterdir())) == 1, "one of the two openers has left again"
    waiting.close()
    assert list((pool_root / "unit" / "clients").iterdir()) == []


def test_the_end_of_a_stuck_call_finishes_the_close(pool_root, engine, monkeypatch):
    monkeypatch.setattr(store, "_DRAIN_S", 0.2)
    stuck = opened(pool_root, GRANULE, engine=engine, on_last_close="remove")
    put(stuck, [key("a")], fill=1)
    call = Call(engine, get, stuck, [key("a")])
    stuck.close()
    assert has(stuck, [key("a")]) == [False]
    assert (pool_root / "unit").exists()
    engine.go.set()
    assert call.end() == [1]
    assert not (pool_root / "unit").exists()


@pytest.mark.parametrize("seconds", [math.inf, 1e300, -1.0, -math.inf, math.nan])
def test_leases_of_any_length(one, seconds):
    put(one, [key("a")])
    lease = one.lease([key("a")], seconds)
    assert isinstance(lease.answers[0], Hit)
    assert one.stats().leases == int(seconds > 0)
    one.release(lease)
    assert one.stats().leases == 0


def test_a_faulty_store_forwards_notes(one):
    faulty = FaultyStore(one)
    faulty.write_note(b"n1", "text")
    assert faulty.notes(b"n") == one.notes(b"n") == {b"n1": "text"}
    faulty.plan.update("notes", error="boom", times=1)
    with pytest.raises(RuntimeError, match="boom"):
        faulty.notes(b"n")


def test_looking_at_the_clients_from_several_threads_misses_none(pool_root):
    """A client that is missed is a lease that is missed; one that misses itself takes the pool for removed."""
    stores = [opened(pool_root, 4 << 20) for _ in range(4)]
    pool = stores[0]._pool
    end = time.monotonic() + 1.5
    wrong: list[object] = []

    def look() -> None:
        while time.monotonic() < end:
            if stores[0].stats().capacity_bytes == 0:
                wrong.append("no numbers")

    def refresh() -> None:
        while time.monotonic() < end:
            found = pool.writer.call(lambda records: pool.peers.refresh(), time.monotonic() + 5)
            if len(found) != 4 or pool.peers.removed():
                wrong.append(found)

    threads = [threading.Thread(target=target) for target in (look, look, refresh)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    for one in stores:
        one.close()
