"""Which store an AscendStoreConnector uses, and why. A node that lost one variable must not fall into a private pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvpool.options.ascend_store import BackendName
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import JSON

CONFIG_VARIABLE: dict[BackendName, str] = {
    "mooncake": "MOONCAKE_CONFIG_PATH",
    "memcache": "MMC_LOCAL_CONFIG_PATH",
    "yuanrong": "YR_CONFIG_PATH",
}
_HINTS: dict[str, BackendName] = {
    "MMC_LOCAL_CONFIG_PATH": "memcache",
    "YR_CONFIG_PATH": "yuanrong",
    "DS_WORKER_ADDR": "yuanrong",
}
_NEEDS_MOONCAKE_FILE = ("MOONCAKE_MASTER", "MOONCAKE_GLOBAL_SEGMENT_SIZE")


class Choice(NamedTuple):
    backend: BackendName
    reason: str
    source: str
    warning: str | None = None


def choose_backend(configured: BackendName | None, kv_role: str, env: Mapping[str, str], where: str = "") -> Choice:
    """The configured backend, else the one that the environment shows; OptionError where it shows another or too little."""
    if configured is not None:
        return Choice(configured, "set by the key backend", JSON)
    for variable, backend in _HINTS.items():
        if env.get(variable):
            reason = f'is not set, but {variable} is: set "backend": "{backend}", or unset {variable}'
            raise OptionError("backend", UNSET, reason, where=where)
    if env.get("MOONCAKE_CONFIG_PATH"):
        reason = "MOONCAKE_CONFIG_PATH is set and backend is not"
        return Choice("mooncake", reason, "environment MOONCAKE_CONFIG_PATH", f"backend is mooncake: {reason}")
    for variable in _NEEDS_MOONCAKE_FILE:
        if env.get(variable):
            reason = f'is not set; {variable} is, but MOONCAKE_CONFIG_PATH is missing: set it, or set "backend" explicitly'
            raise OptionError("backend", UNSET, reason, where=where)
    if kv_role != "kv_both":
        reason = (
            f'is not set and neither is MOONCAKE_CONFIG_PATH: a {kv_role} shares its pool; set one ("backend": "local" is a choice)'
        )
        raise OptionError("backend", UNSET, reason, where=where)
    reason = "neither backend nor MOONCAKE_CONFIG_PATH is set"
    return Choice("local", reason, "default", f"backend is local (a pool of this host): {reason}")
