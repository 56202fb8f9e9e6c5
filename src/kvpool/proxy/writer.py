"""The way back to one client: headers at most once, every write with a deadline, errors in the form that still fits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Send

from kvpool.proxy import sse
from kvpool.proxy.failures import FailureError, error_body

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGoneError(Exception):
    """The client does not read any more."""


class Writer:
    """``status``: what the client was told; None while nothing has been sent."""

    def __init__(self, send: Send, request_id: str, deadline_s: float) -> None:
        self._send, self.request_id, self._deadline_s = send, request_id, deadline_s
        self.status: int | None = None
        self.finished = False

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self._start(status, {**headers, "content-length": str(len(body))})
        await self._body(body, last=True)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """A stream begins; ``frames`` and ``end`` follow."""
        await self._start(status, {**headers, **STREAM_HEADERS})

    async def frames(self, frames: bytes) -> None:
        await self._body(frames, last=False)

    async def end(self) -> None:
        await self._body(b"", last=True)

    async def fail(self, failure: FailureError) -> None:
        """Before the first byte the error with its status; in a stream a last frame with it, and no end mark; then the end."""
        if self.status is None:
            await self.whole(failure.status, failure.headers, failure.body)
        elif not self.finished:
            await self._body(sse.frame(error_body(failure.status, str(failure))), last=True)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        raw.append((b"x-request-id", self.request_id.encode("latin-1", "replace")))
        await self._write({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, body: bytes, *, last: bool) -> None:
        self.finished = last
        await self._write({"type": "http.response.body", "body": body, "more_body": not last})

    async def _write(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError(f"the client has read nothing for {self._deadline_s:g} s") from None
