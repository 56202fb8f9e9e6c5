"""Keys that somebody is writing. The library never frees one whose writer died: no put succeeds under it, no get finds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvpool.stores.memcache.library import Client
from kvpool.stores.memcache.states import KeyState, key_states

LONGEST_WRITE_S = 60.0
"""No writer of kvpool copies into an object later than this after it began; it gives up instead."""
MOST_KEYS = 10_000


class HalfWritten:
    """Remembers since when this process has found keys unwritten, and where; when it finds the same room under the same key
    ``patience_s`` later, its writer is dead."""

    def __init__(self, patience_s: float = 2 * LONGEST_WRITE_S) -> None:
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, float]] = {}  # key -> address, time.monotonic() of the first sight

    def free(self, client: Client, keys: Sequence[str]) -> list[str]:
        """Of ``keys``, under which a put had no effect, those that can be put again now: a dead writer's room was given back."""
        dead = self._dead(keys, key_states(client, keys))
        if not dead:
            return []
        removed = client.remove_batch(dead)
        return [key for key, code in zip(dead, removed, strict=True) if code == 0]

    def forget(self, keys: Sequence[str]) -> None:
        """These have been seen readable: whoever wrote them was alive."""
        with self._lock:
            for key in keys if self._seen else ():
                self._seen.pop(key, None)

    def _dead(self, keys: Sequence[str], states: Sequence[KeyState]) -> list[str]:
        now = time.monotonic()
        dead = []
        with self._lock:
            for key, state in zip(keys, states, strict=True):
                start, since = self._seen.pop(key, (0, now))
                if state.code != 0 or state.readable or not state.start:  # a code: the library could not tell
                    continue
                if start == state.start and now - since > self.patience_s:
                    dead.append(key)
                else:
                    self._seen[key] = (state.start, since if start == state.start else now)
            while len(self._seen) > MOST_KEYS:
                del self._seen[next(iter(self._seen))]
        return dead
