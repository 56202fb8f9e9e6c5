"""Finding room for new objects: free slots, limbo, dead clients' slots, new slabs, eviction, a slab of another class; in this
order."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.stores.local.arena import Arena, Stamps
from kvpool.stores.local.eviction import Evictor
from kvpool.stores.local.geometry import Geometry
from kvpool.stores.local.records import Records
from kvpool.stores.local.slabs import Slab
from kvpool.stores.local.writer import Again

_BATCH_SHARE = 64  # evict at least 1/64 of a class at once
_GROW_AGAIN_S = 60.0
_BARREN_S = 0.05


@dataclass(slots=True)
class Allocator:
    """Used inside the writer's transactions only."""

    geometry: Geometry
    arena: Arena
    stamps: Stamps
    evictor: Evictor
    on_new_slab: Callable[[Slab], None]
    drops: Callable[[], int] = lambda: 0  # slots that this client has let go of
    # Classes for which nothing could go, until when, and at which state of things: a look at all that is held is long.
    _barren: dict[int, tuple[float, tuple[object, ...]]] = field(default_factory=dict)

    def has(self, records: Records, slot_bytes: int, count: int) -> int:
        """Slots of a class that could be taken now, counted up to ``count``."""
        free = len(records.free_slots(slot_bytes, count))
        if free < count:
            free += sum(left for _, left in records.unused_slots(slot_bytes))
        return min(free, count)

    def limit(self, records: Records) -> int:
        """Chunks the pool may use: fewer than it has when the filesystem gave no more."""
        stored = records.counter(b"limit")
        return self.geometry.chunks if stored == 0 else stored - 1

    def make_room(self, records: Records, slot_bytes: int, count: int, rounds: int) -> Again | None:
        """One step towards ``count`` slots of a class. None: they are there, or nothing more can be done."""
        if self.has(records, slot_bytes, count) >= count:
            return None
        self.evictor.peers.refresh()
        freed = self.evictor.sweep(records) + self.evictor.reclaim(records)
        self.drop_retired(records)
        missing = count - self.has(records, slot_bytes, count)
        if missing <= 0:
            return None
        chunks = self.geometry.slab_chunks(slot_bytes)
        if chunks == 0 or rounds <= 0:
            return None
        first = records.slabs.free_run(chunks, self.limit(records))
        if first is None and self.may_grow(records):
            first = records.slabs.free_run(chunks, self.geometry.chunks)
        if first is not None:
            return self.new_slab(records, slot_bytes, first, chunks)
        counts = [records.count(table) for table in ("ready", "reserved", "limbo", "free", "slabs")]
        state = (self.drops(), self.evictor.peers.living(), *counts)
        barren = self._barren if self.evictor.expendable is None else {}  # where only some may go, that says nothing of others
        until, then = barren.get(slot_bytes, (0.0, ()))
        if time.monotonic() >= until or state != then:
            if self.evict_or_take_over(records, slot_bytes, chunks, missing):
                return Again()
            barren[slot_bytes] = (time.monotonic() + _BARREN_S, state)
        return Again() if freed else None

    def new_slab(self, records: Records, slot_bytes: int, first: int, chunks: int) -> Again:
        """Form a slab of free chunks; when they have no memory yet, get it outside the transaction first."""
        if not records.has_memory(first, chunks):
            got = self.arena.ensured(first, chunks)
            if got is None:
                return Again(lambda: self._ensure(first, chunks))
            if got < chunks:
                return self._shrink(records, first + got)
        slots = self.geometry.slots_per_slab(slot_bytes)
        try:
            self.stamps.prepare(first * self.geometry.units_per_chunk, slots)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return self._shrink(records, first)
        if first + chunks > self.limit(records):
            records.set_counter(b"limit", first + chunks + 1)
        records.add_slab(first, chunks, slot_bytes, slots)
        self.on_new_slab(Slab(first, chunks, slot_bytes, slots, False))
        return Again()

    def may_grow(self, records: Records) -> bool:
        """Has the pool shrunk so long ago that it is time to ask the filesystem again?"""
        due = records.counter(b"shrunk") + int(_GROW_AGAIN_S * 1e9) < time.monotonic_ns()
        return due and self.limit(records) < self.geometry.chunks

    def _shrink(self, records: Records, chunk: int) -> Again:
        """There is no memory for a chunk now."""
        records.set_counter(b"limit", chunk + 1)
        records.set_counter(b"shrunk", time.monotonic_ns())
        return Again()

    def _ensure(self, first: int, chunks: int) -> None:
        self.arena.ensure(first, chunks)

    def evict_or_take_over(self, records: Records, slot_bytes: int, chunks: int, missing: int) -> bool:
        """Evict from the class itself, or take a slab from another one where that is colder; False when nothing could go."""
        own = records.slabs.units(records.slabs.of_class(slot_bytes))
        if self.evictor.expendable is not None:
            gone = len(own) > 0 and self.evictor.evict(records, slot_bytes, missing) > 0
            return gone or self.take_over(records, slot_bytes, chunks, None)
        oldest = int(self.stamps.values[own].min()) if len(own) else None
        if self.take_over(records, slot_bytes, chunks, oldest):
            return True
        batch = max(missing, min(len(own) // _BATCH_SHARE, 1024))
        if len(own) and self.evictor.evict(records, slot_bytes, batch):
            return True
        return self.take_over(records, slot_bytes, chunks, None)

    def drop_retired(self, records: Records) -> None:
        """Go on emptying retired slabs; those that are empty give their chunks back."""
        for slab in records.slabs.all():
            if slab.retiring and self.evictor.empty(records, slab) and self._is_vacant(records, slab):
                records.drop_slab(slab)

    def _is_vacant(self, records: Records, slab: Slab) -> bool:
        first = records.slabs.first_unit(slab)
        return not any(records.units_between(table, first, first + slab.slots) for table in ("ready", "reserved", "limbo"))

    def take_over(self, records: Records, slot_bytes: int, chunks: int, younger_than: int | None) -> bool:
        """Retire the coldest slabs of other classes under one window of chunks, and evict what they hold.

        With ``younger_than`` only slabs colder than this stamp count. Slabs with something reserved or held are passed over while
        there is another choice; without one (and without ``younger_than``) a slab with leased objects is retired: it ends when
        they do."""
        windows = self._windows(records, slot_bytes, chunks, younger_than)
        fallback: list[Slab] | None = None
        for slabs in windows:
            units = records.slabs.units(slabs)
            if any(self._has_reserved(records, slab) for slab in slabs):
                continue
            if not self.evictor.kept(units).any():
                self._retire(records, slabs)
                return True
            fallback = fallback or slabs
        if (
            fallback is None
            or younger_than is not None
            or self.evictor.expendable is not None
            or records.slabs.of_class(slot_bytes)
        ):
            return False
        if any(slab.retiring for slab in records.slabs.all()):
            return False  # wait for these first
        self._retire(records, fallback)
        return True

    def _has_reserved(self, records: Records, slab: Slab) -> bool:
        first = records.slabs.first_unit(slab)
        return any(records.units_between(table, first, first + slab.slots) for table in ("reserved", "limbo"))

    def _retire(self, records: Records, slabs: list[Slab]) -> None:
        for slab in slabs:
            records.retire(slab)
            self.evictor.empty(records, slab)

    def _windows(self, records: Records, slot_bytes: int, chunks: int, younger_than: int | None) -> list[list[Slab]]:
        """Sets of slabs whose chunks (and free ones beside them) would hold a slab of the class, coldest first."""
        others = [slab for slab in records.slabs.all() if slab.slot_bytes != slot_bytes and not slab.retiring]
        ages = self.evictor.ages(records, others)
        last = self.limit(records) - chunks
        starts = {slab.chunk for slab in others} | {slab.chunk + slab.chunks - chunks for slab in others}
        found: dict[tuple[Slab, ...], int] = {}
        for first in starts:
            inside = records.slabs.in_window(first, chunks) if 0 <= first <= last else []
            if not inside or any(slab.chunk not in ages for slab in inside):
                continue
            age = max(ages[slab.chunk] for slab in inside)
            if younger_than is None or age < younger_than:
                found[tuple(inside)] = age
        return [list(window) for window in sorted(found, key=lambda window: (found[window], len(window)))]
