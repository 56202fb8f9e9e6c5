"""Which objects of the memory are to be copied to the disk next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.disk_settings import DiskSettings
from kvpool.stores.local.arena import COPIED, FREE_STAMP, SEEN
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.records import Records

Int64 = NDArray[np.int64]


class Occupied(NamedTuple):
    """Slots of the pool in memory that hold objects, and the bytes that the pool may use."""

    units: Int64
    sizes: Int64
    stamps: Int64
    capacity: int


def occupied(pool: Pool) -> Occupied:
    def look(records: Records) -> tuple[Int64, Int64, int]:
        slabs = records.slabs.all()
        sizes = [np.full(slab.slots, slab.slot_bytes, dtype=np.int64) for slab in slabs]
        total = pool.allocator.limit(records) * pool.geometry.chunk_bytes
        return records.slabs.units(slabs), np.concatenate(sizes) if sizes else np.zeros(0, dtype=np.int64), total

    units, sizes, capacity = pool.look(look)
    stamps = pool.stamps.values[units]
    there = stamps != FREE_STAMP
    return Occupied(units[there], sizes[there], stamps[there], capacity)


class Vacant:
    """Slots whose stamps say that they hold something, and that do not: not yet, when they are being published (the stamp comes
    before the commit), or no more. They are looked at again in a moment."""

    def __init__(self, seconds: float = 0.1) -> None:
        self._seconds = seconds
        self._until: dict[int, float] = {}

    def add(self, units: Sequence[int]) -> None:
        self._until.update(dict.fromkeys(units, time.monotonic() + self._seconds))

    def left_out(self, pool: Occupied) -> Occupied:
        """The others."""
        now = time.monotonic()
        self._until = {unit: until for unit, until in self._until.items() if until > now}
        if not self._until:
            return pool
        kept = ~np.isin(pool.units, np.fromiter(self._until, dtype=np.int64))
        return Occupied(pool.units[kept], pool.sizes[kept], pool.stamps[kept], pool.capacity)


def to_copy(pool: Occupied, settings: DiskSettings, nbytes: int, *, begun: bool = False) -> Int64:
    """Units to copy now, coldest first, about ``nbytes`` of them; none while enough is free, or cold and copied.

    The coldest part of the memory is what eviction takes next. It is as large as the watermarks leave of the capacity, less what is
    free: below the high one nothing is done, and then (``begun``) all of it down to the low one is copied."""
    free = pool.capacity - int(pool.sizes.sum())
    after_low = int(pool.capacity * (100 - settings.dram_low) / 100) - free
    after_high = int(pool.capacity * (100 - settings.dram_high) / 100) - free
    trigger = after_low if begun else after_high
    if trigger <= 0:
        return pool.units[:0]
    order = np.argsort(pool.stamps, kind="stable")
    begins = np.cumsum(pool.sizes[order]) - pool.sizes[order]
    stamps = pool.stamps[order]
    wanted = (stamps & COPIED) == 0
    if settings.admission == "second_sight":
        wanted &= (stamps & SEEN) != 0
    if not (wanted & (begins < trigger)).any():
        return pool.units[:0]
    chosen = order[wanted & (begins < after_low)]
    batch: Int64 = pool.units[chosen[: int(np.searchsorted(np.cumsum(pool.sizes[chosen]), nbytes)) + 1]]
    return batch
