"""Keeps a message that may come thousands of times a second from filling the log: the first of a kind is told, then one in a while
with the number of those that were not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECONDS = 10.0


class LogGate:
    """Thread-safe. Kinds are few and fixed."""

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}

    def ask(self, kind: str) -> str | None:
        """None: keep quiet. Else what to append to the message: how many like it were not told since the last, if any."""
        now = self._clock()
        with self._lock:
            told, quiet = self._kinds.get(kind, (float("-inf"), 0))
            if now - told < self._seconds:
                self._kinds[kind] = (told, quiet + 1)
                return None
            self._kinds[kind] = (now, 0)
        return f" (and {quiet} like it since the last such line)" if quiet else ""
