"""Back-pressure: so many requests and so many answers at once, so many requests in a queue, each for so long; the rest is told to
come back.

A request takes the places of all its answers at once, or waits in the order of arrival: so requests never wait for each other while
they hold places. One with more answers than there are places takes all of them, and serves so many at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvpool.proxy.failures import FailureError, busy


class Admission:
    """``running`` requests with ``answers`` answers together; ``queued`` more requests wait, each for ``wait_s`` at most."""

    def __init__(self, running: int, answers: int, queued: int, wait_s: float) -> None:
        self.limit, self.most, self._room, self._wait_s = running, answers, queued, wait_s
        self.running = 0
        self.answers = 0
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def look(self, requests: int) -> None:
        """FailureError 429 where so many, those that are still sending their bodies included, are more than fit."""
        if requests > self.limit + self._room:
            raise self._full()

    @asynccontextmanager
    async def places(self, answers: int) -> AsyncIterator[int]:
        """How many of the answers may be served at a time. FailureError 429 where the queue is full, 503 where the wait was too
        long; both say when to come back."""
        taken = min(answers, self.most)
        await self._enter(taken)
        try:
            yield taken
        finally:
            self._leave(taken)

    async def _enter(self, answers: int) -> None:
        if not self._queue and self._fits(answers):
            self._take(answers)
            return
        if len(self._queue) >= self._room:
            raise self._full()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((place, answers))
        entered = False
        try:
            async with asyncio.timeout(self._wait_s):
                await place
            entered = True
        except TimeoutError:
            raise busy(
                503,
                f"waited {self._wait_s:g} s for room for {answers} answers among {self.limit} requests and {self.most} answers",
                self._later(),
            ) from None
        finally:
            if not entered:
                self._leave_queue(place, answers)

    def _full(self) -> FailureError:
        return busy(
            429,
            f"{self.running} requests with {self.answers} answers are running and {self.queued} are waiting: no more fit",
            self._later(),
        )

    def _later(self) -> int:
        return min(30, 1 + self.queued // max(1, self.limit))

    def _fits(self, answers: int) -> bool:
        return self.running < self.limit and self.answers + answers <= self.most

    def _take(self, answers: int) -> None:
        self.running += 1
        self.answers += answers

    def _leave(self, answers: int) -> None:
        self.running -= 1
        self.answers -= answers
        self._admit()

    def _leave_queue(self, place: asyncio.Future[None], answers: int) -> None:
        if (place, answers) in self._queue:
            self._queue.remove((place, answers))
            self._admit()  # it may have kept smaller ones waiting
        elif place.done() and not place.cancelled():
            self._leave(answers)  # it got its places in the very moment in which it gave up

    def _admit(self) -> None:
        """Those that wait, in order, as far as they fit."""
        while self._queue and (self._queue[0][0].done() or self._fits(self._queue[0][1])):
            place, answers = self._queue.popleft()
            if not place.done():
                self._take(answers)
                place.set_result(None)
