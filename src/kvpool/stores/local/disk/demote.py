"""Copying one batch of objects from memory to the disk. Only the elected demoter does this."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from kvpool.stores.base import Result, Status
from kvpool.stores.local.arena import COPIED, MARKS
from kvpool.stores.local.disk.iopool import Busy, IoCall
from kvpool.stores.local.disk.record import Record
from kvpool.stores.local.jobs import CancelStep, PublishStep, ReserveStep, Room
from kvpool.stores.local.leases import UPKEEP
from kvpool.stores.local.records import Records
from kvpool.stores.local.transfer import pin

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier

BATCH_S = 10.0
_SLICE_S = 0.25


@dataclass(slots=True)
class _Source:
    """An object in memory, held until it is copied."""

    key: bytes
    unit: int
    offset: int
    nbytes: int
    generation: int


@dataclass(slots=True)
class _Write:
    source: _Source
    room: Room
    call: IoCall


class Batch:
    """``run`` copies the objects in some slots of the memory, as far as they are still there and not on the disk yet."""

    def __init__(self, tier: DiskTier, units: Sequence[int]) -> None:
        self._tier = tier
        self._units = units
        self._eraser = tier.demoter.eraser
        self._deadline = time.monotonic() + BATCH_S

    def run(self) -> int:
        """How many objects were copied. Raises what keeps it from going on."""
        sources = self._hold()
        try:
            sizes = sorted({source.nbytes for source in sources})
            return sum(self._copy([source for source in sources if source.nbytes == nbytes], nbytes) for nbytes in sizes)
        finally:
            self._tier.pool.leases.drop([source.unit for source in sources], UPKEEP)

    def _hold(self) -> list[_Source]:
        """Hold the objects; those that have a copy get their mark and are let go."""
        pool = self._tier.pool
        found = pool.look(self._keys)
        keys = [key for key in found if key is not None]
        self._tier.demoter.vacant.add([unit for unit, key in zip(self._units, found, strict=True) if key is None])
        held = pin(pool, keys, UPKEEP, use=False)
        places = zip(held.units, held.offsets.tolist(), held.nbytes.tolist(), held.generations.tolist(), strict=True)
        sources = [_Source(keys[row], *place) for row, place in zip(held.rows, places, strict=True)]
        try:
            there = self._tier.books.entries([source.key for source in sources])
        except BaseException:
            pool.leases.drop(held.units, UPKEEP)
            raise
        copied = [source.unit for source, raw in zip(sources, there, strict=True) if raw is not None]
        pool.stamps.mark(np.array(copied, dtype=np.int64), COPIED, True)
        pool.leases.drop(copied, UPKEEP)
        return [source for source, raw in zip(sources, there, strict=True) if raw is None]

    def _keys(self, records: Records) -> list[bytes | None]:
        return [records.key_of(unit) for unit in self._units]

    def _copy(self, sources: list[_Source], nbytes: int) -> int:
        books = self._tier.books
        grant = books.writer.call(ReserveStep(books, [source.key for source in sources], nbytes), self._deadline)
        self._eraser.reused(room.unit for room in grant.rooms)
        writes: list[_Write] = []
        try:
            for room in grant.rooms:
                slab = books.slabs.of_unit(room.unit)
                place = (nbytes, slab.slot_bytes, slab.chunk, slab.chunks)
                writes.append(self._write(sources[room.row], room, place))
        except BaseException:
            self._tier.pool.leases.drop([write.source.unit for write in writes], UPKEEP)
            books.writer.cancel(CancelStep(grant.rooms))
            raise
        self._tier.io.submit([write.call for write in writes])
        return self._publish(self._wait(writes), nbytes)

    def _write(self, source: _Source, room: Room, place: tuple[int, int, int, int]) -> _Write:
        pool, books, files = self._tier.pool, self._tier.books, self._tier.files
        nbytes, slot_bytes, chunk, chunks = place
        age = max(0, time.monotonic_ns() - int(pool.stamps.values[source.unit]))
        record = Record(0, room.generation, room.unit, nbytes, slot_bytes, chunk, chunks, 0, time.time_ns() - age, source.key)
        pool.leases.hold([source.unit], UPKEEP)  # a hold of its own, for as long as the disk reads it

        def orphaned() -> None:
            pool.leases.drop([source.unit], UPKEEP)
            self._eraser.add([(source.key, room.unit, room.generation)])
            books.writer.cancel(CancelStep([room]))

        return _Write(source, room, IoCall(lambda: files.write(record, room.offset, pool.arena.base + source.offset), orphaned))

    def _wait(self, writes: list[_Write]) -> list[_Write]:
        """Those that were written. The slots of the others are given back, by the I/O thread where it still writes."""
        tier = self._tier
        done: list[_Write] = []
        failed: list[_Write] = []
        for write in writes:
            while not write.call.wait(min(_SLICE_S, self._deadline - time.monotonic())):
                if time.monotonic() >= self._deadline or not tier.usable or tier.demoter.stopping:
                    break
            if write.call.give_up():
                tier.pool.leases.drop([write.source.unit], UPKEEP)
                (done if write.call.error is None else failed).append(write)
        if done:
            tier.switch.worked("write")
        for write in failed:
            if not isinstance(write.call.error, Busy):
                tier.failed("write", cast(BaseException, write.call.error))
        self._cancel(failed)
        return done

    def _cancel(self, writes: list[_Write]) -> None:
        """Give slots on the disk back; whatever record they have is not to be found by a later scan."""
        if writes:
            self._eraser.add((write.source.key, write.room.unit, write.room.generation) for write in writes)
            self._tier.books.writer.cancel(CancelStep([write.room for write in writes]))

    def _publish(self, writes: list[_Write], nbytes: int) -> int:
        if not writes:
            return 0
        pool, books = self._tier.pool, self._tier.books
        rooms = [write.room for write in writes]
        keys = [write.source.key for write in writes]
        step = PublishStep(books, rooms, keys, wanted=lambda: self._still_there(writes))

        def publish(records: Records) -> list[Result]:
            records.add(b"written", nbytes * len(writes))
            return step(records)

        try:
            results = books.writer.call(publish, self._deadline)
        except Exception:
            self._cancel(writes)
            raise
        stored = [write for write, result in zip(writes, results, strict=True) if result.status is Status.OK]
        here = np.array([write.source.unit for write in stored], dtype=np.int64)
        there = np.array([write.room.unit for write in stored], dtype=np.int64)
        books.stamps.values[there] = pool.stamps.values[here] & -MARKS
        pool.stamps.mark(here, COPIED, True)
        dropped = (write for write, result in zip(writes, results, strict=True) if result.status is not Status.OK)
        self._eraser.add((write.source.key, write.room.unit, write.room.generation) for write in dropped)
        return len(stored)

    def _still_there(self, writes: list[_Write]) -> list[bool]:
        """What was removed from memory meanwhile must not live on on the disk."""
        raws = self._tier.pool.entries([write.source.key for write in writes])
        return [raw is not None and _same(raw, write.source) for write, raw in zip(writes, raws, strict=True)]


def _same(raw: bytes, source: _Source) -> bool:
    return int.from_bytes(raw[24:32], "little") == source.generation


__all__ = ["Batch"]
