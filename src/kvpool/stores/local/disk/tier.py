"""The disk tier as one process has it open: what the store asks of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import lmdb
import numpy as np

from kvpool.devices import CopyEngine
from kvpool.stores.base import Batch, Result, Tier, TierStats
from kvpool.stores.disk_settings import DiskSettings
from kvpool.stores.local import gauges
from kvpool.stores.local.arena import COPIED
from kvpool.stores.local.disk.agree import agree, agreed
from kvpool.stores.local.disk.attach import close_books, open_books
from kvpool.stores.local.disk.bounce import Bounce
from kvpool.stores.local.disk.demoter import Demoter
from kvpool.stores.local.disk.fetch import Fetch, promoted
from kvpool.stores.local.disk.iopool import IoPool
from kvpool.stores.local.disk.pool import DiskPool
from kvpool.stores.local.disk.record import unpack
from kvpool.stores.local.disk.removal import remove_from_disk
from kvpool.stores.local.disk.switch import Switch, Work
from kvpool.stores.local.eviction import Evicted
from kvpool.stores.local.index import ENTRY
from kvpool.stores.local.jobs import MISSING, failure
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.records import Records
from kvpool.stores.local.transfer import Pinned, pin
from kvpool.stores.local.writer import Closed, Overdue

logger = logging.getLogger(__name__)

BOUNCE_BYTES = 64 << 20
STALL_S = 5.0
_AGREE_S = 30.0
_CLOSE_S = 3.0
_LAST_S = 0.5
_REMOVE_S = 5.0

_FAULTS = (OSError, lmdb.Error, Closed)


def open_tier(pool: Pool, wanted: DiskSettings | None, *, join: bool) -> DiskTier | None:
    """The tier below a pool, None where there is none. ``join``: whatever the pool has; where that fails, none.

    OSError or ValueError with the reason in one line."""
    with pool.directory.locked(_AGREE_S):
        if join:
            wanted = agreed(pool.directory)
        else:
            agree(pool, wanted)
    if wanted is None:
        return None
    try:
        books = open_books(pool.directory, wanted)
        try:
            return DiskTier(pool, books, wanted)
        except BaseException:
            close_books(books)
            raise
    except (OSError, ValueError) as error:
        if not join:
            raise
        logger.warning("pool %s: its disk tier cannot be opened (%s)", pool.directory.path, error)
        return None


class DiskTier:
    """Thread-safe. ``pool`` is the pool in memory, ``books`` the one on the disk."""

    def __init__(self, pool: Pool, books: DiskPool, settings: DiskSettings) -> None:
        self.pool = pool
        self.books = books
        self.settings = settings
        self.files = books.files
        self.switch = Switch(books.directory)
        self.io = IoPool()
        self.bounce = Bounce(BOUNCE_BYTES)
        self.demoter = Demoter(self)
        pool.evictor.on_evicted = self._count_dropped
        books.evictor.on_evicted = self._left_disk
        with suppress(*_FAULTS, Overdue):  # then some objects are taken for copied that are not
            if not self._others():
                self._unmark_all()

    def _others(self) -> bool:
        peers = self.books.viewers()
        try:
            return peers.refresh() != [self.books.client]
        finally:
            peers.close()

    @property
    def usable(self) -> bool:
        """May the disk be used now? Off while it does not answer."""
        stalled = self.io.oldest_s()
        if stalled > STALL_S:
            self.switch.hangs(stalled)
        return self.switch.on

    # lookups; none of them touches the disk

    def entries(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Like Pool.entries. Nothing is there while the disk is off."""
        if not self.usable:
            return [None] * len(keys)
        return self.books.entries(keys)

    def holds(self, keys: Sequence[bytes]) -> set[bytes]:
        """Which of the keys lie on the disk, marked as used; none where that cannot be told."""
        named = [key for key in keys if key]
        try:
            raws = self.entries(named)
        except _FAULTS:
            return set()
        units = [ENTRY.unpack(raw)[0] for raw in raws if raw is not None]
        if units:
            self.books.stamps.touch(np.array(units, dtype=np.int64), time.monotonic_ns())
        return {key for key, raw in zip(named, raws, strict=True) if raw is not None}

    def hold(self, keys: Sequence[bytes], until: int) -> Pinned:
        """Hold the objects that lie on the disk until then."""
        return pin(self.books, keys if self.usable else [], until)

    # bytes

    def fetch(self, engine: CopyEngine, batch: Batch, results: list[Result], deadline: float) -> None:
        """Read the rows of ``results`` that are plainly MISSING, as far as the disk has them."""
        if not self.usable:
            return
        try:
            Fetch(self, engine, batch, results, deadline).run()
        except _FAULTS as error:
            for row, result in enumerate(results):
                if result is MISSING:
                    results[row] = failure(error)

    def promoted(self, keys: Sequence[bytes], deadline: float) -> AbstractContextManager[dict[int, Result]]:
        """See fetch.promoted."""
        return promoted(self, keys, deadline)

    # removal

    def remove(self, keys: Sequence[bytes]) -> list[Result]:
        """Their records are cleared too, so that no reboot brings them back."""
        try:
            return remove_from_disk(self, keys, time.monotonic() + _REMOVE_S)
        except Exception as error:  # noqa: BLE001 - travels in the results
            return [failure(error)] * len(keys)

    # what goes wrong

    def failed(self, work: Work, error: BaseException) -> None:
        """The disk answered with an error."""
        self.count(b"errors")
        self.switch.failed(work, error)

    def count(self, name: bytes, change: int = 1) -> None:
        """Add to a counter of the whole pool, some time soon."""
        try:
            self.books.writer.submit(lambda records: records.add(name, change))
        except Closed:
            return

    # marks in memory

    def _count_dropped(self, records: Records, evicted: Evicted) -> None:
        """Objects leave the memory: those without a copy are lost. Runs in a transaction of the pool in memory."""
        try:
            there = self.books.entries([key for key, _ in evicted])
        except _FAULTS:
            return
        records.add(b"dropped", sum(raw is None for raw in there))

    def _left_disk(self, records: Records, evicted: Evicted) -> None:
        """Objects leave the disk: what memory has of them has no copy any more, and their records are to be cleared."""
        self.demoter.eraser.add((key, entry[0], entry[3]) for key, entry in evicted)
        try:
            raws = self.pool.entries([key for key, _ in evicted])
        except _FAULTS:
            return
        units = [ENTRY.unpack(raw)[0] for raw in raws if raw is not None]
        if units:
            self.pool.stamps.mark(np.array(units, dtype=np.int64), COPIED, False)

    def _unmark_all(self) -> None:
        """The books may be new, and the marks of other times: the demoter looks again."""
        units = self.pool.look(lambda records: records.slabs.units(records.slabs.all()))
        self.pool.stamps.mark(units, COPIED, False)

    # upkeep

    def stats(self) -> TierStats:
        numbers = gauges.index_stats(self.books)
        counted = self.books.look(lambda records: {name: records.counter(name) for name in (b"written", b"errors", b"corrupt")})
        return TierStats(
            tier=Tier.DISK,
            capacity_bytes=numbers.capacity_bytes,
            used_bytes=numbers.used_bytes,
            objects=numbers.objects,
            evicted_objects=numbers.evicted_objects,
            written_bytes=counted[b"written"],
            errors=counted[b"errors"] + counted[b"corrupt"],
            ok=self.usable,
            dropped_objects=self.pool.look(lambda records: records.counter(b"dropped")),
        )

    def verify(self) -> list[str]:
        """Reads every record: for tools and tests."""
        findings = gauges.verify(self.books)
        objects = self.books.look(gauges.entries, long=True)
        for key, entry in objects:
            unit, _, nbytes, generation = entry
            record = unpack(self.files.read_record(unit))
            told = None if record is None else (record.key, record.nbytes, record.generation)
            if told != (key, nbytes, generation) and self.books.entries([key]) == [ENTRY.pack(*entry)]:
                findings.append(f"object {key!r}: its record on the disk says otherwise")
        return [f"disk: {finding}" for finding in findings]

    def start(self) -> None:
        """Begin to copy what grows cold; idempotent."""
        self.demoter.start()

    def close(self) -> bool:
        """False when the disk still moves bytes from or into memory: then that memory must stay mapped. Bounded."""
        self.pool.evictor.on_evicted = None
        with suppress(*_FAULTS, Overdue):  # a transaction that had begun may still look into the books
            self.pool.writer.call(lambda records: None, time.monotonic() + _LAST_S)
        stopped = self.demoter.close(_CLOSE_S)
        if not (self.io.close(_CLOSE_S) and stopped):
            return False
        self.switch.close()
        self.books.evictor.on_evicted = None
        close_books(self.books)
        return True


__all__ = ["DiskTier", "open_tier"]
