"""Leases of this process. The library counts them per object and lets each be ended, but not one that has run out: that protects
its object for some ten seconds more. So the library is asked for longer ones, and they are ended here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvpool.stores.memcache.library import Client

SHORTEST_S = 1.0
"""A lease shorter than this is not worth one that lingers for ten seconds: the objects are only looked at."""
LONGEST_S = 3600.0
MARGIN_S = 15.0


class Leases:
    """``take`` and ``give`` are a pair; what is not given back in time is ended by the next ``take`` or put, or runs out in the
    library."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._held: dict[int, tuple[list[str], float]] = {}  # token -> keys, time.monotonic() of the end

    def take(self, client: Client, keys: Sequence[str], seconds: float) -> tuple[int, list[int]]:
        """A token, and the library's code for each key: 0 where it is protected now."""
        self.end_overdue(client)
        seconds = min(max(seconds, 0.0), LONGEST_S)
        until = time.monotonic() + seconds
        codes = client.batch_add_lease(keys, int((seconds + MARGIN_S) * 1000))
        mine = [key for key, code in zip(keys, codes, strict=True) if code == 0]
        with self._lock:
            token, self._next = self._next, self._next + 1
            if mine:
                self._held[token] = (mine, until)
        return token, codes

    def give(self, client: Client, token: int) -> None:
        """Idempotent."""
        with self._lock:
            keys, _ = self._held.pop(token, ([], 0.0))
        if keys:
            client.batch_remove_lease(keys)

    def count(self) -> int:
        now = time.monotonic()
        with self._lock:
            return sum(1 for _, until in self._held.values() if until >= now)

    def end_overdue(self, client: Client) -> None:
        """End those whose time is over; cheap where there are none."""
        now = time.monotonic()
        with self._lock:
            tokens = [token for token, (_, until) in self._held.items() if until < now]
        for token in tokens:
            self.give(client, token)
