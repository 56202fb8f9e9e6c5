"""Leases of this process. The library does not count them, so that ending one would end the others on the same object; and one that
has run out protects its object until it is ended all the same."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvpool.stores.memcache.library import Client

LONGEST_S = 3600.0


class Leases:
    """``take`` and ``give`` are a pair; what is not given back in time is ended by a later ``take``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._held: dict[int, tuple[list[str], float]] = {}  # token -> keys, time.monotonic() of the end
        self._users: Counter[str] = Counter()

    def take(self, client: Client, keys: Sequence[str], seconds: float) -> tuple[int, list[int]]:
        """A token, and the library's code for each key: 0 where it is protected now."""
        with self._lock:
            ended = self._end_overdue()
        if ended:
            client.batch_remove_lease(ended)
        seconds = max(0.001, min(seconds, LONGEST_S))
        until = time.monotonic() + seconds
        codes = client.batch_add_lease(keys, max(1, int(seconds * 1000)))
        mine = [key for key, code in zip(keys, codes, strict=True) if code == 0]
        with self._lock:
            token, self._next = self._next, self._next + 1
            self._held[token] = (mine, until)
            self._users.update(set(mine))
        return token, codes

    def give(self, client: Client, token: int) -> None:
        """Idempotent."""
        with self._lock:
            keys, _ = self._held.pop(token, ([], 0.0))
            last = self._drop(keys)
        if last:
            client.batch_remove_lease(last)

    def count(self) -> int:
        now = time.monotonic()
        with self._lock:
            return sum(1 for _, until in self._held.values() if until >= now)

    def _end_overdue(self) -> list[str]:
        now = time.monotonic()
        tokens = [token for token, (_, until) in self._held.items() if until < now]
        return [key for token in tokens for key in self._drop(self._held.pop(token)[0])]

    def _drop(self, keys: Sequence[str]) -> list[str]:
        """The keys that nobody of this process leases any more."""
        last = []
        for key in set(keys):
            self._users[key] -= 1
            if self._users[key] <= 0:
                del self._users[key]
                last.append(key)
        return last
