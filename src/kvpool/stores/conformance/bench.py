"""What the checks of the contract are made of. A check takes a Bench and fails by an AssertionError with the reason."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.base import Batch, Hit, MappedStore, Result, Status, Store

SIZE = 8192
SEGMENT = 1024
DEADLINE = 20.0
MOST_TO_FILL = 64 << 20
Bytes = NDArray[np.uint8]
T = TypeVar("T")


class Skip(Exception):
    """The store does not claim what the check needs."""


def require(condition: object, text: str) -> None:
    """AssertionError with ``text``; also where assertions are switched off."""
    if not condition:
        raise AssertionError(text)


def same(got: T, wanted: T, what: str) -> None:
    require(got == wanted, f"{what}: got {got}, expected {wanted}")


class Bench:
    """Stores on one pool, and the few moves that every check makes."""

    def __init__(self, make_store: Callable[[], Store]) -> None:
        self._make = make_store
        self._open: list[Store] = []
        self.namespace = secrets.token_hex(8)  # of this check alone: what else is in the pool is not touched

    def closed(self) -> Store:
        return self._make()

    def store(self, *needs: str) -> Store:
        """An open store; Skip when it lacks a capability."""
        store = self._make()
        missing = [need for need in needs if not getattr(store.capabilities, need)]
        if missing:
            raise Skip(f"{store.name} is not {', '.join(missing)}")
        store.open()
        self._open.append(store)
        return store

    def mapped(self) -> MappedStore:
        return cast(MappedStore, self.store("mapped"))

    def close(self) -> None:
        """Close what was opened; what the check stored is removed where the store can tell what is there."""
        for store in self._open:
            if store.capabilities.listable:
                store.clear(f"v1:{self.namespace[:-1]}".encode())
            store.close()

    def key(self, name: object, variant: str = "0") -> bytes:
        """A key of this check; ``variant``, one hex digit, makes another namespace of its own."""
        return f"v1:{self.namespace[:-1]}{variant}:g0:h0-7_l0-3_c0_0:{name}".encode()

    @staticmethod
    def content(seed: int, count: int = 1, nbytes: int = SIZE) -> Bytes:
        return np.random.default_rng(seed).integers(0, 256, (count, nbytes), dtype=np.uint8)

    @staticmethod
    def batch(keys: Sequence[bytes], memory: Bytes, segment: int = SEGMENT) -> Batch:
        """Object i is row i of ``memory``, in segments of ``segment`` bytes."""
        starts = np.arange(0, memory.shape[1], segment, dtype=np.int64)
        sizes = np.minimum(segment, memory.shape[1] - starts)
        rows = memory.ctypes.data + np.arange(len(keys), dtype=np.int64) * memory.strides[0]
        return Batch(keys, rows[:, None] + starts, sizes)

    def put(self, store: Store, keys: Sequence[bytes], memory: Bytes, segment: int = SEGMENT) -> list[Result]:
        handle = store.put(self.batch(keys, memory, segment), DEADLINE)
        require(handle.wait(DEADLINE), "a put was not done after its deadline")
        return handle.results()

    def get(self, store: Store, keys: Sequence[bytes], nbytes: int = SIZE, segment: int = SEGMENT) -> tuple[list[Result], Bytes]:
        memory = np.zeros((len(keys), nbytes), dtype=np.uint8)
        handle = store.get(self.batch(keys, memory, segment), DEADLINE)
        require(handle.wait(DEADLINE), "a get was not done after its deadline")
        return handle.results(), memory

    def stored(self, store: Store, keys: Sequence[bytes], memory: Bytes) -> None:
        statuses = [result.status for result in self.put(store, keys, memory)]
        same(statuses, [Status.OK] * len(keys), "put of new keys")

    def reads(self, store: Store, keys: Sequence[bytes], memory: Bytes, segment: int = SEGMENT) -> None:
        results, got = self.get(store, keys, memory.shape[1], segment)
        same([result.status for result in results], [Status.OK] * len(keys), "get")
        require(np.array_equal(got, memory), "the bytes read are not the bytes written")


def found(store: Store, keys: Sequence[bytes]) -> list[bool]:
    return [isinstance(answer, Hit) for answer in store.exists(keys)]


def in_first_tier(store: Store, keys: Sequence[bytes]) -> list[bool]:
    """Like ``found``, of stores that may keep lower down what they evict from the first tier."""
    first = store.stats().tiers[:1]
    return [isinstance(answer, Hit) and all(answer.tier is tier.tier for tier in first) for answer in store.exists(keys)]


def statuses(results: Sequence[Result]) -> list[Status]:
    return [result.status for result in results]


def raises(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError(f"{what}: no ValueError")


def sane(store: Store) -> None:
    """BC-116: gauges are never below zero nor above the capacity."""
    stats = store.stats()
    require(0 <= stats.used_bytes <= stats.capacity_bytes, f"used {stats.used_bytes} of {stats.capacity_bytes} bytes")
    low = min(stats.objects, stats.evicted_objects, stats.leases, stats.pinned, stats.writing)
    require(low >= 0, f"a gauge is below zero: {stats}")


def fill(bench: Bench, store: Store, name: str, nbytes: int = 64 << 10) -> list[bytes]:
    """Put more than the pool holds; the keys, oldest first."""
    count = store.stats().capacity_bytes // nbytes + 32
    keys = [bench.key(f"{name}-{i}") for i in range(count)]
    for start in range(0, count, 16):
        part = keys[start : start + 16]
        bench.put(store, part, np.full((len(part), nbytes), start % 251, dtype=np.uint8), nbytes)
    return keys


def fill_until(bench: Bench, store: Store, name: str, gone: Callable[[], bool]) -> None:
    """Put more than the pool holds: once, and again where the store's own work, such as a copy to a lower tier, kept objects."""
    end, turn = time.monotonic() + DEADLINE, 0
    fill(bench, store, name)
    while not gone() and time.monotonic() < end:
        turn += 1
        fill(bench, store, f"{name}-{turn}")


def bounded(bench: Bench, *needs: str) -> Store:
    store = bench.store(*needs)
    if not 0 < store.stats().capacity_bytes <= MOST_TO_FILL:
        raise Skip(f"{store.name} has a capacity of {store.stats().capacity_bytes} bytes: too much to fill, or unknown")
    return store
