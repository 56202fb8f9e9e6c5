"""python -m benchmarks.store_process STORE FOLDER [--quick]: measure one store in a process of its own, and print one JSON line.

The store is the one that the environment names; ``local`` is made in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.machine import move
from benchmarks.report import median
from benchmarks.store_calls import DEADLINE_S, Calls, OurCalls, native_calls
from kvpool.options import Deployment
from kvpool.options.ascend_store import BackendName
from kvpool.options.backend_file import read_backend_file
from kvpool.stores import Store, build_store
from kvpool.stores.base import Batch
from kvpool.stores.context import StoreContext

SEGMENT, OBJECT, OBJECTS = 64 << 10, 2 << 20, 32
ROUNDS, WARM = 12, 6
KEYS, SMALL = 1000, 4096
ANSWER = "measured: "
Seconds = dict[str, list[float]]


def open_store(backend: str, folder: Path) -> tuple[Store, Calls | None]:
    """The open store and its library's own calls."""
    if backend == "local":
        store = build_store("local", root=folder, name="stores", dram_bytes=256 << 20, on_last_close="remove")
        store.open()
        return store, None
    file = read_backend_file(cast(BackendName, backend), os.environ, Deployment(device="cpu"))
    assert file is not None, "every store but local has a configuration"
    store = build_store(backend, config=file.options, conf_path=file.path, context=StoreContext("worker"))
    store.open()
    return store, native_calls(backend, store, file.options)


class Rounds:
    """The same objects put and got by turns in different ways: from scattered segments into other ones, new keys each time."""

    def __init__(self, store: Store, ways: dict[str, Calls]) -> None:
        self._store, self._ways = store, ways
        nbytes = OBJECTS * OBJECT
        random = np.random.default_rng(1)
        self._source = random.integers(0, 256, nbytes, dtype=np.uint8)
        self._target, self._pool = np.zeros_like(self._source), np.ones_like(self._source)
        self._places = random.permutation(nbytes // SEGMENT).reshape(OBJECTS, -1) * SEGMENT
        self._sizes = np.full(OBJECT // SEGMENT, SEGMENT, dtype=np.int64)
        self.seconds: Seconds = {}

    def run(self, rounds: int, warm: int) -> None:
        """In every order, since what ran just before leaves its mark on caches and allocators."""
        orders = list(permutations(self._ways))
        for number in range(-warm, rounds):
            took: dict[str, float] = {}
            for name in orders[number % len(orders)]:
                took |= self._one(name, number)
            took |= self._memcpy()
            if number >= 0:
                for name, seconds in took.items():
                    self.seconds.setdefault(name, []).append(seconds)

    def _one(self, name: str, number: int) -> dict[str, float]:
        calls = self._ways[name]
        keys = [b"v1:0123456789abcdef:g0:h0-7_l0-31_c0_0:%s-%d-%d" % (name.encode(), number + 100, row) for row in range(OBJECTS)]
        put = _timed(calls.put, self._batch(keys, self._source))
        self._target[:] = 0
        got = _timed(calls.get, self._batch(keys, self._target))
        if not np.array_equal(self._source, self._target):
            raise RuntimeError(f"{name}: the bytes that were got are not those that were put")
        self._store.remove(keys)
        return {f"{name}_put": put, f"{name}_get": got}

    def _memcpy(self) -> dict[str, float]:
        """memmove of the same segments, into memory that is as large as all of them."""
        order = (self._pool.ctypes.data + np.arange(0, self._pool.nbytes, SEGMENT)).tolist()
        segments = (self._source.ctypes.data + self._places).ravel().tolist()
        return {"memcpy": move(order, segments, SEGMENT)}

    def _batch(self, keys: list[bytes], memory: np.ndarray) -> Batch:
        return Batch(keys, memory.ctypes.data + self._places, self._sizes)


def _timed(call: Callable[[Batch], None], batch: Batch) -> float:
    began = time.perf_counter()
    call(batch)
    return time.perf_counter() - began


def lookups(store: Store, ways: dict[str, Calls], rounds: int) -> dict[str, float]:
    """Milliseconds for a lookup of 1,000 small objects that are there, medians."""
    memory, keys = np.zeros(SMALL, dtype=np.uint8), [b"v1:0123456789abcdef:g0:h0-7_l0-31_c0_0:%064x" % row for row in range(KEYS)]
    addresses = np.full((KEYS, 1), memory.ctypes.data, dtype=np.int64)
    handle = store.put(Batch(keys, addresses, np.array([SMALL], dtype=np.int64)), DEADLINE_S)
    if not handle.wait(DEADLINE_S) or not all(result.stored for result in handle.results()):
        raise RuntimeError(f"{KEYS} small objects could not be stored")
    took: Seconds = {name: [] for name in ways}
    for _ in range(2 * rounds):
        for name, calls in ways.items():
            began = time.perf_counter()
            calls.exists(keys)
            took[name].append((time.perf_counter() - began) * 1e3)
    return {name: median(found) for name, found in took.items()}


def measure(backend: str, folder: Path, quick: bool) -> dict[str, float]:
    """Figures without the store's name."""
    store, native = open_store(backend, folder)
    try:
        ways: dict[str, Calls] = {"ours": OurCalls(store)}
        if native is not None:
            ways["native"] = native
        asked = dict(ways)
        if getattr(store, "checksums", False):
            ways["unsummed"] = OurCalls(store, checksums=False)
        rounds = 3 if quick else ROUNDS
        runs = Rounds(store, ways)
        runs.run(rounds, 1 if quick else WARM)
        looked = lookups(store, asked, rounds)
    finally:
        store.close()
    return figures(runs.seconds, looked)


def figures(seconds: Seconds, looked: dict[str, float]) -> dict[str, float]:
    """Overheads are medians of the ratios of a round; rates are bytes over median seconds."""
    nbytes = OBJECTS * OBJECT
    found = {"memcpy_gbps": nbytes / median(seconds["memcpy"]) / 1e9, "exists_1000_ms": looked["ours"]}
    if "native" in looked:
        found["native_exists_1000_ms"] = looked["native"]
    for call in ("put", "get"):
        found[f"{call}_gbps"] = nbytes / median(seconds[f"ours_{call}"]) / 1e9
        if f"native_{call}" not in seconds:
            continue
        found[f"native_{call}_gbps"] = nbytes / median(seconds[f"native_{call}"]) / 1e9
        for way, suffix in (("ours", ""), ("unsummed", "_without_checksum")):
            if own := seconds.get(f"{way}_{call}"):
                ratios = [one / other for one, other in zip(own, seconds[f"native_{call}"], strict=True)]
                found[f"{call}_overhead{suffix}"] = median(ratios)
    return found


def main(backend: str, folder: str, quick: str = "") -> None:
    found = measure(backend, Path(folder), quick == "--quick")
    print(ANSWER + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
