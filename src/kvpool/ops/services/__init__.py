"""Services of the stores, for trial and test on one host: ``service(backend)`` starts, stops and shows one."""

from __future__ import annotations

import os
from pathlib import Path

from kvpool.ops.services.base import Running, Service, Started

BACKENDS = ("mooncake", "memcache", "yuanrong")


def service(backend: str) -> type[Service]:
    """The service of a store. ValueError for a name that is none."""
    if backend == "mooncake":
        from kvpool.ops.services.mooncake import MooncakeService

        return MooncakeService
    if backend == "memcache":
        from kvpool.ops.services.memcache import MemcacheService

        return MemcacheService
    if backend == "yuanrong":
        from kvpool.ops.services.yuanrong import YuanrongService

        return YuanrongService
    raise ValueError(f"there is no service for {backend!r} (accepted: {', '.join(BACKENDS)})")


def default_folder(backend: str) -> Path:
    """Where a service lies when nobody says otherwise: of this user, kept across logins."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvpool" / "services" / backend


__all__ = ["BACKENDS", "Running", "Service", "Started", "default_folder", "service"]
