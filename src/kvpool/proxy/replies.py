"""Small JSON answers of the proxy itself."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvpool.proxy.failures import FailureError


def json_reply(content: object, status: int = 200) -> Response:
    return Response(json.dumps(content, ensure_ascii=False).encode(), status, media_type="application/json")


def failure_reply(failure: FailureError) -> Response:
    return Response(failure.body, failure.status, failure.headers)


async def read_json(request: Request, limit: int) -> tuple[bytes, dict[str, Any]]:
    """The body of a request, raw and read. FailureError 413, 400."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise FailureError(413, f"the body is longer than {limit} bytes")
        parts.append(part)
    raw = b"".join(parts)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise FailureError(400, "the body is no JSON object")
    return raw, body
