"""This client's leases and pins: one int64 per unit in its client file.

A value is the CLOCK_MONOTONIC time in ns until which the slot may not be reused, FOREVER while it is pinned, 0 or past when it is
free. Only this client writes the array; every evictor reads it. Inside the process each unit keeps all its holds, so that the end
of one does not end another."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.local.arena import allocate
from kvpool.stores.local.geometry import Geometry

logger = logging.getLogger(__name__)

FOREVER = int(np.iinfo(np.int64).max)
UPKEEP = FOREVER - 1  # like FOREVER, but by the store itself: counts as nobody's lease or pin
_PAGE = 4096


class Leases:
    """Thread-safe. ``fd`` is a descriptor of the client file (not the one that holds its lock), closed by ``close``."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self._fd = fd
        self._nbytes = geometry.units * 8
        self._map = mmap.mmap(fd, self._nbytes)
        self._stamps: NDArray[np.int64] = np.frombuffer(self._map, dtype=np.int64)
        self._has_memory: set[int] = set()
        self._holds: dict[int, list[int]] = {}
        self._purge_at = 4096
        self.drops = 0  # slots let go of altogether
        self._lock = threading.Lock()

    def hold(self, units: Iterable[int], until: int) -> None:
        """Hold slots until then. OSError ENOSPC when the array can get no memory; nothing is held then.

        The caller must fence, and look into the index again, before it trusts what lies in the slots.
        """
        wanted = list(units)
        with self._lock:
            for page in {unit * 8 // _PAGE for unit in wanted} - self._has_memory:
                allocate(self._fd, page * _PAGE, min(_PAGE, self._nbytes - page * _PAGE))
                self._has_memory.add(page)
            holds, stamps = self._holds, self._stamps
            for unit in wanted:
                held = holds.get(unit)
                if held is None:
                    holds[unit] = [until]
                    stamps[unit] = until
                else:
                    held.append(until)
                    stamps[unit] = max(held)
            if len(holds) > self._purge_at:
                self._purge()

    def drop(self, units: Iterable[int], until: int) -> None:
        """End one hold with this end on each unit. Holds that have run out may be gone already."""
        with self._lock:
            holds, stamps = self._holds, self._stamps
            for unit in units:
                held = holds.get(unit)
                if held is None or until not in held:
                    continue
                held.remove(until)
                if held:
                    stamps[unit] = max(held)
                else:
                    stamps[unit] = 0
                    del holds[unit]
                    self.drops += 1

    def _purge(self) -> None:
        """Forget the holds that have run out and that nobody released."""
        now = time.monotonic_ns()
        for unit in [unit for unit, held in self._holds.items() if max(held) < now]:
            del self._holds[unit]
            self._stamps[unit] = 0
        self._purge_at = max(4096, 2 * len(self._holds))

    def held(self) -> tuple[int, int]:
        """Slots this client leases and slots it pins, now."""
        now = time.monotonic_ns()
        with self._lock:
            ends = [max(held) for held in self._holds.values()]
        pinned = sum(end == FOREVER for end in ends)
        return sum(end > now for end in ends) - pinned, pinned

    def close(self) -> None:
        with self._lock:
            self._stamps = np.zeros(0, dtype=np.int64)
            self._holds.clear()
        try:
            self._map.close()
        except BufferError:
            logger.warning("the lease array stays mapped: somebody still holds a view of it")
        os.close(self._fd)
