"""The parts of a proxy put together: `Proxy.open` inside a running loop, then its two applications can be served."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.proxy import asks
from kvpool.proxy.addresses import Address
from kvpool.proxy.admin import Admin
from kvpool.proxy.admission import Admission
from kvpool.proxy.decode_first import DecodeFirst
from kvpool.proxy.exchange import Exchange
from kvpool.proxy.failures import FailureError
from kvpool.proxy.flows import Flow
from kvpool.proxy.health import Health
from kvpool.proxy.legs import Legs
from kvpool.proxy.metaserver import PATH, metaserver
from kvpool.proxy.metrics import Metrics
from kvpool.proxy.options import DECODE_FIRST, ProxyOptions
from kvpool.proxy.passing import Passing
from kvpool.proxy.prefill_first import PrefillFirst
from kvpool.proxy.releases import Releases
from kvpool.proxy.rendezvous import Rendezvous
from kvpool.proxy.replies import failure_reply, json_reply
from kvpool.proxy.table import Side, Table
from kvpool.proxy.upstream import Upstream


class Proxy:
    """``metaserver_port``: where the metaserver listens, in decode-first mode."""

    def __init__(self, options: ProxyOptions, metaserver_port: int = 0) -> None:
        self.options, self.table, self.metrics = options, Table(), Metrics()
        for side, addresses in ((Side.PREFILL, options.prefillers), (Side.DECODE, options.decoders)):
            for address in addresses:
                self.table.add(side, address)
        self.admission = Admission(options.limits.running, options.limits.answers, options.limits.queued, options.limits.queue_s)
        self.metrics.observe(self.table, self.admission)
        self.rendezvous = Rendezvous()
        self._releases = Releases(options.secret, self.metrics)
        self._upstream = Upstream(options.deadlines, options.limits)
        self._metaserver_url = f"{Address(options.metaserver_host, metaserver_port).url}{PATH}"
        self._health: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._upstream.open()
        self._health = asyncio.create_task(Health(self.table, self._upstream, self.options.health_s).run())

    async def close(self) -> None:
        if self._health is not None:
            self._health.cancel()
            await asyncio.wait({self._health})
        await self._releases.close()
        await self._upstream.close()

    def app(self) -> Starlette:
        """What clients talk to."""
        exchange = Exchange(self._flow(), self.admission, self.options, self.metrics)
        return Starlette(
            routes=[
                Route(asks.COMPLETIONS, exchange, methods=["POST"]),
                Route(asks.CHAT, exchange, methods=["POST"]),
                Route("/health", self._healthy, methods=["GET"]),
                Route("/healthcheck", self._healthy, methods=["GET"]),
                Route("/ping", self._healthy, methods=["GET"]),
                Route("/metrics", self._metrics_text, methods=["GET"]),
                *Passing(self.table, self._upstream, self.admission, self.options).routes(),
                *Admin(self.table, self._upstream, self.options).routes(),
            ],
            exception_handlers={404: _unknown, 405: _unknown},
        )

    def metaserver(self) -> Starlette:
        """What decode engines call."""
        return metaserver(self.rendezvous, self.options.secret)

    def _flow(self) -> Flow:
        legs = Legs(self.table, self._upstream, self.options, self.metrics, self._releases)
        if self.options.mode == DECODE_FIRST:
            return DecodeFirst(legs, self.rendezvous, self._metaserver_url)
        return PrefillFirst(legs)

    async def _healthy(self, request: Request) -> Response:
        """200 where requests can be served; 503 before, so that a balancer waits."""
        ready = {side: len(self.table.ready(side)) for side in Side}
        counts = {f"{side}_instances": count for side, count in ready.items()}
        well = all(ready.values())
        return json_reply({"status": "ok" if well else "waiting for engines", **counts}, 200 if well else 503)

    async def _metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return failure_reply(FailureError(status, f"{request.method} {request.url.path} is not served here"))
