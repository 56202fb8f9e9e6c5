"""The faulty store does what its plan says, and nothing else."""

import json
import os
import threading
import time

import numpy as np
import pytest
from tests.unit.stores.helpers import GRANULE, batch, get, has, key, opened, put

from kvpool.stores import build_store
from kvpool.stores.base import MISS, UNKNOWN, Hit, Status
from kvpool.stores.faults import FaultPlan
from kvpool.stores.faulty import FaultyStore

KEYS = [key(i) for i in range(6)]


@pytest.fixture
def store(pool_root):
    store = FaultyStore(opened(pool_root, 64 * GRANULE))
    yield store
    store.plan.clear()
    store.close()


@pytest.mark.parametrize("kind", ["exists", "lease", "put", "get", "begin_write", "begin_read", "remove", "stats", "health"])
def test_an_error_is_raised_once(store, kind):
    store.plan.update(kind, error="boom", times=1)
    calls = {
        "exists": lambda: store.exists(KEYS),
        "lease": lambda: store.lease(KEYS, 1.0),
        "put": lambda: put(store, KEYS),
        "get": lambda: get(store, KEYS),
        "begin_write": lambda: store.begin_write(KEYS, GRANULE, 1.0).abort(),
        "begin_read": lambda: store.begin_read(KEYS, 1.0).end(),
        "remove": lambda: store.remove(KEYS),
        "stats": store.stats,
        "health": store.health,
    }
    with pytest.raises(RuntimeError, match="boom"):
        calls[kind]()
    calls[kind]()


def test_status_for_chosen_keys(store):
    store.plan.update("put", status="transient", indexes=[1, 3, 99])
    assert put(store, KEYS) == [Status.OK, Status.TRANSIENT] * 2 + [Status.OK] * 2
    assert has(store.inner, KEYS) == [True, False, True, False, True, True]
    store.plan.update("get", status="missing", every=3)
    assert get(store, KEYS) == [1, None, None, None, 1, None]
    store.plan.update("get", status="missing", indexes=[-1, -6])
    assert get(store, KEYS[:5]) == [1, None, 1, None, None], "-1 is the last, and -6 none of five"
    store.plan.update("get")
    store.plan.update("put", full=True, contains=":3")
    assert put(store, KEYS)[3] is Status.NO_SPACE


def test_fraction_is_seeded():
    def hits(seed: int) -> list[int]:
        plan = FaultPlan({"seed": seed, "calls": {"get": {"lose": True, "fraction": 0.3}}})
        return plan.begin("get").chosen([b"k"] * 1000, plan.chance)

    assert hits(1) == hits(1) != hits(2)
    assert 200 < len(hits(1)) < 400


def test_unknown_and_miss(store):
    put(store, KEYS)
    store.plan.update("exists", unknown=True, indexes=[0])
    store.plan.update("lease", status="missing", indexes=[1])
    assert store.exists(KEYS)[0] is UNKNOWN
    assert all(isinstance(answer, Hit) for answer in store.exists(KEYS)[1:])
    lease = store.lease(KEYS, 1.0)
    assert lease.answers[1] is MISS
    store.release(lease)


def test_lost_put_commit_and_publish(store):
    store.plan.update("put", lose=True, indexes=[0])
    assert put(store, KEYS[:2]) == [Status.OK] * 2
    assert has(store.inner, KEYS[:2]) == [False, True]
    store.plan.update("commit", lose=True)
    writer = store.begin_write([KEYS[2]], GRANULE, 1.0)
    memory = np.ones((1, GRANULE), dtype=np.uint8)
    piece = batch([KEYS[2]], memory)
    writer.write([0], 0, piece.addresses, piece.sizes)
    assert writer.commit()[0].status is Status.OK
    store.plan.update("publish", lose=True)
    slots = store.reserve(1, GRANULE, 1.0)
    assert store.publish([(slots[0], KEYS[3])], 1.0)[0].status is Status.OK
    assert has(store.inner, KEYS[2:4]) == [False, False]
    store.remove([b"wait"])
    assert store.stats().writing == 0


