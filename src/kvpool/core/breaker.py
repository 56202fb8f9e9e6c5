"""A circuit breaker: a sick store is bypassed and probed until it is well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum


class BreakerState(IntEnum):
    """The numbers are what the metric shows."""

    CLOSED = 0  # all is well
    HALF_OPEN = 1  # one call is let through to see
    OPEN = 2  # nothing is let through


class Breaker:
    """Opens after ``failures`` failures in a row; after ``cooldown_s`` lets one call through, which closes or reopens it.

    Thread-safe. ``clock`` is monotonic seconds.
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._cooldown = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = 0
        self._opened_at: float | None = None
        self._probe_since: float | None = None
        self.opened = 0  # how often it has opened

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._opened_at is None:
                return BreakerState.CLOSED
            return BreakerState.HALF_OPEN if self._probe_since is not None else BreakerState.OPEN

    def allow(self) -> bool:
        """Whether a call may be made now; a call that was allowed must end in ``success`` or ``failure``."""
        with self._lock:
            if self._opened_at is None:
                return True
            now = self._clock()
            # A probe that never came back must not keep the breaker half open for ever.
            started = self._probe_since if self._probe_since is not None else self._opened_at
            if now - started < self._cooldown:
                return False
            self._probe_since = now
            return True

    def success(self) -> None:
        with self._lock:
            self._failed, self._opened_at, self._probe_since = 0, None, None

    def failure(self) -> None:
        with self._lock:
            self._failed += 1
            if self._opened_at is not None or self._failed >= self._limit:
                self.opened += self._opened_at is None
                self._opened_at, self._probe_since = self._clock(), None
