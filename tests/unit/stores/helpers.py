"""Short ways to put and get, and what this process holds."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvpool.stores.base import Batch, Hit, Status, Store
from kvpool.stores.local import LocalStore

GRANULE = 4096


def opened(root: Path, dram_bytes: int | None, name: str = "unit", **options) -> LocalStore:
    store = LocalStore(root, name, dram_bytes, **options)
    store.open()
    return store


def key(block: object, shard: int = 0, namespace: str = "ns") -> bytes:
    return f"v1:{namespace}:g0:h{shard}:{block}".encode()


def batch(keys: list[bytes], memory: np.ndarray) -> Batch:
    addresses = memory.ctypes.data + np.arange(len(keys), dtype=np.int64)[:, None] * memory.strides[0]
    return Batch(keys, addresses, np.array([memory.shape[1]], dtype=np.int64))


def put(store: Store, keys: list[bytes], nbytes: int = GRANULE, fill: int = 1, deadline_s: float = 10.0) -> list[Status]:
    memory = np.full((len(keys), nbytes), fill, dtype=np.uint8)
    return [result.status for result in store.put(batch(keys, memory), deadline_s).results()]


def get(store: Store, keys: list[bytes], nbytes: int = GRANULE) -> list[int | None]:
    """The byte each object is full of, None where it is missing."""
    memory = np.zeros((len(keys), nbytes), dtype=np.uint8)
    results = store.get(batch(keys, memory), 10.0).results()
    values: list[int | None] = []
    for row, result in enumerate(results):
        assert result.status in (Status.OK, Status.MISSING), result
        if result.status is Status.OK:
            assert (memory[row] == memory[row, 0]).all(), "an object of two writers"
        values.append(int(memory[row, 0]) if result.status is Status.OK else None)
    return values


def held() -> set[object]:
    """Open files and live threads of this process. Those of earlier tests may end at any time: compare as sets."""
    found: set[object] = set(threading.enumerate())
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def has(store: Store, keys: list[bytes]) -> list[bool]:
    return [isinstance(answer, Hit) for answer in store.exists(keys)]
