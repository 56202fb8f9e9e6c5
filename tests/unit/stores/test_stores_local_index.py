"""The index when its readers die or stop, when it is full, and when giving something back fails."""

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

SIZE = 64 * GRANULE
MAP = 1 << 20


class Broken(CpuCopyEngine):
    broken = False

    def copy(self, targets, sources, sizes):
        if self.broken:
            raise RuntimeError("the device fell off")
        super().copy(targets, sources, sizes)


@pytest.fixture
def small_index(monkeypatch):
    monkeypatch.setattr(index, "map_size_for", lambda units: MAP)


@pytest.fixture
def reader(pool_root, small_index):
    """A process inside a read transaction."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvpool.stores.local import index\n"
        f"index.map_size_for = lambda units: {MAP}\n"
        "from tests.unit.stores.helpers import opened\n"
        f"store = opened(Path(sys.argv[1]), {SIZE})\n"
        "with store._pool.environment.env.begin() as txn:\n"
        "    txn.get(b'x')\n"
        "    print('inside', flush=True)\n"
        "    time.sleep(600)\n"
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


def test_a_reader_that_was_killed_does_not_fill_the_index(pool_root, reader):
    store = opened(pool_root, SIZE)
    churn(store, 2)
    reader.kill()
    reader.wait()
    assert churn(store, 300) == [Status.OK]
    assert store.health().ok
    store.close()


def test_an_index_that_is_full_says_so_and_recovers(pool_root, reader):
    store = opened(pool_root, SIZE)
    put(store, [key("kept")], fill=3)
    reader.send_signal(signal.SIGSTOP)
    assert Status.NO_SPACE in churn(store, 300)
    memory = np.ones((1, GRANULE), dtype=np.uint8)
    result = store.put(batch([key("new")], memory), 5.0).results()[0]
    assert result.status is Status.NO_SPACE
    assert "the index is full" in result.text
    assert not store.health().ok
    assert "the index is full" in store.health().text
    assert get(store, [key("kept")]) == [3]
    reader.kill()
    reader.wait()
    assert store.health().ok
    assert put(store, [key("new")]) == [Status.OK]
    assert store.verify() == []
    store.close()


def test_dead_readers_are_looked_for_now_and_then(pool_root, reader, monkeypatch):
    """Also without a client file that tells: the reader joined and died unseen, and nothing is ever evicted."""
    monkeypatch.setattr("kvpool.stores.local.writer._CHECK_EVERY", 5)
    store = opened(pool_root, SIZE)
    env = store._pool.environment.env
    assert str(reader.pid) in env.readers()
    reader.kill()
    reader.wait()
    store._pool.peers.on_gone = lambda: None
    for turn in range(6):
        put(store, [key(turn)])
    assert str(reader.pid) not in env.readers()
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


def test_read_transactions_of_a_process_do_not_overlap(pool_root):
    one, other = opened(pool_root, SIZE), opened(pool_root, SIZE)
    put(one, [key("a")])
    inside, go = threading.Event(), threading.Event()

    def slow(txn):
        inside.set()
        assert go.wait(10)

    first = threading.Thread(target=one._pool.read, args=(slow,))
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=other.exists, args=([key("a")],))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go.set()
    first.join()
    second.join(10)
    one.close()
    other.close()


def test_stats_looks_at_leases_outside_its_transaction(pool_root, monkeypatch):
    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    real = clients.Peers.stamps

    def stamps(self, units):
        assert not store._pool.environment.reading.locked()
        return real(self, units)

    monkeypatch.setattr(clients.Peers, "stamps", stamps)
    with store._pool.environment.env.begin(write=True):  # none is needed
        assert store.stats().objects == 1
    store.close()


def test_verify_needs_no_write_lock(pool_root):
    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    with store._pool.environment.env.begin(write=True):
        before = time.monotonic()
        assert store.verify() == []
        assert time.monotonic() - before < 5
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
