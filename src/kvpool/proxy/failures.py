"""How a request can fail, and what the client then gets: the upstream's own answer, or an error in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvpool.proxy.addresses import Address
from kvpool.proxy.table import Side

CLIENT_GONE = 499  # the status in log and metrics of a request whose client went away
KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "BadRequestError",
    415: "BadRequestError",
    429: "RateLimitError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def error_body(status: int, message: str) -> bytes:
    error = {"message": message, "type": KINDS.get(status, "InternalServerError"), "param": None, "code": status}
    return json.dumps({"error": error}, ensure_ascii=False).encode()


class FailureError(Exception):
    """What the client gets instead of an answer. ``again``: another instance may do better, ``address`` has failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        again: tuple[Side, Address] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message) if body is None else body
        self.headers = dict(headers or {"content-type": "application/json"})
        self.again = again


def busy(status: int, message: str, retry_after_s: int) -> FailureError:
    """Come back later: 429 or 503."""
    return FailureError(status, message, headers={"content-type": "application/json", "retry-after": str(retry_after_s)})


class UnreachableError(Exception):
    """No connection: the request has not been sent."""
