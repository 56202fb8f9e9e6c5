"""Services of the stores, for trial and test on one host: ``service(backend)`` starts, stops and shows one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from kvpool.ops.services.base import LOOPBACK, Running, Service, Started

BACKENDS = ("mooncake", "memcache", "yuanrong")


def service(
    backend: str,
    *,
    dram_bytes: int = 1 << 30,
    engine_dram_bytes: int = 0,
    tenants: Mapping[str, str] | None = None,
    discovery: str = "metastore",
    host: str = LOOPBACK,
    sockets_in: str | None = None,
) -> Service:
    """The service of a store, which gives ``dram_bytes`` to the pool and listens on ``host``; with 0 each engine rank gives
    ``engine_dram_bytes`` (not with Yuanrong). ``tenants`` (name: quota) are Mooncake's, ``discovery`` is Yuanrong's. Its unix
    sockets lie in ``sockets_in`` (None: the temporary folder). ValueError for an unknown name, and for what another store has."""
    if backend not in BACKENDS:
        raise ValueError(f"there is no service for {backend!r} (accepted: {', '.join(BACKENDS)})")
    if tenants and backend != "mooncake":
        raise ValueError(f"tenants: only mooncake has them, not {backend}")
    if discovery != "metastore" and backend != "yuanrong":
        raise ValueError(f"discovery: only yuanrong has it, not {backend}")
    if backend == "mooncake":
        from kvpool.ops.services.mooncake import MooncakeService

        return MooncakeService(dram_bytes=dram_bytes, engine_dram_bytes=engine_dram_bytes, tenants=tenants or {}, host=host)
    if backend == "memcache":
        from kvpool.ops.services.memcache import MemcacheService

        return MemcacheService(dram_bytes=dram_bytes, engine_dram_bytes=engine_dram_bytes, host=host)
    from kvpool.ops.services.yuanrong import Discovery, YuanrongService

    memory_mb = max(1, dram_bytes >> 20)
    checked = cast(Discovery, discovery)  # by the service
    return YuanrongService(memory_mb=memory_mb, discovery=checked, host=host, sockets_in=sockets_in)


def default_folder(backend: str) -> Path:
    """Where a service lies when nobody says otherwise: of this user, kept across logins."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvpool" / "services" / backend


__all__ = ["BACKENDS", "Running", "Service", "Started", "default_folder", "service"]