def test_corrupt_get_and_read(store):
    put(store, KEYS, fill=5)
    store.plan.update("get", corrupt=True, indexes=[1])
    memory = np.zeros((2, GRANULE), dtype=np.uint8)
    assert [result.status for result in store.get(batch(KEYS[:2], memory), 1.0).results()] == [Status.OK] * 2
    assert (memory[0] == 5).all()
    assert (memory[1] == 4).all()
    store.plan.update("read", corrupt=True)
    reader = store.begin_read(KEYS[:1], 1.0)
    piece = batch(KEYS[:1], memory)
    assert reader.read([0], 0, piece.addresses[:1], piece.sizes)[0].status is Status.OK
    assert (memory[0] == 4).all()
    reader.end()


@pytest.mark.parametrize("change", [-2, 3])
def test_wrong_number_of_results(store, change):
    store.plan.update("exists", result_change=change)
    store.plan.update("put", result_change=change)
    assert len(store.exists(KEYS)) == len(KEYS) + change
    assert len(put(store, KEYS)) == len(KEYS) + change


def test_delay_and_hang(store):
    store.plan.update("exists", delay_s=0.2)
    before = time.monotonic()
    store.exists(KEYS)
    assert time.monotonic() - before >= 0.2
    store.plan.update("get", hang=True)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (get(store, KEYS), done.set()))
    thread.start()
    assert not done.wait(0.2)
    store.plan.update("get")
    assert done.wait(60)
    thread.join()


def test_close_ends_a_hang(store):
    store.plan.update("put", hang=True)
    outcome = []
    thread = threading.Thread(target=lambda: outcome.extend(put(store, KEYS[:1])))
    thread.start()
    time.sleep(0.3)
    store.close()
    thread.join(60)
    assert outcome == [Status.FATAL]


def test_late_get_writes_memory_after_its_deadline(store):
    put(store, KEYS[:1], fill=9)
    store.plan.set_abandonable(False)
    assert not store.capabilities.abandonable
    assert store.inner.capabilities.abandonable
    store.plan.update("get", late_s=1.5)
    memory = np.zeros((1, GRANULE), dtype=np.uint8)
    handle = store.get(batch(KEYS[:1], memory), 0.1)
    assert not handle.wait(0.15)
    assert not handle.done()
    assert not handle.abandon()
    with pytest.raises(ValueError, match="not done"):
        handle.results()
    assert not memory.any()
    assert handle.wait(60)
    assert (memory == 9).all()
    assert handle.abandon()


def test_late_put_reads_memory_after_its_deadline(store):
    store.plan.update("put", late_s=1.5)
    memory = np.full((1, GRANULE), 1, dtype=np.uint8)
    handle = store.put(batch(KEYS[:1], memory), 0.05)
    assert not handle.wait(0.1)
    memory[:] = 2
    assert handle.wait(60)
    store.plan.update("put")
    assert get(store, KEYS[:1]) == [2]


def test_plan_in_a_file_is_followed(pool_root):
    path = pool_root / "plan.json"
    store = build_store("local", root=pool_root, name="p", dram_bytes=64 * GRANULE, fault_plan_path=path)
    store.open()
    assert put(store, KEYS[:1]) == [Status.OK]
    path.write_text(json.dumps({"abandonable": False, "calls": {"put": {"status": "fatal"}}}))
    assert put(store, KEYS[1:2]) == [Status.FATAL]
    assert not store.capabilities.abandonable
    path.write_text('{"calls": {"put": {"sta')
    os.utime(path, ns=(1, 1))
    assert put(store, KEYS[1:2]) == [Status.FATAL], "a file that is half written must not end the plan"
    path.unlink()
    assert put(store, KEYS[1:2]) == [Status.OK]
    assert store.capabilities.abandonable
    store.close()


def test_bad_plans_are_refused(tmp_path):
    for plan in ({"calls": {"got": {}}}, {"calls": {"get": {"delay": 1}}}, {"calls": {"get": {"status": "tired"}}}, {"sed": 1}):
        with pytest.raises(ValueError, match=r"fault plan"):
            FaultPlan(plan)
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json"):
        FaultPlan(path=path)
