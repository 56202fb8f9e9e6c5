"""The HTTP client towards the engines: one pool of connections, a deadline on every wait, errors told apart by what was sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import aiohttp
import msgspec

from kvpool.proxy import sse
from kvpool.proxy.failures import FailureError, UnreachableError
from kvpool.proxy.options import Deadlines, Limits
from kvpool.proxy.table import Instance

# Shorter than the 5 s after which vLLM closes an idle connection: a request is not sent into one that is just being closed.
KEEP_ALIVE_S = 2.0
STALE_S = 0.05
NOT_PASSED = {
    "connection",
    "content-encoding",
    "content-length",
    "date",
    "keep-alive",
    "server",
    "set-cookie",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
}
WORTH_ANOTHER = (500, 502, 503, 504)


class Reply:
    """An open answer of an engine. Close it, or read it to its end."""

    def __init__(self, response: aiohttp.ClientResponse, instance: Instance, limit: int) -> None:
        self._response, self._limit = response, limit
        self.instance = instance
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items() if name.lower() not in NOT_PASSED}

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def body(self, deadline_s: float) -> bytes:
        """The whole answer. FailureError 502 where it breaks off, 504 where it takes too long."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(deadline_s):
                while part := await self._response.content.readany():
                    size += len(part)
                    if size > self._limit:
                        raise self.failure(502, f"answered more than {self._limit} bytes", again=False)
                    parts.append(part)
        except (aiohttp.ClientError, OSError) as error:
            raise _timed_out(self, deadline_s) if isinstance(error, TimeoutError) else self.broken(error) from None
        return b"".join(parts)

    async def chunk(self, deadline_s: float) -> bytes:
        """What has come since; b"" at the end. FailureError as with ``body``."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _timed_out(self, deadline_s) if isinstance(error, TimeoutError) else self.broken(error) from None

    async def refused(self, deadline_s: float) -> FailureError:
        """The engine's own error, status and body, for the client; 502 for a status that is no error, as a redirection."""
        if self.status < 400:
            return self.failure(502, f"answered {self.status}", again=False)
        body = await self.body(deadline_s)
        again = (self.instance.side, self.instance.address) if self.status in WORTH_ANOTHER else None
        return FailureError(self.status, f"{self._name} answered {self.status}", body=body, headers=self.headers, again=again)

    def failed_in_stream(self, frames: bytes) -> FailureError:
        """An error that came as the first frame, as the answer that it would have been without a stream."""
        payload = sse.data(next(sse.split(frames))) or b""
        try:
            code = msgspec.json.decode(payload)["error"]["code"]
        except (msgspec.DecodeError, KeyError, TypeError):
            code = None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        again = (self.instance.side, self.instance.address) if status in WORTH_ANOTHER else None
        headers = {"content-type": "application/json"}
        return FailureError(status, f"{self._name} failed in its stream", body=payload, headers=headers, again=again)

    def broken(self, error: Exception) -> FailureError:
        return self.failure(502, f"broke off: {type(error).__name__}", again=True)

    def failure(self, status: int, text: str, *, again: bool) -> FailureError:
        return FailureError(status, f"{self._name} {text}", again=(self.instance.side, self.instance.address) if again else None)

    def close(self) -> None:
        """Ends the connection of an answer that was not read to its end, which tells the engine to stop."""
        self._response.close()

    @property
    def _name(self) -> str:
        return f"{self.instance.side} instance {self.instance.address}"


def _timed_out(reply: Reply, deadline_s: float) -> FailureError:
    return reply.failure(504, f"sent nothing for {deadline_s:g} s", again=False)


class Upstream:
    """``open`` and ``close`` are a pair, inside the loop."""

    def __init__(self, deadlines: Deadlines, limits: Limits) -> None:
        self._deadlines, self._limits = deadlines, limits
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._deadlines.connect, connect=self._deadlines.connect),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=65536,
            max_field_size=65536,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, instance: Instance, path: str, body: object, headers: Mapping[str, str], deadline_s: float) -> Reply:
        """Send JSON; the status and the headers of the answer have come.

        UnreachableError where nothing was sent, or only into a connection that was just being closed; FailureError 502 or 504 where
        it was sent."""
        try:
            data = msgspec.json.encode(body)
        except (OverflowError, ValueError, RecursionError) as error:
            raise FailureError(400, f"the body cannot be passed on: {error}") from None
        return await self.ask(instance, "POST", path, deadline_s, data, headers)

    async def ask(
        self,
        instance: Instance,
        method: str,
        path: str,
        deadline_s: float,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Any request, as ``post``."""
        assert self._session is not None, "not open"
        sent = {"accept-encoding": "identity", **(headers or {})} | ({"content-type": "application/json"} if data else {})
        name, began = f"{instance.side} instance {instance.address}", time.monotonic()
        again = (instance.side, instance.address)
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._session.request(
                    method, instance.address.url + path, data=data or None, headers=sent, allow_redirects=False
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UnreachableError(f"{name}: {error}") from None
        except TimeoutError:
            raise FailureError(504, f"{name} did not answer within {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            if time.monotonic() - began < STALE_S:
                raise UnreachableError(f"{name} closed the connection") from None
            raise FailureError(502, f"{name} broke off: {type(error).__name__}", again=again) from None
        return Reply(response, instance, self._limits.answer_bytes)
