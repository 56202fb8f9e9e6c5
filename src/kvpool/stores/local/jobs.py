"""What the store asks of the index: steps for the writer thread, each short and without copies."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lmdb
import numpy as np

from kvpool.stores.base import Result, Status
from kvpool.stores.local.clients import Removed
from kvpool.stores.local.geometry import slot_bytes_for
from kvpool.stores.local.index import UNIT
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.records import Records
from kvpool.stores.local.writer import Again, Closed, Overdue

OK = Result(Status.OK)
EXISTS = Result(Status.EXISTS)
BUSY = Result(Status.BUSY)
MISSING = Result(Status.MISSING)
NO_SPACE = Result(Status.NO_SPACE)
INDEX_FULL = "the index is full: its map is too small"
FATAL_CLOSED = Result(Status.FATAL, text="the store is closed")


def failure(error: Exception) -> Result:
    """What an exception means to the caller of the store."""
    if isinstance(error, Overdue):
        return Result(Status.TRANSIENT, text=str(error))
    if isinstance(error, Closed):
        return FATAL_CLOSED
    if isinstance(error, Removed):
        return Result(Status.FATAL, text=str(error))
    if isinstance(error, lmdb.MapFullError):
        return Result(Status.NO_SPACE, text=INDEX_FULL)
    if isinstance(error, lmdb.CorruptedError | lmdb.PanicError | lmdb.InvalidError):
        return Result(Status.FATAL, text=f"the index is damaged: {error}")
    if isinstance(error, OSError):
        status = Status.NO_SPACE if error.errno == errno.ENOSPC else Status.TRANSIENT
        return Result(status, code=error.errno, text=str(error))
    if isinstance(error, lmdb.Error) and "No space left" in str(error):
        return Result(Status.NO_SPACE, text=str(error))
    return Result(Status.TRANSIENT, text=f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class Room:
    """A reserved slot: its unit and generation in the index, its place in the arena, its row in the request."""

    row: int
    unit: int
    generation: int
    offset: int


@dataclass(slots=True)
class Grant:
    """``results[row]``: OK where a slot was reserved (see ``rooms``), EXISTS, BUSY or NO_SPACE."""

    results: list[Result]
    rooms: list[Room]


class ReserveStep:
    """Reserve one slot of ``nbytes`` for each key that nobody has stored or is writing; an empty key asks for an anonymous slot."""

    def __init__(self, pool: Pool, keys: Sequence[bytes], nbytes: int) -> None:
        self._pool = pool
        self._keys = keys
        self._nbytes = nbytes
        self._slot_bytes = slot_bytes_for(nbytes)
        self._rounds = 64 + 2 * len(keys)
        self._below = self._on_disk()

    def _on_disk(self) -> set[bytes]:
        """Keys that the tier below holds: they count as stored."""
        return set() if self._pool.disk is None else self._pool.disk.holds(self._keys)

    def __call__(self, records: Records) -> Grant | Again:
        pool = self._pool
        pool.peers.check()
        results = [self._standing(records, key) for key in self._keys]
        wanted = [row for row, result in enumerate(results) if result is OK]
        self._rounds -= 1
        again = pool.allocator.make_room(records, self._slot_bytes, len(wanted), self._rounds)
        if again is not None:
            return again
        units = records.take(self._slot_bytes, len(wanted))
        rooms = []
        for row, unit in zip(wanted, units, strict=False):
            generation = records.reserve(unit, pool.client, self._nbytes, self._keys[row])
            rooms.append(Room(row, unit, generation, records.slabs.offset(unit)))
        for row in wanted[len(units) :]:
            results[row] = NO_SPACE
        return Grant(results, rooms)

    def _standing(self, records: Records, key: bytes) -> Result:
        """EXISTS, BUSY, or OK: free to write. Takes over from a writer that died."""
        if not key:
            return OK
        if records.entry(key) is not None or key in self._below:
            return EXISTS
        writing = records.writer_of(key)
        if writing is None:
            return OK
        unit, owner = writing
        if self._pool.peers.alive(owner):
            return BUSY
        reserved = records.reservation(unit)
        if reserved is not None and reserved.owner == owner:
            records.cancel(unit, reserved)
        return OK


class PublishStep:
    """Give reserved slots their keys, in chain order. EXISTS: somebody was faster, the slot is free again.

    ``chain`` is the time that counts as the use of the whole chain, and where in it each object stands. ``wanted`` tells, inside
    the transaction, which are still to be published: the slots of the others are freed, MISSING.
    """

    def __init__(
        self,
        pool: Pool,
        rooms: Sequence[Room],
        keys: Sequence[bytes],
        chain: tuple[int, Sequence[int]] | None = None,
        *,
        wanted: Callable[[], Sequence[bool]] | None = None,
    ) -> None:
        self._pool = pool
        self._wanted = wanted
        self._rooms = rooms
        self._keys = keys
        self._now, places = chain or (time.monotonic_ns(), range(len(rooms)))
        self._places = np.array(places, dtype=np.int64)

    def __call__(self, records: Records) -> list[Result]:
        units = np.array([room.unit for room in self._rooms], dtype=np.int64)
        self._pool.stamps.touch(units, self._now, self._places, stored=True)
        wanted = [True] * len(self._rooms) if self._wanted is None else self._wanted()
        each = zip(self._rooms, self._keys, wanted, strict=True)
        return [self._publish(records, room, key) if still else self._cancel(records, room) for room, key, still in each]

    def _cancel(self, records: Records, room: Room) -> Result:
        reserved = records.reservation(room.unit)
        if reserved is not None and reserved.generation == room.generation:
            records.cancel(room.unit, reserved)
        return MISSING

    def _publish(self, records: Records, room: Room, key: bytes) -> Result:
        reserved = records.reservation(room.unit)
        if reserved is None or reserved.generation != room.generation:
            return Result(Status.FATAL, text="the slot is not reserved: published or discarded before")
        if records.entry(key) is not None:
            records.cancel(room.unit, reserved)
            return EXISTS
        records.publish(room.unit, reserved, key)
        self._pool.ghosts.discard(key)
        return OK


class CancelStep:
    """Give reserved slots back; those published or given back before are left alone."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        self._rooms = rooms

    def __call__(self, records: Records) -> int:
        count = 0
        for room in self._rooms:
            reserved = records.reservation(room.unit)
            if reserved is not None and reserved.generation == room.generation:
                records.cancel(room.unit, reserved)
                count += 1
        return count


