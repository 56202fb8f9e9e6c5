"""The pool's books: gauges, listing, the probe, and the check that every slot is accounted for exactly once."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import lmdb

from kvpool.stores.base import Health, StoreStats, Tier, TierStats
from kvpool.stores.local.clients import Removed
from kvpool.stores.local.index import ENTRY, MAX_KEY, LmdbTransaction
from kvpool.stores.local.jobs import INDEX_FULL
from kvpool.stores.local.leases import FOREVER, UPKEEP
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.records import Records
from kvpool.stores.local.writer import Overdue

_PROBE_S = 0.2
_LIST_S = 2e-3  # in one snapshot


def list_keys(pool: Pool, prefix: bytes) -> list[bytes]:
    """The object keys that start with ``prefix``. Many of them: not all from one snapshot."""
    found: list[bytes] = []
    start: bytes | None = prefix
    while start is not None:
        start = pool.read(lambda txn, start=start: _some_keys(txn, prefix, start, found))  # type: ignore[misc]
    return found


def _some_keys(txn: LmdbTransaction, prefix: bytes, start: bytes, found: list[bytes]) -> bytes | None:
    """Append the keys from ``start`` on; where to go on, None at the end."""
    cursor = txn.cursor()
    if not (cursor.set_range(start) if start else cursor.first()):
        return None
    end = time.monotonic() + _LIST_S
    for count, key in enumerate(cursor.iternext(keys=True, values=False)):
        if not key.startswith(prefix):
            break
        if count % 64 == 63 and time.monotonic() > end:
            return bytes(key)
        if len(key) <= MAX_KEY:  # longer ones are names of tables
            found.append(bytes(key))
    return None


def entries(records: Records) -> list[tuple[bytes, tuple[int, int, int, int]]]:
    """Every object with its index entry."""
    return [(bytes(key), ENTRY.unpack(raw)) for key, raw in records.txn.cursor(records.tables["objects"]) if len(key) <= MAX_KEY]


def index_stats(pool: Pool) -> StoreStats:
    """What the index says, from one transaction; neither leases nor pins."""

    def look(records: Records) -> StoreStats:
        return StoreStats(
            capacity_bytes=pool.allocator.limit(records) * pool.geometry.chunk_bytes,
            used_bytes=records.counter(b"used"),
            objects=records.count("objects"),
            evicted_objects=records.counter(b"evicted"),
            writing=records.count("reserved"),
        )

    return pool.look(look)


def stats(pool: Pool) -> StoreStats:
    """One consistent picture of the index, without taking the write lock; leases and pins of just after, of both tiers."""
    numbers = index_stats(pool)
    leases, pinned = _held(pool)
    tiers = [TierStats(Tier.DRAM, numbers.capacity_bytes, numbers.used_bytes, numbers.objects, numbers.evicted_objects)]
    if pool.disk is not None:
        below = _held(pool.disk.books)
        leases, pinned = leases + below[0], pinned + below[1]
        tiers.append(pool.disk.stats())
    return replace(numbers, leases=leases, pinned=pinned, tiers=tuple(tiers))


def _held(pool: Pool) -> tuple[int, int]:
    """Slots that somebody leases and slots that somebody pins."""
    units = pool.look(lambda records: records.slabs.units(records.slabs.all()))
    peers = pool.viewers()
    try:
        ends = peers.stamps(units)
    finally:
        peers.close()
    pinned = int((ends == FOREVER).sum())
    return int(((ends > time.monotonic_ns()) & (ends < UPKEEP)).sum()), pinned


def health(pool: Pool) -> Health:
    """Readable, and not without memory."""
    limit, may_grow = pool.look(lambda records: (pool.allocator.limit(records), pool.allocator.may_grow(records)))
    if pool.peers.removed():
        return Health(False, f"{Removed()}: it can be read, not written", readable=True)
    if pool.writer.full and not _has_room(pool):
        return Health(False, INDEX_FULL, readable=True)
    if limit == 0 and not may_grow:
        return Health(False, "the filesystem of the pool has no room for its arena", readable=True)
    return Health(True)


def _has_room(pool: Pool) -> bool:
    """Can the index be written again? Tried, for nothing else tells."""
    try:
        pool.writer.call(lambda records: records.add(b"probes", 1), time.monotonic() + _PROBE_S)
    except lmdb.MapFullError:
        return False
    except Overdue:
        return not pool.writer.full
    return True


def verify(pool: Pool) -> list[str]:
    """Findings in one line each. Runs on a copy of the index, so it sees one moment, and nobody waits for it."""
    try:
        return pool.look(_Check().run, long=True)
    except Overdue:
        return ["the index is busy: another process keeps its write lock"]


class _Check:
    def __init__(self) -> None:
        self.findings: list[str] = []

    def run(self, records: Records) -> list[str]:
        states = self._states(records)
        self._slabs(records, states)
        self._objects(records)
        self._writing(records)
        return self.findings

    def _states(self, records: Records) -> dict[int, str]:
        states: dict[int, str] = {}
        end = records.slabs.geometry.units
        listed = {table: records.units_between(table, 0, end) for table in ("ready", "reserved", "limbo")}
        listed["free"] = [unit for slot_bytes in self._classes(records) for unit in records.free_slots(slot_bytes, 1 << 62)]
        if len(listed["free"]) != records.count("free"):
            self.findings.append("free slots of a class that has no slab")
        for table, units in listed.items():
            for unit in units:
                if unit in states:
                    self.findings.append(f"slot {unit} is both {states[unit]} and {table}")
                states[unit] = table
        return states

    def _classes(self, records: Records) -> set[int]:
        return {slab.slot_bytes for slab in records.slabs.all()}

    def _slabs(self, records: Records, states: dict[int, str]) -> None:
        used, known = 0, 0
        taken: Counter[int] = Counter()
        for slab in records.slabs.all():
            taken.update(range(slab.chunk, slab.chunk + slab.chunks))
            first, carved = records.slabs.first_unit(slab), records.carved(slab)
            found = [unit for unit in range(first, first + slab.slots) if unit in states]
            known += len(found)
            used += sum(states[unit] != "free" for unit in found) * slab.slot_bytes
            lost = [unit for unit in range(first, first + carved) if unit not in states]
            if lost and not slab.retiring:
                self.findings.append(f"slab {slab.chunk}: {len(lost)} slots are in no state, first {lost[0]}")
            if (
                carved < slab.slots
                and not slab.retiring
                and slab not in [other for other, _ in records.unused_slots(slab.slot_bytes)]
            ):
                self.findings.append(f"slab {slab.chunk}: its {slab.slots - carved} unused slots cannot be reached")
            if any(unit >= first + carved for unit in found):
                self.findings.append(f"slab {slab.chunk}: slots beyond the used ones have a state")
        self.findings.extend(f"chunk {chunk} is in {count} slabs" for chunk, count in taken.items() if count > 1)
        if known != len(states):
            self.findings.append(f"{len(states) - known} slots lie in no slab")
        if used != records.counter(b"used"):
            self.findings.append(f"used bytes are {used}, the counter says {records.counter(b'used')}")

    def _objects(self, records: Records) -> None:
        if records.count("objects") != records.count("ready"):
            self.findings.append(f"{records.count('objects')} objects, but {records.count('ready')} slots are ready")
        if records.count("tails") != records.count("objects"):
            self.findings.append(f"{records.count('objects')} objects, but {records.count('tails')} are listed by block")
        for key, raw in records.txn.cursor(records.tables["objects"]):
            if len(key) > MAX_KEY:
                continue
            unit, offset, nbytes, _ = ENTRY.unpack(raw)
            if records.key_of(unit) != key:
                self.findings.append(f"object {key!r}: its slot {unit} says otherwise")
            elif records.slabs.offset(unit) != offset or records.slabs.of_unit(unit).slot_bytes < nbytes:
                self.findings.append(f"object {key!r}: place or size do not fit its slot {unit}")
            if records.shards_of(key).count(bytes(key)) != 1:
                self.findings.append(f"object {key!r} is not listed under its block")

    def _writing(self, records: Records) -> None:
        for key, _raw in records.txn.cursor(records.tables["writing"]):
            writing = records.writer_of(bytes(key))
            reserved = records.reservation(writing[0]) if writing else None
            if reserved is None or reserved.key != key:
                self.findings.append(f"key {key!r} counts as being written, but no slot is reserved for it")


__all__ = ["health", "list_keys", "stats", "verify"]
