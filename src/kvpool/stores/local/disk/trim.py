"""Dropping cold objects from the disk ahead of need, so that copying to it need not wait for room."""

from __future__ import annotations

from kvpool.stores.local.pool import Pool
from kvpool.stores.local.records import Records
from kvpool.stores.local.writer import Again

_MOST = 1024  # objects at once


class TrimStep:
    """Once more than ``high`` % of the room is used: evict from each class its share until ``low`` % is left."""

    def __init__(self, books: Pool, high: int, low: int) -> None:
        self._books = books
        self._high = high
        self._low = low
        self._evicted = False

    def __call__(self, records: Records) -> int | Again:
        """How many objects went in this transaction."""
        books = self._books
        if self._evicted:
            books.evictor.sweep(records)
            return 1
        capacity = books.allocator.limit(records) * books.geometry.chunk_bytes
        used = records.counter(b"used")
        if used * 100 <= capacity * self._high:
            return 0
        books.evictor.peers.refresh()
        excess = (used - capacity * self._low // 100) / max(1, used)
        gone = 0
        for slot_bytes in {slab.slot_bytes for slab in records.slabs.all() if not slab.retiring}:
            slots = sum(slab.slots for slab in records.slabs.of_class(slot_bytes))
            free = len(records.free_slots(slot_bytes, slots)) + sum(left for _, left in records.unused_slots(slot_bytes))
            count = min(_MOST, int((slots - free) * excess) + 1)
            gone += books.evictor.evict(records, slot_bytes, count)
        self._evicted = gone > 0
        return Again() if gone else 0
