"""The MetaService over HTTP: how full the pool is, and which keys it has. The library itself has no call for either."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

TIMEOUT_S = 1.0
MOST_BYTES = 256 << 20
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Usage(NamedTuple):
    """Bytes of the pool's host memory, of all processes together."""

    capacity: int
    used: int


class MetaHttp:
    """``url`` is metrics_url of mmc-meta.conf. Every call raises OSError where there is no usable answer in time."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def usage(self) -> Usage:
        memory = self._json("/api/v1/capacity/usage")["cpu"]
        capacity = max(int(memory["total_bytes"]), 0)
        return Usage(capacity, min(max(int(memory["used_bytes"]), 0), capacity))

    def keys(self, prefix: bytes) -> list[bytes]:
        lines = self._get("/get_all_keys").splitlines()
        return [key for line in lines if (key := line.strip()).startswith(prefix) and key]

    def _json(self, path: str) -> Any:
        try:
            return json.loads(self._get(path))
        except ValueError as error:
            raise OSError(f"{self._url}{path}: {error}") from None

    def _get(self, path: str) -> bytes:
        with _opener.open(self._url + path, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(MOST_BYTES)
        return content
