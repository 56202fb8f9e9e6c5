"""Clearing the records of slots that hold nothing any more, so that no later scan takes them for objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvpool.stores.local.disk.iopool import IoCall
from kvpool.stores.local.disk.record import unpack
from kvpool.stores.local.records import Records

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier

_WAIT_S = 10.0
_SLICE = 1000  # records in one call: none takes long


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
        """A demoter that was killed may have left records in slots that are free by now, or will be."""
        files = self._tier.files
        free = self._tier.books.look(_empty_units, long=True)
        for start in range(0, len(free), _SLICE):

            def work(over: Callable[[], bool], units: Sequence[int] = free[start : start + _SLICE]) -> None:
                for unit in units:
                    if over():
                        return
                    record = unpack(files.read_record(unit))
                    if record is not None:
                        self.add([(record.key, unit, record.generation)])

            self._do(work)

    def run(self) -> None:
        """Clear what is pending and gone indeed. Nothing is reserved meanwhile."""
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        gone: list[int] = []
        left = list(pending)
        try:
            gone, left = self._tier.books.look(lambda records: _sort_out(records, pending))
            while gone:
                part, gone = gone[:_SLICE], gone[_SLICE:]
                try:
                    self._clear(part)
                except TimeoutError:
                    gone = [*part, *gone]
                    raise
        finally:  # for another time; not what the disk refused: that one record must not keep it off
            with self._lock:
                self._pending = {**{unit: pending[unit] for unit in [*left, *gone]}, **self._pending}

    def _clear(self, units: Sequence[int]) -> None:
        def work(over: Callable[[], bool]) -> None:
            for unit in units:
                if over():
                    return
                self._tier.files.clear_record(unit)

        self._do(work)

    def _do(self, work: Callable[[Callable[[], bool]], None]) -> None:
        """On an I/O thread; ``work`` is told when nobody waits for it any more: by then the slots may be used again. OSError when
        the disk fails or does not answer in time."""
        over = threading.Event()
        call = IoCall(lambda: work(over.is_set), lambda: None)
        self._tier.io.submit([call])
        end = time.monotonic() + _WAIT_S
        while not call.wait(0.25) and time.monotonic() < end and self._tier.usable and not self._tier.demoter.stopping:
            pass
        if not call.give_up():
            over.set()
            raise TimeoutError("the disk does not answer")
        if call.error is not None:
            raise call.error


def _empty_units(records: Records) -> list[int]:
    """Used once, and without an object now."""
    classes = {slab.slot_bytes for slab in records.slabs.all()}
    free = [unit for slot_bytes in classes for unit in records.free_slots(slot_bytes, 1 << 40)]
    return [*free, *(unit for unit, _ in records.limbo()), *(unit for unit, _ in records.reservations())]


def _sort_out(records: Records, pending: Iterable[int]) -> tuple[list[int], list[int]]:
    """Units that hold nothing, and those that are not settled: an eviction is taken back where somebody proves to read the object.
    What holds an object, be it another one, has its record by right."""
    gone, later = [], []
    for unit in pending:
        if records.in_limbo(unit) or records.reservation(unit) is not None:
            later.append(unit)
        elif records.key_of(unit) is None:
            gone.append(unit)
    return gone, later
