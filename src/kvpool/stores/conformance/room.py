"""Checks of eviction and leases."""

from __future__ import annotations

import time

import numpy as np

from kvpool.stores.base import Batch, Hit, Status
from kvpool.stores.conformance.bench import DEADLINE, Bench, bounded, fill, fill_until, found, in_first_tier, require, same, sane


def eviction_makes_room(bench: Bench) -> None:
    store = bounded(bench)
    keys = fill(bench, store, "a")
    hits = found(store, keys)
    require(hits[-1], "the newest object was not stored")
    if all(in_first_tier(store, keys[:32])):
        fill_until(bench, store, "b", lambda: not all(in_first_tier(store, keys[:32])))
    require(not all(in_first_tier(store, keys[:32])), "the oldest objects are still there though the pool was overfilled")
    sane(store)


def bc_080_a_batch_does_not_evict_itself(bench: Bench) -> None:
    store, nbytes = bounded(bench), 64 << 10
    room = store.stats().capacity_bytes // nbytes
    keys = [bench.key(i) for i in range(room + room // 2)]
    half, present = keys[: room // 2], keys[room:]
    memory = np.zeros((room, nbytes), dtype=np.uint8)
    bench.put(store, half, memory[: len(half)], nbytes)
    bench.put(store, present, memory[: len(present)], nbytes)
    results = bench.put(store, keys[: room // 2 + room // 4], memory[: room // 2 + room // 4], nbytes)
    for row, hit in enumerate(found(store, keys[: len(results)])):
        same(hit, results[row].stored, f"presence of object {row}, put says {results[row].status}")
    require(found(store, half) == [True] * len(half), "objects of the batch that were there before are gone")


def a_batch_larger_than_the_pool_keeps_its_head(bench: Bench) -> None:
    store, nbytes = bounded(bench), 64 << 10
    count = store.stats().capacity_bytes // nbytes * 2
    keys = [bench.key(i) for i in range(count)]
    memory = np.zeros((1, nbytes), dtype=np.uint8)
    addresses = np.full((count, 1), memory.ctypes.data, dtype=np.int64)
    handle = store.put(Batch(keys, addresses, np.array([nbytes], dtype=np.int64)), DEADLINE)
    require(handle.wait(DEADLINE), "a put was not done after its deadline")
    results = handle.results()
    kept = sum(result.stored for result in results)
    require(count // 4 < kept < count, f"{kept} of {count} objects stored in a pool for {count // 2}")
    same({result.status for result in results[:kept]}, {Status.OK}, "the head of the batch")
    same({result.status for result in results[kept:]}, {Status.NO_SPACE}, "the rest of the batch")
    same(found(store, keys[:kept]), [True] * kept, "presence of the head")


def lease_protects(bench: Bench) -> None:
    store = bounded(bench, "leases")
    key, data = bench.key("leased"), bench.content(12)
    bench.stored(store, [key], data)
    lease = store.lease([key, bench.key("none")], 60.0)
    same([isinstance(answer, Hit) for answer in lease.answers], [True, False], "what the lease granted")
    require(lease.until > time.monotonic() + 30, "the lease ends too early")
    fill(bench, store, "a")
    bench.reads(store, [key], data)
    store.release(lease)
    store.release(lease)
    fill_until(bench, store, "b", lambda: not any(in_first_tier(store, [key])))
    same(in_first_tier(store, [key]), [False], "presence after the release")


def lease_runs_out(bench: Bench) -> None:
    store = bounded(bench, "leases")
    key = bench.key("leased")
    bench.stored(store, [key], bench.content(13))
    store.lease([key], 0.05)
    time.sleep(0.1)
    fill_until(bench, store, "a", lambda: not any(in_first_tier(store, [key])))
    same(in_first_tier(store, [key]), [False], "presence after the end of the lease")


def leases_are_counted(bench: Bench) -> None:
    store = bounded(bench, "leases")
    key, data = bench.key("leased"), bench.content(14)
    bench.stored(store, [key], data)
    first, second = store.lease([key], 60.0), store.lease([key], 60.0)
    store.release(first)
    fill(bench, store, "a")
    bench.reads(store, [key], data)
    store.release(second)
    same(store.stats().leases, 0, "leases left")