class RemoveStep:
    """Remove keys at once; BUSY where somebody still reads the slot."""

    def __init__(self, pool: Pool, keys: Sequence[bytes]) -> None:
        self._pool = pool
        self._keys = keys
        self._results: list[Result] | None = None
        self._entries: dict[int, tuple[bytes, tuple[int, int, int, int]]] = {}

    def __call__(self, records: Records) -> list[Result] | Again:
        if self._results is None or self._undone(records):
            self._entries.clear()
            self._results = [self._retract(records, row, key) for row, key in enumerate(self._keys)]
            if self._entries:
                return Again()
        elif self._entries:
            self._pool.evictor.sweep(records)
            for row, (_, (unit, *_)) in self._entries.items():
                if records.txn.get(UNIT.pack(unit), db=records.tables["limbo"]) is not None:
                    self._results[row] = BUSY
        return self._results

    def _undone(self, records: Records) -> bool:
        """True when the transaction that retracted the objects was not committed after all."""
        return any(records.entry(key) == entry for key, entry in self._entries.values())

    def _retract(self, records: Records, row: int, key: bytes) -> Result:
        entry = records.entry(key) if key else None
        self._pool.ghosts.discard(key)
        if entry is None:
            return MISSING
        unit, _, nbytes, generation = entry
        records.retract(key, unit, nbytes, generation, revivable=False)
        self._entries[row] = (key, entry)
        return OK
