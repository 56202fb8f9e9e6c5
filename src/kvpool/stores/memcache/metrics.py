"""The MetaService over HTTP: how full the pool is, and which keys it has. The library itself has no call for either."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from kvpool.options.configfile import read_text
from kvpool.options.errors import OptionError
from kvpool.options.memcache_conf import read_meta_conf

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
MOST_BYTES = 256 << 20


class Usage(NamedTuple):
    """Bytes of the pool's host memory, of all processes together."""

    capacity: int
    used: int


def metrics_url(env: Mapping[str, str], meta_service_url: str) -> str | None:
    """Where the MetaService tells about itself, by the file that MMC_META_CONFIG_PATH names. None where there is no such file here,
    or it is of another MetaService, or has another scheme than http."""
    path = env.get("MMC_META_CONFIG_PATH")
    if not path:
        return None
    try:
        options = read_meta_conf(read_text(path, "MMC_META_CONFIG_PATH"), path).options
    except OptionError as error:
        logger.warning("kvpool: %s: MemCache cannot tell how full it is", error)
        return None
    url = options.metrics_url
    return url if options.meta_service_url == meta_service_url and url and url.startswith("http://") else None


class MetaHttp:
    """``url`` is metrics_url of mmc-meta.conf, with http. Every call raises OSError where there is no usable answer in time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"ock.mmc.meta_service.metrics_url={url} cannot be asked (accepted: http://<host>:<port>)")
        self._host, self._port = parts.hostname, parts.port or 8000

    def usage(self) -> Usage:
        try:
            memory = json.loads(self._get("/api/v1/capacity/usage"))["cpu"]
            capacity = max(int(memory["total_bytes"]), 0)
            return Usage(capacity, min(max(int(memory["used_bytes"]), 0), capacity))
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(f"the MetaService does not tell how full it is: {error!r}") from None

    def keys(self, prefix: bytes) -> list[bytes]:
        """Also keys that are being written."""
        return [key for line in self._get("/get_all_keys").splitlines() if (key := line.strip()) and key.startswith(prefix)]

    def _get(self, path: str) -> bytes:
        """The connection must stay open until the answer is there: asked to close it, the MetaService never sends the body."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            content = answer.read(MOST_BYTES)
        except http.client.HTTPException as error:
            raise OSError(f"{path}: {error!r}") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"{path}: status {answer.status}")
        return content
