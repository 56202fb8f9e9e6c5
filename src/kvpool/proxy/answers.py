"""An engine's answer on its way to the client: whole, or as a stream of frames of which the first has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvpool.proxy import sse, usage
from kvpool.proxy.options import Deadlines
from kvpool.proxy.table import Claim
from kvpool.proxy.upstream import Reply

ERROR = b'data: {"error"'  # how vLLM says in a stream that there will be none
Cached = Callable[[], int | None]


class Frames(Protocol):
    """A stream of whole frames."""

    async def next(self) -> bytes | None:
        """One frame or more; None at the end. FailureError where the stream breaks."""


@dataclass(slots=True)
class Answer:
    """``body``: all of it; or ``frames``."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    frames: Frames | None = None


class ReplyFrames:
    """The frames of one engine. ``cached``: the prompt tokens that prefill found cached, None to leave usage as it is."""

    def __init__(self, reply: Reply, claim: Claim, deadlines: Deadlines, cached: Cached) -> None:
        self._reply, self._claim, self._deadlines, self._cached = reply, claim, deadlines, cached
        self._framer = sse.Framer()
        self._first: bytes | None = None
        self._ended = False

    async def begin(self, deadline_s: float) -> None:
        """Wait for the first frame: until then the client has nothing, and another engine could serve it."""
        self._first = await self._read(deadline_s)
        if self._first is None:
            raise self._reply.failure(502, "ended its stream before it began", again=True)
        if self._first.startswith(ERROR):
            raise self._reply.failed_in_stream(self._first)

    async def next(self) -> bytes | None:
        frames, self._first = self._first, None
        if frames is None:
            frames = await self._read(self._deadlines.idle)
        if frames is None:
            return None
        self._claim.grow(sse.count(frames))
        return usage.correct_frames(frames, self._cached())

    async def _read(self, deadline_s: float) -> bytes | None:
        while not self._ended:
            chunk = await self._reply.chunk(deadline_s)
            try:
                frames = self._framer.feed(chunk) if chunk else self._framer.flush()
            except ValueError as error:
                raise self._reply.failure(502, f"sent {error}", again=False) from None
            self._ended = not chunk
            if frames:
                return frames
        return None


async def answer_of(reply: Reply, claim: Claim, stream: bool, deadlines: Deadlines, cached: Cached) -> Answer:
    """What decode answers: a stream whose first frame has come, or everything. FailureError with the engine's status and body."""
    if reply.status >= 300:
        raise await reply.refused(deadlines.idle)
    if stream and reply.streams:
        frames = ReplyFrames(reply, claim, deadlines, cached)
        await frames.begin(deadlines.first_byte)
        return Answer(reply.status, reply.headers, frames=frames)
    body = await reply.body(deadlines.request)
    return Answer(reply.status, reply.headers, usage.correct_body(body, cached()))
