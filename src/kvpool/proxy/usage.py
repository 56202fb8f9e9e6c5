"""Usage as one server would report it: cached prompt tokens are those that prefill found cached, not those that decode fetched."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpool.proxy import sse

DETAILS, CACHED = "prompt_tokens_details", "cached_tokens"


def cached_tokens(answer: object) -> int | None:
    """Of an answer's usage; None where it does not say."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get(DETAILS) if isinstance(usage, dict) else None
    value = details.get(CACHED) if isinstance(details, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def correct(answer: dict[str, Any], cached: int) -> bool:
    """Put ``cached`` into the usage of an answer or chunk where it tells cached tokens; whether that changed anything."""
    if cached_tokens(answer) in (None, cached):
        return False
    answer["usage"][DETAILS][CACHED] = cached
    return True


def correct_body(body: bytes, cached: int | None) -> bytes:
    """A whole answer: its usage, and without what engines tell proxies. Byte for byte the same where there is nothing to change."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    if not isinstance(answer, dict):
        return body
    changed = cached is not None and correct(answer, cached)
    for name in ("kv_transfer_params", "ec_transfer_params"):
        changed |= answer.get(name) is not None
        if changed:
            answer.pop(name, None)
    return msgspec.json.encode(answer) if changed else body


def correct_frames(frames: bytes, cached: int | None) -> bytes:
    """Frames of a stream; those without usage stay as they are, byte for byte."""
    if cached is None or b'"usage"' not in frames:
        return frames
    return b"".join(_correct_frame(frame, cached) for frame in sse.split(frames))


def _correct_frame(frame: bytes, cached: int) -> bytes:
    payload = sse.data(frame) if b'"usage"' in frame else None
    if payload is None:
        return frame
    try:
        chunk = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return frame
    return sse.frame(msgspec.json.encode(chunk)) if isinstance(chunk, dict) and correct(chunk, cached) else frame
