"""One request of a client, from its first byte to the last of the answer: read, admitted, served, measured, logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

from starlette.types import Receive, Scope, Send

from kvpool.proxy import asks, fanout
from kvpool.proxy.admission import Admission
from kvpool.proxy.asks import Ask
from kvpool.proxy.failures import CLIENT_GONE, FailureError, busy
from kvpool.proxy.flows import Flow
from kvpool.proxy.legs import NOT_READY_S
from kvpool.proxy.logs import logger, say
from kvpool.proxy.metrics import Metrics
from kvpool.proxy.options import ProxyOptions
from kvpool.proxy.table import Side
from kvpool.proxy.writer import ClientGoneError, Writer

MAX_CLIENT_ID = 128


class Exchange:
    """The ASGI endpoint of completions and chat."""

    def __init__(self, flow: Flow, admission: Admission, options: ProxyOptions, metrics: Metrics) -> None:
        self._flow, self._admission, self._options, self._metrics = flow, admission, options, metrics
        self._open = 0  # requests whose bodies are in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, began = str(scope["path"]), time.monotonic()
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        client_id = _client_id(headers)
        ask = Ask(path, False, {}, [])
        writer = Writer(send, client_id or ask.request_id, self._options.deadlines.idle)
        self._open += 1
        try:
            self._admission.look(self._open)
            raw = await self._body(headers, receive)
            ask = asks.read(path, raw, headers, self._options.affinity)
            if client_id is None:
                writer.request_id = ask.request_id
            await self._while_connected(ask, writer, receive, began)
        except FailureError as failure:
            with suppress(ClientGoneError):
                await self._fail(writer, failure)
        except ClientGoneError:
            ask.trail["gone"] = True
        finally:
            self._open -= 1
        self._tell(ask, writer, client_id, time.monotonic() - began)

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        limit, parts, size = self._options.limits.body_bytes, [], 0
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > limit:
            raise FailureError(413, f"the body is longer than {limit} bytes")
        try:
            async with asyncio.timeout(self._options.deadlines.body):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGoneError("the client went away")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise FailureError(413, f"the body is longer than {limit} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise FailureError(408, f"the body did not come within {self._options.deadlines.body:g} s") from None

    async def _while_connected(self, ask: Ask, writer: Writer, receive: Receive, began: float) -> None:
        """Serve; a client that goes away ends it, on both engines."""
        work = asyncio.create_task(self._answer(ask, writer, began))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not writer.finished:
                ask.trail["gone"] = True
                work.cancel()
            await asyncio.wait({work})
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _answer(self, ask: Ask, writer: Writer, began: float) -> None:
        limit = self._options.deadlines.request
        try:
            async with asyncio.timeout(limit):
                for side in Side:
                    if not self._flow.legs.table.ready(side):
                        raise busy(503, f"no {side} instance is ready", NOT_READY_S)
                async with self._admission.places(ask.answers) as at_once, AsyncExitStack() as stack:
                    answer = await fanout.serve(self._flow, ask, stack, at_once)
                    self._metrics.first_byte_seconds.observe(time.monotonic() - began)
                    if answer.frames is None:
                        await writer.whole(answer.status, answer.headers, answer.body)
                        return
                    await writer.begin(answer.status, answer.headers)
                    while (frames := await answer.frames.next()) is not None:
                        await writer.frames(frames)
                    await writer.end()
        except FailureError as failure:
            await self._fail(writer, failure)
        except TimeoutError:
            await self._fail(writer, FailureError(504, f"the request took longer than {limit:g} s"))
        except ClientGoneError:
            ask.trail["gone"] = True
        except Exception:  # noqa: BLE001 - a defect must not leave the client without an answer
            logger.exception("a request failed unexpectedly")
            await self._fail(writer, FailureError(500, "the proxy failed; its log says why"))

    async def _fail(self, writer: Writer, failure: FailureError) -> None:
        if writer.status is not None:
            self._metrics.broken.inc()
        await writer.fail(failure)

    def _tell(self, ask: Ask, writer: Writer, client_id: str | None, seconds: float) -> None:
        status = CLIENT_GONE if ask.trail.get("gone") else writer.status or CLIENT_GONE
        self._metrics.requests.labels(ask.path, status).inc()
        self._metrics.request_seconds.observe(seconds)
        if "again" in ask.trail:
            self._metrics.restarts.inc()
        fields = {"id": ask.request_id, "client_id": client_id, "path": ask.path, "status": status, "stream": ask.stream}
        tokens = sum(unit.tokens for unit in ask.units)
        say("request", logging.INFO, **fields, tokens=tokens, units=len(ask.units), seconds=round(seconds, 4), **ask.trail)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _client_id(headers: Mapping[str, str]) -> str | None:
    """The client's own id, for its answer and our log only: engines get ids that nobody can choose."""
    text = headers.get("x-request-id", "")
    return text if 0 < len(text) <= MAX_CLIENT_ID and text.isprintable() and text.isascii() else None
