"""Keys that somebody is writing. The library never frees one whose writer died: no put succeeds under it, no get finds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvpool.stores.memcache.codes import BEING_WRITTEN
from kvpool.stores.memcache.library import Client

LONGEST_WRITE_S = 60.0
"""No writer of kvpool copies into an object later than this after it began; it gives up instead."""
MOST_KEYS = 10_000


class HalfWritten:
    """Remembers since when this process has found keys unwritten; ``patience_s`` after that their writer is taken for dead."""

    def __init__(self, patience_s: float = 2 * LONGEST_WRITE_S) -> None:
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}

    def free(self, client: Client, keys: Sequence[str]) -> list[str]:
        """Of ``keys``, under which a put had no effect, those that can be put again now: their dead writer's room was given back."""
        codes = client.batch_add_lease(keys)
        leased = [key for key, code in zip(keys, codes, strict=True) if code == 0]
        if leased:
            client.batch_remove_lease(leased)
        blocked = [key for key, code in zip(keys, codes, strict=True) if code == BEING_WRITTEN]
        self._forget([key for key in keys if key not in blocked])
        dead = self._overdue(blocked)
        if not dead:
            return []
        removed = client.remove_batch(dead)
        return [key for key, code in zip(dead, removed, strict=True) if code == 0]

    def _overdue(self, keys: Sequence[str]) -> list[str]:
        now = time.monotonic()
        with self._lock:
            while len(self._since) + len(keys) > MOST_KEYS and self._since:
                del self._since[next(iter(self._since))]
            dead = [key for key in keys if now - self._since.setdefault(key, now) > self.patience_s]
            for key in dead:
                del self._since[key]
        return dead

    def _forget(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._since.pop(key, None)
