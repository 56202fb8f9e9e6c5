"""Whether engines answer: each is probed by a task of its own, so that a slow one delays nobody."""

from __future__ import annotations

import asyncio
import logging

from kvpool.proxy.failures import FailureError, UnreachableError
from kvpool.proxy.logs import logger, say
from kvpool.proxy.table import Instance, State, Table
from kvpool.proxy.upstream import Upstream

TICK_S = 0.2
SICK_S = 1.0  # between probes of an instance that does not answer
PROBE_S = 5.0


class Health:
    """``run`` until cancelled."""

    def __init__(self, table: Table, upstream: Upstream, interval_s: float) -> None:
        self._table, self._upstream, self._interval_s = table, upstream, interval_s
        self._watches: dict[Instance, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                try:
                    self._reconcile()
                except Exception:  # noqa: BLE001 - a defect must not end all watches
                    logger.exception("the watch over instances failed unexpectedly")
                await asyncio.sleep(TICK_S)
        finally:
            watches = list(self._watches.values())
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    def _reconcile(self) -> None:
        """A watch for every instance of the table, none for those that have left."""
        for instance in self._table.sweep():
            say("instance given up", logging.WARNING, side=instance.side, instance=str(instance.address), state=instance.state)
        there = self._table.instances()
        for instance in set(self._watches) - set(there):
            self._watches.pop(instance).cancel()
        for instance in there:
            watch = self._watches.get(instance)
            if watch is None or watch.done():
                self._watches[instance] = asyncio.create_task(self._watch(instance))

    async def _watch(self, instance: Instance) -> None:
        while True:
            try:
                ok = await self.probe(instance)
            except Exception:  # noqa: BLE001 - a defect must not end the watch
                logger.exception("a probe failed unexpectedly")
                ok = False
            if self._table.report(instance, ok):
                say("instance changed", side=instance.side, instance=str(instance.address), state=instance.state)
            well = instance.state in (State.READY, State.DRAINING)
            await asyncio.sleep(self._interval_s if well else min(SICK_S, self._interval_s))

    async def probe(self, instance: Instance) -> bool:
        """200 to /health; where there is no such path, 200 to /v1/models."""
        for path in ("/health", "/v1/models"):
            try:
                reply = await self._upstream.ask(instance, "GET", path, PROBE_S)
            except (UnreachableError, FailureError):
                return False
            status = reply.status
            try:
                await reply.body(PROBE_S)
            except FailureError:
                return False
            finally:
                reply.close()
            if status != 404:
                return status == 200
        return False
