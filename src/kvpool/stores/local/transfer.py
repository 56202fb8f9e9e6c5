"""put and get: reserve, copy, publish; pin, copy, unpin. Each batch is moved by few calls of the copy engine, straight between the
caller's segments and the arena."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvpool.devices import CopyEngine
from kvpool.stores.base import Batch, Result, Status, Tier
from kvpool.stores.local.jobs import EXISTS, MISSING, CancelStep, Grant, PublishStep, ReserveStep, Room, failure
from kvpool.stores.local.leases import FOREVER
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.writer import Closed

Int64 = NDArray[np.int64]
ENTRY_TYPE = np.dtype([("unit", "<i8"), ("offset", "<i8"), ("nbytes", "<i8"), ("generation", "<i8")])
OVERDUE = Result(Status.TRANSIENT, text="the deadline passed before this object's turn")

_PART_BYTES = 256 << 20
_PART_KEYS = 1024


@dataclass(slots=True)
class Pinned:
    """Objects found and pinned: ``rows`` of the request (increasing) and where their bytes lie. ``units`` must be dropped again."""

    rows: list[int]
    units: list[int]
    offsets: Int64
    nbytes: Int64
    generations: Int64


def pin(pool: Pool, keys: Sequence[bytes], until: int = FOREVER, *, use: bool = True) -> Pinned:
    """Hold the objects that are there until then, and (``use``) mark them as used. A slot that was taken away in between is not
    held."""
    first = pool.entries(keys)
    rows = [row for row, raw in enumerate(first) if raw is not None]
    if not rows:
        none = np.zeros(0, dtype=np.int64)
        return Pinned([], [], none, none, none)
    table = np.frombuffer(b"".join(raw for raw in first if raw is not None), dtype=ENTRY_TYPE)
    units: list[int] = table["unit"].tolist()
    pool.leases.hold(units, until)
    try:
        pool.fence()
        second = pool.entries([keys[row] for row in rows])
    except BaseException:
        pool.leases.drop(units, until)
        raise
    lost = [place for place, row in enumerate(rows) if second[place] != first[row]]
    if lost:
        pool.leases.drop([units[place] for place in lost], until)
        kept = sorted(set(range(len(rows))) - set(lost))
        rows, units, table = [rows[place] for place in kept], [units[place] for place in kept], table[kept]
    if use:
        pool.stamps.touch(table["unit"], time.monotonic_ns())
    return Pinned(rows, units, table["offset"], table["nbytes"], table["generation"])


def starts_of(sizes: Int64, offset: int = 0) -> Int64:
    """Where each segment begins inside its object."""
    return np.cumsum(sizes) - sizes + offset


def copy_in(pool: Pool, engine: CopyEngine, offsets: Int64, starts: Int64, addresses: Int64, sizes: Int64) -> None:
    """Segments into slots; ``offsets`` are the slots' places in the arena, ``addresses`` is [slots, segments]."""
    slots = (pool.arena.base + offsets)[:, None] + starts
    engine.copy(slots.ravel(), addresses.ravel(), np.tile(sizes, len(offsets)), into_pool=True)


def copy_out(pool: Pool, engine: CopyEngine, offsets: Int64, starts: Int64, addresses: Int64, sizes: Int64) -> None:
    """Slots into segments."""
    slots = (pool.arena.base + offsets)[:, None] + starts
    engine.copy(addresses.ravel(), slots.ravel(), np.tile(sizes, len(offsets)), into_pool=False)


