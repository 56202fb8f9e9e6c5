"""Server-sent events, kept whole: bytes go in as they come, complete frames come out, nothing is decoded on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
MAX_FRAME = 16 << 20


class Framer:
    """Cuts a stream behind its last complete frame. A frame ends with an empty line; UTF-8 is never cut, since a frame is not."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """All frames that are complete now, as they came; b"" while there is none. ValueError for a frame beyond ``MAX_FRAME``."""
        if not self._rest and chunk.endswith(b"\n\n") and b"\r" not in chunk:
            return chunk
        self._rest += chunk
        end = self._last_end(max(0, len(self._rest) - len(chunk) - 3))
        if len(self._rest) - end > MAX_FRAME:
            raise ValueError(f"a frame of more than {MAX_FRAME} bytes")
        frames = bytes(self._rest[:end])
        del self._rest[:end]
        return frames

    def flush(self) -> bytes:
        """What is left when the stream has ended."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    def _last_end(self, start: int) -> int:
        """Behind the last empty line; ``start``: what lies before it has none."""
        if b"\r" not in self._rest:
            return self._rest.rfind(b"\n\n", start) + 2 if self._rest.find(b"\n\n", start) >= 0 else 0
        ends = [match.end() for match in _END.finditer(self._rest, start)]
        return ends[-1] if ends else 0


def split(frames: bytes) -> Iterator[bytes]:
    """The frames one by one, each with its end."""
    start = 0
    for match in _END.finditer(frames):
        yield frames[start : match.end()]
        start = match.end()
    if start < len(frames):
        yield frames[start:]


def count(frames: bytes) -> int:
    """How many frames, near enough for a load score: one is a token or so."""
    return frames.count(b"\n\n") or 1


def data(frame: bytes) -> bytes | None:
    """What a frame carries; None for comments and the like."""
    lines = [line[5:].removeprefix(b" ") for line in frame.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def frame(payload: bytes) -> bytes:
    """A frame of one line of data."""
    return b"data: " + payload + b"\n\n"


DONE = frame(b"[DONE]")
