"""When the stand-in must not run: beside a real driver, or where a MetaService of somebody else would meet it."""

from __future__ import annotations

from pathlib import Path

from kvpool.ops.services.memcache import META_SERVICE_LOCK, meta_service_runs

DRIVER_SIGNS = (
    Path("/usr/local/Ascend/driver"),
    Path("/etc/ascend_install.info"),
    Path("/dev/davinci0"),
    Path("/dev/davinci_manager"),
)


def has_driver() -> bool:
    """Whether this host has a real driver, which the stand-in is not to replace."""
    return any(sign.exists() for sign in DRIVER_SIGNS)


def refusal() -> str | None:
    """Why not, in one line; None where it may run."""
    for sign in DRIVER_SIGNS:
        if sign.exists():
            return f"{sign} exists: this host has an Ascend driver, so the stand-in for it does not run here"
    if meta_service_runs():
        return f"a MetaService runs on this host ({META_SERVICE_LOCK} is locked): the stand-in does not run beside it"
    return None
