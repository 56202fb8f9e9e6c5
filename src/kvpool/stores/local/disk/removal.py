"""Removing objects from the disk: from the index, then their records, then their slots are free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.stores.base import Result
from kvpool.stores.local.disk.iopool import Busy, IoCall
from kvpool.stores.local.jobs import BUSY, MISSING, OK
from kvpool.stores.local.leases import UPKEEP
from kvpool.stores.local.records import Records

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier


def remove_from_disk(tier: DiskTier, keys: Sequence[bytes], deadline: float) -> list[Result]:
    """OK or MISSING per key; BUSY where it is still being read, or the disk does not answer. Raises what the writer raises."""
    books = tier.books
    found: dict[bytes, int] = {}

    def retract(records: Records) -> None:
        """What is removed is held here until its record is cleared: nobody gets the slot before."""
        for key in keys:
            entry = records.entry(key) if key else None
            if entry is not None:
                unit, _, nbytes, generation = entry
                records.retract(key, unit, nbytes, generation, revivable=False)
                found[key] = unit
        books.leases.hold(found.values(), UPKEEP)

    def settle(records: Records) -> set[int]:
        books.evictor.sweep(records)
        return {unit for unit in found.values() if records.in_limbo(unit)}

    books.writer.call(retract, deadline)
    if not found:
        return [MISSING] * len(keys)
    _clear_records(tier, list(found.values()), deadline)
    busy = books.writer.call(settle, deadline)
    return [MISSING if key not in found else BUSY if found[key] in busy else OK for key in keys]


def _clear_records(tier: DiskTier, units: Sequence[int], deadline: float) -> None:
    """Of units held by this process; then ends the holds. A disk that is off does it when it is back."""

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
    call.wait(deadline - time.monotonic() if tier.usable else 0.0)
    if isinstance(call.error, Busy):
        drop()
    elif isinstance(call.error, OSError):
        tier.failed("write", call.error)