def parts(count: int, nbytes: int, most_bytes: int = _PART_BYTES) -> Iterator[slice]:
    """Cut a batch so that no transaction grows long, no copy outlasts its deadline by much, and no part takes more than
    ``most_bytes`` of the pool."""
    step = max(1, min(_PART_KEYS, min(_PART_BYTES, most_bytes) // nbytes))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def get(pool: Pool, engine: CopyEngine, batch: Batch, deadline: float) -> list[Result]:
    """From memory, and what it lacks from the tier below."""
    results = [MISSING] * len(batch.keys)
    read_memory(pool, engine, batch, range(len(batch.keys)), results, deadline)
    if pool.disk is not None:
        pool.disk.fetch(engine, batch, results, deadline)
    return results


def read_memory(
    pool: Pool, engine: CopyEngine, batch: Batch, wanted: Sequence[int], results: list[Result], deadline: float
) -> None:
    """Read some rows of a batch; ``results`` is told about those that are there."""
    nbytes = batch.object_nbytes
    try:
        pinned = pin(pool, [batch.keys[row] for row in wanted])
    except (OSError, lmdb.Error, Closed) as error:
        for row in wanted:
            results[row] = failure(error)
        return
    try:
        right = np.flatnonzero(pinned.nbytes == nbytes)
        for place in np.flatnonzero(pinned.nbytes != nbytes).tolist():
            results[wanted[pinned.rows[place]]] = other_length(int(pinned.nbytes[place]), nbytes)
        rows = np.array([wanted[row] for row in pinned.rows], dtype=np.int64)[right]
        bases = pool.arena.base + pinned.offsets[right]
        read = Result(Status.OK, nbytes, tier=Tier.DRAM)
        for part in parts(len(rows), nbytes):
            outcome = copy_rows(engine, batch, rows[part], bases[part], read) if time.monotonic() < deadline else OVERDUE
            for row in rows[part].tolist():
                results[row] = outcome
    finally:
        pool.leases.drop(pinned.units, FOREVER)


def other_length(have: int, asked: int) -> Result:
    return Result(Status.MISSING, text=f"the object has {have} bytes, asked for were {asked}")


def copy_rows(engine: CopyEngine, batch: Batch, rows: Int64, bases: Int64, done: Result) -> Result:
    """Copy whole objects, which begin at ``bases``, into rows of the batch; ``done``, or what went wrong."""
    try:
        sources = bases[:, None] + starts_of(batch.sizes)
        engine.copy(batch.addresses[rows].ravel(), sources.ravel(), np.tile(batch.sizes, len(rows)), into_pool=False)
    except Exception as error:  # noqa: BLE001 - travels in the results
        return failure(error)
    return done


class Put:
    """One put under way. What the batch holds already, and what it has stored, is pinned until it ends: a batch never evicts
    itself."""

    def __init__(self, pool: Pool, engine: CopyEngine, batch: Batch, deadline: float) -> None:
        self._pool = pool
        self._engine = engine
        self._batch = batch
        self._deadline = deadline
        self._starts = starts_of(batch.sizes)
        self._stored = Result(Status.OK, batch.object_nbytes, tier=Tier.DRAM)
        self._pins: list[int] = []
        self._now = time.monotonic_ns()

    def run(self) -> list[Result]:
        keys = list(dict.fromkeys(self._batch.keys))
        try:
            outcome = dict(zip(keys, self._unique(keys), strict=True))
        finally:
            self._pool.leases.drop(self._pins, FOREVER)
        results, told = [], set()
        for key in self._batch.keys:
            result = outcome[key]
            results.append(EXISTS if key in told and result.status is Status.OK else result)
            told.add(key)
        return results

    def _unique(self, keys: list[bytes]) -> list[Result]:
        results: list[Result] = [OVERDUE] * len(keys)
        try:
            present = pin(self._pool, keys)
        except (OSError, lmdb.Error, Closed) as error:
            return [failure(error)] * len(keys)
        self._pins.extend(present.units)
        for row in present.rows:
            results[row] = EXISTS
        there = set(present.rows)
        todo = [row for row in range(len(keys)) if row not in there]
        where = {key: row for row, key in reversed(list(enumerate(self._batch.keys)))}
        for part in parts(len(todo), self._batch.object_nbytes, self._pool.geometry.capacity // 8):
            rows = todo[part]
            if time.monotonic() >= self._deadline:
                break
            outcome = self._part([keys[row] for row in rows], [where[keys[row]] for row in rows])
            for row, result in zip(rows, outcome, strict=True):
                results[row] = result
            if any(result.status is Status.NO_SPACE for result in outcome):
                for row in todo[part.stop :]:
                    results[row] = outcome[-1] if outcome[-1].status is Status.NO_SPACE else Result(Status.NO_SPACE)
                break
        return results

    def _part(self, keys: list[bytes], rows: list[int]) -> list[Result]:
        """Store some keys; ``rows`` are their places in the batch."""
        try:
            grant = self._pool.writer.call(ReserveStep(self._pool, keys, self._batch.object_nbytes), self._deadline)
        except Exception as error:  # noqa: BLE001 - travels in the results
            return [failure(error)] * len(keys)
        if grant.rooms:
            self._fill(grant, keys, rows)
        return grant.results

    def _fill(self, grant: Grant, keys: list[bytes], rows: list[int]) -> None:
        published = False
        rooms = grant.rooms
        try:
            outcome = self._store(rooms, [keys[room.row] for room in rooms], [rows[room.row] for room in rooms])
            published = True
        except Exception as error:  # noqa: BLE001 - travels in the results
            outcome = [failure(error)] * len(rooms)
        finally:
            if not published:
                self._pool.writer.cancel(CancelStep(rooms))
        for room, result in zip(rooms, outcome, strict=True):
            grant.results[room.row] = self._stored if result.status is Status.OK else result

    def _store(self, rooms: list[Room], keys: list[bytes], rows: list[int]) -> list[Result]:
        units = [room.unit for room in rooms]
        self._pool.leases.hold(units, FOREVER)
        self._pins.extend(units)
        offsets = np.array([room.offset for room in rooms], dtype=np.int64)
        copy_in(self._pool, self._engine, offsets, self._starts, self._batch.addresses[rows], self._batch.sizes)
        return self._pool.writer.call(PublishStep(self._pool, rooms, keys, (self._now, rows)), self._deadline)


__all__ = ["Pinned", "Put", "copy_in", "copy_out", "copy_rows", "get", "other_length", "parts", "pin", "read_memory", "starts_of"]
