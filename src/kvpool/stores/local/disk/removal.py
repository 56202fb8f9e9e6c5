"""Removing objects from the disk: from the index, then their records, then their slots are free."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvpool.stores.base import Result, Status
from kvpool.stores.local.disk.iopool import Busy, IoCall
from kvpool.stores.local.disk.pool import DiskPool
from kvpool.stores.local.jobs import BUSY, MISSING, OK
from kvpool.stores.local.leases import UPKEEP
from kvpool.stores.local.records import Records

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier


class _Retract:
    """What is removed is held here until its record is cleared: nobody gets the slot before. ``found``: unit and generation of
    what was there. An attempt that was not committed keeps no holds."""

    def __init__(self, books: DiskPool, keys: Sequence[bytes]) -> None:
        self._books = books
        self._keys = keys
        self._lock = threading.Lock()
        self._over = False
        self.found: dict[bytes, tuple[int, int]] = {}

    def __call__(self, records: Records) -> None:
        with self._lock:
            self._drop()
            if self._over:
                return
            entries = {key: entry for key in self._keys if key and (entry := records.entry(key)) is not None}
            self._books.leases.hold((entry[0] for entry in entries.values()), UPKEEP)
            self.found = {key: (entry[0], entry[3]) for key, entry in entries.items()}
        for key, (unit, _, nbytes, generation) in entries.items():
            records.retract(key, unit, nbytes, generation, revivable=False)

    def abandon(self) -> None:
        """It was not committed."""
        with self._lock:
            self._over = True
            self._drop()

    def _drop(self) -> None:
        self._books.leases.drop((unit for unit, _ in self.found.values()), UPKEEP)
        self.found = {}


def remove_from_disk(tier: DiskTier, keys: Sequence[bytes], deadline: float) -> list[Result]:
    """OK or MISSING per key; BUSY where it is still being read, or the disk does not answer; TRANSIENT where it is removed, but a
    reboot may bring it back, for its record could not be cleared. Raises what the writer raises."""
    books = tier.books
    retract = _Retract(books, keys)
    try:
        books.writer.call(retract, deadline)
    except BaseException:
        retract.abandon()
        raise
    found = retract.found
    if not found:
        return [MISSING] * len(keys)
    error = _clear_records(tier, [unit for unit, _ in found.values()], deadline)
    if error is not None:
        tier.demoter.eraser.add((key, *place) for key, place in found.items())
    done = OK if error is None else Result(Status.TRANSIENT, text=f"removed, but its record on the disk is not cleared: {error}")

    def settle(records: Records) -> set[int]:
        books.evictor.sweep(records)
        return {unit for unit, _ in found.values() if records.in_limbo(unit)}

    busy = books.writer.call(settle, deadline)
    return [MISSING if key not in found else BUSY if found[key][0] in busy else done for key in keys]


def _clear_records(tier: DiskTier, units: Iterable[int], deadline: float) -> BaseException | None:
    """Of units held by this process; then ends the holds. What went wrong. A disk that is off does it when it is back."""
    units = list(units)

    def drop() -> None:
        tier.books.leases.drop(units, UPKEEP)

    def work() -> None:
        try:
            for unit in units:
                tier.files.clear_record(unit)
        finally:
            drop()

    call = IoCall(work, lambda: None)
    tier.io.submit([call])
    if not call.wait(deadline - time.monotonic() if tier.usable else 0.0) or call.error is None:
        return None
    if isinstance(call.error, Busy):
        drop()
    elif isinstance(call.error, OSError):
        tier.failed("write", call.error)
    return call.error
