"""The disk tier of Mooncake: a directory per rank, buckets that suit the memory, and the pause after a crash.

What a client had on disk is found again only by one that starts after the master has forgotten the old one (``client_ttl``). A
sooner start would lose all of it, so a process that died leaves the time of its last sign of life, and the next one waits.
A directory has one user at a time: it is locked from ``arguments`` until ``good_bye`` or ``let_go``.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_ssd import BUCKET, BUFFER, DEFAULTS, HEARTBEAT, USABLE, client_ttl_s
from kvpool.stores.context import StoreContext

logger = logging.getLogger(__name__)

ALIVE = "kvpool-alive"
LOCK = "kvpool-lock"
ALIVE_S = 1.0
_BUCKET_RANGE = (4 << 20, 256 << 20)
_guard = threading.Lock()
_held: dict[Path, int] = {}  # folders of this process -> descriptor that has the lock


def folder_of(options: MooncakeOptions, context: StoreContext) -> Path:
    """By global rank, owners by their own number: processes that shared a folder would overwrite each other's buckets."""
    kind = "owner" if context.role == "owner" else "rank"
    return Path(options.ssd_offload_path or "") / f"{kind}_{context.rank}"


def arguments(options: MooncakeOptions, context: StoreContext, env: Mapping[str, str]) -> dict[str, object]:
    """What setup needs for the disk tier; makes the folder, locks it, sets what Mooncake reads from the environment, waits after a
    crash. ValueError where another process uses the folder; after any error it is not locked.

    A bucket is written only when it is full: of a pool that holds few buckets most would be evicted before it got to the disk."""
    folder = folder_of(options, context)
    folder.mkdir(mode=0o700, exist_ok=True)
    _lock(folder)
    low, high = _BUCKET_RANGE
    os.environ.setdefault(BUCKET, str(max(low, min(high, options.global_segment_size // 8))))
    os.environ.setdefault(HEARTBEAT, "1")
    try:
        _wait_for_the_dead(folder, env)
    except BaseException:
        let_go(folder)
        raise
    return {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}


def read_limit(env: Mapping[str, str], threads: int) -> int:
    """Bytes of one get, so that ``threads`` of them fit into the read buffer together."""
    return max(1, int(int(env.get(BUFFER) or DEFAULTS[BUFFER]) * USABLE) // threads)


def sign_of_life(folder: Path) -> None:
    with suppress(OSError):
        (folder / ALIVE).write_text(str(time.time()))


def good_bye(folder: Path) -> None:
    """Closed in order: the master has forgotten this client."""
    with suppress(OSError):
        (folder / ALIVE).unlink(missing_ok=True)
    let_go(folder)


def _lock(folder: Path) -> None:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ValueError(
            f"the folder {folder} of the disk tier is in use: give each engine and owner an ssd_offload_path of its own"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    with _guard:
        _held[folder] = fd


def let_go(folder: Path) -> None:
    """Unlock a folder of this process. Idempotent."""
    with _guard:
        fd = _held.pop(folder, None)
    if fd is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the descriptor too
        os.close(fd)


def _wait_for_the_dead(folder: Path, env: Mapping[str, str]) -> None:
    ttl = client_ttl_s(env)
    try:
        left = min(float((folder / ALIVE).read_text()) + ttl + 2 * ALIVE_S - time.time(), ttl + 2 * ALIVE_S)
    except (OSError, ValueError):
        return
    if left > 0:
        logger.warning(
            "kvpool: the last user of %s ended without closing: waiting %.1f s for the master to forget it", folder, left
        )
        time.sleep(left)
