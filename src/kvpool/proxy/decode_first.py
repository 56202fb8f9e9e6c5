"""Decode makes room and calls the metaserver; prefill then computes the prompt into it; decode answers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from kvpool.proxy.answers import Answer
from kvpool.proxy.failures import FailureError, busy
from kvpool.proxy.flows import Flow
from kvpool.proxy.legs import NOT_READY_S, Legs, Try
from kvpool.proxy.rendezvous import Pending, Rendezvous
from kvpool.proxy.table import Side

logger = logging.getLogger("kvpool.proxy")


class DecodeFirst(Flow):
    """``metaserver``: the URL that decoders call back."""

    def __init__(self, legs: Legs, rendezvous: Rendezvous, metaserver: str) -> None:
        super().__init__(legs)
        self._rendezvous, self._metaserver = rendezvous, metaserver

    async def once(self, attempt: Try) -> Answer:
        if attempt.unit.direct:
            return await self.legs.decode(attempt, None, lambda: None)
        if not self.legs.table.ready(Side.PREFILL):
            raise busy(503, f"no {Side.PREFILL} instance is ready", NOT_READY_S)
        pending = self._rendezvous.expect(attempt.transfer_id, attempt.request_id)
        attempt.stack.callback(self._rendezvous.forget, pending)
        prefill = asyncio.create_task(self._prefill(attempt, pending))
        attempt.stack.push_async_callback(stop, prefill)

        def cached() -> int | None:
            """What prefill says once it has ended; None where decode did without it."""
            return prefill.result() if prefill.done() and not prefill.cancelled() and prefill.exception() is None else None

        where = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": self._metaserver}
        params = self.legs.signed({**where, "transfer_id": attempt.transfer_id})
        decode = asyncio.create_task(self.legs.decode(attempt, params, cached))
        try:
            await asyncio.wait({decode, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefill.result()  # a failure of prefill ends decode, which would wait for its KV
            return await decode
        except BaseException:
            await stop(decode)
            raise

    async def _prefill(self, attempt: Try, pending: Pending) -> int:
        """Tokens that prefill had cached. Ends with the attempt: decode has deadlines."""
        params: dict[str, Any] = await pending.called
        into = {**params, "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": attempt.transfer_id}
        async with AsyncExitStack() as own:
            return (await self.legs.prefill(replace(attempt, stack=own), into)).cached


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel and wait; its own failure has been told, or matters no more."""
    task.cancel()
    await asyncio.wait({task})
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, FailureError):
        logger.error("a leg failed unexpectedly", exc_info=error)
