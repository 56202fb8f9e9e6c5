"""What any decode engine can answer is passed to one of them as it came: models, version, tokenizing."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.proxy import asks
from kvpool.proxy.admission import Admission
from kvpool.proxy.failures import CLIENT_GONE, FailureError, UnreachableError, busy
from kvpool.proxy.legs import NOT_READY_S
from kvpool.proxy.options import ProxyOptions
from kvpool.proxy.replies import failure_reply, read_json
from kvpool.proxy.table import Side, Table
from kvpool.proxy.upstream import Upstream

LOOKED_UP, LOOK_UP_S = ("/v1/models", "/version"), 10.0
TOKENIZED, TOKENIZE_S = ("/tokenize", "/detokenize"), 60.0


class Passing:
    """The least loaded engine is asked, the next one where it does not answer, all within one deadline."""

    def __init__(self, table: Table, upstream: Upstream, admission: Admission, options: ProxyOptions) -> None:
        self._table, self._upstream, self._admission, self._options = table, upstream, admission, options
        self._open = 0  # requests whose bodies are in memory

    def routes(self) -> list[Route]:
        looked_up = [Route(path, self._look_up, methods=["GET"]) for path in LOOKED_UP]
        return looked_up + [Route(path, self._tokenize, methods=["POST"]) for path in TOKENIZED]

    async def _look_up(self, request: Request) -> Response:
        try:
            return await self._pass(request, b"", LOOK_UP_S)
        except FailureError as failure:
            return failure_reply(failure)

    async def _tokenize(self, request: Request) -> Response:
        """One of the requests that are served at once."""
        self._open += 1
        try:
            self._admission.look(self._open)
            raw = await self._body(request)
            async with self._admission.places(1):
                return await self._pass(request, raw, TOKENIZE_S)
        except FailureError as failure:
            return failure_reply(failure)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        finally:
            self._open -= 1

    async def _body(self, request: Request) -> bytes:
        limit = self._options.deadlines.body
        try:
            async with asyncio.timeout(limit):
                raw, _ = await read_json(request, self._options.limits.body_bytes)
        except TimeoutError:
            raise FailureError(408, f"the body did not come within {limit:g} s") from None
        return raw

    async def _pass(self, request: Request, raw: bytes, limit_s: float) -> Response:
        headers = {name: request.headers[name] for name in asks.FORWARDED if name in request.headers}
        if self._options.api_key is not None:
            headers.setdefault("authorization", f"Bearer {self._options.api_key}")
        method = "POST" if raw else "GET"
        failure, end = busy(503, f"no {Side.DECODE} instance is ready", NOT_READY_S), time.monotonic() + limit_s
        for instance in sorted(self._table.ready(Side.DECODE), key=lambda one: (one.score, one.requests)):
            if (left := end - time.monotonic()) <= 0:
                break
            try:
                reply = await self._upstream.ask(instance, method, request.url.path, left, raw, headers)
                try:
                    return Response(await reply.body(max(end - time.monotonic(), 0.001)), reply.status, reply.headers)
                finally:
                    reply.close()
            except UnreachableError as error:
                failure = FailureError(502, str(error))
            except FailureError as error:
                failure = error
        raise failure
