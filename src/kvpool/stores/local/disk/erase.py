"""Clearing the records of slots that hold nothing any more, so that no later scan takes them for objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvpool.stores.local.disk.iopool import IoCall
from kvpool.stores.local.disk.record import unpack
from kvpool.stores.local.index import ENTRY
from kvpool.stores.local.records import Records

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier

_WAIT_S = 10.0


class Eraser:
    """Used by the elected demoter. A slot that is used again is none of its business: its writer clears the record first."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._pending: dict[int, tuple[bytes, int]] = {}  # unit: the key and generation that it had
        self._lock = threading.Lock()

    def add(self, places: Iterable[tuple[bytes, int, int]]) -> None:
        """Key, unit and generation of objects that are on their way out."""
        with self._lock:
            self._pending.update({unit: (key, generation) for key, unit, generation in places})

    def reused(self, units: Iterable[int]) -> None:
        with self._lock:
            for unit in units:
                self._pending.pop(unit, None)

    def look_for_leftovers(self) -> None:
        """A demoter that was killed may have left records in slots that are free by now."""
        books = self._tier.books

        def look(records: Records) -> list[int]:
            classes = {slab.slot_bytes for slab in records.slabs.all()}
            return [unit for slot_bytes in classes for unit in records.free_slots(slot_bytes, 1 << 40)]

        files = self._tier.files
        found: list[tuple[bytes, int, int]] = []

        def work() -> None:
            for unit in books.look(look):
                record = unpack(files.read_record(unit))
                if record is not None:
                    found.append((record.key, unit, record.generation))

        self._do(work)
        self.add(found)

    def run(self) -> None:
        """Clear what is pending and gone indeed: an eviction may have been taken back. Nothing is reserved meanwhile."""
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        raws = self._tier.books.entries([key for key, _ in pending.values()])
        there = [None if raw is None else ENTRY.unpack(raw) for raw in raws]
        gone = [
            unit
            for (unit, (_, generation)), entry in zip(pending.items(), there, strict=True)
            if entry is None or (entry[0], entry[3]) != (unit, generation)
        ]

        def work() -> None:
            for unit in gone:
                self._tier.files.clear_record(unit)

        self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        """On an I/O thread. OSError when the disk fails or does not answer in time."""
        call = IoCall(work, lambda: None)
        self._tier.io.submit([call])
        end = time.monotonic() + _WAIT_S
        while not call.wait(0.25) and time.monotonic() < end and self._tier.usable and not self._tier.demoter.stopping:
            pass
        if not call.give_up():
            raise TimeoutError("the disk does not answer")
        if call.error is not None:
            raise call.error
