"""The openYuanrong store against a real worker: the whole contract, and what is its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool.ops.services.yuanrong import YuanrongService, has_coordinator
from kvpool.stores.base import MISS, Hit, Status
from kvpool.stores.conformance import CHECKS, run_check
from kvpool.stores.conformance.bench import Bench, found, statuses
from kvpool.stores.context import StoreContext
from kvpool.stores.yuanrong import YuanrongStore
from kvpool.stores.yuanrong.keys import MAX_NAME
from tests.stores.needs import needs_etcd, needs_yuanrong
from tests.stores.yuanrong_worker import patience, running_worker

MIB = 1 << 20
POOL_MB = 128
TIMES = {"connect_timeout_ms": 20_000, "request_timeout_ms": 20_000}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    needs_yuanrong()
    with patience(), running_worker(tmp_path_factory.mktemp("yuanrong"), POOL_MB, **TIMES) as running:
        yield running


@pytest.fixture
def bench(worker):
    made = Bench(worker.store)
    yield made
    made.close()


UNCLAIMED = {
    "lease_protects",
    "lease_runs_out",
    "leases_are_counted",
    "remove_while_leased",
    "list_and_clear",
    "reserve_publish_discard",
    "publish_twice_fails",
    "pin_reads_in_place",
    "reserve_when_full",
}
UNBOUNDED = {
    "eviction_makes_room",
    "bc_080_a_batch_does_not_evict_itself",
    "a_batch_larger_than_the_pool_keeps_its_head",
    "ranged_read",
}
"""The library does not tell the capacity: test_a_full_pool_evicts_the_oldest_and_readers_go_on stands for these."""
CHECKED = [check for check in CHECKS if check.__name__ not in UNCLAIMED | UNBOUNDED]


@pytest.mark.parametrize("check", CHECKED, ids=lambda check: check.__name__)
def test_contract(check, worker):
    """As a tool, with one client process a store; what is below, and the faults, are as a worker, with two."""
    outcome = run_check(check, lambda: worker.store("tool"))
    assert outcome.passed, outcome.text


def test_contract_skips_only_what_is_not_claimed(worker, bench):
    left = [run_check(check, worker.store) for check in CHECKS if check.__name__ in UNCLAIMED]
    assert {(outcome.skipped, "is not" in outcome.text) for outcome in left} == {(True, True)}
    assert bench.store().stats().capacity_bytes == 0
    assert len(CHECKED) + len(UNCLAIMED | UNBOUNDED) == len(CHECKS)


def test_a_full_pool_evicts_the_oldest_and_readers_go_on(bench):
    store, held, data = bench.store(), bench.key("held"), bench.content(1, 1, MIB)
    bench.stored(store, [held], data)
    reader = store.begin_read([held, bench.key("none")], 5.0)
    assert statuses(reader.results) == [Status.OK, Status.MISSING]
    count = POOL_MB + POOL_MB // 2
    keys = [bench.key(i) for i in range(count)]
    for first in range(0, count, 16):
        memory = np.full((16, MIB), first % 251, dtype=np.uint8)
        results = bench.put(store, keys[first : first + 16], memory, MIB // 16)
        assert {result.status for result in results} == {Status.OK}
    hits = found(store, keys)
    assert all(hits[-16:])
    assert not any(hits[:16])
    results, got = bench.get(store, keys, MIB, MIB // 16)
    assert {result.status for result, hit in zip(results, hits, strict=True) if not hit} == {Status.MISSING}
    read = [row for row, result in enumerate(results) if result.status is Status.OK]
    assert len(read) > POOL_MB // 4
    assert all((got[row] == (row - row % 16) % 251).all() for row in read)
    again = np.zeros_like(data)
    for start in (MIB // 2, 0):
        addresses = np.array([[again.ctypes.data + start]], dtype=np.int64)
        assert statuses(reader.read([0], start, addresses, np.array([MIB // 2]))) == [Status.OK]
    assert np.array_equal(again, data)
    with pytest.raises(ValueError, match="of an object of"):
        reader.read([0], MIB // 2, addresses, np.array([MIB]))
    reader.end()
    assert statuses(reader.read([0], 0, addresses, np.array([1]))) == [Status.FATAL]


def test_bc_103_memory_that_was_read_is_given_back(bench):
    store, count = bench.store(), POOL_MB // 3
    keys, memory = [bench.key(i) for i in range(count)], np.zeros((count, MIB), dtype=np.uint8)
    assert {result.status for result in bench.put(store, keys, memory, MIB)} == {Status.OK}
    for _ in range(4):
        assert {result.status for result in bench.get(store, keys, MIB, MIB)[0]} == {Status.OK}
    for turn in range(3):  # more than the pool holds, were what was read still held
        results = bench.put(store, [bench.key(f"{turn}-{i}") for i in range(count)], memory, MIB)
        assert {result.status for result in results} == {Status.OK}


def test_bc_096_a_reader_never_sees_two_writers_mixed(worker, bench):
    """Publishing over a key replaces the object: who holds the old one reads the old bytes, everybody else the new ones."""
    store, key, others = bench.store(), bench.key("contended"), [bench.store(), bench.store()]
    stop, wrong = threading.Event(), []

    def write(mine):
        data = np.full((1, MIB), mine, dtype=np.uint8)
        while not stop.is_set():
            others[mine]._mover().put(bench.batch([key], data, 65536))  # below the look that makes the second put EXISTS

    threads = [threading.Thread(target=write, args=(i,)) for i in range(len(others))]
    for thread in threads:
        thread.start()
    seen, end = set(), time.monotonic() + 90
    while time.monotonic() < end and len(seen) < 2:
        wrong += mixed(bench, store, key, seen, 10)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert seen == {0, 1}


def mixed(bench, store, key, seen, gets):
    """What was read that is not one value all through."""
    wrong = []
    for _ in range(gets):
        results, got = bench.get(store, [key], MIB, 65536)
        values = np.unique(got).tolist() if results[0].status is Status.OK else []
        seen.update(values)
        wrong += [values] if len(values) > 1 else []
    return wrong


def test_bc_013_awkward_keys_are_the_same_object_in_every_call(bench):
    store, data = bench.store(), bench.content(2, 6)
    keys = [b"a/b.c d", "模型😀".encode(), b"k" * MAX_NAME, b"\x00\xff", b"x~.-/_", b"v1:plain"]
    keys = [key[: MAX_NAME - 17] + bench.key("")[3:19] for key in keys]
    bench.stored(store, keys, data)
    assert found(store, keys) == [True] * 6
    bench.reads(store, keys, data)
    assert statuses(store.remove(keys)) == [Status.OK] * 6
    assert found(store, keys) == [False] * 6


def test_bc_169_a_failing_part_fails_its_own_keys_only(bench, monkeypatch):
    store, keys, data = bench.store(), [bench.key(i) for i in range(600)], bench.content(3, 600, 64)
    transfers, calls = store._mover(), []
    real = transfers.put

    def second_fails(batch):
        calls.append(len(batch.keys))
        if len(calls) == 2:
            raise OSError("link down")
        return real(batch)

    monkeypatch.setattr(transfers, "put", second_fails)
    results = bench.put(store, keys, data, 64)
    assert calls == [256, 256, 88]
    assert statuses(results) == [Status.OK] * 256 + [Status.TRANSIENT] * 256 + [Status.OK] * 88
    assert found(store, keys) == [True] * 256 + [False] * 256 + [True] * 88


def test_bc_093_a_scheduler_looks_up_by_one_process_until_a_thread_transfers(worker, bench):
    store, key = bench.store(), bench.key("a")
    bench.stored(store, [key], bench.content(4))
    looking = worker.store("scheduler")
    looking.open()
    try:
        assert isinstance(looking.exists([key])[0], Hit)
        assert looking.exists([bench.key("none")]) == [MISS]
        assert looking.health().ok
        assert looking._moves is None
        results = []
        thread = threading.Thread(target=lambda: results.extend(bench.put(looking, [bench.key("b")], bench.content(5))))
        thread.start()
        thread.join(60)
        assert statuses(results) == [Status.OK]
    finally:
        looking.close()


def test_objects_outlive_the_store_that_wrote_them(worker, bench):
    keys, data = [bench.key(i) for i in range(4)], bench.content(5, 4, 100_003)
    first = worker.store()
    first.open()
    assert statuses(bench.put(first, keys, data, 1000)) == [Status.OK] * 4
    first.close()
    bench.reads(bench.store(), keys, data, 777)


def test_notes_are_kept(bench):
    one, two = bench.store(), bench.store()
    family = b"kvpool:notes:" + bench.key("")[3:19] + b":"
    one.write_note(family + b"a", "first")
    two.write_note(family + b"b", "second")
    assert two.notes(family) == {family + b"a": "first", family + b"b": "second"}
    assert one.notes(family + b"b") == {family + b"b": "second"}


def test_metadata_of_the_hetero_client(worker):
    """Lookups of NPU processes go through HeteroClient, which works on a host without NPU."""
    store = YuanrongStore(worker.options(), StoreContext("scheduler", "npu"))
    store.open()
    try:
        assert store.exists([b"v1:none"]) == [MISS]
        assert statuses(store.remove([b"v1:none"])) == [Status.MISSING]
        assert not store.capabilities.ranged
    finally:
        store.close()


NPU = """
import os, sys
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.stores.conformance.bench import Bench
from kvpool.stores.context import StoreContext
from kvpool.stores.yuanrong import YuanrongStore
options = YuanrongOptions(worker_addr=sys.argv[1], connect_timeout_ms=3000, request_timeout_ms=1000)
bench = Bench(lambda: YuanrongStore(options, StoreContext("worker", "npu")))
store, key, data = bench.store(), bench.key("a"), bench.content(1)
for result in bench.put(store, [key], data) + bench.get(store, [key])[0] + store.begin_write([key], 8, 1.0).results:
    print(result.status.value, result.text, flush=True)
