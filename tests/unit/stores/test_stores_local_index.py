"""The index when its readers die or stop, when it is full, and when giving something back fails."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lmdb
import numpy as np
import pytest
from tests.unit.stores.helpers import GRANULE, batch, get, has, key, opened, put

from kvpool.devices import CpuCopyEngine
from kvpool.stores.base import Status
from kvpool.stores.local import clients, index, jobs, memory_limit
from kvpool.stores.local.writer import Overdue

SIZE = 64 * GRANULE
MAP = 1 << 20


class Broken(CpuCopyEngine):
    broken = False

    def copy(self, targets, sources, sizes, **side):
        if self.broken:
            raise RuntimeError("the device fell off")
        super().copy(targets, sources, sizes, **side)


@pytest.fixture
def small_index(monkeypatch):
    monkeypatch.setattr(index, "map_size_for", lambda units: MAP)


@pytest.fixture
def reader(pool_root, small_index):
    """A process inside a read; before that it put an object full of 3."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvpool.stores.local import index\n"
        f"index.map_size_for = lambda units: {MAP}\n"
        "from tests.unit.stores.helpers import key, opened, put\n"
        f"store = opened(Path(sys.argv[1]), {SIZE})\n"
        "put(store, [key('kept')], fill=3)\n"
        "def stay(txn):\n"
        "    txn.get(b'x')\n"
        "    print('inside', flush=True)\n"
        "    time.sleep(600)\n"
        "store._pool.read(stay)\n"
    )
    root = Path(__file__).parents[3]
    run = subprocess.Popen([sys.executable, "-c", script, str(pool_root)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "inside\n"
    yield run
    run.kill()
    run.wait()
    run.stdout.close()


def churn(store, turns: int) -> list[Status]:
    """The statuses that came up."""
    found = []
    for turn in range(turns):
        found += put(store, [key(turn, shard) for shard in range(4)])
        store.remove([key(turn, shard) for shard in range(4)])
    return list(dict.fromkeys(found))


def test_a_reader_that_was_killed_holds_nobody_up(pool_root, reader):
    store = opened(pool_root, SIZE)
    assert (
        put(store, [key(i) for i in range(2)], deadline_s=0.2) == put(store, [key(0)], deadline_s=0.2) * 2 == [Status.TRANSIENT] * 2
    )
    reader.kill()
    reader.wait()
    assert churn(store, 300) == [Status.OK]
    assert store.health().ok
    store.close()


def test_an_index_that_is_full_says_so_and_recovers(pool_root, small_index):
    store = opened(pool_root, 4096 * GRANULE)
    put(store, [key("kept")], fill=3)
    long = "x" * 200
    statuses = {put(store, [key(f"{long}{start + i}") for i in range(64)])[-1] for start in range(0, 4000, 64)}
    assert statuses == {Status.OK, Status.NO_SPACE}
    memory = np.ones((512, GRANULE), dtype=np.uint8)
    result = store.put(batch([key(f"{long}{i}") for i in range(5000, 5512)], memory), 5.0).results()[-1]
    assert (result.status, "the index is full" in result.text) == (Status.NO_SPACE, True)
    assert get(store, [key("kept")]) == [3]
    while store.clear(b""):
        pass
    assert store.list() == []
    assert put(store, [key("new")]) == [Status.OK]
    assert store.verify() == []
    store.close()


def test_a_reader_that_stopped_holds_writers_up_and_the_index_does_not_grow(pool_root, reader):
    store = opened(pool_root, SIZE)
    size = (pool_root / "unit" / "index" / "data.mdb").stat().st_size
    reader.send_signal(signal.SIGSTOP)
    statuses, before = [], time.monotonic()
    for turn in range(8):
        statuses += put(store, [key(turn)], deadline_s=0.2)
    assert time.monotonic() - before < 20
    assert set(statuses[-4:]) == {Status.TRANSIENT}
    memory = np.ones((1, GRANULE), dtype=np.uint8)
    assert "stopped inside a read" in store.put(batch([key("new")], memory), 2.0).results()[0].text
    assert get(store, [key("kept")]) == [3]
    assert store.health().ok
    assert (pool_root / "unit" / "index" / "data.mdb").stat().st_size <= size + (64 << 10)
    reader.kill()
    reader.wait()
    assert put(store, [key("new")]) == [Status.OK]
    assert store.verify() == []
    store.close()


def test_a_store_closes_in_time_while_a_reader_is_stopped(pool_root, reader):
    store = opened(pool_root, SIZE)
    store.reserve(3, GRANULE, 0.1)
    churned = [put(store, [key(turn)], deadline_s=0.1) for turn in range(6)]
    assert churned[-1] == [Status.TRANSIENT]
    before = time.monotonic()
    store.close()
    assert time.monotonic() - before < 20
    reader.kill()
    reader.wait()
    store = opened(pool_root, SIZE)
    assert store.stats().writing == 0
    store.close()


def test_an_index_without_room_for_anything_is_not_well(pool_root, monkeypatch):
    from kvpool.stores.local.records import Records

    def flush(self):
        raise lmdb.MapFullError("full")

    store = opened(pool_root, SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(Records, "flush", flush)
        assert put(store, [key("a")]) == [Status.NO_SPACE]
        assert not store.health().ok
        assert "the index is full" in store.health().text
    assert store.health().ok
    store.close()


@pytest.mark.parametrize("phase", [1, 2])
def test_a_remove_is_repeated_whole_when_the_index_was_full(pool_root, monkeypatch, phase):
    from kvpool.stores.local.records import Records

    store = opened(pool_root, SIZE)
    put(store, [key("a"), key("b")])
    real, calls = Records.flush, []

    def flush(self):
        calls.append(1)
        if len(calls) == phase:
            raise lmdb.MapFullError("full")
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "flush", flush)
        assert [result.status for result in store.remove([key("a"), key("x")])] == [Status.OK, Status.MISSING]
    assert has(store, [key("a"), key("b")]) == [False, True]
    assert store.verify() == []
    store.close()


@pytest.mark.parametrize("way", ["put", "abort", "commit", "discard"])
def test_a_slot_whose_return_failed_comes_back_later(pool_root, monkeypatch, way):
    engine = Broken()
    store = opened(pool_root, SIZE, engine=engine)
    put(store, [key("first")])
    real, failed = jobs.CancelStep.__call__, []

    def fail_once(self, records):
        if not failed:
            failed.append(1)
            raise lmdb.DiskError("no luck")
        return real(self, records)

    monkeypatch.setattr(jobs.CancelStep, "__call__", fail_once)
    if way == "put":
        engine.broken = True
        assert put(store, [key("a")]) == [Status.TRANSIENT]
        engine.broken = False
    elif way == "discard":
        store.discard(store.reserve(3, GRANULE, 5.0))
    else:
        writer = store.begin_write([key("a"), key("b")], GRANULE, 5.0)
        writer.abort() if way == "abort" else writer.commit()
    store.remove([b"queued behind it"])
    assert failed
    assert store.stats().writing == 0
    assert put(store, [key("a")]) == [Status.OK]
    assert store.verify() == []
    store.close()


def test_errors_of_the_copy_engine_are_results(pool_root):
    engine = Broken()
    store = opened(pool_root, SIZE, engine=engine)
    put(store, [key("a")], fill=4)
    memory = np.full((1, GRANULE), 6, dtype=np.uint8)
    whole = batch([key("a")], memory)
    writer, reader = store.begin_write([key("b")], GRANULE, 5.0), store.begin_read([key("a")], 5.0)
    half = np.array([GRANULE // 2], dtype=np.int64)
    assert writer.write([0], 0, whole.addresses, whole.sizes)[0].status is Status.OK
    engine.broken = True
    for results in (
        store.get(whole, 5.0).results(),
        store.put(batch([key("c")], memory), 5.0).results(),
        writer.write([0], 0, whole.addresses, half),
        reader.read([0], 0, whole.addresses, whole.sizes),
    ):
        assert [(result.status, "fell off" in result.text) for result in results] == [(Status.TRANSIENT, True)]
    engine.broken = False
    assert writer.commit()[0].status is Status.FATAL, "half of it is unknown"
    assert store.stats().writing == 0 or store.remove([b"x"])
    assert reader.read([0], 0, whole.addresses, whole.sizes)[0].status is Status.OK
    reader.end()
    assert get(store, [key("a"), key("b"), key("c")]) == [4, None, None]
    assert store.stats().pinned == 0
    store.close()


def test_a_piece_that_failed_can_be_written_again(pool_root):
    engine = Broken()
    store = opened(pool_root, SIZE, engine=engine)
    memory = np.full((1, GRANULE), 6, dtype=np.uint8)
    whole = batch([key("b")], memory)
    quarter = np.array([GRANULE // 4], dtype=np.int64)
    writer = store.begin_write([key("b")], GRANULE, 5.0)
    writer.write([0], 0, whole.addresses, whole.sizes)
    engine.broken = True
    writer.write([0], GRANULE // 4, whole.addresses, quarter)
    engine.broken = False
    writer.write([0], GRANULE // 4, whole.addresses, quarter)
    assert writer.commit()[0].status is Status.OK
    assert get(store, [key("b")]) == [6]
    store.close()


def test_reads_of_a_process_do_not_wait_for_each_other(pool_root):
    one, other = opened(pool_root, SIZE), opened(pool_root, SIZE)
    put(one, [key("a")])
    inside, go = threading.Event(), threading.Event()

    def slow(txn):
        inside.set()
        assert go.wait(30)

    first = threading.Thread(target=one._pool.read, args=(slow,))
    first.start()
    assert inside.wait(30)
    assert has(one, [key("a")]) == has(other, [key("a")]) == [True]
    go.set()
    first.join(30)
    one.close()
    other.close()


def test_stats_looks_at_leases_outside_its_transaction(pool_root, monkeypatch):
    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    real = clients.Peers.stamps

    def stamps(self, units):
        assert not (store._pool.readers._slots != 0).any()
        return real(self, units)

    monkeypatch.setattr(clients.Peers, "stamps", stamps)
    with store._pool.write_lock.held():  # it is not needed
        assert store.stats().objects == 1
    store.close()


def test_verify_needs_no_write_lock(pool_root):
    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    with store._pool.write_lock.held():
        before = time.monotonic()
        assert store.verify() == []
        assert time.monotonic() - before < 20
    store.close()


def test_memory_limit_of_both_kinds_of_control_groups(tmp_path):
    groups = tmp_path / "groups"
    groups.write_text("12:cpu,memory:/a/b\n3:cpuset:/a\n0::/x/y\n")
    assert memory_limit.memory_limit(groups, tmp_path) is None
    (tmp_path / "memory" / "a").mkdir(parents=True)
    (tmp_path / "memory" / "a" / "memory.limit_in_bytes").write_text("9000\n")
    assert memory_limit.memory_limit(groups, tmp_path) == 9000
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "memory.max").write_text("max\n")
    (tmp_path / "x" / "memory.max").write_text("5000\n")
    assert memory_limit.memory_limit(groups, tmp_path) == 5000
    assert memory_limit.memory_limit(tmp_path / "none", tmp_path) is None


def test_a_pool_above_the_memory_limit_warns_once(pool_root, monkeypatch, caplog):
    monkeypatch.setattr(memory_limit, "memory_limit", lambda: SIZE // 2)
    opened(pool_root, SIZE).close()
    assert len([record for record in caplog.records if "memory limit" in record.message]) == 1
    monkeypatch.setattr(memory_limit, "memory_limit", lambda: SIZE)
    caplog.clear()
    opened(pool_root, SIZE).close()
    assert "memory limit" not in caplog.text


@pytest.mark.parametrize("slice_s", [0.0, 60.0])
def test_long_lists_and_lookups_are_cut_into_short_reads(pool_root, monkeypatch, slice_s):
    from kvpool.stores.local import gauges, pool

    store = opened(pool_root, 1024 * GRANULE)
    keys = [key(f"{number:05d}") for number in range(700)]
    put(store, [*keys, key("other", 0, "zz")])
    store.remove(keys[100:200])
    monkeypatch.setattr(gauges, "_LIST_S", slice_s)
    monkeypatch.setattr(pool, "_SNAPSHOT_S", slice_s)
    reads, real = [], store._pool.readers.read
    monkeypatch.setattr(store._pool.readers, "read", lambda *args: reads.append(1) or real(*args))
    kept = keys[:100] + keys[200:]
    assert store.list(b"v1:ns:") == kept
    assert len(reads) == (10 if slice_s == 0 else 1)
    reads.clear()
    assert has(store, keys) == [name in kept for name in keys]
    assert len(reads) == (11 if slice_s == 0 else 1)
    store.close()


def test_verify_holds_no_writer_up(pool_root, monkeypatch):
    from kvpool.stores.local import gauges

    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    real = gauges._Check.run

    def run(self, records):
        assert put(store, [key(number) for number in range(8)], deadline_s=30.0) == [Status.OK] * 8
        assert records.count("objects") == 1
        return real(self, records)

    monkeypatch.setattr(gauges._Check, "run", run)
    assert store.verify() == []
    store.close()


def test_a_job_given_up_at_the_lock_does_nothing(pool_root):
    store, ran = opened(pool_root, 16 * SIZE), []
    lock = os.open(pool_root / "unit" / "index" / "data.mdb", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Overdue):
        store._pool.writer.call(ran.append, time.monotonic() + 0.1)
    os.close(lock)
    assert put(store, [key(1)], SIZE) == [Status.OK]
    assert ran == []
    store.close()
