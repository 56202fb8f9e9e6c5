"""The embedded store: a pool in shared memory that all processes of a host use directly."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import lmdb

from kvpool.devices import CopyEngine, copy_engine
from kvpool.stores.base import (
    UNKNOWN,
    Answer,
    Batch,
    Capabilities,
    Done,
    Handle,
    Health,
    Lease,
    MappedStore,
    Pins,
    Reader,
    Result,
    Slot,
    Status,
    StoreStats,
    Writer,
)
from kvpool.stores.disk_settings import DiskSettings
from kvpool.stores.local import gauges
from kvpool.stores.local.disk.tier import open_tier
from kvpool.stores.local.index import MAX_KEY
from kvpool.stores.local.jobs import FATAL_CLOSED, CancelStep, PublishStep, ReserveStep, Room, failure
from kvpool.stores.local.leases import FOREVER
from kvpool.stores.local.lookup import Hits, Token, lease, look_up
from kvpool.stores.local.notes import read_notes, write_note
from kvpool.stores.local.pool import OnLastClose, Pool, open_pool
from kvpool.stores.local.ranged import LocalReader, LocalWriter
from kvpool.stores.local.remove import remove
from kvpool.stores.local.transfer import Put, get, pin
from kvpool.stores.local.writer import Closed

logger = logging.getLogger(__name__)

_REMOVE_S = 5.0
_PIN_S = 10.0
_DRAIN_S = 5.0
_REMOVE_KEYS = 512
_LONGEST_LEASE_S = 10 * 365 * 86400.0

SlotToken = tuple[Pool, Room]
Findings = list[str]


class LocalStore(MappedStore):
    """See the package's modules for how it works, and kvpool.stores.base for the contract.

    ``dram_bytes`` must be the same in all processes; None joins a pool that is there, whatever its size. Opening raises OSError or
    ValueError. A put and a get are done when they return: nothing of theirs is ever left to abandon.

    EVICTED is told of the first missing key of a call only: keys come in chain order, and nobody can use what follows a gap.
    """

    name = "local"
    capabilities = Capabilities(
        mapped=True, ranged=True, listable=True, abandonable=True, leases=True, host_bound=True, max_key_len=MAX_KEY
    )

    def __init__(
        self,
        root: Path | None = None,
        name: str = "default",
        dram_bytes: int | None = None,
        on_last_close: OnLastClose = "keep",
        engine: CopyEngine | None = None,
        disk: DiskSettings | None = None,
    ) -> None:
        if on_last_close not in ("keep", "remove"):
            raise ValueError(f"on_last_close is {on_last_close!r} (accepted: keep, remove)")
        if disk is not None and dram_bytes is None:
            raise ValueError("a disk tier is asked for, but no dram_bytes: a pool that is joined as it is has its own disk tier")
        self._where = (root, name, dram_bytes)
        self._disk = disk
        self._on_last_close = on_last_close
        self._engine = engine or copy_engine("cpu")
        self._pool: Pool | None = None
        self._state = threading.Condition()
        self._hits = Hits()

    # life

    def open(self) -> None:
        if self._pool is not None:
            return
        pool = open_pool(*self._where)  # may wait long: no lock is held
        try:
            pool.disk = open_tier(pool, self._disk, join=self._where[2] is None)
        except BaseException:
            pool.close("keep")
            raise
        with self._state:
            if self._pool is None:
                self._pool = pool
                return
        pool.close("keep")  # another thread was faster

    def close(self) -> None:
        with self._state:
            pool, self._pool = self._pool, None
            if pool is None or pool.pid != os.getpid():
                return
            end = time.monotonic() + _DRAIN_S
            while pool.calls and (left := end - time.monotonic()) > 0:
                self._state.wait(left)
            if pool.calls:
                pool.left = True  # a call is stuck: its memory must stay mapped until it ends
                return
        pool.close(self._on_last_close)

    @contextmanager
    def _entered(self) -> Iterator[Pool]:
        """The pool, which stays open until the end of the call. Closed when it is not open in this process."""
        with self._state:
            pool = self._pool
            if pool is None or pool.pid != os.getpid():
                raise Closed
            pool.calls += 1
        try:
            yield pool
        finally:
            with self._state:
                pool.calls -= 1
                last = not pool.calls
                if last:
                    self._state.notify_all()
            if last and pool.left and pool.pid == os.getpid():
                pool.close(self._on_last_close)

    # lookups

    def exists(self, keys: Sequence[bytes]) -> list[Answer]:
        try:
            with self._entered() as pool:
                return look_up(pool, keys, self._hits)
        except Exception:  # noqa: BLE001 - a lookup never raises
            return [UNKNOWN] * len(keys)

    def lease(self, keys: Sequence[bytes], seconds: float) -> Lease:
        now = time.monotonic_ns()
        until = now + int(max(0.0, min(seconds, _LONGEST_LEASE_S)) * 1e9)
        held: Token = []
        try:
            with self._entered() as pool:
                return Lease(keys, lease(pool, keys, until, self._hits, held), until / 1e9, held)
        except Exception:  # noqa: BLE001 - what cannot be told is unknown
            self._drop(held)
            return Lease(keys, [UNKNOWN] * len(keys), now / 1e9)

    def release(self, lease: Lease) -> None:
        token, lease.token = lease.token, None
        self._drop(token)

    def _drop(self, token: object) -> None:
        if token is None:
            return
        try:
            with self._entered() as mine:
                for pool, units, until in cast(Token, token):
                    if pool is mine or (mine.disk is not None and pool is mine.disk.books):
                        pool.leases.drop(units, until)
        except Closed:
            return

    # whole objects

    def put(self, batch: Batch, deadline_s: float) -> Handle:
        self._check(batch)
        deadline = time.monotonic() + deadline_s
        try:
            with self._entered() as pool:
                self._start(pool)
                return Done(Put(pool, self._engine, batch, deadline).run())
        except Closed:
            return Done([FATAL_CLOSED] * len(batch.keys))

    def get(self, batch: Batch, deadline_s: float) -> Handle:
        self._check_sizes(batch)
        deadline = time.monotonic() + deadline_s
        try:
            with self._entered() as pool:
                self._start(pool)
                return Done(get(pool, self._engine, batch, deadline))
        except Closed:
            return Done([FATAL_CLOSED] * len(batch.keys))

    def _start(self, pool: Pool) -> None:
        """What a process that moves bytes needs in the background."""
        pool.prefaulter.start(pool.slabs.all())
        if pool.disk is not None:
            pool.disk.start()

    def _check(self, batch: Batch) -> None:
        self._check_sizes(batch)
        check_keys(batch.keys)

    def _check_sizes(self, batch: Batch) -> None:
        if len(batch.keys) and (batch.object_nbytes <= 0 or bool((batch.sizes < 0).any())):
            raise ValueError(f"an object must have at least one byte, segments none below 0: sizes are {batch.sizes.tolist()[:8]}")

    # objects in pieces

    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer:
        check_keys(keys)
        if nbytes <= 0:
            raise ValueError(f"an object must have at least one byte, not {nbytes}")
        return LocalWriter(self._entered, self._engine, keys, nbytes, deadline_s)

    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader:
        return LocalReader(self._entered, self._engine, keys, deadline_s)

    # slots in place

    def reserve(self, count: int, nbytes: int, deadline_s: float) -> list[Slot]:
        if count < 0 or nbytes <= 0:
            raise ValueError(f"reserve needs a count of at least 0 and at least one byte, not {count} and {nbytes}")
        deadline = time.monotonic() + deadline_s
        try:
            with self._entered() as pool:
                self._start(pool)
                grant = pool.writer.call(ReserveStep(pool, [b""] * count, nbytes), deadline)
                return [Slot(pool.arena.base + room.offset, nbytes, (pool, room)) for room in grant.rooms]
        except Exception:  # noqa: BLE001 - fewer slots is the answer
            return []

    def publish(self, pairs: Sequence[tuple[Slot, bytes]], deadline_s: float) -> list[Result]:
        check_keys([key for _, key in pairs])
        deadline = time.monotonic() + deadline_s
        try:
            with self._entered() as pool:
                rooms = [self._room(pool, slot) for slot, _ in pairs]
                return pool.writer.call(PublishStep(pool, rooms, [key for _, key in pairs]), deadline)
        except ValueError:
            raise
        except Exception as error:  # noqa: BLE001 - travels in the results
            return [failure(error)] * len(pairs)

    def discard(self, slots: Sequence[Slot]) -> None:
        try:
            with self._entered() as pool:
                pool.writer.cancel(CancelStep([self._room(pool, slot) for slot in slots]))
        except Closed:
            return

    def _room(self, pool: Pool, slot: Slot) -> Room:
        owner, room = cast(SlotToken, slot.token)
        if owner is not pool:
            raise ValueError("the slot is from another store, or from before it was reopened")
        return room

    def pin(self, keys: Sequence[bytes]) -> Pins:
        addresses, sizes = [0] * len(keys), [0] * len(keys)
        try:
            with self._entered() as pool:
                with nullcontext() if pool.disk is None else pool.disk.promoted(keys, time.monotonic() + _PIN_S):
                    pinned = pin(pool, keys)
                base, token = pool.arena.base, [(pool, pinned.units, FOREVER)]
        except Exception:  # noqa: BLE001 - nothing pinned is the answer
            return Pins(addresses, sizes)
        for row, offset, nbytes in zip(pinned.rows, pinned.offsets.tolist(), pinned.nbytes.tolist(), strict=True):
            addresses[row], sizes[row] = base + offset, nbytes
        return Pins(addresses, sizes, token)

    def unpin(self, pins: Pins) -> None:
        token, pins.token = pins.token, None
        self._drop(token)

    # upkeep

    def remove(self, keys: Sequence[bytes]) -> list[Result]:
        results: list[Result] = []
        for start in range(0, len(keys), _REMOVE_KEYS):
            part = [key if len(key) <= MAX_KEY else b"" for key in keys[start : start + _REMOVE_KEYS]]
            try:
                with self._entered() as pool:
                    results.extend(remove(pool, part, time.monotonic() + _REMOVE_S))
            except Exception as error:  # noqa: BLE001 - travels in the results
                results.extend([failure(error)] * len(part))
        return results

    def list(self, prefix: bytes = b"") -> list[bytes]:
        try:
            with self._entered() as pool:
                found = gauges.list_keys(pool, prefix)
                return found if pool.disk is None else sorted({*found, *gauges.list_keys(pool.disk.books, prefix)})
        except (Closed, OSError, lmdb.Error):
            return []

    def clear(self, prefix: bytes) -> int:
        gone = (Status.OK, Status.BUSY)
        return sum(result.status in gone for result in self.remove(self.list(prefix)))

    def write_note(self, name: bytes, text: str) -> None:
        try:
            with self._entered() as pool:
                write_note(pool.directory, name, text)
        except (Closed, OSError) as error:
            logger.warning("a note for later engines could not be left in the pool: %s", error)

    def notes(self, prefix: bytes) -> dict[bytes, str]:
        try:
            with self._entered() as pool:
                return read_notes(pool.directory, prefix)
        except (Closed, OSError):
            return {}

    def stats(self) -> StoreStats:
        try:
            with self._entered() as pool:
                return gauges.stats(pool)
        except Exception:  # noqa: BLE001 - no numbers is the answer
            return StoreStats()

    def users(self) -> int:
        """How many stores of living processes have this pool open, this one included."""
        with self._entered() as pool:
            return pool.peers.count()

    def verify(self) -> Findings:
        """What is wrong with the pool's books, in one line each; empty when every slot is accounted for exactly once."""
        with self._entered() as pool:
            return gauges.verify(pool) + ([] if pool.disk is None else pool.disk.verify())

    def health(self) -> Health:
        try:
            with self._entered() as pool:
                return gauges.health(pool)
        except Closed:
            return Health(False, "the store is closed")
        except Exception as error:  # noqa: BLE001 - that is what the probe is for
            return Health(False, str(error))


def check_keys(keys: Sequence[bytes]) -> None:
    """ValueError for a key that no object can have."""
    if keys and (min(map(len, keys)) == 0 or max(map(len, keys)) > MAX_KEY):
        raise ValueError(f"keys have 1 to {MAX_KEY} bytes")


__all__ = ["LocalStore", "check_keys"]
