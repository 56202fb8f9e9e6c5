"""What the chaos tests run in processes of their own: a worker that writes and reads objects which describe themselves.

Usage: store_worker.py ROLE ROOT SEED [COUNT ...]. It prints ``ready`` when it has opened the pool and ``warm`` when it has stored
and found a good many objects. It works until its input ends, and until each COUNT (default: hit, put) is above ENOUGH; at its end
it prints one JSON line of counts. It exits with status 3 at the first wrong byte.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvpool.stores.base import Batch, Status
from kvpool.stores.local import LocalStore

POOL_BYTES = 24 << 20
CLASSES = (96 << 10, 160 << 10, 256 << 10)
KEYS = 240
PATIENCE_S = 20.0  # of every call: only a call that hangs takes so long
ENOUGH = 50


def key(number: int, nbytes: int) -> bytes:
    return f"v1:00000000000000ff:g0:h{number % 2}:{number // 2:08x}{nbytes:08x}".encode()


def content(number: int, nbytes: int) -> np.ndarray:
    """Every 8 bytes tell the object and the place, so a mixture of two objects, or a shift, shows."""
    words = np.arange(nbytes // 8, dtype=np.uint64)
    return (words + np.uint64(number * 1_000_003 + nbytes)) * np.uint64(0x9E3779B97F4A7C15)


def batch(numbers: list[int], memory: np.ndarray, nbytes: int, segments: int = 8) -> Batch:
    size = nbytes // segments
    rows = memory.ctypes.data + np.arange(len(numbers), dtype=np.int64) * memory.strides[0]
    addresses = rows[:, None] + np.arange(segments, dtype=np.int64) * size
    return Batch([key(number, nbytes) for number in numbers], addresses, np.full(segments, size, dtype=np.int64))


def open_store(root: str, pool_bytes: int = POOL_BYTES) -> LocalStore:
    store = LocalStore(Path(root), "chaos", pool_bytes)
    store.open()
    return store


class Worker:
    def __init__(self, store: LocalStore, seed: int, classes: tuple[int, ...] = CLASSES) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.classes = classes
        self.counts = dict.fromkeys(("put", "exists", "busy", "no_space", "transient", "hit", "miss", "removed"), 0)

    def put(self, numbers: list[int], nbytes: int) -> None:
        memory = np.stack([content(number, nbytes) for number in numbers])
        names = {Status.OK: "put", Status.EXISTS: "exists", Status.BUSY: "busy", Status.NO_SPACE: "no_space"}
        for result in self.store.put(batch(numbers, memory, nbytes), PATIENCE_S).results():
            self.counts[names.get(result.status, "transient")] += 1

    def get(self, numbers: list[int], nbytes: int) -> None:
        memory = np.zeros((len(numbers), nbytes // 8), dtype=np.uint64)
        results = self.store.get(batch(numbers, memory, nbytes), PATIENCE_S).results()
        for row, result in enumerate(results):
            self.check(numbers[row], nbytes, result.status is Status.OK, memory[row])

    def check(self, number: int, nbytes: int, hit: bool, words: np.ndarray) -> None:
        self.counts["hit" if hit else "miss"] += 1
        if hit and not np.array_equal(words, content(number, nbytes)):
            print(f"WRONG BYTES in object {number} of {nbytes} bytes", flush=True)
            sys.exit(3)

    def leased_get(self, numbers: list[int], nbytes: int) -> None:
        lease = self.store.lease([key(number, nbytes) for number in numbers], 1.0)
        self.get(numbers, nbytes)
        if self.chance.random() < 0.7:
            self.store.release(lease)

    def pinned(self, numbers: list[int], nbytes: int) -> None:
        """Read in place, slowly."""
        import ctypes

        pins = self.store.pin([key(number, nbytes) for number in numbers])
        for _ in range(2):
            for number, address in zip(numbers, pins.addresses, strict=True):
                if address:
                    words = np.ctypeslib.as_array((ctypes.c_uint64 * (nbytes // 8)).from_address(address))
                    self.check(number, nbytes, True, words)
        self.store.unpin(pins)

    def ranged(self, numbers: list[int], nbytes: int) -> None:
        writer = self.store.begin_write([key(number, nbytes) for number in numbers], nbytes, PATIENCE_S)
        memory = np.stack([content(number, nbytes) for number in numbers])
        rows = [row for row, result in enumerate(writer.results) if result.status is Status.OK]
        half = nbytes // 2
        for start in (0, half):
            addresses = (memory.ctypes.data + np.array(rows, dtype=np.int64) * memory.strides[0] + start)[:, None]
            writer.write(rows, start, addresses, np.array([half], dtype=np.int64))
        if self.chance.random() < 0.2:
            writer.abort()
        else:
            writer.commit()

    def remove(self, numbers: list[int], nbytes: int) -> None:
        self.store.remove([key(number, nbytes) for number in numbers[:2]])
        self.counts["removed"] += 2

    def turn(self) -> None:
        nbytes = self.chance.choice(self.classes)
        numbers = self.chance.sample(range(KEYS), 4)
        moves = (self.put, self.get, self.leased_get, self.pinned, self.ranged, self.remove)
        self.chance.choices(moves, weights=(6, 6, 3, 2, 2, 1))[0](numbers, nbytes)

    def enough(self, wanted: Sequence[str]) -> bool:
        return all(self.counts[name] > ENOUGH for name in wanted)

    def take_turns(self, seconds: float, wanted: Sequence[str] = ("hit", "put"), over: Callable[[], bool] = lambda: True) -> None:
        """For so long at least, until it is ``over``, and until there is enough of what is ``wanted``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or not over() or not self.enough(wanted):
            self.turn()
            assert time.monotonic() < end + 240, f"not enough of {wanted}: {self.counts}"

    def work(self, wanted: Sequence[str]) -> None:
        """Take turns, close the store, say what came of it."""
        self.take_turns(0)
        print("warm", flush=True)
        self.take_turns(0, wanted, lambda: bool(select.select([0], [], [], 0)[0]))
        self.store.close()
        print(json.dumps(self.counts), flush=True)


def main() -> None:
    role, root, seed, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] or ("hit", "put")
    store = open_store(root)
    worker = Worker(store, seed)
    print("ready", flush=True)
    if role == "stop-in-write":
        with store._pool.write_lock.held(), store._pool.environment.env.begin(write=True):
            print("inside", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    worker.work(wanted)


if __name__ == "__main__":
    main()
