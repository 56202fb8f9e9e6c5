"""Objects written and read in pieces: layer by layer, for instance.

Writers and readers may be used from several threads. Whatever ends one while copies run (abort, end) takes effect at once for later
calls, and the last running copy gives the slots back: until then they stay reserved or pinned. ``commit`` waits for running copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from kvpool.devices import CopyEngine
from kvpool.stores.base import Addresses, Reader, Result, Status, Tier, Writer
from kvpool.stores.local.jobs import FATAL_CLOSED, MISSING, CancelStep, PublishStep, ReserveStep, Room, failure
from kvpool.stores.local.leases import FOREVER
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.transfer import copy_in, copy_out, pin, starts_of
from kvpool.stores.local.writer import Closed
from kvpool.stores.pieces import Written, check_piece

Entered = Callable[[], AbstractContextManager[Pool]]

_DROPPED = Result(Status.FATAL, text="dropped by the caller")
_ENDED = Result(Status.FATAL, text="this writer or reader has ended")


class _Copies:
    """The copies that run now. After ``end`` no more begin, and ``last`` runs once, when none is left."""

    def __init__(self, last: Callable[[Pool], None]) -> None:
        self.lock = threading.Condition()
        self.ended = False
        self._running = 0
        self._last = last
        self._held = False
        self._gave_back = False

    @contextmanager
    def one(self, pool: Pool) -> Iterator[bool]:
        """Around a copy; False: it has ended, copy nothing."""
        with self.lock:
            allowed = not self.ended
            self._running += allowed
        try:
            yield allowed
        finally:
            with self.lock:
                self._running -= allowed
                self.lock.notify_all()
            self._give_back(pool)

    def end(self, *, hold: bool = False) -> bool:
        """Let no copy begin any more; False when it had ended before. With ``hold`` nothing is given back before ``give_back``."""
        with self.lock:
            if self.ended:
                return False
            self.ended, self._held = True, hold
            return True

    def wait(self, deadline: float) -> bool:
        """Wait for the copies that run; False when the deadline passes before."""
        with self.lock:
            return self.lock.wait_for(lambda: not self._running, max(0.0, deadline - time.monotonic()))

    def give_back(self, entered: Entered, mine: Pool | None) -> None:
        """After ``end``: now, or by the last copy that runs."""
        with self.lock:
            self._held = False
        try:
            with entered() as pool:
                if pool is mine:
                    self._give_back(pool)
        except Closed:
            return

    def _give_back(self, pool: Pool) -> None:
        with self.lock:
            if not self.ended or self._running or self._gave_back or self._held:
                return
            self._gave_back = True
        self._last(pool)


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
        self._copies = _Copies(self._cancel)
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
        results = [self.results[row] if self.results[row].status is not Status.OK else _ENDED for row in rows]
        if pool is not self._pool:
            return [_ENDED] * len(rows)
        with self._copies.one(pool) as allowed:
            mine = [place for place, row in enumerate(rows) if row in self._rooms] if allowed else []
            if not mine:
                return results
            outcome = Result(Status.OK, end - offset)
            try:
                offsets = np.array([self._rooms[rows[place]].offset for place in mine], dtype=np.int64)
                copy_in(pool, self._engine, offsets, starts_of(sizes, offset), addresses[mine], sizes)
            except Exception as error:  # noqa: BLE001 - travels in the results
                outcome = failure(error)
            with self._copies.lock:
                for place in mine:
                    written = self._written[rows[place]]
                    (written.add if outcome.status is Status.OK else written.cut)(offset, end)
                    results[place] = outcome
        return results

    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        """Waits for running writes, until the deadline of ``begin_write`` or a second from now; over it nothing is published."""
        results = list(self.results)
        if not self._copies.end(hold=True):
            return [result if result.status is not Status.OK else _ENDED for result in results]
        try:
            deadline = max(self._deadline, time.monotonic() + 1.0)
            whole = self._whole(rows, self._copies.wait(deadline), results)
            if whole:
                outcome = self._publish([self._rooms[row] for row in whole], [self._keys[row] for row in whole], deadline)
                for row, result in zip(whole, outcome, strict=True):
                    results[row] = Result(Status.OK, self._nbytes, tier=Tier.DRAM) if result.status is Status.OK else result
                    if result.stored:
                        del self._rooms[row]
        finally:
            self._copies.give_back(self._entered, self._pool)
        return results

    def _whole(self, rows: Sequence[int] | None, waited: bool, results: list[Result]) -> list[int]:
        """The rows to publish; ``results`` says why not of the others."""
        chosen = set(self._rooms if rows is None else rows)
        whole = []
        for row in self._rooms:
            if row not in chosen:
                results[row] = _DROPPED
            elif not waited:
                results[row] = Result(Status.TRANSIENT, text="a write of it was still running")
            elif self._written[row].covers(self._nbytes):
                whole.append(row)
            else:
                results[row] = Result(Status.FATAL, text="not every byte was written")
        return whole

    def _publish(self, rooms: list[Room], keys: list[bytes], deadline: float) -> list[Result]:
        try:
            with self._entered() as pool:
                if pool is not self._pool:
                    return [_ENDED] * len(rooms)
                return pool.writer.call(PublishStep(pool, rooms, keys), deadline)
        except Exception as error:  # noqa: BLE001 - travels in the results
            return [failure(error)] * len(rooms)

    def abort(self) -> None:
        if self._copies.end():
            self._copies.give_back(self._entered, self._pool)

    def _cancel(self, pool: Pool) -> None:
        if self._rooms:
            pool.writer.cancel(CancelStep(list(self._rooms.values())))


class LocalReader(Reader):
    """Objects pinned until ``end``."""

    def __init__(self, entered: Entered, engine: CopyEngine, keys: Sequence[bytes], deadline_s: float) -> None:
        self._entered = entered
        self._engine = engine
        self._deadline = time.monotonic() + deadline_s
        self._pool: Pool | None = None
        self._copies = _Copies(self._drop)
        self._units: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}
        self.results = [MISSING] * len(keys)
        try:
            with entered() as pool:
                pool.prefaulter.start(pool.slabs.all())
                with nullcontext({}) if pool.disk is None else pool.disk.promoted(keys, self._deadline) as promoted:
                    pinned = pin(pool, keys)
                self._pool = pool
        except Exception as error:  # noqa: BLE001 - travels in the results
            self.results = [failure(error)] * len(keys)
            return
        self._units = pinned.units
        for row, result in promoted.items():
            self.results[row] = result
        for row, offset, nbytes in zip(pinned.rows, pinned.offsets.tolist(), pinned.nbytes.tolist(), strict=True):
            self._places[row] = (offset, nbytes)
            self.results[row] = Result(Status.OK, tier=Tier.DISK if row in promoted else Tier.DRAM)

    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        end = check_piece(rows, len(self.results), offset, addresses, sizes)
        short = [row for row in rows if row in self._places and self._places[row][1] < end]
        if short:
            raise ValueError(f"bytes {offset} to {end} of an object of {self._places[short[0]][1]} bytes")
        try:
            with self._entered() as pool:
                return self._read(pool, rows, offset, end, addresses, sizes)
        except Closed:
            return [FATAL_CLOSED] * len(rows)

    def _read(self, pool: Pool, rows: Sequence[int], offset: int, end: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        results = [self.results[row] if self.results[row].status is not Status.OK else _ENDED for row in rows]
        if pool is not self._pool:
            return results
        with self._copies.one(pool) as allowed:
            mine = [place for place, row in enumerate(rows) if row in self._places] if allowed else []
            if not mine:
                return results
            outcome = Result(Status.OK, end - offset)
            try:
                offsets = np.array([self._places[rows[place]][0] for place in mine], dtype=np.int64)
                copy_out(pool, self._engine, offsets, starts_of(sizes, offset), addresses[mine], sizes)
            except Exception as error:  # noqa: BLE001 - travels in the results
                outcome = failure(error)
            for place in mine:
                results[place] = outcome
        return results

    def end(self) -> None:
        if self._copies.end():
            self._copies.give_back(self._entered, self._pool)

    def _drop(self, pool: Pool) -> None:
        pool.leases.drop(self._units, FOREVER)
