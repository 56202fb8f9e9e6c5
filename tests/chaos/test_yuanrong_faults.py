"""The openYuanrong store when its worker is down, killed, stopped or full, and when a client is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvpool.ops.services import processes
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.stores.base import UNKNOWN, Hit, Status
from kvpool.stores.conformance.bench import Bench, found, statuses
from kvpool.stores.context import StoreContext
from kvpool.stores.yuanrong import YuanrongStore, child
from tests.stores.needs import needs_yuanrong
from tests.stores.yuanrong_worker import running_worker
from tests.waiting import eventually

MIB = 1 << 20
POOL_MB = 64
REQUEST_MS = 1000


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    needs_yuanrong()
    flags = {"client_dead_timeout_s": "3"}
    options = {"request_timeout_ms": REQUEST_MS, "worker_flags": flags}
    with pytest.MonkeyPatch.context() as patch, running_worker(tmp_path_factory.mktemp("yuanrong"), POOL_MB, **options) as running:
        patch.setattr("kvpool.stores.yuanrong.store._START_S", 90.0)  # a client process starts slowly on a busy machine
        yield running


@pytest.fixture
def bench(worker):
    made = Bench(worker.store)
    yield made
    made.close()


def waited_for_a_cpu() -> float:
    """Seconds, of all threads of this process and its children together: one that forks stands still until its child runs."""
    waited = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            waited += int((task / "schedstat").read_text().split()[1])
            for pid in (task / "children").read_text().split():
                waited += int(Path("/proc", pid, "schedstat").read_text().split()[1])
    return waited / 1e9


class Ticks:
    """How long the threads of this process stand still at most, but for what they wait for a CPU: a library that holds the
    interpreter lock would show here."""

    def __enter__(self):
        self.longest, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self):
        last, waited = time.monotonic(), waited_for_a_cpu()
        while not self._stop.wait(0.01):
            now, waits = time.monotonic(), waited_for_a_cpu()
            self.longest = max(self.longest, now - last - max(0.0, waits - waited))
            last, waited = now, waits

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("kind", ["refuses", "is silent"])
def test_bc_095_open_fails_in_time_and_names_the_worker(kind):
    needs_yuanrong()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "is silent":
            listener.listen(8)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        store = YuanrongStore(YuanrongOptions(worker_addr=address, connect_timeout_ms=500), StoreContext())
        began = time.monotonic()
        with pytest.raises(OSError, match=f"no yuanrong worker is reached at {address}"):
            store.open()
        assert time.monotonic() - began < 40
        assert store.exists([b"v1:a"]) == [UNKNOWN]
        store.close()


def test_bc_091_a_stopped_worker_stops_nobody_else(worker, bench):
    store, keys, data = bench.store(), [bench.key(i) for i in range(4)], bench.content(1, 4, MIB)
    bench.stored(store, keys, data)
    worker.signal(signal.SIGSTOP)
    try:
        with Ticks() as ticks:
            began = time.monotonic()
            assert store.exists(keys) == [UNKNOWN] * 4
            assert time.monotonic() - began < store.limits.lookup_s + 5
            began = time.monotonic()
            assert not store.health().ok
            assert time.monotonic() - began < store.limits.lookup_s + 5
            memory = np.zeros_like(data)
            handles = [
                store.get(bench.batch(keys, memory, 65536), 2.0),
                store.put(bench.batch([bench.key("new")], data[:1], 65536), 2.0),
            ]
            for handle in handles:
                assert handle.wait(60), "a call was not over long after every timeout"
                assert {result.status for result in handle.results()} == {Status.TRANSIENT}
        assert ticks.longest < 0.5
    finally:
        worker.signal(signal.SIGCONT)
    eventually(lambda: found(store, keys) == [True] * 4, "they are found again")
    eventually(lambda: statuses(bench.get(store, keys, MIB)[0]) == [Status.OK] * 4, "they can be read")
    bench.reads(store, keys, data, 65536)
    assert store.health().ok


def test_a_close_while_the_worker_is_stopped_ends(worker, bench):
    store = bench.store()
    worker.signal(signal.SIGSTOP)
    try:
        handle = store.put(bench.batch([bench.key("a")], bench.content(2), 1024), 5.0)
        time.sleep(0.3)
        began = time.monotonic()
        store.close()
        assert time.monotonic() - began < 40
        assert handle.wait(60)
        assert handle.results()[0].status is not Status.OK
    finally:
        worker.signal(signal.SIGCONT)


def test_a_client_killed_between_making_and_publishing_leaves_nothing(worker, bench):
    store, data = bench.store(), np.zeros((POOL_MB // 2, MIB), dtype=np.uint8)
    keys = [bench.key(i) for i in range(len(data))]
    for _ in range(2):  # more than the pool holds, were it not given back, client_dead_timeout_s after the kill
        writer = eventually(lambda: begun(store, keys), "there is room for all")
        rows = list(range(len(keys)))
        addresses = np.full((len(keys), 1), data.ctypes.data, dtype=np.int64)
        assert statuses(writer.write(rows, 0, addresses, np.array([MIB]))) == [Status.OK] * len(keys)
        os.kill(writer._child.pid, signal.SIGKILL)
        assert Status.OK not in statuses(writer.commit())
        assert found(store, keys) == [False] * len(keys)
    eventually(lambda: statuses(bench.put(store, keys[:8], data[:8], 65536)) == [Status.OK] * 8, "they can be stored")
    bench.reads(store, keys[:8], data[:8], 65536)


def begun(store, keys):
    """A writer that has room for all of the keys; None where there is none."""
    writer = store.begin_write(keys, MIB, 10.0)
    if statuses(writer.results) == [Status.OK] * len(keys):
        return writer
    writer.abort()
    return None


ENGINE = """
import sys, time
from kvpool.ops.services import processes
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.stores.context import StoreContext
from kvpool.stores.yuanrong import YuanrongStore
from kvpool.stores.yuanrong import store as module
module._START_S = 90.0
store = YuanrongStore(YuanrongOptions(worker_addr=sys.argv[1], connect_timeout_ms=30_000), StoreContext())
store.open()
assert store.begin_write([sys.argv[2].encode()], 1 << 20, 60.0).results[0].status.value == "ok"
print(store._lookup._child.pid, store._mover().link._child.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_engine_takes_its_client_processes_along(worker, bench):
    store, key, data = bench.store(), bench.key("half"), bench.content(8)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, worker.address, key.decode()], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in engine.stdout.readline().split()]
    finally:
        engine.kill()
        engine.communicate()
    assert len(pids) == 2
    eventually(lambda: not any(processes.start_time(pid) for pid in pids), "they have ended")
    assert found(store, [key]) == [False]
    bench.stored(store, [key], data)