bench.close()
os._exit(0)  # after a get of NPU memory the library keeps the process for 30 s
"""


def test_npu_memory_on_a_host_without_npu_is_an_error_of_the_library(worker):
    """As far as transfers of NPU memory can be run here: the lists of blobs reach the library. It runs in the process itself."""
    done = subprocess.run([sys.executable, "-c", NPU, worker.address], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    put, get, pieces = done.stdout.splitlines()
    assert put.startswith("transient code: [Runtime error]")
    assert "No device manager" in put
    assert get.startswith("missing")
    assert pieces == "fatal NPU objects cannot be written in pieces"


def test_cuda_is_refused_by_name(worker):
    store = YuanrongStore(worker.options(), StoreContext("worker", "cuda"))
    with pytest.raises(ValueError, match="does not reach the memory of cuda"):
        store.open()


def test_service_refuses_a_second_start_and_a_coordinator_it_has_not(worker, tmp_path):
    with pytest.raises(ValueError, match="stop it first"):
        YuanrongService().start(Path(worker.started.folder), 5.0)
    assert YuanrongService().status(Path(worker.started.folder)) == {"worker": "ready"}
    with pytest.raises(ValueError, match="accepted: metastore, etcd, coordinator"):
        YuanrongService(discovery="zookeeper")
    if not has_coordinator():
        with pytest.raises(ValueError, match="has no coordinator"):
            YuanrongService(discovery="coordinator").start(tmp_path / "c", 5.0)


def test_a_worker_with_etcd(tmp_path):
    needs_yuanrong()
    needs_etcd()
    with patience(), running_worker(tmp_path / "etcd", 64, discovery="etcd", **TIMES) as running:
        bench = Bench(running.store)
        store, key, data = bench.store(), bench.key("a"), bench.content(6)
        bench.stored(store, [key], data)
        bench.reads(store, [key], data)
        bench.close()
