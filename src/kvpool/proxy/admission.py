"""Back-pressure: so many requests at once, so many in a queue, each for so long; the rest is told to come back."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from kvpool.proxy.failures import busy


class Admission:
    """An asynchronous context: entered when there is a place, in the order of arrival."""

    def __init__(self, running: int, queued: int, wait_s: float) -> None:
        self.limit, self._room, self._wait_s = running, queued, wait_s
        self.running = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def look(self, requests: int) -> None:
        """FailureError 429 where so many, those that are still sending their bodies included, are more than fit."""
        if requests > self.limit + self._room:
            raise busy(429, f"{self.running} requests are running and {self.queued} are waiting: no more fit", self._later())

    async def __aenter__(self) -> Admission:
        """FailureError 429 where the queue is full, 503 where the wait was too long; both say when to come back."""
        if self.running < self.limit and not self._queue:
            self.running += 1
            return self
        if len(self._queue) >= self._room:
            raise busy(429, f"{self.running} requests are running and {self.queued} are waiting: no more fit", self._later())
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        entered = False
        try:
            async with asyncio.timeout(self._wait_s):
                await place
            entered = True
        except TimeoutError:
            raise busy(503, f"waited {self._wait_s:g} s for a place among {self.limit} running requests", self._later()) from None
        finally:
            if not entered:
                self._leave_queue(place)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _later(self) -> int:
        return min(30, 1 + self.queued // max(1, self.limit))

    def _leave_queue(self, place: asyncio.Future[None]) -> None:
        if place in self._queue:
            self._queue.remove(place)
        elif place.done() and not place.cancelled():
            self._give_back()  # it got a place in the very moment in which it gave up

    def _give_back(self) -> None:
        """The place goes to the first that still waits."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1
