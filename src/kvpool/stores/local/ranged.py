"""Objects written and read in pieces: layer by layer, for instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from kvpool.devices import CopyEngine
from kvpool.stores.base import Addresses, Reader, Result, Status, Writer
from kvpool.stores.local.jobs import FATAL_CLOSED, MISSING, OK, CancelStep, PublishStep, ReserveStep, Room, failure
from kvpool.stores.local.leases import FOREVER
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.transfer import copy_in, copy_out, pin, starts_of
from kvpool.stores.local.writer import Closed

Entered = Callable[[], AbstractContextManager[Pool]]

_DROPPED = Result(Status.FATAL, text="dropped by the caller")
_ENDED = Result(Status.FATAL, text="this writer or reader has ended")


def check_piece(rows: Sequence[int], count: int, offset: int, addresses: Addresses, sizes: Addresses) -> int:
    """The end of the piece inside its objects. ValueError for wrong shapes and rows."""
    if addresses.shape != (len(rows), len(sizes)):
        raise ValueError(f"addresses have shape {addresses.shape}, expected {(len(rows), len(sizes))}")
    if offset < 0 or bool((sizes < 0).any()):
        raise ValueError(f"offset {offset} and sizes must not be below 0")
    if rows and not 0 <= min(rows) <= max(rows) < count:
        raise ValueError(f"rows {list(rows)[:8]} of {count} objects")
    return offset + int(sizes.sum())


class Written:
    """Which bytes of an object have been written: disjoint runs in order."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        if self._runs and self._runs[-1][1] == start:
            self._runs[-1] = (self._runs[-1][0], end)
            return
        merged: list[tuple[int, int]] = []
        for run in sorted([*self._runs, (start, end)]):
            if merged and run[0] <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], run[1]))
            else:
                merged.append(run)
        self._runs = merged

    def covers(self, nbytes: int) -> bool:
        return self._runs == [(0, nbytes)]


