"""Requests with several prompts or samples: every unit is served by itself, and the client gets one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from kvpool.proxy.answers import Answer
from kvpool.proxy.asks import Ask, Unit
from kvpool.proxy.failures import FailureError
from kvpool.proxy.flows import Flow
from kvpool.proxy.merge import StreamMerger, merge_bodies

QUEUE = 64  # frames that wait for the client; beyond, the engines wait


async def serve(flow: Flow, ask: Ask, stack: AsyncExitStack, at_once: int) -> Answer:
    """The answer to a request, ``at_once`` of whose units are served at a time; ``stack`` gives back what it holds. FailureError
    where one unit fails before the first byte."""
    if len(ask.units) == 1:
        return await flow.serve(ask, ask.units[0], stack)
    if ask.stream:
        frames = MergedFrames(flow, ask, at_once)
        stack.push_async_callback(frames.stop)
        await frames.begin()
        return Answer(200, {"content-type": "text/event-stream; charset=utf-8"}, frames=frames)
    places = asyncio.Semaphore(at_once)
    tasks = [asyncio.create_task(_whole(flow, ask, unit, places)) for unit in ask.units]
    try:
        answers = await asyncio.gather(*tasks)
        return Answer(200, answers[0].headers, merge_bodies(ask, [answer.body for answer in answers]))
    except ValueError as error:
        raise FailureError(502, f"a decode instance answered what is no completion: {error}") from None
    finally:
        await stop_all(tasks)


async def _whole(flow: Flow, ask: Ask, unit: Unit, places: asyncio.Semaphore) -> Answer:
    """One answer that is no stream. It gives back what it holds before another unit takes its place."""
    async with places, AsyncExitStack() as own:
        return await flow.serve(ask, unit, own)


class MergedFrames:
    """The frames of all units in the order in which they come."""

    def __init__(self, flow: Flow, ask: Ask, at_once: int) -> None:
        self._flow, self._ask, self._merger = flow, ask, StreamMerger(ask)
        self._places = asyncio.Semaphore(at_once)
        self._queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(QUEUE)
        self._tasks = [asyncio.create_task(self._pump(number, unit)) for number, unit in enumerate(ask.units)]
        self._running = len(self._tasks)
        self._first: bytes | None = None

    async def begin(self) -> None:
        self._first = await self.next()

    async def next(self) -> bytes | None:
        if self._first is not None:
            frames, self._first = self._first, None
            return frames
        while self._running:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                return item
            self._running -= 1
            if not self._running:
                return self._merger.end()
        return None

    async def stop(self) -> None:
        await stop_all(self._tasks)

    async def _pump(self, number: int, unit: Unit) -> None:
        """Ends with None, or with what has gone wrong."""
        try:
            async with self._places, AsyncExitStack() as own:
                answer = await self._flow.serve(self._ask, unit, own)
                if answer.frames is None:
                    raise FailureError(502, "a decode instance answered without a stream")
                while (frames := await answer.frames.next()) is not None:
                    if rewritten := self._merger.rewrite(number, frames):
                        await self._queue.put(rewritten)
        except Exception as error:  # noqa: BLE001 - whatever it was, the reader of the queue raises it
            await self._queue.put(error)
        else:
            await self._queue.put(None)


async def stop_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait for all."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
