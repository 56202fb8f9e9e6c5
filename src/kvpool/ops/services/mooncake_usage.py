"""How full a pool of Mooncake is, and its tenants: asked of the master's metrics address. The library has no call for either."""

from __future__ import annotations

import http.client
import json
import re
from contextlib import closing
from typing import NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 5.0
MOST_BYTES = 64 << 20
TENANTS = "/api/v1/tenant_quotas"
NO_TENANTS = 409  # of a master that is not in strict mode


class TenantUse(NamedTuple):
    """Bytes. ``in_effect_bytes`` of the quota are granted: less where all quotas are more than the pool has."""

    tenant: str
    quota_bytes: int
    in_effect_bytes: int
    used_bytes: int


class PoolUse(NamedTuple):
    """Bytes of all clients together; the disk's are 0 without a disk tier. ``tenants``: None without strict mode."""

    capacity_bytes: int
    used_bytes: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    tenants: list[TenantUse] | None


def usage(metrics: str) -> PoolUse:
    """``metrics`` is the address, as http://<host>:<port>. OSError where it gives no usable answer in time."""
    status, text = _get(metrics, "/metrics")
    if status != 200:
        raise OSError(f"{metrics}/metrics: status {status}")
    capacity, used = _gauge(metrics, text, "master_total_capacity_bytes"), _gauge(metrics, text, "master_allocated_bytes")
    disk = _gauge(metrics, text, "master_total_file_capacity_bytes")
    return PoolUse(capacity, used, disk, _gauge(metrics, text, "master_allocated_file_size_bytes"), _tenants(metrics))


def _tenants(metrics: str) -> list[TenantUse] | None:
    status, text = _get(metrics, TENANTS)
    if status == NO_TENANTS:
        return None
    if status != 200:
        raise OSError(f"{metrics}{TENANTS}: status {status}")
    try:
        rows = [
            TenantUse(
                str(row["tenant_id"]),
                int(row["requested_quota_bytes"]),
                int(row["effective_quota_bytes"]),
                int(row["charged_bytes"]),
            )
            for row in json.loads(text)["data"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{metrics}{TENANTS}: an answer of another form: {error!r}") from None
    return sorted(rows)


def _gauge(metrics: str, text: str, name: str) -> int:
    found = re.search(rf"^{name} ([0-9.eE+]+)$", text, re.MULTILINE)
    if found is None:
        raise OSError(f"{metrics}/metrics: no {name}")
    return int(float(found[1]))


def _get(metrics: str, path: str) -> tuple[int, str]:
    parts = urlsplit(metrics)
    try:
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as link:
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.read(MOST_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{metrics}{path}: {error}") from None
