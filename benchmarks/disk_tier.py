"""The store's disk tier: how fast it writes what it demotes, and how fast a hit comes from the disk."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from kvpool.stores.base import Batch, Hit, Status, Tier, TierStats
from kvpool.stores.local import LocalStore

OBJECT, GROUP = 2 << 20, 16  # bytes; objects in one call
SETTLE_S, QUIET_S = 120.0, 1.0


class NoDiskTier(Exception):
    """This version of the store has none."""


def measure(folder: Path, dram_bytes: int) -> tuple[float, float]:
    """Bytes a second demoted, and read by hits on the disk. Four times what the memory holds is stored, then read again oldest
    first. NoDiskTier; RuntimeError when nothing came to the disk, or not back from it."""
    shared = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="tier-", dir=folder))
    store = make_store(shared, disk, dram_bytes)
    try:
        store.open()
        keys = [b"disk-%08d" % number for number in range(4 * dram_bytes // OBJECT)]
        memory = np.random.default_rng(5).integers(0, 256, GROUP * OBJECT, dtype=np.uint8)
        return demote(store, keys, memory), read(store, keys, memory)
    finally:
        store.close()
        shutil.rmtree(shared)
        shutil.rmtree(disk)


def make_store(shared: Path, disk: Path, dram_bytes: int) -> LocalStore:
    """A pool of its own with a disk tier that holds everything."""
    try:
        from kvpool.stores.disk_settings import DiskSettings
    except ImportError:
        raise NoDiskTier("this version of the store has no disk tier") from None
    return LocalStore(shared, "disk", dram_bytes, "remove", disk=DiskSettings(str(disk), 6 * dram_bytes))


def batch(keys: list[bytes], memory: np.ndarray) -> Batch:
    addresses = memory.ctypes.data + np.arange(len(keys), dtype=np.int64)[:, None] * OBJECT
    return Batch(keys, addresses, np.array([OBJECT], dtype=np.int64))


def demote(store: LocalStore, keys: list[bytes], memory: np.ndarray) -> float:
    """Put everything; the rate counts from the first byte written to the last, however long the pauses between."""
    began: float | None = None
    written = last = 0.0
    quiet = end = time.monotonic() + SETTLE_S
    groups = [keys[start : start + GROUP] for start in range(0, len(keys), GROUP)]
    while time.monotonic() < min(quiet, end):
        if groups:
            store.put(batch(groups.pop(0), memory), 30.0)
        now, bytes_now = time.monotonic(), float(tier(store).written_bytes)
        if bytes_now > written:
            began, last = began or now, now
        written = bytes_now
        quiet = end if groups or began is None else last + QUIET_S
        time.sleep(0.002)
    if began is None or last <= began:
        raise RuntimeError("nothing was written to the disk")
    return written / (last - began)


def read(store: LocalStore, keys: list[bytes], memory: np.ndarray) -> float:
    """Get what lies on the disk only, in groups."""
    answers = store.exists(keys)
    there = [k for k, answer in zip(keys, answers, strict=True) if isinstance(answer, Hit) and answer.tier is Tier.DISK]
    seconds, nbytes = 0.0, 0
    for start in range(0, len(there) // GROUP * GROUP, GROUP):
        chosen = there[start : start + GROUP]
        began = time.perf_counter()
        handle = store.get(batch(chosen, memory), 30.0)
        if not handle.wait(30.0):
            raise RuntimeError("a read from the disk took more than 30 s")
        seconds += time.perf_counter() - began
        nbytes += sum(result.nbytes for result in handle.results() if result.status is Status.OK and result.tier is Tier.DISK)
    if not nbytes:
        raise RuntimeError("nothing was read from the disk")
    return nbytes / seconds


def tier(store: LocalStore) -> TierStats:
    found = [stats for stats in store.stats().tiers if stats.tier is Tier.DISK]
    if not found:
        raise RuntimeError("the store reports no disk tier")
    return found[0]
