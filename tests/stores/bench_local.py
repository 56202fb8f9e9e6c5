"""How fast the embedded store is: python -m tests.stores.bench_local

64 objects of 2 MiB in scattered segments of 64 KiB, a full pool of 1 GiB that evicts, against plain memmove of the same segments
between the same places; then lookups of 1,000 keys among 50,000.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from kvpool.stores.base import Batch, Status
from kvpool.stores.local import LocalStore

SEGMENT, OBJECT, COUNT, POOL = 64 << 10, 2 << 20, 64, 1 << 30


def key(group: int, number: int) -> bytes:
    return f"v1:0123456789abcdef:g0:h0-7_l0-31_c0_0:{group:08x}{number * 2654435761:056x}".encode()


def copies(root: Path) -> None:
    store = LocalStore(root, "copies", POOL)
    store.open()
    memory = np.random.default_rng(1).integers(0, 256, COUNT * OBJECT, dtype=np.uint8)
    places = np.random.default_rng(2).permutation(COUNT * OBJECT // SEGMENT).reshape(COUNT, -1) * SEGMENT
    addresses, sizes = memory.ctypes.data + places, np.full(OBJECT // SEGMENT, SEGMENT, dtype=np.int64)
    shares: dict[str, list[float]] = {"put": [], "get": []}
    speeds: dict[str, list[float]] = {"put": [], "get": []}
    for turn in range(40):
        batch = Batch([key(turn, number) for number in range(COUNT)], addresses, sizes)
        took = {}
        for name, call in (("put", store.put), ("get", store.get)):
            before = time.perf_counter()
            results = call(batch, 30.0).results()
            took[name] = time.perf_counter() - before
            assert {result.status for result in results} == {Status.OK}
        pins = store.pin(batch.keys)
        slots = (np.array(pins.addresses)[:, None] + np.arange(0, OBJECT, SEGMENT)).ravel().tolist()
        segments = addresses.ravel().tolist()
        for name, targets, sources in (("put", slots, segments), ("get", segments, slots)):
            before = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                ctypes.memmove(target, source, SEGMENT)
            if turn >= 20:  # the pool is full and mapped
                plain = time.perf_counter() - before
                shares[name].append(plain / took[name])
                speeds[name].append(COUNT * OBJECT / took[name] / 1e9)
        store.unpin(pins)
    for name in ("put", "get"):
        print(f"{name}: {statistics.median(speeds[name]):.2f} GB/s, {statistics.median(shares[name]):.2f} of memmove")
    store.close()


def lookups(root: Path) -> None:
    store = LocalStore(root, "lookups", POOL)
    store.open()
    memory, keys = np.zeros(4096, dtype=np.uint8), [key(0, number) for number in range(50_000)]
    for start in range(0, len(keys), 1000):
        part = keys[start : start + 1000]
        store.put(Batch(part, np.full((1000, 1), memory.ctypes.data), np.array([4096])), 30.0)
    times: dict[str, list[float]] = {"exists": [], "lease": []}
    for start in range(0, len(keys), 1000):
        part = keys[start : start + 1000]
        before = time.perf_counter()
        store.exists(part)
        between = time.perf_counter()
        store.release(store.lease(part, 1.0))
        times["exists"].append(between - before)
        times["lease"].append(time.perf_counter() - between)
    for name, seconds in times.items():
        print(f"{name} of 1,000 keys: {statistics.median(seconds) * 1e3:.2f} ms")
    store.close()


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir="/dev/shm"))
    try:
        copies(folder)
        lookups(folder)
    finally:
        shutil.rmtree(folder)