def test_a_store_closed_between_making_and_publishing_gives_the_room_back_at_once(worker, bench):
    for turn in range(3):
        store = worker.store()
        store.open()
        writer = begun(store, [bench.key(f"{turn}-{i}") for i in range(POOL_MB // 2)])
        store.close()
        assert writer is not None, f"turn {turn}"
        assert Status.OK not in statuses(writer.commit())


def test_memory_is_not_trusted_after_a_standstill(bench, monkeypatch):
    """A paused container: the worker may have given the client's memory to others."""
    store, key, data = bench.store(), bench.key("a"), bench.content(7)
    bench.stored(store, [key], data)
    writer, reader = store.begin_write([bench.key("b")], data.shape[1], 5.0), store.begin_read([key], 5.0)
    monkeypatch.setattr(child, "_now", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + child.FROZEN_S + 1)
    place = np.array([[data.ctypes.data]], dtype=np.int64), np.array([data.shape[1]], dtype=np.int64)
    assert statuses(writer.write([0], 0, *place)) == [Status.TRANSIENT]
    assert statuses(reader.read([0], 0, *place)) == [Status.TRANSIENT]
    assert Status.OK not in statuses(writer.commit())
    eventually(lambda: statuses(bench.get(store, [key])[0]) == [Status.OK], "it can be read")


def test_bc_096_a_client_killed_in_the_middle_of_transfers(worker, bench):
    """Gets give the whole object or none; the store starts another client process by itself."""
    store, keys, data = bench.store(), [bench.key(i) for i in range(8)], bench.content(3, 8, MIB)
    bench.stored(store, keys, data)
    wrong, outcomes, turn = [], set(), 0
    while turn < 6 or Status.TRANSIENT not in outcomes:
        assert turn < 100, "no transfer was met"
        victim = store._mover().link._child
        killer = threading.Timer(0.002 * (turn % 6), os.kill, (victim.pid, signal.SIGKILL))
        killer.start()
        for _ in range(4):
            results, got = bench.get(store, keys, MIB, 65536)
            outcomes.update(statuses(results))
            wrong += [
                row for row, result in enumerate(results) if result.status is Status.OK and not np.array_equal(got[row], data[row])
            ]
        killer.join()
        eventually(lambda: statuses(bench.get(store, keys, MIB)[0]) == [Status.OK] * 8, "they can be read")
        turn += 1
    assert wrong == []
    assert outcomes <= {Status.OK, Status.TRANSIENT}


def test_an_object_larger_than_the_pool_is_no_space(worker, bench):
    store = bench.store()
    memory = np.zeros((1, (POOL_MB + 16) * MIB), dtype=np.uint8)
    handle = store.put(bench.batch([bench.key("huge")], memory, MIB), 20.0)
    assert handle.wait(60)
    assert handle.results()[0].status is Status.NO_SPACE
    assert handle.results()[0].text
    bench.stored(store, [bench.key("small")], bench.content(4))


def test_a_worker_killed_under_load_and_restarted(worker, bench):
    """What it held is gone; clients go on by themselves."""
    store, stop, wrong, outcomes = bench.store(), threading.Event(), [], set()
    lost, keys, data = bench.key("lost"), [bench.key(i) for i in range(16)], bench.content(5, 16, 256 << 10)
    bench.stored(store, [lost], data[:1])

    def load():
        while not stop.is_set():
            outcomes.update(statuses(bench.put(store, keys, data, 65536)))
            results, got = bench.get(store, keys, data.shape[1], 65536)
            for row, result in enumerate(results):
                if result.status is Status.OK and not np.array_equal(got[row], data[row]):
                    wrong.append(row)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        time.sleep(0.5)
        with Ticks() as ticks:
            worker.kill()
            time.sleep(1.5)
            assert not store.health().ok
            assert store.exists(keys[:2]) == [UNKNOWN] * 2
            worker.restart()
        assert ticks.longest < 0.5
        eventually(lambda: store.health().ok, "the worker is back")
        assert found(store, [lost]) == [False]
        eventually(lambda: all(isinstance(answer, Hit) for answer in store.exists(keys)), "they are stored again")
    finally:
        stop.set()
        thread.join(120)
    assert not thread.is_alive()
    assert wrong == []
    assert Status.TRANSIENT in outcomes
    assert outcomes <= {Status.OK, Status.EXISTS, Status.TRANSIENT, Status.BUSY}
