"""Calls that find no room just now: the master evicts a moment after it has refused a put, and the buffer through which owners of a
disk read it is shared by all readers. What had no room is offered again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from kvpool.stores.base import Result, Status
from kvpool.stores.mooncake import codes

AGAIN_S = 2.0  # eviction begins within a second; longer waits would keep loads from the threads
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5

Attempt = Callable[[Sequence[int]], list[Result]]


def with_room(count: int, until: float, attempt: Attempt) -> list[Result]:
    """Puts: ``attempt(rows)`` for all rows, then for those without room, until that changes nothing more, or 2 s or the time are
    over."""
    results = attempt(range(count))
    _offer_again(results, attempt, min(until, time.monotonic() + AGAIN_S), lambda result: result.status is Status.NO_SPACE)
    return results


def through_buffer(count: int, until: float, attempt: Attempt, stop: threading.Event) -> list[Result]:
    """Gets: ``attempt(rows)`` for all rows, then for those that did not fit into the read buffer of a disk, half as many at one
    time in each round and at last one by one, until ``until`` or ``stop``."""
    results = attempt(range(count))
    _offer_again(results, attempt, until, lambda result: result.code == codes.OVERFLOW, at_once=max(1, count // 2), stop=stop)
    return results


def _offer_again(
    results: list[Result],
    attempt: Attempt,
    until: float,
    lacks_room: Callable[[Result], bool],
    *,
    at_once: int = 0,
    stop: threading.Event | None = None,
) -> None:
    """Rounds with growing pauses of random length, so that processes do not come in step. ``at_once`` of the first round; 0: all of
    them in every round."""
    stop, pause = stop or threading.Event(), _FIRST_PAUSE_S
    while rows := [row for row, result in enumerate(results) if lacks_room(result)]:
        if time.monotonic() + pause >= until or stop.wait(pause * random.uniform(0.5, 1.0)):
            return
        step = at_once or len(rows)
        for first in range(0, len(rows), step):
            if time.monotonic() >= until or stop.is_set():
                return
            part = rows[first : first + step]
            for row, result in zip(part, attempt(part), strict=True):
                results[row] = result
        pause, at_once = min(pause * 2, _LONGEST_PAUSE_S), at_once and max(1, at_once // 2)
