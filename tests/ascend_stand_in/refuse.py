"""When the stand-in must not run: beside a real driver, or where a MetaService of somebody else would meet it."""

from __future__ import annotations

import fcntl
from pathlib import Path

DRIVER_SIGNS = (
    Path("/usr/local/Ascend/driver"),
    Path("/etc/ascend_install.info"),
    Path("/dev/davinci0"),
    Path("/dev/davinci_manager"),
)
META_SERVICE_LOCK = Path("/tmp/mmc_meta_service.lock")


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


def meta_service_runs() -> bool:
    """Whether a process holds the lock that every MetaService of a host takes."""
    try:
        file = META_SERVICE_LOCK.open("r+b")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(file, fcntl.LOCK_UN)
        return False
