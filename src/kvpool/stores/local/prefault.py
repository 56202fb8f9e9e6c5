"""Maps the arena into this process ahead of the copies, in the background: a first touch costs ten times a copy."""

from __future__ import annotations

import logging
import os
import queue
import threading
from contextlib import suppress

from kvpool.stores.local.arena import Arena
from kvpool.stores.local.slabs import Slab

logger = logging.getLogger(__name__)

_SLICE = 16 << 20
_AHEAD = 256 << 20


class Prefaulter:
    """Works only after ``start``: a process that just looks keys up needs no mapping."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._work: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._seen: set[int] = set()
        self._top = 0
        self._stop = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, slabs: list[Slab]) -> None:
        """Begin with the slabs that are there."""
        with self._lock:
            if self._thread is not None or self._stop:
                return
            self._thread = threading.Thread(target=self._run, name="kvpool-prefault", daemon=True)
        for slab in slabs:
            self.add_slab(slab)
        self._work.put((0, 0))
        self._thread.start()

    def add_slab(self, slab: Slab) -> None:
        """A slab that has its memory."""
        self._work.put((slab.chunk, slab.chunks))

    def close(self) -> None:
        self._stop = True
        self._work.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (work := self._work.get()) is not None:
            try:
                if not (self._populate(*work) and self._go_ahead()):
                    return
            except (OSError, ValueError):
                logger.warning("the arena is not prefaulted any further", exc_info=True)
                return

    def _go_ahead(self) -> bool:
        """Get memory for the next slabs before they are needed. Chunks are used in order of place."""
        geometry = self._arena.geometry
        end = min(geometry.chunks, self._top + max(1, _AHEAD // geometry.chunk_bytes))
        for chunk in range(self._top, end):
            if chunk not in self._seen and (
                self._arena.ensure(chunk, 1, quiet=True) < 1 or not self._populate(chunk, 1, ahead=True)
            ):
                return not self._stop
        return True

    def _populate(self, first: int, count: int, *, ahead: bool = False) -> bool:
        """False when this kernel cannot, or when it is time to stop."""
        size = self._arena.geometry.chunk_bytes
        if not ahead:
            self._top = max(self._top, first + count)
        for chunk in range(first, first + count):
            if chunk in self._seen:
                continue
            self._seen.add(chunk)
            for offset in range(0, size, _SLICE):
                if self._stop or not self._arena.populate(chunk * size + offset, min(_SLICE, size - offset)):
                    return False
        return True
