"""Puts into a full pool: the master evicts a moment after it has refused, so what had no room is offered again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvpool.stores.base import Result, Status

AGAIN_S = 2.0  # eviction begins within a second; longer waits would keep loads from the threads
_FIRST_PAUSE_S = 0.05


def with_room(count: int, until: float, attempt: Callable[[Sequence[int]], list[Result]]) -> list[Result]:
    """``attempt(rows)`` for all rows, then for those without room, until that changes nothing more or the time is over."""
    results = attempt(range(count))
    end, pause = min(until, time.monotonic() + AGAIN_S), _FIRST_PAUSE_S
    while time.monotonic() + pause < end:
        rows = [row for row, result in enumerate(results) if result.status is Status.NO_SPACE]
        if not rows:
            break
        time.sleep(pause)
        pause = min(pause * 2, 0.5)
        for row, result in zip(rows, attempt(rows), strict=True):
            results[row] = result
    return results