class LocalWriter(Writer):
    """Slots reserved under their keys. An object of which a byte was never written cannot be committed."""

    def __init__(self, entered: Entered, engine: CopyEngine, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> None:
        self._entered = entered
        self._engine = engine
        self._keys = list(keys)
        self._nbytes = nbytes
        self._deadline = time.monotonic() + deadline_s
        self._rooms: dict[int, Room] = {}
        self._written: dict[int, Written] = {}
        self._pool: Pool | None = None
        unique = list(dict.fromkeys(self._keys))
        try:
            with entered() as pool:
                pool.prefaulter.start(pool.slabs.all())
                grant = pool.writer.call(ReserveStep(pool, unique, nbytes), self._deadline)
                self._pool = pool
        except Exception as error:  # noqa: BLE001 - travels in the results
            self.results = [FATAL_CLOSED if isinstance(error, Closed) else failure(error)] * len(self._keys)
            return
        place = {key: row for row, key in reversed(list(enumerate(self._keys)))}
        self.results = [Result(Status.BUSY, text="the key is twice in the batch")] * len(self._keys)
        for key, result in zip(unique, grant.results, strict=True):
            self.results[place[key]] = result
        for room in grant.rooms:
            row = place[unique[room.row]]
            self._rooms[row] = Room(row, room.unit, room.generation, room.offset)
            self._written[row] = Written()

    def write(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        end = check_piece(rows, len(self._keys), offset, addresses, sizes)
        if end > self._nbytes:
            raise ValueError(f"bytes {offset} to {end} of objects of {self._nbytes} bytes")
        try:
            with self._entered() as pool:
                return self._write(pool, rows, offset, end, addresses, sizes)
        except Closed:
            return [FATAL_CLOSED] * len(rows)

    def _write(
        self, pool: Pool, rows: Sequence[int], offset: int, end: int, addresses: Addresses, sizes: Addresses
    ) -> list[Result]:
        if pool is not self._pool:
            return [_ENDED] * len(rows)
        mine = [place for place, row in enumerate(rows) if row in self._rooms]
        offsets = np.array([self._rooms[rows[place]].offset for place in mine], dtype=np.int64)
        if mine:
            copy_in(pool, self._engine, offsets, starts_of(sizes, offset), addresses[mine], sizes)
        written = Result(Status.OK, end - offset)
        results = [self.results[row] if self.results[row].status is not Status.OK else _ENDED for row in rows]
        for place in mine:
            self._written[rows[place]].add(offset, end)
            results[place] = written
        return results

    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        chosen = set(self._rooms if rows is None else rows)
        results = list(self.results)
        whole = [row for row in self._rooms if row in chosen and self._written[row].covers(self._nbytes)]
        for row in self._rooms:
            results[row] = _DROPPED if row not in chosen else Result(Status.FATAL, text="not every byte was written")
        rooms = [self._rooms.pop(row) for row in whole]
        self.abort()
        if not rooms:
            return results
        try:
            with self._entered() as pool:
                outcome = self._publish(pool, rooms, [self._keys[row] for row in whole])
        except Closed:
            outcome = [FATAL_CLOSED] * len(rooms)
        for row, result in zip(whole, outcome, strict=True):
            results[row] = Result(Status.OK, self._nbytes) if result.status is Status.OK else result
        return results

    def _publish(self, pool: Pool, rooms: list[Room], keys: list[bytes]) -> list[Result]:
        if pool is not self._pool:
            return [_ENDED] * len(rooms)
        try:
            return pool.writer.call(PublishStep(pool, rooms, keys), max(self._deadline, time.monotonic() + 1.0))
        except Exception as error:  # noqa: BLE001 - travels in the results
            pool.writer.submit(CancelStep(rooms))
            return [failure(error)] * len(rooms)

    def abort(self) -> None:
        rooms, self._rooms = list(self._rooms.values()), {}
        if not rooms:
            return
        try:
            with self._entered() as pool:
                if pool is self._pool:
                    pool.writer.submit(CancelStep(rooms))
        except Closed:
            return


class LocalReader(Reader):
    """Objects pinned until ``end``."""

    def __init__(self, entered: Entered, engine: CopyEngine, keys: Sequence[bytes], deadline_s: float) -> None:
        self._entered = entered
        self._engine = engine
        self._deadline = time.monotonic() + deadline_s
        self._pool: Pool | None = None
        self._units: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}
        self.results = [MISSING] * len(keys)
        try:
            with entered() as pool:
                pool.prefaulter.start(pool.slabs.all())
                pinned = pin(pool, keys)
                self._pool = pool
        except Exception as error:  # noqa: BLE001 - travels in the results
            self.results = [failure(error)] * len(keys)
            return
        self._units = pinned.units
        for row, offset, nbytes in zip(pinned.rows, pinned.offsets.tolist(), pinned.nbytes.tolist(), strict=True):
            self._places[row] = (offset, nbytes)
            self.results[row] = OK

    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        end = check_piece(rows, len(self.results), offset, addresses, sizes)
        short = [row for row in rows if row in self._places and self._places[row][1] < end]
        if short:
            raise ValueError(f"bytes {offset} to {end} of an object of {self._places[short[0]][1]} bytes")
        try:
            with self._entered() as pool:
                mine = [place for place, row in enumerate(rows) if row in self._places] if pool is self._pool else []
                offsets = np.array([self._places[rows[place]][0] for place in mine], dtype=np.int64)
                if mine:
                    copy_out(pool, self._engine, offsets, starts_of(sizes, offset), addresses[mine], sizes)
        except Closed:
            return [FATAL_CLOSED] * len(rows)
        results = [self.results[row] if self.results[row].status is not Status.OK else _ENDED for row in rows]
        for place in mine:
            results[place] = Result(Status.OK, end - offset)
        return results

    def end(self) -> None:
        units, self._units = self._units, []
        self._places = {}
        if not units:
            return
        try:
            with self._entered() as pool:
                if pool is self._pool:
                    pool.leases.drop(units, FOREVER)
        except Closed:
            return
